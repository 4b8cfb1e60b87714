"""The end of a job: all steps are done, it was asked to stop, or it cannot go on. Whatever was committed is kept."""

from __future__ import annotations

from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import Context, ForgetLast, NoteLast, ReportUnsaved, StoreLast
from holdfast.coordinator.kernel.events import End
from holdfast.coordinator.kernel.state import JobPhase, RootCause, Timer, Worker, WorkerPhase
from holdfast.coordinator.membership import (
    notices,
    policy,
    processes,
    wall_time,
)
from holdfast.coordinator.storage import queries as storage
from holdfast.protocol import causes, ledger
from holdfast.protocol import messages as m
from holdfast.protocol.notices import NoticeCause

# ---------------------------------------------------------------- why


def request(
    context: Context,
    reason: str,
    outcome: str,
    root_cause: RootCause | None = None,
    *,
    cause: NoticeCause | None = None,
    within_s: float | None = None,
) -> None:
    """The job ends at the next commit. root_cause: of the end, if none is known yet.

    cause: for the scripts, and for whoever decides what follows on the end; None: `failure` or `stop`, as the outcome is.
    within_s: so long the engine leaves the job its nodes; None: it does not say.
    """
    s = context.state
    # The first one blamed stays. Later failures are usually effects of the first, and what is printed last
    # has to be where a person starts to look.
    s.membership.root_cause = s.membership.root_cause or root_cause
    # Asked twice: the first reason counts, and the deadline is not pushed back, or a person who presses
    # Ctrl-C again and again would keep the job alive.
    if s.membership.stop_reason is not None:
        return
    s.membership.stop_reason, s.membership.outcome = (
        reason,
        s.membership.outcome or outcome,
    )  # all steps may be done already
    cause = cause or (NoticeCause.FAILURE if outcome == "failed" else NoticeCause.STOP)
    s.membership.stop_cause = cause
    # Three steps at least: the job ends at a commit, and a large model's step may take longer than any fixed
    # time.
    stop_s = max(context.timing.stop_s, 3 * (context.median_s() or 0.0))
    s.deadlines.set(Timer.STOP, context.now + stop_s)
    context.record(ledger.StopRequested(reason=reason, outcome=outcome))
    # At level 0 and 1 processes are killed after this time, see `RestartMode.advance`.
    ours_s = stop_s if context.mode.replaces_one else context.timing.stop_s / 2
    notices.job_ends(context, reason, cause, ours_s if within_s is None else min(ours_s, within_s))


def due(context: Context) -> None:
    """Handles deadlines that have passed: for workers to join, and for the job to end."""
    s = context.state
    if s.membership.phase is JobPhase.GATHERING and context.is_due(Timer.WAIT):
        # Cleared before the request, since a request may come back here in the same batch, and the deadline
        # that is over would fire again.
        s.deadlines.clear(Timer.WAIT)
        reason = f"too few workers for {context.timing.wait_s:g} s"
        request(context, reason, "failed", incidents.last_root_cause(s), cause=NoticeCause.NODES)
    if context.is_due(Timer.STOP):
        s.deadlines.clear(Timer.STOP)
        # What remains depends on how far the job is: a step in flight is dropped, a worker that does not save
        # is replaced by another holder of its shard, and only when nothing moves any more is everything
        # ended.
        context.mode.on_out_of_time(context)


# ---------------------------------------------------------------- what workers say


def done(context: Context, worker: Worker, message: m.Done) -> None:
    """Handles a worker's report that its loop is over."""
    # An agent repeats Done after a reconnect. Counted twice, it would hand the same last state to storage
    # twice.
    if worker.phase in (WorkerPhase.DONE, WorkerPhase.GONE):
        return
    transitions.enter(context, worker, WorkerPhase.DONE)
    worker.committed, worker.digest = message.committed, message.params_xxh3
    worker.state_digest = message.state_xxh3
    worker.covered, worker.left_out = message.covered, message.left_out
    worker.loss = message.loss if message.loss is not None else worker.loss
    context.state.membership.committed = max(context.state.membership.committed, message.committed)
    if message.held:
        context.request(NoteLast(worker))
    context.record(
        ledger.WorkerDone(worker=worker.name, step=message.committed, params_xxh3=message.params_xxh3)
    )


