"""The context of every handler: the job's state, the time, the actions that it may take, and the requests that it may make of
other parts. It has no clock, socket, thread or randomness."""

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
        """Determines once more at this moment what can be done next, even if no event is queued."""
        self._again = True

    def is_due(self, timer: Timer) -> bool:
        """Whether the timer is set and its time has come."""
        at_s = self.state.deadlines.at(timer)
        return at_s is not None and self.reached(at_s)

    def is_ahead(self, timer: Timer) -> bool:
        """Whether the timer is set and its time has not come."""
        at_s = self.state.deadlines.at(timer)
        return at_s is not None and not self.reached(at_s)

    def transient(self, kind: type[T]) -> T:
        """A part's own memory of this class, created at the first call. It is not part of the state: a coordinator that takes
        over begins with a new one."""
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
        """Attributes the event that is being handled to these incidents, and with it every entry that it adds to the ledger,
        earlier ones included. numbers: of incidents; 0 is none."""
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
        """Opens an incident, or adds to one that is known already. known: see `incidents.open_incident`."""
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
        """Nodes that are held or about to leave, among which are all that are being checked or repaired, or will be."""
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
        """Workers that have completed all steps, oldest first. Those whose process is gone are included, because their state
        may be kept."""
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
        """The median step time of the slowest member, in seconds."""
        # The slowest, because a step ends when the slowest is done: a time-out from a mean would take a slow
        # but healthy worker for one that hangs.
        return max((w.median_s for w in self.members() if w.median_s is not None), default=None)

    def at_full_strength(self) -> bool:
        """Whether the newest generation has the target size."""
        g = self.state.membership.generation
        return g is not None and g.strength >= self.state.target

    def budget_spent(self) -> bool:
        """Whether no worker may be started again until the job has made progress."""
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
        """The process of a worker ended, and that was not known before."""
        ...

    def on_worker_lost(
        self, context: Context, worker: Worker, was: WorkerPhase, cause: Cause, message: m.Exited | None
    ) -> None:
        """A worker is gone that was not asked to leave. message: how its process ended; None: not known."""
        ...

    def on_never_started(self, context: Context, worker: Worker) -> None:
        """The order to start a worker was lost."""
        ...

    def explain_earlier(
        self, context: Context, node: Node, workers: list[Worker], cause: Cause
    ) -> Incident | None:
        """A node with these members is gone. Returns the incident that this explains, if others have reported it already; else
        None."""
        ...

    def on_node_lost(self, context: Context, workers: list[Worker], cause: Cause) -> None:
        """A node with these members is gone; its incident is open."""
        ...

    def evict(self, context: Context, node: Node, workers: list[Worker], cause: Cause) -> None:
        """Ends the workers of a node now."""
        ...

    def on_stall(
        self, context: Context, culprits: list[Worker], cause: causes.Hang, allowed: dict[str, float]
    ) -> None:
        """The job makes no progress. culprits: the workers that hold it up, as far as that is known; allowed: the seconds that
        each worker may make no progress in its phase."""
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
        """Called after every batch of events, to do whatever can be done next."""
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
    """Removes a node that cannot be used any more: everything on it counts as lost at once."""

    node: Node
    cause: Cause


@dataclass(frozen=True)
class RefuseNode(Request[None]):
    """Removes a node that is itself at fault, and does not let it come back."""

    node: Node
    cause: Cause


@dataclass(frozen=True)
class DrainNode(Request[None]):
    """Lets a node leave between two steps, as soon as another one can take its place."""

    node: Node
    reason: str


@dataclass(frozen=True)
class JoinAfter(Request[float]):
    """Asks from when on newcomers may join this many workers that stay, on the core's clock."""

    staying: int


@dataclass(frozen=True)
class EvictWorkers(Request[None]):
    """Ends workers of a node now, and starts others in their places."""

    node: Node
    workers: list[Worker]
    cause: Cause


@dataclass(frozen=True)
class HandleReport(Request[None]):
    """Handles a worker's report that may have been missed, as if it arrived now."""

    worker: Worker
    message: m.WorkerMessage


@dataclass(frozen=True)
class StopJob(Request[None]):
    """Ends the job at the next commit. What was committed is kept."""

    reason: str
    outcome: str
    """"stopped" or "failed"."""
    root_cause: RootCause | None = None
    """Of the end, if none is known yet; None: there is none."""
    cause: NoticeCause | None = None
    """Why, for programs; None: `failure` or `stop`, as the outcome is."""


