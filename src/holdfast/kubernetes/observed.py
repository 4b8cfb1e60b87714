"""What the operator knows of one job: the objects as its watches have them, and what the coordinator last said. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from holdfast.kubernetes.against_schema import Problem
from holdfast.kubernetes.marks import NONE, MachineMarks, Marking
from holdfast.kubernetes.resource import HoldfastJob, QueueTopology
from holdfast.kubernetes.status import JobStatus
from holdfast.protocol.engine_orders import EngineOrder
from holdfast.protocol.network.endpoint import Hearing

PodPhase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]


class Farewell(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended, as its coordinator left it in its pod's status."""

    outcome: str
    """finished, stopped or failed."""
    reason: str = ""
    """For people."""
    cause: str = ""
    """Why it was stopped, a `NoticeCause`. A later version may have more of them. Empty: it was not stopped, or an older
    coordinator says it."""
    step: int | None = None
    """Of the last commit; None: it does not say, as coordinators of earlier versions."""
    checkpoint: str | None = None
    """The newest durable one, as in `Said`."""


class PodSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that the job owns."""

    name: str
    uid: str
    coordinator: bool
    """Else it is a node."""
    number: int
    """Of the node, or of the coordinator's term."""
    run: int
    phase: PodPhase = "Pending"
    end: str = ""
    """Why it has ended, in Kubernetes' words; empty: it says nothing."""
    deleting: bool = False
    """It has a deletion time. That cannot be taken back."""
    machine: str | None = None
    """None: it is not bound yet."""
    ready: bool = False
    waits: str | None = None
    """Why it does not start, in the words of the scheduler or the kubelet."""
    unschedulable: bool = False
    farewell: Farewell | None = None
    """Of a coordinator that has ended."""
    address: str | None = None
    version: int = 0
    """Of the object when it was so."""
    workload: str = ""
    """Whose quota it uses; empty: the job is in no queue."""
    avoids: frozenset[str] = frozenset()
    """Machines on which it may not run: they were lost or bad when it was made."""
    gated: bool = False
    """It waits until Kueue chooses its machine."""
    chosen: str = ""
    """The machine that Kueue has chosen for it; empty: it has not, or does not choose."""
    unsure: bool = False
    """The watch has lost it, and nobody had deleted it: somebody may have taken away the label that it is watched by."""
    mislabelled: bool = False
    """It lacks labels that are ours."""
    waits_for_place: bool = False
    """Its agent wants to know where its machine stands, and was not told yet."""
    restarts: int = 0
    """How often the kubelet has started its container anew, in its place."""
    backs_off: bool = False
    """Its container has ended, and the kubelet waits before it starts it again."""
    crash: str | None = None
    """How its container ended the last time; None: it never ended, or did so in order."""
    out_of_memory_s: float | None = None
    """When the kernel last killed all that ran in its container, which may run again since: seconds since 1970, whole ones, by
    the clock of its machine; None: it did not."""

    @property
    def ended(self) -> bool:
        """Its processes are over."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def how_ended(self) -> str:
        """For people."""
        return f"{self.phase}, {self.end}" if self.end else self.phase

    @property
    def stays(self) -> bool:
        """It is there, or will be, and nobody has asked for its end."""
        return not self.ended and not self.deleting


class MachineSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the cluster."""

    name: str
    ready: bool = True
    """Kubernetes reaches its kubelet. A node on a machine that is not ready may well train on."""
    going: str | None = None
    """Why it is to be emptied: it is cordoned, or has a taint that says so."""
    sick: str | None = None
    """What a condition says of it, of which the scheduler knows nothing; None: none calls it sick."""
    sick_since: str = ""
    """As Kubernetes writes moments; empty: it does not say."""
    held: str | None = None
    """Why it stays in use although it is called sick; None: it does not."""
    place: str = ""
    """Where it stands, by its labels; empty: they do not say it."""
    marks: MachineMarks = NONE
    """Ours, and those of operators before this one."""

    @property
    def is_avoided(self) -> bool:
        """For its sickness."""
        return self.sick is not None and self.held is None

    @property
    def why_left(self) -> str | None:
        """Why nodes leave it; None: they stay."""
        return self.going or (self.sick if self.is_avoided else None)


class WorkloadSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A Kueue Workload of the job: a claim of quota for some of its nodes."""

    name: str
    uid: str
    number: int | None
    """Of a further node; None: it is for the coordinator and the nodes that cannot be missed."""
    nodes: int
    queue: str
    admitted: bool = False
    reserved: bool = False
    """Quota is held. It stays so after an eviction, until the job gives it back."""
    evicted: str | None = None
    """Why Kueue wants the quota back."""
    active: bool = True
    """False: a person has stopped it."""
    deleting: bool = False
    finished: bool = False
    ready: bool = False
    """Kueue was told that its pods are there."""
    waits: str = ""
    """Kueue's words about why it holds no quota."""
    topology: QueueTopology | None = None
    """How near to each other its nodes are to be."""
    machines: frozenset[str] = frozenset()
    """That Kueue has chosen for its nodes; empty: it has not, or does not choose."""

    @property
    def grants(self) -> bool:
        """Its nodes may be there."""
        wanted_back = self.evicted is not None or not self.active or self.deleting or self.finished
        return self.admitted and not wanted_back

    @property
    def why_not(self) -> str:
        """Why its nodes may not be there."""
        if self.evicted is not None:
            return self.evicted
        return "it was stopped (spec.active is false)" if not self.active else self.waits


class NodeSaid(msgspec.Struct, frozen=True, kw_only=True):
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


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator of a term last said."""

    term: int
    phase: str
    """A `coordinator.kernel.phases.JobPhase`."""
    wanted: int
    """Nodes altogether, spares included."""
    orders: tuple[EngineOrder, ...] = ()
    nodes: Mapping[str, NodeSaid] = {}
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
    said: Said | None = None
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
