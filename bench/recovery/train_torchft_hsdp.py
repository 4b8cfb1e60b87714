"""One worker of a sharded torchft replica group: FSDP2 inside the group, torchft's all-reduce across groups.

As torchft's `fsdp_test.py` and its FSDP2 example do it (its ManagedDeviceMesh is gone): FSDP2's all-reduce hook over a
ManagedProcessGroup. torchrun starts the workers of a group and hosts their store.
"""

from __future__ import annotations

import argparse
import logging
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing import CheckpointTransport
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ManagedProcessGroup

from bench.recovery import model as job
from bench.recovery import sharded
from bench.recovery.events import NOT_PARTICIPATING, CommitLog, StateLog
from bench.recovery.gate import Gate
from bench.recovery.settings import Settings

MANAGER_TIMEOUT = timedelta(seconds=30)
"""As in torchft's examples."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--gloo-timeout-s", type=float, default=5.0, help="that of torchft's example")
    parser.add_argument("--transport", choices=("http", "pg"), default="http", help="http: torchft's default")
    return parser.parse_args()


def main() -> None:
    settings, chosen = Settings.from_environment(), options()
    logging.basicConfig(level=logging.WARNING)
    job.prepare_process()
    dist.init_process_group("gloo")
    shard_rank = dist.get_rank()
    rank = chosen.group * settings.shards + shard_rank
    network = sharded.build(settings.size)
    # The dimension of size 1 is for a mixture, whose experts FSDP2 has over it.
    mesh = init_device_mesh("cpu", (1, settings.shards), mesh_dim_names=("replicate", "shard"))
    sharded.shard(network, mesh if settings.size == "moe" else mesh["shard"])
    sharded.materialize(network, shard_rank)
    inner = sharded.build_optimizer(network)
    state = sharded.local_state(sharded.state(network, inner))
    states = StateLog(settings.states)
    states.holds(sharded.nbytes(state))

    def load_state_dict(received: dict[str, torch.Tensor]) -> None:
        sharded.put(state, received)
        states.fetched(sharded.nbytes(received))

    group = ProcessGroupGloo(timeout=timedelta(seconds=chosen.gloo_timeout_s))
    transport: CheckpointTransport = (
        HTTPTransport(timeout=MANAGER_TIMEOUT, num_chunks=0)
        if chosen.transport == "http"
        else PGTransport(group, timeout=MANAGER_TIMEOUT, device=torch.device("cpu"))
    )
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: state,
        replica_id=f"bench_{chosen.group}",
        timeout=MANAGER_TIMEOUT,
        checkpoint_transport=transport,
        hostname="127.0.0.1",
    )
    replicate = ManagedProcessGroup(manager)

    def reduce_across(output: torch.Tensor) -> None:
        dist.all_reduce(output, group=replicate, op=dist.ReduceOp.AVG)

    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(reduce_across)
    optimizer = Optimizer(manager, inner)
    samples = job.Samples()
    gate, log = Gate(settings.gate), CommitLog(settings.events)

    while True:
        step = manager.current_step()
        held_s = gate.wait(step, rank)
        inputs, labels = samples.batch(job.share(step, rank, settings.workers, sharded.BATCH))
        optimizer.zero_grad()
        cross_entropy(network(inputs), labels).backward()
        optimizer.step()
        if manager.current_step() > step:
            log.commit(
                rank=rank if manager.is_participating() else NOT_PARTICIPATING,
                step=manager.current_step() - 1,
                world=manager.num_participants() * settings.shards,
                gen=manager._quorum_id,
                held_s=held_s,
            )


if __name__ == "__main__":
    main()
