"""Snapshots and checkpoints: who keeps a copy of what, when a snapshot is whole, when it goes to a durable tier.

A snapshot is whole when every shard of it is held by as many nodes as the job asks for (or as there are). Only then
is the one before it given up. A durable checkpoint is begun from a whole snapshot, and exists when its manifest is
published. Whatever a tier refuses is said and tried again with a later snapshot; training never waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.checkpoint import placement
from holdfast.checkpoint.policy import best_interval_s, mtbf_s, parse_cadence
from holdfast.coordinator.state import HeldShard, Node, Snapshot, Storing, Worker
from holdfast.protocol import messages as m
from holdfast.protocol.job import Durable
from holdfast.protocol.snapshots import Copy, DurableTier, Holder, Key, Shard

if TYPE_CHECKING:
    from holdfast.coordinator.core import Core

KEPT_WHOLE = 2
"""The newest whole snapshot, and the one before it while a newer one is on its way."""

STORE_COST = 0.05
"""What writing a checkpoint behind running training takes away from it, as a share of the time it takes."""

STORE_MTBF = 10
"""The whole job is lost so many times less often than a worker."""

# ---------------------------------------------------------------- what agents say


def held(core: Core, node: Node, copy: Copy) -> None:
    """A node has a shard in its memory."""
    snapshot = _snapshot(core, copy.key)
    if snapshot is None:  # a latecomer of one that a newer one has replaced
        core.send(node.name, m.SnapshotWhole(_newest_step(core)))
        return
    entry = next((h for h in snapshot.shards if h.copy == copy), None)
    if entry is None:
        entry = HeldShard(copy)
        snapshot.shards.append(entry)
    if node.name not in entry.nodes:
        entry.nodes.append(node.name)
    if node.name in entry.asked:
        entry.asked.remove(node.name)
    _spread(core, snapshot)


def not_held(core: Core, node: Node, key: Key, reason: str) -> None:
    """A node could not keep a shard. Said once, until a snapshot is whole again."""
    if not core.state.skipped:
        core.record("snapshot-skipped", node=node.name, step=key.step, rank=key.rank, reason=reason)
    core.state.skipped += 1
    snapshot = _snapshot(core, key)
    if snapshot is None:
        return
    snapshot.refused.append(node.name)
    for entry in snapshot.shards:
        if node.name in entry.asked:
            entry.asked.remove(node.name)
    _spread(core, snapshot)


def node_lost(core: Core, node: Node) -> None:
    """What it held is gone; the copies that are left are brought up to their number again."""
    s = core.state
    for snapshot in s.snapshots:
        for entry in snapshot.shards:
            entry.asked = [n for n in entry.asked if n != node.name]
            if node.name in entry.nodes:
                entry.nodes.remove(node.name)
        snapshot.shards = [h for h in snapshot.shards if h.nodes]
    s.snapshots = [x for x in s.snapshots if x.shards]
    for snapshot in s.snapshots:
        _spread(core, snapshot)
    for storing in list(s.storing):
        if node.name in storing.waiting.values():
            s.storing.remove(storing)  # the next whole snapshot is stored instead


def joined(core: Core, node: Node, hello: m.Hello) -> None:
    """A node says what it holds: a new agent that adopted its memory, or one that knows a coordinator before this."""
    node.snapshot_port = hello.snapshot_port
    there = {(c.key, c.shard.row.xxh3) for c in hello.copies}
    for snapshot in core.state.snapshots:
        for entry in snapshot.shards:
            if node.name in entry.nodes and (entry.copy.key, entry.copy.shard.row.xxh3) not in there:
                entry.nodes.remove(node.name)
        snapshot.shards = [h for h in snapshot.shards if h.nodes]
    core.state.snapshots = [x for x in core.state.snapshots if x.shards]
    for copy in hello.copies:
        held(core, node, copy)


# ---------------------------------------------------------------- copies in memory


def _newest_step(core: Core) -> int:
    return max((x.step for x in core.state.snapshots if x.whole), default=-1)


def _snapshot(core: Core, key: Key) -> Snapshot | None:
    """The snapshot that a shard is of, a new one if need be; None when a newer one is whole already."""
    wanted = (key.step, key.generation, key.world)
    for snapshot in core.state.snapshots:
        if (snapshot.step, snapshot.generation, snapshot.world) == wanted:
            return snapshot
    if key.step <= _newest_step(core):
        return None
    core.state.snapshots.append(Snapshot(key.step, key.generation, key.world, core.now))
    return core.state.snapshots[-1]


def savers(core: Core, members: tuple[m.Member, ...]) -> frozenset[int]:
    """Ranks of a generation of replicas that take the snapshots: enough of them, on different nodes, so that
    nothing needs to be sent; they hold the same."""
    chosen: dict[str, int] = {}
    for member in members:
        if len(chosen) <= core.spec.saving.copies:
            chosen.setdefault(member.node, member.rank)
    return frozenset(chosen.values())


def _spread(core: Core, snapshot: Snapshot) -> None:
    """Asks for the copies that are missing; a snapshot that misses none is whole."""
    complete = True
    for rank in range(snapshot.world):
        entries = [h for h in snapshot.shards if h.copy.key.rank == rank]
        if not entries:
            return
        best = max(entries, key=lambda h: len(h.nodes))
        missing = core.spec.saving.copies + 1 - len(best.nodes)
        if missing <= 0:
            continue
        if core.state.level == 2 and len(entries) == 1 and _expected(core, snapshot, best):
            complete = False
            continue
        for name in _buddies(core, snapshot, best)[: missing - len(best.asked)]:
            best.asked.append(name)
            core.send(name, m.Replicate(best.copy, _holders(core, best)))
        if best.asked:
            complete = False
    if complete and not snapshot.whole:
        _whole(core, snapshot)


def _expected(core: Core, snapshot: Snapshot, entry: HeldShard) -> bool:
    """Another member copies the same just now."""
    g = core.state.generation
    if g is None or snapshot.generation != g.number:
        return False
    nodes = {g.members[rank].node for rank in savers(core, g.members)}
    there = {n.name for n in core.alive_nodes()}
    return any(n in there and n not in entry.nodes and n not in snapshot.refused for n in nodes)


def _buddies(core: Core, snapshot: Snapshot, entry: HeldShard) -> list[str]:
    """Nodes that may keep another copy, the owner's own buddies first."""
    s = core.state
    alive = [n for n in core.alive_nodes() if n.snapshot_port]
    placed = placement.place({n.name: n.rack for n in alive}, core.spec.saving.copies, s.buddy_groups)
    s.buddy_groups = [list(g) for g in placed.groups]
    first = [b for n in entry.nodes for b in placed.buddies.get(n, ())]
    order = list(dict.fromkeys([*first, *(n.name for n in alive)]))
    return [n for n in order if n not in (*entry.nodes, *entry.asked, *snapshot.refused)]


