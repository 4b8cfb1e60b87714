"""What every handler gets: the job's state, the time, and what it may do, with what it may ask of other parts. It has no clock,
socket, thread or randomness."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.deadlines import Watch
from holdfast.coordinator.kernel.events import (
    Action,
    End,
    Event,
    Record,
    Remember,
    Send,
)
from holdfast.coordinator.kernel.history import Remembered
from holdfast.coordinator.kernel.index import PhaseIndex
from holdfast.coordinator.kernel.state import (
    CoreState,
    Incident,
    Node,
    NodePhase,
    RootCause,
    Timer,
    Worker,
    WorkerPhase,
)
from holdfast.protocol import causes, ledger
from holdfast.protocol import messages as m
from holdfast.protocol.causes import Cause, GradientsDiffer
from holdfast.protocol.engine_orders import EngineOrder
from holdfast.protocol.health import Remedy
from holdfast.protocol.job import Durable, JobSpec
from holdfast.protocol.ledger import LedgerEvent
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.snapshots import Copy

R = TypeVar("R")
T = TypeVar("T")


class Context(ABC):
    """One job's state, and what may be done about it.

    Attributes:
        state: all that is remembered; a process that has it goes on where another one ended.
        watch: deadlines of nodes and workers.
        index: nodes and workers by phase.
        now: time of the event that is being handled, in seconds.
        event: that event; None while it is looked at what comes next.
    """

    def __init__(self, spec: JobSpec, state: CoreState | None = None) -> None:
        self.state = state or CoreState(spec=spec)
        self.spec = self.state.spec
        self.timing = self.spec.timing
        self.watch = Watch(self.state.membership, self.timing)
        self.index = PhaseIndex(self.state.membership, self.spec.nproc)
        self.now = 0.0
        self._next_s = 0.0
        self._again = False
        self.event: Event | None = None
        # Actions are queued, never done: the service writes the state first and only then sends. If a handler
        # could send, a coordinator that crashed in between would have promised what its successor does not
        # know.
        self._out: list[Action] = []
        self._concerned: list[int] = []
        self._attributed = 0
        self._transient: dict[type, object] = {}

    # ------------------------------------------------------------ what a handler may do

    @abstractmethod
    def request(self, request: Request[R]) -> R:
        """Asks another part for something. It is done when this returns: what is decided afterwards is decided on the state
        as it is then."""

    @property
    @abstractmethod
    def mode(self) -> Mode:
        """How the job goes on after a fault, at its level."""

    def reached(self, at_s: float) -> bool:
        """Whether this time has come. One that is ahead is a time at which the core looks again.

        Every comparison of a time with `now` is made here or by `watch`, and a test on the syntax tree holds that. So no deadline
        can be forgotten: what a look decides depends on the state and on the answers given here alone. If the state stays the same,
        the next look is the same up to the earliest time that was ahead in this one.
        """
        if self.now >= at_s:
            return True
        self._next_s = min(self._next_s, at_s)
        return False

    def look_again(self) -> None:
        """What comes next is looked at once more at this moment, also if nothing has been queued."""
        self._again = True

    def is_due(self, timer: Timer) -> bool:
        """The timer is set, and its time has come."""
        at_s = self.state.deadlines.at(timer)
        return at_s is not None and self.reached(at_s)

    def is_ahead(self, timer: Timer) -> bool:
        """The timer is set, and its time has not come."""
        at_s = self.state.deadlines.at(timer)
        return at_s is not None and not self.reached(at_s)

    def transient(self, kind: type[T]) -> T:
        """A part's own memory of this class, made at the first call. It is no part of the state: a successor of this process
        begins with a new one."""
        # Not in the state on purpose: it is written with every decision, and measurements (step times,
        # answers to an inspection) change many times a second. A successor measures anew and loses some
        # minutes of statistics.
        if kind not in self._transient:
            self._transient[kind] = kind()
        return cast(T, self._transient[kind])

    def send(self, node: str, message: m.ToAgent) -> None:
        """Queues a message for an agent."""
        self._out.append(Send(node, message))

    def tell(self, worker: Worker, message: m.ToWorker) -> None:
        """Queues a message for a worker."""
        # By way of the worker's agent. The coordinator has no connection to workers: with thousands of them
        # it would need as many, and a worker survives the coordinator only because nothing in it waits for
        # one.
        self.send(worker.node, m.Relay(worker.name, message))

    def record(self, event: LedgerEvent) -> None:
        """Queues an entry of the ledger."""
        self._out.append(Record(event))

    def concerns(self, *numbers: int) -> None:
        """What is being handled belongs to these incidents, or follows from them: so do the entries of the ledger that it
        queues, earlier ones included. numbers: of incidents; 0 is none."""
        self._concerned += [n for n in numbers if n and n not in self._concerned]

    def _attribute(self) -> None:
        """Something has been handled: its entries get the numbers of the incidents that it concerned."""
        concerned, self._concerned = self._concerned, []
        since, self._attributed = self._attributed, len(self._out)
        if not concerned:
            return
        for at in range(since, len(self._out)):
            action = self._out[at]
            # Those that are about one incident say so in a field of their own.
            if isinstance(action, Record) and not ledger.about_one_incident(action.event):
                self._out[at] = Record(msgspec.structs.replace(action.event, incidents=sorted(concerned)))

    def open_incident(
        self,
        cause: causes.Cause,
        *,
        node: str | None,
        workers: Iterable[str] = (),
        rung: str | None = None,
        at_s: float | None = None,
        **known: Any,
    ) -> Incident:
        """Enters an incident, or what is part of one that is known. known: see `incidents.open_incident`."""
        # Whether a new incident was opened is seen by the count, because what happens to a job may belong to
        # an incident that is known: a rule found a fault on the node a minute before.
        count = incidents.total(self.state)
        since_s = self.now if at_s is None else at_s
        incident = incidents.open_incident(self.state, since_s, cause, node=node, workers=workers, **known)
        incident.rung = incident.rung or rung
        self.concerns(incident.id)
        if incidents.total(self.state) > count:
            self.record(incidents.describe(self.state, incident, ledger.IncidentOpened))
        else:
            # The effect of a fault is recorded beside its cause. When both are equal, the report would show
            # the same line twice.
            if cause != incident.cause:  # else it is what was found that took its effect
                self.record(
                    ledger.IncidentJoined(id=incident.id, node=node, cause=str(cause), cause_kind=cause.kind)
                )
            # A found fault that has now ended a worker is not decided later any more: the grace time was for
            # a machine that could still train.
            self.request(NoteWorkerEnded(incident))
        return incident

    def order(self, order: EngineOrder) -> None:
        """Queues an order to the engine. It is open until the engine acknowledges it."""
        # Part of the state before it leaves: an order that was only announced would be lost with this process,
        # or while no launcher listens, and a node that was given up would train on.
        self._out.append(self.state.orders.add(order))

    def act(self, action: Remember | End | Record) -> None:
        """Queues any other action."""
        self._out.append(action)

    # ------------------------------------------------------------ views

    def alive_nodes(self) -> list[Node]:
        """Nodes that are not lost, in the order of their joining."""
        return list(self.index.alive_nodes.values())

    def nodes_in(self, *phases: NodePhase) -> list[Node]:
        """Nodes in any of these phases, in the order of their joining."""
        return self.index.nodes_in(*phases)

    def count_nodes(self, phase: NodePhase) -> int:
        """How many nodes are in a phase."""
        return self.index.count_nodes(phase)

    def count_workers(self, *phases: WorkerPhase) -> int:
        """How many workers are in any of these phases."""
        return sum(self.index.count_workers(phase) for phase in phases)

    def held_or_leaving(self) -> list[Node]:
        """Nodes that are checked or repaired, or will be, are among these."""
        # Validated after every event. So whoever asks for nodes under repair looks at these few.
        return self.index.nodes_in(NodePhase.HELD, NodePhase.LEAVING)

    def workers_of(self, node: Node) -> list[Worker]:
        """A node's workers whose process is not known to be gone, oldest first."""
        return self.index.workers_of(node.name)

    def workers_in(self, *phases: WorkerPhase) -> list[Worker]:
        """Workers in any of these phases, oldest first."""
        return self.index.workers_in(*phases)

    def alive_workers(self) -> list[Worker]:
        """Workers whose process is not known to be gone."""
        return list(self.index.alive_workers.values())

    def finished(self) -> list[Worker]:
        """Workers that have all steps, oldest first. A process that is gone counts: its state may be kept."""
        left = self.index.workers_in(WorkerPhase.DONE, WorkerPhase.GONE)
        return [w for w in left if w.digest is not None]

    def members(self) -> list[Worker]:
        """Workers of the newest generation, in the order of their ranks, dead ones included."""
        g = self.state.membership.generation
        return [self.state.membership.workers[x.worker] for x in g.members] if g else []

    def inside(self) -> list[Worker]:
        """Members that have not left the newest generation."""
        return self.workers_in(WorkerPhase.MEMBER)

    def median_s(self) -> float | None:
        """The slowest member's median step."""
        # The slowest, because a step ends when the slowest is done: a time-out from a mean would take a slow
        # but healthy worker for one that hangs.
        return max((w.median_s for w in self.members() if w.median_s is not None), default=None)

    def at_full_strength(self) -> bool:
        """The newest generation has the target size."""
        g = self.state.membership.generation
        return g is not None and g.strength >= self.state.target

    def budget_spent(self) -> bool:
        """No worker may be started again before the job comes further."""
        membership, most = self.state.membership, self.spec.max_restarts
        if not most:
            return membership.restarts_used > 0
        return membership.in_a_row.since(membership.committed if membership.counts_steps else 0) > most


