"""How a generation ends, and how the next one is formed: its members, the step at which it starts, and the sources of its
state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import Context, ReportUnreadable, RewindTo, SpreadCopies
from holdfast.coordinator.kernel.state import (
    Assignment,
    JobPhase,
    MemorySnapshot,
    NodePhase,
    Timer,
    Worker,
    WorkerPhase,
)
from holdfast.coordinator.membership import (
    nodes,
    policy,
    processes,
    queries,
    replicas,
    resize,
    shutdown,
    wall_time,
)
from holdfast.coordinator.membership.rank_assignment import RankAssignment
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
    """Ends the generation because of a fault: every member leaves it and reports which state it holds."""
    s = context.state
    # A generation that is ending at its commit may still break: a member dies while the others park. Then the
    # rest must be told to leave now, or they would wait in a step for the dead one.
    draining = s.membership.phase is JobPhase.BREAKING and s.membership.yielding
    if (
        s.membership.generation is None
        or not context.mode.replaces_one
        or not (s.membership.phase is JobPhase.RUNNING or draining)
    ):
        return
    # The phase first: what follows records and sends, and a failure reported by one of these requests must
    # find the job breaking already, or it would break it a second time.
    transitions.enter_job(context, JobPhase.BREAKING)
    wall_time.broke(s, context.now)
    s.membership.yielding, s.membership.change_reason = False, None
    s.membership.broke_cause = cause
    s.membership.broke_at_s = s.membership.told_to_leave_s = context.now
    s.deadlines.set(Timer.LEAVE, context.now + context.timing.stall_s(context.median_s()))
    if s.membership.shard_count == 1:
        # With shards, who suffices is known only when the next generation is formed: a spare that is told to build another
        # shard meanwhile is none.
        s.deadlines.set(Timer.SPARE_AFTER, context.now + context.timing.detection_s)
    # An inspection of a generation that has ended is void. Its verdict would name workers of a step that
    # nobody computes any more.
    s.deadlines.clear(Timer.INSPECT)
    context.record(
        ledger.Broke(
            generation=s.membership.generation.number, reason=str(cause), step=s.membership.committed
        )
    )
    replicas.broke(context, str(cause))


def end_at_commit(context: Context, reason: str) -> None:
    """Ends the generation as planned, at its next commit. No step is lost."""
    membership = context.state.membership
    if membership.generation is None or membership.yielding:
        return
    membership.yielding, membership.change_reason = True, reason
    context.record(ledger.Yield(generation=membership.generation.number, reason=reason))
    for worker in context.inside():
        context.tell(worker, m.EndAtCommit(membership.generation.number))


def collective_error(context: Context, worker: Worker, message: m.CollectiveError) -> None:
    """Handles a failed collective, which proves that something is wrong but not what: the generation breaks, and its members
    report which state they hold."""
    membership = context.state.membership
    # Every handler in this file drops reports of earlier generations. They arrive late as a rule, not
    # as an exception: a parked worker's last message waits behind the queue of its agent.
    if membership.generation is None or message.generation != membership.generation.number:
        return
    if worker.phase is WorkerPhase.MEMBER:
        context.record(ledger.CollectiveError(worker=worker.name, step=message.step, detail=message.detail))
        assignment = membership.assignments[worker.name]
        # Step -1: it failed while it fetched its state. That may mean that the source is damaged, which the
        # storage part has to count; otherwise the next generation would be sent to the same source for ever.
        cause: causes.Cause = causes.CollectiveFailed()
        if assignment.restore and message.step < 0 and membership.phase is JobPhase.RUNNING:
            if assignment.copy is not None:
                context.request(ReportUnreadable(assignment.copy, message))
                cause = causes.StateUnread(f"the snapshot of step {assignment.copy.key.step}", message.detail)
            elif assignment.durable is not None:
                context.request(ReportUnreadable(assignment.durable, message))
                cause = causes.StateUnread(assignment.durable.where, message.detail, message.lost)
        break_generation(context, cause)


def parked(context: Context, worker: Worker, message: m.Parked) -> None:
    """Handles a member's report that it has left the generation, with the state that it holds."""
    s = context.state
    if s.membership.generation is None or message.generation != s.membership.generation.number:
        return
    if worker.phase is not WorkerPhase.MEMBER:
        return
    transitions.enter(context, worker, WorkerPhase.PARKED)
    wall_time.aside(s, worker, context.now, False)
    worker.aside = False
    # What the worker holds now, in its own words, and the only input of `resolve`. Progress that was reported
    # before may be older than this or (after a torn update) newer than what is usable.
    worker.committed, worker.prepared = message.committed, message.prepared
    worker.agreement = message.agreement
    s.membership.committed = max(s.membership.committed, message.committed or 0)
    if s.membership.phase is not JobPhase.RUNNING:
        return
    # The first one to park shows that the planned end has come. From here the others have the time of a stall
    # to follow; one that does not is stuck in the last step.
    if s.membership.yielding:
        # The last step of a generation that ends as planned may be told by this word alone.
        if (message.committed or 0) > s.membership.generation_committed:
            wall_time.stepped(s, context.now)
        if s.membership.stop_reason is None:
            wall_time.planned(s, context.now)
        transitions.enter_job(context, JobPhase.BREAKING)
        s.membership.broke_at_s = s.membership.told_to_leave_s = context.now
        s.deadlines.set(Timer.LEAVE, context.now + context.timing.stall_s(context.median_s()))
    else:
        break_generation(context, causes.MemberLeft(worker.name))


