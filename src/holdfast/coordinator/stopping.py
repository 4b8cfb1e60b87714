"""The end of a job: all steps done, asked to stop, or no way to go on. Whatever was committed is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.coordinator import failures, forming, gang, policy, storing
from holdfast.coordinator.events import End
from holdfast.coordinator.state import Blame, JobPhase, Worker, WorkerPhase
from holdfast.protocol import messages as m
from holdfast.protocol.job import Durable

if TYPE_CHECKING:
    from holdfast.coordinator.core import Core

# ---------------------------------------------------------------- why


def give_up(core: Core, reason: str, blame: Blame | None) -> None:
    """The job cannot go on. Survivors keep what they hold, on disk."""
    core.state.blame = core.state.blame or blame
    request(core, reason, "failed")


def request(core: Core, reason: str, outcome: str) -> None:
    """The job ends at the next commit."""
    s = core.state
    if s.stop_reason is not None:
        return
    s.stop_reason, s.outcome = reason, outcome
    s.stop_deadline_s = core.now + max(core.timing.stop_s, 3 * (core.median_s() or 0.0))
    core.record("stop-requested", reason=reason, outcome=outcome)


def out_of_time(core: Core) -> None:
    """The step in flight took too long: it is dropped and what was committed is saved, by another if need be."""
    s = core.state
    if s.level == 2 and s.phase is JobPhase.RUNNING:
        forming.break_generation(core, "stop")
    elif s.level == 2 and s.phase is JobPhase.BREAKING:
        failures.end_stuck(core)
    elif s.level == 2 and any(w.name not in s.stops for w in core.workers_in(WorkerPhase.PARKED)):
        stuck = [w for w in core.workers_in(WorkerPhase.PARKED) if w.name in s.stops]
        failures.condemn(core, stuck, "did not save the state in time")
        s.stop_deadline_s = core.now + core.timing.start_s
    elif s.level != 2 or s.phase is JobPhase.STOPPING:
        gang.end_all(core, grace_s=0.0)
        end(core)


# ---------------------------------------------------------------- what workers say


def saved(core: Core, worker: Worker, message: m.Saved) -> None:
    """A checkpoint is whole in a durable tier, or could not be written there."""
    if message.error is not None:
        storing.totals(core, message.url).failures += 1
        core.record("tier-failed", url=message.url, step=message.step, reason=message.error)
        return
    storing.totals(core, message.url).checkpoints += 1
    storing.there(core, Durable(message.step, message.url))
    core.record("saved", step=message.step, url=message.url, worker=worker.name)


def done(core: Core, worker: Worker, message: m.Done) -> None:
    """A worker left its loop."""
    if worker.phase in (WorkerPhase.DONE, WorkerPhase.GONE):
        return
    worker.phase = WorkerPhase.DONE
    worker.committed, worker.digest = message.committed, message.params_xxh3
    worker.loss = message.loss if message.loss is not None else worker.loss
    core.state.committed = max(core.state.committed, message.committed)
    if message.held and worker.node not in core.state.last_from:
        core.state.last_from.append(worker.node)
    core.record("worker-done", worker=worker.name, step=message.committed, params_xxh3=message.params_xxh3)


# ---------------------------------------------------------------- all steps are done


def finishing(core: Core) -> bool:
    """Someone has all steps: the others come to the same point by themselves or by what they prepared. Then their state
    becomes a checkpoint."""
    s = core.state
    ended = [w for w in s.workers.values() if w.digest is not None]
    if not ended:
        return False
    if core.inside():
        return True
    last = max(w.committed or 0 for w in ended)
    for worker in core.workers_in(WorkerPhase.PARKED):
        behind = last - worker.committed if worker.committed is not None else last
        if worker.name in s.stops:
            continue
        if behind == 0 or (behind == 1 and worker.prepared):
            kept = s.last_from or any(s.stops[w].save_to for w in s.stops)
            kept = kept or (s.durable is not None and s.durable.step >= last)
            tier = core.spec.saving.tiers[0] if core.spec.saving.tiers and not kept else None
            _stop(core, worker, m.Stop(apply=behind == 1, save_to=tier))
            s.broke_at_s = core.now
            within_s = core.timing.start_s if tier else core.timing.stall_s(core.median_s())
            s.break_deadline_s = max(s.break_deadline_s or 0.0, core.now + within_s)
        else:
            failures.end_worker(core, worker, counts=False)
    if core.workers_in(WorkerPhase.PARKED):
        return True
    s.break_deadline_s = None
    for worker in core.workers_in(WorkerPhase.STARTING, WorkerPhase.ATTACHED, WorkerPhase.READY):
        failures.end_worker(core, worker, counts=False)
    if not storing.last_on_its_way(core) and not core.workers_in(WorkerPhase.DONE):
        s.outcome = "failed" if s.outcome == "failed" else "finished"
        end(core)
    return True


# ---------------------------------------------------------------- before all steps are done


def begin(core: Core) -> None:
    """Everyone has left its generation: the newest state is saved, then all leave."""
    s = core.state
    s.phase, s.wait_deadline_s, s.form_deadline_s = JobPhase.STOPPING, None, None
    s.stop_deadline_s = core.now + core.timing.start_s  # a large state takes its time to reach the disk
    for worker in core.workers_in(WorkerPhase.STARTING, WorkerPhase.ATTACHED, WorkerPhase.READY):
        failures.end_worker(core, worker, counts=False)
    advance(core)


def advance(core: Core) -> None:
    """One that holds the newest state saves it; the others keep theirs until that is done."""
    s = core.state
    waiting = [w for w in core.workers_in(WorkerPhase.PARKED) if w.name not in s.stops]
    if waiting and not _saving(core):
        outcome = policy.settle({w.name: policy.Report(w.committed, w.prepared) for w in waiting})
        s.committed = max(s.committed, outcome.start or 0)
        tier = core.spec.saving.tiers[0] if core.spec.saving.tiers else None
        todo = tier and outcome.start and (s.durable is None or s.durable.step < outcome.start)
        holders = [w for w in waiting if w.name in outcome.holders]
        for worker in waiting:
            if worker not in holders:
                failures.end_worker(core, worker, counts=False)
        for worker in holders[:1] if todo else holders:
            apply = worker.name in outcome.apply
            _stop(core, worker, m.Stop(apply=apply, save_to=tier if todo else None))
    if not core.alive_workers():
        end(core)


def _saving(core: Core) -> bool:
    s = core.state
    return any(s.stops[w.name].save_to for w in core.workers_in(WorkerPhase.PARKED) if w.name in s.stops)


def _stop(core: Core, worker: Worker, stop: m.Stop) -> None:
    core.state.stops[worker.name] = stop
    core.tell(worker, stop)


def end(core: Core) -> None:
    """Nothing is left to do."""
    s = core.state
    s.phase = JobPhase.ENDED
    s.outcome = s.outcome or "finished"
    core.record("ended", outcome=s.outcome, reason=s.stop_reason, step=s.committed)
    for node in core.alive_nodes():
        core.send(node.name, m.Shutdown(s.outcome))
    core.act(End(s.outcome))
