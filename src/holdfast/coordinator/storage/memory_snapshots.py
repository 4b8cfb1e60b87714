"""Snapshots in the memory of nodes: which node keeps a copy of which shard, when a snapshot is complete, and from which one
training resumes.

A snapshot is complete when every shard has as many copies as the job asks for, or as are possible. Only then is its predecessor
dropped. A predecessor with more copies of its rarest shard is kept until a newer snapshot has as many. `durable_checkpoints`
writes complete snapshots to durable tiers.
"""

from __future__ import annotations

from holdfast.checkpoint import placement
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.state import HeldShard, JobPhase, MemorySnapshot, Node, Rewind, Worker
from holdfast.coordinator.storage import durable_checkpoints, queries
from holdfast.protocol import ledger
from holdfast.protocol import messages as m
from holdfast.protocol.snapshots import Copy, Key, Lack

KEPT_COMPLETE = 2
"""The newest complete snapshot, and the one before it (complete or not) for when all its holders are lost at once."""

KEPT_PARTIAL = 8
"""Incomplete snapshots that are remembered: at most this number from which a state could be restored, and at most this number
of others. A node keeps two at a time, and few nodes save, so more are never of use."""

KEPT_REWINDS = 16
"""Rewinds that are remembered. Beyond that the two oldest are merged into one that voids whatever either of them voids."""

MAX_UNREAD = 3
"""Generations that may fail to read a snapshot which should be there, before an older one is used."""

# ---------------------------------------------------------------- what agents say


def held(context: Context, node: Node, message: m.SnapshotStored) -> None:
    """Handles a node's report that it has a shard in its memory."""
    copy = message.copy
    durable_checkpoints.summed(context, node, copy.key)
    _given(context, copy.key)
    snapshot = _take(context, node, copy)
    if snapshot is not None:
        # The longest, not the sum: workers copy in parallel, and training waited for the slowest.
        snapshot.stall_s = max(snapshot.stall_s, message.stall_s)
        # Every answer is a reason to look again. It may be the last one that a snapshot waited for. It also
        # shows that this node's own worker brings nothing more of older snapshots (`_expected`, `_may_come`).
        spread(context)
    # The agent reports a shard of a snapshot that a newer complete one has replaced. It would keep it for ever;
    # telling it what is complete now frees the slot.
    elif happened(context, copy.key) and _newest_step(context) >= copy.key.step:
        context.send(node.name, _complete_now(context))


def _take(context: Context, node: Node, copy: Copy) -> MemorySnapshot | None:
    """Notes who holds a shard; None when it is of no use."""
    snapshot = _snapshot(context, copy.key)
    if snapshot is None:
        return None
    # Somebody's shard is missing for good. This holder reports late and has to be told, since it was not
    # among those that were told then.
    if snapshot.given_up:
        context.send(node.name, _forgets(context, snapshot))
        return None
    # Equal bytes, not only equal rank. Replicas may differ in buffers, and a snapshot that mixed the shards
    # of two would be of no state that ever was.
    entry = next((h for h in snapshot.shards if h.copy == copy), None)
    if entry is None:
        entry = HeldShard(copy)
        snapshot.shards.append(entry)
    # Whoever was asked has brought it, whatever bytes it brought; left in `asked`, the copy would be waited
    # for until the node is lost.
    for other in snapshot.shards:
        if node.name in other.asked and other.copy.key == copy.key:
            other.asked.remove(node.name)
            context.state.storage.totals.copies += 1
            context.state.storage.totals.copied_bytes += copy.shard.blob.nbytes
    if node.name not in entry.nodes:
        entry.nodes.append(node.name)
    # A node that came back with its memory brings the shard that went with it, and with the last one the
    # snapshot is complete again.
    snapshot.lost = [r for r in snapshot.lost if r != copy.key.rank]
    return snapshot


