"""An HSDP script as people write them: FSDP2 over a mesh of two dimensions, torch.distributed.checkpoint now and then.

torchrun runs this file. The checkpoint is that of PyTorch's recipe: every rank writes and reads its own shards.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from bench.recovery import model as job
from bench.recovery import sharded
from bench.recovery.events import CommitLog, StateLog
from bench.recovery.gate import Gate
from bench.recovery.settings import Settings


class Checkpoints:
    """A folder for every checkpoint; the last whole one stays until the next is whole."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._newest = self._folder / "newest"

    def load(self, tensors: dict[str, torch.Tensor]) -> int:
        """Bring `tensors` back and return the number of steps they hold; 0 if there is no checkpoint."""
        if not self._newest.exists():
            return 0
        steps = self._newest.read_text(encoding="ascii")
        dcp.load(tensors, checkpoint_id=self._folder / steps)
        return int(steps)

    def save(self, tensors: dict[str, torch.Tensor], steps: int) -> None:
        """Save the state after `steps` steps. Called by all ranks together."""
        dcp.save(tensors, checkpoint_id=self._folder / str(steps))
        if dist.get_rank() == 0:
            old = self._newest.read_text(encoding="ascii") if self._newest.exists() else ""
            scratch = self._folder / "newest.tmp"
            scratch.write_text(str(steps), encoding="ascii")
            scratch.replace(self._newest)
            if old not in ("", str(steps)):
                shutil.rmtree(self._folder / old)


def main() -> None:
    settings = Settings.from_environment()
    job.prepare_process()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (world // settings.shards, settings.shards), mesh_dim_names=("replicate", "shard")
    )
    network = sharded.build(settings.size)
    sharded.shard(network, mesh)
    sharded.materialize(network, mesh.get_local_rank("shard"))
    optimizer = sharded.build_optimizer(network)
    tensors = sharded.state(network, optimizer)
    checkpoints, states = Checkpoints(settings.checkpoint), StateLog(settings.states)
    states.holds(sharded.nbytes(tensors))
    step = checkpoints.load(tensors)
    if step:
        states.fetched(sharded.nbytes(tensors))
    samples = job.Samples()
    gate, log = Gate(settings.gate), CommitLog(settings.events)
    # A restart is a new membership; so is the next job.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    while True:
        held_s = gate.wait(step, rank)
        inputs, labels = samples.batch(job.share(step, rank, world, sharded.BATCH))
        optimizer.zero_grad()
        cross_entropy(network(inputs), labels).backward()
        optimizer.step()
        log.commit(rank=rank, step=step, world=world, gen=attempt, held_s=held_s)
        step += 1
        if settings.checkpoint_every and step % settings.checkpoint_every == 0:
            checkpoints.save(tensors, step)


if __name__ == "__main__":
    main()
