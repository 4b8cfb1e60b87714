"""Requests for the objects of one job: its pods, the objects beside them (Secret, ConfigMap, PodGroup, Service, disruption
budget, network policy), and its Workloads in a queue.

The result of a request counts as soon as it is answered. After a request without an answer it is unknown until it is looked up.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from holdfast.kubernetes import names
from holdfast.kubernetes.client.api import Api, ApiError, NoApiAnswer, Object
from holdfast.kubernetes.names import LABEL_QUEUE
from holdfast.kubernetes.objects import kueue, render
from holdfast.kubernetes.objects.check import check, convert
from holdfast.kubernetes.objects.kueue import Where, WorkloadSeen
from holdfast.kubernetes.objects.pod import pod_seen
from holdfast.kubernetes.objects.render import PodSetting
from holdfast.kubernetes.objects.resource import HoldfastJob
from holdfast.kubernetes.objects.schema import in_object
from holdfast.kubernetes.policy.plan import (
    DeletePod,
    DeleteWorkload,
    FindPod,
    FinishWorkload,
    LabelPod,
    MakeWorkload,
    QueueAction,
    ReleaseQuota,
    TellPlace,
    TellReady,
)
from holdfast.kubernetes.tasks.expectations import Expectations
from holdfast.protocol.wire.decoding import decode

_log = logging.getLogger(__name__)


class JobPods:
    """Requests for the job's pods. Each method raises ApiError and NoApiAnswer."""

    def __init__(
        self, api: Api, name: str, namespace: str, uid: str, expected: Expectations, wake: Callable[[], None]
    ) -> None:
        """wake: makes the job's task reconcile."""
        self._api, self._name, self._uid, self._expected, self._wake = api, name, uid, expected, wake
        self._folder = f"/api/v1/namespaces/{namespace}/pods"

    async def make(self, made: Object) -> None:
        """Creates a pod whose number has been written to the status."""
        name = made["metadata"]["name"]
        path = f"{self._folder}/{name}"
        try:
            # The previous request to create it had no answer, so the pod may exist. It is looked up by name, since a second
            # creation would be refused as a duplicate of our own pod.
            if name in self._expected.doubtful:
                self._saw(await self._api.get(path))
            else:
                self._saw(await self._api.create(self._folder, made))
            self._expected.refused = None
        except NoApiAnswer:
            self._expected.doubtful.add(name)
            raise
        except ApiError as error:
            # The pod does not exist, but the earlier request may still arrive. So the number is not used again: the late pod
            # would meet another one of its name.
            if name in self._expected.doubtful and error.status == 404:
                self._expected.burn(name)
                self._wake()
            elif error.reason == "AlreadyExists":
                self._saw(await self._api.get(path))
            else:
                self._expected.refused = f"{name}: {error}"
                raise

    async def find(self, action: FindPod) -> None:
        """Looks up a pod that the watch does not show."""
        try:
            pod = pod_seen(await self._api.get(f"{self._folder}/{action.name}"), self._name, self._uid)
        except ApiError as error:
            if error.status != 404:
                raise
            pod = None
        if pod is None:
            self._expected.pods.not_there(action.name)
        else:
            self._expected.saw(pod)
        self._wake()

    async def label(self, action: LabelPod, labels: Mapping[str, str]) -> None:
        """Restores labels that somebody has removed."""
        _log.warning("gives a pod its labels back", extra={"job": self._name, "pod": action.name})
        await self._change(action.name, {"uid": action.uid, "labels": labels})

    async def tell_place(self, action: TellPlace) -> None:
        """Annotates the pod with its machine's place."""
        # With its uid: a pod of the same name that somebody has created since may be on another machine.
        note = {"uid": action.uid, "annotations": {names.NOTE_PLACE: action.place}}
        await self._change(action.name, note)

    async def delete(self, action: DeletePod) -> None:
        """Deletes the pod with this uid, but not another one of the same name."""
        _log.info("deletes a pod: %s", action.reason, extra={"job": self._name, "pod": action.name})
        try:
            path = f"{self._folder}/{action.name}"
            await self._api.delete(path, action.uid, action.grace_s, action.version)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            if error.status == 409 and action.version is not None:
                # It has changed, and its new state must be known before anything else is decided about it.
                await self.find(FindPod(action.name))
                return
            self._expected.pods.gone(action.name, action.uid)
        else:
            self._expected.did(action)
        self._wake()

    async def _change(self, name: str, metadata: Object) -> None:
        """metadata: with the pod's uid."""
        try:
            self._saw(await self._api.merge(f"{self._folder}/{name}", {"metadata": metadata}))
        except ApiError as error:
            if error.status not in (404, 409) and not error.is_of_another:
                raise
            self._expected.pods.gone(name, metadata["uid"])

    def _saw(self, raw: Object) -> None:
        pod = pod_seen(raw, self._name, self._uid)
        name = raw["metadata"]["name"]
        if pod is None:
            # The name is taken by a pod that is not the job's, so another number is used.
            self._expected.burn(name)
            self._expected.refused = f"{name}: there is a pod of this name that is not this job's"
        else:
            self._expected.saw(pod)
        self._wake()


