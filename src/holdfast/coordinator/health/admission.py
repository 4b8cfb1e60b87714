"""Whether a node may be used: its basic checks, its machine's history, and the deep checks that are due. Also which node leaves
when a better one is ready."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordinator.health import limits, queries
from holdfast.coordinator.kernel import history, incidents, transitions
from holdfast.coordinator.kernel.context import (
    Context,
    DrainNode,
    JoinAfter,
    PauseRequests,
    RefuseNode,
    StopJob,
)
from holdfast.coordinator.kernel.events import Remember
from holdfast.coordinator.kernel.history import RecordKind, Remembered
from holdfast.coordinator.kernel.state import (
    KEPT_MACHINES,
    Act,
    Checking,
    Incident,
    JobPhase,
    Node,
    NodePhase,
    WorkerPhase,
    count,
)
from holdfast.protocol import ledger, units
from holdfast.protocol import messages as m
from holdfast.protocol.causes import ChecksFailed
from holdfast.protocol.engine_orders import MarkNode
from holdfast.protocol.health import Condition, Remedy

CHECKS_S = 1800.0
"""So long the deep checks of one node may take; thorough ones of many devices take a quarter of an hour."""

KEPT_REFUSED = 32
"""So many nodes that were refused are remembered."""

NEW = "it is new"

PAST_ACTS = 8
"""So many remedies of earlier jobs count for the next one on a machine."""


def refuse(context: Context, hello: m.Hello, reason: str) -> None:
    """Refuses a node: tells the engine and requests another one. Each time the next request waits longer, in case the check
    itself is wrong."""
    s = context.state
    s.health.refusals += 1
    context.order(MarkNode(hello.node, reason))
    pause_s = context.timing.heartbeat_s * 2.0 ** min(s.health.refusals - 1, 16)
    context.request(PauseRequests(context.now + min(pause_s, context.timing.wait_s)))
    s.health.turned_away[hello.node] = reason
    _refused_alike(context, hello, reason)


def _refused_alike(context: Context, hello: m.Hello, reason: str) -> None:
    """As many nodes as the job needs were refused for the same checks, and it never had one: it is its configuration, or the
    check, and the next nodes would be refused as well."""
    s = context.state
    failed = ",".join(sorted({c.name for c in hello.checks if c.condition is Condition.FAULTY}))
    if not failed or s.membership.nodes:
        s.health.alike.clear()
        return
    alike = s.health.alike.setdefault(failed, set())
    alike.add(hello.node)
    if len(alike) >= max(2, s.wanted_nodes):
        context.request(
            StopJob(
                f"{units.plural(len(alike), 'node')} were refused for the same reason ({reason})", "failed"
            )
        )


def admit(context: Context, node: Node, hello: m.Hello, past: Sequence[Remembered]) -> None:
    """Admits or refuses a node that is new, or that comes back as a new one."""
    s = context.state
    s.health.turned_away.pop(node.name, None)
    node.identity, node.devices = hello.identity, hello.devices
    unsure = [c.name for c in hello.checks if c.condition is Condition.UNKNOWN]
    if unsure:
        context.record(ledger.ChecksUnknown(node=node.name, checks=unsure))
    known = history.standing(past, node.devices)
    node.health.trial = known.trial
    transitions.set_lemon(context, node, known.lemon)
    # Only once for each machine: a node that comes back brings its history again, and one repair must not count twice
    # against the limits.
    if not any(a.machine == node.machine for a in s.health.acts):
        limits.recalled(context, [_earlier(context, node, record) for record in known.acts[-PAST_ACTS:]])
    if known.quarantine and node.machine not in s.health.quarantine:
        _give_up(context, node.machine, known.quarantine, known.by_rule)
    if why := s.health.quarantine.get(node.machine):
        _check(context, node, why)
    elif context.spec.health.deep_checks:
        _check(context, node, NEW)
    if node.lemon:
        context.record(ledger.Lemon(node=node.name, reason=node.lemon))


def forget(context: Context) -> None:
    """Drops the oldest refusals. The newest are kept, because such nodes may still send messages."""
    turned_away = context.state.health.turned_away
    for name in list(turned_away)[:-KEPT_REFUSED]:
        del turned_away[name]


def _earlier(context: Context, node: Node, record: Remembered) -> Act:
    """A remedy of another job, on this one's clock."""
    at_s, remedy = context.now - record.age_s, Remedy(record.remedy)
    act = Act(
        at_s=at_s,
        machine=node.machine,
        node=node.name,
        rule=record.rule,
        remedy=remedy,
        device=record.device,
        earlier=True,
    )
    act.done_s = at_s
    return act


