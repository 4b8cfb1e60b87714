"""What other parts may read about snapshots and checkpoints. Nothing here changes the state."""

from __future__ import annotations

from holdfast.checkpoint.policy import mtbf_s
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.state import HeldShard, JobPhase, MemorySnapshot, Node, Storing
from holdfast.protocol import messages as m
from holdfast.protocol.place import nearness
from holdfast.protocol.snapshots import Copy, Holder


def newest_complete(context: Context) -> MemorySnapshot | None:
    """The newest snapshot of which every shard is held by a node that is alive; None: there is none."""
    # Holders, not the mark `complete`: a snapshot short of copies that were never made can still be restored,
    # and after a fault that is all that matters.
    there = [x for x in context.state.storage.snapshots if has_all(x)]
    return max(there, key=lambda x: (x.step, x.generation), default=None)


def has_all(snapshot: MemorySnapshot) -> bool:
    """Whether every shard of a snapshot is held by some node."""
    return {h.copy.key.rank for h in snapshot.shards} == set(range(snapshot.world))


def sources(
    context: Context, snapshot: MemorySnapshot, rank: int, node: str
) -> tuple[Copy, tuple[Holder, ...]]:
    """A shard of a snapshot and its holders, the node's own memory first."""
    entries = [h for h in snapshot.shards if h.copy.key.rank == rank]
    # The node's own memory first: no network, and it stays readable when the network is what failed.
    best = max(entries, key=lambda h: (node in h.nodes, len(h.nodes)))
    return best.copy, tuple(sorted(holders(context, best), key=lambda h: h.node != node))


def holders(context: Context, entry: HeldShard) -> tuple[Holder, ...]:
    nodes = [context.state.membership.nodes[n] for n in entry.nodes]
    return tuple(Holder(n.name, n.host, n.memory.port, n.memory.server) for n in nodes if n.alive)


def savers(context: Context, generation: m.Generation) -> frozenset[int]:
    """The ranks of a generation that save snapshots."""
    return frozenset(r for p in range(generation.shard_count) for r in savers_of(context, generation, p))


def savers_of(context: Context, generation: m.Generation, shard_index: int) -> frozenset[int]:
    """The ranks that save one shard. All members of a replica group hold the same; the ones chosen are on different nodes, far
    apart where possible, so that no copies have to be sent."""
    # One saver per node: a second one would put the same bytes into the same memory.
    first: dict[str, int] = {}
    for member in (generation.members[r] for r in generation.replica_group(shard_index)):
        if context.state.membership.nodes[member.node].memory.port:
            first.setdefault(member.node, member.rank)
    wanted = context.spec.saving.snapshots.copies + 1
    chosen: list[str] = []
    # First from different places, then any. Members that copy from their own GPU cost nothing on the network, so
    # as many copies as are wanted are made in this way.
    while len(chosen) < min(wanted, len(first)):
        left = [n for n in first if n not in chosen]
        # Without places, and mostly with them, the very first is far from all: then none is compared beyond it.
        far = next((n for n in left if not nearest(context, n, chosen)), None)
        chosen.append(far or min(left, key=lambda n: nearest(context, n, chosen)))
    return frozenset(first[n] for n in chosen)


def nearest(context: Context, name: str, others: list[str]) -> int:
    """How many levels of its place a node shares with the nearest of others."""
    nodes = context.state.membership.nodes
    return max((nearness(nodes[name].place, nodes[n].place) for n in others), default=0)


def mean_time_between_failures_s(context: Context) -> float:
    """Seconds between failures, for `--snapshot-every auto`: from the job's own incidents and a prior."""
    s = context.state
    return mtbf_s(incidents.total(s), context.now - s.began_s)


def writes(context: Context, node: Node) -> bool:
    """Whether this node still has to write a part of a checkpoint."""
    return any(node.name in x.waiting.values() for x in context.state.storage.storing)


def has_last(context: Context, node: Node) -> bool:
    """Whether a node that is to leave may hold a part of the job's last state."""
    s = context.state
    # At level 2 workers hand their last state to their nodes one by one. At level 0 a script saves when it
    # likes, so the newest complete snapshot is the last state.
    if context.mode.saves_together or s.membership.stop_reason is None:
        return any(name == node.name for name, _ in s.storage.last_from)
    snapshot = newest_complete(context)
    held = snapshot is not None and any(node.name in h.nodes for h in snapshot.shards)
    return held or any(x.node == node.name for x in s.storage.summing)