class Mode(Protocol):
    """What an exit, a lost worker, a lost node or a stall means.

    At level 0 and 1 the script is unmodified: all workers end, and all start again. At level 2 the survivors
    keep their processes, and one worker is replaced."""

    replaces_one: bool
    """A worker can be replaced while the others stay."""
    saves_together: bool
    """All shards of a snapshot are copied at one commit of one generation. Scripts at level 0 and 1 save at
    their own times."""

    def on_attached(self, context: Context) -> None:
        """A worker's script called `holdfast.start`."""
        ...

    def on_exit(self, context: Context, worker: Worker, message: m.Exited) -> None:
        """The process of a worker ended that was not known to be gone."""
        ...

    def on_worker_lost(
        self, context: Context, worker: Worker, was: WorkerPhase, cause: Cause, message: m.Exited | None
    ) -> None:
        """A worker is gone without having been asked to go. message: how it ended, where that is known."""
        ...

    def on_never_started(self, context: Context, worker: Worker) -> None:
        """The order to start a worker was lost."""
        ...

    def explain_earlier(
        self, context: Context, node: Node, workers: list[Worker], cause: Cause
    ) -> Incident | None:
        """A node with these members is gone: the incident that it explains, if others have reported one already."""
        ...

    def on_node_lost(self, context: Context, workers: list[Worker], cause: Cause) -> None:
        """A node with these members is gone; its incident is open."""
        ...

    def evict(self, context: Context, node: Node, workers: list[Worker], cause: Cause) -> None:
        """Workers of a node are to end now."""
        ...

    def on_stall(
        self, context: Context, culprits: list[Worker], cause: causes.Hang, allowed: dict[str, float]
    ) -> None:
        """The job stands still. culprits: who holds it up, as far as that is known; allowed: for how many seconds each
        worker may stand still where it is."""
        ...

    def change_members(self, context: Context) -> None:
        """Members are to leave, or more can be there."""
        ...

    def on_out_of_time(self, context: Context) -> None:
        """The time for the job to end is over."""
        ...

    def due(self, context: Context) -> None:
        """Ends workers that are not ready in time."""
        ...

    def advance(self, context: Context) -> None:
        """After every batch of events: what comes next."""
        ...


