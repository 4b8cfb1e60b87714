"""A job whose workers share one GPU, killed one by one: what stays, how long it takes, and whether a bit changes."""

from __future__ import annotations

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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.processes import Group
from bench.progress import Progress
from bench.recovery.environments import ROOT
from bench.recovery.systems.base import worker_environment
from holdfast.engines.client import JobClient
from holdfast.protocol.machine.processes import python_module
from holdfast.train import gloo_group

SCRIPT = Path(__file__).with_name("train.py")
CALM_STEPS = 10
LIMIT_S = 180.0

Line = dict[str, Any]


class Failed(Exception):
    """What was to be measured did not come. The message is for the user."""


@dataclass(frozen=True)
class Shape:
    """A job: replicas x shards."""

    name: str
    replicas: int
    shard: int = 1

    @property
    def workers(self) -> int:
        return self.replicas * self.shard


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how the jobs of one call run."""

    device: str
    """`cuda` or `cpu`."""
    width: int
    """Of the model's layers."""
    groups: str = "auto"
    """`nccl`: over NCCL, which takes the workers that share the GPU for as many machines."""
    keep: Path | None = None
    """Where the jobs' folders stay."""


@dataclass(kw_only=True)
class Outcome:
    """What the faults did. Times in seconds, one for each fault."""

    step_s: float = 0.0
    stall_s: list[float] = field(default_factory=list)
    full_s: list[float] = field(default_factory=list)
    survivors: int = 0
    kept: int = 0
    """Of them: process, CUDA context, and a tensor's place and content are what they were."""
    steps: int = 0
    equal: int = 0
    """Steps whose loss has the bits that it has without a fault."""


def environment(device: str) -> dict[str, str]:
    """Of jobs here, beside every worker's. device: `cuda` or `cpu`."""
    # A machine that is lent for an hour has its packages where PYTHONPATH says.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **hidden}


def measure(shape: Shape, faults: int, setting: Setting, group: Group, progress: Progress) -> Outcome:
    """Kills workers of a job, then runs another one undisturbed for as many steps."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        folder = setting.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        job = _Job(folder, "faults", shape, setting, progress)
        job.start(group, spares=1)
        kills = [job.kill() for _ in range(faults)]
        job.stop()
        lines = job.read()
        found = judge(lines, kills, shape.workers)
        still = _Job(folder, "undisturbed", shape, setting, progress)
        still.start(group, until=found.steps)
        still.wait()
        right = {line["step"]: line["loss"] for line in still.read()}
    found.equal = sum(right.get(step) == loss for step, loss in _losses(lines).items())
    return found


def judge(lines: Sequence[Line], kills: Sequence[tuple[float, int]], world: int) -> Outcome:
    """What a job's lines say about its faults. kills: when, and which pid."""
    found = Outcome(steps=len(_losses(lines)))
    taken: dict[tuple[int, int], list[float]] = defaultdict(list)
    for line in lines:
        taken[line["gen"], line["pid"]].append(line["t"])
    found.step_s = statistics.median(
        b - a for ts in taken.values() for a, b in itertools.pairwise(sorted(ts))
    )
    for at, pid in kills:
        before = [line for line in lines if line["t"] <= at and line["t"] > at - LIMIT_S]
        gen = max(line["gen"] for line in before if line["pid"] == pid)
        after = [line for line in lines if line["gen"] > gen]
        found.stall_s.append(min(line["t"] for line in after) - at)
        found.full_s.append(min(line["t"] for line in after if line["world"] == world) - at)
        for other in {line["pid"] for line in before if line["gen"] == gen} - {pid}:
            found.survivors += 1
            states = [
                (line["context"], *line["mark"])
                for line in lines
                if line["pid"] == other and line["gen"] >= gen
            ]
            goes_on = any(line["pid"] == other for line in after)
            found.kept += goes_on and len(set(states)) == 1
    return found


