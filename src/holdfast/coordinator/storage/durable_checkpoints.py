"""Checkpoints in durable tiers. Each is written from a complete snapshot and exists as soon as its manifest is written.

When a tier refuses a checkpoint, that is reported and tried again with a later snapshot. Training never waits for a tier.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.checkpoint.policy import Retention, parse_cadence
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.events import DurableFound
from holdfast.coordinator.kernel.state import (
    MemorySnapshot,
    Node,
    Storing,
    Summing,
    TierTotals,
    Timer,
    Worker,
)
from holdfast.coordinator.storage import queries
from holdfast.formulas import daly_interval_s
from holdfast.protocol import ledger
from holdfast.protocol import messages as m
from holdfast.protocol.job import Durable
from holdfast.protocol.snapshots import DurableTier, Key, Shard

STORE_COST = 0.05
"""What writing a checkpoint behind running training takes away from it, as a share of the time it takes."""

KEPT_OLDER = 16
"""So many older checkpoints are remembered, for when newer ones prove to be damaged."""

MAX_TRIES = 3
"""So many generations may fail to be restored from a tier that does not answer."""

STORE_MTBF = 10
"""The complete job is lost so many times less often than a worker."""


def begin_due(context: Context) -> None:
    """Begins to write the newest complete snapshot to every tier that is due for one. A tier that is still writing an older
    snapshot is skipped, so that unfinished checkpoints do not pile up behind running training."""
    s = context.state
    snapshot = max(
        (x for x in s.storage.snapshots if x.complete), key=lambda x: (x.step, x.generation), default=None
    )
    # A job that is stopping stores its last state, and nothing before that: a checkpoint that is begun now
    # would delay the one that counts.
    if snapshot is None or s.membership.stop_reason is not None:
        return
    for tier in context.spec.saving.tiers:
        last, current = s.storage.stored.get(tier.url), under_way(context, tier.url)
        step, at_s = (last.step, last.began_s) if last else (0, s.began_s)
        # While one is on its way its own time counts: otherwise every snapshot after the cadence would be
        # reported as skipped again.
        if current is not None:
            step, at_s = current.seen_step, current.seen_s
        if snapshot.step <= step and (last or current):
            continue
        passed = parse_cadence(tier.every)
        due = passed.due(snapshot.step, context.now - at_s, _auto_s(context, last))
        # Snapshots are taken when there is time, not at every step, so the very step that the cadence names
        # may have none. Passing it is what counts.
        if passed.steps:  # snapshots may pass over the very step
            due = snapshot.step // passed.steps > step // passed.steps
        # Skipped, not queued: with a tier slower than the cadence, a queue would grow for ever and each
        # checkpoint would be older than the one before.
        if due and current is not None:
            _skip(context, current, snapshot.step)
        elif due:
            _store(context, tier, snapshot)


def under_way(context: Context, url: str) -> Storing | None:
    """The checkpoint that is being written to a tier, even if a restart has undone its step; None: none is."""
    return next((x for x in context.state.storage.storing if x.tier == url), None)


def _skip(context: Context, current: Storing, step: int) -> None:
    """Said for the first one; how many there were is said when the one that they waited for is there."""
    current.skipped, current.seen_step, current.seen_s = current.skipped + 1, step, context.now
    totals(context, current.tier).skipped += 1
    if current.skipped == 1:
        context.record(ledger.CheckpointSkipped(step=step, url=current.tier, older=current.step))


# ---------------------------------------------------------------- tiers that stand still


def look(context: Context) -> None:
    """Reports checkpoints on which a tier has made no progress for too long. Training goes on meanwhile."""
    for current in context.state.storage.storing:
        if not current.slow and context.reached(current.moved_s + context.timing.tier_s):
            current.slow = True
            nbytes, total = queries.how_far(current) or (None, None)
            context.record(
                ledger.TierSlow(
                    url=current.tier,
                    step=current.step,
                    silent_s=round(context.now - current.moved_s, 1),
                    nbytes=nbytes,
                    total_bytes=total,
                )
            )


def _moved(context: Context, current: Storing) -> None:
    current.moved_s, current.slow = context.now, False


def _auto_s(context: Context, last: Storing | None) -> float:
    """Between two stores: what loses least by Daly's formula, and never more than half of the time spent storing."""
    # From what the last one took there. Before the first, a second: a short first interval, which then shows
    # the real cost.
    took_s = last.took_s if last and last.took_s else 1.0
    best_s = daly_interval_s(STORE_COST * took_s, STORE_MTBF * queries.mean_time_between_failures_s(context))
    # Never more than half of the time, whatever the formula says: with a tier that takes ten minutes, a high
    # failure rate would ask for a checkpoint every five.
    return max(best_s, 2 * took_s)


