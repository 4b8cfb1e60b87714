"""A machine that its history calls a lemon, and that trains because there was no other: it leaves when there is one.

At level 2 only, at a step's edge. At level 0 every change is a restart of all, and a start takes lemons last anyway.
"""

from __future__ import annotations

from holdfast.coordinator.health import blast_radius
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.health_state import Act, count
from holdfast.coordinator.kernel.requests import DrainNode, JoinAfter
from holdfast.coordinator.kernel.state import JobPhase, Node, WorkerPhase
from holdfast.protocol import ledger
from holdfast.protocol.health import Remedy

LEMON = "lemon"


def advance(core: Context) -> None:
    """One lemon is to leave, if a better node is ready and the limits allow it."""
    lemon = _trains(core)
    if lemon is None or not (better := _better(core, lemon)) or core.now < _from_s(core, lemon):
        return
    instead = ", ".join(n.name for n in better)
    core.record(ledger.LemonLeaves(node=lemon.name, reason=lemon.lemon, instead=instead))
    act = Act(core.now, lemon.machine, lemon.name, LEMON, Remedy.REPLACE, done_s=core.now)
    blast_radius.entered(core, act)
    count(core.state.health.totals.acts, act.remedy)
    core.request(DrainNode(lemon, f"its history: {lemon.lemon}; {instead} takes its place"))


def deadlines(core: Context) -> list[float]:
    """When the limits allow what they do not allow now."""
    lemon = _trains(core)
    if lemon is None or not _better(core, lemon):
        return []
    at_s = _from_s(core, lemon)
    return [at_s] if core.now < at_s < float("inf") else []


def _trains(core: Context) -> Node | None:
    """The lemon with the lowest rank in a job that lacks nobody and changes nothing."""
    s = core.state
    if (
        s.phase is not JobPhase.RUNNING
        or s.yielding
        or s.stop_reason is not None
        or not core.at_full_strength()
        or s.generation is None
        or s.generation_committed <= s.generation.start  # this one is to bring something first
    ):
        return None
    if blast_radius.repairs(core) >= core.spec.max_restarts or any(
        n.leaving is not None for n in core.alive_nodes()
    ):
        return None
    members = [s.nodes[w.node] for w in core.members() if w.node in s.nodes]
    return next((n for n in members if n.lemon and n.alive and n.then is None), None)


def _better(core: Context, lemon: Node) -> list[Node]:
    """Nodes that are ready to take its place, and of which less is known that speaks against them."""
    s = core.state
    doubted = {s.incidents[number - 1].node for number in s.health.undecided}
    ready = [s.nodes[w.node] for w in core.workers_in(WorkerPhase.READY)]
    good = [
        n
        for n in ready
        if not n.lemon and n.held is None and n.failures <= lemon.failures and n.name not in doubted
    ]
    needed = sum(w.node == lemon.name for w in core.members())
    return list({n.name: n for n in good[:needed]}.values()) if len(good) >= needed else []


def _from_s(core: Context, lemon: Node) -> float:
    """From when on it may leave: once in a window, within the limit of nodes that are acted on, and not so often that
    newcomers cost more than their share of the time."""
    health = core.state.health
    swapped_s = max((a.at_s for a in health.acts if a.rule == LEMON and not a.earlier), default=None)
    waits = [core.request(JoinAfter(sum(w.node != lemon.name for w in core.members())))]
    if swapped_s is not None:
        waits.append(swapped_s + core.spec.health.blast_window_s)
    if not blast_radius.may_act(core, lemon.machine):
        waits.append(blast_radius.may_act_at_s(core))
    return max(waits)