def not_held(
    context: Context, node: Node, key: Key, reason: str, lack: Lack | None = None, paced: bool = False
) -> None:
    """Handles a node's report that it could not keep a shard. Reported to people once, until a snapshot is complete again; a
    shard that was left out to keep the pace, once in the job."""
    durable_checkpoints.summed(context, node, key)
    _given(context, key)
    # One line, and then a count: a node without memory would otherwise write one line for every snapshot,
    # every few seconds. A script may save in every step: that the ones before are still on their way is said once.
    totals = context.state.storage.totals
    said = totals.skipped if paced else context.state.storage.skipped
    if not said:
        context.record(ledger.SnapshotSkipped(node=node.name, step=key.step, rank=key.rank, reason=reason))
    context.state.storage.skipped += 1
    totals.skipped += 1
    node.memory.refused_steps[key.rank] = max(node.memory.refused_steps.get(key.rank, -1), key.step)
    # The copy that took a slot has failed, so that slot is free again. With Lack.SLOT nothing was freed:
    # asking again at once would be refused again, in a loop.
    if lack is not Lack.SLOT:
        _slots_freed(context, node)  # what was begun there has ended
    newest = _newest(context)
    # The node has no memory because of what is kept beside the newest snapshot. Giving that up is right: a
    # newer snapshot with fewer copies loses less than an old one with more.
    makes_room = (
        lack is Lack.MEMORY and newest is not None and key.step > newest.step and _kept(context) is not None
    )
    if newest is not None and makes_room:  # what is kept beside it takes the memory of the next
        newest.no_room = True
        _retire(context)
    snapshot = _snapshot(context, key)
    if snapshot is None:
        spread(context)
        return
    place, asked = (node.name, key.rank), False
    for entry in snapshot.shards:
        if node.name in entry.asked and entry.copy.key == key:
            entry.asked.remove(node.name)
            asked = True
    # Busy is for now, refused is for this snapshot. Only what is busy is asked again when a slot becomes
    # free.
    if lack is Lack.SLOT:
        _note(snapshot.busy, place)
    elif not makes_room:
        _note(snapshot.refused, place)
        snapshot.no_room = snapshot.no_room or lack is Lack.MEMORY
    # Nobody asked for it, so this was the member's own copy. That worker will not bring it again, and the
    # wait for it has to end (`_expected`, `_may_come`).
    if not asked:
        _note(snapshot.passed, place)
    # At level 0 a rank saves on its own, when its script does. If its copy failed, nobody else has these
    # bytes, so the snapshot cannot become complete and the other ranks' memory is freed.
    held_by_any = any(h.copy.key.rank == key.rank for h in snapshot.shards)
    # Paced, no rank has saved it, and if the script ends with this state all of them do so after all.
    if not (paced or context.mode.saves_together or held_by_any or snapshot.complete):
        _give_up(context, snapshot)
    else:
        spread(context)


def _given(context: Context, key: Key) -> None:
    """A script gave a state, whatever became of it. Of a start before this one nothing counts: the script goes on from what
    was saved."""
    storage = context.state.storage
    if not context.mode.saves_together and key.generation == context.state.membership.number:
        storage.given = max(storage.given, (key.generation, key.step))


def _note(places: list[tuple[str, int]], place: tuple[str, int]) -> None:
    if place not in places:
        places.append(place)


def _slots_freed(context: Context, node: Node | None = None) -> None:
    """There may be room again, on a node or on all: whoever had none is asked again."""
    for snapshot in context.state.storage.snapshots:
        snapshot.busy = [] if node is None else [(n, r) for n, r in snapshot.busy if n != node.name]


def spoiled(context: Context, node: Node, key: Key, reason: str) -> None:
    """Handles the report that a copy was corrupted in a node's memory. It is replaced from another copy, if there is one."""
    context.state.storage.totals.unread += 1
    context.record(ledger.SnapshotSpoiled(node=node.name, step=key.step, rank=key.rank, reason=reason))
    # Only this node's copy of it. Others may hold the same shard undamaged, and `spread` then makes
    # a new copy from one of those.
    for snapshot in context.state.storage.snapshots:
        for entry in snapshot.shards:
            if entry.copy.key == key:
                entry.nodes = [n for n in entry.nodes if n != node.name]
    # Before `spread`: it must see that nothing is left of some snapshots, or it would ask a holder that has
    # none.
    _drop_lost(context)
    spread(context)