# ---------------------------------------------------------------- all steps are done


def finishing(context: Context) -> bool:
    """Ends the job when one worker has completed all steps. The others complete the last step themselves or apply the update
    that they prepared, and the state becomes a checkpoint."""
    s = context.state
    ended = context.finished()
    if not ended:
        return False
    # Some are still in the last step. They have everything for it (the vote guarantees that somebody's commit
    # is everybody's), so they finish by themselves; telling them anything now could make one leave the step
    # that the others wait in.
    if context.count_workers(WorkerPhase.MEMBER):
        return True
    last = max(w.committed or 0 for w in ended)
    # A worker that prepared the last step is as good as one that committed it: it applies the update on the
    # way out.
    can = [w for w in context.workers_in(WorkerPhase.PARKED) if _comes_to(w, last)]
    # Every shard must be held by somebody: a finished worker, a parked one that can come there, or a node's
    # memory. If one is missing, finishing would leave a last state with a hole, and the job would end as
    # "finished" with nothing that can be loaded.
    there = {w.shard_index for w in (*ended, *can)} | storage.kept_shards(context, last)
    if there != set(range(s.membership.shard_count)) and (
        s.storage.durable is None or s.storage.durable.step < last
    ):
        # So the steps since the newest complete snapshot are done again. That costs minutes; the alternative
        # costs the result.
        _undone(context, ended)
        return False
    for worker in context.workers_in(WorkerPhase.PARKED):
        if worker.name in s.membership.stops:
            continue
        if worker in can:
            stop = _last_stop(context, worker, last)
            _stop(context, worker, stop)
            # A fresh deadline for each worker that is told to leave: saving a large state takes longer than
            # leaving a step, and `end_stuck` measures from here.
            s.membership.broke_at_s = s.membership.told_to_leave_s = context.now
            saves = stop.keep or stop.save_to
            within_s = context.timing.start_s if saves else context.timing.stall_s(context.median_s())
            s.deadlines.set(Timer.LEAVE, max(s.deadlines.at(Timer.LEAVE) or 0.0, context.now + within_s))
        else:
            # It is behind the last step and cannot come there. Nobody trains any more, so there is no donor
            # for it either; and it is no failure, so the restart budget is not charged.
            processes.end_worker(context, worker, counts=False)
    if context.count_workers(WorkerPhase.PARKED):
        return True
    s.deadlines.clear(Timer.LEAVE)
    # Spares go only now. Until the last state was safe, one of them could still have been needed to do steps
    # again.
    for worker in context.workers_in(WorkerPhase.STARTING, WorkerPhase.ATTACHED, WorkerPhase.READY):
        processes.end_worker(context, worker, counts=False)
    # StoreLast begins what is still to be stored and says whether anything is awaited. Asked before the phase
    # is read: its answer is what keeps the job alive until the manifest is written.
    if not context.request(StoreLast()) and not context.count_workers(WorkerPhase.DONE):
        s.membership.outcome = "failed" if s.membership.outcome == "failed" else "finished"
        end(context)
    return True


def _comes_to(worker: Worker, last: int) -> bool:
    """Whether a worker holds the state of this step, or can make the update that leads to it."""
    if worker.committed is None:
        return False
    return worker.committed == last or (worker.committed == last - 1 and worker.prepared)


def _last_stop(context: Context, worker: Worker, last: int) -> m.Stop:
    """A worker that has all steps, or is about to, leaves; when nobody else keeps what it holds it does."""
    s = context.state
    at_work = [w for w in context.workers_in(WorkerPhase.PARKED) if w.name in s.membership.stops]
    savers = {
        w.shard_index
        for w in at_work
        if s.membership.stops[w.name].save_to or s.membership.stops[w.name].keep
    }
    # One holder of each shard saves it, not all: they hold the same bytes. A shard counts as kept while its
    # copy is on the way; if that fails, `awaited_shards` lacks it, and the next worker of the replica group is
    # asked.
    kept = worker.shard_index in savers | storage.kept_shards(context, last) | storage.awaited_shards(context)
    kept = kept or (s.storage.durable is not None and s.storage.durable.step >= last)
    tier = context.spec.saving.tiers[0] if context.spec.saving.tiers and not kept else None
    apply = worker.committed != last
    return m.Stop(apply, None, tier is not None) if s.membership.shard_count > 1 else m.Stop(apply, tier)


