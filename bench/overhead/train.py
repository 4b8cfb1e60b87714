"""Plain DDP and Holdfast in the same processes, in alternating blocks of steps.

Runs under `holdfast run`. For the plain blocks it makes a default process group of its own and a twin of the model.
A machine that others use too slows both alike, so the paired difference keeps its meaning.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import holdfast as hf
from bench.overhead.analyse import PLAIN_AFTER, PLAIN_BEFORE, PROTECTED, Block
from bench.recovery import model as job

WARM_UP = 5


class Stopwatch:
    """Wall and CPU time of consecutive steps."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.wall_s.append(wall - self._wall)
        self.cpu_s.append(cpu - self._cpu)
        self._wall, self._cpu = wall, cpu

    def block(self, kind: str, number: int, rank: int) -> Block:
        return Block(kind=kind, round=number, rank=rank, wall_s=self.wall_s, cpu_s=self.cpu_s)


class Plain:
    """The twin: the same model, optimizer and batches under DistributedDataParallel."""

    def __init__(self, size: str, port: int, rank: int, world: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        self._model = torch.nn.parallel.DistributedDataParallel(job.build(size))
        self._optimizer = job.build_optimizer(self._model.parameters())
        self._samples = job.Samples()
        self._rank, self._world = rank, world
        self._step = 0

    def run(self, steps: int, watch: Stopwatch) -> None:
        """Train a block, a lap for every step. Every rank begins and ends it together."""
        dist.barrier()
        watch.begin()
        for _ in range(steps):
            inputs, labels = self._samples.batch(job.share(self._step, self._rank, self._world))
            self._optimizer.zero_grad()
            cross_entropy(self._model(inputs), labels).backward()
            self._optimizer.step()
            self._step += 1
            watch.lap()
        dist.barrier()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(job.WIDTHS), required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of a block")
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--port", type=int, required=True, help="of the plain group's store")
    parser.add_argument("--output", required=True, help="the blocks are appended to this file")
    return parser.parse_args()


def main(run: hf.Run) -> None:
    chosen = options()
    job.prepare_process()
    network = job.build(chosen.model).to(run.device)
    optimizer = job.build_optimizer(network.parameters())
    run.protect(model=network, optimizer=optimizer)
    output = os.open(chosen.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(block: Block) -> None:
        os.write(output, (json.dumps(asdict(block)) + "\n").encode())

    watch = Stopwatch()
    plain: Plain | None = None
    number = 0
    until = WARM_UP + chosen.rounds * chosen.steps
    steps = run.steps(
        job.Samples(), global_batch=job.BATCH * chosen.world, micro_batch=job.BATCH, until=until
    )
    for step in steps:
        with step:
            for inputs, labels in step:
                loss = cross_entropy(network(inputs), labels, reduction="sum")
                step.backward(loss, weight=len(labels))
            step.apply(optimizer)
        watch.lap()
        done = step.index + 1 - WARM_UP
        if done < 0 or done % chosen.steps:
            continue
        if plain is None:
            plain = Plain(chosen.model, chosen.port, run.rank, run.world_size)
            plain.run(WARM_UP, watch)
        else:
            write(watch.block(PROTECTED, number, run.rank))
            plain.run(chosen.steps, watch)
            write(watch.block(PLAIN_AFTER, number, run.rank))
            number += 1
        if number < chosen.rounds:
            plain.run(chosen.steps, watch)
            write(watch.block(PLAIN_BEFORE, number, run.rank))
            watch.begin()


if __name__ == "__main__":
    hf.start(main)