def _give_up(context: Context, snapshot: MemorySnapshot) -> None:
    """Nobody brings a shard that is missing: the memory of the others is freed for the next snapshot."""
    # It stays in the list, empty, so that late reports of it are recognized. Removed, the next report would
    # begin it anew, and wait for the missing shard again.
    snapshot.given_up = True
    # The holders are told to forget it, which frees a slot on each; whoever was busy for another snapshot is
    # asked again.
    _slots_freed(context)
    for name in dict.fromkeys(n for h in snapshot.shards for n in h.nodes):
        context.send(name, _forgets(context, snapshot))
    # At level 2 one shard is missing in one snapshot. At level 0 a rank that failed to save has moved on, so
    # everything later that the others saved is without that rank, too.
    if context.mode.saves_together:
        snapshot.shards = []
        return
    for later in context.state.storage.snapshots:
        if later.step >= snapshot.step:
            later.shards = []  # forgotten with it, where it was not complete either


def _forgets(context: Context, snapshot: MemorySnapshot) -> m.ForgetSnapshots:
    """At level 0 all ranks save at their own times: of later ones nothing is complete either."""
    return m.ForgetSnapshots(snapshot.step - 1, snapshot.step if context.mode.saves_together else None)


def node_lost(context: Context, node: Node) -> None:
    """Removes the copies of a lost node, and orders new ones until each shard has the wanted number again."""
    for snapshot in context.state.storage.snapshots:
        for entry in snapshot.shards:
            entry.asked = [n for n in entry.asked if n != node.name]
            entry.nodes = [n for n in entry.nodes if n != node.name]
    # Returns: an agent that was only cut off comes back with its memory. The shards of the others are
    # remembered until then, because together with its shard they are the newest state.
    _drop_lost(context, returns=True)
    spread(context)
    durable_checkpoints.node_lost(context, node)


def on_node_joined(context: Context, node: Node, hello: m.Hello) -> None:
    """Handles a node's list of the shards that it holds: from a new agent that took over the node's memory, or from one that
    reconnects after a coordinator failed.

    Both sides may have missed messages of the other, so every open order is sent again, and so is what the node must know.
    """
    # The address first: everything below may ask other nodes to fetch from this one.
    node.memory.port, node.memory.server = hello.snapshot_port, hello.snapshot_server
    _slots_freed(context, node)
    # What the agent holds is compared by content. It may have lost a copy and made another of the same name
    # since the coordinator heard of it last.
    there = {(c.key, c.shard.blob.xxh3) for c in hello.copies}
    for snapshot in context.state.storage.snapshots:
        for entry in snapshot.shards:
            # The order or its answer may have been lost with the connection. Asking twice costs a look at
            # memory; not asking leaves a snapshot incomplete for ever.
            entry.asked = [n for n in entry.asked if n != node.name]
            if (entry.copy.key, entry.copy.shard.blob.xxh3) not in there:
                entry.nodes = [n for n in entry.nodes if n != node.name]
    _drop_lost(context)
    # It keeps nothing of a generation that a rewind began, so it may not have heard of that rewind. Whatever it
    # holds of later steps is then of generations before, and never happened.
    # Rewinds are numbered by generations, and a node that kept nothing since one of them cannot show that it
    # heard of it. The oldest one that it may have missed makes it forget all that did not happen; what it
    # kept rightly is older.
    missed = [
        r
        for r in context.state.storage.rewinds
        if not any(c.key.generation >= r.number for c in hello.copies)
    ]
    if missed and node.memory.port:
        context.send(node.name, m.ForgetSnapshots(missed[0].start))
    durable_checkpoints.on_node_joined(context, node, hello)
    for copy in hello.copies:
        _take(context, node, copy)
    # Compared afterwards: if the node's copies completed a newer snapshot, `_retire` has told all agents
    # already.
    before = _newest_step(context)
    spread(context)
    if node.memory.port and before >= 0 and before == _newest_step(context):
        context.send(node.name, _complete_now(context))


# ---------------------------------------------------------------- copies in memory


