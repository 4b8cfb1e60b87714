"""What the operator may do for a job. Each is done once or many times with the same result, so an answer that was lost
does no harm."""

from __future__ import annotations

import msgspec

from holdfast.kubernetes.marks import Mark
from holdfast.kubernetes.status import JobStatus
from holdfast.protocol.engine_orders import Availability
from holdfast.protocol.notices import NoticeCause


class AddFinalizer(msgspec.Struct, frozen=True):
    """The object stays until the job's state is saved."""


class RemoveFinalizer(msgspec.Struct, frozen=True):
    """Nothing of the job is left that could be lost."""


# Before a pod is made its number is written down. An operator that dies in between leaves a gap; without it, the next
# one could give a number again whose first pod still runs behind a cut.
class Number(msgspec.Struct, frozen=True, kw_only=True):
    """Write the counters down: pods up to them may be made afterwards. Refused where the object has changed meanwhile."""

    run: int
    term: int
    next_number: int
    begins: bool = False
    """A run begins: its time counts from now."""


class MakeObject(msgspec.Struct, frozen=True):
    """Make what stands beside the pods."""

    kind: str
    """Secret, ConfigMap, PodGroup, Service, PodDisruptionBudget or NetworkPolicy."""


class PointService(msgspec.Struct, frozen=True):
    """Have the coordinator's name mean the pod of this term."""

    term: int


class SizeGroup(msgspec.Struct, frozen=True):
    """Have the PodGroup ask for so many nodes together, and no more."""

    members: int


class MakeNode(msgspec.Struct, frozen=True):
    """Make the pod of a node."""

    number: int
    avoid: frozenset[str] = frozenset()
    """Machines."""
    workload: str = ""
    """Whose quota it uses; empty: none's."""


class MakeCoordinator(msgspec.Struct, frozen=True):
    """Make the coordinator's pod of a term."""

    term: int
    avoid: frozenset[str] = frozenset()
    """Machines that are better not used: its predecessors were there."""


class FindPod(msgspec.Struct, frozen=True):
    """Ask for a pod by its name: the watch does not show it."""

    name: str


class LabelPod(msgspec.Struct, frozen=True, kw_only=True):
    """Give a pod the labels back that it is watched by, and that lead the job's traffic to it."""

    name: str
    uid: str


class TellPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Note on a node's pod where its machine stands. The kubelet shows the note to the agent, which needs no credentials for it."""

    name: str
    uid: str
    place: str


class DeletePod(msgspec.Struct, frozen=True, kw_only=True):
    """Delete the pod of this uid, and no other of its name."""

    name: str
    uid: str
    reason: str
    grace_s: int | None = None
    """None: the pod's own."""
    version: int | None = None
    """Only while it is as it was in this version of the object; None: however it is by then."""


class MakeWorkload(msgspec.Struct, frozen=True):
    """Ask Kueue for quota."""

    number: int | None
    """As `WorkloadSeen.number`."""
    nodes: int


class DeleteWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """The job needs this quota no more."""

    name: str
    uid: str


# The object as it was seen is what is given back: one that Kueue has admitted anew meanwhile has another version, and the
# write is refused.
class ReleaseQuota(msgspec.Struct, frozen=True):
    """Give the quota of an evicted Workload back: its pods are gone. Kueue may admit it again."""

    name: str


class FinishWorkload(msgspec.Struct, frozen=True):
    """Tell Kueue that the job is over, so the quota is free while the object stays."""

    name: str
    succeeded: bool


class TellReady(msgspec.Struct, frozen=True):
    """Tell Kueue that the Workload's pods are there: one that waits for that evicts it otherwise."""

    name: str


QueueAction = MakeWorkload | DeleteWorkload | ReleaseQuota | FinishWorkload | TellReady


class DeleteObject(msgspec.Struct, frozen=True):
    """Delete what stands beside the pods."""

    kind: str


class Tell(msgspec.Struct, frozen=True):
    """Post to the coordinator's `/engine`."""

    news: Availability
    about: str = ""
    """The node that it is about, or what befell it, so that it is told once."""


class MarkMachine(msgspec.Struct, frozen=True):
    """Have others avoid a machine, or stand for the job's mark on it anew."""

    machine: str
    mark: Mark


class UnmarkMachine(msgspec.Struct, frozen=True):
    """Take the job's mark back."""

    machine: str


class Warn(msgspec.Struct, frozen=True, kw_only=True):
    """Tell people, by an Event of the job."""

    reason: str
    """CamelCase, for programs."""
    text: str
    about: str
    """An order, a pod's uid, or a moment of the job: it is told once of each."""


class AskStop(msgspec.Struct, frozen=True):
    """Ask the coordinator to save the state and end the job."""

    reason: str
    cause: NoticeCause = NoticeCause.STOP
    """Comes back in the coordinator's last words, by which it is decided whether the job goes on later."""


class AskResize(msgspec.Struct, frozen=True):
    """Ask the coordinator for another size."""

    nodes: int


class DeleteJob(msgspec.Struct, frozen=True):
    """Its time after the end is over."""


Action = (
    AddFinalizer
    | RemoveFinalizer
    | Number
    | MakeObject
    | PointService
    | SizeGroup
    | MakeNode
    | MakeCoordinator
    | FindPod
    | LabelPod
    | TellPlace
    | DeletePod
    | DeleteObject
    | Tell
    | MarkMachine
    | UnmarkMachine
    | Warn
    | AskStop
    | AskResize
    | DeleteJob
    | QueueAction
)


class Plan(msgspec.Struct, frozen=True):
    """What is to be done now."""

    actions: tuple[Action, ...]
    status: JobStatus
    """How the object's status should be. Not written after a `Number`, which it does not know of: the next plan does."""
    look_again_s: float | None = None
    """When something is due by time alone; None: nothing is."""
