"""Generations: how one ends, and who is in the next, where it starts and who brings the state to whom."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.membership_state import Seat, Worker
from holdfast.coordinator.kernel.phases import JobPhase, WorkerPhase
from holdfast.coordinator.kernel.requests import ReportUnreadable, RewindTo, SpreadCopies, StopJob
from holdfast.coordinator.kernel.storage_state import Snapshot
from holdfast.coordinator.membership import (
    nodes,
    policy,
    processes,
    queries,
    replica_groups,
    resize,
    shard_policy,
)
from holdfast.coordinator.membership.rank_assignment import Seating
from holdfast.coordinator.storage import queries as storage
from holdfast.protocol import causes, ledger
from holdfast.protocol import messages as m
from holdfast.protocol.job import Durable
from holdfast.protocol.snapshots import Copy, Holder

MAX_DONORS = 8
"""Stripes from more donors than this gain nothing: the newcomer's link is full."""

READ_FOR = 8
"""A durable checkpoint is read by one of so many members, and the others have it from those: a tier is slower than they
are, and often paid for by the byte."""

PATIENT_ATTEMPTS = 4
"""So many generations in a row may break for no known reason before there is a pause between attempts."""

MAX_ATTEMPTS = 16
"""So many generations in a row without a commit or a culprit, and the job stops with its state saved."""

# ---------------------------------------------------------------- a generation ends


def break_generation(context: Context, cause: causes.Cause) -> None:
    """Every member leaves the generation and reports what it holds."""
    s = context.state
    draining = s.membership.phase is JobPhase.BREAKING and s.membership.yielding
    if (
        s.membership.generation is None
        or not context.mode.replaces_one
        or not (s.membership.phase is JobPhase.RUNNING or draining)
    ):
        return
    transitions.enter_job(context, JobPhase.BREAKING)
    s.membership.yielding, s.membership.change_reason = False, None
    s.membership.broke_cause, s.membership.broke_at_s, s.membership.unheard_s = cause, context.now, 0.0
    s.deadlines.break_deadline_s = context.now + context.timing.stall_s(context.median_s())
    s.deadlines.inspect_deadline_s = None
    context.record(
        ledger.Broke(
            generation=s.membership.generation.number, reason=str(cause), step=s.membership.committed
        )
    )
    replica_groups.broke(context, str(cause))


def end_at_commit(context: Context, reason: str) -> None:
    """The generation ends at its next commit: nothing is lost."""
    membership = context.state.membership
    if membership.generation is None or membership.yielding:
        return
    membership.yielding, membership.change_reason = True, reason
    context.record(ledger.Yield(generation=membership.generation.number, reason=reason))
    for worker in context.inside():
        context.tell(worker, m.EndAtCommit(membership.generation.number))


def collective_error(context: Context, worker: Worker, message: m.CollectiveError) -> None:
    """Evidence that something is wrong, not who: the generation breaks, and its members say what they hold."""
    membership = context.state.membership
    if membership.generation is None or message.generation != membership.generation.number:
        return
    if worker.phase is WorkerPhase.MEMBER:
        context.record(ledger.CollectiveError(worker=worker.name, step=message.step, detail=message.detail))
        seat = membership.seats[worker.name]
        if seat.restore and message.step < 0 and membership.phase is JobPhase.RUNNING:
            if seat.copy is not None:
                context.request(ReportUnreadable(seat.copy, message))
            elif seat.durable is not None:
                context.request(ReportUnreadable(seat.durable, message))
        break_generation(context, causes.CollectiveFailed())


def parked(context: Context, worker: Worker, message: m.Parked) -> None:
    """A member is out of the generation and says what it holds."""
    s = context.state
    if s.membership.generation is None or message.generation != s.membership.generation.number:
        return
    if worker.phase is not WorkerPhase.MEMBER:
        return
    transitions.enter(context, worker, WorkerPhase.PARKED)
    worker.aside = False
    worker.committed, worker.prepared = message.committed, message.prepared
    worker.begun = message.begun
    s.membership.committed = max(s.membership.committed, message.committed or 0)
    if s.membership.phase is not JobPhase.RUNNING:
        return
    if s.membership.yielding:
        transitions.enter_job(context, JobPhase.BREAKING)
        s.membership.broke_at_s, s.membership.unheard_s = context.now, 0.0
        s.deadlines.break_deadline_s = context.now + context.timing.stall_s(context.median_s())
    else:
        break_generation(context, causes.MemberLeft(worker.name))


