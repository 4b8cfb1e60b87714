"""Who is there: agents that come, come back and are lost, the workers they start, and requests for more."""

from __future__ import annotations

from holdfast.coordinator.health import queries as health
from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.events import ProvideNode, ReleaseNode
from holdfast.coordinator.kernel.history import Remembered
from holdfast.coordinator.kernel.requests import (
    AdmitNode,
    CompareCopies,
    DropCopies,
    NoteNodeLost,
    RefuseAdmission,
    RepeatOrders,
)
from holdfast.coordinator.kernel.state import JobPhase, Node, Worker, WorkerPhase
from holdfast.coordinator.membership import (
    failures,
    gang,
    generations,
    resize,
    shard_policy,
    shutdown,
    workers,
)
from holdfast.protocol import causes, ledger
from holdfast.protocol import messages as m
from holdfast.protocol.health import Remedy
from holdfast.protocol.phases import Phase

KEPT_GONE = 32
"""So many workers and nodes that are gone are remembered, for what is still said about them."""

# ---------------------------------------------------------------- agents


def joined(core: Context, hello: m.Hello, past: tuple[Remembered, ...] = ()) -> None:
    """An agent said hello, for the first time or again. past: what is known of the machine."""
    s = core.state
    known = s.nodes.get(hello.node)
    if hello.version != m.PROTOCOL_VERSION:
        theirs, ours = hello.version, m.PROTOCOL_VERSION
        _refuse(core, hello.node, f"it speaks version {theirs}, not {ours}; run one Holdfast on all nodes")
        return
    if known is not None and known.refused is not None:
        _refuse(core, hello.node, known.refused)
        return
    if known is not None and known.session == hello.session:
        if not known.alive:
            known.fenced = False
            fence(core, known, hello.node)
            return
        known.last_seen_s = core.now
        _reconcile(core, known, hello)
        core.request(RepeatOrders(known))
        return
    if known is not None and known.alive:
        lose(core, known, causes.AgentReplaced(), release=False)
    reason = health.refusal(hello)
    if reason is not None:
        core.request(RefuseAdmission(hello, reason))
        _refuse(core, hello.node, reason)
        s.joined += known is None
        s.replacing = max(0, s.replacing - 1)
        return
    s.nodes.pop(hello.node, None)
    node = Node(hello.node, hello.session, hello.host, hello.slots, core.now, ports=hello.ports)
    node.rack = hello.rack
    node.failures = known.failures if known else 0
    s.nodes[hello.node] = node
    if hello.leaving is not None:
        resize.going(core, node.name, hello.leaving.reason, hello.leaving.within_s)
    s.joined += known is None
    s.replacing = max(0, s.replacing - 1)
    core.record(ledger.NodeJoined(node=hello.node, host=hello.host, slots=hello.slots))
    core.request(AdmitNode(node, hello, past, known))
    _reconcile(core, node, hello)


def _refuse(core: Context, name: str, reason: str) -> None:
    core.record(ledger.NodeRefused(node=name, reason=reason))
    core.send(name, m.Shutdown(f"this node is refused: {reason}"))


def give_up(core: Context, node: Node, cause: causes.Cause) -> None:
    """A node is at fault, not what runs on it: it is lost, and it may not come back."""
    node.refused = str(cause)
    lose(core, node, cause)


def taken(core: Context, name: str, reason: str) -> None:
    """A node belongs to somebody else now: what still runs there is to end, not to come back as a new node."""
    node = core.state.nodes.get(name)
    if node is None:
        return
    node.leaving = node.leaving or reason
    if node.alive:
        lose(core, node, causes.NodeReclaimed(reason), release=False)
    core.record(ledger.NodeTaken(node=name, reason=reason))


def fence(core: Context, node: Node | None, name: str) -> None:
    """A node that was given up speaks: nothing of it may run on. It comes back as a new one."""
    if node is not None and node.leaving is not None:
        core.send(name, m.Shutdown(node.leaving))  # it left as planned, and is not to come back
        return
    refused = core.state.health.turned_away.get(name) if node is None else node.refused
    if refused is not None:  # what it says now was on its way before it heard so
        core.send(name, m.Shutdown(f"this node is refused: {refused}"))
        return
    if node is None or not node.fenced:
        core.send(name, m.Fence("the job went on without this node"))
    if node is not None:
        node.fenced = True