def happened(context: Context, key: Key) -> bool:
    """Whether the state of a shard is part of the run as it goes on now, and not of steps that a restart undid.

    Shards that a new agent took over from an earlier run have no generation any more.
    """
    s = context.state
    if (
        # What an agent adopted from an earlier run has lost its generation, so it cannot be matched with the
        # rewinds of this one. Once this run has trained, only steps that it came through itself can be
        # believed.
        key.generation < 1
        and s.membership.number
        and context.mode.saves_together
        and key.step > s.membership.committed
    ):
        return False
    # A shard is of this past unless some rewind went behind it: taken before that rewind's generation, at a
    # step after the one that it went back to.
    return all(key.generation >= r.number or key.step <= r.start for r in s.storage.rewinds)


def _newest(context: Context) -> MemorySnapshot | None:
    complete = [x for x in context.state.storage.snapshots if x.complete]
    return max(complete, key=lambda x: (x.step, x.generation), default=None)


def _newest_step(context: Context) -> int:
    return max((x.step for x in context.state.storage.snapshots if x.complete), default=-1)


def _copies(context: Context, snapshot: MemorySnapshot) -> int:
    """Number of copies of the least-replicated shard, capped at the requested number."""
    # By rank, over all entries: two nodes that hold different bytes of one rank are two entries, but either
    # one alone is enough to restore from.
    holders: dict[int, set[str]] = {}
    for entry in snapshot.shards:
        holders.setdefault(entry.copy.key.rank, set()).update(entry.nodes)
    # A snapshot is as safe as its rarest shard. No more than was asked for counts, or a snapshot with one
    # more copy by chance would never be replaced.
    fewest = min(map(len, holders.values()), default=0) if len(holders) == snapshot.world else 0
    return min(fewest, context.spec.saving.snapshots.copies + 1)


def _kept(context: Context) -> MemorySnapshot | None:
    """An older snapshot that stays beside the newest complete one, because more nodes hold it: with the newest alone the loss
    of one node could lose all. Not where the newest has fewer copies for want of memory: what is kept would take the
    memory of its successors' copies for ever."""
    newest = _newest(context)
    # Keeping an old snapshot beside one that is short of memory would take exactly the memory that the next
    # one's copies need, so it would stay short for ever.
    if newest is None or newest.no_room:
        return None
    copies = _copies(context, newest)
    if copies > context.spec.saving.snapshots.copies:
        return None
    at = (newest.step, newest.generation)
    # Only one that has more copies of its rarest shard than the newest: then, and only then, it survives a
    # loss that the newest does not.
    older = [x for x in context.state.storage.snapshots if (x.step, x.generation) < at and not x.given_up]
    ranked = [(n, x.step, x.generation, x) for x in older if (n := _copies(context, x)) > copies]
    return max(ranked, key=lambda r: r[:3])[3] if ranked else None


def _complete_now(context: Context) -> m.SnapshotComplete:
    """What agents are told of complete snapshots."""
    kept = _kept(context)
    return m.SnapshotComplete(_newest_step(context), kept.step if kept is not None else None)


def _snapshot(context: Context, key: Key) -> MemorySnapshot | None:
    """The snapshot that a shard is of, a new one if need be; None when it is of no use."""
    storage = context.state.storage
    # All three. After a fault the same step is computed again by another generation, and after a resize by
    # another world; their shards are not parts of one snapshot.
    wanted = (key.step, key.generation, key.world)
    for snapshot in storage.snapshots:
        if (snapshot.step, snapshot.generation, snapshot.world) == wanted:
            return snapshot
    # A snapshot older than the newest complete one can serve nothing, and one of a past that was undone must
    # not be restored.
    if key.step <= _newest_step(context) or not happened(context, key):
        return None
    if not _makes_room(context, key):
        return None
    new = MemorySnapshot(step=key.step, generation=key.generation, world=key.world, began_s=context.now)
    storage.snapshots.append(new)
    return new


def _makes_room(context: Context, key: Key) -> bool:
    """Makes room for one more snapshot in the list, not in any node's memory. False: it is older than `KEPT_PARTIAL` others
    that could be restored. Those of which no shard is held go first. There may be many: an agent that was without a
    coordinator says at once which shards it could not keep."""
    storage = context.state.storage
    partial = sorted((x for x in storage.snapshots if not x.complete), key=lambda x: (x.step, x.generation))
    # Those of which every shard is somewhere could be restored in an emergency, so they have a bound of their
    # own; a flood of begun ones must not push them out.
    held = [x for x in partial if queries.has_all(x)]
    begun = [x for x in partial if not queries.has_all(x)]
    begun.sort(key=lambda x: (bool(x.shards), x.complete_s is not None))
    if len(held) >= KEPT_PARTIAL and held[-KEPT_PARTIAL].step > key.step:
        return False
    for old in held[:-KEPT_PARTIAL] + begun[: max(0, len(begun) - KEPT_PARTIAL + 1)]:
        storage.snapshots.remove(old)
    return True