def _store(context: Context, tier: DurableTier, snapshot: MemorySnapshot, last: bool = False) -> None:
    current = Storing(
        tier=tier.url,
        step=snapshot.step,
        began_s=context.now,
        generation=snapshot.generation,
        world=snapshot.world,
        last=last,
    )
    current.moved_s = current.seen_s = context.now
    current.seen_step = snapshot.step
    by_content: dict[str, Shard] = {}
    for rank in range(snapshot.world):
        copy, holders = queries.sources(context, snapshot, rank, "")
        # Ranks with equal bytes share a blob: one of them writes it and the others only their heads.
        # Data-parallel replicas would otherwise write the same bytes once for each.
        first = by_content.setdefault(copy.shard.blob.xxh3, copy.shard)
        if first is not copy.shard:
            current.shared_blobs[rank] = first.blob.name
        # Spread over the holders, so that the node of rank 0 does not write everything in a job of equal
        # replicas.
        current.waiting[rank] = holders[rank % len(holders)].node
    context.state.storage.storing.append(current)
    for name in dict.fromkeys(current.waiting.values()):
        _order(context, current, name)


def _order(context: Context, current: Storing, name: str) -> None:
    """Asks a node for all that is waited for from it."""
    for rank, node in current.waiting.items():
        if node != name:
            continue
        if rank < 0:
            tier = next(t for t in context.spec.saving.tiers if t.url == current.tier)
            shards = tuple(sorted(current.shards, key=lambda x: x.rank))
            context.send(name, m.Publish(tier, current.step, shards))
        else:
            key = Key(current.step, current.generation, rank, current.world)
            context.send(name, m.StoreShard(current.tier, key, current.shared_blobs.get(rank, "")))


def _answered(context: Context, current: Storing, node: Node, rank: int | None = None) -> None:
    """One less to wait for (rank None: nothing more comes from this node) of a checkpoint that nobody wants."""
    current.waiting = {r: n for r, n in current.waiting.items() if n != node.name or rank not in (None, r)}
    if not current.waiting:
        context.state.storage.storing.remove(current)


def stored(context: Context, node: Node, message: m.Stored) -> None:
    """Handles a node's report that it wrote a shard to a tier, or could not."""
    key = message.key
    for current in list(context.state.storage.storing):
        # By generation too: after a rewind the same step is stored again with other bytes, and the late
        # answer of the first must not count for the second.
        if (current.tier, current.step, current.generation) != (message.tier, key.step, key.generation):
            continue
        # Only the node that was asked. After a reconnect an order is repeated, so answers come twice.
        if current.waiting.get(key.rank) != node.name:
            continue
        _moved(context, current)
        # Nobody wants it any more, but its files are still being written. It is waited for, so that its parts
        # are not mixed with those of the same step that come later.
        if current.void:
            _answered(context, current, node, key.rank)
        elif message.shard is None:
            _failed(context, current, message.reason)
        else:
            del current.waiting[key.rank]
            current.shards.append(message.shard)
            # The manifest comes last, when every shard is in the tier: it is what makes a checkpoint exist,
            # so a crash before it leaves files and no checkpoint. Whoever wrote last writes it, because that
            # node is alive and reaches the tier.
            if not current.waiting:
                current.waiting[-1] = node.name
                _order(context, current, node.name)


def progress(context: Context, node: Node, message: m.StoreProgress) -> None:
    """Handles a node's report of how much of a shard it has written."""
    key = message.key
    for current in context.state.storage.storing:
        if (current.tier, current.step) == (message.tier, key.step) and current.waiting.get(
            key.rank
        ) == node.name:
            current.written[key.rank] = message.nbytes, message.total_bytes
            _moved(context, current)


def published(context: Context, node: Node, message: m.Published) -> None:
    """Handles the report that a checkpoint's manifest was written, or could not be."""
    storage = context.state.storage
    asked = [
        x
        for x in storage.storing
        if (x.tier, x.step, x.waiting.get(-1)) == (message.tier, message.step, node.name)
    ]
    doubtful = storage.doubtful.get(message.tier)
    # The manifest was ordered twice, around a reconnect. One answer said that it could not be written and the
    # other that it is there: then it is there.
    if not asked and message.error is None and doubtful is not None and doubtful.step == message.step:
        asked = [doubtful]  # it was asked for twice; the other answer was that it could not be done
    for current in asked:
        if current.void:
            _answered(context, current, node)
            continue
        if message.error is not None:
            # An error of a rename does not prove that it did not happen (a network file system may lose the
            # answer). If the other answer comes, the checkpoint counts after all.
            storage.doubtful[current.tier] = current
            _failed(context, current, message.error)
            continue
        storage.doubtful.pop(current.tier, None)
        if current in storage.storing:
            storage.storing.remove(current)
        current.took_s = context.now - current.began_s
        storage.stored[current.tier] = current
        there(context, Durable(message.step, message.tier))
        storage.failing_tiers = [t for t in storage.failing_tiers if t != message.tier]
        came = totals(context, message.tier)
        came.checkpoints += 1
        came.nbytes += sum({x.blob.name: x.blob.nbytes for x in current.shards}.values())
        came.took_s += current.took_s
        context.record(
            ledger.Saved(
                step=message.step,
                url=message.tier,
                took_s=round(current.took_s, 4),
                skipped=current.skipped,
            )
        )


