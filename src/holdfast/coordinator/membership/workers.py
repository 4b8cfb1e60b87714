"""What workers report while all is well: that they attached, that they are ready, what they committed, and what their script
logs."""

from __future__ import annotations

import msgspec

from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import CompareSteps, Context
from holdfast.coordinator.kernel.state import CoreState, Timer, Worker, WorkerPhase
from holdfast.coordinator.membership import failures, replicas, resize, wall_time
from holdfast.protocol import ledger
from holdfast.protocol import messages as m

# ---------------------------------------------------------------- script metrics
# What scripts log with `run.log`: the newest value of each name in the state, every value in the ledger.
#
# They are rank 0's: a value is the same on all replicas, or each rank has another one and nobody could say which is meant.


def heard(state: CoreState, told: m.Progress) -> None:
    """Records values that a worker's script logged. Names beyond the limits of `run.log` are ignored: nothing here may grow
    without bound."""
    current = (
        state.membership.generation is not None and told.generation == state.membership.generation.number
    )
    for step, values in told.figures:
        for name, value in values.items():
            known = state.membership.figures.get(name)
            if known is None and (
                len(state.membership.figures) >= m.MOST_FIGURES or len(name) > m.FIGURE_NAME
            ):
                continue
            # A job that went back to a snapshot logs steps again; a word of the generation before may come late.
            if known is None or current or step >= known[0]:
                state.membership.figures[name] = step, value


def rows(state: CoreState, told: m.Progress) -> list[tuple[str, int, float]]:
    """For the ledger: (name, step, value) of each figure that was taken."""
    return [
        (n, step, v)
        for step, values in told.figures
        for n, v in values.items()
        if n in state.membership.figures
    ]


def started(context: Context, worker: Worker, pid: int, log: str) -> None:
    """Notes that the worker's process runs."""
    worker.log = log
    context.record(ledger.WorkerStarted(worker=worker.name, node=worker.node, pid=pid, log=log))


def joined(context: Context, worker: Worker, message: m.Joined) -> None:
    """Notes that a member is connected, and restored if it had to be."""
    membership = context.state.membership
    worker.joined_generation = message.generation
    # Late news of an earlier generation must not close the incident of this one, or its report would show times that
    # belong to no restore.
    if membership.generation and message.generation == membership.generation.number:
        failures.moved(context, worker)
        incidents.on_joined(context.state, context.now, message)
        resize.connected(context, message)
        wall_time.joined(context.state, message)


def restoring(context: Context, worker: Worker, message: m.Restoring) -> None:
    """How far a member is with fetching the state."""
    if worker.phase is WorkerPhase.MEMBER and message.generation == context.state.membership.number:
        worker.restored = message.nbytes, message.total_bytes


def off_step(context: Context, worker: Worker, on: bool, age_s: float) -> None:
    """Notes that a worker begins or ends work of its script between two steps. age_s: seconds since then."""
    worker.aside = on
    wall_time.aside(context.state, worker, context.now - age_s, on)


def attached(context: Context, worker: Worker) -> None:
    """The script called `holdfast.start`: the job is at level 2 from now on."""
    context.mode.on_attached(context)
    if worker.phase is WorkerPhase.STARTING:
        transitions.enter(context, worker, WorkerPhase.ATTACHED)


def ready(context: Context, worker: Worker, ready: m.Ready) -> None:
    """Notes that a worker can become a member."""
    if worker.phase not in (WorkerPhase.STARTING, WorkerPhase.ATTACHED, WorkerPhase.MEMBER):
        return
    attached(context, worker)
    if worker.phase is not WorkerPhase.ATTACHED:
        return
    if worker.rebuilds not in (None, ready.shard_index) or not replicas.fits(context, worker, ready):
        return
    worker.rebuilds = None
    transitions.enter(context, worker, WorkerPhase.READY)
    worker.ready, worker.ready_at_s = ready, context.now
    _count_micro_batches(context, ready.micro_batches)
    context.state.membership.until = ready.until or context.state.membership.until
    context.state.membership.samples = ready.samples or context.state.membership.samples
    context.record(ledger.WorkerReady(worker=worker.name, node=worker.node))
    incidents.replaced(context.state, context.now)
    failures.started_well(context, worker)


def _count_micro_batches(context: Context, micro_batches: int) -> None:
    s = context.state
    if not micro_batches or micro_batches == s.membership.micro_batches:
        return
    wanted = s.target
    s.membership.micro_batches = micro_batches
    if s.target < wanted:
        context.record(ledger.FewMicroBatches(micro_batches=micro_batches, workers=s.target, wanted=wanted))


def counted(state: CoreState, name: str, message: m.Progress | m.Parked) -> m.Progress | m.Parked:
    """The part of a worker's report about its steps that counts for the job. name: the worker's."""
    if state.membership.level != 2:
        return message
    worker = state.membership.workers.get(name)
    # One that this coordinator does not know was another one's: every member is written down before it hears that it is one.
    until = 0 if worker is None else worker.counts_until
    if until is None:
        return message
    losses = tuple(told for told in message.losses if told.step < until)
    if isinstance(message, m.Parked):
        return msgspec.structs.replace(message, losses=losses)
    figures = tuple((step, values) for step, values in message.figures if step < until)
    return msgspec.structs.replace(message, losses=losses, figures=figures)


def progress(context: Context, worker: Worker, message: m.Progress, age_s: float) -> None:
    """Handles a worker's report of committed steps. age_s: seconds that the message was on its way."""
    s = context.state
    worker.median_s = message.median_s if message.median_s is not None else worker.median_s
    if message.losses and message.losses[-1][0] + 1 >= s.membership.committed:
        worker.loss = message.losses[-1][1]
    if message.figures:
        heard(s, message)
    current = s.membership.generation
    if current is None or message.generation != current.number:
        return
    if worker.phase is WorkerPhase.MEMBER:  # one that has parked since said more than this late word
        if worker.committed is None or message.committed > worker.committed:
            failures.moved(context, worker)
        worker.committed = message.committed
        if message.spent or message.losses:  # most reports of a large job bring neither
            context.request(CompareSteps(worker, message))
    s.membership.committed = max(s.membership.committed, message.committed)
    if message.committed <= s.membership.generation_committed:
        wall_time.scripted(s, message.script_s)
        return
    s.membership.generation_committed = message.committed
    s.membership.stall_rounds = s.membership.fruitless = 0
    s.deadlines.clear(Timer.SPARE_AFTER)
    wall_time.stepped(s, context.now - age_s, message.script_s)
    for record in incidents.committed(s, context.now - age_s):
        context.act(record)
    resize.committed(context, context.now - age_s)
