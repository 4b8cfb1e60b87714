"""Worker processes are started and ended here."""

from __future__ import annotations

from holdfast.coordinator.kernel import transitions
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.deadlines import Watched
from holdfast.coordinator.kernel.membership_state import Node, Worker
from holdfast.coordinator.kernel.phases import WorkerPhase
from holdfast.coordinator.kernel.restart_budget import TRAINED_S
from holdfast.coordinator.membership import shard_policy
from holdfast.protocol import messages as m


def incarnation_of(worker: str) -> int:
    """The number in the name of a process, as `start_worker` gives it; 0: it has none."""
    number = worker.rpartition("#")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 18 else 0


def start_worker(context: Context, node: Node, slot: int, env: dict[str, str]) -> Worker:
    """A new process for one slot of a node."""
    s, spec = context.state, context.spec
    s.membership.incarnations += 1
    worker = Worker(
        name=f"{node.name}.{slot}#{s.membership.incarnations}",
        node=node.name,
        slot=slot,
        started_s=context.now,
    )
    worker.shard_index = shard_policy.next_shard(context, node, int(env["RANK"]))
    env = {**env, m.SHARD_INDEX_VARIABLE: str(worker.shard_index)}
    transitions.add_worker(context, worker)
    context.watch.watch(Watched.NOT_READY, worker.name)
    if slot not in node.used:
        node.used.append(slot)
    context.send(
        node.name,
        m.StartWorker(
            worker=worker.name,
            slot=slot,
            script=spec.script,
            args=spec.args,
            module=spec.module,
            cwd=spec.cwd,
            env=env,
        ),
    )
    return worker


def end_worker(context: Context, worker: Worker, counts: bool = True) -> None:
    """Takes a worker out of the job, whatever its process does. counts: it is a restart."""
    worker.told_to_end = True
    transitions.enter(context, worker, WorkerPhase.GONE)
    if counts:
        count_restart(context, worker)
    context.send(worker.node, m.KillWorker(worker.name))


def count_restart(context: Context, lost: Worker | None = None) -> None:
    """Against the budget. lost: the worker that another takes the place of; None: all start again."""
    membership = context.state.membership
    membership.restarts_used += 1
    restarts, counted = membership.in_a_row, membership.counted
    if membership.counts_steps:
        restarts.further(membership.committed)
    elif (
        restarts.at_s is not None
        and context.reached(restarts.at_s + TRAINED_S)
        # It trained, unless it counts its steps and this start had none. One that always begins anew comes no further.
        and (membership.committed or not counted.earlier)
        and not counted.asked
    ):
        restarts.count = 0
    restarts.enter(context.now, membership.number, lost.started_s if lost is not None else None)


def ask_all_to_end(context: Context, grace_s: float) -> None:
    """Asks every worker's process to end, when it has completed the copy of its state that it is at."""
    for worker in context.alive_workers():
        worker.told_to_end = True
        context.send(worker.node, m.KillWorker(worker.name, grace_s))
