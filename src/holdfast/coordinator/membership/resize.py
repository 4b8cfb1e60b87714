"""Planned changes of the membership: another size, nodes that are to leave, less or more capacity, newcomers.

They take effect between two steps and lose none. Changes that come close together are made together, and newcomers are held
back while joining would cost too much time; leaving is never held back.
"""

from __future__ import annotations

from collections import Counter

from holdfast.coordinator.health import queries as health
from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import ApplyRemedy, Context, DropCopies, HandOver, NoteNodeLost
from holdfast.coordinator.kernel.state import (
    CoreState,
    JobPhase,
    Node,
    NodePhase,
    PlannedChange,
    Timer,
    Worker,
    WorkerPhase,
)
from holdfast.coordinator.membership import notices, policy, processes, queries, replicas, shutdown
from holdfast.coordinator.membership.rank_assignment import RankAssignment, pick
from holdfast.coordinator.storage import queries as storage
from holdfast.errors import UsageError
from holdfast.protocol import ledger
from holdfast.protocol import messages as m
from holdfast.protocol.engine_orders import Capacity, ReleaseNode
from holdfast.protocol.health import Remedy
from holdfast.protocol.notices import NoticeCause

KEPT = 100
"""Changes that are remembered for the report."""

# ---------------------------------------------------------------- what is asked


def check_resize(state: CoreState, nodes: int) -> None:
    """Raises UsageError for a size outside the bounds that the job was started with."""
    low, high = state.spec.min_nodes, state.spec.max_nodes
    # Checked when a person asks, not in the core: a bad request gets an answer with what to do, and no event
    # is written.
    if state.spec.wait_for_spare:
        raise UsageError(
            f"this job was started with a fixed size ({high} nodes): start it again with --nnodes MIN:MAX to be able "
            "to resize it"
        )
    if not low <= nodes <= high:
        raise UsageError(
            f"cannot resize to {nodes} nodes: this job was started with --nnodes {low}:{high}; "
            f"choose {low} to {high}, or stop it and start it again with other bounds"
        )
    if nodes < state.least_nodes:
        raise UsageError(
            f"cannot resize to {nodes} nodes: replicas of {state.membership.shard_count} workers need {state.least_nodes}"
        )


def check_drain(state: CoreState, name: str) -> None:
    """Raises UsageError for a node that is not there, or leaves already."""
    node = state.membership.nodes.get(name)
    if node is None or not node.alive:
        there = ", ".join(n.name for n in state.membership.nodes.values() if n.alive)
        raise UsageError(f"this job does not have a node {name!r}; its nodes are {there}")
    if node.leaving is not None:
        raise UsageError(f"{name} is already leaving: {node.leaving}")


def resize(context: Context, nodes: int, reason: str) -> None:
    """Handles a person's request for another size."""
    s = context.state
    before = s.wanted_nodes
    s.membership.asked_nodes = nodes
    context.record(ledger.Resize(nodes=nodes, before=before, reason=reason))
    _resized(context, before, reason, None, NoticeCause.RESIZE)


def capacity(context: Context, event: Capacity) -> None:
    """Handles a change of the capacity that the engine offers. If the job cannot train with it, it saves its state and ends."""
    s = context.state
    before = s.wanted_nodes
    reason, within_s = event.reason, event.within_s
    cause = event.cause or NoticeCause.PREEMPTION
    s.membership.capacity_nodes = event.nodes
    context.record(ledger.Capacity(nodes=event.nodes, before=before, reason=reason, within_s=within_s))
    # Below this the job cannot train at all. It stops with its state saved, because the engine will take the
    # nodes whatever the core decides.
    least = max(s.spec.min_nodes, s.least_nodes)
    if s.wanted_nodes < least:
        # Of no nodes at all the engine's own reason says everything.
        told = f"{reason}: {s.wanted_nodes} of at least {least} nodes are left" if event.nodes else reason
        shutdown.request(context, told, "stopped", cause=cause, within_s=within_s)
        return
    _resized(context, before, reason, within_s, cause)