def _check(context: Context, node: Node, why: str) -> None:
    s = context.state
    s.health.requests += 1
    transitions.hold(context, node, f"deep checks: {why}")
    node.health.checking = Checking(s.health.requests, context.now + CHECKS_S, why)
    context.record(
        ledger.NodeHeld(node=node.name, reason=f"not used until it has passed the deep checks: {why}")
    )
    repeat(context, node)


def repeat(context: Context, node: Node) -> None:
    """Sends the order whose answer is missing, for the first time or again."""
    if node.health.checking is not None:
        context.send(node.name, m.RunChecks(request=node.health.checking.request, deep=True))


def checked(context: Context, node: Node, message: m.Checked) -> None:
    """Handles the results of an agent's checks. A node that was given up may be used again only if all checks pass. A new node
    is not refused for a check that could not be run."""
    # The answer to an earlier order describes the machine as it was before what led to this one.
    if node.health.checking is None or message.request != node.health.checking.request:
        return
    new = node.machine not in context.state.health.quarantine
    # A machine that was given up has to prove itself; a new one has to be proven wrong. With one rule for
    # both, sites whose sensors cannot be read would have no nodes, or faulty ones would come back.
    fine = (Condition.HEALTHY, Condition.UNKNOWN) if new else (Condition.HEALTHY,)
    bad = [r for r in message.results if r.condition not in fine]
    if bad or not message.results:
        turn_away(
            context, node, f"its deep checks did not pass: {queries.described(bad) or 'no check was run'}"
        )
        return
    took = [r.name for r in message.results]
    node.health.checking = None
    transitions.use(context, node)
    was = _take_back(context, node.machine)
    context.record(ledger.Readmitted(node=node.name, checks=took, was=was))
    if was and node.lasting:
        context.act(
            Remember(
                machine=node.lasting,
                kind=RecordKind.READMITTED,
                node=node.name,
                text=f"passed {len(took)} deep checks",
            )
        )


def turn_away(context: Context, node: Node, reason: str) -> None:
    """Refuses a node that was held for checks, and requests another one from the engine."""
    node.health.checking = None
    count(context.state.health.totals.withheld, "checks")
    context.order(MarkNode(node.name, reason))
    quarantine(context, node, reason, None)
    context.record(ledger.NodeRefused(node=node.name, reason=reason))
    context.request(RefuseNode(node, ChecksFailed(reason)))


def quarantine(context: Context, node: Node, reason: str, incident: Incident | None) -> None:
    """Keeps the machine out of this job and others until it has passed the deep checks."""
    rule, device = (incident.rule, incident.device) if incident else ("", "")
    _give_up(context, node.machine, reason[:400], rule)
    if node.lasting:
        context.act(
            Remember(
                machine=node.lasting,
                kind=RecordKind.QUARANTINED,
                node=node.name,
                rule=rule,
                device=device,
                text=reason[:400],
                incident=incident.id if incident else 0,
            )
        )


def _give_up(context: Context, machine: str, why: str, rule: str) -> None:
    health = context.state.health
    _take_back(context, machine)
    health.quarantine[machine] = why
    if rule:
        health.quarantine_rules[machine] = rule
    # Taken out first above, so that a machine given up again is the newest. The oldest is forgotten by this job alone: the
    # site's history has it, and tells of it when the machine's node says hello.
    while len(health.quarantine) > KEPT_MACHINES:
        _take_back(context, next(iter(health.quarantine)))


def _take_back(context: Context, machine: str) -> str | None:
    """Why it was in quarantine, if it was."""
    context.state.health.quarantine_rules.pop(machine, None)
    return context.state.health.quarantine.pop(machine, None)


def lost(context: Context, node: Node, incident: Incident) -> None:
    """Counts the loss of a node in use that no rule explains: it is part of the machine's history."""
    if len(incident.lost_nodes) > 1:
        return  # what they share was lost, which says nothing about any of them
    machines = context.state.health.engine.nodes_are_machines
    if node.lasting and machines and not incident.rule:
        context.act(
            Remember(
                machine=node.lasting,
                kind=RecordKind.LOST,
                node=node.name,
                text=str(incident.cause)[:400],
                incident=incident.id,
            )
        )


