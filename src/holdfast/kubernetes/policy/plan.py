"""What is decided from, `Observed`, and what is decided, `Plan`. Values only.

Each action is done once or many times with the same result, so an answer that was lost does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast.kubernetes.objects.check import Problem
from holdfast.kubernetes.objects.kueue import WorkloadSeen
from holdfast.kubernetes.objects.machine import MachineSeen, Mark, Marking
from holdfast.kubernetes.objects.pod import PodSeen
from holdfast.kubernetes.objects.resource import HoldfastJob
from holdfast.kubernetes.objects.status import JobStatus
from holdfast.protocol.engine_orders import Availability, EngineOrder
from holdfast.protocol.network.endpoint import Hearing
from holdfast.protocol.notices import NoticeCause


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as the coordinator has it."""

    alive: bool
    trains: bool = False
    leaves: bool = False


class Released(msgspec.Struct, frozen=True):
    """A node that the coordinator gave up, as this operator has known it."""

    for_s: float
    """For how long."""
    restarts: int
    """How often its container had been started anew when the operator heard of it."""


class CoordinatorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator of a term last said."""

    term: int
    phase: str
    """A `coordinator.kernel.state.JobPhase`."""
    wanted: int
    """Nodes altogether, spares included."""
    orders: tuple[EngineOrder, ...] = ()
    nodes: Mapping[str, NodeReport] = {}
    outcome: str | None = None
    reason: str | None = None
    step: int | None = None
    loss: float | None = None
    goodput: float | None = None
    level: int | None = None
    incidents: int | None = None
    open_incidents: int | None = None
    last_incident: str | None = None
    snapshot: str | None = None
    checkpoint: str | None = None
    asks: tuple[str, ...] = ()
    """What people are asked for."""
    bad_machines: frozenset[str] = frozenset()
    """In quarantine."""

    @property
    def alive(self) -> frozenset[str]:
        """Nodes that have joined and are not lost."""
        return frozenset(name for name, node in self.nodes.items() if node.alive)


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `reconcile` looks at."""

    job: HoldfastJob | None
    """As the object has it now; None: it cannot work, see `problems`."""
    accepted: HoldfastJob | None = None
    """What the current run was started with; None: there is none."""
    problems: tuple[Problem, ...] = ()
    refused: str | None = None
    """What the API server said of the job's pods when it refused them."""
    generation: int = 1
    finalizer: bool = False
    """The object has ours."""
    deleted_s: float | None = None
    """When its deletion was asked for; None: it was not."""
    skip_save: bool = False
    """The person who deletes it does not want its state saved."""
    status: JobStatus = JobStatus()
    pods: tuple[PodSeen, ...] = ()
    machines: Mapping[str, MachineSeen] = {}
    workloads: Mapping[str, WorkloadSeen] | None = None
    """By name, where the job is in a queue; None: unknown."""
    no_workloads: str = ""
    """Why they are unknown."""
    objects: frozenset[str] = frozenset()
    """Kinds of what stands beside the pods and is there: Secret, ConfigMap, ..."""
    service_term: int | None = None
    """Where the Service points to."""
    group_members: int | None = None
    """Nodes that the job's PodGroup has bound together; None: there is no group, or it does not say so."""
    granted: frozenset[str] = frozenset()
    """Names of pods that this operator has numbered and not yet made."""
    absent: frozenset[str] = frozenset()
    """Names of pods of which the API server has said that they are not there. A name does not come again."""
    told: frozenset[str] = frozenset()
    """Nodes of which this term's coordinator was told that they are going or gone."""
    said: CoordinatorReport | None = None
    """None: it does not answer now."""
    released: Mapping[str, Released] = {}
    """By name, the nodes of the open orders that give nodes up."""
    asked_nodes: int | None = None
    """The size that this operator has asked this run's coordinator for; None: it has not asked. The status has what was asked before."""
    refused_resize: str | None = None
    """Why it did not take it."""
    marking: Marking = "none"
    """What of a mark the site wants on a machine."""
    most_marked_percent: int = 5
    """Of the cluster's machines, at once."""
    no_marks: str | None = None
    """Why no machine can be marked; None: one can."""
    hearings: Mapping[str, Hearing | None] = {}
    """What nodes that were asked say of the coordinator; None: no answer. Empty: none was asked, since it answers."""
    silent_s: float = 0.0
    """For how long this operator has asked the coordinator in vain, whose pod runs."""
    now_s: float = 0.0
    """UTC."""


# ------------------------------------------------------------ what is decided


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