def lose(core: Context, node: Node, cause: causes.Cause, release: bool = True) -> None:
    """A node is gone, or is treated so. release: tell the engine, that nothing of it runs on."""
    s = core.state
    transitions.lose_node(node)
    ours = [w for w in core.alive_workers() if w.node == node.name]
    part = [w for w in ours if w.phase in (WorkerPhase.MEMBER, WorkerPhase.PARKED)]
    core.record(ledger.NodeLost(node=node.name, cause=str(cause), cause_kind=cause.kind))
    incident = None
    if s.level != 2 and node.refused is None:
        incident = gang.came_first(core, part, node.name, cause)
    if incident is None and part and s.phase is not JobPhase.STOPPING:
        incident = core.open_incident(cause, node=node.name, workers=[w.name for w in part])
    core.request(NoteNodeLost(node, incident))
    for worker in ours:
        transitions.enter(core, worker, WorkerPhase.GONE)
    core.request(DropCopies(node))
    if release:
        core.act(ReleaseNode(node.name, str(cause)))
    if s.level != 2:
        gang.node_lost(core, part, cause)
    elif part:
        generations.break_generation(core, cause)


def overslept(core: Context, away_s: float) -> None:
    """Nobody was heard for so long because nobody listened, and what was decided before may have left that late: it is no
    silence of theirs. Whoever has a time to answer in has as much of it as before."""
    s = core.state
    for node in s.nodes.values():
        if node.alive:
            node.last_seen_s = min(core.now, node.last_seen_s + away_s)
        node.boots_until_s = _later(node.boots_until_s, away_s)
        if node.checking is not None:
            node.checking.until_s += away_s
    for worker in core.alive_workers():
        if worker.phase in (WorkerPhase.STARTING, WorkerPhase.ATTACHED):
            worker.started_s = min(core.now, worker.started_s + away_s)
        if worker.vanished_s is not None:
            worker.vanished_s = min(core.now, worker.vanished_s + away_s)
    for act in s.health.acts:
        act.until_s = _later(act.until_s, away_s)
    for storing in s.storing:
        storing.moved_s = min(core.now, storing.moved_s + away_s)
    s.unheard_s += away_s
    s.asked_at_s += away_s
    s.break_deadline_s = _later(s.break_deadline_s, away_s)
    s.stop_deadline_s = _later(s.stop_deadline_s, away_s)
    s.inspect_deadline_s = _later(s.inspect_deadline_s, away_s)
    s.wait_deadline_s = _later(s.wait_deadline_s, away_s)
    s.form_deadline_s = _later(s.form_deadline_s, away_s)


def starved(core: Context, name: str, waited_s: float) -> None:
    """A node was silent because its agent did not get a processor."""
    node = core.state.nodes.get(name)
    if node is not None and node.alive:
        node.last_seen_s = min(core.now, node.last_seen_s + waited_s)


def _later(deadline: float | None, by_s: float) -> float | None:
    return None if deadline is None else deadline + by_s


def recovered(core: Context, last_s: float) -> None:
    """This process replaced a coordinator that died. Agents that do not come back are lost.

    Time stood still meanwhile: whatever was due gets at least until every agent had its chance to reconnect.
    """
    s, timing = core.state, core.timing
    back_s = core.now + timing.adopt_s
    for node in s.nodes.values():
        node.last_seen_s = back_s - timing.detection_s
        node.boots_until_s = _not_before(node.boots_until_s, back_s)
    for worker in s.workers.values():
        worker.started_s = max(worker.started_s, back_s - timing.start_s)
        worker.vanished_s = None
    s.break_deadline_s = _not_before(s.break_deadline_s, back_s + timing.stall_s(core.median_s()))
    s.stop_deadline_s = _not_before(s.stop_deadline_s, back_s + timing.stop_s)
    s.wait_deadline_s = _not_before(s.wait_deadline_s, back_s)
    s.form_deadline_s = _not_before(s.form_deadline_s, back_s)
    s.inspect_deadline_s = None
    s.replacing, s.ask_after_s = 0, back_s  # the engine's answers may be lost, and its ear not be open yet
    incident = core.open_incident(
        causes.CoordinatorLost(),
        node=None,
        rung=incidents.COORDINATOR,
        kind="kill-coordinator",
        fault_at_s=last_s,
        needs_newcomer=False,
    )
    incident.decided_at_s = core.now


def _not_before(deadline: float | None, time_s: float) -> float | None:
    return None if deadline is None else max(deadline, time_s)


# ---------------------------------------------------------------- agent and coordinator compare what they know


def _reconcile(core: Context, node: Node, hello: m.Hello) -> None:
    """Either may have missed messages of the other; what the agent says is how things are."""
    views = {v.worker: v for v in hello.workers}
    for worker in [w for w in core.alive_workers() if w.node == node.name]:
        view = views.get(worker.name)
        if view is None and not worker.log and worker.phase in (WorkerPhase.STARTING, WorkerPhase.MEMBER):
            _never_started(core, worker)
        elif view is None or view.process == "X":
            worker.vanished_s = core.now  # its Exited follows, unless it was lost on the way
    for view in hello.workers:
        known = core.state.workers.get(view.worker)
        if known is None or known.phase is WorkerPhase.GONE:
            if view.process != "X":
                core.send(node.name, m.KillWorker(view.worker))
        else:
            _catch_up(core, known, view)
    core.request(CompareCopies(node, hello))
    if node.leaving is not None:
        core.send(node.name, m.Drain(node.leaving))  # it ignores what it knows


