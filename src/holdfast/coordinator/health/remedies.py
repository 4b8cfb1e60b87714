"""Carries out what was decided about a node: restart its workers, reset a device, reboot, replace.

A remedy for an error that the job can live with waits until the node has left the job between two steps (`NodeHealth.then`);
one for a fatal error begins at once. At level 0 every change restarts all workers, so a remedy that can wait is carried out
with the next restart.
"""

from __future__ import annotations

from holdfast.coordinator.health import admission, limits, notes, queries
from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import (
    AwaitReturn,
    Context,
    DecideIncident,
    DrainNode,
    Escalate,
    EvictWorkers,
    KeepNode,
    LetGo,
    RemoveNode,
)
from holdfast.coordinator.kernel.history import RecordKind
from holdfast.coordinator.kernel.state import Act, Incident, Node, NodePhase, Worker, WorkerPhase
from holdfast.protocol import ledger
from holdfast.protocol import messages as m
from holdfast.protocol.causes import Cause
from holdfast.protocol.engine_orders import EngineTraits, MarkNode, RebootNode, ReleaseNode
from holdfast.protocol.health import Remedy, Severity

# ---------------------------------------------------------------- begun


def begin(context: Context, node: Node, incident: Incident, remedy: Remedy, planned: bool) -> None:
    """Begins the remedy that was decided."""
    acts = context.state.health.acts
    for before in acts:
        if before.node == node.name and not before.done:
            # One remedy per node at a time. The stronger one that begins now makes the answer to the weaker
            # one meaningless.
            before.done_s = context.now  # what was under way there is overtaken
            if before.incident != incident.id:
                close_quiet(context, incidents.numbered(context.state, before.incident))
    act = Act(
        at_s=context.now,
        machine=node.machine,
        node=node.name,
        rule=incident.rule,
        remedy=remedy,
        incident=incident.id,
        device=incident.device,
    )
    # Noted before it is done: if this process dies in between, the next one counts an act too many, which is
    # safe. One too few could exceed the limit.
    limits.entered(context, act)
    notes.remember(context, node, RecordKind.ACTED, incident, remedy.value)
    if remedy is Remedy.RESTART_WORKER:
        _restart(context, node, incident, act)
    elif planned:
        _plan(context, node, incident, remedy)
    else:
        _take_out(context, node, incident, act)


def _restart(context: Context, node: Node, incident: Incident, act: Act) -> None:
    """New workers on the node, for those that still run; one that ended is started again anyway."""
    # Restarting needs no answer. Whether it helped shows by whether the fault comes again.
    act.done_s = context.now
    ours = [w for w in context.workers_of(node) if w.phase is not WorkerPhase.DONE]
    named = [w for w in ours if w.name in incident.workers]
    gone = any(
        context.state.membership.workers[w].phase is WorkerPhase.GONE
        for w in incident.workers
        if w in context.state.membership.workers
    )
    # If a worker has ended by itself, its slot gets a new one anyway. Only where none has ended are all
    # restarted, because the finding names nobody.
    if named or not gone:
        _end(context, node, [w for w in named or ours if not w.told_to_end], incident.cause)
    close_quiet(context, incident)


def also(context: Context, node: Node, incident: Incident, name: str) -> None:
    """Ends a worker that reports the fault for which other workers of its node were ended a moment ago."""
    worker = context.state.membership.workers.get(name)
    if incident.does is not Remedy.RESTART_WORKER or worker is None:
        return
    if not (worker.exited or worker.told_to_end or worker.phase is WorkerPhase.DONE):
        _end(context, node, [worker], incident.cause)


def _plan(context: Context, node: Node, incident: Incident, remedy: Remedy) -> None:
    if incident.quiet:
        incidents.reopen(context.state, incident)
    _let_leave(context, node, remedy, f"{remedy.value} for {incident.cause}", str(incident.cause))


def ordered(context: Context, node: Node, remedy: Remedy, reason: str) -> None:
    """Carries out a remedy that a person ordered. No rule has matched, so it belongs to no incident and is charged to no
    budget."""
    _let_leave(context, node, remedy, reason, reason)


def _let_leave(context: Context, node: Node, remedy: Remedy, reason: str, held_for: str) -> None:
    # What is done when it has left. The node trains until its place is filled, so a machine that limps costs
    # nothing but its own slowness.
    node.health.then = remedy
    if context.mode.replaces_one:
        # At a step's edge, like any planned leave: nothing is lost by it.
        context.request(DrainNode(node, reason))
    elif node.held is None:
        transitions.hold(context, node, held_for)
        context.record(ledger.NodeHeld(node=node.name, reason=f"not used from the next start on: {held_for}"))


