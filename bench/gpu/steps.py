"""What a step of a worker with a GPU of its own costs under Holdfast, beside plain DDP in the same process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.jobs import Failed
from bench.overhead.analyse import Comparison, compare, parse
from bench.processes import Group
from bench.progress import Progress
from bench.recovery.environments import ROOT
from bench.recovery.systems.base import worker_environment

SCRIPT = Path(__file__).with_name("train_steps.py")
LIMIT_S = 240.0
LOOK_S = 0.5


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
    size = SIZES[device]
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        output, log = Path(scratch) / "blocks.jsonl", Path(scratch) / "log"
        argv = [
            sys.executable,
            "-P",
            "-m",
            "holdfast.cli",
            "run",
            "--job",
            "steps",
            "--no-ui",
            "--nnodes",
            "1",
        ]
        # The plain blocks are a stall to Holdfast, and looking into it would cost time that is measured.
        argv += ["--snapshot-every", case.snapshots, "--stall-factor", "1000", str(SCRIPT)]
        given = {**vars(size), "reduction": case.reduction, "output": output}
        argv += [word for name, value in given.items() for word in (f"--{name}", str(value))]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = worker_environment(sys.executable) | {
            "HOLDFAST_HOME": scratch,
            "PYTHONPATH": path,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        if device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        process = group.spawn(argv, env, log)
        deadline_s = time.monotonic() + LIMIT_S
        while (code := _ended(process)) is None:
            progress(f"steps, {case.name}")
            if time.monotonic() > deadline_s:
                raise Failed(f"{case.name}: not done within {LIMIT_S:.0f} s\n{log.read_text()[-2000:]}")
        if code:
            raise Failed(f"{case.name}: ended with {code}\n{log.read_text()[-2000:]}")
        return compare(parse(output.read_text().splitlines()))


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(LOOK_S)
    except subprocess.TimeoutExpired:
        return None
