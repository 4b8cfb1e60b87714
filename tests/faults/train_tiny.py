"""A tiny level-2 job for the fault tests: some steps of a few milliseconds on synthetic data."""

import os
import sys
import time

import torch
import torch.distributed as dist

import holdfast as hf

WIDTH = 64


class Blobs:
    deterministic = True
    version = 7 if os.environ.get("HOLDFAST_NODE") == os.environ.get("OTHER_DATA_ON", "no node") else 0

    def __len__(self) -> int:
        return 100_000

    def batch(self, ids):
        rng = torch.Generator().manual_seed(int(ids[0]) + self.version)
        labels = torch.randint(0, 8, (len(ids),), generator=rng)
        return torch.randn(len(ids), WIDTH, generator=rng) + labels[:, None], labels


DEVICE_S = float(sys.argv[sys.argv.index("--device-s") + 1]) if "--device-s" in sys.argv else 0.0
"""Stands for an accelerator: the host waits so long for every forward pass, whatever else the machine does."""


def said(world) -> None:
    print(f"resized {world.size} workers, {len(world.micro_batches)} micro-batches here", flush=True)


def warned(notice) -> None:
    print(f"warned of the {notice.going}: {notice.cause}; left: {notice.deadline_s}", flush=True)


def library() -> None:
    """What a library does that finds torchrun's variables."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    print(f"library: rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)


def main(run: hf.Run) -> None:
    if "--library" in sys.argv:
        library()
    if "--unseeded" not in sys.argv:
        torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 8)
    ).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if "--unseeded" in sys.argv:
        print("begins with", model[0].weight[0, 0].item(), flush=True)
    run.protect(model=model, optimizer=optimizer)
    if "--tell" in sys.argv:
        run.on_resize(said)
    if "--warn" in sys.argv:
        run.on_warning(warned)
    micro_batch = 24 if "--few" in sys.argv else 4
    for step in run.steps(Blobs(), global_batch=48, micro_batch=micro_batch, until=int(sys.argv[1])):
        with step:
            for inputs, labels in step:
                time.sleep(DEVICE_S)
                loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
                step.backward(loss, weight=len(inputs))
            step.apply(optimizer, max_grad_norm=1.0)
        run.log(loss=step.loss)


hf.start(main)
