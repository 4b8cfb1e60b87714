"""One rank of the slow-down benchmark, under `holdfast run`: blocks of steps with and without snapshots, in turn.

Prints nothing; appends one JSON line for every block to `--output`-RANK.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast as hf
from holdfast.checkpoint.api import wait_for_copy

LARGE = 306


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20, help="in a block")
    parser.add_argument("--every", type=int, default=10, help="steps between two snapshots")
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--output", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {f"t{i}": torch.ones(given.mib * (1 << 20) // 4 // LARGE) for i in range(LARGE)}
    a = torch.randn(384, 384)
    count, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < given.step_s:
        torch.mm(a, a)
        count += 1
    counts = torch.tensor([count])
    dist.all_reduce(counts, op=dist.ReduceOp.MIN)
    number = 0
    with Path(f"{given.output}-{rank}").open("a") as out:
        for block in range(-2, 2 * given.blocks):
            saves = block % 2 == 0
            dist.barrier()
            began_s, saved = time.perf_counter(), 0
            for step in range(given.steps):
                for _ in range(int(counts)):
                    torch.mm(a, a)
                wait_for_copy()  # here an optimizer would change the state
                dist.all_reduce(torch.ones(1))  # and here ranks wait for each other
                number += 1
                if saves and step % given.every == 0:
                    saved += hf.checkpoint.save(state, number, overlap=True)
            took_s = time.perf_counter() - began_s
            if block >= 0:
                line = {"saves": saves, "rank": rank, "step_s": took_s / given.steps, "saved": saved}
                out.write(json.dumps(line) + "\n")
                out.flush()
            if rank == 0:
                print(
                    f"{block:3d}  {'with' if saves else 'without'} snapshots: {took_s / given.steps:.4f} s a step",
                    flush=True,
                )
    dist.barrier()


if __name__ == "__main__":
    main()
