"""Nodes: agents that join, come back and are lost, alone or together with their place; the workers that they start, and
requests for more nodes."""

from __future__ import annotations

from holdfast.coordinator.health import queries as health
from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import (
    AdmitNode,
    CompareCopies,
    Context,
    DropCopies,
    HandleReport,
    NoteNodeLost,
    RefuseAdmission,
    RepeatOrders,
)
from holdfast.coordinator.kernel.deadlines import Watched, move_times
from holdfast.coordinator.kernel.events import Recovered
from holdfast.coordinator.kernel.history import Remembered
from holdfast.coordinator.kernel.state import Incident, JobPhase, Node, NodePhase, Timer, Worker, WorkerPhase
from holdfast.coordinator.membership import notices, processes, queries, resize
from holdfast.protocol import causes, ledger
from holdfast.protocol import messages as m
from holdfast.protocol.engine_orders import OrderDone, ProvideNode, RebootNode, ReleaseNode, kind_of
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.phases import Phase
from holdfast.protocol.place import NodePlace, common, shown

_LOST_WITH_OTHERS = (causes.ConnectionClosed, causes.NodeSilent)
"""What the loss of a switch or of the power looks like. Whatever else takes a node out is about that node alone."""


def place_lost(context: Context, incident: Incident, node: Node, cause: causes.Cause) -> None:
    """Notes that this incident is the loss of a node, so that losses in the same place may be attributed to it."""
    if node.place and not incident.lost_nodes and _may_be_shared(incident, cause):
        incident.lost_nodes, incident.lost_at_s, incident.place = [node.name], context.now, node.place


def join_place(context: Context, node: Node, workers: list[Worker], cause: causes.Cause) -> Incident | None:
    """The incident of the place whose nodes are being lost, if this node is one of them: it becomes part of that incident.
    None: there is no such incident."""
    if not node.place or not isinstance(cause, _LOST_WITH_OTHERS):
        return None
    for incident in reversed(context.state.incidents[-incidents.LOOKED_AT :]):
        if incident.lost_at_s is None or not _may_be_shared(incident, incident.cause):
            continue
        # Nodes behind one switch fall silent at the same moment, and the deadlines of their silence differ by the
        # time between two signs of life; one whose connection closes at once comes earlier by all of it.
        if context.reached(incident.lost_at_s + context.timing.detection_s + context.timing.heartbeat_s):
            continue
        place = common([incident.place, node.place])
        if not place or not (place == incident.place or _is_lost(context, place, incident)):
            continue
        first = incident.cause.first if isinstance(incident.cause, causes.PlaceLost) else str(incident.cause)
        names = [w.name for w in workers]
        incidents.lost_together(context.state, context.now, incident, cause, node.name, names)
        context.concerns(incident.id)
        incident.place = place
        count = len(incident.lost_nodes)
        there = count + len(context.index.nodes_at(place))
        incident.cause = causes.PlaceLost(place=shown(place), lost=count, nodes=there, first=first)
        context.record(
            ledger.IncidentJoined(id=incident.id, node=node.name, cause=str(cause), cause_kind=cause.kind)
        )
        return incident
    return None


def _may_be_shared(incident: Incident, cause: causes.Cause) -> bool:
    """It is not known to be about one node: no rule found something there."""
    return not (incident.rule or incident.quiet) and isinstance(cause, (*_LOST_WITH_OTHERS, causes.PlaceLost))


def _is_lost(context: Context, place: NodePlace, incident: Incident) -> bool:
    """Most of this place is gone, or has been silent for so long that it soon counts as gone. Two nodes of a large place
    may be lost by chance at the same time; more than half of it are not."""
    silent_s = context.timing.detection_s / 2
    alive = context.index.nodes_at(place)
    silent = sum(context.reached(n.last_seen_s + silent_s) for n in alive)
    return 2 * (len(incident.lost_nodes) + 1 + silent) > len(incident.lost_nodes) + 1 + len(alive)


KEPT_GONE = 32
"""So many workers and nodes that are gone are remembered, for what is still said about them."""

OUT_OF_MEMORY_S = 10.0
"""So far apart the first sign of an incident and the time that an engine gives may be: clocks differ, and Kubernetes counts
whole seconds."""

_IN_A_STEP = range(Phase.DATA, Phase.UPDATE)
_SEEN_FROM_OUTSIDE = (causes.ConnectionClosed, causes.NodeSilent, causes.AgentReplaced)
"""How the loss of a node is seen, which says nothing about its reason."""

