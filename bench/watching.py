"""`python -m bench.watching`: how much health monitoring changes the step time of a job.

The same small job, with `--health` and `--no-health` in turns; the median step of each run. (`python -m bench.health`
measures the processor time of the watching itself.)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from bench.machine import ForeignCpu, conclude, introduce
from bench.recovery.environments import ROOT, versions

SCRIPT = ROOT / "tests" / "faults" / "train_tiny.py"
MODES = {"watched": "--health", "not watched": "--no-health"}
LIMIT_S = 120.0


def main() -> int:
    """Runs both in turns and prints medians with their spread."""
    parser = argparse.ArgumentParser(prog="bench.watching", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind (default: 5)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--nodes", type=int, default=2)
    given = parser.parse_args()
    console = Console(width=100)
    what = f"{given.runs} runs of {given.steps} steps on {given.nodes} nodes of each kind, in turns"
    introduce(console, versions(Path(sys.executable), ["torch"]), what)
    steps_s: dict[str, list[float]] = {mode: [] for mode in MODES}
    with ForeignCpu() as cpu:
        for nth in range(given.runs):
            for mode in sorted(MODES, reverse=bool(nth % 2)):
                steps_s[mode].append(_median_step_s(given.nodes, given.steps, MODES[mode]))
    for mode, times in steps_s.items():
        low, middle, high = (1e3 * f(times) for f in (min, statistics.median, max))
        console.print(f"{mode:<12} median step {middle:.2f} ms ({low:.2f}-{high:.2f})", highlight=False)
    ratio = statistics.median(w / n for w, n in zip(*steps_s.values(), strict=True))
    console.print(
        f"step time with monitoring against without: {ratio - 1:+.1%} (median of the pairs)", highlight=False
    )
    conclude(console, cpu)
    return 0


def _median_step_s(nodes: int, steps: int, option: str) -> float:
    with tempfile.TemporaryDirectory() as home:
        report = Path(home) / "report.json"
        command = [sys.executable, "-P", "-m", "holdfast.cli", "run", "--no-ui", f"--nnodes={nodes}", option]
        command += [f"--report={report}", str(SCRIPT), str(steps)]
        env = os.environ | {"HOLDFAST_HOME": home}
        subprocess.run(
            command,
            env=env,
            check=True,
            timeout=LIMIT_S,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        median_s: float = json.loads(report.read_text())["steps"]["median_s"]
        return median_s


if __name__ == "__main__":
    sys.exit(main())
