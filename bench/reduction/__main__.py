"""What an exact sum of gradients costs: `python -m bench.reduction`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.progress import Progress
from bench.recovery.analyse import spread
from bench.recovery.environments import versions
from bench.reduction.train import AGAIN, KINDS, rank_main
from holdfast.train.place import shares, subtrees

WIDTH = 110


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.reduction",
        description="Step time with exact sums of gradients against the usual all-reduce, in the same processes.",
    )
    parser.add_argument("--model", choices=("10m", "100m"), default="10m", help="parameters (default: 10m)")
    parser.add_argument(
        "--worlds",
        default="2x2,2x8,3x12,4x8",
        help="replicas x micro-batches of a step (default: 2x2,2x8,3x12,4x8)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of one block of each kind (default: 7)")
    parser.add_argument(
        "--steps", type=int, default=5, help="steps in a block, after 2 for warm-up (default: 5)"
    )
    parser.add_argument("--json", type=Path, help="write every step to this file")
    chosen = parser.parse_args(arguments)
    try:
        chosen.worlds = [tuple(map(int, case.split("x"))) for case in chosen.worlds.split(",")]
        if any(len(case) != 2 or not 2 <= case[0] <= case[1] for case in chosen.worlds):
            raise ValueError
    except ValueError:
        parser.error("--worlds: give for example 2x2,3x12: at least 2 replicas, and a micro-batch for each")
    return chosen


def main() -> int:
    chosen = options()
    console = Console(width=WIDTH)
    machine.introduce(
        console, versions(Path(sys.executable), ["torch", "holdfast-train"]), "gloo on loopback"
    )
    table = Table(
        title=f"{chosen.model} parameters: medians of {chosen.rounds} rounds with blocks of {chosen.steps} steps",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        width=WIDTH,
    )
    for name in ("replicas", "micro-\nbatches", "subtrees of\na replica", "fast\nms"):
        table.add_column(name, justify="right")
    for name in (*list(KINDS)[1:], AGAIN):
        table.add_column(f"{name}\n/ fast", justify="right")
    raw: dict[str, list[dict[str, list[float]]]] = {}
    with machine.ForeignCpu() as cpu:
        for world, micro_batches in chosen.worlds:
            rounds = _measure(world, micro_batches, chosen, Progress())
            raw[f"{world}x{micro_batches}"] = rounds
            table.add_row(*_row(world, micro_batches, rounds))
    console.print(table)
    console.print(
        "A round is one block of each kind in the same processes; a step lasts as long as on the slowest rank. fast: the "
        'all-reduce. tree: reduction="exact". int64: fixed point, its scale from the same step; ahead: from the step '
        "before. Ratios are of the medians of one round; (min–max) over the rounds. fast again / fast is the noise.",
        style="dim",
        markup=False,
    )
    machine.conclude(console, cpu)
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": asdict(machine.describe()), "runs": raw}))
    return 0


def _measure(
    world: int, micro_batches: int, chosen: argparse.Namespace, progress: Progress
) -> list[dict[str, list[float]]]:
    """For every round the step times of each kind, seconds; a step's is that of its slowest rank."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    ranks = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        arguments = (theirs, rank, world, chosen.model, micro_batches, chosen.rounds, chosen.steps)
        ranks.append(context.Process(target=rank_main, args=arguments, daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    ports = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(ports)
    rounds = []
    for number in range(chosen.rounds):
        progress(f"{world} replicas, {micro_batches} micro-batches: round {number + 1} of {chosen.rounds}")
        rounds.append({})
        for _ in range(len(KINDS) + 1):
            said = [pipe.recv() for pipe in pipes]
            rounds[-1][said[0][0]] = [max(times) for times in zip(*(t for _, t in said), strict=True)]
    for process in ranks:
        process.join()
    return rounds


def _row(world: int, micro_batches: int, rounds: list[dict[str, list[float]]]) -> list[str]:
    medians = [{kind: statistics.median(times) for kind, times in found.items()} for found in rounds]
    pieces = statistics.fmean(len(subtrees(micro_batches, part)) for part in shares(micro_batches, world))
    cells = [
        str(world),
        str(micro_batches),
        f"{pieces:.2g}",
        _cell([m["fast"] * 1e3 for m in medians], ".0f"),
    ]
    return cells + [
        _cell([m[kind] / m["fast"] for m in medians], ".2f") for kind in (*list(KINDS)[1:], AGAIN)
    ]


def _cell(values: list[float], digits: str) -> str:
    found = spread(values)
    assert found is not None
    return f"{found.median:{digits}}\n[dim]{found.low:{digits}}–{found.high:{digits}}[/dim]"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