def going(context: Context, name: str, reason: str, within_s: float | None, cause: NoticeCause) -> None:
    """Handles the announcement that a node will leave. Unknown names are ignored: the node may have left already."""
    node = context.state.membership.nodes.get(name)
    if node is None or not node.alive:
        return
    if node.leaving is None:
        # Its replacement is not a repair, so it is not paid from the restart budget. Otherwise a job on spot
        # machines would die of being moved.
        context.state.membership.unpaid += 1  # a node in its place is no repair
    _mark(context, node, reason, within_s, cause)
    # It leaves for a reason of its own. As `excess` it would be kept again when the job is to grow, and then
    # be gone without warning.
    node.excess = False


def leave(context: Context, node: Node, reason: str) -> None:
    """Lets a node leave because of its health, between two steps and when another node can take its place."""
    _mark(context, node, reason, None, NoticeCause.HEALTH)
    node.excess = False


def stay(context: Context, node: Node) -> None:
    """Keeps a node. A planned departure, if there is one, is cancelled."""
    node.leaves_until_s, node.excess = None, False
    transitions.stay(context, node)
    # Its agent stays with it, and would tell every worker that it starts from now on.
    notices.node_stays(context, node)


def _resized(context: Context, before: int, reason: str, within_s: float | None, cause: NoticeCause) -> None:
    s = context.state
    s.membership.unpaid += max(0, s.wanted_nodes - before)
    s.membership.grows = s.wanted_nodes > before
    s.deadlines.clear(Timer.WAIT, Timer.FORM, Timer.ASK_AFTER)
    _fit(context, reason, within_s, cause)


def _fit(context: Context, reason: str, within_s: float | None, cause: NoticeCause) -> None:
    """Nodes that are too many are to leave: members as far as there are more than are wanted, those with the highest
    ranks first; then the nodes that came last. Not while nobody trains: any of them may hold what is left. Those that
    have not left yet stay when they are wanted again."""
    s = context.state
    # Those that leave already do not count as there, or a resize would let go of one more for each of them.
    # Beside a lemon one more may be there, or another would be asked for without end.
    spares = max(s.spec.spares, int(any(n.leaving is None for n in context.index.lemons())))
    excess = queries.not_leaving(context) - (s.wanted_nodes + spares)
    if excess < 0:
        for node in [n for n in context.alive_nodes() if n.excess][:-excess]:
            stay(context, node)
            context.record(ledger.NodeStays(node=node.name))
    trains = s.membership.generation is not None and s.membership.phase is JobPhase.RUNNING
    # Not while nobody trains: the state may be held by any of the nodes, and one that is too many for the new
    # size may have the only copy.
    if excess <= 0 or (context.mode.replaces_one and not trains):
        return
    ranks = {x.node: x.rank for x in s.membership.generation.members} if s.membership.generation else {}
    there = context.nodes_in(NodePhase.IN_SERVICE, NodePhase.HELD)
    # Failures before ranks: of two nodes that could go, the one that failed more often goes.
    members = sorted((n for n in there if n.name in ranks), key=lambda n: (n.failures, ranks[n.name]))
    others = [n for n in there if n.name not in ranks]
    if s.membership.shard_count > 1:
        members = _complete_replicas_first(context, members)
    # Members beyond the wanted size first, highest ranks first: the low ranks keep theirs, so that fewer
    # workers change their place in the reduction.
    going = [*reversed(members[s.wanted_nodes :]), *reversed(others)]
    for node in going[:excess]:
        _mark(context, node, reason, within_s, cause)
        node.excess = True


def _complete_replicas_first(context: Context, members: list[Node]) -> list[Node]:
    """Of these nodes, the best first, those in front whose workers make up as many replicas as are wanted."""
    s = context.state
    replicas, held = s.target // s.membership.shard_count, Counter(w.shard_index for w in context.members())
    holds: dict[str, Counter[int]] = {}
    for worker in context.members():
        holds.setdefault(worker.node, Counter())[worker.shard_index] += 1
    going: list[Node] = []
    for node in reversed(members):
        ours = holds[node.name]
        # A node may go only if every shard that it holds is still held by as many others as replicas are
        # wanted; else a replica would break that could have been complete.
        if len(members) - len(going) > s.wanted_nodes and all(
            held[p] - n >= replicas for p, n in ours.items()
        ):
            held -= ours
            going.append(node)
    names = {n.name for n in going}
    return [*(n for n in members if n.name not in names), *reversed(going)]


