"""The Workloads of one job: what the operator knows of them, and what it asks of Kueue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.kubernetes import kueue, names
from holdfast.kubernetes.actions import (
    DeleteWorkload,
    FinishWorkload,
    MakeWorkload,
    QueueAction,
    ReleaseQuota,
    TellReady,
)
from holdfast.kubernetes.api import Api, ApiError, Object
from holdfast.kubernetes.kueue import Where
from holdfast.kubernetes.observed import WorkloadSeen
from holdfast.kubernetes.render import Setting
from holdfast.kubernetes.resource import HoldfastJob

PATH = f"/apis/{kueue.API_VERSION}"


class JobQueue:
    """Answers and watches meet here, and the newer of two versions counts.

    Attributes:
        unknown: why nothing is known; empty: all Workloads are.
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
        """By name; None: unknown."""
        if self.unknown:
            return None
        read = (kueue.workload_seen(one, self._name, self._uid) for one in self._there.values())
        return {one.name: one for one in read if one is not None}

    def is_ours(self, raw: Object) -> bool:
        """Of this job's own."""
        return kueue.workload_seen(raw, self._name, self._uid) is not None

    def put(self, raw: Object) -> None:
        """A Workload is so, or was: an older version changes nothing."""
        metadata = raw["metadata"]
        # An answer that left before the deletion would bring it back, and its quota with it.
        if metadata["uid"] in self._gone or not self.is_ours(raw):
            return
        known = self._there.get(metadata["name"])
        if known is None or _version(raw) >= _version(known):
            self._there[metadata["name"]] = raw

    def gone(self, raw: Object) -> None:
        """It is not there any more."""
        self._forget(raw["metadata"]["name"], raw["metadata"]["uid"])

    def listed(self, all_: Iterable[Object]) -> None:
        """All that there are, of all jobs."""
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

    # ------------------------------------------------------------ what it asks

    async def do(self, action: QueueAction, job: HoldfastJob | None, setting: Setting) -> None:
        """Raises ApiError and NoAnswer. Done twice it has the same result."""
        match action:
            case MakeWorkload(number, nodes):
                assert job is not None, "a plan that asks for quota is of a job that can run"
                priority, near = await self._priority(job, number), await self._near(job, number)
                await self._make(kueue.workload(job, number, nodes, priority, setting, near))
            case DeleteWorkload(name=name, uid=uid):
                await self._delete(name, uid)
            case ReleaseQuota(name) if name in self._there:
                # What is known is what is given back. Its flavors may be others next time.
                await self._write(name, kueue.released(self._there[name], self._api.now_s()))
            case FinishWorkload(name, succeeded) if name in self._there:
                await self._write(name, kueue.finished(self._there[name], succeeded, self._api.now_s()))
            case TellReady(name) if name in self._there:
                await self._write(name, kueue.pods_ready(self._there[name], self._api.now_s()))

    async def where(self, workload: str, role: str) -> Where:
        """Where an admitted Workload wants its pods. Raises ApiError and NoAnswer."""
        made = self._there.get(workload, {})
        flavors = [await self._flavor(name) for name in kueue.flavors_of(made, role)]
        return kueue.where(made, flavors, role)

    async def _flavor(self, name: str) -> Object:
        # Kept: of a flavor that is in use nothing that matters here can be changed.
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
        """Kueue places each Workload by itself. What is required of all nodes is asked for with the value of those there."""
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
            # A finalizer of somebody's may hold it: then it is there, and going.
            if there.get("metadata", {}).get("deletionTimestamp"):
                self.put(there)
            else:
                self._forget(name, uid)

    async def _write(self, name: str, patch: Object) -> None:
        try:
            self.put(await self._api.merge(f"{self._folder}/{name}/status", patch))
        except ApiError as error:
            # Kueue has decided something since. It is looked at anew.
            if error.status == 409:
                self.put(await self._api.get(f"{self._folder}/{name}"))
            elif error.status != 404:
                raise


def has_queue(raw: Object) -> bool:
    """Whether an object asks for one."""
    return bool((raw["metadata"].get("labels") or {}).get(names.LABEL_QUEUE))


def _version(raw: Object) -> int:
    return int(raw["metadata"]["resourceVersion"])