def ending(context: Context) -> bool:
    """Whether no worker has steps left to do."""
    s = context.state
    return s.membership.phase is JobPhase.STOPPING or bool(s.storage.last_from)


def last_step(context: Context) -> int:
    """The step of the state with which the job ends. For scripts that save their state themselves: that of the newest complete
    one."""
    s = context.state
    if not context.mode.saves_together:
        snapshot = newest_complete(context)
        return snapshot.step if snapshot is not None else 0
    return s.membership.committed if s.membership.last_step is None else s.membership.last_step


def kept_shards(context: Context, step: int) -> set[int]:
    """The shards of the last state that nodes hold."""
    s = context.state
    taken = [x for x in s.storage.snapshots if x.step == step]
    # Complete is complete, whichever generation took it. An incomplete one counts only of the current
    # generation: shards of another one are not parts of the same state.
    if any(has_all(x) for x in taken):
        return set(range(s.membership.shard_count))
    return {
        h.copy.key.rank for x in taken if x.generation == s.membership.number for h in x.shards if h.nodes
    }


def awaited_shards(context: Context) -> set[int]:
    """The shards of the last state that workers gave to their agents, and whose agents have not yet reported the result."""
    s, last = context.state, last_step(context)
    taken = [x for x in s.storage.snapshots if x.step == last]
    if any(has_all(x) or x.given_up for x in taken):
        return set()
    # A shard that is held was answered with SnapshotStored, one that was refused with SnapshotRejected;
    # whatever is left of what was given is still awaited, as long as its node lives.
    answered = {(n, h.copy.key.rank) for x in taken for h in x.shards for n in h.nodes}
    asked = [
        (s.membership.nodes[n], p)
        for n, p in s.storage.last_from
        if n in s.membership.nodes and (n, p) not in answered
    ]
    return {p for n, p in asked if n.alive and n.memory.refused_steps.get(p, -1) < last}


def moves_until_s(context: Context) -> float:
    """While something comes to a tier its checkpoint is waited for, at least until this time; so is what is summed up."""
    # As long as something moves, a job does not give up its last state, however slow the tier is. Only
    # standing still is bounded.
    storage = context.state.storage
    since_s = [x.moved_s for x in storage.storing] + [x.since_s for x in storage.summing]
    return max(since_s) + context.timing.start_s if since_s else 0.0


def only_in_memory(context: Context) -> int | None:
    """The step of the newest snapshot, if no durable tier has it or a later one; None otherwise."""
    snapshot = newest_complete(context)
    newest = context.state.storage.durable.step if context.state.storage.durable is not None else 0
    return snapshot.step if snapshot is not None and snapshot.step > newest else None


def unsaved(context: Context) -> int | None:
    """The step of the state that a job ended with, where no durable tier has it. A script that was ended by others may have given
    one that it would have saved later."""
    s = context.state
    newest = s.storage.durable.step if s.storage.durable is not None else 0
    last = [only_in_memory(context) or 0]
    if s.storage.last_failed:
        last.append(last_step(context))
    if not context.mode.saves_together and s.membership.outcome == "finished":
        last.append(s.storage.given[1])
    return max(last) if max(last) > newest else None


def may_be_in_memory(context: Context) -> bool:
    """Whether nodes may hold a newer state than any tier: the job ended before all had listed what a killed run left in their
    memory."""
    s = context.state
    newest = s.storage.durable.step if s.storage.durable is not None else 0
    missed = (
        not s.membership.number and s.membership.nodes_joined < context.spec.max_nodes + context.spec.spares
    )
    return missed or any(x.generation < 1 and x.step > newest for x in s.storage.snapshots)


def how_far(current: Storing) -> tuple[int, int] | None:
    """Bytes that are written, and the number of bytes in total, as far as nodes have reported."""
    if not current.written:
        return None
    return sum(n for n, _ in current.written.values()), sum(of for _, of in current.written.values())
