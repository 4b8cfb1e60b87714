"""One rank of a sharded job under NVIDIA's in-process wrapper, with NVIDIA's local checkpoints.

The wrapped function builds HSDP anew in every surviving process after a fault, because its process groups are gone, and
all ranks load the newest local checkpoint that is whole: the survivors' memory may be from different steps.

`LocalCheckpointManager` takes any TensorAwareStateDict; the one that NVIDIA ships insists on CUDA, so `OnCpu` is ours.
Checkpoints are not replicated: a SIGKILLed worker leaves its files behind, and the one that takes its rank reads them.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Optional

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from bench.recovery import model as job
from bench.recovery import sharded
from bench.recovery.events import CommitLog, StateLog
from bench.recovery.gate import Gate
from bench.recovery.settings import Settings
from bench.recovery.train_nvrx import TUNED, options


class OnCpu(TensorAwareStateDict):
    """Local tensors by name. They are on the CPU, where NVIDIA's manager wants them, already."""

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        self.named = named

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        return self.named.values()

    @property
    def is_hollow(self) -> bool:
        return False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        return

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        return

    def pop_tensors(self) -> list[torch.Tensor]:
        raise NotImplementedError("only replication takes the tensors out")

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        raise NotImplementedError("only replication puts tensors in")

    def init_tensors(self) -> None:
        raise NotImplementedError("only replication puts tensors in")


def build_mesh(shards: int, timeout: timedelta) -> DeviceMesh:
    """The mesh (replicate, shard) over groups with this time-out: those of `init_device_mesh` always have 30 minutes."""
    ranks = torch.arange(dist.get_world_size()).view(-1, shards)
    replicate, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
    shard, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    return DeviceMesh.from_group([replicate, shard], "cpu", mesh=ranks, mesh_dim_names=("replicate", "shard"))


def main() -> None:
    settings, chosen = Settings.from_environment(), options()
    job.prepare_process()
    initial_rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    samples = job.Samples()
    gate, log, states = Gate(settings.gate), CommitLog(settings.events), StateLog(settings.states)
    store = dist.TCPStore(
        "127.0.0.1", chosen.store_port, processes, initial_rank == 0, multi_tenant=True, use_libuv=True
    )

    # The wrapper finds the parameter that it fills by this annotation, and it must not be a string.
    def train(call: Optional[inprocess.CallWrapper] = None) -> None:  # noqa: UP045
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        timeout = timedelta(seconds=chosen.gloo_timeout_s)
        scope = dist.PrefixStore(str(call.iteration), store)
        dist.init_process_group("gloo", store=scope, rank=rank, world_size=world, timeout=timeout)
        mesh = build_mesh(settings.shards, timeout)
        network = sharded.build(settings.size)
        sharded.shard(network, mesh)
        sharded.materialize(network, mesh.get_local_rank("shard"))
        optimizer = sharded.build_optimizer(network)
        tensors = sharded.local_state(sharded.state(network, optimizer))
        states.holds(sharded.nbytes(tensors))
        checkpoints = LocalCheckpointManager(settings.checkpoint)
        step = max(0, checkpoints.find_latest())
        if step:
            saved, _ = checkpoints.load()
            sharded.put(tensors, saved.named)
            states.fetched(sharded.nbytes(saved.named))
        while True:
            held_s = gate.wait(step, rank)
            inputs, labels = samples.batch(job.share(step, rank, world, sharded.BATCH))
            optimizer.zero_grad()
            cross_entropy(network(inputs), labels).backward()
            optimizer.step()
            log.commit(rank=rank, step=step, world=world, gen=call.iteration, held_s=held_s)
            step += 1
            if step % settings.checkpoint_every == 0:
                checkpoints.save(OnCpu(tensors), step)

    inprocess.Wrapper(
        store_kwargs={"port": chosen.wrapper_port},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(settings.workers),
            inprocess.rank_assignment.ActivateAllRanks(),
            inprocess.rank_assignment.FillGaps(),
        ),
        **(TUNED if chosen.tuned else {}),
    )(train)()


if __name__ == "__main__":
    main()
