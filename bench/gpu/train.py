"""The job of `bench.gpu`: a perceptron, exact sums, replicas of one worker or of several. Every commit leaves a line that
also says in which process and CUDA context it was made, and where a tensor lies that was made before the first step."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import holdfast as hf

CLASSES = 64
SAMPLES = 4096
MICRO_BATCHES, BATCH = 12, 16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", required=True)
    parser.add_argument("--until", type=int, default=1 << 40)
    parser.add_argument("--shard", type=int, default=1)
    parser.add_argument("--width", type=int, default=256)
    return parser.parse_args()


def main(run: hf.Run) -> None:
    chosen = arguments()
    torch.use_deterministic_algorithms(True)
    mark = torch.full((1 << 10,), 42.0, device=run.device)
    model = build(run, chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.protect(model=model, optimizer=optimizer)
    drawn = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, chosen.width, generator=drawn),
        torch.randint(0, CLASSES, (SAMPLES,), generator=drawn),
    )
    log = os.open(chosen.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    steps = run.steps(
        data,
        global_batch=MICRO_BATCHES * BATCH,
        micro_batch=BATCH,
        until=chosen.until,
        reduction="exact",
    )
    for step in steps:
        with step:
            for inputs, labels in step:
                loss = cross_entropy(model(inputs), labels, reduction="sum")
                step.backward(loss, weight=len(labels))
            step.apply(optimizer, max_grad_norm=1.0)
        if step.committed:
            line = {
                "t": time.monotonic(),
                "step": step.index,
                "loss": step.loss.hex(),
                "rank": run.rank,
                "world": run.world_size,
                "gen": run.generation,
                "pid": os.getpid(),
                "context": context(run.device),
                "mark": [mark.data_ptr(), float(mark.sum())],
            }
            os.write(log, json.dumps(line).encode() + b"\n")


def build(run: hf.Run, chosen: argparse.Namespace) -> torch.nn.Module:
    """The same parameters in every process; sharded if asked for."""
    mesh = run.mesh(shard=chosen.shard) if chosen.shard > 1 else None
    torch.manual_seed(0)
    width = chosen.width
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, CLASSES)).to(run.device)
    if mesh is not None:
        for layer in layers:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        run.replicate(model)
    return model


def context(device: torch.device) -> int:
    """The CUDA context of this thread, as the driver names it; 0 without one."""
    if device.type != "cuda":
        return 0
    found = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found))
    return found.value or 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hf.start(main)