def gather(context: Context) -> None:
    """Resolves the step in flight, when all members have left the generation."""
    s = context.state
    transitions.enter_job(context, JobPhase.GATHERING)
    wall_time.gathered(s, context.now)
    s.membership.yielding = False
    s.deadlines.clear(Timer.LEAVE)
    # Members in a step were expected to bring their own copies of a snapshot. Now that they have left it some
    # will not, and until others are asked a snapshot stays incomplete.
    context.request(SpreadCopies())
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
    if isinstance(cause, causes.StateUnread) and cause.damaged:
        return  # an older one is next, so there are only so many of these attempts
    # Counted only where no incident has a culprit and nothing was committed. A job that commits one step
    # between two faults makes progress, however often it breaks.
    s.membership.fruitless += 1
    if s.membership.fruitless >= MAX_ATTEMPTS:
        shutdown.request(
            context, f"no step could be completed in {s.membership.fruitless} attempts: {cause}", "failed"
        )
    elif s.membership.fruitless > PATIENT_ATTEMPTS:
        # Growing pauses: whatever makes every generation fail for no known reason (a switch that reboots, a
        # file server) gets time to end, and a log that people can still read.
        pause_s = context.timing.heartbeat_s * 2.0 ** (s.membership.fruitless - PATIENT_ATTEMPTS)
        s.deadlines.set(Timer.FORM_AFTER, context.now + min(pause_s, context.timing.form_s))


# ---------------------------------------------------------------- the next one


