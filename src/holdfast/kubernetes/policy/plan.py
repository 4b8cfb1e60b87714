"""The input of a reconciliation, `Observed`, and its result, `Plan`. Values only.

Every action is idempotent, so a lost answer does no harm.
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
    """A node's state according to the coordinator."""

    alive: bool
    trains: bool = False
    leaves: bool = False


class Released(msgspec.Struct, frozen=True):
    """A node that the coordinator gave up, as this operator has observed it."""

    for_s: float
    """Seconds since this operator learned of it."""
    restarts: int
    """How often its container had been restarted when this operator learned of it."""


class CoordinatorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last report of the coordinator of a term."""

    term: int
    phase: str
    """A `coordinator.kernel.state.JobPhase`."""
    wanted: int
    """Number of nodes in total, spares included."""
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
    """Requests to people."""
    bad_machines: frozenset[str] = frozenset()
    """Machines that it has in quarantine."""

    @property
    def alive(self) -> frozenset[str]:
        """Nodes that have joined and are not lost."""
        return frozenset(name for name, node in self.nodes.items() if node.alive)


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `reconcile` decides from."""

    job: HoldfastJob | None
    """The object's job as it is now; None: it is invalid, see `problems`."""
    accepted: HoldfastJob | None = None
    """The job that the current run was started with; None: there is no run."""
    problems: tuple[Problem, ...] = ()
    refused: str | None = None
    """The API server's message if it refused one of the job's objects; None: it did not."""
    generation: int = 1
    finalizer: bool = False
    """Whether the object has Holdfast's finalizer."""
    deleted_s: float | None = None
    """When its deletion was requested, in UTC; None: it was not."""
    skip_save: bool = False
    """Whether the person who deletes it does not want its state saved."""
    status: JobStatus = JobStatus()
    pods: tuple[PodSeen, ...] = ()
    machines: Mapping[str, MachineSeen] = {}
    workloads: Mapping[str, WorkloadSeen] | None = None
    """The job's Workloads by name, if it is in a queue; None: unknown."""
    no_workloads: str = ""
    """Why the Workloads are unknown."""
    objects: frozenset[str] = frozenset()
    """Kinds of the objects beside the pods that exist: Secret, ConfigMap, ..."""
    service_term: int | None = None
    """Term of the coordinator that the Service points to."""
    group_members: int | None = None
    """Number of nodes that the job's PodGroup requires together; None: there is no group, or it has no such number."""
    granted: frozenset[str] = frozenset()
    """Names of pods that this operator has numbered and not yet created."""
    absent: frozenset[str] = frozenset()
    """Names of pods that do not exist according to the API server. A name is never used again."""
    told: frozenset[str] = frozenset()
    """Nodes that this term's coordinator has been told are leaving or gone."""
    said: CoordinatorReport | None = None
    """The coordinator's report; None: it does not answer now."""
    released: Mapping[str, Released] = {}
    """Nodes of the open release orders, by name."""
    asked_nodes: int | None = None
    """The size that this operator has requested from this run's coordinator; None: it has requested none. The status has earlier
    operators' requests."""
    refused_resize: str | None = None
    """Why the coordinator refused that size; None: it did not."""
    marking: Marking = "none"
    """How the site wants a marked machine to be shown."""
    most_marked_percent: int = 5
    """Percentage of the cluster's machines that may be marked at once."""
    no_marks: str | None = None
    """Why no machine can be marked; None: machines can be."""
    hearings: Mapping[str, Hearing | None] = {}
    """What the nodes that were asked report of the coordinator, by name; None: no answer. Empty: none was asked, since the
    coordinator answers."""
    silent_s: float = 0.0
    """Seconds for which the coordinator, whose pod runs, has not answered this operator."""
    now_s: float = 0.0
    """UTC."""


# ------------------------------------------------------------ what is decided


class AddFinalizer(msgspec.Struct, frozen=True):
    """Add Holdfast's finalizer, so that a deleted object stays until the job's state is saved."""


class RemoveFinalizer(msgspec.Struct, frozen=True):
    """Remove Holdfast's finalizer: nothing of the job is left that could be lost."""


# A pod's number is written to the status before the pod is created. An operator that dies in between leaves a gap in the
# numbers. In the other order the next operator could use a number again whose first pod still runs behind a network cut.
class Number(msgspec.Struct, frozen=True, kw_only=True):
    """Write the counters to the status; pods with lower numbers may be created afterwards. The write is refused if the object
    has changed in the meantime."""

    run: int
    term: int
    next_number: int
    begins: bool = False
    """Whether a run begins, whose start time is now."""


