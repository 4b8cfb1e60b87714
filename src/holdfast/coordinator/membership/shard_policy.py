"""Replicas of several workers: what the core knows of their shape, and who is to be built for which shard."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.coordinator.kernel import transitions
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.deadlines import Watched
from holdfast.coordinator.kernel.membership_state import Blame, Worker
from holdfast.coordinator.kernel.phases import WorkerPhase
from holdfast.coordinator.kernel.requests import StopJob
from holdfast.coordinator.membership.rank_assignment import Seating, seat, wanted
from holdfast.protocol import ledger
from holdfast.protocol import messages as m
from holdfast.protocol.causes import ShapesDiffer

SEATED = (WorkerPhase.MEMBER, WorkerPhase.PARKED)
COMING = (WorkerPhase.STARTING, WorkerPhase.ATTACHED)


def fits(context: Context, worker: Worker, ready: m.Ready) -> bool:
    """Notes the shape that the script gave its replicas; all workers must agree. False: this one does not."""
    s = context.state
    known = any(w.ready is not None for w in context.index.alive_workers.values())
    if not known or ready.shape == s.membership.shape:
        s.membership.shape, worker.shard_index = ready.shape, ready.shard_index
        for starting in context.workers_in(*COMING):
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
            context.request(
                StopJob(f"{reason} for a replica of {s.membership.shard_count} workers", "stopped")
            )
        return True
    reason = f"{worker.name} made replicas of shard x tensor = {ready.shape}, other workers made {s.membership.shape}"
    advice = "call run.mesh() with the same sizes everywhere"
    blame = Blame(cause=ShapesDiffer(reason), rank=None, node=worker.node, log=worker.log)
    context.request(StopJob(f"{reason}: {advice}", "failed", blame))
    return False


def shards_of(workers: Iterable[Worker]) -> dict[str, int]:
    """Which shard each of them holds or was built for."""
    return {w.name: w.shard_index for w in workers}


def seating(context: Context, survivors: Iterable[Worker], newcomers: Iterable[Worker]) -> Seating:
    """Who sits where in the next generation."""
    s = context.state
    most = s.target // s.membership.shard_count
    return seat(
        s.membership.generation, shards_of(survivors), shards_of(newcomers), s.membership.shard_count, most
    )


def strength(context: Context, survivors: list[Worker], newcomers: list[Worker]) -> int:
    """So many workers would compute."""
    membership = context.state.membership
    if membership.shard_count == 1:
        return len(survivors) + len(newcomers)
    there = len(survivors) + len(newcomers)
    replicas = seat(
        membership.generation, shards_of(survivors), shards_of(newcomers), membership.shard_count, there
    ).replicas
    return len(replicas) * membership.shard_count


def next_shard(context: Context, rank: int) -> int:
    """The shard for which a worker that is started now is most likely needed. While the shape is not known its rank, of
    which the worker takes the remainder."""
    s = context.state
    if s.membership.shard_count == 1:
        return rank
    there = [w.shard_index for w in context.alive_workers() if s.membership.nodes[w.node].leaving is None]
    replicas = max(s.target // s.membership.shard_count, len(there) // s.membership.shard_count + 1)
    return wanted(there, s.membership.shard_count, replicas)[0]


def _replicas_within_reach(context: Context, there: list[int], others: int) -> int:
    """So many complete replicas there can be, of workers that hold a shard and `others` that may be built for any."""
    s = context.state
    replicas = max(1, s.target // s.membership.shard_count)
    while replicas > 1 and len(wanted(there, s.membership.shard_count, replicas)) > others:
        replicas -= 1
    return replicas


def rebuild(context: Context) -> None:
    """Spares that were built for a shard of which there are enough are built again for one that is missing."""
    membership = context.state.membership
    if membership.shard_count == 1:
        return
    ready, seated, coming = (
        [w for w in context.workers_in(*phases) if membership.nodes[w.node].leaving is None]
        for phases in ((WorkerPhase.READY,), SEATED, COMING)
    )
    there = [w.shard_index for w in seated]
    replicas = _replicas_within_reach(context, there, len(ready) + len(coming))
    expected = [w.shard_index for w in coming]
    spare: list[Worker] = []
    for worker in ready:
        if there.count(worker.shard_index) < replicas:
            there.append(worker.shard_index)
        else:
            spare.append(worker)
    for shard_index in wanted(there, membership.shard_count, replicas):
        if shard_index in expected:
            expected.remove(shard_index)
        elif spare:
            worker = spare.pop(0)
            context.record(
                ledger.Rebuild(worker=worker.name, shard_index=shard_index, before=worker.shard_index)
            )
            transitions.enter(context, worker, WorkerPhase.ATTACHED)
            worker.shard_index = shard_index
            worker.ready, worker.rebuilds, worker.started_s = None, shard_index, context.now
            context.watch.watch(Watched.NOT_READY, worker.name)
            context.tell(worker, m.Rebuild(shard_index))
