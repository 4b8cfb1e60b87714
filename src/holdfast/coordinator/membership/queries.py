"""What other parts may read about nodes and workers. Nothing here changes the state."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.coordinator.health import queries as health
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.state import CoreState, Node, NodePhase, Worker, WorkerPhase, by_the_day
from holdfast.coordinator.membership.rank_assignment import WorkerPlaces, path
from holdfast.formulas import idle_share
from holdfast.protocol import messages as m
from holdfast.protocol.health import Remedy

COST_SHARE = 0.05
"""So much of the time may go into letting newcomers in that add little: after a change that stalled training for 0.5 s the
next one waits until 10 s have passed."""


GAIN_SHARE = 0.5
"""And so much of what they add, where that is more: to go on with half of the workers for 10 s costs more than the stall."""


def standing(context: Context, workers: Iterable[Worker]) -> WorkerPlaces | None:
    """The places of these workers and of the newest generation's members; None: no place is known."""
    membership = context.state.membership
    if not context.index.any_place:
        return None
    where = {x.worker: x.node for x in membership.generation.members} if membership.generation else {}
    where |= {w.name: w.node for w in workers}
    paths = {w: path(membership.nodes[n].place if n in membership.nodes else (), n) for w, n in where.items()}
    return WorkerPlaces(
        paths, {w: tier(membership.nodes[n]) for w, n in where.items() if n in membership.nodes}
    )


def tier(node: Node) -> tuple[bool, int]:
    """Sort key of a node for taking newcomers, the smallest first: lemons come last, before them nodes that failed before."""
    return bool(node.lemon), node.failures


def idle(state: CoreState, world: int) -> float:
    """The share of the workers' time that is wasted at this number of workers, because the micro-batches do not divide evenly."""
    count = (state.membership.most_workers or 0) // state.membership.shard_count
    replicas = world // state.membership.shard_count
    return idle_share(count, replicas) if 0 < replicas <= count else 0.0


def leaves(context: Context, worker: Worker) -> bool:
    """Whether the worker's node is about to leave."""
    node = context.state.membership.nodes.get(worker.node)
    return node is not None and node.leaving is not None


def ready_to_join(context: Context) -> list[Worker]:
    return [w for w in context.workers_in(WorkerPhase.READY) if not leaves(context, w)]


def about_to_join(context: Context) -> list[Worker]:
    starting = context.workers_in(WorkerPhase.STARTING, WorkerPhase.ATTACHED)
    return [w for w in starting if not leaves(context, w)]


def join_after_s(context: Context, staying: int, full: int = 0) -> float:
    """From when on newcomers are let in, at the next commit, which may be the generation's first: all at once if several are
    about to be ready, and not so often that joining costs more than its share of the time.

    Args:
        staying, full: workers that compute without them, and with them.
    """
    s = context.state
    if s.membership.generation is None:
        return float("inf")
    gain = 1 - staying / full if full > staying else 0.0
    after_s = (
        s.membership.grew_at_s + s.membership.join_cost_s / max(COST_SHARE, GAIN_SHARE * gain)
        if s.membership.grew_at_s
        else 0.0
    )
    ready = ready_to_join(context)
    if about_to_join(context) and staying + len(ready) < s.target:
        after_s = max(after_s, min(w.ready_at_s for w in ready) + context.timing.gather_s)
    return after_s


def free_slots(context: Context) -> list[tuple[Node, int]]:
    """Slots without a worker that may get one: the first for free, later ones from the restart budget."""
    # A slot's first worker is free of charge and costs no restart: otherwise a job of many nodes would spend
    # its budget on starting.
    spent = context.budget_spent()
    free = []
    for node in context.index.nodes_with_room():
        taken = {w.slot for w in context.workers_of(node)}
        slots = range(min(node.slots, context.spec.nproc))
        free += [(node, s) for s in slots if s not in taken and not (spent and s in node.used)]
    return free


def has_trained(context: Context, worker: Worker) -> bool:
    """Whether this start of the job has trained, or does so without this worker: at level 2 whether a generation was formed, and
    if it is a member of the first one, whether that has committed a step; else whether a step was counted."""
    membership = context.state.membership
    # At level 0 and 1 every start of all workers has a number, also one of which no worker reached its first step.
    if context.mode.replaces_one:
        first = membership.generation
        # The others' first step may compile for minutes. A spare that cannot train with them must not end it.
        if worker.phase is not WorkerPhase.MEMBER or first is None:
            return membership.number > 0
        return membership.number > 1 or membership.generation_committed > first.start
    return membership.counted.earlier + membership.committed > 0


