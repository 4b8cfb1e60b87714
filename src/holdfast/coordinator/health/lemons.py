"""A machine that its history calls a lemon, and that trains because there was no other: it leaves when there is one.

At level 2 only, at a step's edge. At level 0 every change is a restart of all, and a start takes lemons last anyway.
"""

from __future__ import annotations

from holdfast.coordinator.health import blast_radius
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.health_state import Act
from holdfast.coordinator.kernel.membership_state import Node
from holdfast.coordinator.kernel.phases import JobPhase, NodePhase, WorkerPhase
from holdfast.coordinator.kernel.requests import DrainNode, JoinAfter
from holdfast.protocol import ledger
from holdfast.protocol.health import Remedy

LEMON = "lemon"


def advance(context: Context) -> None:
    """One lemon is to leave, if a better node is ready and the limits allow it."""
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
    blast_radius.entered(context, act)
    blast_radius.count_act(context, act.remedy)
    context.request(DrainNode(lemon, f"its history: {lemon.lemon}; {instead} replaces it"))


def _trains(context: Context) -> Node | None:
    """The lemon with the lowest rank in a job that lacks nobody and changes nothing."""
    s = context.state
    # First of all, since a job nearly always has none: what follows counts and looks for members.
    if not (known := {n.name for n in context.index.lemons() if n.then is None}):
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
    if leaving or blast_radius.repairs(context) >= context.spec.max_restarts:
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
    if not blast_radius.may_act(context, lemon.machine):
        waits.append(blast_radius.may_act_at_s(context))
    return max(waits)