def try_form(context: Context) -> None:
    """Forms a generation as soon as there are enough workers. It never waits for a slow one to start."""
    s = context.state
    if context.is_ahead(Timer.FORM_AFTER):
        return
    # Called after every batch of events while the job gathers, so it must be safe to do nothing: every exit
    # below leaves a timer set (`Timer.WAIT`, `Timer.FORM`) or relies on a deadline that a starting
    # worker has of its own. Without one the job would wait for an event that never comes.
    survivors = context.workers_in(WorkerPhase.PARKED)
    nothing_saved = s.storage.durable is None and storage.newest_complete(context) is None
    # Some shard is held by nobody, alive or saved. Survivors cannot go back to the beginning themselves:
    # their modules are trained, and only a fresh process builds the state that all began from. So they end,
    # although they are healthy.
    if survivors and nothing_saved and not _every_shard_is_held(context, survivors):
        _start_over(context, survivors)
        survivors = []
    # There were checkpoints, none could be loaded, and nobody holds a state. Starting from scratch would
    # quietly throw away what a person trained for weeks; a person must decide that.
    if s.storage.unread and nothing_saved and not any(w.committed is not None for w in survivors):
        more = f" (and {len(s.storage.unread) - 1} more)" if len(s.storage.unread) > 1 else ""
        advice = "remove it, or choose another --job, to start from the beginning"
        shutdown.request(
            context, f"no checkpoint could be loaded: {s.storage.unread[0]}{more}; {advice}", "failed"
        )
        return
    if _is_first_and_waits(context, survivors):
        return
    # The number first, and the workers only if it suffices: this runs for every worker that gets ready while a large job starts.
    count = (
        len(survivors) + context.count_workers(WorkerPhase.READY)
        if survivors
        else replicas.complete_ones(context) * s.membership.shard_count
    )
    tells = s.membership.number and not s.membership.waiting
    if count >= s.needed or tells:
        ready = context.workers_in(WorkerPhase.READY)
        # Lemons last, then nodes that failed before. The name breaks ties, so that two coordinators with the same
        # state choose the same workers.
        fresh = sorted(ready, key=lambda w: (*queries.tier(s.membership.nodes[w.node]), w.node))
        kept, joining = resize.choose(context, survivors, fresh)
        count = replicas.strength(context, kept, joining)
    if count >= s.needed:
        s.deadlines.clear(Timer.WAIT)
        # Only the first generation waits for more; every later one forms with what it has, because training
        # time is lost while it waits, and a newcomer joins at any later commit for almost nothing.
        enough = count >= s.target and not (s.storage.snapshots and queries.expected(context))
        if s.membership.number > 0 or enough or not _worth_waiting(context):
            stay = {w.name for w in kept}
            resize.let_go(context, [w for w in survivors if w.name not in stay])
            _form(context, survivors, kept, joining)
        return
    # Spares may hold the wrong shards: enough workers are ready, and yet no replica is complete. This is what
    # turns one into the other.
    replicas.rebuild(context)  # also for what those held that were ended just now
    if context.count_workers(WorkerPhase.STARTING, WorkerPhase.ATTACHED) or queries.under_repair(context):
        # Workers that start or nodes under repair end by themselves, well or not, and wake the core. Only
        # when nobody is on the way does the clock for giving up start.
        s.deadlines.clear(Timer.WAIT)  # they have a deadline of their own
    elif not s.deadlines.is_set(Timer.WAIT):
        s.deadlines.set(Timer.WAIT, context.now + context.timing.wait_s)
    if tells:
        s.membership.waiting = True
        context.concerns(*(incident.id for incident in incidents.open_ones(s)))
        context.record(ledger.Waiting(workers=count, target=s.target))
    # Nothing is starting, nothing was asked for and nothing may be asked for. Waiting for the deadline would
    # only make a person wait for the same answer.
    if queries.hopeless(context):
        why = "the restart budget is used up" if context.budget_spent() else "no more nodes can be requested"
        shutdown.request(context, why, "failed", incidents.last_root_cause(s))


def _is_first_and_waits(context: Context, survivors: list[Worker]) -> bool:
    """Whether the number of workers alone shows that the first generation waits for more."""
    s = context.state
    if (
        s.membership.number
        or survivors
        or context.count_nodes(NodePhase.LEAVING)
        or not s.needed <= replicas.complete_ones(context) * s.membership.shard_count < s.target
    ):
        return False
    s.deadlines.clear(Timer.WAIT)
    return _worth_waiting(context)


def _every_shard_is_held(context: Context, survivors: list[Worker]) -> bool:
    """Whether survivors hold every shard of one state."""
    resolution = policy.resolve({w.name: policy.Report(w.committed, w.prepared) for w in survivors})
    return {w.shard_index for w in survivors if w.name in resolution.holders} == set(
        range(context.state.membership.shard_count)
    )