# ---------------------------------------------------------------- agents


def on_joined(context: Context, hello: m.Hello, past: tuple[Remembered, ...] = ()) -> None:
    """Handles an agent's hello, its first or one after a lost connection. past: the records of its machine."""
    membership = context.state.membership
    known = membership.nodes.get(hello.node)
    # Before anything else of the hello is believed: fields of another version may mean something else.
    if hello.version != m.PROTOCOL_VERSION:
        theirs, ours = hello.version, m.PROTOCOL_VERSION
        _refuse(
            context,
            hello.node,
            f"its agent uses protocol version {theirs}, the coordinator {ours}; install the same Holdfast on all nodes",
        )
        return
    if known is not None and known.refused is not None:
        _refuse(context, hello.node, known.refused)
        return
    # The same agent process, connected again: its workers run on, and nothing was lost but messages. A new
    # session is a new process, whose predecessor's workers are gone, whatever the node's name is.
    if known is not None and known.session == hello.session:
        # It was given up while it was away, and others have taken its workers' places. It may not go on as if
        # nothing had happened; it is fenced and comes back as a new node.
        if not known.alive:
            known.fenced = False
            fence(context, known, hello.node)
            return
        heard(context, known, context.now)
        _reconcile(context, known, hello)
        notices.tell(context, known)  # also when none stands: it may have missed that one was withdrawn
        context.request(RepeatOrders(known))
        return
    if known is not None and known.alive:
        # The old agent first, as a loss like any other; without `release`, because the engine would take away
        # the machine that the new agent runs on.
        lose(context, known, causes.AgentReplaced(), release=False)
    reason = health.refusal(hello)
    if reason is not None:
        # It is counted as come and as no longer awaited, although it is refused: otherwise the job would wait
        # for it, and the engine would not be asked for another.
        context.request(RefuseAdmission(hello, reason))
        _refuse(context, hello.node, reason)
        membership.nodes_joined += known is None
        membership.replacing = max(0, membership.replacing - 1)
        return
    node = Node(
        name=hello.node,
        session=hello.session,
        host=hello.host,
        slots=hello.slots,
        last_seen_s=context.now,
        ports=hello.ports,
    )
    node.place = hello.place
    # A machine's failures stay with its name, so a node that crashes and returns does not come first again in
    # the choice of newcomers.
    node.failures = known.failures if known else 0
    transitions.add_node(context, node)
    # It is there, under a name that may have been given up before. An engine that reads these orders only now
    # would end a healthy node.
    context.state.orders.withdraw(ReleaseNode, node.name)
    context.state.orders.withdraw(RebootNode, node.name)
    context.watch.watch(Watched.SILENT, node.name)
    if hello.leaving is not None:
        resize.going(context, node.name, hello.leaving.reason, hello.leaving.within_s, NoticeCause.PREEMPTION)
    membership.nodes_joined += known is None
    membership.replacing = max(0, membership.replacing - 1)
    where = shown(node.place) or None
    context.record(ledger.NodeJoined(node=hello.node, host=hello.host, slots=hello.slots, place=where))
    # After the node is in the state, because admission may hold it; before `_reconcile`, because a node that
    # is held gets no workers.
    context.request(AdmitNode(node, hello, past, known))
    _reconcile(context, node, hello)
    if membership.notice is not None:
        notices.tell(context, node)


def heard(context: Context, node: Node, at_s: float) -> None:
    """Notes a message of a node's agent, as a sign that the node is alive."""
    # After a recovery every agent has until `adopt_s` to come back, which may be longer than it may be silent. The first
    # word of one ends that, so its deadline comes earlier than the heap knows.
    earlier = at_s < node.last_seen_s
    node.last_seen_s = at_s
    if earlier:
        context.watch.watch(Watched.SILENT, node.name)


def _refuse(context: Context, name: str, reason: str) -> None:
    context.record(ledger.NodeRefused(node=name, reason=reason))
    context.send(name, m.Shutdown(f"this node is refused: {reason}"))


def give_up(context: Context, node: Node, cause: causes.Cause) -> None:
    """Gives a node up that is itself at fault, and not what runs on it: it is lost and may not come back."""
    node.refused = str(cause)
    lose(context, node, cause)


def taken(context: Context, name: str, reason: str) -> None:
    """Handles the news that a node belongs to another job now: what still runs there is ended, and it does not come back as a
    new node."""
    node = context.state.membership.nodes.get(name)
    if node is None:
        return
    # Set also when it is lost already: if its agent speaks again, it is told to end and not to come back as a
    # new node, since it belongs to somebody else.
    transitions.leave(context, node, node.leaving or reason)
    if node.alive:
        lose(context, node, causes.NodeReclaimed(reason), release=False)
    context.record(ledger.NodeTaken(node=name, reason=reason))


