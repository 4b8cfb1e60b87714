"""`python -m bench.adapters`: what a step and a fault cost Hugging Face's Trainer and Lightning, with and without Holdfast."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from bench import machine
from bench.adapters import systems
from bench.processes import Children, stop_signals
from bench.progress import Progress
from bench.recovery import analyse, harness, table
from bench.recovery.environments import versions

STEP = replace(table.STEP, name="step", title="step /\nwithout", target=None)
COLUMNS = (
    replace(table.STALL, target=None),
    replace(table.FULL, target=None),
    table.LOST,
    table.NEW_WORK,
    table.FULL_STEP,
    STEP,
)
STEP_AIM = 1.03
"""A step with Holdfast takes at most this many times one without."""
RECOVERY_AIM = 1.1
"""Stall and full strength are at most this many times those of the loop with `hf.Run`."""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.adapters",
        description="Trainers with Holdfast, against the same scripts under torchrun and a loop with hf.Run.",
    )
    names = ", ".join(systems.FRAMEWORKS)
    parser.add_argument(
        "--frameworks", default=",".join(systems.FRAMEWORKS), help=f"comma-separated: {names} (default: both)"
    )
    parser.add_argument("--workers", type=int, default=2, help="at full strength (default: 2)")
    parser.add_argument("--faults", type=int, default=5, help="SIGKILLs for each row (default: 5)")
    parser.add_argument(
        "--blocks",
        type=int,
        default=20,
        help="pairs of blocks of steps that compare step times (default: 20)",
    )
    parser.add_argument("--steps", type=int, default=10, help="steps in a block (default: 10)")
    parser.add_argument(
        "--settle-s",
        type=float,
        default=12.0,
        help="between two faults, so that the next spare has imported its framework (default: 12)",
    )
    parser.add_argument(
        "--checkpoint-budget", type=float, default=0.1, help="of torchrun's rows (default: 0.1)"
    )
    parser.add_argument("--timeout-s", type=float, default=90.0, help="limit for one recovery (default: 90)")
    parser.add_argument("--seed", type=int, default=0, help="seed for the choice of victims and times")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    chosen = parser.parse_args(arguments)
    if chosen.workers < 2 or chosen.faults < 1:
        parser.error("it takes at least 2 workers and 1 fault")
    try:
        chosen.frameworks = systems.select(chosen.frameworks)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def main() -> int:
    chosen = options()
    console = Console(width=table.WIDTH)
    found = versions(Path(sys.executable), ["torch", "holdfast-train", *chosen.frameworks])
    machine.introduce(console, found, "gloo on loopback, one thread for each worker")
    plan = harness.Plan(
        replicas=chosen.workers,
        faults=chosen.faults,
        blocks=chosen.blocks,
        block_steps=chosen.steps,
        settle_s=chosen.settle_s,
        timeout_s=chosen.timeout_s,
        seed=chosen.seed,
    )
    children = Children()
    bench = harness.Bench(children, Progress())
    results: list[harness.Measured] = []
    cpu = machine.ForeignCpu()
    with stop_signals(), cpu, children:
        try:
            for system in systems.rows(chosen.frameworks):
                results.append(harness.Measured(name=system.name, title=system.title, note=system.note))
                _measure(system, plan, chosen.checkpoint_budget, bench, results[-1])
        finally:
            # What was measured before an interruption is worth as much.
            _print(console, plan, results)
    machine.conclude(console, cpu)
    if chosen.json:
        about = asdict(machine.describe()) | {"versions": found}
        rows = [result.as_json() for result in results]
        chosen.json.write_text(json.dumps({"machine": about, "plan": asdict(plan), "rows": rows}, indent=1))
    return int(any(result.error or result.failed_faults for result in results))


def _measure(
    system: systems.System, plan: harness.Plan, budget: float, bench: harness.Bench, result: harness.Measured
) -> None:
    """A row of torchrun saves as often as the budget allows, and its steps are compared with nothing."""
    if system.checkpoints and system.trouble() is None:
        try:
            step_s, save_s = harness.calibrate(plan, system, bench)
        except harness.Failed as error:
            result.error = str(error)
            return
        every = analyse.checkpoint_interval(save_s, step_s, budget)
        result.note += f", every {every} steps ({save_s * 1e3:.0f} ms)"
        plan = replace(plan, checkpoint_every=every, blocks=0)
    harness.measure(system, plan, bench, result)


def _print(console: Console, plan: harness.Plan, results: Sequence[harness.Measured]) -> None:
    title = f"{plan.workers} workers, 9.8 million parameters: SIGKILL of one, median and (min–max) of {plan.faults} faults"
    console.print(table.figures(title, COLUMNS, results))
    table.print_notes(console, results)
    console.print(
        "stall: kill to the next commit by anyone. full strength: kill to the first step of all workers. lost steps: "
        "committed, then computed again. new work: kill to the first commit of a step never committed before. step: at "
        f"full strength, the median of a job. step / without: {plan.blocks} blocks of {plan.block_steps} steps in turns "
        "with the framework's own DDP under torchrun (hf.Run: with plain DDP), checkpoints off; the median, and the "
        "range of the blocks.",
        style="dim",
    )
    for line in verdicts(results):
        console.print(line, highlight=False)


def verdicts(results: Sequence[harness.Measured]) -> list[str]:
    """A line for each aim of each framework: the figure, the aim, and torchrun's figure of the same run."""
    by_name = {result.name: result for result in results}
    lines = []
    for framework, title in systems.FRAMEWORKS.items():
        ours = by_name.get(f"holdfast-{framework}")
        if ours is None:
            continue
        step = STEP.spread(ours)
        if step is not None:
            lines.append(f"{title}, step: {step.median:.3f} of one without; {_judged(step.median, STEP_AIM)}")
        for column in COLUMNS[:2]:
            rows = (ours, by_name[systems.Written.name], by_name.get(f"torchrun-{framework}"))
            mine, written, theirs = (column.spread(row) if row else None for row in rows)
            if mine is None or written is None:
                lines.append(f"{title}, {column.name}: no figure")
                continue
            ratio = mine.median / written.median
            against = f"; torchrun {theirs.median / mine.median:.1f} times as long" if theirs else ""
            lines.append(
                f"{title}, {column.name}: {ratio:.2f} of a loop with hf.Run; {_judged(ratio, RECOVERY_AIM)}{against}"
            )
    return lines


def _judged(ratio: float, aim: float) -> str:
    return f"aim <={aim:g}: {'met' if ratio <= aim else 'MISSED'}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
