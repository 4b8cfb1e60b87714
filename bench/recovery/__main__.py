"""`python -m bench.recovery`: how long training stops after a fault, for Holdfast and its peers, as one table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from bench import machine
from bench.processes import Children, stop_signals
from bench.progress import Progress
from bench.recovery import analyse, environments, floor, harness, table
from bench.recovery.harness import Plan
from bench.recovery.systems import SHARDED, SYSTEMS, TRAINER, select
from bench.recovery.systems.base import System
from bench.recovery.systems.sharded import TorchrunSharded
from bench.recovery.systems.torchrun import Torchrun

SHARDED_PLAN = {"replicas": 2, "shards": 2, "blocks": 0, "settle_steps": 6, "calibration_steps": 16}
"""Steps are long there: few of them between two faults."""
TRAINER_PLAN = {"replicas": 2, "blocks": 0, "settle_s": 20.0, "checkpoint_every": 20, "trainer": True}
"""The imports of the Trainer take long, so the time at full strength before a kill does too."""
VARIANTS = {
    "first": ({},),
    "second": ({"replicas": 8}, {"state_mb": 400.0}),
    "sharded": (SHARDED_PLAN,),
    "trainer": (TRAINER_PLAN,),
}
"""What differs in the parts of each table: more replicas, a larger state at the usual number of replicas, shards."""
SIZES = ("100m", "10m", "tiny", "moe")
"""Of the sharded model, as `sharded.WIDTHS` has them; the launching side does not import torch."""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    names = ", ".join(system.name for system in (*SYSTEMS, *SHARDED, *TRAINER))
    parser = argparse.ArgumentParser(
        prog="python -m bench.recovery",
        description="What a SIGKILLed replica costs: Holdfast and its peers, in one run on one machine.",
    )
    parser.add_argument("--setup", action="store_true", help="install the peers that are not there, then run")
    parser.add_argument("--systems", default="*", help=f"comma-separated names or patterns of: {names}")
    parser.add_argument("--replicas", type=int, default=3, help="replicas at full strength (default: 3)")
    parser.add_argument(
        "--faults", type=int, default=5, help="faults (SIGKILL of a replica) for every system (default: 5)"
    )
    parser.add_argument(
        "--state-mb", type=float, default=0.0, help="additional state without gradients, in MB"
    )
    parser.add_argument(
        "--table",
        choices=list(VARIANTS),
        default="first",
        help="second: 8 replicas; 400 MB. sharded: 2 replicas of 2 shards; trainer: an unmodified script of Hugging Face's "
        "Trainer, 2 ranks; both without the comparison of steps",
    )
    parser.add_argument(
        "--size",
        choices=list(SIZES),
        default="100m",
        help="parameters of the sharded model (default: 100m); moe: 10 million, in experts on both shards",
    )
    parser.add_argument(
        "--blocks", type=int, default=20, help="pairs of blocks of steps that compare step times; 0: none"
    )
    parser.add_argument(
        "--checkpoint-budget",
        type=float,
        default=0.1,
        help="share of the time that a system which needs checkpoints may spend on them (default: 0.1)",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        default=0,
        help="steps between checkpoints of the sharded table (default: as many as the budget allows) and of the Trainer's "
        "(default: 20)",
    )
    parser.add_argument("--timeout-s", type=float, default=90.0, help="limit for one recovery (default: 90)")
    parser.add_argument("--seed", type=int, default=0, help="seed for the choice of victims and times")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    chosen = parser.parse_args(arguments)
    if chosen.replicas < 2 or chosen.faults < 1:
        parser.error("it takes at least 2 replicas and 1 fault")
    try:
        chosen.systems = select(
            chosen.systems, {"sharded": SHARDED, "trainer": TRAINER}.get(chosen.table, SYSTEMS)
        )
    except ValueError as error:
        parser.error(str(error))
    return chosen


def main() -> None:
    chosen = options()
    console = Console(width=table.WIDTH)
    children = Children()
    bench = harness.Bench(children, Progress())
    with stop_signals(), children:
        if chosen.setup:
            _set_up(console)
        plan = Plan(
            replicas=chosen.replicas,
            faults=chosen.faults,
            state_mb=chosen.state_mb,
            blocks=chosen.blocks,
            timeout_s=chosen.timeout_s,
            seed=chosen.seed,
            size=chosen.size if chosen.table == "sharded" else Plan.size,
        )
        plans = [replace(plan, **variant) for variant in VARIANTS[chosen.table]]
        machine.introduce(console, _versions(chosen.systems), "gloo on loopback")
        report = [_run(console, plan, chosen, bench) for plan in plans]
        console.print(f"Load average at the end: {machine.load():.1f}", highlight=False)
    if chosen.json:
        about = asdict(machine.describe()) | {"versions": _versions(chosen.systems)}
        chosen.json.write_text(json.dumps({"machine": about, "tables": report}, indent=1), encoding="utf-8")


def _set_up(console: Console) -> None:
    for environment in environments.PEERS:
        console.print(f"Setting up {environment.folder.name} …")
        try:
            environments.create(environment)
        except environments.InstallError as error:
            console.print(f"  failed: {error}", style="red", markup=False)


def _versions(systems: Sequence[System]) -> dict[str, str]:
    """Of torch and of every system that can be run; they all use the same torch."""
    found = environments.versions(Path(sys.executable), ["torch"])
    for system in systems:
        if system.packages and system.trouble() is None:
            found |= environments.versions(system.python, system.packages)
    return found


def _run(console: Console, plan: Plan, chosen: argparse.Namespace, bench: harness.Bench) -> dict[str, object]:
    """Measure all systems under one plan, print the table, and return everything for the JSON file."""
    began = time.monotonic()
    step_s = save_s = least = None
    if (plan.shards > 1 and chosen.checkpoint_every) or plan.trainer:
        plan = replace(plan, checkpoint_every=chosen.checkpoint_every or plan.checkpoint_every)
    else:
        plan, step_s, save_s = _calibrated(console, plan, chosen.checkpoint_budget, bench)
        if plan.shards == 1:
            least = floor.measure(plan, step_s, bench)
    results: list[harness.Measured] = []
    try:
        for system in chosen.systems:
            results.append(harness.Measured(name=system.name, title=system.title, note=system.note))
            harness.measure(system, plan, bench, results[-1])
            print(f"{system.title}: done after {time.monotonic() - began:.0f} s", file=sys.stderr)
    finally:
        # What was measured before an interruption is worth as much.
        table.print_results(console, plan, results, least)
    return {
        "plan": asdict(plan),
        "plain_step_s": step_s,
        "save_s": save_s,
        "floor": asdict(least) if least else None,
        "systems": [result.as_json() for result in results],
    }


def _calibrated(
    console: Console, plan: Plan, budget: float, bench: harness.Bench
) -> tuple[Plan, float, float]:
    """`plan` with the interval of checkpoints, and the seconds of a plain step and of writing one checkpoint."""
    system = TorchrunSharded() if plan.shards > 1 else Torchrun()
    step_s, save_s = harness.calibrate(plan, system, bench)
    every = analyse.checkpoint_interval(save_s, step_s, budget)
    console.print(
        f"{plan.workers} workers, one thread each: a plain step takes {step_s * 1e3:.0f} ms, a checkpoint "
        f"{save_s * 1e3:.0f} ms; systems that need one save every {every} steps (at most {budget:.0%} of the time)",
        highlight=False,
    )
    return replace(plan, checkpoint_every=every, block_steps=every * -(-5 // every)), step_s, save_s


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