def out_of_memory(context: Context, name: str, limit_bytes: int | None, age_s: float) -> None:
    """Corrects the cause of an incident that looked like a lost connection: the container ran out of memory. The engine reports
    it after the loss, often when the incident is already closed."""
    incident = incidents.unexplained(context.state, context.now, name)
    # An engine tells of what it still sees, and so perhaps of one that was long before this incident.
    if incident is None or incident.node != name or not isinstance(incident.cause, _SEEN_FROM_OUTSIDE):
        return
    if abs(context.now - age_s - incident.began_s) > OUT_OF_MEMORY_S:
        return
    was, cause = incident.cause, causes.ContainerOutOfMemory(limit_bytes)
    incidents.corrected(incident, cause)
    context.record(
        ledger.IncidentExplained(
            id=incident.id, node=name, was=str(was), cause=str(cause), cause_kind=cause.kind
        )
    )


def fence(context: Context, node: Node | None, name: str) -> None:
    """Ends everything on a node that was given up and speaks again. It comes back as a new node."""
    if node is not None and node.leaving is not None:
        context.send(name, m.Shutdown(node.leaving))  # it left as planned, and is not to come back
        return
    refused = context.state.health.turned_away.get(name) if node is None else node.refused
    if refused is not None:  # what it says now was on its way before it heard so
        context.send(name, m.Shutdown(f"this node is refused: {refused}"))
        return
    # One Fence is enough, while the node may have dozens of messages on the way; each would get an order to
    # kill its workers again.
    if node is None or not node.fenced:
        context.send(name, m.Fence("the job continued without this node"))
    if node is not None:
        node.fenced = True


def lose(context: Context, node: Node, cause: causes.Cause, release: bool = True) -> None:
    """Handles the loss of a node, or treats a node as lost. release: tell the engine that nothing of the job runs there any
    more."""
    membership = context.state.membership
    # Dead before anything is requested: every part asks `alive_nodes`, and must not choose this one as a
    # donor, a buddy or a place for a worker while its loss is handled.
    transitions.lose_node(context, node)
    ours = context.workers_of(node)
    part = [w for w in ours if w.phase in (WorkerPhase.MEMBER, WorkerPhase.PARKED)]
    announced = _announced(context, node, ours, cause)
    if announced is None:
        context.record(ledger.NodeLost(node=node.name, cause=str(cause), cause_kind=cause.kind))
    else:
        # Whoever said that it goes has taken it: no fault of the machine's, and none of what it shares with others.
        node.left, cause = True, causes.NodeReclaimed(announced)
        context.record(ledger.NodeLeft(node=node.name, reason=announced))
    incident = None
    if node.refused is None:
        # At level 0 its peers have raised an error already, because their connections broke first. Their
        # incident is this node's; a second one would charge the restart budget twice.
        incident = context.mode.explain_earlier(context, node, part, cause)
    if incident is None and announced is None and membership.phase is not JobPhase.STOPPING:
        incident = join_place(context, node, part, cause)
    if incident is None and part and membership.phase is not JobPhase.STOPPING:
        incident = context.open_incident(cause, node=node.name, workers=[w.name for w in part])
    if incident is not None and announced is None:
        place_lost(context, incident, node, cause)
    # Health first, storage second, the engine third, the mode last: what the mode decides (a new generation,
    # a stop) needs the result of the others.
    context.request(NoteNodeLost(node, incident if announced is None else None))
    for worker in ours:
        transitions.enter(context, worker, WorkerPhase.GONE)
        if membership.level == 2:
            # On the other side of a cut it may train on, in a generation of the same number, under a coordinator that was
            # superseded. What it tells when it is back would be taken for steps of this side.
            worker.counts_until = membership.committed if worker in part else 0
    context.request(DropCopies(node))
    if release:
        # A machine without power or network closes no connection.
        may_return = isinstance(cause, causes.ConnectionClosed) and node.refused is None
        planned = announced is not None
        context.order(ReleaseNode(node=node.name, reason=str(cause), planned=planned, may_return=may_return))
    context.mode.on_node_lost(context, part, cause)