@dataclass(frozen=True)
class KeepNode(Request[None]):
    """Cancels the departure of a node, and withdraws the notice that its scripts were given."""

    node: Node


@dataclass(frozen=True)
class LetGo(Request[None]):
    """Lets a node leave as planned, now: nothing of the job is on it any more."""

    node: Node
    reason: str


@dataclass(frozen=True)
class AwaitReturn(Request[None]):
    """Expects a machine that is being rebooted to come back as a new node."""


@dataclass(frozen=True)
class PauseRequests(Request[None]):
    """The engine is asked for no node before this time."""

    until_s: float
    """On the core's clock."""


# ---------------------------------------------------------------- of storage


@dataclass(frozen=True)
class CompareCopies(Request[None]):
    """Compares the shards listed in a node's hello with the recorded ones, and sends again what the node missed."""

    node: Node
    hello: m.Hello


@dataclass(frozen=True)
class DropCopies(Request[None]):
    """Removes the copies of a node that is gone."""

    node: Node


@dataclass(frozen=True)
class SpreadCopies(Request[None]):
    """Orders missing copies from other nodes, which may be possible now."""


@dataclass(frozen=True)
class HandOver(Request[bool]):
    """Asks whether a node that is about to leave as planned still has to copy shards that nobody else holds."""

    node: Node


@dataclass(frozen=True)
class RewindTo(Request[None]):
    """The next generation resumes at this step from a saved state: what was saved of later steps is void."""

    start: int
    """Committed steps."""


@dataclass(frozen=True)
class ReportUnreadable(Request[None]):
    """A worker could not be restored from a snapshot or a checkpoint."""

    source: Copy | Durable
    message: m.CollectiveError


@dataclass(frozen=True)
class AwaitChecksums(Request[None]):
    """A worker has ended, and its node computes the checksums of the shards that it left there."""

    worker: Worker
    message: m.Exited


@dataclass(frozen=True)
class NoteLast(Request[None]):
    """A worker left its state after the last step in its node's memory."""

    worker: Worker


@dataclass(frozen=True)
class ForgetLast(Request[None]):
    """Stops waiting for reports on those states."""


@dataclass(frozen=True)
class StoreLast(Request[bool]):
    """Writes the job's last state to every durable tier, because the job ends. False: nothing is left to wait for."""


@dataclass(frozen=True)
class ReportUnsaved(Request[None]):
    """Records why the job's last state is in no tier, if that was not recorded before; the job ends."""


# ---------------------------------------------------------------- of health


@dataclass(frozen=True)
class RefuseAdmission(Request[None]):
    """A node is not admitted, because its basic checks found a fault."""

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
    """Sends an agent that came back the orders that it has not answered."""

    node: Node


@dataclass(frozen=True)
class NoteNodeLost(Request[None]):
    """A node is gone."""

    node: Node
    incident: Incident | None
    """What it was lost with; None: it was not in use."""


@dataclass(frozen=True)
class ApplyRemedy(Request[None]):
    """Begins the remedy of a node that has left the job for it."""

    node: Node


@dataclass(frozen=True)
class DecideIncident(Request[None]):
    """Decides an incident again, because its remedy did not work."""

    incident: Incident


@dataclass(frozen=True)
class Escalate(Request[None]):
    """Applies the next stronger remedy to an incident, because the last one did not work."""

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
    """Counts seconds of the newest steps in which all waited for one worker's data, and for slow workers."""

    data_s: float
    slow_s: float


@dataclass(frozen=True)
class SwapLemons(Request[None]):
    """The job trains at full strength: a machine with a bad history may be replaced by a better one."""


@dataclass(frozen=True)
class CompareSteps(Request[None]):
    """Compares a member's report of its step times and losses with those of the others."""

    worker: Worker
    message: m.Progress


@dataclass(frozen=True)
class NoteNonFinite(Request[None]):
    """A worker's own part of the gradient or loss was not finite before the reduction."""

    worker: Worker
    message: m.Failed


@dataclass(frozen=True)
class NoteMiscomputed(Request[None]):
    """A worker is removed, because other workers have proven that it computed different bits."""

    worker: Worker
    cause: GradientsDiffer