def _losses(lines: Sequence[Line]) -> dict[int, str]:
    """Of every step; all workers say the same, or the step has none that is right."""
    losses: dict[int, str] = {}
    for line in lines:
        if losses.setdefault(line["step"], line["loss"]) != line["loss"]:
            losses[line["step"]] = "workers differ"
    return losses


class _Job:
    def __init__(self, folder: Path, name: str, shape: Shape, setting: Setting, progress: Progress) -> None:
        self._folder, self._name, self._shape, self._setting = folder, name, shape, setting
        self._progress = progress
        self._log = folder / f"{name}.jsonl"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, group: Group, spares: int = 0, until: int | None = None) -> None:
        env = worker_environment(sys.executable) | environment(self._setting.device)
        env["HOLDFAST_HOME"] = str(self._folder)
        if self._setting.groups != "auto":
            env[gloo_group.GPU_GROUPS] = self._setting.groups
        if self._setting.groups == "nccl":
            env["NCCL_SOCKET_IFNAME"] = "lo"
        least = self._shape.shard * max(1, self._shape.replicas - 1)
        argv = python_module("holdfast.cli", "run", "--job", self._name, "--no-ui")
        argv += ["--nnodes", f"{least}:{self._shape.workers}", "--spares", str(spares), str(SCRIPT)]
        argv += [
            "--log",
            str(self._log),
            "--shard",
            str(self._shape.shard),
            "--width",
            str(self._setting.width),
        ]
        argv += ["--until", str(until)] if until is not None else []
        self._process = group.spawn(argv, env, self._folder / f"{self._name}.log")

    def read(self) -> list[Line]:
        text = self._log.read_text() if self._log.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def kill(self) -> tuple[float, int]:
        """SIGKILL to one worker of a job that is calm and has a spare, and waits until it is whole again."""
        world = self._shape.workers
        lines = self._until(self._is_calm, "steps at full strength")
        self._wait_for_spare()
        newest = max(line["gen"] for line in lines)
        pid = max(
            (line for line in lines if line["gen"] == newest and line["rank"] == 1), key=lambda x: x["t"]
        )["pid"]
        gen = max(line["gen"] for line in self.read())
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self._until(
            lambda found: any(line["gen"] > gen and line["world"] == world for line in found), "recovery"
        )
        return at, pid

    def _is_calm(self, lines: list[Line]) -> bool:
        newest = max((line["gen"] for line in lines), default=0)
        last = [line for line in lines if line["gen"] == newest and line["world"] == self._shape.workers]
        return len(last) >= CALM_STEPS * self._shape.workers

    def _until(self, holds: Any, what: str) -> list[Line]:
        deadline = time.monotonic() + LIMIT_S
        while not holds(lines := self.read()):
            if time.monotonic() > deadline:
                raise Failed(f"{self._shape.name}: no {what} within {LIMIT_S:.0f} s\n{self._tail()}")
            if self._process is not None and self._process.poll() is not None:
                raise Failed(f"{self._shape.name}: the job ended before {what}\n{self._tail()}")
            self._progress(f"{self._shape.name}, {self._name}: {what}")
            time.sleep(0.02)
        return lines

    def _wait_for_spare(self) -> None:
        async def wait() -> None:
            async with JobClient(self._folder / "jobs" / self._name) as client:
                async for said in client.watch():
                    if said.kind == "status" and any(w.state == "ready" for w in said.value.workers):
                        return

        asyncio.run(asyncio.wait_for(wait(), LIMIT_S))

    def stop(self) -> None:
        async def post() -> None:
            async with JobClient(self._folder / "jobs" / self._name) as client:
                await client.post("/stop?reason=done")

        self._until(self._is_calm, "steps after the last recovery")
        asyncio.run(post())
        self.wait()

    def wait(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self._shape.name}: the job does not end\n{self._tail()}") from None

    def _tail(self) -> str:
        log = self._folder / f"{self._name}.log"
        return log.read_text()[-2000:] if log.exists() else ""
