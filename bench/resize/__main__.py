"""`python -m bench.resize`: what it costs a running job to grow, to shrink, and to replace a node by a spare.

The stall of a change is the time from the last step's commit in the old membership to the first one in the new, less a
median step of the new one. Against torchrun with --nnodes 1:3, which restarts every worker from a checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.processes import Children, Group, stop_signals
from bench.progress import Progress
from bench.recovery import model as job
from bench.recovery.analyse import Spread, spread
from bench.recovery.environments import ROOT, versions
from bench.recovery.events import Commit, CommitReader
from bench.recovery.gate import GateKeeper
from bench.recovery.settings import Settings
from bench.recovery.systems.base import SCRIPTS, free_port, worker_environment
from holdfast.engines.client import JobClient

HERE = Path(__file__).parent
CALM_STEPS = 12
LIMIT_S = 150.0
WIDTH = 100
Stalls = dict[str, list[float]]


class Failed(Exception):
    """A change did not happen. The message is for the user."""


class Watched:
    """A job whose commits are read as they are written."""

    def __init__(self, folder: Path, progress: Progress, name: str) -> None:
        self.reader = CommitReader(folder / "events")
        self._progress, self._name = progress, name

    def until(self, holds: Callable[[list[Commit]], bool], what: str) -> list[Commit]:
        """Reads commits until the condition holds for them."""
        deadline = time.monotonic() + LIMIT_S
        while not holds(commits := self.reader.read()):
            if time.monotonic() > deadline:
                raise Failed(f"{self._name}: no {what} within {LIMIT_S:.0f} s")
            self._progress(f"{self._name}: {what}")
            time.sleep(0.01)
        return commits

    def calm(self, world: int, after: int) -> int:
        """Waits for some consecutive steps with this number of workers. Returns the number of commits by then."""
        commits = self.until(
            lambda cs: len([c for c in cs[after:] if c.world == world]) >= CALM_STEPS * world,
            f"{CALM_STEPS} steps with {world} workers",
        )
        return len(commits)


def stall(commits: Sequence[Commit], asked: int, world: int) -> float:
    """The change after commit number `asked` to `world` workers, seconds."""
    old = commits[asked - 1]  # torchrun counts no restart for a worker that joins
    new = next(c for c in commits[asked:] if c.world == world and (c.gen, c.world) != (old.gen, old.world))
    before = max(c.t for c in commits[: commits.index(new)])
    steps: dict[int, float] = {}
    for c in commits:
        if (c.gen, c.world) == (new.gen, world) and c.t >= new.t:
            steps.setdefault(c.step, c.t)
    times = sorted(steps.values())
    return new.t - before - statistics.median(b - a for a, b in itertools.pairwise(times))


def holdfast(folder: Path, group: Group, model: str, cycles: int, progress: Progress) -> tuple[Stalls, dict]:
    """Grows, shrinks and drains a job at level 2. Returns the stalls and what the job's own report has of them."""
    env = _environment(folder) | {"HOLDFAST_HOME": str(folder), "BENCH_RESIZE_MODEL": model}
    argv = [Path(sys.executable).with_name("holdfast"), "run", "--job", "r", "--no-ui"]
    argv += ["--nnodes", "1:3", "--spares", "1", "--report", folder / "report.json", HERE / "train.py"]
    process = group.spawn([*map(str, argv)], env, folder / "holdfast.log")
    job_dir = folder / "jobs" / "r"
    watched, found = Watched(folder, progress, f"Holdfast, {model}"), Stalls()
    seen = watched.calm(3, 0)

    def ask(path: str, body: str = "") -> None:
        async def post() -> None:
            async with JobClient(job_dir) as client:
                await client.post(path, body)

        asyncio.run(post())

    def spare() -> None:
        """Waits until the spare is ready, so that its start is not in the figure."""

        async def wait() -> str:
            async with JobClient(job_dir) as client:
                async for said in client.watch():
                    if said.kind == "status":
                        workers = said.value.workers
                        if any(w.state == "ready" for w in workers):
                            return str(next(w.node for w in workers if w.rank == 1))
            raise Failed("the job has ended")

        drained.append(asyncio.run(asyncio.wait_for(wait(), LIMIT_S)))

    drained: list[str] = []
    for _ in range(cycles):
        for kind, world in (("shrink 3 → 2", 2), ("grow 2 → 3", 3), ("drain, with a spare", 3)):
            asked = len(watched.reader.read())
            if kind.startswith("drain"):
                spare()
                asked = len(watched.reader.read())
                ask("/drain", f'{{"type": "node-going", "node": "{drained[-1]}", "reason": "bench"}}')
            else:
                ask(f"/resize?nodes={world}&reason=bench")
            old = watched.reader.commits[asked - 1].gen
            commits = watched.until(
                lambda cs, old=old, asked=asked, world=world: any(
                    c.gen != old and c.world == world for c in cs[asked:]
                ),
                kind,
            )
            seen = watched.calm(world, len(commits))
            found.setdefault(kind, []).append(stall(watched.reader.read()[:seen], asked, world))
    ask("/stop?reason=done")
    process.wait(LIMIT_S)
    return found, json.loads((folder / "report.json").read_text())


