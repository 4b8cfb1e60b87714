"""What stands beside the pods of one job: its Secret, ConfigMap, PodGroup, Service, budget and network policy. What is there, and
requests."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time

import msgspec

from holdfast.kubernetes import names, pod_group, render
from holdfast.kubernetes.api import Api, ApiError, NoAnswer, Object
from holdfast.kubernetes.check import check, convert
from holdfast.kubernetes.names import LABEL_QUEUE
from holdfast.kubernetes.render import Setting
from holdfast.kubernetes.resource import HoldfastJob
from holdfast.protocol.wire.decoding import decode

ACCEPTED_KEY = "accepted.json"
"""In the job's ConfigMap: the object's spec, as the run was started with it."""
QUEUE_KEY = "queue"
"""There as well: the queue that let the run in; absent: none."""
FOLDERS = {
    "Secret": ("/api/v1", "secrets"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Service": ("/api/v1", "services"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
}


def _token(secret: Object) -> str:
    token: str = secret["data"][names.TOKEN_FILE]
    return base64.b64decode(token).decode()


class JobObjects:
    """Read at first and whenever pods are to be made, and kept up by what is done here between. Watching these kinds of objects
    instead would cost the operator a copy of every Secret of the cluster.

    Attributes:
        known: they were read, and no pod has been numbered since.
    """

    SURE_S = 5.0
    """For so long what was read is believed: the pods of a start are numbered in many parts."""

    def __init__(self, api: Api, name: str, namespace: str, uid: str) -> None:
        self._api, self._name, self._namespace, self._uid = api, name, namespace, uid
        self._there: dict[str, Object] = {}
        self._lost_token: str | None = None
        self._read_s = 0.0
        self.known = False

    @property
    def kinds(self) -> frozenset[str]:
        """Of those that are there."""
        return frozenset(self._there)

    @property
    def token(self) -> str | None:
        """The job's; None: there is no Secret."""
        if "Secret" not in self._there:
            return None
        return decode(_token, self._there["Secret"], "the job's Secret is damaged", error=NoAnswer)

    @property
    def service_term(self) -> int | None:
        """Of the coordinator that the Service points to."""
        selector = self._there.get("Service", {}).get("spec", {}).get("selector", {})
        return int(selector[names.LABEL_TERM]) if names.LABEL_TERM in selector else None

    @property
    def group_members(self) -> int | None:
        """The PodGroup's minimum."""
        return pod_group.members_of(self._there.get("PodGroup", {}))

    def accepted(self, raw: Object) -> HoldfastJob | None:
        """The job as its run was started. raw: its object as it is now."""
        text = self._there.get("ConfigMap", {}).get("data", {}).get(ACCEPTED_KEY)
        # Not checked anew. It was when its run began; and a later version of the operator, which may take less, must
        # not lose a run that an earlier one began.
        if text is None:
            return None
        # Its queue as well: quota that is held cannot be moved to another one.
        labels = {LABEL_QUEUE: self._there["ConfigMap"]["data"].get(QUEUE_KEY, "")}
        metadata = {**raw["metadata"], "labels": labels}
        return decode(
            lambda spec: convert({**raw, "metadata": metadata, "spec": msgspec.json.decode(spec)}),
            text,
            f"{ACCEPTED_KEY} in the job's ConfigMap is damaged",
            error=NoAnswer,
        )

    def doubt(self) -> None:
        """Pods come next, and they need what is beside them: somebody may have deleted some of it meanwhile."""
        if time.monotonic() - self._read_s > self.SURE_S:
            self.known = False

    # ------------------------------------------------------------ requests: each raises ApiError and NoAnswer

    async def read(self, raw: Object) -> None:
        """All that there are. raw: the job's object."""
        began_s = time.monotonic()
        # At once: a lost node's successor waits for them.
        await asyncio.gather(*map(self._read, FOLDERS))
        # Which PodGroup it would be: the run's, or else the next one's.
        job = self.accepted(raw) or (None if check(raw) else convert(raw))
        if job is not None and job.spec.scheduling.gang is not None:
            await self._read_group(self._group_path(job))
        self.known, self._read_s = True, began_s

    async def _read(self, kind: str) -> None:
        try:
            there = await self._api.get(self._path(kind))
        except ApiError as error:
            if error.status != 404:
                raise
            self._miss(kind)
        else:
            self._keep(kind, there)

    async def _read_group(self, path: str) -> None:
        try:
            self._keep("PodGroup", await self._api.get(path))
        except ApiError as error:
            # Not served, or no right to it: it is said when it is to be made, which is when somebody needs it.
            if error.status not in (403, 404):
                raise
            if error.status == 404:
                self._miss("PodGroup")

    def _miss(self, kind: str) -> None:
        """Somebody has deleted it."""
        # Pods that run, and their coordinator, have the token of the Secret that is gone. Another one would part them from
        # all that are made from now on.
        if kind == "Secret" and self.token is not None:
            self._lost_token = self.token
        self._there.pop(kind, None)

    async def make(self, kind: str, job: HoldfastJob, term: int, setting: Setting) -> None:
        """term: of the coordinator that the Service is to point to."""
        made = _rendered(kind, job, term, setting, self._lost_token)
        if made is None:
            return
        path = self._group_path(job) if kind == "PodGroup" else self._path(kind)
        try:
            there = await self._api.create(path.rpartition("/")[0], made)
        except ApiError as error:
            if kind == "PodGroup" and error.status == 404:
                raise _not_served(made["apiVersion"], job) from error
            if error.reason != "AlreadyExists":
                raise
            there = await self._api.get(path)
        self._keep(kind, there)
        if kind not in self._there:
            raise NoAnswer(
                f"{kind} {path.rpartition('/')[2]} is there and not this job's; it is waited for its end"
            )

    async def point_service(self, term: int) -> None:
        """At the coordinator of this term."""
        patch = {"spec": {"selector": {names.LABEL_TERM: str(term)}}}
        try:
            self._keep("Service", await self._api.merge(self._path("Service"), patch))
        except ApiError as error:
            if error.status == 404:
                self._miss("Service")  # the next look makes it
            raise

    async def size_group(self, members: int) -> None:
        """Nothing where it is gone: it is made anew."""
        version = self._there["PodGroup"]["apiVersion"]
        path = self._path("PodGroup")
        try:
            self._keep("PodGroup", await self._api.merge(path, pod_group.resized(version, members)))
        except ApiError as error:
            if error.status != 404:
                raise
            self._miss("PodGroup")

    async def delete(self, kind: str) -> None:
        """Done twice it has the same result."""
        try:
            await self._api.delete(self._path(kind), self._there[kind]["metadata"]["uid"])
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        self._there.pop(kind, None)

    def _keep(self, kind: str, there: Object) -> None:
        metadata = there["metadata"]
        # One that is being deleted is of the run before: a scheduler's finalizer may hold it for a moment.
        is_ours = any(one.get("uid") == self._uid for one in metadata.get("ownerReferences", ()))
        if is_ours and "deletionTimestamp" not in metadata:
            self._there[kind] = there
        else:
            # A job of this name before this one had it; the garbage collector takes it away.
            self._there.pop(kind, None)

    def _group_path(self, job: HoldfastJob) -> str:
        version = pod_group.API_VERSIONS[job.spec.scheduling.gang or ""]
        return pod_group.path_of(version, self._namespace, self._name)

    def _path(self, kind: str) -> str:
        if kind == "PodGroup":  # of the scheduler that it was made for
            return pod_group.path_of(self._there[kind]["apiVersion"], self._namespace, self._name)
        group, plural = FOLDERS[kind]
        name = {
            "Secret": names.config_name(self._name),
            "ConfigMap": names.config_name(self._name),
            "Service": names.service_name(self._name),
        }.get(kind, self._name)
        return f"{group}/namespaces/{self._namespace}/{plural}/{name}"


def _not_served(api_version: str, job: HoldfastJob) -> ApiError:
    gang = job.spec.scheduling.gang or ""
    what = f"this cluster does not serve {api_version}: spec.scheduling.gang {gang} needs {pod_group.NEEDS[gang]}"
    return ApiError(404, "NotFound", what)


def _rendered(kind: str, job: HoldfastJob, term: int, setting: Setting, token: str | None) -> Object | None:
    match kind:
        case "Secret":
            return render.secret(job, token or secrets.token_hex(32))
        case "ConfigMap":
            made = render.config_map(job)
            made["data"][ACCEPTED_KEY] = msgspec.json.encode(job.spec).decode()
            if job.queue:
                made["data"][QUEUE_KEY] = job.queue
            return made
        case "PodGroup":
            return render.group(job)
        case "Service":
            return render.service(job, term)
        case "PodDisruptionBudget":
            return render.budget(job)
        case _:
            return render.network_policy(job, setting)