def _announced(context: Context, node: Node, workers: list[Worker], cause: causes.Cause) -> str | None:
    """Why a node is gone of which that was known beforehand, in words; None: it is lost."""
    if not isinstance(cause, causes.ConnectionClosed | causes.NodeSilent):
        return None
    # Without a time it may stay for as long as it is needed, and nobody takes it away.
    if node.leaving is not None and node.leaves_until_s is not None:
        return node.leaving
    membership = context.state.membership
    ended = membership.phase is JobPhase.STOPPING and not workers
    return membership.stop_reason or "the job ends" if ended else None


def starved(context: Context, name: str, waited_s: float) -> None:
    """Handles the news that a node was silent because its agent got no time on a processor."""
    node = context.state.membership.nodes.get(name)
    if node is not None and node.alive:
        heard(context, node, min(context.now, node.last_seen_s + waited_s))


def recovered(context: Context, event: Recovered) -> None:
    """Takes the place of a coordinator that died or handed over. Agents that do not reconnect in time are lost.

    Nothing was decided meanwhile, so every deadline is put off until each agent has had its chance to reconnect.
    """
    s, timing = context.state, context.timing
    # Agents notice the new coordinator within this time. Nobody may be judged by silence before, since nobody
    # could have spoken.
    back_s = context.now + timing.adopt_s
    # An order that was decided last may never have been sent. So a worker that hears it only now is not judged as one that was
    # told before: `told_to_leave_s` moves, too.
    move_times(s, context.now, max(0.0, context.now - event.last_s), back_s)
    for node in s.membership.nodes.values():
        if node.alive:
            # So that each node is lost exactly at `back_s` if it does not come, and not a detection time later.
            node.last_seen_s = back_s - timing.detection_s
    for worker in s.membership.workers.values():
        worker.awaited_s = max(worker.awaited_s, back_s - timing.start_s)
        worker.vanished_s = None
    s.deadlines.not_before(Timer.LEAVE, back_s + timing.stall_s(context.median_s()))
    s.deadlines.not_before(Timer.STOP, back_s + timing.stop_s)
    s.deadlines.clear(Timer.INSPECT)
    # What was asked of the engine may never have arrived. Asking anew could give a node too many, which
    # becomes a spare; not asking could leave the job short for ever.
    _forget_provisions(context)
    s.deadlines.set(Timer.ASK_AFTER, back_s)  # the engine's answers may be lost, and its ear not be open yet
    context.watch.look_again()
    if event.handed_over:
        context.record(ledger.HandedOver(away_s=round(max(0.0, context.now - event.last_s), 3)))
        return
    incident = context.open_incident(
        causes.CoordinatorLost(),
        node=None,
        rung=incidents.COORDINATOR,
        kind="kill-coordinator",
        fault_at_s=event.last_s,
        needs_newcomer=False,
    )
    incidents.decided_by_itself(incident, context.now)


# ---------------------------------------------------------------- agent and coordinator compare what they know


def _reconcile(context: Context, node: Node, hello: m.Hello) -> None:
    """Either may have missed messages of the other; what the agent says is how things are."""
    # Either side may be ahead. The rule: the agent is right about processes (it is their parent), the
    # coordinator about who belongs to the job; so missing workers are lost, and unknown ones are killed.
    views = {v.worker: v for v in hello.workers}
    for worker in context.workers_of(node):
        view = views.get(worker.name)
        # No log means that Started was never heard. The order was lost, or waits in the agent for a warm
        # process; both are undone by taking it back, and the slot is as good as new.
        if view is None and not worker.log and worker.phase in (WorkerPhase.STARTING, WorkerPhase.MEMBER):
            _never_started(context, worker)
        elif view is None or view.process == "X":
            # Not lost at once. How it ended decides whose fault it was, and the message with the exit code
            # waits in the agent's outbox.
            worker.vanished_s = context.now  # its Exited follows, unless it was lost on the way
            context.watch.watch(Watched.VANISHED, worker.name)
    for view in hello.workers:
        # A coordinator that lost the state of those before it counts on from what it meets: a name is one process's for ever,
        # or an order to end the old one would end the new.
        membership = context.state.membership
        membership.incarnations = max(membership.incarnations, processes.incarnation_of(view.worker))
        known = context.state.membership.workers.get(view.worker)
        if known is None or known.phase is WorkerPhase.GONE:
            # A process that nobody knows would hold its GPU, and could still send state to its old peers.
            if view.process != "X":
                context.send(node.name, m.KillWorker(view.worker))
        else:
            _catch_up(context, known, view)
    context.request(CompareCopies(node, hello))
    if node.leaving is not None:
        context.send(node.name, m.Drain(node.leaving))  # it ignores what it knows


