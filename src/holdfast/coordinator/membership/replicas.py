"""Replicas of several workers: their shape, the shard for which each worker is built, and the process groups inside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from holdfast.coordinator.kernel import transitions
from holdfast.coordinator.kernel.context import Context, StopJob
from holdfast.coordinator.kernel.deadlines import Watched
from holdfast.coordinator.kernel.state import Halting, Node, NodePhase, RootCause, Worker, WorkerPhase
from holdfast.coordinator.membership import queries
from holdfast.coordinator.membership.rank_assignment import RankAssignment, assign, match, wanted
from holdfast.protocol import ledger
from holdfast.protocol import messages as m
from holdfast.protocol.causes import ShapesDiffer
from holdfast.protocol.notices import NoticeCause

ASSIGNED = (WorkerPhase.MEMBER, WorkerPhase.PARKED)
COMING = (WorkerPhase.STARTING, WorkerPhase.ATTACHED)


def fits(context: Context, worker: Worker, ready: m.Ready) -> bool:
    """Records the shape that the script gave its replicas, on which all workers must agree. False: this worker does not."""
    s = context.state
    known = any(w.ready is not None for w in context.index.alive_workers.values())
    if not known or ready.shape == s.membership.shape:
        # Of the others it is below that already. All, if they were counted for another shape.
        started, same = context.index.take_started(), ready.shape == s.membership.shape
        s.membership.shape, worker.shard_index = ready.shape, ready.shard_index
        for starting in started if same else context.workers_in(*COMING):
            if starting.phase in COMING:
                starting.shard_index %= s.membership.shard_count
        if (
            s.membership.asked_nodes is not None and s.membership.asked_nodes < s.least_nodes
        ):  # nobody knew the shape then
            context.record(
                ledger.Resize(nodes=s.least_nodes, before=s.membership.asked_nodes, reason="a whole replica")
            )
            s.membership.asked_nodes = s.least_nodes
        if s.wanted_nodes < s.least_nodes:
            reason = f"{s.wanted_nodes} of at least {s.least_nodes} nodes are left"
            taken = s.membership.capacity_nodes is not None and s.membership.capacity_nodes < s.least_nodes
            context.request(
                StopJob(
                    f"{reason} for a replica of {s.membership.shard_count} workers",
                    "stopped",
                    cause=NoticeCause.PREEMPTION if taken else NoticeCause.RESIZE,
                )
            )
        return True
    reason = f"{worker.name} made replicas of shard x tensor = {ready.shape}, but other workers made {s.membership.shape}"
    advice = "call run.mesh() with the same sizes everywhere"
    root_cause = RootCause(cause=ShapesDiffer(reason), rank=None, node=worker.node, log=worker.log)
    context.request(StopJob(f"{reason}: {advice}", "failed", root_cause))
    return False


def shards_of(workers: Iterable[Worker]) -> dict[str, int]:
    """The shard index that each worker holds or was built for, by name."""
    return {w.name: w.shard_index for w in workers}


def assign_ranks(
    context: Context, survivors: Sequence[Worker], newcomers: Sequence[Worker]
) -> RankAssignment:
    """The ranks of the next generation, with complete replicas first."""
    s = context.state
    most = s.target // s.membership.shard_count
    standing = queries.standing(context, [*survivors, *newcomers])
    return assign(
        s.membership.generation,
        shards_of(survivors),
        shards_of(newcomers),
        s.membership.shard_count,
        most,
        standing,
    )


def strength(context: Context, survivors: list[Worker], newcomers: list[Worker]) -> int:
    """Number of workers that would compute in a generation of these."""
    membership = context.state.membership
    if membership.shard_count == 1:
        return len(survivors) + len(newcomers)
    # The scarcest shard decides how many replicas are complete.
    counts = Counter(w.shard_index for w in (*survivors, *newcomers))
    return min(counts[q] for q in range(membership.shard_count)) * membership.shard_count


def complete_ones(context: Context) -> int:
    """Number of replicas that the workers that are ready make up."""
    return min(context.index.ready[q] for q in range(context.state.membership.shard_count))


def next_shard(context: Context, node: Node, rank: int) -> int:
    """The shard for which a worker that is started now is most likely needed. While the shape is not known a number, of
    which the worker takes the remainder: its rank, or the next one where it stands."""
    s = context.state
    # Empty where its place is not known. Of a rack there are few, however large the job is.
    peers = [w for n in context.index.nodes_at(node.place) for w in context.index.workers_of(n.name)]
    if s.membership.shard_count == 1:
        # Counted on within its place, so that replicas can be made within it whatever their size turns out to be,
        # and in whatever order nodes join. What then is too many of one shard is built again, see `rebuild`.
        used = {w.shard_index for w in peers}
        return next(n for n in count(min(used, default=rank)) if n not in used)
    there = _there(context)
    fewest = min(there.counts[q] for q in range(s.membership.shard_count))
    # Of the scarcest shards, the one that is scarce where it stands.
    near = Counter(w.shard_index for w in peers)
    scarce = (q for q in range(s.membership.shard_count) if there.counts[q] == fewest)
    chosen = min(scarce, key=lambda q: (near[q], q))
    # The caller starts a worker for it, which is the next change of the index. It is counted here already: if all were counted
    # again for each that is started, a start would cost the square of the workers.
    there.counts[chosen] += node.leaving is None
    there.at = context.index.changes + 1
    return chosen


@dataclass
class _There:
    """The number of workers for each shard, on nodes that stay."""

    at: int = -1
    """`PhaseIndex.changes` when they were counted."""
    counts: Counter[int] = field(default_factory=Counter)


def _there(context: Context) -> _There:
    known = context.transient(_There)
    if known.at != context.index.changes:
        nodes, workers = context.state.membership.nodes, context.index.alive_workers.values()
        known.counts = Counter(w.shard_index for w in workers if nodes[w.node].leaving is None)
        known.at = context.index.changes
    return known


def _replicas_within_reach(context: Context, there: list[int], others: int) -> int:
    """So many complete replicas there can be, of workers that hold a shard and `others` that may be built for any."""
    s = context.state
    replicas, counts = max(1, s.target // s.membership.shard_count), Counter(there)
    shards = range(s.membership.shard_count)
    while replicas > 1 and sum(max(0, replicas - counts[q]) for q in shards) > others:
        # Fewer replicas and not an incomplete one: a replica that lacks a shard computes nothing, and the
        # workers in it are better spent on those that can be complete.
        replicas -= 1
    return replicas


def _are_spread(context: Context) -> bool:
    """Whether the numbers of workers alone show that no ready one is too many for its shard. This is asked for every worker that
    gets ready while a large job starts."""
    if context.count_workers(*ASSIGNED) or context.count_nodes(NodePhase.LEAVING):
        return False
    there = context.count_workers(WorkerPhase.READY, *COMING)
    replicas = min(context.state.target, there) // context.state.membership.shard_count
    return max(context.index.ready.values()) <= max(1, replicas)


@dataclass
class _Rebuilt:
    """When `rebuild` looked last: with which nodes and workers, and for which target."""

    at: tuple[int, int] | None = None


def rebuild(context: Context) -> None:
    """Restarts spares that were built for a shard of which there are enough, for one that is missing."""
    membership, known = context.state.membership, context.transient(_Rebuilt)
    if membership.shard_count == 1 or not context.count_workers(WorkerPhase.READY):
        return
    looked = (context.index.changes, context.state.target)
    if known.at == looked:
        return
    known.at = looked
    if _are_spread(context):
        return
    ready, assigned, coming = (
        [w for w in context.workers_in(*phases) if membership.nodes[w.node].leaving is None]
        for phases in ((WorkerPhase.READY,), ASSIGNED, COMING)
    )
    there = [w.shard_index for w in assigned]
    replicas = _replicas_within_reach(context, there, len(ready) + len(coming))
    expected, counts = Counter(w.shard_index for w in coming), Counter(there)
    spare: list[Worker] = []
    for worker in ready:
        # First come, first kept, in the order of age: whoever is built already for a shard that is needed
        # stays, and only what is too many is built again.
        if counts[worker.shard_index] < replicas:
            there.append(worker.shard_index)
            counts[worker.shard_index] += 1
        else:
            spare.append(worker)
    for shard_index in wanted(there, membership.shard_count, replicas):
        if expected[shard_index]:
            expected[shard_index] -= 1
        elif spare:
            worker = _nearest(context, spare, shard_index)
            spare.remove(worker)
            context.record(
                ledger.Rebuild(worker=worker.name, shard_index=shard_index, before=worker.shard_index)
            )
            transitions.enter(context, worker, WorkerPhase.ATTACHED)
            worker.shard_index = shard_index
            worker.ready, worker.rebuilds, worker.awaited_s = None, shard_index, context.now
            context.watch.watch(Watched.NOT_READY, worker.name)
            context.tell(worker, m.Rebuild(shard_index))


def _nearest(context: Context, spare: Sequence[Worker], shard_index: int) -> Worker:
    """The spare that stands nearest to where a worker with this shard was lost; the first where that is not known."""
    membership = context.state.membership
    standing = queries.standing(context, spare)
    if standing is None or membership.generation is None:
        return spare[0]
    there = {w.name for w in context.workers_in(*ASSIGNED)}
    lost = [
        x.worker
        for x in membership.generation.members
        if x.shard_index == shard_index and x.worker not in there
    ]
    found = match({w: standing.paths[w] for w in lost}, [w.name for w in spare], standing.paths)
    names = set(list(found.values())[:1])
    return next((w for w in spare if w.name in names), spare[0])


# ---------------------------------------------------------------- replica groups
# The process groups inside complete replicas, which outlive a generation as long as nobody of theirs is lost.
#
# When a generation breaks, the workers of a healthy replica are in the middle of a step, and not all at the same call. Each
# says how many calls of each group it has begun, and all go on to the largest number of each group. On its way a worker may
# have to begin a call of another group, which others then go on to as well. When all stand, all leave the step there. So
# nothing is half sent between them, and the next generation uses the same connections.


def members(context: Context, replica: int) -> list[Worker]:
    """The workers of a complete replica of the newest generation."""
    g = context.state.membership.generation
    return [context.state.membership.workers[x.worker] for x in g.replica_members(replica)] if g else []


def broke(context: Context, reason: str) -> None:
    """Ends a broken generation: complete replicas agree on a common point at which to leave the step, the others leave at once."""
    membership = context.state.membership
    assert membership.generation is not None
    membership.halting = {}
    if membership.shard_count > 1:
        left = {
            x.replica
            for x in membership.generation.members
            if membership.workers[x.worker].phase is not WorkerPhase.MEMBER
        }
        membership.halting = {
            replica: Halting() for replica in range(membership.generation.replicas) if replica not in left
        }
    for member in membership.generation.members:
        worker = membership.workers[member.worker]
        if worker.phase is WorkerPhase.MEMBER:
            context.tell(
                worker, m.Break(membership.generation.number, reason, member.replica in membership.halting)
            )


def halted(context: Context, worker: Worker, message: m.Halted) -> None:
    """Handles a worker's report of how far it is in the step. When all workers of its replica have reported, they are told
    where to stop, and finally that all have."""
    membership = context.state.membership
    if membership.generation is None or message.generation != membership.generation.number:
        return
    member = membership.generation.member(worker.name)
    halting = membership.halting.get(member.replica) if member is not None else None
    if member is None or halting is None:
        return
    replica_members = members(context, member.replica)
    order = answered(halting, worker.name, message, len(replica_members))
    if order is not None:
        for other in replica_members:
            context.tell(other, order)


def answered(halting: Halting, worker: str, message: m.Halted, workers: int) -> m.RunTo | None:
    """Records the answer of one of so many workers. Returns what all are to be told when the last has answered; None until
    then."""
    # After the word to leave nobody begins a call, so what comes then is told again.
    if halting.left:
        return None
    before = dict(halting.begun)
    if not halting.stands:
        halting.first = message.begun
    if worker not in halting.stands:
        halting.alike &= message.begun == halting.first
    halting.stands[worker] = message.stands
    for group, calls in message.begun.items():
        halting.begun[group] = max(calls, halting.begun.get(group, 0))
    if len(halting.stands) < workers:
        return None
    if not halting.agreement or halting.begun != before:
        halting.agreement += 1
        # Equal counts of every group are a place where nothing is half sent, and nobody has to move to it.
        halting.left = halting.agreement == 1 and halting.alike
    elif all(stands == halting.agreement for stands in halting.stands.values()):
        halting.left = True
    else:
        return None
    return m.RunTo(message.generation, dict(halting.begun), halting.agreement, halting.left)


def give_up(context: Context) -> None:
    """A replica that halts cannot do so any more when one of its workers is gone, or has left the step in another way:
    the others leave it at once."""
    membership, generation = context.state.membership, context.state.membership.generation
    # Only those of which somebody left since the last look: to look at all of them at each answer would cost the square of the job.
    left_by = [generation.member(w.name) for w in context.index.take_left()] if generation else []
    for replica in sorted({x.replica for x in left_by if x is not None and x.replica in membership.halting}):
        replica_members = members(context, replica)
        halting = membership.halting[replica]
        gone = [w for w in replica_members if w.phase not in (WorkerPhase.MEMBER, WorkerPhase.PARKED)]
        parked = [w for w in replica_members if w.phase is WorkerPhase.PARKED]
        left = [w for w in parked if not halting.left or w.agreement != halting.agreement]
        if (gone or left) and membership.generation is not None:
            del membership.halting[replica]
            for worker in replica_members:
                if worker.phase is WorkerPhase.MEMBER:
                    context.tell(worker, m.Break(membership.generation.number, "its replica lost a worker"))


def connected_in(
    context: Context, assigned: tuple[tuple[str, ...], ...], before: m.Generation | None
) -> tuple[int, ...]:
    """For every complete replica of the next generation the one in which its groups were connected: an earlier one, where
    the same workers come from it with their groups intact, else the next one."""
    membership = context.state.membership
    known: dict[tuple[str, ...], int] = {}
    for replica, number in enumerate(before.groups_connected_in if before else ()):
        replica_members = members(context, replica)
        if len({w.agreement for w in replica_members}) == 1 and replica_members[0].agreement >= 0:
            known[tuple(w.name for w in replica_members)] = number
    return tuple(known.get(replica_members, membership.number + 1) for replica_members in assigned)