def _holders(core: Core, entry: HeldShard) -> tuple[Holder, ...]:
    nodes = [core.state.nodes[n] for n in entry.nodes]
    return tuple(Holder(n.name, n.host, n.snapshot_port) for n in nodes if n.alive)


def _whole(core: Core, snapshot: Snapshot) -> None:
    s = core.state
    snapshot.whole = True
    s.skipped = 0
    copies = min(
        max(len(h.nodes) for h in snapshot.shards if h.copy.key.rank == r) for r in range(snapshot.world)
    )
    rows = {h.copy.shard.row.xxh3: h.copy.shard.row.nbytes for h in snapshot.shards}
    core.record(
        "snapshot",
        step=snapshot.step,
        generation=snapshot.generation,
        world=snapshot.world,
        nbytes=sum(rows.values()),
        nodes=copies,
        took_s=round(core.now - snapshot.began_s, 4),
    )
    if copies < core.spec.saving.copies + 1 and not s.short_of_copies:
        core.record("few-copies", nodes=copies, wanted=core.spec.saving.copies + 1)
    s.short_of_copies = copies < core.spec.saving.copies + 1
    whole = [x for x in s.snapshots if x.whole]
    newest = max(whole, key=lambda x: (x.step, x.generation))
    keep = sorted(whole, key=lambda x: (x.step, x.generation))[-KEPT_WHOLE:]
    s.snapshots = [x for x in s.snapshots if x in keep or (not x.whole and x.step > newest.step)]
    for node in core.alive_nodes():
        core.send(node.name, m.SnapshotWhole(newest.step))
    store_due(core)


# ---------------------------------------------------------------- where to go on from


def newest_whole(core: Core, world: int | None = None) -> Snapshot | None:
    """The newest snapshot of which every shard is held by a node that lives."""
    there = [
        x
        for x in core.state.snapshots
        if {h.copy.key.rank for h in x.shards} == set(range(x.world)) and world in (None, x.world)
    ]
    return max(there, key=lambda x: (x.step, x.generation), default=None)


def sources(core: Core, snapshot: Snapshot, rank: int, node: str) -> tuple[Copy, tuple[Holder, ...]]:
    """One shard and its holders, the node's own memory first."""
    entries = [h for h in snapshot.shards if h.copy.key.rank == rank]
    best = max(entries, key=lambda h: (node in h.nodes, len(h.nodes)))
    return best.copy, tuple(sorted(_holders(core, best), key=lambda h: h.node != node))


def went_back(core: Core, start: int) -> None:
    """Training goes on from `start`, and not from live state: later snapshots are of a past that did not happen."""
    s = core.state
    s.storing = [x for x in s.storing if x.step <= start]
    for tier, last in list(s.stored.items()):
        if last.step > start:
            s.stored[tier] = Storing(tier, start, last.began_s)
    if any(x.step > start for x in s.snapshots):
        s.snapshots = [x for x in s.snapshots if x.step <= start]
        for node in core.alive_nodes():
            core.send(node.name, m.ForgetSnapshots(start))