def _drop_lost(context: Context, returns: bool = False) -> None:
    """Forgets snapshots of which nothing is left, and complete ones of which a shard is gone. returns: it went with its node,
    which may come back with it; then the others' shards are remembered, until a newer snapshot is complete."""
    s = context.state
    for snapshot in s.storage.snapshots:
        # Computed before the entries without holders are dropped, and reduced by those that another entry
        # still holds.
        gone = {h.copy.key.rank for h in snapshot.shards if not h.nodes}
        snapshot.shards = [h for h in snapshot.shards if h.nodes]
        gone -= {h.copy.key.rank for h in snapshot.shards}
        level_2 = context.mode.saves_together or snapshot.generation < 1  # nobody may have said the level yet
        if gone and returns and level_2:
            snapshot.lost += sorted(gone)
            snapshot.complete = False
    s.storage.snapshots = [
        x for x in s.storage.snapshots if (queries.has_all(x) if x.complete else x.shards or x.given_up)
    ]


def spread(context: Context) -> None:
    """Orders every copy that is missing, for the newest snapshot first, because a complete one makes older ones superfluous.
    When a snapshot becomes complete, slots become free, and copies that were refused are ordered again."""
    # Until nothing changes: a snapshot that becomes complete frees slots on every node, for copies that were
    # refused for want of one. The loop ends, because each round completes at least one more snapshot.
    while True:
        told = context.state.storage.told_complete
        # The newest first, since it makes the others superfluous. In the other order nodes would spend their
        # two slots on snapshots that are about to be given up.
        for snapshot in sorted(context.state.storage.snapshots, key=lambda x: (-x.step, -x.generation)):
            _spread(context, snapshot)
        _retire(context)
        if context.state.storage.told_complete == told:
            return


def _spread(context: Context, snapshot: MemorySnapshot) -> None:
    """Asks for the copies that are missing; a snapshot that misses none is complete. Of one that waits for a lost node none are
    made: they would take the memory of the next."""
    s = context.state
    # Spreading stops for everything that cannot matter any more: older than a complete one, waiting for a
    # lost node, given up, or of a job that ends. Each of these would take memory from the snapshot that does
    # matter.
    superseded = snapshot.step < _newest_step(context)
    ending = s.membership.phase in (JobPhase.STOPPING, JobPhase.ENDED)
    if snapshot not in s.storage.snapshots or snapshot.given_up or snapshot.lost or superseded or ending:
        return
    # Complete means: of no shard a copy is missing that could still come. Not "has as many copies as asked
    # for": two nodes can never hold three copies, and their snapshots must count all the same.
    complete = True
    for rank in range(snapshot.world):
        entries = [h for h in snapshot.shards if h.copy.key.rank == rank]
        # Nobody has this shard yet. Usually its worker is still copying; where it has said that it cannot,
        # and nobody else can bring it, all of the snapshot is given up, since its other shards hold memory for
        # nothing.
        if not entries:
            complete = False
            if (
                s.membership.shard_count > 1
                and not s.storage.last_from
                and not _may_come(context, snapshot, rank)
            ):
                _give_up(context, snapshot)
                return
            continue
        there = [n for h in entries for n in h.nodes]
        asked = [n for h in entries for n in h.asked]
        # Distinct nodes, not entries: one node that holds a shard twice, with different bytes, is lost once.
        missing = context.spec.saving.snapshots.copies + 1 - len(set(there))
        if missing <= 0:
            continue
        # Another member of the same replica group is just copying the same bytes from its own GPU. Asking a third
        # node to fetch them over the network would send what arrives for free a moment later.
        if _expected(context, snapshot, rank, there):
            complete = False
            continue
        # Where replicas differ in their buffers, the bytes that most nodes hold already are copied on, so the
        # copies of one shard agree.
        best = max(entries, key=lambda h: len(h.nodes))
        busy = [n for n, r in snapshot.busy if r == rank]
        # A node that could not keep it is not asked again for this snapshot; one that was busy is, but only
        # after a slot became free.
        taken = [*there, *asked, *_refused(snapshot, rank), *busy]
        for name in _buddies(context, best, taken)[: max(0, missing - len(asked))]:
            # Noted before it is sent, and in the state that is written first: a successor of this process
            # knows what is awaited, and does not ask a second node.
            best.asked.append(name)
            asked.append(name)
            context.send(name, m.Replicate(best.copy, queries.holders(context, best)))
        # Something is on its way, or there will be room for it. Else nothing more can come, and the snapshot
        # counts as complete with fewer copies, which is reported.
        if asked or (busy and _makes_way(context, snapshot)):
            complete = False
    if complete and not snapshot.complete:
        _mark_complete(context, snapshot)


