"""Starting and ending the processes of workers, and their environment."""

from __future__ import annotations

import msgspec

from holdfast.coordinator.kernel import transitions
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.deadlines import Watched
from holdfast.coordinator.kernel.state import TRAINED_S, Node, Worker, WorkerPhase
from holdfast.coordinator.membership import replicas
from holdfast.protocol import messages as m
from holdfast.protocol.job import CACHE_VARIABLE, REPLAY_VARIABLE
from holdfast.protocol.snapshots import TIERS_VARIABLE


def incarnation_of(worker: str) -> int:
    """The number in the name of a process, as `start_worker` gives it; 0: it has none."""
    number = worker.rpartition("#")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 18 else 0


def start_worker(context: Context, node: Node, slot: int, env: dict[str, str]) -> Worker:
    """Starts a process for one slot of a node."""
    s, spec = context.state, context.spec
    s.membership.incarnations += 1
    worker = Worker(
        name=f"{node.name}.{slot}#{s.membership.incarnations}",
        node=node.name,
        slot=slot,
        started_s=context.now,
        awaited_s=context.now,
    )
    worker.shard_index = replicas.next_shard(context, node, int(env["RANK"]))
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
    """Removes a worker from the job, in whatever state its process is. counts: it is charged to the restart budget."""
    worker.told_to_end = True
    transitions.enter(context, worker, WorkerPhase.GONE)
    if counts:
        count_restart(context, worker)
    context.send(worker.node, m.KillWorker(worker.name))


def count_restart(context: Context, lost: Worker | None = None) -> None:
    """Charges a restart to the budget. lost: the worker that is replaced; None: all workers start again."""
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
    """Asks every worker's process to end. One that is copying its state completes the copy first, within `grace_s` seconds."""
    for worker in context.alive_workers():
        worker.told_to_end = True
        context.send(worker.node, m.KillWorker(worker.name, grace_s))


def environment(context: Context, node: Node, slot: int, rank: int, world: int) -> dict[str, str]:
    """torchrun's environment variables for one worker. At level 2 the rank in them is a guess; `run.rank` is the rank."""
    spec = context.spec
    master = next(iter(context.index.alive_nodes.values()))
    ports = master.ports or (29500,)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(slot),
        "GROUP_RANK": str(context.index.position(node)),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(spec.nproc),
        "GROUP_WORLD_SIZE": str(max(1, world // spec.nproc)),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(ports[context.state.membership.master_uses % len(ports)]),
        "TORCHELASTIC_RESTART_COUNT": str(context.state.membership.restarts_used),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.name,
        "HOLDFAST_JOB": spec.name,
        "HOLDFAST_NODE": node.name,
        "HOLDFAST_TARGET": str(spec.target),
        "HOLDFAST_MINIMUM": str(spec.minimum),
        "HOLDFAST_GENERATION": str(context.state.membership.number),
        **({REPLAY_VARIABLE: str(spec.health.replay_every)} if spec.health.replay else {}),
        "HOLDFAST_SNAPSHOT_EVERY": spec.saving.snapshots.every,
        **({CACHE_VARIABLE: spec.data_cache} if spec.data_cache else {}),
        TIERS_VARIABLE: msgspec.json.encode(spec.saving.tiers).decode(),
    }