def cleared(context: Context, machine: str, rule: str, remember: bool = False) -> None:
    """A person says that a machine is well, or that a rule was wrong about it. What was asked about it is answered. A
    quarantine for something else than that rule stands.

    remember: no history has it yet. Without a record what was said before would hold again for the next node that joins from
    there, and for the next job.
    """
    health = context.state.health
    there = [n for n in context.state.membership.nodes.values() if n.machine == machine]
    names = {n.name for n in there}
    if remember and there and (lasting := there[-1].lasting):
        kind = RecordKind.FALSE_POSITIVE if rule else RecordKind.CLEARED
        context.act(
            Remember(machine=lasting, kind=kind, node=there[-1].name, rule=rule, text="cleared by a person")
        )
    health.asks[:] = [a for a in health.asks if a.node not in names or rule not in ("", a.rule)]
    if rule and machine in health.quarantine and health.quarantine_rules.get(machine) != rule:
        return
    _take_back(context, machine)
    for node in [n for n in context.alive_nodes() if n.machine == machine]:
        transitions.set_lemon(context, node, "")
        if node.held is not None and node.health.then is None:
            node.health.checking = None
            transitions.use(context, node)
            context.record(ledger.Readmitted(node=node.name, checks=[], was="cleared by a person"))


LEMON = "lemon"


# ---------------------------------------------------------------- lemons
# A machine that its history calls a lemon, and that trains because there was no other: it leaves when there is one.
#
# At level 2 only, at a step's edge. At level 0 every change is a restart of all, and a start takes lemons last anyway.


def advance(context: Context) -> None:
    """Lets one lemon leave, if a better node is ready and the limits permit it."""
    lemon = _trains(context)
    # All conditions at once: a job at full strength, a better node that is ready, and the limits. A lemon
    # that trains is better than a hole.
    if (
        lemon is None
        or not (better := _better(context, lemon))
        or not context.reached(_from_s(context, lemon))
    ):
        return
    instead = ", ".join(n.name for n in better)
    context.record(ledger.LemonLeaves(node=lemon.name, reason=lemon.lemon, instead=instead))
    # Entered as an act, so that swaps count for the blast radius. A wrong history must not empty the job node
    # by node.
    act = Act(
        at_s=context.now,
        machine=lemon.machine,
        node=lemon.name,
        rule=LEMON,
        remedy=Remedy.REPLACE,
        done_s=context.now,
    )
    limits.entered(context, act)
    limits.count_act(context, act.remedy)
    context.request(DrainNode(lemon, f"its history: {lemon.lemon}; {instead} replaces it"))


def _trains(context: Context) -> Node | None:
    """The lemon with the lowest rank in a job that lacks nobody and changes nothing."""
    s = context.state
    # First of all, since a job nearly always has none: what follows counts and looks for members.
    if not (known := {n.name for n in context.index.lemons() if n.health.then is None}):
        return None
    if (
        s.membership.phase is not JobPhase.RUNNING
        or s.membership.yielding
        or s.membership.stop_reason is not None
        or not context.at_full_strength()
        or s.membership.generation is None
        or s.membership.generation_committed
        <= s.membership.generation.start  # this one is to bring something first
    ):
        return None
    leaving = context.count_nodes(NodePhase.LEAVING)
    if leaving or limits.repairs(context) >= context.spec.max_restarts:
        return None
    return next((s.membership.nodes[w.node] for w in context.members() if w.node in known), None)


def _better(context: Context, lemon: Node) -> list[Node]:
    """Nodes that are ready to take its place, and of which less is known that speaks against them."""
    s = context.state
    doubted = {incidents.numbered(s, number).node for number in s.health.undecided}
    ready = [s.membership.nodes[w.node] for w in context.workers_in(WorkerPhase.READY)]
    good = [
        n
        for n in ready
        if not n.lemon and n.held is None and n.failures <= lemon.failures and n.name not in doubted
    ]
    # As many ready workers as the lemon has members. With fewer the job would be smaller after the swap.
    needed = sum(w.node == lemon.name for w in context.members())
    return list({n.name: n for n in good[:needed]}.values()) if len(good) >= needed else []


def _from_s(context: Context, lemon: Node) -> float:
    """From when on it may leave: once in a window, within the limit of nodes that are acted on, and not so often that
    newcomers cost more than their share of the time."""
    health = context.state.health
    swapped_s = max((a.at_s for a in health.acts if a.rule == LEMON and not a.earlier), default=None)
    # Not more often than newcomers may join: each swap stalls everyone once.
    waits = [context.request(JoinAfter(sum(w.node != lemon.name for w in context.members())))]
    if swapped_s is not None:
        waits.append(swapped_s + context.spec.health.blast_window_s)
    if not limits.may_act(context, lemon.machine):
        waits.append(limits.may_act_at_s(context))
    return max(waits)