def _never_started(core: Context, worker: Worker) -> None:
    """The order to start it was lost, or is still waiting for a warm process: it is taken back."""
    core.send(worker.node, m.KillWorker(worker.name))
    transitions.enter(core, worker, WorkerPhase.GONE)
    if node := core.state.nodes.get(worker.node):
        node.used = [slot for slot in node.used if slot != worker.slot]
    if core.state.level != 2:
        gang.lost(core, worker, causes.NeverStarted())


def _catch_up(core: Context, worker: Worker, view: m.WorkerView) -> None:
    if view.median_s is not None:
        worker.median_s = view.median_s
    worker.aside = view.place.phase == Phase.ASIDE
    if view.attached:
        workers.attached(core, worker)
    if view.ready:
        workers.ready(core, worker, view.ready)
    if view.done:
        shutdown.done(core, worker, view.done)
    elif view.parked:
        generations.parked(core, worker, view.parked)
    if view.process != "X":
        _repeat(core, worker, view)


def _repeat(core: Context, worker: Worker, view: m.WorkerView) -> None:
    """Sends again what the worker must have been told; it ignores what it knows."""
    s = core.state
    if worker.told_to_end:
        core.send(worker.node, m.KillWorker(worker.name))
    if s.level != 2:
        return
    if worker.name in s.stops and worker.phase is WorkerPhase.PARKED:
        core.tell(worker, s.stops[worker.name])
    if worker.rebuilds is not None and view.ready is not None:
        # Its agent would know of no Ready if it had passed that on.
        core.tell(worker, m.Rebuild(worker.rebuilds))
    if s.generation is None or worker.phase is not WorkerPhase.MEMBER:
        return
    number = s.generation.number
    if view.formed < number:
        core.tell(worker, generations.form(s, worker))
    if s.yielding:
        core.tell(worker, m.Yield(number))
    elif s.phase is JobPhase.BREAKING:
        core.tell(worker, m.Break(number, "repeated"))


# ---------------------------------------------------------------- workers and nodes that are missing


def start_worker(core: Context, node: Node, slot: int, env: dict[str, str]) -> Worker:
    """A new process for one slot of a node."""
    s, spec = core.state, core.spec
    s.incarnations += 1
    worker = Worker(f"{node.name}.{slot}#{s.incarnations}", node.name, slot, core.now)
    worker.position = shard_policy.next_position(core, int(env["RANK"]))
    env = {**env, m.POSITION_VARIABLE: str(worker.position)}
    s.workers[worker.name] = worker
    if slot not in node.used:
        node.used.append(slot)
    core.send(
        node.name,
        m.StartWorker(
            worker=worker.name,
            slot=slot,
            script=spec.script,
            args=spec.args,
            module=spec.module,
            cwd=spec.cwd,
            env=env,
        ),
    )
    return worker


def staff(core: Context) -> None:
    """Every slot of every node has a worker, so that spares are ready before they are needed."""
    for node, slot in free_slots(core):
        if core.state.start_after_s is not None and core.now < core.state.start_after_s and slot in node.used:
            continue
        rank = len(core.alive_workers())
        start_worker(core, node, slot, gang.environment(core, node, slot, rank, core.spec.target))
    ask(core)


def free_slots(core: Context) -> list[tuple[Node, int]]:
    """Slots without a worker that may get one: the first for free, later ones from the restart budget."""
    taken = {(w.node, w.slot) for w in core.alive_workers()}
    spent = core.budget_spent()
    return [
        (node, slot)
        for node in core.alive_nodes()
        if node.leaving is None and node.held is None
        for slot in range(min(node.slots, core.spec.nproc))
        if (node.name, slot) not in taken and not (spent and slot in node.used)
    ]


def ask(core: Context) -> None:
    """One request to the engine for every node that is missing."""
    s = core.state
    if s.ask_after_s is not None and core.now < s.ask_after_s:
        return
    wanted = s.wanted_nodes + core.spec.spares
    for _ in range(missing(core)):
        s.replacing += 1
        s.replaced += 1
        s.asked_at_s = core.now
        core.act(ProvideNode(f"{len(_staying(core))} of {wanted} nodes are there"))


def ask_again_s(core: Context) -> float | None:
    """When nodes that were asked for count as lost on the way: early when the job cannot train without."""
    if not core.state.replacing:
        return None
    halves = 1 if core.state.phase is JobPhase.GATHERING else 4
    return core.state.asked_at_s + halves * core.timing.wait_s / 2


