"""A DistributedDataParallel script as people write them: checkpoint now and then, resume from it at start.

Nothing in it knows who launched it. Plain DDP, torchrun, ft_launcher and Holdfast level 0 all run this file.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from bench.recovery import model as job
from bench.recovery.events import CommitLog
from bench.recovery.gate import Gate
from bench.recovery.settings import Settings


def main() -> None:
    settings = Settings.from_environment()
    job.prepare_process()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    network, ballast = job.build(), job.Ballast(settings.state_mb)
    optimizer = job.build_optimizer(network.parameters())
    checkpoint = job.Checkpoint(settings.checkpoint, network, optimizer, ballast)
    step = checkpoint.load()
    model = torch.nn.parallel.DistributedDataParallel(network)
    samples = job.Samples()
    gate, log = Gate(settings.gate), CommitLog(settings.events)
    # A restart is a new membership; so is the next job.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    while True:
        held_s = gate.wait(step, rank)
        inputs, labels = samples.batch(job.share(step, rank, world))
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        log.commit(rank=rank, step=step, world=world, gen=attempt, held_s=held_s)
        step += 1
        if rank == 0 and settings.checkpoint_every and step % settings.checkpoint_every == 0:
            checkpoint.save(step)


if __name__ == "__main__":
    main()