def gather(context: Context) -> None:
    """Everyone has left the generation."""
    s = context.state
    transitions.enter_job(context, JobPhase.GATHERING)
    s.deadlines.break_deadline_s, s.membership.yielding = None, False
    context.request(SpreadCopies())  # what members would have saved themselves is asked of others now
    cause, s.membership.broke_cause = s.membership.broke_cause, None
    if (
        cause is None
        or s.membership.stop_reason is not None
        or any(i.decided_at_s is None for i in incidents.open_ones(s))
    ):
        return
    context.open_incident(
        cause, node=None, rung="retry in process", at_s=s.membership.broke_at_s, needs_newcomer=False
    )
    if s.membership.generation is None or s.membership.generation_committed > s.membership.generation.start:
        return
    s.membership.fruitless += 1
    if s.membership.fruitless >= MAX_ATTEMPTS:
        context.request(
            StopJob(f"no step could be finished in {s.membership.fruitless} attempts: {cause}", "failed")
        )
    elif s.membership.fruitless > PATIENT_ATTEMPTS:
        pause_s = context.timing.heartbeat_s * 2.0 ** (s.membership.fruitless - PATIENT_ATTEMPTS)
        s.deadlines.form_after_s = context.now + min(pause_s, context.timing.form_s)


# ---------------------------------------------------------------- the next one


def try_form(context: Context) -> None:
    """Forms a generation as soon as there are workers enough; nobody waits for a slow starter."""
    s = context.state
    if s.deadlines.form_after_s is not None and context.now < s.deadlines.form_after_s:
        return
    survivors = context.workers_in(WorkerPhase.PARKED)
    nothing_saved = s.storage.durable is None and storage.newest_whole(context) is None
    if survivors and nothing_saved and not _whole(context, survivors):
        _start_over(context, survivors)
        survivors = []
    if s.storage.unread and nothing_saved and not any(w.committed is not None for w in survivors):
        more = f" (and {len(s.storage.unread) - 1} more)" if len(s.storage.unread) > 1 else ""
        advice = "remove it, or choose another --job, to begin anew"
        context.request(
            StopJob(f"no checkpoint could be loaded: {s.storage.unread[0]}{more}; {advice}", "failed")
        )
        return
    ready = context.workers_in(WorkerPhase.READY)
    fresh = sorted(
        ready,
        key=lambda w: (bool(s.membership.nodes[w.node].lemon), s.membership.nodes[w.node].failures, w.node),
    )
    kept, joining = resize.choose(context, survivors, fresh)
    count = shard_policy.strength(context, kept, joining)
    if count >= s.needed:
        s.deadlines.wait_deadline_s = None
        enough = count >= s.target and not (s.storage.snapshots and queries.expected(context))
        if s.membership.number > 0 or enough or not _worth_waiting(context):
            resize.let_go(context, [w for w in survivors if w not in kept])
            _form(context, survivors, kept, joining)
        return
    shard_policy.rebuild(context)  # also for what those held that were ended just now
    if context.workers_in(WorkerPhase.STARTING, WorkerPhase.ATTACHED) or queries.under_repair(context):
        s.deadlines.wait_deadline_s = None  # they have a deadline of their own
    elif s.deadlines.wait_deadline_s is None:
        s.deadlines.wait_deadline_s = context.now + context.timing.wait_s
    if s.membership.number and not s.membership.waiting:
        s.membership.waiting = True
        context.record(ledger.Waiting(workers=count, target=s.target))
    if queries.hopeless(context):
        why = "the restart budget is spent" if context.budget_spent() else "no more nodes may be asked for"
        context.request(StopJob(why, "failed"))


def _whole(context: Context, survivors: list[Worker]) -> bool:
    """Whether survivors hold every shard of one state."""
    outcome = policy.settle({w.name: policy.Report(w.committed, w.prepared) for w in survivors})
    return {w.shard_index for w in survivors if w.name in outcome.holders} == set(
        range(context.state.membership.shard_count)
    )


