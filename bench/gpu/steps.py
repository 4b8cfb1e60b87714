"""What a step of a worker with a GPU of its own costs under Holdfast, beside plain DDP in the same process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.gpu.jobs import environment
from bench.overhead.analyse import Comparison, compare, parse
from bench.overhead.jobs import run_job
from bench.processes import Group
from bench.progress import Progress

SCRIPT = Path(__file__).with_name("train_steps.py")
LIMIT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the transformer and of a step."""

    width: int
    layers: int
    length: int
    vocabulary: int
    batch: int
    rounds: int = 6
    steps: int = 20
    """Of a block."""


SIZES = {
    "cuda": Size(width=1024, layers=24, length=1024, vocabulary=32768, batch=8),
    "cpu": Size(width=64, layers=2, length=32, vocabulary=512, batch=4, rounds=3, steps=5),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What Holdfast does in these steps."""

    name: str
    reduction: str = "fast"
    snapshots: str = "0"


CASES = (
    Case(name="no snapshots"),
    Case(name="a snapshot every 10 steps", snapshots="10"),
    Case(name="exact sums, no snapshots", reduction="exact"),
)


def measure(case: Case, device: str, group: Group, progress: Progress) -> Comparison:
    """Runs one job.

    Raises:
        Failed: it did not end well, or not in time.
    """
    arguments = {f"--{name}": value for name, value in vars(SIZES[device]).items()}
    arguments["--reduction"] = case.reduction
    # The plain blocks are a stall to Holdfast, and looking into it would cost time that is measured.
    options = ("--snapshot-every", case.snapshots, "--stall-factor", "1000")
    what = f"steps, {case.name}"
    lines = run_job(
        group, SCRIPT, arguments, 1, LIMIT_S, progress, what, "gpu-steps", options, environment(device)
    )
    return compare(parse(lines))
