"""The training of `train_alone.py` as people write it for torchrun: DistributedDataParallel, and a checkpoint every 20 steps.

train_torchrun.py FOLDER: on a file system that all nodes have. It leaves a line of each step in FOLDER/steps: when it was done,
its number, and when this process began.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS = 1536, 4
GLOBAL_BATCH, MICRO_BATCH = 12, 2
EVERY = 20


def main() -> None:
    began, folder = time.time(), Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = DistributedDataParallel(whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    saved, first = folder / "checkpoint", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        whole.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    count = GLOBAL_BATCH // MICRO_BATCH // world
    for step in range(first, 1 << 40):
        optimizer.zero_grad()
        for number in range(count):
            drawn = torch.Generator().manual_seed((step * world + rank) * count + number)
            inputs = torch.randn(MICRO_BATCH, WIDTH, generator=drawn)
            with model.no_sync() if number < count - 1 else nullcontext():
                (model(inputs).square().mean() / count).backward()
        optimizer.step()
        if rank == 0:
            with (folder / "steps").open("a") as log:
                log.write(f"{time.time()} {step} {began}\n")
            if step % EVERY == EVERY - 1:
                state = {"model": whole.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, folder / "new")
                (folder / "new").replace(saved)


if __name__ == "__main__":
    main()