def _worth_waiting(context: Context) -> bool:
    """The first generation waits a while for the target size, if more workers are on their way; and, when nodes came
    with snapshots of a run before, for all nodes: the newest may be in the memory of the last one."""
    s = context.state
    pending = context.count_workers(WorkerPhase.STARTING, WorkerPhase.ATTACHED)
    missing = len(context.index.alive_nodes) < s.wanted_nodes or (
        s.storage.snapshots and queries.expected(context)
    )
    if not (pending or s.membership.replacing or missing):
        return False
    if not s.deadlines.is_set(Timer.FORM):
        s.deadlines.set(Timer.FORM, context.now + context.timing.form_s)
    return context.is_ahead(Timer.FORM)


def _start_over(context: Context, survivors: list[Worker]) -> None:
    """No live copy of the state and no checkpoint: only a new process holds the state that all began from."""
    names, cause = [w.name for w in survivors], causes.NobodyHasState()
    context.record(ledger.WorkerEnded(workers=names, cause=str(cause), cause_kind=cause.kind))
    for worker in survivors:
        processes.end_worker(context, worker)
    nodes.staff(context)


@dataclass(frozen=True, kw_only=True)
class _Start:
    """Where a generation goes on, and who has the state of that step."""

    step: int
    """Committed steps."""
    resolution: policy.StepResolution
    """What the step in flight becomes."""
    holders: frozenset[str]
    """Workers that have the state."""
    restore: frozenset[str]
    """Workers that fetch it."""
    snapshot: MemorySnapshot | None = None
    """All go back to this one; None: to none in memory."""
    durable: Durable | None = None
    """All go back to this one; None: to none in a durable tier."""

    @property
    def live(self) -> bool:
        """The state comes from workers that hold it."""
        return self.snapshot is None and self.durable is None