def saved(context: Context, worker: Worker, message: m.Saved) -> None:
    """A checkpoint is complete in a durable tier, or could not be written there."""
    if message.error is not None:
        totals(context, message.url).failures += 1
        context.record(ledger.TierFailed(url=message.url, step=message.step, reason=message.error))
        return
    totals(context, message.url).checkpoints += 1
    there(context, Durable(message.step, message.url))
    context.record(ledger.Saved(step=message.step, url=message.url, worker=worker.name))


# ---------------------------------------------------------------- the result of training


def given_last(context: Context, worker: Worker) -> None:
    """Handles the report that a worker left its state after the last step in its node's memory."""
    context.state.storage.last_from.append((worker.node, worker.shard_index))


def forget_last(context: Context) -> None:
    """Stops waiting for shards of the last state whose nodes have not reported what became of them."""
    context.state.storage.last_from = []


def summing(context: Context, node: str, keys: Iterable[Key]) -> None:
    """Handles the report that a node computes the checksums of shards whose workers have ended."""
    context.state.storage.summing += [Summing(node=node, key=key, since_s=context.now) for key in keys]


def summed(context: Context, node: Node, key: Key) -> None:
    """Handles the report that the checksums of a shard are computed, or cannot be."""
    storage = context.state.storage
    storage.summing = [x for x in storage.summing if (x.node, x.key) != (node.name, key)]


def last_on_its_way(context: Context) -> bool:
    """Begins to write the job's last state to every durable tier, or the newest complete snapshot where the last state is
    incomplete. False: nothing is left to wait for."""
    s = context.state
    # The person's patience is over. Whatever is on its way is left behind.
    if s.membership.stop_reason is not None and not s.deadlines.is_set(Timer.STOP):
        return False  # asked to stop, and the time for that is over
    # First all shards must be known to be held, or not. Begun earlier, a checkpoint would take the newest
    # complete snapshot, which is older than the state that is just being kept.
    if queries.awaited_shards(context) or s.storage.summing:
        return True
    snapshot = queries.newest_complete(context)
    newest = s.storage.durable.step if s.storage.durable is not None else 0
    if snapshot is None or snapshot.step < newest or newest == snapshot.step != queries.last_step(context):
        return False
    kept = (s.storage.durable, *s.storage.older)
    todo = [
        t
        for t in context.spec.saving.tiers
        if Durable(snapshot.step, t.url) not in kept and t.url not in s.storage.last_failed
    ]
    for tier in todo:
        current = under_way(context, tier.url)
        if current is None:
            before = max((d.step for d in kept if d is not None and d.url == tier.url), default=None)
            context.record(ledger.SavingLast(step=snapshot.step, url=tier.url, there=before))
            _store(context, tier, snapshot, last=True)
        # Measured from the last byte that came, not from the begin: a slow tier gets all the time that it
        # needs, one that stands still does not.
        elif context.reached(current.moved_s + context.timing.start_s):
            current.last = True
            _failed(
                context, current, f"no data of it has reached {tier.url} for {context.timing.start_s:g} s"
            )
    return bool(todo)


def say_unsaved(context: Context) -> None:
    """Records that the job ends without its last state in a durable tier, if the reason was not reported before."""
    s, last = context.state, queries.last_step(context)
    known = s.storage.last_failed or (s.storage.durable is not None and s.storage.durable.step >= last)
    if not context.mode.saves_together or s.membership.shard_count == 1 or not last or known:
        return
    for tier in context.spec.saving.tiers:
        reason = "not every shard of the last state could be kept in the memory of a node"
        context.record(ledger.TierFailed(url=tier.url, step=last, reason=reason))


# ---------------------------------------------------------------- what is there


def found(context: Context, event: DurableFound) -> None:
    """Takes the list of checkpoints that the start of a job found in its durable tiers."""
    storage = context.state.storage
    storage.durable, storage.older, storage.unread = (
        event.durable,
        list(event.older[:KEPT_OLDER]),
        list(event.passed_over),
    )


