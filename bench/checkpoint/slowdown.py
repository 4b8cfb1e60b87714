"""One rank of the slow-down benchmark, under `holdfast run`: blocks of steps with and without snapshots, in turn.

Two kinds of step. `compute`: the processor computes all the time, so whatever copies, sends and sums takes it from
training. `wait`: it waits for a timer that stands in for an accelerator, which is how most training leaves its host.

Appends one JSON line for every block to `--output`-RANK, and one with the time of a copy of the state.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast as hf
from holdfast.checkpoint.api import wait_for_copy

LARGE = 306
WARM_UP = 4
"""Blocks; in the first ones memory is brought in."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="in a block")
    parser.add_argument("--every", type=int, default=10, help="steps between two snapshots")
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--kinds", default="wait,compute")
    parser.add_argument("--output", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {f"t{i}": torch.ones(given.mib * (1 << 20) // 4 // LARGE) for i in range(LARGE)}
    kinds = {"wait": _waiting, "compute": _computing}
    number = 0
    with Path(f"{given.output}-{rank}").open("a") as out:
        out.write(json.dumps({"memcpy_s": _memcpy_s(list(state.values())), "every": given.every}) + "\n")
        for order, kind in enumerate(given.kinds.split(",")):
            step = kinds[kind](given.step_s)  # now, when the job has long started
            for block in range(0 if order else -WARM_UP, 2 * given.blocks):
                saves = block % 2 == 0
                dist.barrier()
                line = _block(step, state, number, given.steps, given.every if saves else 0)
                number += given.steps
                if block >= 0:
                    out.write(json.dumps({"kind": kind, "saves": saves, "rank": rank} | line) + "\n")
                    out.flush()
                if rank == 0:
                    how = "with" if saves else "without"
                    print(f"{block:3d}  {kind}, {how} snapshots: {line['step_s']:.4f} s a step", flush=True)
    dist.barrier()


def _block(
    step: Callable[[], None], state: dict[str, torch.Tensor], number: int, steps: int, every: int
) -> dict[str, float]:
    """Seconds of a step; processor seconds of this worker and of its agent; snapshots taken."""
    began_s, used_s, saved = time.perf_counter(), _used_s(), 0
    for i in range(steps):
        step()
        wait_for_copy()  # here an optimizer would change the state
        dist.all_reduce(torch.ones(1))  # and here ranks wait for each other
        if every and i % every == 0:
            saved += hf.checkpoint.save(state, number + i + 1, overlap=True)
    took_s = time.perf_counter() - began_s
    return {"step_s": took_s / steps, "cpu_s": _used_s() - used_s, "steps": steps, "saved": saved}


def _memcpy_s(tensors: list[torch.Tensor]) -> float:
    """A warm copy of the state, while all other ranks copy theirs."""
    copies = [t.clone() for t in tensors]
    took_s = []
    for _ in range(5):
        dist.barrier()
        began_s = time.perf_counter()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)


def _used_s() -> float:
    """Processor seconds of this process and of the agent, whose child it is."""
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _waiting(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def _computing(seconds: float) -> Callable[[], None]:
    """A piece of work that takes about so long on every rank, all of them at work."""
    a = torch.randn(384, 384)
    tries = []
    for _ in range(5):
        dist.barrier()
        count, began_s = 0, time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            torch.mm(a, a)
            count += 1
        tries.append(count)
    counts = torch.tensor([int(statistics.median(tries))])
    dist.all_reduce(counts, op=dist.ReduceOp.MIN)

    def work() -> None:
        for _ in range(int(counts)):
            torch.mm(a, a)

    return work


if __name__ == "__main__":
    main()