def _form(context: Context, survivors: list[Worker], kept: list[Worker], fresh: list[Worker]) -> None:
    """survivors: all that reported, for what becomes of the step in flight; kept: those of them that stay."""
    s = context.state
    # All survivors vote on the step in flight, also those that will not stay: one of them may be the only one
    # that has committed it, and then the step happened.
    reports = {w.name: policy.Report(w.committed, w.prepared) for w in survivors}
    reports |= {w.name: policy.Report(None) for w in fresh}
    assigned = _assign_ranks(context, survivors, kept, fresh)
    ranks = assigned.workers
    start = _start(context, reports, ranks)
    previous = s.membership.generation
    for name in {x.worker for x in previous.members} - set(ranks) if previous is not None else ():
        if name in s.membership.workers:  # a member is forgotten when it is in the newest generation no more
            s.membership.workers[name].counts_until = start.step
    before = previous.strength if previous else 0
    connected = (
        # From the old generation, so before the new one takes its place in the state.
        replicas.connected_in(context, assigned.replicas, s.membership.generation)
        if s.membership.shard_count > 1
        else ()
    )
    # Of the generation that broke. A worker that leaves this one in order would else be taken for one that did not halt.
    s.membership.halting = {}
    # The number is the fence. It is in every message of and to a member, rises by one for each generation and
    # is written before JoinGeneration is sent; so whatever an old generation still says can be recognized and
    # dropped.
    s.membership.number += 1
    complete = len(assigned.replicas) * s.membership.shard_count
    s.membership.generation = m.Generation(
        number=s.membership.number,
        members=tuple(
            _member(r, s.membership.workers[w], r // s.membership.shard_count if r < complete else -1)
            for r, w in enumerate(ranks)
        ),
        start=start.step,
        shape=s.membership.shape,
        groups_connected_in=connected,
    )
    _assign(context, s.membership.generation, start)
    # Only after every member was enrolled: an exception in between leaves the state that was written last,
    # with the generation before.
    transitions.enter_job(context, JobPhase.RUNNING)
    s.membership.generation_committed = start.step
    s.membership.committed = max(start.step, s.membership.committed)
    s.deadlines.clear(Timer.FORM, Timer.WAIT, Timer.FORM_AFTER)
    s.membership.waiting = False
    s.membership.formed_s = context.now
    wall_time.formed(s, context.now)
    s.membership.resized(round(context.now - s.began_s, 4), complete)
    resize.formed(context, before, complete, len(fresh))
    for _ in fresh:
        incidents.replaced(s, context.now)
    context.concerns(*incidents.decided(s, context.now, _rung(context, fresh, complete)))
    context.record(
        ledger.Formed(
            generation=s.membership.number,
            start=start.step,
            world=complete,
            workers=list(ranks),
            restore=sorted(start.restore),
            applied=bool(start.resolution.apply),
            source=_source(start),
            groups_connected_in=list(connected) if connected else None,
        )
    )


def _start(context: Context, reports: dict[str, policy.Report], ranks: Sequence[str]) -> _Start:
    """Where the generation of these workers goes on."""
    s = context.state
    resolution = policy.resolve(reports)
    groups: list[list[str]] = [[] for _ in range(s.membership.shard_count)]
    for name in ranks:
        groups[s.membership.workers[name].shard_index].append(name)
    if not any(resolution.holders.isdisjoint(group) for group in groups):
        return _Start(
            step=resolution.start or 0,
            resolution=resolution,
            holders=resolution.holders,
            restore=resolution.restore,
        )
    # Of some shard no live worker holds the newest state. A state is only as good as its worst shard, so all
    # go back together to what was saved, also those that hold theirs: mixing shards of two steps would train
    # on, without an error, from a state that never existed.
    durable, snapshot = s.storage.durable, storage.newest_complete(context)
    # The newer of the two wins, and memory wins a tie, because it is read at the speed of the network and
    # costs nobody's disk.
    if snapshot is not None and durable is not None and durable.step > snapshot.step:
        snapshot = None
    elif snapshot is not None:
        durable = None
    saved = snapshot or durable
    step = saved.step if saved else 0
    if saved:
        # Whoever is at the snapshot's step already holds exactly its bytes, and fetches nothing.
        holders = frozenset(w for w in ranks if snapshot is not None and reports[w].committed == step)
        restore = frozenset(ranks) - holders
    else:
        holders = frozenset(group[0] for group in groups)
        # Nothing is saved: the very beginning. Workers that built the same bits need no transfer, which
        # the digests show; an unseeded script differs, and then the first of each group is the original.
        restore = frozenset(w for group in groups for w in group if _differs(context, w, group[0]))
    _count_lost(context, step)
    # Before the new number is given out: what was saved of later steps is void from this generation on,
    # and `Rewind` holds the number that begins it.
    context.request(RewindTo(step))
    # No prepared gradient may be applied: it was computed from the state that is being left behind.
    return _Start(
        step=step,
        resolution=policy.StepResolution(None),
        holders=holders,
        restore=restore,
        snapshot=snapshot,
        durable=durable,
    )


def _assign(context: Context, generation: m.Generation, start: _Start) -> None:
    """Gives every member its part of the generation, and tells it."""
    membership = context.state.membership
    savers = storage.savers(context, generation)
    state_sources, served = [], []
    for shard_index in range(membership.shard_count):
        group = generation.replica_group(shard_index)
        readers = _readers([generation.members[r] for r in group]) if start.durable is not None else ()
        # Live donors of the same shard, or, where the state comes from a durable tier, those few that read it
        # there. Never both: a donor that holds a later state than the checkpoint would be wrong.
        donors = tuple(r for r in group if generation.members[r].worker in start.holders)[:MAX_DONORS]
        state_sources.append((donors if start.live else ()) or readers)
        fetch = any(generation.members[r].worker in start.restore for r in group)
        served.append(fetch and len(group) > len(readers))
    membership.assignments, membership.state_sources = {}, tuple(state_sources)
    mtbf_s = storage.mean_time_between_failures_s(context)
    # The state has one assignment per member, and no copy of the generation in it: with the member list in every
    # assignment, the state of a thousand workers would have a million entries, and is written with every decision.
    for member in generation.members:
        worker = membership.workers[member.worker]
        gives = member.rank in state_sources[worker.shard_index]
        reads = start.durable is not None and gives
        copy, sources, others = _where_saved(context, worker, start.snapshot)
        restores = worker.name in start.restore
        assignment = Assignment(
            rank=member.rank,
            apply=worker.name in start.resolution.apply,
            restore=restores,
            serve=served[worker.shard_index] and gives,
            fetches=restores and not reads,
            copy=copy,
            holders=sources,
            durable=start.durable if reads else None,
            saves=member.rank in savers,
            mtbf_s=mtbf_s,
            shards=others if restores else (),
        )
        _enroll(context, worker, assignment, start.step)


def _where_saved(
    context: Context, worker: Worker, snapshot: MemorySnapshot | None
) -> tuple[Copy | None, tuple[Holder, ...], tuple[tuple[Copy, tuple[Holder, ...]], ...]]:
    """A worker's shard of a snapshot and who has it; or, of a snapshot of another shape, all shards."""
    if snapshot is None:
        return None, (), ()
    # Holders are listed for each reader with its own node first, so that a survivor reads its shard from
    # its own memory and the network stays free for newcomers.
    if snapshot.world == context.state.membership.shard_count:
        return *storage.sources(context, snapshot, worker.shard_index, worker.node), ()
    return None, (), tuple(storage.sources(context, snapshot, x, worker.node) for x in range(snapshot.world))


def _assign_ranks(
    context: Context, survivors: list[Worker], kept: list[Worker], fresh: list[Worker]
) -> RankAssignment:
    if context.state.membership.shard_count > 1:
        return resize.assign_ranks(context, kept, fresh)
    previous = context.state.membership.generation if survivors else None
    standing = queries.standing(context, [*kept, *fresh])
    paths = standing.paths if standing is not None else None
    ranks = policy.assign_ranks(previous, [w.name for w in kept], [w.name for w in fresh], paths)
    return RankAssignment(tuple((w,) for w in ranks))


def _readers(members: Sequence[m.Member]) -> tuple[int, ...]:
    """Ranks that read a durable checkpoint for all; on different nodes where there are such."""
    first = {member.node: member.rank for member in reversed(members)}
    others = [member.rank for member in members if first[member.node] != member.rank]
    # One reader per node before a second on any: two readers on one node share its link to the tier.
    return tuple(sorted([*sorted(first.values()), *others][: -(-len(members) // READ_FOR)]))


def _source(start: _Start) -> str:
    """Where those that hold no state get it from."""
    if start.resolution.start is not None:
        return "live"
    return "memory" if start.snapshot else "disk" if start.durable else "fresh"


def _enroll(context: Context, worker: Worker, assignment: Assignment, start: int) -> None:
    # Order matters little here, since nothing is sent before the batch is written. But `queries.form` reads
    # the assignment, so the assignment must be in the state.
    transitions.enter(context, worker, WorkerPhase.MEMBER)
    worker.prepared, worker.restored, worker.counts_until = False, None, None
    worker.committed = start
    context.state.membership.root_causes.pop(worker.name, None)
    context.state.membership.assignments[worker.name] = assignment
    context.tell(worker, queries.form(context.state, worker))


def _rung(context: Context, fresh: list[Worker], world: int) -> str:
    if fresh:
        # For the report only: the rung says how the job was repaired. It is never read by a decision.
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
    wall_time.went_back(s, start)
    for incident in incidents.open_ones(s):
        if incident.first_commit_at_s is None:
            incident.lost_steps = (incident.lost_steps or 0) + lost