def there(context: Context, durable: Durable) -> None:
    """Adds a new checkpoint to the known ones, and removes those that its tier keeps no longer."""
    storage = context.state.storage
    # The same retention as the pruner's, applied to what the core remembers, so that it never sends workers
    # to a checkpoint that was just removed.
    kept = [d for d in (storage.durable, *storage.older) if d is not None and d != durable]
    tier = next((t for t in context.spec.saving.tiers if t.url == durable.url), None)
    if tier is not None:
        steps = [durable.step, *(d.step for d in kept if d.url == tier.url)]
        gone = Retention(tier.keep, tier.keep_every).superfluous(steps, spare=durable.step)
        kept = [d for d in kept if d.url != tier.url or d.step not in gone]
    # Of one step the one that came last; training may have gone back, but never behind what can be loaded.
    # Sorted by step with a stable sort: of equal steps the one that came last is in front.
    newest, *older = sorted([durable, *kept], key=lambda d: -d.step)
    storage.durable, storage.older, storage.durable_tries = newest, older[:KEPT_OLDER], 0


def unread(context: Context, durable: Durable, message: m.CollectiveError) -> None:
    """Handles the report that a worker could not be restored from a checkpoint; the next older one is used. A damaged
    checkpoint is not tried again; one in a tier that does not answer may be."""
    storage = context.state.storage
    # Several workers fail to read the same checkpoint, and report one after another. Only the first counts,
    # or each would take away one more older checkpoint.
    if durable != storage.durable:
        return
    storage.durable_tries += 1
    # A damaged one stays damaged. One that could not be reached may be fine: giving it up at once would throw
    # away hours of training for a short outage.
    if not message.lost and storage.durable_tries < MAX_TRIES:
        return
    storage.durable_tries = 0
    storage.totals.unread += 1
    storage.durable = storage.older.pop(0) if storage.older else None
    storage.unread.append(f"{durable.where}: {message.detail}")
    context.record(
        ledger.CheckpointUnread(
            step=durable.step,
            url=durable.url,
            reason=message.detail,
            instead=_instead(context),
        )
    )


def _instead(context: Context) -> str | None:
    """What training goes on from now, for people; None: nothing is left."""
    durable, snapshot = context.state.storage.durable, queries.newest_complete(context)
    if snapshot is not None and (durable is None or durable.step <= snapshot.step):
        return f"step {snapshot.step} in memory"
    return durable.where if durable else None


def totals(context: Context, url: str) -> TierTotals:
    """The counts of what was written to a tier since the job's start."""
    return context.state.storage.totals.tiers.setdefault(url, TierTotals())


def _failed(context: Context, current: Storing, reason: str) -> None:
    """Said once; tried again with a later snapshot, after the tier's usual time."""
    storage = context.state.storage
    # Removed, and remembered as tried at this time: the next attempt comes with a later snapshot after the
    # usual interval, not at once in a loop.
    storage.storing.remove(current)
    last = storage.stored.get(current.tier)
    totals(context, current.tier).failures += 1
    if queries.ending(context) or current.last:
        storage.last_failed.append(current.tier)
    storage.stored[current.tier] = Storing(
        tier=current.tier, step=last.step if last else 0, began_s=context.now
    )
    # Reported once until it works again; the totals count every failure.
    if current.tier not in storage.failing_tiers:
        storage.failing_tiers.append(current.tier)
        context.record(ledger.TierFailed(url=current.tier, step=current.step, reason=reason))


# ---------------------------------------------------------------- nodes and history


def node_lost(context: Context, node: Node) -> None:
    """Gives up the checkpoints that a lost node was writing a part of. The next complete snapshot is written instead."""
    context.state.storage.summing = [x for x in context.state.storage.summing if x.node != node.name]
    context.state.storage.last_from = [(n, p) for n, p in context.state.storage.last_from if n != node.name]
    for current in list(context.state.storage.storing):
        if node.name not in current.waiting.values():
            continue
        if current.void:
            _answered(context, current, node)
        else:
            context.state.storage.storing.remove(current)


def on_node_joined(context: Context, node: Node, hello: m.Hello) -> None:
    """Orders that a node has not answered are sent again: it may have missed them, or its answer was lost."""
    context.state.storage.summing = [x for x in context.state.storage.summing if x.node != node.name]
    summing(context, node.name, hello.summing)
    for current in list(context.state.storage.storing):
        if current.void:
            _answered(context, current, node)
        else:
            _order(context, current, node.name)


def went_back(context: Context, start: int) -> None:
    """Gives up checkpoints of steps that are undone: training resumes before them."""
    storage = context.state.storage
    for current in storage.storing:
        # Not removed, since writing cannot be called back. What comes of it is dropped when it has answered.
        current.void = current.void or current.step > start
        current.seen_step = min(current.seen_step, start)
    storage.doubtful = {tier: x for tier, x in storage.doubtful.items() if x.step <= start}
    # Cleared because a tier that refused what seemed to be the last state may take the real one.
    storage.last_failed = []  # there are steps to do again, so that was not the last state
    for tier, last in list(storage.stored.items()):
        if last.step > start:
            storage.stored[tier] = Storing(tier=tier, step=start, began_s=last.began_s)