def sought(core: Core, worker: Worker, request: int) -> None:
    """A script wants to load: it is told what there is."""
    snapshot = newest_whole(core)
    durable = core.state.durable
    if snapshot is not None and (durable is None or durable.step <= snapshot.step):
        shards = tuple(sources(core, snapshot, rank, worker.node) for rank in range(snapshot.world))
        core.tell(worker, m.SnapshotFound(request, shards, durable))
    else:
        core.tell(worker, m.SnapshotFound(request, (), durable))


def mean_time_between_failures_s(core: Core) -> float:
    """What `auto` goes by: the job's own incidents, and a prior."""
    s = core.state
    return mtbf_s(len(s.incidents), core.now - s.began_s)


# ---------------------------------------------------------------- durable tiers


def store_due(core: Core) -> None:
    """Begins to store the newest whole snapshot in every tier whose time has come."""
    s = core.state
    snapshot = max((x for x in s.snapshots if x.whole), key=lambda x: (x.step, x.generation), default=None)
    if snapshot is None or s.stop_reason is not None:
        return
    for tier in core.spec.saving.tiers:
        last = s.stored.get(tier.url)
        if any(x.tier == tier.url for x in s.storing) or (last is not None and last.step >= snapshot.step):
            continue
        since_s = core.now - (last.began_s if last else s.began_s)
        passed = parse_cadence(tier.every)
        interval_s = _auto_s(core, last)
        due = passed.due(snapshot.step, since_s, interval_s)
        if passed.steps:  # snapshots may pass over the very step
            due = snapshot.step // passed.steps > (last.step if last else 0) // passed.steps
        if due:
            _store(core, tier, snapshot)


def _auto_s(core: Core, last: Storing | None) -> float:
    """Between two stores: what loses least by Daly's formula, and never more than half of the time spent storing."""
    took_s = last.took_s if last and last.took_s else 1.0
    best_s = best_interval_s(STORE_COST * took_s, STORE_MTBF * mean_time_between_failures_s(core))
    return max(best_s, 2 * took_s)


def _store(core: Core, tier: DurableTier, snapshot: Snapshot) -> None:
    s = core.state
    storing = Storing(tier.url, snapshot.step, core.now)
    rows: dict[str, Shard] = {}
    for rank in range(snapshot.world):
        copy, holders = sources(core, snapshot, rank, "")
        owner = holders[rank % len(holders)].node
        first = rows.setdefault(copy.shard.row.xxh3, copy.shard)
        shared = "" if first is copy.shard else first.row.name
        storing.waiting[rank] = owner
        core.send(owner, m.StoreShard(tier.url, copy.key, shared))
    s.storing.append(storing)


def stored(core: Core, message: m.Stored) -> None:
    """A shard is in a tier, or could not be brought there."""
    s = core.state
    storing = next((x for x in s.storing if x.tier == message.tier and x.step == message.key.step), None)
    if storing is None:
        return
    if message.shard is None:
        _failed(core, storing, message.reason)
        return
    node = storing.waiting.pop(message.key.rank, None)
    storing.shards = [x for x in storing.shards if x.rank != message.shard.rank] + [message.shard]
    if not storing.waiting and node is not None:
        tier = next(t for t in core.spec.saving.tiers if t.url == storing.tier)
        shards = tuple(sorted(storing.shards, key=lambda x: x.rank))
        storing.waiting[-1] = node
        core.send(node, m.Publish(tier, storing.step, shards))


def published(core: Core, message: m.Published) -> None:
    """A checkpoint exists, or its manifest could not be written."""
    s = core.state
    storing = next((x for x in s.storing if x.tier == message.tier and x.step == message.step), None)
    if message.error is not None:
        if storing is not None:
            _failed(core, storing, message.error)
        return
    if storing is not None:
        s.storing.remove(storing)
        storing.took_s = core.now - storing.began_s
        s.stored[storing.tier] = storing
    if s.durable is None or s.durable.step <= message.step:
        s.durable = Durable(message.step, message.tier)
    s.failing_tiers = [t for t in s.failing_tiers if t != message.tier]
    took_s = round(storing.took_s, 4) if storing and storing.took_s else None
    core.record("saved", step=message.step, url=message.tier, took_s=took_s)


def _failed(core: Core, storing: Storing, reason: str) -> None:
    """Said once; tried again with a later snapshot, after the tier's usual time."""
    s = core.state
    s.storing.remove(storing)
    last = s.stored.get(storing.tier)
    s.stored[storing.tier] = Storing(storing.tier, last.step if last else 0, core.now)
    if storing.tier not in s.failing_tiers:
        s.failing_tiers.append(storing.tier)
        core.record("tier-failed", url=storing.tier, step=storing.step, reason=reason)
