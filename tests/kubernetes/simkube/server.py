"""An API server as its clients see it: it may refuse, answer late or not at all, and its watches are behind or cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.engines.kubernetes.observed import PodSeen, WorkloadSeen
from holdfast.engines.kubernetes.resource import HoldfastJob
from holdfast.engines.kubernetes.status import JobStatus


class Conflict(Exception):
    """The object is another one than the request was made for."""


class NotFound(Exception):
    pass


class Exists(Exception):
    pass


class NoAnswer(Exception):
    """Nobody knows whether it was done."""


@dataclass
class JobObject:
    """The HoldfastJob, with what an operator reads of it."""

    job: HoldfastJob
    version: int = 1
    generation: int = 1
    finalizer: bool = False
    deleted_s: float | None = None
    status: JobStatus = field(default_factory=JobStatus)


class Server:
    """Truth, and a log of its changes that watchers read at their own pace."""

    def __init__(self, dice: random.Random, job: HoldfastJob) -> None:
        self.dice = dice
        self.object: JobObject | None = JobObject(job)
        self.pods: dict[str, PodSeen] = {}
        self.beside: dict[str, Any] = {}
        self.workloads: dict[str, WorkloadSeen] = {}
        self.versions: dict[str, int] = {}
        self.log: list[tuple[str, PodSeen]] = []
        self.made: list[str] = []
        self.down = False
        self.trouble = 0.0
        self._uid = 0
        self.on_delete: Callable[[PodSeen, str], None] = lambda pod, reason: None
        self.on_make: Callable[[PodSeen], None] = lambda pod: None

    def call(self, do: Callable[[], Any]) -> Any:
        """A request with its risks: not done, done and unanswered, or done and answered."""
        if self.down:
            raise NoAnswer
        luck = self.dice.random()
        if luck < self.trouble / 2:
            raise NoAnswer
        answer = do()
        if luck < self.trouble:
            raise NoAnswer
        return answer

    # ------------------------------------------------------------ pods

    def make_pod(self, pod: PodSeen) -> PodSeen:
        if self.object is None:
            raise NotFound
        if pod.name in self.pods:
            raise Exists
        self._uid += 1
        made = msgspec.structs.replace(pod, uid=f"pod-{self._uid}")
        self.made.append(made.name)
        self.on_make(made)
        self._set(made)
        return self.pods[made.name]

    def change(self, name: str, **fields: Any) -> None:
        self._set(msgspec.structs.replace(self.pods[name], **fields))

    def delete_pod(self, name: str, uid: str, reason: str) -> PodSeen:
        pod = self.pods.get(name)
        if pod is None:
            raise NotFound
        if pod.uid != uid:
            raise Conflict
        self.on_delete(pod, reason)
        if not pod.deleting:
            self.change(name, deleting=True)
        return self.pods[name]

    def remove(self, name: str) -> None:
        """The kubelet has confirmed the end, or nobody was ever bound to it."""
        pod = self.pods.pop(name)
        self.log.append(("gone", pod))

    def _set(self, pod: PodSeen) -> None:
        pod = msgspec.structs.replace(pod, version=len(self.log) + 1)
        self.pods[pod.name] = pod
        self.log.append(("is", pod))

    # ------------------------------------------------------------ Kueue's Workloads

    def make_workload(self, made: WorkloadSeen) -> None:
        if self.object is None:
            raise NotFound
        if made.name not in self.workloads:
            self._uid += 1
            self.workloads[made.name] = msgspec.structs.replace(made, uid=f"workload-{self._uid}")
            self._count(made.name)

    def change_workload(self, name: str, version: int | None = None, **fields: Any) -> None:
        if name not in self.workloads:
            raise NotFound
        if version is not None and self.versions[name] != version:
            raise Conflict
        self.workloads[name] = msgspec.structs.replace(self.workloads[name], **fields)
        self._count(name)

    def delete_workload(self, name: str, uid: str | None = None) -> None:
        if name not in self.workloads or (uid is not None and self.workloads[name].uid != uid):
            raise NotFound
        del self.workloads[name]

    def _count(self, name: str) -> None:
        self._uid += 1
        self.versions[name] = self._uid

    # ------------------------------------------------------------ the job

    def change_job(self, change: Callable[[JobObject], None], version: int | None = None) -> JobObject:
        if self.object is None:
            raise NotFound
        if version is not None and version != self.object.version:
            raise Conflict
        changed = JobObject(**vars(self.object))
        change(changed)
        changed.version += 1
        self.object = changed
        if changed.deleted_s is not None and not changed.finalizer:
            self.collect()
        return changed

    def collect(self) -> None:
        """The object goes, and the garbage collector asks for the end of what it owned."""
        self.object = None
        self.beside.clear()
        self.workloads.clear()
        for pod in list(self.pods.values()):
            if not pod.deleting:
                self.change(pod.name, deleting=True)