def _makes_way(context: Context, snapshot: MemorySnapshot) -> bool:
    """Whether copies of another snapshot are on their way, or all of them have come: then, or when they fail, there is room
    for this one's. So each becomes complete with all its copies before the next one takes its memory."""
    # Two snapshots may each wait for the slots that the other takes. The one whose copies are on their way
    # goes first; when it is complete, its slots are free.
    wanted, newest = context.spec.saving.snapshots.copies + 1, _newest_step(context)
    others = [x for x in context.state.storage.snapshots if x is not snapshot]
    return any(
        any(h.asked for h in x.shards) or (x.step > newest and _copies(context, x) == wanted) for x in others
    )


def _expected(context: Context, snapshot: MemorySnapshot, rank: int, there: list[str]) -> bool:
    """Another member copies the same just now. (Of a complete one they all have: a copy that went since comes no more.)"""
    s = context.state
    # It was complete once, so every member had brought its copy. A copy that is missing now went with its
    # node.
    if snapshot.complete_s is not None:
        return False
    g = s.membership.generation
    running = s.membership.phase in (JobPhase.RUNNING, JobPhase.BREAKING)
    if not context.mode.saves_together or g is None or snapshot.generation != g.number or not running:
        return False
    newer = [x for x in s.storage.snapshots if x.generation == snapshot.generation and x.step > snapshot.step]
    further = {n for x in newer for n in (*_declined(x, rank), *_holding(x, rank))}
    # Those that save are known from the generation alone, so agents, workers and core agree on them without a
    # message.
    nodes = {g.members[saver].node for saver in queries.savers_of(context, g, rank)}
    return any(
        s.membership.nodes[n].alive and n not in (*there, *_declined(snapshot, rank), *further) for n in nodes
    )


def _refused(snapshot: MemorySnapshot, rank: int) -> list[str]:
    return [n for n, r in snapshot.refused if r == rank]


def _declined(snapshot: MemorySnapshot, rank: int) -> list[str]:
    """Nodes whose own workers will not bring a shard any more."""
    return [n for n, r in (*snapshot.refused, *snapshot.passed) if r == rank]


def _holding(snapshot: MemorySnapshot, rank: int) -> list[str]:
    return [n for h in snapshot.shards if h.copy.key.rank == rank for n in h.nodes]


def _may_come(context: Context, snapshot: MemorySnapshot, rank: int) -> bool:
    """Whether a shard that nobody holds yet may still be brought: by one that saves, and has not said that it cannot; with
    its node lost it may come back. Of a generation that is over that is not known, and its slots are given to the next
    one's snapshots."""
    s = context.state
    g = s.membership.generation
    if g is None or snapshot.generation != g.number:
        return True
    newer = [x for x in s.storage.snapshots if x.generation == snapshot.generation and x.step > snapshot.step]
    past = {n for x in newer for n in _holding(x, rank)} | set(_declined(snapshot, rank))
    return any(g.members[saver].node not in past for saver in queries.savers_of(context, g, rank))