def _never_started(context: Context, worker: Worker) -> None:
    """The order to start it was lost, or is still waiting for a warm process: it is taken back."""
    context.send(worker.node, m.KillWorker(worker.name))
    transitions.enter(context, worker, WorkerPhase.GONE)
    if node := context.state.membership.nodes.get(worker.node):
        node.used = [slot for slot in node.used if slot != worker.slot]
    context.mode.on_never_started(context, worker)


def _catch_up(context: Context, worker: Worker, view: m.WorkerView) -> None:
    if view.median_s is not None:
        worker.median_s = view.median_s
    worker.aside = view.page.phase == Phase.ASIDE
    membership = context.state.membership
    current = membership.generation
    if membership.counts_steps and current is not None and view.page.generation == current.number:
        # The coordinator before may have heard of more steps than it wrote. The events of what was lost with it name the step.
        # It is not handled as a report: those tell how long ago the step was, which the page does not.
        membership.committed = max(membership.committed, view.page.committed)
    # A worker in a step is connected. Its Joined may not be in the state, and without it a first step that compiles would not
    # get the time of a start.
    if current is not None and view.page.generation == current.number and view.page.phase in _IN_A_STEP:
        worker.joined_generation = current.number
    if view.attached:
        context.request(HandleReport(worker, m.Attached()))
    if view.ready:
        context.request(HandleReport(worker, view.ready))
    # By the same path as the message itself: a report that was missed has the same effect late as it
    # would have had in time, with no second code path that could differ.
    if view.done:
        context.request(HandleReport(worker, view.done))
    elif view.parked:
        context.request(HandleReport(worker, view.parked))
    if view.process != "X":
        _repeat(context, worker, view)


def _repeat(context: Context, worker: Worker, view: m.WorkerView) -> None:
    """Sends again what the worker must have been told; it ignores what it knows."""
    s = context.state
    # The worst order to lose: a worker that was replaced would train on, beside its successor.
    if worker.told_to_end:
        context.send(worker.node, m.KillWorker(worker.name))
    if not context.mode.replaces_one:
        return
    if worker.name in s.membership.stops and worker.phase is WorkerPhase.PARKED:
        context.tell(worker, s.membership.stops[worker.name])
    if worker.rebuilds is not None and view.ready is not None:
        # Its agent would know of no Ready if it had passed that on.
        context.tell(worker, m.Rebuild(worker.rebuilds))
    if s.membership.generation is None or worker.phase is not WorkerPhase.MEMBER:
        return
    number = s.membership.generation.number
    # Its agent did not pass this generation on, so the order was lost on the way. All other members wait for
    # exactly this worker.
    if view.formed < number:
        context.tell(worker, queries.form(s, worker))
    if s.membership.yielding:
        context.tell(worker, m.EndAtCommit(number))
    elif s.membership.phase is JobPhase.BREAKING:
        context.tell(worker, m.Break(number, "repeated"))


# ---------------------------------------------------------------- workers and nodes that are missing


def staff(context: Context) -> None:
    """Starts a worker for every free slot of every node, so that spares are ready before they are needed."""
    for node, slot in [] if _spares_can_wait(context) else queries.free_slots(context):
        if context.is_ahead(Timer.START_AFTER) and slot in node.used:
            continue
        # A guess, for scripts that read RANK before they start: the real rank is in JoinGeneration.
        rank = len(context.index.alive_workers)
        processes.start_worker(
            context, node, slot, processes.environment(context, node, slot, rank, context.spec.target)
        )
    ask(context)


def _spares_can_wait(context: Context) -> bool:
    """Whether those that are there suffice to get over a fault, which happened just now."""
    # Their own start takes a processor for a second. Where several nodes are on one machine, survivors and newcomer would
    # have to share theirs with it until the first commit. For no longer than it takes to find a lost node: a first step
    # may compile for minutes, and then the next fault would find no spare.
    s = context.state
    if not context.is_ahead(Timer.SPARE_AFTER):
        return False
    staying = context.count_workers(WorkerPhase.MEMBER, WorkerPhase.PARKED)
    return staying + len(queries.ready_to_join(context)) >= s.target


def ask(context: Context) -> None:
    """Requests one node from the engine for each one that is missing."""
    s = context.state
    if context.is_ahead(Timer.ASK_AFTER):
        return
    wanted = s.wanted_nodes + context.spec.spares
    # Counted when asked, not when they come: this runs after every batch, and would otherwise ask again each
    # time until the node is there.
    missing = queries.missing(context)
    if missing:
        s.membership.asked_daily.roll(queries.asked_for_faults(s), context.now)
    for _ in range(missing):
        s.membership.replacing += 1
        s.membership.replaced += 1
        s.membership.asked_at_s = context.now
        context.order(ProvideNode(f"the job has {queries.count_staying(context)} of {wanted} nodes"))


