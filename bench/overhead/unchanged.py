"""`python -m bench.overhead.unchanged`: what it costs to see that only commits change the protected state.

One process trains the model of the other benchmarks with an average of its weights, on one thread, and the time spent in
`holdfast.train.state_guard` is taken out of every step after the first ones, in which all content is read. It is the
processor's time of that thread, which does not grow when others use the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast as hf
from bench import machine
from bench.recovery import model as job
from bench.recovery.analyse import Spread, spread
from bench.recovery.environments import versions
from holdfast.train.state_guard import FIRST_LOOKS, StateGuard

WARM_UP = 5
WIDTH = 100


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


def measure(size: str, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of them those spent looking."""
    watch = Stopwatch()
    whole: list[float] = []
    looking: list[float] = []
    methods = ("note", "after_step", "before_update", "release")
    plain = {name: getattr(StateGuard, name) for name in methods}

    def main(run: hf.Run) -> None:
        network = job.build(size).to(run.device)
        optimizer = job.build_optimizer(network.parameters())
        average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.999)).requires_grad_(False)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
        run.protect(model=network, optimizer=optimizer, average=average, scheduler=scheduler)
        last = time.thread_time()
        for step in run.steps(job.Samples(), global_batch=job.BATCH, micro_batch=job.BATCH, until=steps):
            now = time.thread_time()
            whole.append(now - last)
            looking.append(watch.spent_s)
            last, watch.spent_s = now, 0.0
            with step:
                for inputs, labels in step:
                    loss = cross_entropy(network(inputs), labels, reduction="sum")
                    step.backward(loss, weight=len(labels))
                step.apply(optimizer, scheduler=scheduler, also=lambda: average.update_parameters(network))

    try:
        for name, method in plain.items():
            setattr(StateGuard, name, watch.timed(method))
        hf.start(main)
    finally:
        for name, method in plain.items():
            setattr(StateGuard, name, method)
    first = max(WARM_UP, FIRST_LOOKS) + 1
    return whole[first:], looking[first:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead.unchanged", description=__doc__)
    parser.add_argument("--models", default="10m", help="comma-separated: 10m, tiny (default: 10m)")
    parser.add_argument("--runs", type=int, default=5, help="of each model (default: 5)")
    parser.add_argument(
        "--steps", type=int, default=100, help="of a run (default: 100; tiny: 20 times as many)"
    )
    chosen = parser.parse_args()
    console = Console(width=WIDTH)
    machine.introduce(
        console, versions(Path(sys.executable), ["torch", "holdfast-train"]), "one process, one thread"
    )
    torch.set_num_threads(1)
    with machine.ForeignCpu() as cpu:
        for size in chosen.models.split(","):
            measured = [measure(size, chosen.steps) for _ in range(chosen.runs)]
            step = spread(statistics.median(whole) * 1e3 for whole, _ in measured)
            look = spread(sum(looking) / len(looking) * 1e6 for _, looking in measured)
            share = spread(100 * sum(looking) / sum(whole) for whole, looking in measured)
            console.print(
                f"{size}: a step takes {_shown(step, 'ms')}, looking {_shown(look, 'us')} of it on average: "
                f"{_shown(share, '%')}"
            )
    console.print(
        f"Median (min–max) of {chosen.runs} runs of {chosen.steps} steps; of a run the median step, and the mean "
        "time of looking, because not every step is looked at.",
        style="dim",
    )
    machine.conclude(console, cpu)
    return 0


def _shown(found: Spread | None, unit: str) -> str:
    assert found is not None
    return f"{found.median:.3g} {unit} ({found.low:.3g}–{found.high:.3g})"


if __name__ == "__main__":
    sys.exit(main())