def _mark(context: Context, node: Node, reason: str, within_s: float | None, cause: NoticeCause) -> None:
    if node.leaving is None:
        transitions.leave(context, node, reason)
        node.leaves_since_s = context.now
        context.record(ledger.NodeLeaving(node=node.name, reason=reason, within_s=within_s, cause=cause))
        context.send(node.name, m.Drain(reason))
    if within_s is not None:
        until_s = context.now + within_s
        # The earlier of two limits: the engine that gave two minutes will not wait because a person gave ten.
        node.leaves_until_s = until_s if node.leaves_until_s is None else min(node.leaves_until_s, until_s)
    notices.node_goes(context, node, reason, cause)


# ---------------------------------------------------------------- when


def change_due(context: Context) -> str | None:
    """The reason to end the running generation at its next commit; None: it goes on."""
    s = context.state
    if s.membership.generation is None:
        return None
    if not (context.count_nodes(NodePhase.LEAVING) or context.count_workers(WorkerPhase.READY)):
        # Nobody goes and nobody could come, as nearly always: the members are those that it was formed of.
        fits = s.membership.generation.strength <= s.target
        return None if fits else f"the job is resized to {s.wanted_nodes} nodes"
    if not context.count_nodes(NodePhase.LEAVING) and s.membership.generation.strength == s.target:
        return None  # a spare waits, and no member goes: nothing to look at for as long as that stays so
    members = context.members()
    # Three questions in this order: who must go, who is too many, who may come. Leaving comes first because
    # its time may be limited; joining can always wait.
    staying = [w for w in members if not queries.leaves(context, w)]
    ready = queries.ready_to_join(context)
    left, full = replicas.strength(context, staying, []), replicas.strength(context, staying, ready)
    if len(staying) < len(members) and _may_leave(context, full):
        gone = sorted({w.node for w in members if queries.leaves(context, w)})
        verb = "leaves" if len(gone) == 1 else "leave"
        return f"{', '.join(gone)} {verb}: {s.membership.nodes[gone[0]].leaving}"
    if left > s.target:
        return f"the job is resized to {s.wanted_nodes} nodes"
    left, full = _with_newcomers(context)
    # Newcomers only if they add something, and not too often: each change stalls training once for everyone.
    if left < full and context.reached(queries.join_after_s(context, left, full)):
        return "a newcomer is ready"
    return None


def _with_newcomers(context: Context) -> tuple[int, int]:
    """How many compute without those that are ready, and with them; of sharded replicas those that are to leave keep
    their assignments until they can leave."""
    s = context.state
    there = [w for w in context.members() if s.membership.shard_count > 1 or not queries.leaves(context, w)]
    return replicas.strength(context, there, []), min(
        replicas.strength(context, there, queries.ready_to_join(context)), s.target
    )


def _may_leave(context: Context, left: int) -> bool:
    """Whether members whose node is to leave are let go now, `left` workers being there without them."""
    s = context.state
    # With full strength left they can go now. With nobody left they cannot: the last ones train on for as
    # long as they are allowed.
    if left >= s.target or not left:
        return left > 0  # the last ones train on for as long as they can
    leaving = context.nodes_in(NodePhase.LEAVING)
    # Before the question whether the rest can train: when the node is taken, its state goes with it, so it
    # must have parked before.
    if any(context.reached(_deadline_s(context, n)) for n in leaving):
        return True
    if left < max(1, s.minimum):
        return False  # they train on until others are ready
    starting = queries.about_to_join(context)
    if any(w.rebuilds is not None for w in starting):
        return False  # a spare becomes what is missing, for as long as a start may take
    coming = bool(starting or s.membership.replacing)
    return not coming or any(context.reached(_patience_s(context, n)) for n in leaving)


