"""What the other parts want to know of nodes and workers. Nothing is changed here."""

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
    """Where these workers and the members of the newest generation stand; None: of no node it is known."""
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
    """The lower, the sooner a newcomer of this node is taken: lemons last, and nodes that failed before."""
    return bool(node.lemon), node.failures


def idle(state: CoreState, world: int) -> float:
    """The share of the workers' time that nobody can use, with so many: their micro-batches do not divide evenly."""
    count = (state.membership.most_workers or 0) // state.membership.shard_count
    replicas = world // state.membership.shard_count
    return idle_share(count, replicas) if 0 < replicas <= count else 0.0


def leaves(context: Context, worker: Worker) -> bool:
    """Its node is to leave."""
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
    """Nodes to ask for: neither there, nor asked for, nor still expected from the start of the job."""
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
    """How many nodes the engine was ever asked for in the place of others that failed."""
    return state.membership.replaced - state.membership.unpaid


def count_staying(context: Context) -> int:
    """How many nodes are used or will be: of those that are out for a repair, those whose device is being reset; and those
    that are checked because every new one is, or one would be asked for in the place of each."""
    deep = context.spec.health.deep
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
    """How many nodes are there and stay, lemons among them."""
    return context.count_nodes(NodePhase.IN_SERVICE) + context.count_nodes(NodePhase.HELD)


def hoped_for(context: Context) -> int:
    """Nodes that are there, lemons among them, on their way, or can be asked for."""
    return not_leaving(context) + context.state.membership.replacing + expected(context) + missing(context)


def hopeless(context: Context) -> bool:
    """Nothing that could bring another worker is under way or left to try."""
    starting = context.count_workers(WorkerPhase.STARTING, WorkerPhase.ATTACHED)
    return not (starting or coming(context) or free_slots(context))


def coming(context: Context) -> bool:
    """Another node is on its way, or can be asked for."""
    return bool(
        mending(context) or context.state.membership.replacing or expected(context) or missing(context)
    )


def under_repair(context: Context) -> bool:
    """Nodes are checked or repaired before they are used, for which there are deadlines."""
    return any(n.health.checking is not None for n in context.held_or_leaving()) or health.any_ordered(
        context
    )


def mending(context: Context) -> bool:
    """A node is repaired or checked. One that is still to leave first brings nothing before there is training to leave."""
    return any(
        n.health.checking is not None or (n.health.then is not None and n.leaving is None)
        for n in context.held_or_leaving()
    )


def form(state: CoreState, worker: Worker) -> m.JoinGeneration:
    """What a member is told of the newest generation, at first and when it has to be told again."""
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