def _take_out(context: Context, node: Node, incident: Incident, act: Act) -> None:
    """Now: nothing that runs on it can be trusted."""
    if incident.quiet:
        incidents.reopen(context.state, incident)
    # The node stays and its memory with it; only its workers end, because a device cannot be reset under a
    # process that uses it.
    if act.remedy is Remedy.RESET_DEVICE:
        node.health.then = Remedy.RESET_DEVICE
        _hold(context, node, incident.cause)
        _order(context, act)
        _end(context, node, context.workers_of(node), incident.cause)
        _send(context, node, act)
        return
    act.done_s, node.health.then = context.now, None
    if act.remedy is Remedy.REBOOT:
        # Removed first and booted afterwards: the engine must not boot a node that is still in the job.
        context.request(RemoveNode(node, incident.cause))
        _reboot(context, node, incident, str(incident.cause))
    else:
        # Marked before it is removed. When the engine hears of the loss, it must know already not to give the
        # same machine back.
        _replace(context, node, incident, str(incident.cause))
        context.request(RemoveNode(node, incident.cause))
    close_quiet(context, incident)


def _hold(context: Context, node: Node, cause: object) -> None:
    """Its device is reset, and then it is used again: it does not leave."""
    transitions.hold(context, node, f"reset for {cause}")
    context.request(KeepNode(node))


def _end(context: Context, node: Node, workers: list[Worker], cause: Cause) -> None:
    context.request(EvictWorkers(node, workers, cause))


def _replace(context: Context, node: Node, incident: Incident | None, reason: str) -> None:
    context.order(MarkNode(node.name, reason))
    admission.quarantine(context, node, reason, incident)


def _reboot(context: Context, node: Node, incident: Incident | None, reason: str) -> None:
    """A node that has left the job."""
    context.record(ledger.Rebooting(node=node.name, reason=reason))
    context.order(RebootNode(node.name, reason))
    context.request(AwaitReturn())
    # Where the engine decides itself whether and to whom the node returns, there is nothing to wait for.
    if not context.state.health.engine.watches_boots:
        node.health.boots_until_s = context.now + context.spec.health.reboot_s
        node.health.boots_for = incident.id if incident is not None else 0


def engine_traits(context: Context, traits: EngineTraits) -> None:
    """Takes the engine's statement of what it can do about nodes."""
    context.state.health.engine = traits


def came_back(context: Context, node: Node, known: Node | None) -> None:
    """Recognizes a node that joins as a machine that was rebooted. known: the node that had its name before."""
    for before in [*context.nodes_in(NodePhase.LOST), *([known] if known is not None else [])]:
        same = before is known or before.machine == node.machine
        # By machine, not by name: a node may come back under another name, and would otherwise be given up as
        # one that did not boot.
        if same and before.health.boots_until_s is not None:
            took_s = context.now - before.health.boots_until_s + context.spec.health.reboot_s
            context.concerns(before.health.boots_for)
            context.record(ledger.Rebooted(node=node.name, took_s=round(took_s, 3)))
            before.health.boots_until_s = None


def _stays_away(context: Context, node: Node) -> None:
    """A machine did not come back from its boot: the next remedy. It has left the job already."""
    node.health.boots_until_s = None
    told = f"it did not come back within {context.spec.health.reboot_s:g} s of its reboot"
    incident = incidents.numbered(context.state, node.health.boots_for) if node.health.boots_for else None
    context.concerns(node.health.boots_for)
    if incident is not None:
        context.request(Escalate(node, incident, Remedy.REPLACE, told))
    _replace(context, node, incident, told)


def close_quiet(context: Context, incident: Incident) -> None:
    """Closes an incident that did not disturb training, because its remedy is complete."""
    if incident.quiet and incident.open:
        incident.full_at_s = context.now
        context.record(incidents.describe(context.state, incident, ledger.IncidentSettled))


# ---------------------------------------------------------------- planned, and now the node has left


def left(context: Context, node: Node) -> None:
    """Begins the remedy of a node that has left the job for it: none of its workers is a member any more."""
    s = context.state
    remedy, node.health.then = node.health.then, None
    act = next((a for a in reversed(s.health.acts) if a.node == node.name and not a.done), None)
    incident = incidents.numbered(s, act.incident) if act and act.incident else None
    context.concerns(act.incident if act else 0)
    cause = str(incident.cause) if incident else node.leaving or ""
    if remedy is Remedy.RESET_DEVICE and act is not None:
        node.health.then = remedy
        _hold(context, node, cause)
        _order(context, act)
        _send(context, node, act)
        return
    if act is not None:
        act.done_s = context.now
    reason = node.leaving or cause
    context.request(LetGo(node, reason))
    if remedy is Remedy.REBOOT:
        context.order(ReleaseNode(node=node.name, reason=reason))
        _reboot(context, node, incident, cause)
    else:
        _replace(context, node, incident, cause)
        context.order(ReleaseNode(node=node.name, reason=reason))
    if incident is not None:
        close_quiet(context, incident)