def torchrun(folder: Path, group: Group, cycles: int, progress: Progress) -> Stalls:
    """A second agent joins and leaves an elastic torchrun job; both say --nnodes 1:2."""
    env = _environment(folder) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    flags = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=1000", "--rdzv-backend=c10d"]
    flags += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    argv = [sys.executable, "-m", "torch.distributed.run", *flags, str(SCRIPTS / "train_ddp.py")]
    group.spawn(argv, env, folder / "torchrun-a.log")
    watched, found = Watched(folder, progress, "torchrun"), Stalls()
    watched.calm(1, 0)
    for _ in range(cycles):
        asked = len(watched.reader.read())
        other: subprocess.Popen[bytes] = group.spawn(argv, env, folder / "torchrun-b.log")
        commits = watched.until(lambda cs, asked=asked: any(c.world == 2 for c in cs[asked:]), "grow")
        seen = watched.calm(2, len(commits))
        found.setdefault("grow 1 → 2", []).append(stall(watched.reader.read()[:seen], asked, 2))
        asked = seen
        other.send_signal(signal.SIGTERM)
        commits = watched.until(lambda cs, asked=asked: any(c.world == 1 for c in cs[asked:]), "shrink")
        seen = watched.calm(1, len(commits))
        found.setdefault("shrink 2 → 1", []).append(stall(watched.reader.read()[:seen], asked, 1))
    return found


def _environment(folder: Path) -> dict[str, str]:
    GateKeeper(folder / "gate")
    settings = Settings(
        events=str(folder / "events"),
        gate=str(folder / "gate"),
        checkpoint=str(folder / "checkpoint"),
        checkpoint_every=5,
        state_mb=0.0,
        replicas=1,
    )
    return worker_environment(sys.executable) | settings.environment() | {"PYTHONPATH": _path()}


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.resize", description=__doc__)
    parser.add_argument(
        "--models", default="10m,tiny", help=f"comma-separated: {', '.join(job.WIDTHS)} (default: both)"
    )
    parser.add_argument("--cycles", type=int, default=5, help="repetitions of every change (default: 5)")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    chosen = parser.parse_args()
    console, progress = Console(width=WIDTH), Progress()
    machine.introduce(
        console, versions(Path(sys.executable), ["torch", "holdfast-train"]), "gloo on loopback"
    )
    table = Table(title=f"{chosen.cycles} of each change", box=box.SIMPLE_HEAD, width=WIDTH)
    for name in (
        "system",
        "change",
        "stall, ms",
        "median step, ms",
        "transfer, ms",
        "within step + transfer",
    ):
        table.add_column(name, justify="left" if name in ("system", "change") else "right")
    done, cpu = True, machine.ForeignCpu()
    with stop_signals(), cpu, Children() as children:
        for model in chosen.models.split(","):
            with tempfile.TemporaryDirectory(prefix="bench-resize-") as scratch, children.group() as group:
                try:
                    found, report = holdfast(Path(scratch), group, model, chosen.cycles, progress)
                except Failed as error:
                    done = bool(console.print(str(error), style="red"))
                    continue
            step_s = report["steps"]["median_s"]
            moved = [c["restore_s"] for c in report["changes"] if c["restore_s"] is not None]
            for kind, stalls in found.items():
                transfer_s = 0.0 if kind.startswith("shrink") else statistics.median(moved)
                within = sum(s <= step_s + transfer_s for s in stalls)
                table.add_row(
                    f"Holdfast level 2, {model}",
                    kind,
                    _cell(spread(stalls)),
                    f"{step_s * 1e3:.1f}",
                    f"{transfer_s * 1e3:.0f}",
                    f"{within} of {len(stalls)}",
                )
        if chosen.peers:
            with tempfile.TemporaryDirectory(prefix="bench-resize-") as scratch, children.group() as group:
                try:
                    for kind, stalls in torchrun(Path(scratch), group, chosen.cycles, progress).items():
                        table.add_row("torchrun --nnodes 1:2, 10m", kind, _cell(spread(stalls)))
                except Failed as error:
                    done = bool(console.print(str(error), style="red"))
    console.print(table)
    machine.conclude(console, cpu)
    return 0 if done else 1


def _cell(found: Spread | None) -> str:
    assert found is not None
    return f"{found.median * 1e3:.0f} ({found.low * 1e3:.0f}–{found.high * 1e3:.0f})"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