def _undone(context: Context, ended: list[Worker]) -> None:
    """Some have all steps, but of a shard nobody is left who has: all go on from the newest complete snapshot."""
    cause = causes.LastStateIncomplete()
    context.record(
        ledger.WorkerEnded(workers=[w.name for w in ended], cause=str(cause), cause_kind=cause.kind)
    )
    for worker in ended:
        # Their steps never happened. Without this the next look would find somebody with all steps and come
        # here again.
        worker.digest = None
        if worker.phase is not WorkerPhase.GONE:
            processes.end_worker(context, worker, counts=False)
    context.request(ForgetLast())


# ---------------------------------------------------------------- before all steps are done


def begin(context: Context) -> None:
    """Saves the newest state when all members have left their generation; then all workers leave."""
    s = context.state
    transitions.enter_job(context, JobPhase.STOPPING)
    wall_time.stops(s, context.now)
    # Nothing is waited for or formed any more; a deadline left behind would fire in a job that is stopping,
    # and fail it.
    s.deadlines.clear(Timer.WAIT, Timer.FORM)
    s.deadlines.set(
        Timer.STOP, context.now + context.timing.start_s
    )  # a large state takes time to reach the disk
    for worker in context.workers_in(WorkerPhase.STARTING, WorkerPhase.ATTACHED, WorkerPhase.READY):
        processes.end_worker(context, worker, counts=False)
    advance(context)


def advance(context: Context) -> None:
    """Holders of the newest state save it; the others keep theirs until that is done."""
    membership = context.state.membership
    waiting = [w for w in context.workers_in(WorkerPhase.PARKED) if w.name not in membership.stops]
    # One save at a time. While a holder writes, the others keep their state: if it dies, one of them takes
    # over.
    if waiting and not _saving(context):
        if membership.shard_count > 1:
            _keep(context, waiting)
        else:
            _save(context, waiting)
    if not context.index.alive_workers and not context.request(StoreLast()):
        end(context)


def _save(context: Context, waiting: list[Worker]) -> None:
    """One writes it to a durable tier."""
    s = context.state
    # The same vote as for a new generation. A stop must not lose a step that a fault would not have lost.
    resolution = policy.resolve({w.name: policy.Report(w.committed, w.prepared) for w in waiting})
    s.membership.committed = max(s.membership.committed, resolution.start or 0)
    tier = context.spec.saving.tiers[0] if context.spec.saving.tiers else None
    todo = (
        tier and resolution.start and (s.storage.durable is None or s.storage.durable.step < resolution.start)
    )
    holders = [w for w in waiting if w.name in resolution.holders]
    for worker in waiting:
        if worker.name not in resolution.holders:
            processes.end_worker(context, worker, counts=False)
    for worker in holders[:1] if todo else holders:
        apply = worker.name in resolution.apply
        _stop(context, worker, m.Stop(apply=apply, save_to=tier if todo else None))


