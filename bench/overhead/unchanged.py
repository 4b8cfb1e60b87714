"""`python -m bench.overhead.unchanged`: what it costs to see that only commits change the protected state.

Jobs of two replicas train the model of the other benchmarks, whole with an average of its weights, or sharded over two workers
each. The time spent in `holdfast.train.state_guard` is taken out of every step after the first ones, in which all content
is read. It is the processor's time of the thread that trains, which does not grow when others use the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench import machine
from bench.overhead.jobs import Failed, run_job
from bench.processes import Children, Group, stop_signals
from bench.progress import Progress
from bench.recovery.analyse import spread
from bench.recovery.environments import versions

SCRIPT = Path(__file__).with_name("train_unchanged.py")
REPLICAS = 2
WIDTH = 100


@dataclass(frozen=True)
class Kind:
    """How a job adds gradients and keeps its state."""

    reduction: str
    shards: int
    """Workers of a replica."""


KINDS = {
    "fast": Kind("fast", 1),
    "exact": Kind("exact", 1),
    "fast-sharded": Kind("fast", 2),
    "exact-sharded": Kind("exact", 2),
}


@dataclass(frozen=True)
class Cost:
    """Of one job: its worker that looked for the longest."""

    step_s: float
    """The median step."""
    look_s: float
    """The mean of all steps, because not every step is looked at."""
    share: float
    """Of the time of all steps."""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead.unchanged", description=__doc__)
    parser.add_argument("--models", default="10m", help="comma-separated: 10m, tiny (default: 10m)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"comma-separated: {', '.join(KINDS)}")
    parser.add_argument("--runs", type=int, default=3, help="of each (default: 3)")
    parser.add_argument(
        "--steps", type=int, default=100, help="of a run (default: 100; tiny: 20 times as many)"
    )
    parser.add_argument("--timeout-s", type=float, default=300.0, help="limit for one run (default: 300)")
    chosen = parser.parse_args(arguments)
    chosen.kinds, chosen.models = chosen.kinds.split(","), chosen.models.split(",")
    for given, known in ((chosen.kinds, KINDS), (chosen.models, ("10m", "tiny"))):
        if unknown := set(given) - set(known):
            parser.error(f"nothing is called {unknown.pop()!r}; there are: {', '.join(known)}")
    return chosen


def main() -> int:
    chosen = options()
    console = Console(width=WIDTH)
    machine.introduce(
        console,
        versions(Path(sys.executable), ["torch", "holdfast-train"]),
        "gloo on loopback, one thread each",
    )
    whole = True
    children, progress, cpu = Children(), Progress(), machine.ForeignCpu()
    with stop_signals(), cpu, children:
        for model in chosen.models:
            for kind in chosen.kinds:
                costs: list[Cost] = []
                for number in range(chosen.runs):
                    what = f"{model}, {kind}, run {number + 1} of {chosen.runs}"
                    try:
                        with children.group() as processes:
                            costs.append(_run(processes, model, kind, chosen, progress, what))
                    except Failed as error:
                        whole = False
                        console.print(f"{what}: {error}", style="red", markup=False)
                if costs:
                    console.print(_line(model, kind, costs), highlight=False, soft_wrap=True)
    console.print(
        f"Median (min–max) of {chosen.runs} jobs of {chosen.steps} steps, each of {REPLICAS} replicas; of a job the worker "
        "that looked for the longest: its median step, and the mean time of looking, because not every step is looked at.",
        style="dim",
    )
    machine.conclude(console, cpu)
    return 0 if whole else 1


def _run(
    processes: Group, model: str, kind: str, chosen: argparse.Namespace, progress: Progress, what: str
) -> Cost:
    """One job. Raises Failed."""
    reduction, shards = KINDS[kind].reduction, KINDS[kind].shards
    workers = REPLICAS * shards
    arguments = {
        "--model": model,
        "--reduction": reduction,
        "--shards": shards,
        "--workers": workers,
        "--steps": chosen.steps * (20 if model == "tiny" else 1),
    }
    name = f"unchanged-{model}-{kind}"
    written = run_job(processes, SCRIPT, arguments, workers, chosen.timeout_s, progress, what, name)
    if len(written) != workers:
        raise Failed(f"{len(written)} of {workers} workers wrote what they measured")
    lines = map(json.loads, written)
    return max((_cost(x["steps_s"], x["looks_s"]) for x in lines), key=lambda cost: cost.share)


def _cost(steps_s: list[float], looks_s: list[float]) -> Cost:
    return Cost(
        step_s=statistics.median(steps_s),
        look_s=statistics.mean(looks_s),
        share=sum(looks_s) / sum(steps_s),
    )


def _line(model: str, kind: str, costs: list[Cost]) -> str:
    step = _shown([c.step_s * 1e3 for c in costs], "ms")
    look = _shown([c.look_s * 1e6 for c in costs], "µs")
    share = _shown([c.share * 100 for c in costs], "%")
    return f"{model}, {kind}: a step takes {step}, looking {look} of it on average: {share}"


def _shown(measured: list[float], unit: str) -> str:
    found = spread(measured)
    assert found is not None
    return f"{found.median:.3g} {unit} ({found.low:.3g}–{found.high:.3g})"


if __name__ == "__main__":
    sys.exit(main())
