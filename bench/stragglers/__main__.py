"""How reliably slow ranks are found on synthetic step times, how often wrongly, and what timing the phases costs.

python -m bench.stragglers            false alarms and time until a rank 10% slower is named
python -m bench.stragglers --cost     of the stopwatch in the worker, and of a look in the coordinator
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.progress import Progress
from bench.stragglers.noises import NOISES
from bench.stragglers.simulate import WINDOW_STEPS, quiet, slowed
from holdfast.health.stragglers import Stragglers
from holdfast.protocol.phases import BLOCK_STEPS, Phase
from holdfast.train.step_report import StepTimer

WIDTH = 100
REPEATS = 7


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.stragglers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workers", default="2,3,8", help="comma-separated sizes of a job (default: 2,3,8)")
    parser.add_argument(
        "--windows", type=int, default=20_000, help="windows of 50 steps without a slow rank, for each size"
    )
    parser.add_argument(
        "--runs", type=int, default=200, help="runs with a slow rank, for each size (default: 200)"
    )
    parser.add_argument(
        "--factor",
        type=float,
        default=1.1,
        help="step time of the slow rank over that of the others (default: 1.1)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cost", action="store_true", help="measure the cost of timing instead")
    chosen = parser.parse_args(arguments)
    chosen.workers = [int(n) for n in chosen.workers.split(",")]
    return chosen


def main() -> int:
    chosen = options()
    console = Console(width=WIDTH)
    cpu = machine.ForeignCpu()
    machine.introduce(console, {}, "no network")
    with cpu:
        console.print(_costs() if chosen.cost else _table(chosen))
    machine.conclude(console, cpu)
    return 0


def _table(chosen: argparse.Namespace) -> Table:
    progress = Progress()
    title = (
        f"{chosen.windows} windows of {WINDOW_STEPS} steps without a slow rank, {chosen.runs} runs in which one becomes "
        f"{chosen.factor:g} times as slow; seed {chosen.seed}"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, width=WIDTH)
    table.add_column("noise of a step", ratio=1)
    for head in (
        "workers",
        "windows with\na false alarm",
        "named within\n50 steps",
        "after steps\n(median)",
        "wrong\nrank",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for noise in NOISES:
        for workers in chosen.workers:
            progress(f"{noise.name}, {workers} workers")
            alone = quiet(noise, workers, chosen.windows, chosen.seed)
            found = slowed(noise, workers, chosen.runs, chosen.seed, chosen.factor)
            median = "–" if found.median is None else f"{found.median:g}"
            table.add_row(
                noise.name, str(workers), str(alone.false), f"{found.in_time:.0%}", median, str(found.wrong)
            )
    return table


def _costs() -> Table:
    table = Table(
        title=f"Processor time: medians (min–max) of {REPEATS}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        width=WIDTH,
    )
    table.add_column("what", ratio=1)
    table.add_column("µs", justify="right")
    for micros in (1, 4):
        table.add_row(
            f"the worker's stopwatch, a step of {micros} micro-batches", _spread(lambda m=micros: _steps(m))
        )
    for workers in (8, 1024, 8192):
        table.add_row(
            f"the coordinator, for each step of {workers} workers", _spread(lambda w=workers: _looks(w))
        )
    return table


def _steps(micros: int) -> float:
    """Seconds per step."""
    timer, steps = StepTimer(), 10_000
    began = time.process_time()
    for step in range(steps):
        timer.begin()
        for _ in range(micros):
            timer.enter(Phase.DATA)
            timer.enter(Phase.FORWARD)
            timer.enter(Phase.BACKWARD)
        for phase in (Phase.REDUCE, Phase.VOTE, Phase.UPDATE, Phase.COMMIT):
            timer.enter(phase)
        timer.commit(step, micros, 1.0, 1.0)
    return (time.process_time() - began) / steps


def _looks(workers: int) -> float:
    """Seconds per step: a block has several."""
    test = Stragglers()
    own = {f"node{n}.0#1": 1.0 + n % 7 / 100 for n in range(workers)}
    blocks = max(3, 20_000 // workers)
    began = time.process_time()
    for block in range(blocks):
        test.look(block * BLOCK_STEPS, own)
    return (time.process_time() - began) / blocks / BLOCK_STEPS


def _spread(measure) -> str:
    found = sorted(measure() * 1e6 for _ in range(REPEATS))
    return f"{statistics.median(found):.3g} ({found[0]:.3g}–{found[-1]:.3g})"


if __name__ == "__main__":
    sys.exit(main())