# ---------------------------------------------------------------- what one part of the core asks of another
# Parts do not import each other: whoever wants something done that is another part's to decide makes a request, and the machine
# gives it to that part at once. So the one that asked goes on with the state as it is then. What a part only wants to know it
# reads itself, with the pure functions in `queries` of the part whose it is. Within a part, calls are calls.


class Request(Generic[R]):
    """Asks another part for something; R is what it answers."""


# ---------------------------------------------------------------- of membership


@dataclass(frozen=True)
class RemoveNode(Request[None]):
    """A node cannot be used any more: what runs on it counts as lost, now."""

    node: Node
    cause: Cause


@dataclass(frozen=True)
class RefuseNode(Request[None]):
    """A node is at fault, not what runs on it: it is removed, and it may not come back."""

    node: Node
    cause: Cause


@dataclass(frozen=True)
class DrainNode(Request[None]):
    """A node is to leave at a step's edge, as soon as another takes its place."""

    node: Node
    reason: str


@dataclass(frozen=True)
class JoinAfter(Request[float]):
    """From when on newcomers may join so many workers that stay: seconds on the core's clock."""

    staying: int


@dataclass(frozen=True)
class EvictWorkers(Request[None]):
    """Workers of a node are to end now, and others to take their places."""

    node: Node
    workers: list[Worker]
    cause: Cause


@dataclass(frozen=True)
class HandleReport(Request[None]):
    """What a worker reported may have been missed: it is handled as if it came now."""

    worker: Worker
    message: m.WorkerMessage


@dataclass(frozen=True)
class StopJob(Request[None]):
    """The job ends at the next commit, with what was committed."""

    reason: str
    outcome: str
    """"stopped" or "failed"."""
    root_cause: RootCause | None = None
    """Who or what is at fault, if nobody is named yet; None: nobody."""
    cause: NoticeCause | None = None
    """Why, for programs; None: `failure` or `stop`, as the outcome is."""


@dataclass(frozen=True)
class KeepNode(Request[None]):
    """A node does not leave, and its scripts are told if they had heard that it does."""

    node: Node