def call_off(context: Context, node: Node, incident: Incident) -> bool:
    """Cancels a remedy that has not begun. False: there was none, or it is under way."""
    acts = context.state.health.acts
    act = next((a for a in acts if a.incident == incident.id and not a.done and not a.request), None)
    if act is None or node.health.then is None or not node.alive:
        return False
    acts.remove(act)
    node.health.then = None
    context.request(KeepNode(node))
    transitions.use(context, node)
    incident.does = None
    context.concerns(incident.id)
    context.record(ledger.NodeStays(node=node.name))
    close_quiet(context, incident)
    return True


# ---------------------------------------------------------------- what an agent does itself


def _order(context: Context, act: Act) -> None:
    context.state.health.requests += 1
    act.request = context.state.health.requests
    act.until_s = context.now + context.timing.stop_s


def _send(context: Context, node: Node, act: Act) -> None:
    """The order goes out once nothing of the job runs on the node."""
    # Every process must have ended, not only been told to: the order waits for the exits, which the agent
    # reports.
    if any(w.node == node.name and not w.exited for w in context.state.membership.workers.values()):
        return
    act.sent, act.until_s = True, context.now + context.timing.start_s
    context.record(
        ledger.Repairing(node=node.name, remedy=act.remedy, device=act.device, incident=act.incident)
    )
    repeat(context, node)


def repeat(context: Context, node: Node) -> None:
    """Sends an order whose answer is missing, for the first time or again. An agent carries out each number once."""
    for act in context.state.health.acts:
        if act.node == node.name and act.sent and not act.done:
            context.send(node.name, m.Repair(act.request, act.remedy, act.device, act.rule))


def repaired(context: Context, node: Node, request: int, error: str | None) -> None:
    """Handles an agent's report that it carried out an order, or could not."""
    act = next((a for a in context.state.health.acts if a.request == request and a.node == node.name), None)
    if act is None or act.done:
        return
    took_s = round(context.now - act.at_s, 4)
    act.done_s, act.error, act.until_s = context.now, error, None
    node.health.then = None
    context.record(
        ledger.Repaired(node=node.name, remedy=act.remedy, error=error, incident=act.incident, took_s=took_s)
    )
    incident = incidents.numbered(context.state, act.incident)
    if error is None:
        transitions.use(context, node)
        close_quiet(context, incident)
        return
    # It stays unused, and the incident becomes fatal: a device that cannot be reset must not train.
    transitions.hold(context, node, f"{act.remedy.value} did not work: {error}")
    incident.severity, incident.does = Severity.FATAL, None
    context.request(DecideIncident(incident))
    if node.alive and node.held is not None:
        notes.ask(context, node, incident.rule, node.held, incident)
        close_quiet(context, incident)


def lost(context: Context, node: Node) -> None:
    """Handles the loss of a node during its remedy."""
    # Numbered, so repeating is safe: an agent that has done it answers again and does nothing.
    for act in context.state.health.acts:
        if act.node == node.name and not act.done:
            act.done_s, act.error = context.now, "the node was lost meanwhile"
            incident = incidents.numbered(context.state, act.incident)
            # It was to be replaced and is gone: the engine must still know that it is bad, or the same
            # machine comes back as new.
            if act.remedy is Remedy.REPLACE:
                _replace(context, node, incident, str(incident.cause))
            close_quiet(context, incident)
    node.health.then, node.health.checking = None, None


def late(context: Context) -> None:
    """Handles answers, and rebooted machines, that did not come in time."""
    # A copy, because an answer that is late may begin the next remedy, which changes the list.
    for act in list(context.state.health.acts):
        if act.until_s is not None and not act.done and context.reached(act.until_s):
            node = context.state.membership.nodes.get(act.node)
            if node is None or not node.alive:
                act.done_s = context.now
            else:
                why = "its agent did not answer" if act.sent else "its workers did not end"
                repaired(context, node, act.request, f"{why} in time")
    for node in context.held_or_leaving():
        if node.health.checking is not None and context.reached(node.health.checking.until_s):
            admission.turn_away(context, node, "its deep checks gave no answer in time")
    for node in context.nodes_in(NodePhase.LOST):
        if node.health.boots_until_s is not None and context.reached(node.health.boots_until_s):
            _stays_away(context, node)


def advance(context: Context) -> None:
    """Orders that waited for workers to end; at level 0, what waited for a restart of all."""
    for act in context.state.health.acts:
        node = context.state.membership.nodes.get(act.node)
        if node is not None and node.alive and act.request and not act.sent and not act.done:
            _send(context, node, act)
    if context.state.membership.stop_reason is not None:
        return
    for node in context.held_or_leaving():
        if node.health.then is None or queries.ordered(context, node):
            continue
        if context.mode.replaces_one and node.leaving is None:  # it was planned before the job was at level 2
            context.request(DrainNode(node, f"{node.health.then.value} for {node.held}"))
            transitions.use(context, node)
        elif not context.mode.replaces_one and not context.workers_of(node):
            left(context, node)