def _buddies(context: Context, entry: HeldShard, taken: list[str]) -> list[str]:
    """Nodes that may keep another copy, the owner's own buddies first, then those that are far away."""
    storage = context.state.storage
    alive = [n for n in context.alive_nodes() if n.memory.port]
    # Groups are kept in the state and changed as little as possible: if buddies moved with every node that
    # comes or goes, each change would copy all snapshots anew.
    placed = placement.place(
        {n.name: n.place for n in alive}, context.spec.saving.snapshots.copies, storage.buddy_groups
    )
    storage.buddy_groups = [list(g) for g in placed.groups]
    first = [b for n in entry.nodes for b in placed.buddies.get(n, ())]
    # Another zone before the same one, and another rack before the same one: nodes of one rack share a switch and a
    # power supply, and are lost together.
    others = sorted((n.name for n in alive), key=lambda n: queries.nearest(context, n, entry.nodes))
    return [n for n in dict.fromkeys([*first, *others]) if n not in taken]


def hands_over(context: Context, node: Node) -> bool:
    """Whether a node that is about to leave as planned still has to copy shards of the newest complete snapshot to other nodes,
    because no node that stays has them. Shards that nobody else can keep are lost with the node, unless the job has to
    resume from them. With one worker per replica any member can save the next snapshot alone, so the node need not wait."""
    s = context.state
    if not context.mode.saves_together or s.membership.phase in (JobPhase.STOPPING, JobPhase.ENDED):
        return False
    # Only the newest complete one. Handing over older ones as well would keep a node that has two minutes to
    # leave.
    snapshot = queries.newest_complete(context)
    if snapshot is None or snapshot.world == 1:
        return False
    waits = False
    for rank in range(snapshot.world):
        entries = [h for h in snapshot.shards if h.copy.key.rank == rank]
        # Copies on nodes that are leaving too do not count, or two nodes that leave together would each rely
        # on the other.
        staying = {n for h in entries for n in h.nodes if s.membership.nodes[n].leaving is None}
        mine = next((h for h in entries if node.name in h.nodes), None)
        if mine is None or staying:
            continue
        asked = [n for h in entries for n in h.asked]
        busy = [n for n, r in snapshot.busy if r == rank]
        if not asked:
            taken = [
                *mine.nodes,
                *_refused(snapshot, rank),
                *busy,
                *(n.name for n in s.membership.nodes.values() if n.leaving is not None),
            ]
            for name in _buddies(context, mine, taken)[:1]:
                mine.asked.append(name)
                asked.append(name)
                context.send(name, m.Replicate(mine.copy, queries.holders(context, mine)))
        waits = (
            waits or bool(asked) or (bool(busy) and _makes_way(context, snapshot)) or not s.membership.number
        )
    return waits


def _mark_complete(context: Context, snapshot: MemorySnapshot) -> None:
    storage = context.state.storage
    snapshot.complete = True
    if snapshot.complete_s is None:
        _tell_complete(context, snapshot)
    else:
        context.record(ledger.SnapshotBack(step=snapshot.step, generation=snapshot.generation))
    # So `_retire` tells all agents, also when it is the same step as before: it was lost in between, and
    # agents may have freed it.
    storage.told_complete = None
    _retire(context)
    durable_checkpoints.begin_due(context)


def _retire(context: Context) -> None:
    """Gives up what is older than the newest complete snapshot, but for what is kept beside it, and tells agents if that is
    news to them."""
    s, newest = context.state, _newest(context)
    # A newer snapshot was complete and lost a shard that may come back. What is older than that one was given
    # up already, so telling agents of this one now would make them drop the newer's shards.
    if newest is None or (s.storage.told_complete is not None and newest.step < s.storage.told_complete[0]):
        return  # a newer one was complete, and lost a shard since: it may come back
    complete = _complete_now(context)
    # Agents are told only of news. This runs after every report of every shard.
    if s.storage.told_complete == (complete.step, complete.kept):
        return
    older = [x for x in s.storage.snapshots if queries.has_all(x) and x.step <= newest.step]
    # The last two, whatever their copies: if all holders of the newest are lost at once, the one before is a
    # few minutes of work, and nothing is the whole run.
    keep = sorted(older, key=lambda x: (x.step, x.generation))[-KEPT_COMPLETE:]
    if (kept := _kept(context)) is not None:
        keep.append(kept)
    s.storage.snapshots = [
        x for x in s.storage.snapshots if x.step > newest.step or any(x is k for k in keep)
    ]
    s.storage.told_complete = (complete.step, complete.kept)
    _slots_freed(context)
    for node in context.alive_nodes():
        context.send(node.name, complete)


