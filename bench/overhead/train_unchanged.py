"""The job of `bench.overhead.unchanged`: a worker that takes the time spent in `holdfast.train.state_guard` out of each of its steps.

Runs under `holdfast run`. It is the processor's time of the thread that trains, which does not grow when others use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast as hf
from bench.recovery import model as whole
from bench.recovery import sharded
from holdfast.train.state_guard import FIRST_LOOKS, StateGuard

WARM_UP = 5
"""Steps before those that are measured."""
METHODS = ("note", "after_step", "before_update", "release")
"""Of the guard: all that a step calls."""


class Stopwatch:
    """Adds up what calls take."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_s += time.thread_time() - began

        return timed


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(whole.WIDTHS), required=True)
    parser.add_argument("--reduction", choices=("fast", "exact"), required=True)
    parser.add_argument("--shards", type=int, required=True, help="workers of a replica")
    parser.add_argument("--workers", type=int, required=True, help="of the job")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", required=True, help="each worker appends its line to this file")
    return parser.parse_args()


def main(run: hf.Run) -> None:
    chosen = options()
    whole.prepare_process()
    watch = Stopwatch()
    for name in METHODS:
        setattr(StateGuard, name, watch.timed(getattr(StateGuard, name)))
    also: Any = ()
    if chosen.shards > 1:
        mesh = run.mesh(shard=chosen.shards)["shard"]
        network: torch.nn.Module = sharded.build(chosen.model)
        sharded.shard(network, mesh)
        sharded.materialize(network, mesh.get_local_rank())
        run.replicate(network)
        optimizer = sharded.build_optimizer(network)
        state = {"model": network, "optimizer": optimizer}
    else:
        network = whole.build(chosen.model).to(run.device)
        optimizer = whole.build_optimizer(network.parameters())
        average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.999)).requires_grad_(False)
        state = {"model": network, "optimizer": optimizer, "average": average}
        also = partial(average.update_parameters, network)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    run.protect(**state, scheduler=scheduler)
    steps_s: list[float] = []
    looks_s: list[float] = []
    last = time.thread_time()
    steps = run.steps(
        whole.Samples(),
        global_batch=whole.BATCH * chosen.workers,
        micro_batch=whole.BATCH,
        until=chosen.steps,
        reduction=chosen.reduction,
    )
    for step in steps:
        now = time.thread_time()
        steps_s.append(now - last)
        looks_s.append(watch.spent_s)
        last, watch.spent_s = now, 0.0
        with step:
            for inputs, labels in step:
                loss = cross_entropy(network(inputs), labels, reduction="sum")
                step.backward(loss, weight=len(labels))
            step.apply(optimizer, scheduler=scheduler, also=also)
    # Content is read whole in a job's first steps, whatever that costs: what a step costs is seen after them.
    first = max(WARM_UP, FIRST_LOOKS) + 1
    line = json.dumps({"rank": run.rank, "steps_s": steps_s[first:], "looks_s": looks_s[first:]})
    output = os.open(chosen.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(output, (line + "\n").encode())


if __name__ == "__main__":
    hf.start(main)