def ask_again_s(context: Context) -> float | None:
    """When requested nodes count as lost on their way, on the core's clock; None: none is on its way. Earlier when the job
    cannot train without them."""
    if not context.state.membership.replacing:
        return None
    # With nobody training, every second is lost, so a request counts as lost sooner. While the job trains, a
    # slow engine costs nothing, and asking again could give nodes that nobody pays attention to.
    halves = 1 if context.state.membership.phase is JobPhase.GATHERING else 4
    return context.state.membership.asked_at_s + halves * context.timing.wait_s / 2


def write_off(context: Context) -> None:
    """Stops waiting for nodes that were requested too long ago."""
    again_s = ask_again_s(context)
    if again_s is not None and context.reached(again_s):
        _forget_provisions(context)


def _forget_provisions(context: Context) -> None:
    """Nodes that were asked for are not waited for any more: what is missing is asked for anew."""
    # The open orders as well, or an engine that comes back late would provide each node twice.
    context.state.membership.replacing = 0
    context.state.orders.withdraw(ProvideNode)


def order_done(context: Context, done: OrderDone) -> None:
    """Handles the engine's acknowledgement of an order."""
    order = context.state.orders.close(done.order_id)
    # None: it was acknowledged before, or withdrawn while the engine carried it out.
    if order is not None and done.error is not None:
        node = None if isinstance(order, ProvideNode) else order.node
        context.record(ledger.OrderFailed(order=kind_of(order), node=node, error=done.error))


def unavailable(context: Context, reason: str) -> None:
    """Handles the engine's answer that it has no node now. The request is repeated after a while and does not count as one that
    was used up."""
    s = context.state
    if s.membership.replacing > 0:
        s.membership.replacing -= 1
        # The budget counts nodes that were got, not requests: an engine without nodes would otherwise use up
        # a job's repairs by saying no.
        s.membership.replaced -= 1
    s.deadlines.set(Timer.ASK_AFTER, context.now + context.timing.form_s)
    context.record(ledger.NodeUnavailable(reason=reason))
    for node in context.nodes_in(NodePhase.LEAVING):
        if node.health.then is not None and node.leaving is not None:
            context.record(ledger.NodeTrainsOn(node=node.name, reason=node.leaving))


def available(context: Context) -> None:
    """Handles the engine's news that it has nodes again."""
    context.state.deadlines.clear(Timer.ASK_AFTER)


def ask_no_sooner(context: Context, until_s: float) -> None:
    """Holds requests for nodes back until this time."""
    context.state.deadlines.set(
        Timer.ASK_AFTER, max(context.state.deadlines.at(Timer.ASK_AFTER) or 0.0, until_s)
    )


def on_its_way(context: Context) -> None:
    """Counts a machine that is rebooting among the requested nodes: it comes back as a new node."""
    membership = context.state.membership
    membership.asked_daily.roll(queries.asked_for_faults(context.state), context.now)
    membership.replacing, membership.replaced, membership.asked_at_s = (
        membership.replacing + 1,
        membership.replaced + 1,
        context.now,
    )


def forget(context: Context) -> None:
    """Drops old nodes, so that the state stays small however long the job runs. The ledger keeps what is dropped here."""
    membership = context.state.membership
    gone = [w.name for w in context.workers_in(WorkerPhase.GONE)]
    if len(gone) > 2 * KEPT_GONE:
        members = {x.worker for x in membership.generation.members} if membership.generation else set()
        # Members and finished workers are kept: the generation refers to the first, and the job's last state
        # is held by the second.
        for name in gone[:-KEPT_GONE]:
            if name not in members and membership.workers[name].digest is None:
                transitions.forget_worker(context, name)
                membership.assignments.pop(name, None)
        needed = {f.worker for f in membership.failures}
        membership.root_causes = {
            w: b for w, b in membership.root_causes.items() if w in membership.workers or w in needed
        }
    lost = [
        n.name
        for n in context.nodes_in(NodePhase.LOST)
        if n.refused is None and n.health.boots_until_s is None
    ]
    if len(lost) > 2 * KEPT_GONE:
        for name in lost[:-KEPT_GONE]:
            transitions.forget_node(context, name)