class MakeObject(msgspec.Struct, frozen=True):
    """Create an object beside the pods."""

    kind: str
    """Secret, ConfigMap, PodGroup, Service, PodDisruptionBudget or NetworkPolicy."""


class PointService(msgspec.Struct, frozen=True):
    """Point the coordinator's Service to the pod of this term."""

    term: int


class SizeGroup(msgspec.Struct, frozen=True):
    """Set the number of nodes that the PodGroup requires together."""

    members: int


class MakeNode(msgspec.Struct, frozen=True):
    """Create the pod of a node."""

    number: int
    avoid: frozenset[str] = frozenset()
    """Machines that the pod must not be scheduled on."""
    workload: str = ""
    """Name of the Workload whose quota it uses; empty: none."""


class MakeCoordinator(msgspec.Struct, frozen=True):
    """Create the coordinator's pod of a term."""

    term: int
    avoid: frozenset[str] = frozenset()
    """Machines to avoid if possible: its predecessors ran there."""


class FindPod(msgspec.Struct, frozen=True):
    """Get a pod by its name, because the watch does not show it."""

    name: str


class LabelPod(msgspec.Struct, frozen=True, kw_only=True):
    """Restore the labels by which a pod is watched and by which the job's traffic is routed to it."""

    name: str
    uid: str


class TellPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Annotate a node's pod with its machine's place. The kubelet passes the annotation to the agent, which so needs no
    credentials for the API server."""

    name: str
    uid: str
    place: str


class DeletePod(msgspec.Struct, frozen=True, kw_only=True):
    """Delete the pod with this uid, but not another one of the same name."""

    name: str
    uid: str
    reason: str
    grace_s: int | None = None
    """None: the pod's own grace period."""
    version: int | None = None
    """Delete it only while the object still has this version; None: whatever its version is."""


class MakeWorkload(msgspec.Struct, frozen=True):
    """Ask Kueue for quota."""

    number: int | None
    """As `WorkloadSeen.number`."""
    nodes: int


class DeleteWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Delete a Workload whose quota the job no longer needs."""

    name: str
    uid: str


# The write has the version of the object that was observed, so it is refused if Kueue has admitted the Workload again in the
# meantime.
class ReleaseQuota(msgspec.Struct, frozen=True):
    """Give back the quota of an evicted Workload, whose pods are gone. Kueue may admit it again."""

    name: str


class FinishWorkload(msgspec.Struct, frozen=True):
    """Tell Kueue that the job is over, so that its quota is free although the job's object stays."""

    name: str
    succeeded: bool


class TellReady(msgspec.Struct, frozen=True):
    """Tell Kueue that the Workload's pods are ready. A Kueue that is configured to wait for this evicts it otherwise."""

    name: str


QueueAction = MakeWorkload | DeleteWorkload | ReleaseQuota | FinishWorkload | TellReady


class DeleteObject(msgspec.Struct, frozen=True):
    """Delete an object beside the pods."""

    kind: str


class Tell(msgspec.Struct, frozen=True):
    """Post to the coordinator's `/engine`."""

    news: Availability
    about: str = ""
    """The node, or the node and the event, by which the message is sent only once; empty: it is not remembered."""


class MarkMachine(msgspec.Struct, frozen=True):
    """Mark a machine so that others avoid it, or renew the job's mark on it."""

    machine: str
    mark: Mark


class UnmarkMachine(msgspec.Struct, frozen=True):
    """Remove the job's mark from a machine."""

    machine: str


class Warn(msgspec.Struct, frozen=True, kw_only=True):
    """Post a warning Event of the job."""

    reason: str
    """CamelCase, for programs."""
    text: str
    about: str
    """What the warning is about, for example an order or a pod's uid; it is posted once for each."""


class AskStop(msgspec.Struct, frozen=True):
    """Ask the coordinator to save the state and end the job."""

    reason: str
    cause: NoticeCause = NoticeCause.STOP
    """Returned in the coordinator's termination message, which decides whether the job continues later."""


class AskResize(msgspec.Struct, frozen=True):
    """Ask the coordinator to resize the job."""

    nodes: int


class DeleteJob(msgspec.Struct, frozen=True):
    """Delete the job's object: spec.runPolicy.ttlSecondsAfterFinished is over."""


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
    """The actions to take now, and the status to write."""

    actions: tuple[Action, ...]
    status: JobStatus
    """The object's new status. Not written if there is a `Number`, whose counters it lacks; the next plan's status has them."""
    look_again_s: float | None = None
    """Seconds until something is due by time alone; None: nothing is."""