def _deadline_s(context: Context, node: Node) -> float:
    """The end of the node's own time, less what a step and its end may take."""
    if node.leaves_until_s is None:
        return float("inf")
    # A margin for what happens in that time: one step to its commit, parking, and the handing over of what
    # only this node holds.
    return node.leaves_until_s - context.timing.detection_s - 3 * (context.median_s() or 0.0)


def _patience_s(context: Context, node: Node) -> float:
    """Until when a node that is to leave trains on because another is on its way."""
    return node.leaves_since_s + context.timing.form_s


# ---------------------------------------------------------------- who


def choose(
    context: Context, survivors: list[Worker], fresh: list[Worker]
) -> tuple[list[Worker], list[Worker]]:
    """The members of the next generation: survivors that stay, and newcomers up to the target.

    Survivors that are to leave are kept while they cannot be replaced and still have time. If nobody else holds the newest
    state, one of them is kept for one more generation, beyond the target if necessary.
    """
    s = context.state
    ranks = {x.worker: x.rank for x in s.membership.generation.members} if s.membership.generation else {}
    survivors = sorted(survivors, key=lambda w: ranks.get(w.name, len(ranks)))
    staying = [w for w in survivors if not queries.leaves(context, w)]
    fresh = [w for w in fresh if not queries.leaves(context, w)]
    # Who holds the newest state is settled among all survivors, before anyone is chosen: one that has to
    # leave may be the only one that has committed.
    resolution = policy.resolve({w.name: policy.Report(w.committed, w.prepared) for w in survivors})
    if s.membership.shard_count > 1:
        return _choose_rows(context, survivors, staying, fresh, resolution)
    kept = staying[: s.target]
    joining = _nearest(context, kept, fresh, max(0, s.target - len(kept)))
    if not _may_leave(context, len(kept) + len(joining)):
        leaving = [w for w in survivors if queries.leaves(context, w)]
        kept += leaving[: max(0, s.target - len(kept) - len(joining))]
    # Somebody with the newest state must be in the next generation, or its steps are lost. Beyond the target
    # if need be; it leaves at the next change.
    if resolution.start is not None and not any(w.name in resolution.holders for w in kept):
        kept.append(next(w for w in survivors if w.name in resolution.holders))
    return sorted(kept, key=lambda w: ranks.get(w.name, len(ranks))), joining


def _nearest(context: Context, kept: list[Worker], fresh: list[Worker], count: int) -> list[Worker]:
    """So many of the newcomers: those that stand near to whom they replace."""
    standing = queries.standing(context, [*kept, *fresh])
    if standing is None or len(fresh) <= count or not count:
        return fresh[:count]
    generation, there = context.state.membership.generation, {w.name for w in kept}
    lost = [x.worker for x in generation.members if x.worker not in there] if generation is not None else []
    paths, by_name = standing.paths, {w.name: w for w in fresh}
    chosen = set(pick(standing, list(by_name), count, [paths[w] for w in lost], [paths[w] for w in there]))
    return [w for w in fresh if w.name in chosen]


def _choose_rows(
    context: Context,
    survivors: list[Worker],
    staying: list[Worker],
    fresh: list[Worker],
    resolution: policy.StepResolution,
) -> tuple[list[Worker], list[Worker]]:
    """The same where a replica is several workers. Of each shard one stays that has the newest state; survivors of which
    there are more than replicas are wanted go, and others are started for what is missing."""
    # First without those that leave. Only if that is too little, and they have time, are they assigned again.
    plan = replicas.assign_ranks(context, staying, fresh)
    if not _may_leave(context, len(plan.replicas) * context.state.membership.shard_count):
        names = {w.name for w in staying}
        leaving = [w for w in survivors if w.name not in names]
        plan = replicas.assign_ranks(context, [*staying, *leaving], fresh)
    assigned = {w for replica in plan.replicas for w in replica}
    kept = [w for w in survivors if w.name in assigned]
    most = context.state.target // context.state.membership.shard_count
    held = Counter(w.shard_index for w in kept)
    for worker in staying:
        if worker.name not in assigned and held[worker.shard_index] < most:
            kept.append(worker)
            held[worker.shard_index] += 1
    # The last holder of a shard stays as a donor even if it has no assignment: without it all would go back to
    # a snapshot.
    safe = {w.shard_index for w in kept if w.name in resolution.holders}
    for worker in survivors:
        if worker.name in resolution.holders and worker.shard_index not in safe:
            kept.append(worker)
            safe.add(worker.shard_index)
    return kept, [w for w in fresh if w.name in assigned]