def _tell_complete(context: Context, snapshot: MemorySnapshot) -> None:
    storage = context.state.storage
    snapshot.complete_s = context.now
    storage.skipped = 0
    copies = min(
        len({n for h in snapshot.shards if h.copy.key.rank == r for n in h.nodes})
        for r in range(snapshot.world)
    )
    # By content, so that equal replicas count once: the size of the state, not what all nodes hold together.
    blobs = {h.copy.shard.blob.xxh3: h.copy.shard.blob.nbytes for h in snapshot.shards}
    totals = storage.totals
    totals.snapshots += 1
    totals.nbytes += sum(blobs.values())
    totals.took_s += context.now - snapshot.began_s
    totals.stall_s += snapshot.stall_s
    context.record(
        ledger.Snapshot(
            step=snapshot.step,
            generation=snapshot.generation,
            world=snapshot.world,
            nbytes=sum(blobs.values()),
            nodes=copies,
            took_s=round(context.now - snapshot.began_s, 4),
        )
    )
    if copies < context.spec.saving.snapshots.copies + 1 and not storage.short_of_copies:
        context.record(ledger.FewCopies(nodes=copies, wanted=context.spec.saving.snapshots.copies + 1))
    storage.short_of_copies = copies < context.spec.saving.snapshots.copies + 1


# ---------------------------------------------------------------- where to go on from


def unread(context: Context, copy: Copy) -> None:
    """Handles the report that a worker could read a snapshot from none of its holders: they may have less than was recorded."""
    s, key = context.state, copy.key
    for snapshot in list(s.storage.snapshots):
        if (snapshot.step, snapshot.generation, snapshot.world) == (key.step, key.generation, key.world):
            # A count over generations, not workers: one generation may fail because a holder died in that
            # very moment. Three in a row mean that the core is wrong about who holds it.
            snapshot.unread += 1
            if snapshot.unread >= MAX_UNREAD:
                s.storage.snapshots.remove(snapshot)
                s.storage.totals.unread += 1
                context.record(ledger.SnapshotUnreadable(step=snapshot.step, generation=snapshot.generation))


def went_back(context: Context, start: int) -> None:
    """Marks snapshots of steps after `start` as undone: the next generation resumes at `start` from a saved state. Nodes that
    have not heard of it may still report such snapshots."""
    s = context.state
    if not s.membership.number and not start:
        return  # the very beginning
    # A later rewind to an earlier step makes those to later steps superfluous: whatever they forbid, it
    # forbids too. So the starts rise, which bounds the list in practice.
    s.storage.rewinds = [r for r in s.storage.rewinds if r.start < start] + [
        Rewind(s.membership.number + 1, start)
    ]
    # Two become one that forgets what either does. That may forget a state that did happen, which costs a
    # transfer; remembering one that did not would corrupt the run.
    if len(s.storage.rewinds) > KEPT_REWINDS:
        s.storage.rewinds[:2] = [Rewind(s.storage.rewinds[1].number, s.storage.rewinds[0].start)]
    durable_checkpoints.went_back(context, start)
    s.storage.snapshots = [x for x in s.storage.snapshots if x.step <= start]
    _slots_freed(context)
    for node in context.alive_nodes():  # also those that hold nothing: they know which snapshot was complete
        context.send(node.name, m.ForgetSnapshots(start))


def sought(context: Context, worker: Worker, request: int) -> None:
    """Answers a script that wants to load: with the holders of the newest complete snapshot, if no checkpoint is newer, and
    with the newest checkpoint."""
    snapshot = queries.newest_complete(context)
    durable = context.state.storage.durable
    if snapshot is not None and (durable is None or durable.step <= snapshot.step):
        shards = tuple(
            queries.sources(context, snapshot, rank, worker.node) for rank in range(snapshot.world)
        )
        context.tell(worker, m.SnapshotFound(request, shards, durable))
    else:
        context.tell(worker, m.SnapshotFound(request, (), durable))
