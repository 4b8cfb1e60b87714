"""Workers that report: the script called `hf.start`, and one that can be a member."""

from __future__ import annotations

from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.state import Worker, WorkerPhase
from holdfast.coordinator.membership import failures, gang, shard_policy
from holdfast.protocol import messages as m


def attached(core: Context, worker: Worker) -> None:
    """The script called `hf.start`: the job is at level 2, and `gang` has no more part in it."""
    if core.state.level != 2:
        gang.give_over(core)
        core.record("level", level=2)
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
    core.record("worker-ready", worker=worker.name, node=worker.node)
    incidents.replaced(core.state, core.now)
    failures.started_well(core, worker)
