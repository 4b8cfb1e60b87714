"""What workers report while all is well: that they attached, that they are ready, and what they committed."""

from __future__ import annotations

from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.requests import CompareSteps
from holdfast.coordinator.kernel.state import Worker, WorkerPhase
from holdfast.coordinator.membership import failures, resize, script_metrics, shard_policy
from holdfast.protocol import ledger
from holdfast.protocol import messages as m


def attached(core: Context, worker: Worker) -> None:
    """The script called `holdfast.start`: the job is at level 2 from now on."""
    core.mode.on_attached(core)
    if worker.phase is WorkerPhase.STARTING:
        transitions.enter(core, worker, WorkerPhase.ATTACHED)


def ready(core: Context, worker: Worker, ready: m.Ready) -> None:
    """A worker can be a member from now on."""
    if worker.phase not in (WorkerPhase.STARTING, WorkerPhase.ATTACHED, WorkerPhase.MEMBER):
        return
    attached(core, worker)
    if worker.phase is not WorkerPhase.ATTACHED:
        return
    if worker.rebuilds not in (None, ready.position) or not shard_policy.fits(core, worker, ready):
        return
    worker.rebuilds = None
    transitions.enter(core, worker, WorkerPhase.READY)
    worker.ready, worker.ready_at_s = ready, core.now
    core.state.micro_batches = ready.micro_batches or core.state.micro_batches
    core.record(ledger.WorkerReady(worker=worker.name, node=worker.node))
    incidents.replaced(core.state, core.now)
    failures.started_well(core, worker)


def progress(core: Context, worker: Worker, message: m.Progress, age_s: float) -> None:
    """A worker reports what it has committed. age_s: for so long the message was on its way."""
    s = core.state
    worker.median_s = message.median_s if message.median_s is not None else worker.median_s
    if message.losses and message.losses[-1][0] + 1 >= s.committed:
        worker.loss = message.losses[-1][1]
    script_metrics.heard(s, message)
    current = s.generation
    if current is None or message.generation != current.number:
        return
    if worker.phase is WorkerPhase.MEMBER:  # one that has parked since said more than this late word
        worker.committed = message.committed
        core.request(CompareSteps(worker, message))
    s.committed = max(s.committed, message.committed)
    if message.committed <= s.generation_committed:
        return
    s.generation_committed = message.committed
    s.stall_rounds = s.fruitless = 0
    for record in incidents.committed(s, core.now - age_s):
        core.act(record)
    resize.committed(core, core.now - age_s)