def assign_ranks(context: Context, kept: list[Worker], fresh: list[Worker]) -> RankAssignment:
    """The ranks of the next generation. A survivor that is to leave is kept beside the replicas as a source of the state, when
    others take its place."""
    staying = [w for w in kept if not queries.leaves(context, w)]
    without, full = (
        replicas.assign_ranks(context, staying, fresh),
        replicas.assign_ranks(context, kept, fresh),
    )
    # It is kept in its place only if a replica would be missing without it.
    if len(without.replicas) < len(full.replicas):
        return full
    donors = tuple((w.name, w.shard_index) for w in kept if queries.leaves(context, w))
    return RankAssignment(without.replicas, (*without.beside, *donors))


def let_go(context: Context, workers: list[Worker]) -> None:
    """Releases workers that are not in the next generation. Their nodes leave, or get new workers as spares."""
    for worker in workers:
        processes.end_worker(context, worker, counts=False)


def advance(context: Context) -> None:
    """Lets nodes leave that are to leave and have no member; and marks those to leave that are too many for a smaller job."""
    membership = context.state.membership
    if membership.asked_nodes is not None or membership.capacity_nodes is not None:
        limited = membership.capacity_nodes == context.state.wanted_nodes
        cause = NoticeCause.PREEMPTION if limited else NoticeCause.RESIZE
        _fit(context, "the job was resized", None, cause)
    # After `_fit`, which may have taken back that they leave.
    for node in context.nodes_in(NodePhase.LEAVING):
        ours = context.workers_of(node)
        needed = (WorkerPhase.MEMBER, WorkerPhase.PARKED, WorkerPhase.DONE)
        if context.mode.replaces_one and membership.phase is not JobPhase.STOPPING:
            let_go(context, [w for w in ours if w.phase not in needed])
            ours = [w for w in ours if w.phase in needed]
        # Asked in this order: `_hands_over` sends orders to copy, which is not to begin before the node has
        # nothing else to do.
        if not ours and not _holds_on(context, node) and not _hands_over(context, node):
            _release(context, node)
    context.mode.change_members(context)


def _holds_on(context: Context, node: Node) -> bool:
    """What the node does or has may be needed: while it writes a checkpoint, while a generation is put together and until
    its first commit, and when the job is about to end."""
    membership = context.state.membership
    writes = storage.writes(context, node)
    saves = writes or storage.has_last(context, node)
    # What it writes is the job's result or its safety. With no step to wait for, it gets all of its time; an
    # engine that takes it earlier decides that itself.
    if saves and not (context.mode.replaces_one and context.index.alive_workers):
        return True  # no step has to end before it goes: all of its time is for what it saves
    if context.reached(_deadline_s(context, node)):
        return False
    if writes or any(w.digest for w in context.finished()):
        return True
    if health.ordered(context, node):
        return True  # it answers first
    if not context.mode.replaces_one or not membership.number or membership.generation is None:
        return False
    # It may be a donor of the generation that is being put together, which nobody knows before it is formed
    # and has made its first commit.
    parked = context.workers_in(WorkerPhase.PARKED)
    holders = policy.resolve({w.name: policy.Report(w.committed, w.prepared) for w in parked}).holders
    whole = len({w.shard_index for w in parked if w.name in holders}) == membership.shard_count
    if node.health.then is Remedy.RESET_DEVICE or (node.health.then is Remedy.REBOOT and whole):
        return False  # it loses nothing, or what others have; and the sooner it is back the better
    settled = (
        membership.phase is JobPhase.RUNNING and membership.generation_committed > membership.generation.start
    )
    return not settled and membership.phase is not JobPhase.STOPPING