def write_off(core: Context) -> None:
    """Nodes that were asked for long ago count as lost on the way."""
    again_s = ask_again_s(core)
    if again_s is not None and core.now >= again_s:
        core.state.replacing = 0


def missing(core: Context) -> int:
    """Nodes to ask for: neither there, nor asked for, nor still expected from the start of the job."""
    s = core.state
    wanted = s.wanted_nodes + core.spec.spares
    staying, coming = len(_staying(core)), s.replacing + expected(core)
    lemons = sum(bool(n.lemon) and n.leaving is None for n in core.alive_nodes())
    room = wanted + max(1, core.spec.spares) - staying - lemons  # an engine may have nothing but lemons
    count = min(wanted - staying, room) - coming
    return max(0, min(count, core.spec.max_restarts + s.unpaid - s.replaced))


def _staying(core: Context) -> list[Node]:
    """Nodes that are used or will be: of those that are out for a repair, those whose device is being reset; and those
    that are checked because every new one is, or one would be asked for in the place of each."""
    deep = core.spec.health.deep
    there = [n for n in core.alive_nodes() if not n.lemon and n.leaving is None]
    return [
        n
        for n in there
        if n.held is None or n.then is Remedy.RESET_DEVICE or (deep and n.checking is not None)
    ]


def expected_until_s(core: Context) -> float:
    """When nodes that the job was started with count as lost on the way."""
    return core.state.began_s + core.timing.wait_s / 2


def expected(core: Context) -> int:
    """Nodes that the job was started with and that have not come yet."""
    s = core.state
    if core.now >= expected_until_s(core):
        return 0
    return max(0, core.spec.max_nodes + core.spec.spares - s.joined)


def hoped_for(core: Context) -> int:
    """Nodes that are there, lemons among them, on their way, or can be asked for."""
    there = sum(n.leaving is None for n in core.alive_nodes())
    return there + core.state.replacing + expected(core) + missing(core)


def unavailable(core: Context, reason: str) -> None:
    """The engine has no node now: it is asked again after a while, and the request was not one used up."""
    s = core.state
    if s.replacing > 0:
        s.replacing -= 1
        s.replaced -= 1
    s.ask_after_s = core.now + core.timing.form_s
    core.record(ledger.NodeUnavailable(reason=reason))
    for node in core.alive_nodes():
        if node.then is not None and node.leaving is not None:
            core.record(ledger.NodeTrainsOn(node=node.name, reason=node.leaving))


def available(core: Context) -> None:
    """The engine has nodes again."""
    core.state.ask_after_s = None


def ask_no_sooner(core: Context, until_s: float) -> None:
    """The engine is asked for no node before this time."""
    core.state.ask_after_s = max(core.state.ask_after_s or 0.0, until_s)


def on_its_way(core: Context) -> None:
    """A machine that was rebooted comes back as a node that was asked for."""
    s = core.state
    s.replacing, s.replaced, s.asked_at_s = s.replacing + 1, s.replaced + 1, core.now


def hopeless(core: Context) -> bool:
    """Nothing that could bring another worker is under way or left to try."""
    starting = core.workers_in(WorkerPhase.STARTING, WorkerPhase.ATTACHED)
    return not (starting or coming(core) or free_slots(core))


def coming(core: Context) -> bool:
    """Another node is on its way, or can be asked for."""
    return bool(_mending(core) or core.state.replacing or expected(core) or missing(core))


def under_repair(core: Context) -> bool:
    """Nodes are checked or repaired before they are used, for which there are deadlines."""
    return any(n.checking is not None or health.ordered(core, n) for n in core.alive_nodes())


def _mending(core: Context) -> bool:
    """A node is repaired or checked. One that is still to leave first brings nothing before there is training to leave."""
    return any(
        n.checking is not None or (n.then is not None and n.leaving is None) for n in core.alive_nodes()
    )


def forget(core: Context) -> None:
    """Keeps the state small, however long the job runs: the ledger has what is dropped here."""
    s = core.state
    gone = [w.name for w in s.workers.values() if w.phase is WorkerPhase.GONE]
    if len(gone) > 2 * KEPT_GONE:
        members = {x.worker for x in s.generation.members} if s.generation else set()
        for name in gone[:-KEPT_GONE]:
            if name not in members and s.workers[name].digest is None:
                del s.workers[name]
                s.seats.pop(name, None)
        needed = {f.worker for f in s.failures}
        s.blames = {w: b for w, b in s.blames.items() if w in s.workers or w in needed}
    lost = [n.name for n in s.nodes.values() if not n.alive and n.refused is None and n.boots_until_s is None]
    if len(lost) > 2 * KEPT_GONE:
        for name in lost[:-KEPT_GONE]:
            del s.nodes[name]
    if len(s.failures) > failures.KEPT:
        del s.failures[: -failures.KEPT // 2]