def _worth_waiting(context: Context) -> bool:
    """The first generation waits a while for the target size, if more workers are on their way; and, when nodes came
    with snapshots of a run before, for all nodes: the newest may be in the memory of the last one."""
    s = context.state
    pending = context.workers_in(WorkerPhase.STARTING, WorkerPhase.ATTACHED)
    missing = len(context.alive_nodes()) < s.wanted_nodes or (
        s.storage.snapshots and queries.expected(context)
    )
    if not (pending or s.membership.replacing or missing):
        return False
    if s.deadlines.form_deadline_s is None:
        s.deadlines.form_deadline_s = context.now + context.timing.form_s
    return context.now < s.deadlines.form_deadline_s


def _start_over(context: Context, survivors: list[Worker]) -> None:
    """No live copy of the state and no checkpoint: only a new process holds the state that all began from."""
    names, cause = [w.name for w in survivors], causes.NobodyHasState()
    context.record(ledger.WorkerEnded(workers=names, cause=str(cause), cause_kind=cause.kind))
    for worker in survivors:
        processes.end_worker(context, worker)
    nodes.staff(context)


def _form(context: Context, survivors: list[Worker], kept: list[Worker], fresh: list[Worker]) -> None:
    """survivors: all that reported, for what becomes of the step in flight; kept: those of them that stay."""
    s = context.state
    reports = {w.name: policy.Report(w.committed, w.prepared) for w in survivors}
    reports |= {w.name: policy.Report(None) for w in fresh}
    outcome = policy.settle(reports)
    seating = _seating(context, survivors, kept, fresh)
    ranks = seating.workers
    columns = [
        [w for w in ranks if s.membership.workers[w].shard_index == p]
        for p in range(s.membership.shard_count)
    ]
    durable, snapshot = None, None
    if any(outcome.holders.isdisjoint(column) for column in columns):
        durable, snapshot = s.storage.durable, storage.newest_whole(context)
        if snapshot is not None and durable is not None and durable.step > snapshot.step:
            snapshot = None
        elif snapshot is not None:
            durable = None
        saved = snapshot or durable
        start = saved.step if saved else 0
        outcome = policy.Outcome(None)  # what is prepared was computed from a state that is not whole
        if saved:
            holders = frozenset(w for w in ranks if snapshot is not None and reports[w].committed == start)
            restore = frozenset(ranks) - holders
        else:
            holders = frozenset(column[0] for column in columns)
            restore = frozenset(w for column in columns for w in column if _differs(context, w, column[0]))
        _count_lost(context, start)
        context.request(RewindTo(start))
    else:
        start, holders, restore = outcome.start or 0, outcome.holders, outcome.restore
    before = s.membership.generation.strength if s.membership.generation else 0
    connected = (
        replica_groups.connected_in(context, seating.rows, s.membership.generation)
        if s.membership.shard_count > 1
        else ()
    )
    s.membership.number += 1
    complete = len(seating.rows) * s.membership.shard_count
    members = tuple(
        _member(r, s.membership.workers[w], r // s.membership.shard_count if r < complete else -1)
        for r, w in enumerate(ranks)
    )
    s.membership.generation = m.Generation(
        number=s.membership.number, members=members, start=start, shape=s.membership.shape, rows=connected
    )
    live = durable is None and snapshot is None
    savers = storage.savers(context, s.membership.generation)
    givers, served = [], []
    for shard_index in range(s.membership.shard_count):
        column = s.membership.generation.column(shard_index)
        readers = _readers([members[r] for r in column]) if durable is not None else ()
        givers.append(
            (tuple(r for r in column if ranks[r] in holders)[:MAX_DONORS] if live else ()) or readers
        )
        served.append(any(ranks[r] in restore for r in column) and len(column) > len(readers))
    s.membership.seats, s.membership.givers = {}, tuple(givers)
    mtbf_s = storage.mean_time_between_failures_s(context)
    for rank, name in enumerate(ranks):
        copy: Copy | None = None
        sources: tuple[Holder, ...] = ()
        others: tuple[tuple[Copy, tuple[Holder, ...]], ...] = ()
        shard_index, node = s.membership.workers[name].shard_index, s.membership.workers[name].node
        if snapshot is not None and snapshot.world == s.membership.shard_count:
            copy, sources = storage.sources(context, snapshot, shard_index, node)
        elif snapshot is not None:
            others = tuple(storage.sources(context, snapshot, x, node) for x in range(snapshot.world))
        gives = rank in givers[shard_index]
        reads = durable is not None and gives
        seat = Seat(
            rank,
            apply=name in outcome.apply,
            restore=name in restore,
            serve=served[shard_index] and gives,
            fetches=name in restore and not reads,
            copy=copy,
            holders=sources,
            durable=durable if reads else None,
            saves=rank in savers,
            mtbf_s=mtbf_s,
            shards=others if name in restore else (),
        )
        _enroll(context, s.membership.workers[name], seat, start)
    transitions.enter_job(context, JobPhase.RUNNING)
    s.membership.generation_committed, s.membership.committed = start, max(start, s.membership.committed)
    s.deadlines.form_deadline_s = s.deadlines.wait_deadline_s = s.deadlines.form_after_s = None
    s.membership.waiting = False
    s.membership.formed_at_s = context.now
    s.membership.history.append((round(context.now - s.began_s, 4), complete))
    resize.formed(context, before, complete, len(fresh))
    for _ in fresh:
        incidents.replaced(s, context.now)
    incidents.decided(s, context.now, _rung(context, fresh, complete))
    context.record(
        ledger.Formed(
            generation=s.membership.number,
            start=start,
            world=complete,
            workers=list(ranks),
            restore=sorted(restore),
            applied=bool(outcome.apply),
            source=_source(outcome, snapshot, durable),
            rows=list(connected) if connected else None,
        )
    )


def _seating(context: Context, survivors: list[Worker], kept: list[Worker], fresh: list[Worker]) -> Seating:
    if context.state.membership.shard_count > 1:
        return resize.seating(context, kept, fresh)
    previous = context.state.membership.generation if survivors else None
    ranks = policy.assign_ranks(previous, [w.name for w in kept], [w.name for w in fresh])
    return Seating(tuple((w,) for w in ranks))


def _readers(members: Sequence[m.Member]) -> tuple[int, ...]:
    """Ranks that read a durable checkpoint for all; on different nodes where there are such."""
    first = {member.node: member.rank for member in reversed(members)}
    others = [member.rank for member in members if first[member.node] != member.rank]
    return tuple(sorted([*sorted(first.values()), *others][: -(-len(members) // READ_FOR)]))


def _source(outcome: policy.Outcome, snapshot: Snapshot | None, durable: Durable | None) -> str:
    """Where those that hold no state get it from."""
    if outcome.start is not None:
        return "live"
    return "memory" if snapshot else "disk" if durable else "fresh"


def _enroll(context: Context, worker: Worker, seat: Seat, start: int) -> None:
    transitions.enter(context, worker, WorkerPhase.MEMBER)
    worker.prepared, worker.restored = False, None
    worker.committed = start
    context.state.membership.blames.pop(worker.name, None)
    context.state.membership.seats[worker.name] = seat
    context.tell(worker, queries.form(context.state, worker))


def _rung(context: Context, fresh: list[Worker], world: int) -> str:
    if fresh:
        latest = context.state.incidents[-1].node if context.state.incidents else None
        return "restart" if all(w.node == latest for w in fresh) else "spare"
    return "go on smaller" if world < context.state.target else "retry in process"


def _differs(context: Context, name: str, other: str) -> bool:
    """Whether two workers that hold the same shard began with different states."""
    mine, theirs = context.state.membership.workers[name].ready, context.state.membership.workers[other].ready
    return (mine and mine.digest) != (theirs and theirs.digest)


def _member(rank: int, worker: Worker, replica: int) -> m.Member:
    ready = worker.ready
    return m.Member(
        rank=rank,
        worker=worker.name,
        node=worker.node,
        slot=worker.slot,
        host=ready.host if ready else "",
        vote_port=ready.vote_port if ready else 0,
        data_port=ready.data_port if ready else 0,
        replica=replica,
        shard_index=worker.shard_index,
    )


def _count_lost(context: Context, start: int) -> None:
    s = context.state
    lost = max(0, s.membership.committed - start)
    s.membership.lost_steps += lost
    s.membership.committed = min(s.membership.committed, start)
    for incident in incidents.open_ones(s):
        if incident.first_commit_at_s is None:
            incident.lost_steps = (incident.lost_steps or 0) + lost