def _hands_over(context: Context, node: Node) -> bool:
    """Where a replica is several workers, it may have the only copy of a part. A device is reset with the memory kept."""
    in_time = not context.reached(_deadline_s(context, node))
    return in_time and node.health.then is not Remedy.RESET_DEVICE and context.request(HandOver(node))


def _release(context: Context, node: Node) -> None:
    if node.health.then is not None and not health.ordered(context, node):
        context.request(ApplyRemedy(node))
        return
    # Orders that its agent has not answered are closed: it is told to end now, and no answer will come.
    context.request(NoteNodeLost(node, None))  # what its agent still does is overtaken
    reason, cause = node.leaving or "", node.notice.cause if node.notice is not None else None
    node_leaves(context, node, reason)
    context.order(ReleaseNode(node=node.name, reason=reason, planned=True, cause=cause))


def node_leaves(context: Context, node: Node, reason: str) -> None:
    """A node leaves as planned: nothing of the job is on it any more. It is told to end, and its copies no longer count.

    The one way out for a node that is not lost (`nodes.lose`). The caller orders what the engine does with the machine.
    """
    transitions.lose_node(context, node, as_planned=True)
    context.record(ledger.NodeLeft(node=node.name, reason=reason))
    context.send(node.name, m.Shutdown(reason))
    context.request(DropCopies(node))


# ---------------------------------------------------------------- what it cost


def formed(context: Context, before: int, after: int, newcomers: int) -> None:
    """A generation was formed after one that ended as planned."""
    membership = context.state.membership
    reason, membership.change_reason = membership.change_reason, None
    if reason is None:
        return
    # When newcomers came is remembered for the pace of joining (`join_after_s`); the stall that they cost
    # follows at the first commit.
    if newcomers:
        membership.grew_at_s = context.now
    leaving = {node.name for node in context.nodes_in(NodePhase.LEAVING)}
    number = membership.changes[-1].id + 1 if membership.changes else 1
    change = PlannedChange(
        id=number,
        reason=reason,
        at_step=membership.committed,
        before=before,
        after=after,
        left_at_s=membership.broke_at_s,
        formed_at_s=context.now,
        generation=membership.number,
        for_incidents=sorted(
            {a.incident for a in context.state.health.acts if a.incident and not a.done and a.node in leaving}
        ),
    )
    change.newcomers = newcomers
    membership.changes.append(change)
    del membership.changes[:-KEPT]


def connected(context: Context, message: m.Joined) -> None:
    """Handles a member's report that it is connected and has the state."""
    change = context.state.membership.changes[-1] if context.state.membership.changes else None
    if change is not None and change.generation == message.generation:
        change.join_s = incidents.most(change.join_s, message.join_s)
        change.restore_s = incidents.most(change.restore_s, message.restore_s)


def committed(context: Context, now: float) -> None:
    """Records what a planned change cost, at the first commit after it."""
    s = context.state
    change = s.membership.changes[-1] if s.membership.changes else None
    if change is None or change.generation != s.membership.number or change.stall_s is not None:
        return
    # Less a median step, because between two commits there is always one step; what is more than that is the
    # cost of the change.
    change.stall_s = max(0.0, now - change.left_at_s - (context.median_s() or 0.0))
    s.membership.changed.count, s.membership.changed.stall_s = (
        s.membership.changed.count + 1,
        s.membership.changed.stall_s + change.stall_s,
    )
    if change.newcomers:
        s.membership.join_cost_s = change.stall_s
    context.concerns(*change.for_incidents)
    context.record(describe(s, change))


def describe(state: CoreState, change: PlannedChange) -> ledger.Changed:
    """The change as the report shows it. stall_s: from the last commit to the next, less a median step."""
    return ledger.Changed(
        id=change.id,
        reason=change.reason,
        t_s=round(max(0.0, change.left_at_s - state.began_s), 4),
        at_step=change.at_step,
        from_world=change.before,
        to_world=change.after,
        newcomers=change.newcomers,
        join_s=change.join_s,
        restore_s=change.restore_s,
        stall_s=None if change.stall_s is None else round(change.stall_s, 4),
    )
