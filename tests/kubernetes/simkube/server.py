"""An API server as its clients see it: it may refuse, answer late or not at all, and its watches are behind or cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.kubernetes.objects.kueue import WorkloadSeen
from holdfast.kubernetes.objects.pod import PodSeen
from holdfast.kubernetes.objects.resource import HoldfastJob
from holdfast.kubernetes.objects.status import JobStatus


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

    @property
    def uid(self) -> str:
        return self.job.id.uid


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
        self.owners: dict[str, str] = {}
        """Uid of a pod to that of its job."""
        self.left: set[str] = set()
        """Kinds of objects of a job before this one, which the garbage collector has not come to yet."""
        self.on_delete: Callable[[PodSeen, str, str], None] = lambda pod, reason, by: None
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

    def is_mine(self, pod: PodSeen) -> bool:
        """It is of the job that there is now, and of none of its name before."""
        return self.object is not None and self.owners[pod.uid] == self.object.uid

    def mine(self) -> list[PodSeen]:
        """The pods of the job that there is now."""
        return [pod for pod in self.pods.values() if self.is_mine(pod)]

    def make_pod(self, pod: PodSeen, owner: str) -> PodSeen:
        """owner: the job's uid. The API server asks nobody whether there is one."""
        if pod.name in self.pods:
            raise Exists
        self._uid += 1
        made = msgspec.structs.replace(pod, uid=f"pod-{self._uid}")
        self.owners[made.uid] = owner
        self.made.append(f"{owner}/{made.name}")
        self.on_make(made)
        self._set(made)
        return self.pods[made.name]

    def change(self, name: str, **fields: Any) -> None:
        self._set(msgspec.structs.replace(self.pods[name], **fields))

    def delete_pod(self, name: str, uid: str, reason: str, by: str, version: int | None = None) -> PodSeen:
        """by: uid of the job whose operator asks."""
        pod = self.pods.get(name)
        if pod is None:
            raise NotFound
        if pod.uid != uid or version not in (None, pod.version):
            raise Conflict
        self.on_delete(pod, reason, by)
        if not pod.deleting:
            self.change(name, deleting=True)
        return self.pods[name]

    def remove(self, name: str) -> None:
        """The kubelet has confirmed the end, or nobody was ever bound to it."""
        pod = self.pods.pop(name)
        if not pod.mislabelled:  # watches have lost it before
            self.log.append(("gone", pod))

    def listed(self) -> list[PodSeen]:
        """Those that have the label by which they are asked for."""
        return [pod for pod in self.pods.values() if not pod.mislabelled]

    def unlabel(self, name: str) -> None:
        """Somebody takes a pod's labels away: for its watches it is gone."""
        if not self.pods[name].mislabelled:
            self.log.append(("gone", self.pods[name]))
            self.pods[name] = msgspec.structs.replace(self.pods[name], mislabelled=True)

    def label_pod(self, name: str, uid: str) -> PodSeen:
        pod = self.pods.get(name)
        if pod is None:
            raise NotFound
        if pod.uid != uid:
            raise Conflict
        self.change(name, mislabelled=False)
        return self.pods[name]

    def _set(self, pod: PodSeen) -> None:
        pod = msgspec.structs.replace(pod, version=len(self.log) + 1)
        self.pods[pod.name] = pod
        if not pod.mislabelled:
            self.log.append(("is", pod))

    # ------------------------------------------------------------ Kueue's Workloads

    def make_beside(self, kind: str, owner: str, value: Any) -> None:
        """What stands beside the pods. Where another job's has the name, it is waited for."""
        if kind in self.left:
            raise NoAnswer
        if self.object is None or owner != self.object.uid:
            self.left.add(kind)
        else:
            self.beside.setdefault(kind, value)

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
        # Of all objects that there ever were: what was meant for one is not taken for the next.
        self._uid += 1
        changed.version = self._uid
        self.object = changed
        if changed.deleted_s is not None and not changed.finalizer:
            self.collect()
        return changed

    def collect(self) -> None:
        """The object goes, and the garbage collector asks for the end of what it owned."""
        self.object = None
        self.left |= set(self.beside)
        self.beside.clear()
        self.workloads.clear()

    def collect_some(self) -> None:
        """The garbage collector comes to what has no owner, one after the other."""
        for kind in sorted(self.left):
            if self.dice.random() < 0.5:
                self.left.discard(kind)
        for pod in list(self.pods.values()):
            if not self.is_mine(pod) and not pod.deleting and self.dice.random() < 0.5:
                self.change(pod.name, deleting=True)

    def make_again(self, job: HoldfastJob) -> None:
        """A person makes a job of the name of one that is gone."""
        assert self.object is None
        self._uid += 1
        self.object = JobObject(job, version=self._uid)
