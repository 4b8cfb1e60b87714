"""The core: `handle(event, now) -> actions`. It has no clock, socket, thread or randomness.

Three things drive it: the service (real life), the tests (random schedules under a virtual clock) and the
planner's simulator. This file takes events apart and says what comes next; what is done about them lies in
`membership` (nodes, generations, planned changes, failures, the end), `storage` (snapshots and checkpoints) and `health`
(findings, triage, remedies). Their functions take the context first.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, cast

from holdfast.coordinator.health import admission, comparison, findings, remedies, triage
from holdfast.coordinator.kernel import context, incidents
from holdfast.coordinator.kernel.context import Context, Mode, R, Request
from holdfast.coordinator.kernel.deadlines import Watched, move_times
from holdfast.coordinator.kernel.events import (
    Action,
    DurableFound,
    End,
    Event,
    Injected,
    MachineCleared,
    NodeJoined,
    NodeLost,
    NodeOrdered,
    NodeSays,
    Overslept,
    Recovered,
    ResizeRequested,
    Starved,
    StopRequested,
    Tick,
    WorkersSay,
)
from holdfast.coordinator.kernel.state import (
    CoreState,
    Injection,
    JobPhase,
    Node,
    Timer,
    Worker,
    WorkerPhase,
)
from holdfast.coordinator.membership import (
    failures,
    generations,
    nodes,
    notices,
    queries,
    replicas,
    resize,
    shutdown,
    step_accounting,
    wall_time,
    workers,
)
from holdfast.coordinator.membership.in_process import InProcessMode
from holdfast.coordinator.membership.restart import RestartMode
from holdfast.coordinator.storage import durable_checkpoints, memory_snapshots
from holdfast.protocol import causes, ledger
from holdfast.protocol import messages as m
from holdfast.protocol.engine_orders import (
    Capacity,
    EngineTraits,
    JobGoing,
    NodeAvailable,
    NodeGoing,
    NodeOutOfMemory,
    NodeTaken,
    NodeUnavailable,
    OrderDone,
)
from holdfast.protocol.job import Durable, JobSpec
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.snapshots import Copy

MOST_LOOKS = 100
"""So often the core looks again at one moment, so that a mistake of its own costs time and does not stop it."""


class Core(Context):
    """Decides everything about one job. `state` is all that it remembers: a new `Core` with the same state goes on after a
    crash."""

    def __init__(self, spec: JobSpec, state: CoreState | None = None) -> None:
        super().__init__(spec, state)
        self._restart, self._in_process = RestartMode(), InProcessMode()
        self.moved = True
        """Whether the newest events may have changed when a Tick is due."""
        self._looked = False
        """Whether this process has looked at what comes next."""

    # ------------------------------------------------------------ in and out

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handles one event at time `now` (seconds, never smaller than before) and returns the actions that follow from it."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Sequence[Event], now: float) -> list[Action]:
        """Handles events that arrived at the same time. What can be done next is determined once, after the last of them."""
        # One batch is one moment: every handler of it sees the same `now`. If events of a batch had times of
        # their own, the order in which they were read from sockets would decide which deadline is over first.
        self.now = now
        if self.state.began_s == 0.0:
            self.state.began_s = now
            wall_time.begins(self.state, now)
        if self.state.membership.phase is not JobPhase.ENDED:
            # Each event is taken in by itself, but what comes next is looked at once, after the last. In a
            # node's loss dozens of events arrive together; a look between them would form a generation from
            # half of the news, and break it again with the other half.
            self.moved = False
            for event in events:
                self.moved = self._takes(event) or self.moved
            if self.moved or not self._looked:
                self._look()
        else:
            # After the end nothing is decided, but agents and a successor of this process still have to learn
            # that it is over. Without an answer an agent would reconnect for ever.
            for event in events:
                self._after_the_end(event)
        out, self._out, self._attributed = self._out, [], 0
        return out

    def _look(self) -> None:
        """Does what is due, and what comes next, until nothing more is to be done now."""
        self.moved = self._looked = True
        for _ in range(MOST_LOOKS):
            queued, self._next_s, self._again = len(self._out), inf, False
            self.watch.asked.clear()
            # Deadlines come before `_advance`: who is lost by silence must be gone before the next generation is put
            # together, or it would get a member that everybody then waits for until the next detection.
            self._check_deadlines()
            self._advance()
            self._attribute()
            # Forgetting comes last. What is dropped here may still have been needed by the handlers of this very
            # batch, for example the root cause of a worker that is gone.
            nodes.forget(self)
            failures.forget(self)
            admission.forget(self)
            # What queued actions may have changed what was looked at before (a worker ended after its node was
            # checked), and set times that nobody has compared yet. A look that queues nothing has seen all.
            if len(self._out) == queued and not self._again:
                return
        self._next_s = self.now

    def _takes(self, event: Event) -> bool:
        """Takes one event in. Returns whether it may change what comes next, or be the time for something.

        What follows that looks at every node and worker, and signs of life come from each of them many times a second:
        together that would grow with the square of the nodes. A sign of life only ever moves deadlines later, and another
        commit of a generation that has one moves none, so the Tick that is planned already comes early enough.
        """
        # Asked before the event is handled: the first commit of a generation is the one that changes what
        # comes next, and after its handling the generation counts as settled.
        settled, queued = self._settled(), len(self._out)
        self.event = event
        self._dispatch(event)
        self.event = None
        self._attribute()
        # The first only moves a deadline of silence later. It arrives on every look at a busy machine, when a
        # full look at all nodes is what the machine can afford least. The second changes nothing that is
        # decided: the engine did what it was ordered to.
        if isinstance(event, Starved | OrderDone):
            return False
        # Whatever queued an action has changed something by definition; asking by kind of message instead
        # would have to be right for every new message.
        if len(self._out) > queued:
            return True
        if isinstance(event, WorkersSay):
            signs: Any = (m.Progress, m.Restoring) if settled else m.Restoring
            return not all(isinstance(report.message, signs) for report in event.reports)
        return not (isinstance(event, NodeSays) and isinstance(event.message, m.Heartbeat | m.StoreProgress))

    def _settled(self) -> bool:
        """The newest generation trains, and has committed a step: nothing waits for its next one."""
        s = self.state
        if s.membership.phase is not JobPhase.RUNNING or s.membership.generation is None:
            return False
        return s.membership.generation_committed > s.membership.generation.start

    def _after_the_end(self, event: Event) -> None:
        if isinstance(event, NodeJoined):
            over = m.Shutdown(self.state.membership.outcome or "ended", self.state.membership.keeps_memory)
            self.send(event.hello.node, over)
        elif isinstance(event, Recovered):
            self._out.append(
                End(self.state.membership.outcome or "ended")
            )  # its first telling may have been lost

    def next_deadline(self) -> float | None:
        """When a Tick is due even if nothing else happens: the earliest time that was ahead in the last look, or at which
        somebody that it asked for is due."""
        if self.state.membership.phase is JobPhase.ENDED:
            return None
        watched_s = self.watch.next_s(*self.watch.asked)
        at_s = self._next_s if watched_s is None else min(self._next_s, watched_s)
        return None if at_s == inf else at_s

    @property
    def mode(self) -> Mode:
        """See `Context.mode`."""
        return self._in_process if self.state.membership.level == 2 else self._restart

    # ------------------------------------------------------------ what parts ask of each other

    def request(self, request: Request[R]) -> R:
        """See `Context.request`."""
        return cast(R, self._serve(request))

    def _serve(self, request: Request[Any]) -> object:
        # The only place where parts of the core meet. A request is served before the caller goes on, so there
        # is no queue of half-done work between two handlers, and the order of decisions can be read from the
        # code.
        match request:
            case context.RemoveNode(node, cause):
                nodes.lose(self, node, cause)
            case context.RefuseNode(node, cause):
                nodes.give_up(self, node, cause)
            case context.DrainNode(node, reason):
                resize.leave(self, node, reason)
            case context.JoinAfter(staying):
                return queries.join_after_s(self, staying)
            case context.EvictWorkers(node, evicted, cause):
                self.mode.evict(self, node, evicted, cause)
            case context.LetGo(node, reason):
                resize.node_leaves(self, node, reason)
            case context.KeepNode(node):
                resize.stay(self, node)
            case context.HandleReport(worker, report):
                self._worker_says(worker, report, 0.0)
            case context.StopJob(reason, outcome, root_cause, cause):
                shutdown.request(self, reason, outcome, root_cause, cause=cause)
            case context.CompareSteps(worker, message):
                comparison.heard(self, worker, message.spent)
                # Times first, then losses: both may report a finding of the same worker, and the ledger of a
                # simulated schedule has to have one order.
                comparison.losses_heard(self, worker, message.losses)
            case context.NoteWaits(data_s, slow_s):
                wall_time.waited(self.state, data_s, slow_s)
            case context.SwapLemons():
                admission.advance(self)
            case context.CompareCopies(node, hello):
                memory_snapshots.on_node_joined(self, node, hello)
            case context.DropCopies(node):
                memory_snapshots.node_lost(self, node)
            case context.SpreadCopies():
                memory_snapshots.spread(self)
            case context.HandOver(node):
                return memory_snapshots.hands_over(self, node)
            case context.RewindTo(start):
                memory_snapshots.went_back(self, start)
            case context.ReportUnreadable(Copy() as copy):
                memory_snapshots.unread(self, copy)
            case context.ReportUnreadable(Durable() as durable, message):
                durable_checkpoints.unread(self, durable, message)
            case context.AwaitChecksums(worker, message):
                durable_checkpoints.summing(self, worker.node, message.summing)
            case context.StoreLast():
                return durable_checkpoints.last_on_its_way(self)
            case context.ReportUnsaved():
                durable_checkpoints.say_unsaved(self)
            case context.RefuseAdmission(hello, reason):
                admission.refuse(self, hello, reason)
            case context.AdmitNode(node, hello, past, known):
                # Admission first: it may put the node in quarantine, and a machine that comes back from a
                # reboot is recorded as back either way.
                admission.admit(self, node, hello, past)
                remedies.came_back(self, node, known)
            case context.RepeatOrders(node):
                remedies.repeat(self, node)
                admission.repeat(self, node)
            case context.NoteNodeLost(node, incident):
                if incident is not None:
                    admission.lost(self, node, incident)
                remedies.lost(self, node)
            case context.ApplyRemedy(node):
                remedies.left(self, node)
            case context.DecideIncident(incident):
                triage.decide(self, incident)
            case context.Escalate(node, incident, does, reason):
                triage.escalated(self, node, incident, does, reason)
            case context.NoteWorkerEnded(incident):
                triage.struck(self, incident)
            case context.AwaitReturn():
                nodes.on_its_way(self)
            case context.PauseRequests(until_s):
                nodes.ask_no_sooner(self, until_s)
            case context.NoteLast(worker):
                durable_checkpoints.given_last(self, worker)
            case context.ForgetLast():
                durable_checkpoints.forget_last(self)
            case context.NoteNonFinite(worker, message):
                comparison.brought(self, worker, message)
            case context.NoteMiscomputed(worker, cause):
                comparison.miscomputed(self, worker, cause)
            case _:
                raise TypeError(f"no part serves {request}")
        return None

    # ------------------------------------------------------------ events

    def _dispatch(self, event: Event) -> None:
        match event:
            case NodeJoined(hello, past):
                nodes.on_joined(self, hello, past)
            case NodeLost(name, session, cause):
                node = self.state.membership.nodes.get(name)
                if node is not None and node.alive and node.session == session:
                    nodes.lose(self, node, cause)
            case WorkersSay():
                self._workers_say(event)
            case NodeSays(name, message):
                self._node_says(name, message)
            case Injected():
                self._injected(event)
            case StopRequested(reason, cause):
                shutdown.request(self, reason, "stopped", cause=cause)
            case NodeUnavailable(reason):
                nodes.unavailable(self, reason)
            case NodeAvailable():
                nodes.available(self)
            case OrderDone():
                nodes.order_done(self, event)
            case NodeGoing(name, reason, within_s, cause):
                resize.going(self, name, reason, within_s, cause or NoticeCause.DRAIN)
            case EngineTraits():
                remedies.engine_traits(self, event)
            case JobGoing():
                notices.foretold(self, event)
            case NodeTaken(name, reason):
                nodes.taken(self, name, reason)
            case NodeOutOfMemory(name, limit_bytes, age_s):
                nodes.out_of_memory(self, name, limit_bytes, age_s)
            case Capacity():
                resize.capacity(self, event)
            case ResizeRequested(count, reason):
                resize.resize(self, count, reason)
            case MachineCleared(machine, rule, remember):
                triage.cleared(self, machine, rule)
                admission.cleared(self, machine, rule, remember)
            case NodeOrdered(name, remedy, reason):
                # It may have left since the person looked: then there is nothing to wait for.
                if (node := self.state.membership.nodes.get(name)) is not None and node.alive:
                    remedies.ordered(self, node, remedy, reason)
            case DurableFound():
                durable_checkpoints.found(self, event)
            case Recovered():
                nodes.recovered(self, event)
            case Overslept(away_s):
                move_times(self.state, self.now, away_s)
                self.watch.look_again()
            case Starved(name, waited_s):
                nodes.starved(self, name, waited_s)
            case Tick():
                pass

    def _injected(self, event: Injected) -> None:
        """For the record alone: nothing is decided upon it."""
        s, generation = self.state, self.state.membership.generation
        committed = s.membership.committed
        # Commits are reported once in a while, so the worker knows better. At level 0 it counts the steps of one start.
        if event.step is not None and s.membership.counts_steps:
            committed = max(committed, event.step)
        self.record(
            ledger.FaultInjected(
                fault=event.fault,
                fault_kind=event.kind,
                node=event.node,
                worker=event.worker,
                rank=generation.rank_of(event.worker) if generation and event.worker else None,
                step=committed,
            )
        )
        # The node announces it itself and leaves as planned, as on a real spot machine, so no incident will come
        # that could be this one.
        if event.kind != "preempt-node":
            injection = Injection(
                fault=event.fault, kind=event.kind, at_s=self.now, node=event.node, worker=event.worker
            )
            incidents.injected(s, injection)

    def _who_says(self, name: str) -> Node | None:
        """The node that a message is of; None: what it says does not count."""
        node = self.state.membership.nodes.get(name)
        if node is None or not node.alive:
            # Nothing of a node that was given up counts any more, whatever it says. Its workers may be alive,
            # and their reports would mix with those of the generation that went on without them.
            nodes.fence(self, node, name)
            return None
        # Any message is a sign of life, not only a heartbeat: an agent that is busy passing on messages sends
        # its heartbeats late.
        nodes.heard(self, node, self.now)
        return node

    def _workers_say(self, event: WorkersSay) -> None:
        if (node := self._who_says(event.node)) is None:
            return
        for report in event.reports:
            if not node.alive:  # because of a report before this one
                nodes.fence(self, node, node.name)
                return
            worker = self.state.membership.workers.get(report.worker)
            # Words of a worker that is gone are dropped here, once, so no handler below has to ask. They
            # are common: a worker reports its last commit, and its exit overtakes that in the agent.
            if worker is not None and worker.phase is not WorkerPhase.GONE:
                self._worker_says(worker, report.message, report.age_s + event.waited_s)
                # After each report: entries that one has caused must not get the incidents that another concerns.
                self._attribute()

    def _node_says(self, name: str, message: m.NodeMessage) -> None:
        if (node := self._who_says(name)) is None:
            return
        match message:
            case m.Started(worker_name, pid, log):
                if worker := self.state.membership.workers.get(worker_name):
                    workers.started(self, worker, pid, log)
            case m.Exited():
                failures.exited(self, message)
            case m.Leaving(reason, within_s):
                resize.going(self, name, reason, within_s, NoticeCause.PREEMPTION)
            case m.Stalled(worker_name, view):
                failures.stalled(self, worker_name, view)
            case m.InspectReply():
                failures.inspected(self, message)
            case m.FindingsReported(found):
                findings.found(self, node, found)
            case m.Repaired(request, error):
                remedies.repaired(self, node, request, error)
            case m.Checked():
                admission.checked(self, node, message)
            case m.SnapshotStored():
                memory_snapshots.held(self, node, message)
            case m.SnapshotRejected(key, reason, lack, paced):
                memory_snapshots.not_held(self, node, key, reason, lack, paced)
            case m.SnapshotCorrupt(key, reason):
                memory_snapshots.spoiled(self, node, key, reason)
            case m.Stored():
                durable_checkpoints.stored(self, node, message)
            case m.StoreProgress():
                durable_checkpoints.progress(self, node, message)
            case m.Published():
                durable_checkpoints.published(self, node, message)
            case _:
                pass

    def _worker_says(self, worker: Worker, message: m.WorkerMessage, age_s: float) -> None:
        match message:
            # The first, because most reports are of progress, and the kinds are tried one after the other.
            case m.Progress():
                workers.progress(self, worker, message, age_s)
            case m.Attached():
                workers.attached(self, worker)
            case m.Ready():
                workers.ready(self, worker, message)
            case m.Joined():
                workers.joined(self, worker, message)
            case m.Restoring():
                workers.restoring(self, worker, message)
            case m.OffStep(on):
                workers.off_step(self, worker, on, age_s)
            case m.Parked():
                generations.parked(self, worker, message)
            case m.Halted():
                replicas.halted(self, worker, message)
            case m.Failed():
                failures.failed(self, worker, message)
            case m.GradientsDiffer():
                failures.gradients_differ(self, worker, message)
            case m.CollectiveError():
                generations.collective_error(self, worker, message)
            case m.Saved():
                durable_checkpoints.saved(self, worker, message)
            case m.StateServed(generation, step, steps):
                step_accounting.gave(self.state, generation, step, steps)
            case m.BeganAnew(generation):
                step_accounting.began_anew(self, generation)
            case m.Loaded(generation, step, steps):
                step_accounting.loaded(self, generation, step, steps)
            case m.FindSnapshot(request):
                memory_snapshots.sought(self, worker, request)
            case m.Done():
                shutdown.done(self, worker, message)
            case _:
                pass

    # ------------------------------------------------------------ what next

    def _check_deadlines(self) -> None:
        # Nodes before workers, workers before generations: a lost node explains its workers' silence. In the
        # other order the workers' ends would open incidents of their own, and the restart budget would be
        # charged twice.
        # In the order in which they joined or were started: it decides which incident is the first.
        silent = self.watch.due(Watched.SILENT, self.now)
        for node in self.alive_nodes() if silent else []:
            if node.name in silent:
                nodes.lose(self, node, causes.NodeSilent(self.timing.detection_s))
                self._attribute()
        vanished = self.watch.due(Watched.VANISHED, self.now)
        for worker in self.alive_workers() if vanished else []:
            # The agent no longer has the process, but its Exited may still be on the way with the exit code
            # and the last lines. A detection time is enough for that; then the loss counts without them.
            # One that went meanwhile may have been lost with the one before it, and have no deadline any more.
            if worker.name in vanished and worker.vanished_s is not None:
                failures.lose_worker(self, worker, causes.ProcessVanished())
                self._attribute()
        triage.due(self)
        self._attribute()
        nodes.write_off(self)
        # Remedies first, since one may take out the node that is about to be judged. A hang of a node that is
        # being replaced is no news.
        if self.is_due(Timer.INSPECT):
            failures.judge(self)
            self._attribute()
        durable_checkpoints.look(self)
        self.mode.due(self)
        if self.is_due(Timer.LEAVE):
            failures.end_stuck(self)
        shutdown.due(self)
        self._attribute()

    def _advance(self) -> None:
        s = self.state
        if s.membership.phase is JobPhase.ENDED:
            return
        # Remedies and planned changes before the mode: both decide who is to leave, and the next generation
        # is formed (in `mode.advance`) from those that stay.
        remedies.advance(self)
        self._attribute()
        resize.advance(self)
        self.mode.advance(self)