def _keep(context: Context, waiting: list[Worker]) -> None:
    """Of every shard some leave it in their nodes' memory, from where the agents bring it to the durable tiers; where
    that fails others do. Of a state that is not complete nothing is kept: the newest complete snapshot is brought there."""
    s = context.state
    # Fixed at the first look. Later, workers that have left are gone from the vote, and a smaller vote could
    # settle on an earlier step than the one that others have saved already.
    if s.membership.last_step is None:
        s.membership.last_step = _settled(context, waiting)
    last = s.membership.last_step
    for worker in waiting:
        if not _comes_to(worker, last):
            processes.end_worker(context, worker, counts=False)
    waiting = [w for w in waiting if _comes_to(w, last)]
    kept = storage.kept_shards(context, last)
    missing = [p for p in range(s.membership.shard_count) if p not in kept]
    todo = context.spec.saving.tiers and last and (s.storage.durable is None or s.storage.durable.step < last)
    able = {w.shard_index for w in waiting if s.membership.nodes[w.node].memory.port}
    if todo and missing and able.issuperset(missing):
        # At first those that took the snapshots: their nodes have a slot for the copy. If that failed, anyone
        # who holds the shard.
        first = not s.membership.stops
        holders: dict[int, list[Worker]] = {}
        for worker in waiting:
            holders.setdefault(worker.shard_index, []).append(worker)
        for worker in [w for p in missing for w in _keepers(context, holders.get(p, []), first)]:
            _stop(context, worker, m.Stop(worker.committed != last, keep=True))
    else:
        for worker in waiting:
            _stop(context, worker, m.Stop(worker.committed != last))


def _settled(context: Context, waiting: list[Worker]) -> int:
    """The step at which the job stops; 0: no state is complete."""
    membership = context.state.membership
    resolution = policy.resolve({w.name: policy.Report(w.committed, w.prepared) for w in waiting})
    if {w.shard_index for w in waiting if w.name in resolution.holders} != set(range(membership.shard_count)):
        return 0
    membership.committed = max(membership.committed, resolution.start or 0)
    return resolution.start or 0


def _keepers(context: Context, group: list[Worker], first: bool) -> list[Worker]:
    """Who keeps a shard: those that took the snapshots, else one."""
    group = [w for w in group if context.state.membership.nodes[w.node].memory.port]
    saved = [w for w in group if context.state.membership.assignments[w.name].saves]
    return saved if first and saved else group[:1]


def _saving(context: Context) -> bool:
    membership = context.state.membership
    at_work = [w for w in context.workers_in(WorkerPhase.PARKED) if w.name in membership.stops]
    return any(membership.stops[w.name].save_to or membership.stops[w.name].keep for w in at_work) or bool(
        storage.awaited_shards(context)
    )


def _stop(context: Context, worker: Worker, stop: m.Stop) -> None:
    context.state.membership.stops[worker.name] = stop
    context.tell(worker, stop)


def end_when_saved(context: Context) -> None:
    """At level 0 and 1: when no worker is left, the newest state that they gave goes from their agents' memory into every
    durable tier; then the job is over."""
    if not context.index.alive_workers and not context.request(StoreLast()):
        end(context)


def end(context: Context) -> None:
    """Nothing is left to do. A state that no durable tier has stays in the nodes' memory, as if all had been killed: where
    nodes are somebody else's after the job it cannot, and that is said."""
    s = context.state
    # First, so that nothing that the requests below bring about starts anything again.
    transitions.enter_job(context, JobPhase.ENDED)
    s.membership.outcome = s.membership.outcome or "finished"
    context.request(ReportUnsaved())
    # Asked after ReportUnsaved: what a tier did not take is known then, and a state that is nowhere else must
    # outlive the job in memory.
    step = storage.only_in_memory(context)
    ours = s.health.engine.keeps_nodes
    s.membership.keeps_memory = ours and (step is not None or storage.may_be_in_memory(context))
    if step is not None:
        context.record(
            ledger.OnlyInMemory(
                step=step, kept=ours, saved=s.storage.durable.step if s.storage.durable else None
            )
        )
    s.membership.unsaved = storage.unsaved(context)
    # What is in memory has been said. This one is nowhere.
    if s.membership.unsaved is not None and s.membership.unsaved != step:
        context.record(
            ledger.LastNotSaved(
                step=s.membership.unsaved, saved=s.storage.durable.step if s.storage.durable else None
            )
        )
    context.record(
        ledger.Ended(
            outcome=s.membership.outcome,
            reason=s.membership.stop_reason,
            step=s.step,
            cause=s.membership.stop_cause,
        )
    )
    for node in context.alive_nodes():
        context.send(node.name, m.Shutdown(s.membership.outcome, s.membership.keeps_memory))
    # Last of all actions: the service stops when it has carried this out, and everything queued before it has
    # been sent by then.
    context.act(End(s.membership.outcome))