@dataclass(frozen=True)
class LetGo(Request[None]):
    """A node leaves as planned, now: nothing of the job is on it any more."""

    node: Node
    reason: str


@dataclass(frozen=True)
class AwaitReturn(Request[None]):
    """A machine that left was rebooted: it comes back as a node that was asked for."""


@dataclass(frozen=True)
class PauseRequests(Request[None]):
    """The engine is asked for no node before this time."""

    until_s: float
    """On the core's clock."""


# ---------------------------------------------------------------- of storage


@dataclass(frozen=True)
class CompareCopies(Request[None]):
    """A node joined, or came back: its hello says what it holds, and what it has missed is sent again."""

    node: Node
    hello: m.Hello


@dataclass(frozen=True)
class DropCopies(Request[None]):
    """A node is gone, and what it held with it."""

    node: Node


@dataclass(frozen=True)
class SpreadCopies(Request[None]):
    """Copies that are missing may be asked for from others now."""


@dataclass(frozen=True)
class HandOver(Request[bool]):
    """A node is about to leave as planned. True: it still gives on what nobody else holds."""

    node: Node


@dataclass(frozen=True)
class RewindTo(Request[None]):
    """The next generation goes on from this step, and not from live state: what was saved later is void."""

    start: int
    """Committed steps."""


@dataclass(frozen=True)
class ReportUnreadable(Request[None]):
    """A worker could not be restored from a snapshot, or from a checkpoint."""

    source: Copy | Durable
    message: m.CollectiveError


@dataclass(frozen=True)
class AwaitChecksums(Request[None]):
    """A worker has ended, and its node computes the checksums of what it gave."""

    worker: Worker
    message: m.Exited


@dataclass(frozen=True)
class NoteLast(Request[None]):
    """A worker left the state after its last step to its node."""

    worker: Worker


@dataclass(frozen=True)
class ForgetLast(Request[None]):
    """What became of those states is not waited for any more."""


@dataclass(frozen=True)
class StoreLast(Request[bool]):
    """The job ends: its last state goes to every durable tier. False: nothing more comes of it."""


@dataclass(frozen=True)
class ReportUnsaved(Request[None]):
    """The job ends: if its last state is in no tier for a reason that was not recorded, it is recorded now."""


# ---------------------------------------------------------------- of health


@dataclass(frozen=True)
class RefuseAdmission(Request[None]):
    """A node is not let in, because its basic checks found a fault."""

    hello: m.Hello
    reason: str


@dataclass(frozen=True)
class AdmitNode(Request[None]):
    """A node joins as a new one."""

    node: Node
    hello: m.Hello
    past: tuple[Remembered, ...]
    """What is remembered of the machine and its devices, oldest first."""
    known: Node | None
    """The node that had its name before; None: none had."""


@dataclass(frozen=True)
class RepeatOrders(Request[None]):
    """An agent came back: orders that it has not answered are sent again."""

    node: Node


@dataclass(frozen=True)
class NoteNodeLost(Request[None]):
    """A node is gone."""

    node: Node
    incident: Incident | None
    """What it was lost with; None: it was not in use."""


@dataclass(frozen=True)
class ApplyRemedy(Request[None]):
    """A node that was to leave for its health has nobody in the job any more: what was decided about it is done."""

    node: Node


@dataclass(frozen=True)
class DecideIncident(Request[None]):
    """What was done about an incident did not work: it is decided again."""

    incident: Incident


@dataclass(frozen=True)
class Escalate(Request[None]):
    """The next remedy is taken for an incident, because the last one did not work."""

    node: Node
    incident: Incident
    does: Remedy
    """The remedy that is taken."""
    reason: str
    """For people."""


@dataclass(frozen=True)
class NoteWorkerEnded(Request[None]):
    """A fault that a health rule had found has now ended at least one worker."""

    incident: Incident


@dataclass(frozen=True)
class NoteWaits(Request[None]):
    """For so many seconds of the newest steps all waited for the data of one, and for those that are slow."""

    data_s: float
    slow_s: float


@dataclass(frozen=True)
class SwapLemons(Request[None]):
    """The job trains and lacks nobody: a machine with a bad history may be replaced by a better one."""


@dataclass(frozen=True)
class CompareSteps(Request[None]):
    """A member reports where the time of its steps went, and their losses: it is compared with the others."""

    worker: Worker
    message: m.Progress


@dataclass(frozen=True)
class NoteNonFinite(Request[None]):
    """A rank's own part of a step was not finite, before anything was added to it."""

    worker: Worker
    message: m.Failed


@dataclass(frozen=True)
class NoteMiscomputed(Request[None]):
    """A worker is taken out, because others have proven that it computed other bits than they did."""

    worker: Worker
    cause: GradientsDiffer