ACCEPTED_KEY = "accepted.json"
"""Key in the job's ConfigMap: the spec that the run was started with."""
QUEUE_KEY = "queue"
"""Key in the job's ConfigMap: the queue that admitted the run; absent: none."""
FOLDERS = {
    "Secret": ("/api/v1", "secrets"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Service": ("/api/v1", "services"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
}


class JobObjects:
    """The objects beside the job's pods.

    They are read at the start and before pods are created; in between, their state follows from the requests made here. Watching
    these kinds of objects instead would give the operator a copy of every Secret of the cluster.

    Attributes:
        known: whether they have been read and are still considered current, see `doubt`.
    """

    SURE_S = 5.0
    """Seconds for which what was read is considered current: the pods of a start are numbered in several batches."""

    def __init__(self, api: Api, name: str, namespace: str, uid: str) -> None:
        self._api, self._name, self._namespace, self._uid = api, name, namespace, uid
        self._there: dict[str, Object] = {}
        self._lost_token: str | None = None
        self._read_s = 0.0
        self.known = False

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of the objects that exist."""
        return frozenset(self._there)

    @property
    def token(self) -> str | None:
        """The job's token; None: there is no Secret."""
        if "Secret" not in self._there:
            return None
        return render.token_in(self._there["Secret"], NoApiAnswer)

    @property
    def service_term(self) -> int | None:
        """Term of the coordinator that the Service points to; None: there is no Service."""
        selector = self._there.get("Service", {}).get("spec", {}).get("selector", {})
        return int(selector[names.LABEL_TERM]) if names.LABEL_TERM in selector else None

    @property
    def group_members(self) -> int | None:
        """The PodGroup's minimum; None: there is none."""
        return render.group_members(self._there.get("PodGroup", {}))

    def accepted(self, raw: Object) -> HoldfastJob | None:
        """The job as its run was started; None: there is no run. raw: the job's current object."""
        text = self._there.get("ConfigMap", {}).get("data", {}).get(ACCEPTED_KEY)
        # Not checked again: it was checked when its run began, and a later version of the operator that accepts less must not
        # lose a run that an earlier one started.
        if text is None:
            return None
        # With the queue of the run's start, because quota that is held cannot be moved to another queue.
        labels = {LABEL_QUEUE: self._there["ConfigMap"]["data"].get(QUEUE_KEY, "")}
        metadata = {**raw["metadata"], "labels": labels}
        return decode(
            lambda spec: convert({**raw, "metadata": metadata, "spec": msgspec.json.decode(spec)}),
            text,
            f"{ACCEPTED_KEY} in the job's ConfigMap is damaged",
            error=NoApiAnswer,
        )

    def doubt(self) -> None:
        """Has the objects read again before pods are created, which need them: somebody may have deleted some in the meantime."""
        if time.monotonic() - self._read_s > self.SURE_S:
            self.known = False

    # ------------------------------------------------------------ requests: each raises ApiError and NoApiAnswer

    async def read(self, raw: Object) -> None:
        """Reads all of the objects. raw: the job's object."""
        began_s = time.monotonic()
        # Concurrently, because the replacement of a lost node waits for them.
        await asyncio.gather(*map(self._read, FOLDERS))
        # The kind of PodGroup depends on the scheduler: that of the run, or else of the next run.
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
            # The API is not served, or the operator lacks the permission. That is reported when the group is created, that is,
            # when it is needed.
            if error.status not in (403, 404):
                raise
            if error.status == 404:
                self._miss("PodGroup")

    def _miss(self, kind: str) -> None:
        """Forgets an object that somebody has deleted."""
        # Running pods, and their coordinator, have the token of the deleted Secret. With another token, pods that are created
        # from now on could not talk to them.
        if kind == "Secret" and self.token is not None:
            self._lost_token = self.token
        self._there.pop(kind, None)

    async def make(self, kind: str, job: HoldfastJob, term: int, setting: PodSetting) -> None:
        """Creates an object. term: of the coordinator that the Service is to point to."""
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
            raise NoApiAnswer(
                f"{kind} {path.rpartition('/')[2]} is there and not this job's; it is waited for its end"
            )

    async def point_service(self, term: int) -> None:
        """Points the Service to the coordinator of this term."""
        patch = {"spec": {"selector": {names.LABEL_TERM: str(term)}}}
        try:
            self._keep("Service", await self._api.merge(self._path("Service"), patch))
        except ApiError as error:
            if error.status == 404:
                self._miss("Service")  # the next look creates it
            raise

    async def size_group(self, members: int) -> None:
        """Sets the PodGroup's minimum. A group that is gone is created again by the next look."""
        version = self._there["PodGroup"]["apiVersion"]
        path = self._path("PodGroup")
        try:
            self._keep("PodGroup", await self._api.merge(path, render.resized_group(version, members)))
        except ApiError as error:
            if error.status != 404:
                raise
            self._miss("PodGroup")

    async def delete(self, kind: str) -> None:
        """Deletes an object. Idempotent."""
        try:
            await self._api.delete(self._path(kind), self._there[kind]["metadata"]["uid"])
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        self._there.pop(kind, None)

    def _keep(self, kind: str, there: Object) -> None:
        metadata = there["metadata"]
        # An object that is being deleted belongs to the run before; a scheduler's finalizer may keep it for a moment.
        is_ours = any(one.get("uid") == self._uid for one in metadata.get("ownerReferences", ()))
        if is_ours and "deletionTimestamp" not in metadata:
            self._there[kind] = there
        else:
            # It belongs to an earlier job of this name, and the garbage collector will remove it.
            self._there.pop(kind, None)

    def _group_path(self, job: HoldfastJob) -> str:
        version = render.GROUP_VERSIONS[job.spec.scheduling.gang or ""]
        return render.group_path(version, self._namespace, self._name)

    def _path(self, kind: str) -> str:
        if kind == "PodGroup":  # its API depends on the scheduler that it was made for
            return render.group_path(self._there[kind]["apiVersion"], self._namespace, self._name)
        group, plural = FOLDERS[kind]
        name = {
            "Secret": names.config_name(self._name),
            "ConfigMap": names.config_name(self._name),
            "Service": names.service_name(self._name),
        }.get(kind, self._name)
        return f"{group}/namespaces/{self._namespace}/{plural}/{name}"


def _not_served(api_version: str, job: HoldfastJob) -> ApiError:
    gang = job.spec.scheduling.gang or ""
    what = f"this cluster does not serve {api_version}: spec.scheduling.gang {gang} needs {render.GROUP_NEEDS[gang]}"
    return ApiError(404, "NotFound", what)


def _rendered(
    kind: str, job: HoldfastJob, term: int, setting: PodSetting, token: str | None
) -> Object | None:
    match kind:
        case "Secret":
            return render.secret(job, token or secrets.token_hex(32))
        case "ConfigMap":
            made = render.config_map(job)
            made["data"][ACCEPTED_KEY] = msgspec.json.encode(in_object(job.spec)).decode()
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


PATH = f"/apis/{kueue.API_VERSION}"


class JobQueue:
    """The job's Workloads, from answers and from the watch, whichever is newer.

    Attributes:
        unknown: why the Workloads are unknown; empty: they are known.
    """

    def __init__(self, api: Api, name: str, namespace: str, uid: str) -> None:
        self._api, self._name, self._uid = api, name, uid
        self._folder = f"{PATH}/namespaces/{namespace}/workloads"
        self._there: dict[str, Object] = {}
        self._gone: set[str] = set()
        self._flavors: dict[str, Object] = {}
        self.unknown = "they are not listed yet"

    @property
    def seen(self) -> Mapping[str, WorkloadSeen] | None:
        """The job's Workloads by name; None: unknown."""
        if self.unknown:
            return None
        read = (kueue.workload_seen(one, self._name, self._uid) for one in self._there.values())
        return {one.name: one for one in read if one is not None}

    def is_ours(self, raw: Object) -> bool:
        """Whether a Workload is this job's."""
        return kueue.workload_seen(raw, self._name, self._uid) is not None

    def put(self, raw: Object) -> None:
        """Takes in a version of a Workload. An older one than is known is ignored."""
        metadata = raw["metadata"]
        # An answer that left the server before the deletion would bring the Workload back, and its quota with it.
        if metadata["uid"] in self._gone or not self.is_ours(raw):
            return
        known = self._there.get(metadata["name"])
        if known is None or _version(raw) >= _version(known):
            self._there[metadata["name"]] = raw

    def gone(self, raw: Object) -> None:
        """Forgets a Workload that does not exist any more."""
        self._forget(raw["metadata"]["name"], raw["metadata"]["uid"])

    def listed(self, all_: Iterable[Object]) -> None:
        """Takes in a list of the Workloads of all jobs."""
        there = [one for one in all_ if self.is_ours(one)]
        uids = {one["metadata"]["uid"] for one in there}
        for known in list(self._there.values()):
            if known["metadata"]["uid"] not in uids:
                self.gone(known)
        for one in there:
            self.put(one)
        self.unknown = ""

    def _forget(self, name: str, uid: str) -> None:
        self._gone.add(uid)
        if (known := self._there.get(name)) is not None and known["metadata"]["uid"] == uid:
            del self._there[name]

    # ------------------------------------------------------------ requests

    async def do(self, action: QueueAction, job: HoldfastJob | None, setting: PodSetting) -> None:
        """Carries out an action. Idempotent. Raises ApiError and NoApiAnswer."""
        match action:
            case MakeWorkload(number, nodes):
                assert job is not None, "a plan that asks for quota is of a job that can run"
                priority, near = await self._priority(job, number), await self._near(job, number)
                await self._make(kueue.workload(job, number, nodes, priority, setting, near))
            case DeleteWorkload(name=name, uid=uid):
                await self._delete(name, uid)
            case ReleaseQuota(name) if name in self._there:
                # The version that was observed is given back. The next admission may choose other flavors.
                await self._write(name, kueue.released(self._there[name], self._api.now_s()))
            case FinishWorkload(name, succeeded) if name in self._there:
                await self._write(name, kueue.finished(self._there[name], succeeded, self._api.now_s()))
            case TellReady(name) if name in self._there:
                await self._write(name, kueue.pods_ready(self._there[name], self._api.now_s()))

    async def where(self, workload: str, role: str) -> Where:
        """What the admission of a Workload adds to its pods of a role. Raises ApiError and NoApiAnswer."""
        made = self._there.get(workload, {})
        flavors = [await self._flavor(name) for name in kueue.flavors_of(made, role)]
        return kueue.where(made, flavors, role)

    async def _flavor(self, name: str) -> Object:
        # Cached, since nothing that matters here can be changed in a flavor that is in use.
        if name not in self._flavors:
            self._flavors[name] = await self._api.get(f"{PATH}/resourceflavors/{name}")
        return self._flavors[name]

    async def _priority(self, job: HoldfastJob, number: int | None) -> tuple[str, int] | None:
        name = kueue.priority_class(job, number)
        if name is None:
            return None
        found = await self._api.get(f"{PATH}/workloadpriorityclasses/{name}")
        return name, int(found["value"])

    async def _near(self, job: HoldfastJob, number: int | None) -> Mapping[str, str]:
        """Labels that keep a further node near the others: Kueue places each Workload separately, so a required topology level is
        fixed to the value that the base Workload's nodes have."""
        asked = job.spec.scheduling.queue_topology
        if number is None or asked is None or asked.required is None:
            return {}
        base = self._there.get(names.workload_name(self._name, None), {})
        for domain in kueue.domains_of(base, names.NODE_ROLE):
            if (found := await self._value(domain, asked.required)) is not None:
                return {asked.required: found}
        return {}

    async def _value(self, domain: Mapping[str, str], label: str) -> str | None:
        if label in domain or names.LABEL_HOST not in domain:
            return domain.get(label)
        by_name = {"fieldSelector": f"metadata.name={domain[names.LABEL_HOST]}"}
        machines = (await self._api.list_all("/api/v1/nodes", by_name))[0]
        return next(((one["metadata"].get("labels") or {}).get(label) for one in machines), None)

    async def _make(self, made: Object) -> None:
        try:
            self.put(await self._api.create(self._folder, made))
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            there = await self._api.get(f"{self._folder}/{made['metadata']['name']}")
            self.put(there)
            if not self.is_ours(there):
                raise ApiError(
                    409,
                    "AlreadyExists",
                    f"the Workload {made['metadata']['name']} is there and not this job's; it is waited for its end",
                ) from None

    async def _delete(self, name: str, uid: str) -> None:
        try:
            there = await self._api.delete(f"{self._folder}/{name}", uid)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            self._forget(name, uid)
        else:
            # A finalizer may keep it: then it still exists, with a deletion time.
            if there.get("metadata", {}).get("deletionTimestamp"):
                self.put(there)
            else:
                self._forget(name, uid)

    async def _write(self, name: str, patch: Object) -> None:
        try:
            self.put(await self._api.merge(f"{self._folder}/{name}/status", patch))
        except ApiError as error:
            # Kueue has changed it in the meantime, so the new version is read.
            if error.status == 409:
                self.put(await self._api.get(f"{self._folder}/{name}"))
            elif error.status != 404:
                raise


def has_queue(raw: Object) -> bool:
    """Whether a job's object names a queue."""
    return bool((raw["metadata"].get("labels") or {}).get(names.LABEL_QUEUE))


def _version(raw: Object) -> int:
    return int(raw["metadata"]["resourceVersion"])
