"""`python -m bench.overhead`: what protection costs a step when nothing fails."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.overhead.analyse import Comparison, compare, parse
from bench.overhead.jobs import Failed, run_job
from bench.processes import Children, Group, stop_signals
from bench.progress import Progress
from bench.recovery.analyse import Spread, spread
from bench.recovery.environments import versions
from bench.recovery.systems.base import free_port

SCRIPT = Path(__file__).with_name("train.py")
MODELS = {"10m": "9.8 million parameters", "tiny": "15 thousand parameters"}
BLOCKS_LONGER = {"10m": 1, "tiny": 5}
"""A block of a few milliseconds would mostly measure when its ranks begin."""
WIDTH = 100


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead",
        description="Steady-state cost of Holdfast level 2 against plain DDP, in the same processes.",
    )
    parser.add_argument("--models", default="10m,tiny", help="comma-separated: 10m, tiny (default: both)")
    parser.add_argument("--replicas", type=int, default=2, help="nodes with one worker each (default: 2)")
    parser.add_argument(
        "--rounds", type=int, default=24, help="rounds of three blocks: plain, Holdfast, plain (default: 24)"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps in a block (default: 10)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each model (default: 3)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="limit for one run (default: 600)")
    parser.add_argument("--json", type=Path, help="write every block to this file")
    chosen = parser.parse_args(arguments)
    chosen.models = chosen.models.split(",")
    unknown = set(chosen.models) - set(MODELS)
    if unknown:
        parser.error(f"no model is called {unknown.pop()!r}; there are: {', '.join(MODELS)}")
    return chosen


def main() -> int:
    chosen = options()
    console = Console(width=WIDTH)
    found = versions(Path(sys.executable), ["torch", "holdfast-train"])
    machine.introduce(console, found, "gloo on loopback")
    results: dict[str, list[Comparison]] = {}
    raw: dict[str, list[list[dict[str, object]]]] = {}
    children, progress, cpu = Children(), Progress(), machine.ForeignCpu()
    with stop_signals(), cpu, children:
        for model in chosen.models:
            for number in range(chosen.runs):
                what = f"{model}, run {number + 1} of {chosen.runs}"
                try:
                    with children.group() as processes:
                        lines = _run(processes, model, chosen, progress, what)
                    blocks = parse(lines)
                    results.setdefault(model, []).append(compare(blocks))
                    raw.setdefault(model, []).append([asdict(block) for block in blocks])
                except (Failed, ValueError) as error:
                    console.print(f"{what}: {error}", style="red", markup=False)
    console.print(_table(chosen, results))
    console.print(
        "A round is a block of plain DDP, one of Holdfast level 2, and plain DDP again, in the same "
        f"{chosen.replicas} processes. extra: Holdfast minus the mean of both plain blocks. noise: how much "
        "the two plain blocks of a round differ. Each figure is the median of the runs' medians and "
        "(min–max) of the runs.",
        style="dim",
    )
    machine.conclude(console, cpu)
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": asdict(machine.describe()) | found, "runs": raw}))
    return 0 if set(results) == set(chosen.models) else 1


def _run(
    processes: Group, model: str, chosen: argparse.Namespace, progress: Progress, what: str
) -> list[str]:
    """One run; the lines that its workers wrote. Raises Failed."""
    arguments = {
        "--model": model,
        "--rounds": chosen.rounds,
        "--steps": chosen.steps * BLOCKS_LONGER[model],
        "--world": chosen.replicas,
        "--port": free_port(),
    }
    # The plain blocks are a stall to Holdfast, and looking into it would cost time that is measured.
    options = ("--stall-factor", "1000")
    return run_job(
        processes, SCRIPT, arguments, chosen.replicas, chosen.timeout_s, progress, what, model, options
    )


def _table(chosen: argparse.Namespace, results: dict[str, list[Comparison]]) -> Table:
    title = (
        f"{chosen.replicas} replicas: {chosen.runs} runs of {chosen.rounds} rounds with blocks of "
        f"{chosen.steps} steps (tiny: {chosen.steps * BLOCKS_LONGER['tiny']})"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, width=WIDTH)
    table.add_column("model")
    for name in ("plain DDP\nms", "Holdfast\nms", "extra\nms", "extra\n%", "extra CPU\nms", "noise\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    for model, runs in results.items():
        columns = (
            [r.plain_s * 1e3 for r in runs],
            [r.protected_s * 1e3 for r in runs],
            [r.extra_s * 1e3 for r in runs],
            [r.extra_share * 1e2 for r in runs],
            [r.extra_cpu_s * 1e3 for r in runs],
            [r.noise_s * 1e3 for r in runs],
        )
        table.add_row(f"[bold]{model}[/bold]\n[dim]{MODELS[model]}[/dim]", *map(_cell, map(spread, columns)))
    return table


def _cell(found: Spread | None) -> str:
    assert found is not None
    return f"{found.median:.1f}\n[dim]{found.low:.1f}–{found.high:.1f}[/dim]"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