def missing(context: Context) -> int:
    """Number of nodes to request: neither present, nor requested, nor still expected from the start of the job."""
    s = context.state
    wanted = s.wanted_nodes + context.spec.spares
    staying, coming = count_staying(context), s.membership.replacing + expected(context)
    lemons = sum(n.leaving is None for n in context.index.lemons())
    room = wanted + max(1, context.spec.spares) - staying - lemons  # an engine may have nothing but lemons
    # A lemon does not count as staying, so another node is asked for in its place; but it does count for the room. An
    # engine that gives nothing but lemons is thus asked for one more than is wanted (or as many as there are spares),
    # and not for ever.
    count = min(wanted - staying, room) - coming
    used = s.membership.asked_daily.used(
        asked_for_faults(s), over=context.reached(s.membership.asked_daily.until_s)
    )
    return max(0, min(count, by_the_day(context.spec.max_restarts, wanted) - used))


def asked_for_faults(state: CoreState) -> int:
    """Number of nodes that were ever requested to replace failed ones."""
    return state.membership.replaced - state.membership.unpaid


def count_staying(context: Context) -> int:
    """Number of nodes that are in use or will be. Includes nodes whose device is being reset, and nodes that are being checked
    only because every new node is: otherwise a replacement would be requested for each of them."""
    deep = context.spec.health.deep_checks
    lemons = sum(n.phase is NodePhase.IN_SERVICE for n in context.index.lemons())
    return (
        context.count_nodes(NodePhase.IN_SERVICE)
        - lemons
        + sum(
            n.health.then is Remedy.RESET_DEVICE or (deep and n.health.checking is not None)
            for n in context.nodes_in(NodePhase.HELD)
            if not n.lemon
        )
    )


def expected_until_s(context: Context) -> float:
    """When nodes that the job was started with count as lost on the way."""
    return context.state.began_s + context.timing.wait_s / 2


def expected(context: Context) -> int:
    """Nodes that the job was started with and that have not come yet."""
    membership = context.state.membership
    # After that a node that has not come counts as lost on the way, and another one may be asked for. Without
    # a limit, a job with one machine that never boots would wait for it and never replace it.
    if context.reached(expected_until_s(context)):
        return 0
    return max(0, context.spec.max_nodes + context.spec.spares - membership.nodes_joined)


def not_leaving(context: Context) -> int:
    """Number of nodes that are present and stay, lemons included."""
    return context.count_nodes(NodePhase.IN_SERVICE) + context.count_nodes(NodePhase.HELD)


def hoped_for(context: Context) -> int:
    """Number of nodes that are present (lemons included), on their way, or can be requested."""
    return not_leaving(context) + context.state.membership.replacing + expected(context) + missing(context)


def hopeless(context: Context) -> bool:
    """Whether nothing that could bring another worker is under way or left to try."""
    starting = context.count_workers(WorkerPhase.STARTING, WorkerPhase.ATTACHED)
    return not (starting or coming(context) or free_slots(context))


def coming(context: Context) -> bool:
    """Whether another node is on its way or can be requested."""
    return bool(
        mending(context) or context.state.membership.replacing or expected(context) or missing(context)
    )


def under_repair(context: Context) -> bool:
    """Whether nodes are being checked or repaired before they are used. Deadlines limit that."""
    return any(n.health.checking is not None for n in context.held_or_leaving()) or health.any_ordered(
        context
    )


def mending(context: Context) -> bool:
    """Whether a node is being checked or repaired. A node whose repair waits until it has left the job does not count."""
    return any(
        n.health.checking is not None or (n.health.then is not None and n.leaving is None)
        for n in context.held_or_leaving()
    )


def form(state: CoreState, worker: Worker) -> m.JoinGeneration:
    """The JoinGeneration of a member of the newest generation, to be sent for the first time or again."""
    assert state.membership.generation is not None
    assignment = state.membership.assignments[worker.name]
    return m.JoinGeneration(
        generation=state.membership.generation,
        rank=assignment.rank,
        apply=assignment.apply,
        restore=assignment.restore,
        serve=assignment.serve,
        donors=state.membership.state_sources[
            state.membership.generation.members[assignment.rank].shard_index
        ]
        if assignment.fetches
        else (),
        copy=assignment.copy,
        holders=assignment.holders,
        durable=assignment.durable,
        saves=assignment.saves,
        mtbf_s=assignment.mtbf_s,
        shards=assignment.shards,
    )
