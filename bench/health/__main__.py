"""`python -m bench.health`: what each source costs, and all of them with the rules, as a share of one core.

Each source is read again and again, and what its rules make of it is counted in. The time is that of the process, so that
threads which a source has for itself are in it. A machine with eight GPUs is made of files; files of /sys take longer or
shorter, depending on their driver, which only the machine itself can tell.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import holdfast
from bench.health.rig import build, build_gpus
from bench.machine import ForeignCpu, conclude, introduce
from holdfast.agent.source_poller import Poller
from holdfast.health.machine import machine_sources
from holdfast.health.rule_engine import RuleEngine
from holdfast.health.ruleset import load_rules
from holdfast.health.samples import LogLine, Reading
from holdfast.health.sources import MachineRoot, Source
from holdfast.protocol.health import Finding

GOAL = 0.002
"""A share of one core (issue 5)."""


@dataclass(frozen=True)
class Cost:
    """Processor seconds of one source, for each time that it is read."""

    name: str
    every_s: float
    readings: int
    reads_s: tuple[float, ...]

    @property
    def share(self) -> float:
        """Of one core, at the source's own period."""
        return statistics.median(self.reads_s) / self.every_s


def measure(source: Source, engine: RuleEngine, repetitions: int) -> Cost:
    """Reads the source this many times, as if its period had passed each time."""
    clock = _Clock()
    for name in ("_clock", "_due_s"):  # sources that are also woken by events read only when they are due
        if hasattr(source, name):
            setattr(source, name, clock if name == "_clock" else 0.0)
    count, took = 0, []
    for round_ in range(repetitions + 1):
        clock.now += source.every_s
        began = time.process_time()
        count = _judge(source.read(), engine, clock.now)
        if round_:  # the first one learns what there is
            took.append(time.process_time() - began)
    source.close()
    label = f"{source.name} ({type(source).__name__})"
    return Cost(label, source.every_s, count, tuple(took))


class _Clock:
    now = 1e6

    def __call__(self) -> float:
        return self.now


def _judge(readings: Iterable[Reading | LogLine], engine: RuleEngine, now_s: float) -> int:
    count = 0
    for reading in readings:
        count += 1
        if isinstance(reading, LogLine):
            engine.on_line(reading, now_s)
        else:
            engine.on_reading(reading, now_s)
    return count


def show(console: Console, title: str, costs: list[Cost]) -> float:
    """A table; returns the share of all."""
    table = Table(title=title)
    for column in ("source", "every", "values", "median ms", "spread, ms", "of a core"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for cost in costs:
        ms = sorted(1000 * s for s in cost.reads_s)
        table.add_row(
            cost.name,
            f"{cost.every_s:.0f} s",
            str(cost.readings),
            f"{statistics.median(ms):.3f}",
            f"{ms[0]:.3f} to {ms[-1]:.3f}",
            f"{cost.share:.4%}",
        )
    total = sum(cost.share for cost in costs)
    table.add_section()
    table.add_row("all", "", "", "", "", f"{total:.4%}")
    console.print(table)
    return total


def live(seconds: float) -> tuple[float, list[Finding]]:
    """The share of a core that the agent's thread takes on this machine, as it runs; and what was found."""
    findings: list[Finding] = []
    poller = Poller(load_rules(), findings.extend)
    sources = machine_sources(MachineRoot())
    poller.add(sources)
    poller.read_once(30.0)
    began, used = time.monotonic(), time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - used) / (time.monotonic() - began)
    poller.close()
    return share, findings


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.health")
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument(
        "--live",
        type=float,
        default=120.0,
        help="seconds of watching this machine; a multiple of 60 (default: 120)",
    )
    given = parser.parse_args()
    console = Console()
    rules = len(load_rules())
    introduce(
        console,
        {"holdfast": holdfast.__version__},
        f"{rules} rules, {given.repetitions} readings of every source",
    )
    with ForeignCpu() as cpu, tempfile.TemporaryDirectory() as folder:
        share, found = live(given.live)  # first: a library of a measurement may have threads that end later
        here = [
            measure(source, RuleEngine(load_rules()), given.repetitions)
            for source in machine_sources(MachineRoot())
        ]
        mine = show(console, "This machine", here)
        root = Path(folder)
        build(root)
        gpus = build_gpus(root / "nvml")
        machine = MachineRoot(root, root / "nvml" if gpus else None)
        there = [
            measure(source, RuleEngine(load_rules()), given.repetitions)
            for source in machine_sources(machine)
        ]
        title = "8 GPUs, 8 RDMA ports, 8 NVMe drives, 10 interfaces, 2000 processes (files)"
        big = show(console, title if gpus else f"{title}; no C compiler, so without the GPUs' driver", there)
    console.print(
        f"The agent's thread on this machine for {given.live:.0f} s, wake-ups and rules included: {share:.4%} of a core; "
        f"{len(found)} findings",
        highlight=False,
    )
    worst = max(mine, big, share)
    console.print(f"Goal {GOAL:.1%}: {'met' if worst <= GOAL else 'NOT met'} ({worst:.4%})", highlight=False)
    conclude(console, cpu)


if __name__ == "__main__":
    main()
