"""Runs one system: its steps next to plain DDP's, then one SIGKILL after the other."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.machine import ForeignCpu
from bench.processes import Children, descendants
from bench.progress import Progress
from bench.recovery import analyse
from bench.recovery.environments import ROOT
from bench.recovery.events import Commit, CommitReader, read_states
from bench.recovery.gate import OPEN, GateKeeper
from bench.recovery.settings import Settings
from bench.recovery.systems.base import Job, System
from bench.recovery.systems.torchrun import Plain

POLL_S = 0.03
"""How often the event log is read. No time that is reported depends on it."""
FAILED = "failed"
"""A file in the folder of a job that did not recover."""
AHEAD = 5
"""Steps from the newest commit to where a running job is asked to halt: more than any rank can be ahead."""
WINDOW = 300
"""Commits before a kill that are kept in view while its recovery is awaited."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, the same for every system."""

    replicas: int = 3
    shards: int = 1
    """Workers of one replica."""
    size: str = "10m"
    """Of the model."""
    faults: int = 5
    state_mb: float = 0.0
    blocks: int = 20
    """Pairs of blocks of steps, the system's and those of the same training without it; 0 to leave the comparison out."""
    block_steps: int = 5
    checkpoint_every: int = 10
    settle_steps: int = 20
    """Steps at full strength before a kill."""
    settle_s: float = 5.0
    """Seconds at full strength before a kill: time to get a new spare ready, for those who have one."""
    timeout_s: float = 90.0
    """For a recovery, and for a job to start."""
    calibration_steps: int = 50
    trainer: bool = False
    """The script is that of Hugging Face's Trainer, which keeps a folder of checkpoints."""
    seed: int = 0

    @property
    def workers(self) -> int:
        """Workers at full strength."""
        return self.replicas * self.shards


@dataclass(frozen=True)
class Bench:
    """What all runs of one benchmark share."""

    children: Children
    progress: Progress


class Failed(Exception):
    """The system did not do what was waited for. The message is for the table."""


@dataclass(kw_only=True)
class Measured:
    """Everything that was measured of one system."""

    name: str
    title: str
    note: str
    error: str | None = None
    recoveries: list[analyse.Recovery] = field(default_factory=list)
    failed_faults: list[str] = field(default_factory=list)
    """One line for every fault that the job did not get over."""
    step_s: list[float] = field(default_factory=list)
    """Seconds per step, by block."""
    plain_step_s: list[float] = field(default_factory=list)
    """Those of the same training without it (plain DDP's), in the block next to it."""
    full_step_s: list[float] = field(default_factory=list)
    """Seconds of a step at full strength with nothing else going on: the median of every job."""
    foreign_cpu: float = 0.0
    """Share of the machine that processes outside the benchmark took meanwhile."""

    def ratios(self) -> list[float]:
        return [ours / plain for ours, plain in zip(self.step_s, self.plain_step_s, strict=True)]

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"step_ratios": self.ratios()}


class Running:
    """A started job, seen through its event log."""

    def __init__(self, system: System, plan: Plan, job: Job, gate: GateKeeper, progress: Progress) -> None:
        self.system, self._plan, self._job, self._gate, self._progress = system, plan, job, gate, progress
        self._reader = CommitReader(Path(job.settings.events))
        self._killed: set[int] = set()

    @property
    def folder(self) -> Path:
        """Where its logs are."""
        return self._job.folder

    def close(self) -> None:
        self._reader.close()

    def commits(self) -> list[Commit]:
        return self._reader.read()

    def wait(self, done: Callable[[], bool], what: str, limit_s: float | None = None) -> None:
        """Wait until `done`. Raises Failed when it takes too long or the job has ended."""
        limit_s = limit_s or self._plan.timeout_s
        began = time.monotonic()
        while not done():
            ended = self._job.processes.first_exit(self._killed)
            if ended is not None:
                raise Failed(f"{what}: ended with {ended.returncode}{self._last_words()}")
            if time.monotonic() - began > limit_s:
                raise Failed(f"{what}: not within {limit_s:.0f} s{self._last_words()}")
            self._progress(f"{self.system.title}: {what}")
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        """The last line of the log that was written last, for an error."""
        logs = sorted(self._job.folder.glob("*.log"), key=lambda log: log.stat().st_mtime)
        for log in reversed(logs):
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if lines:
                return f" ({log.name}: {lines[-1].strip()[:160]})"
        return ""

    def settle(self, since: float, steps: int, seconds: float) -> None:
        """Wait for so many steps, and seconds, of full strength after the time `since`."""
        workers = self._plan.workers

        def settled() -> bool:
            recent = self.commits()[-20 * workers * max(steps, 1) :]
            done = [t for t in analyse.full_steps(recent, workers).values() if t > since]
            return len(done) >= steps and max(done, default=0.0) - since >= seconds

        self.wait(settled, "steady steps at full strength")

    def halt(self) -> int:
        """Bring all workers to rest before the same step, and return its number."""
        limit = max(c.step for c in self.commits()) + AHEAD
        self.let_run_to(limit)
        return limit

    def let_run_to(self, limit: int) -> None:
        """Let every step below `limit` run, and wait until all workers wait to begin `limit`."""
        self._gate.allow(limit)
        workers = self._plan.workers + self.system.workers_beside
        self.wait(lambda: self._gate.waiting(limit, workers), "a block of steps")

    def release(self) -> None:
        self._gate.allow(OPEN)

    def kill_one(self, choose: random.Random) -> analyse.Recovery:
        """SIGKILL one worker and wait until the job is whole again. Raises Failed if it does not become so."""
        before = len(self.commits())
        workers = analyse.participants(self.commits()[-WINDOW:], self._plan.workers)
        rank = choose.choice(sorted(rank for rank in workers if self.system.may_kill(rank)))
        pid = workers[rank]
        if pid not in set(descendants(os.getpid())):
            raise Failed(f"the worker of rank {rank} (pid {pid}) is gone without having been killed")
        self._killed.add(pid)
        struck = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
        fault = analyse.fault_of(self.commits(), pid, struck)
        first = max(0, before - WINDOW)

        def now() -> analyse.Recovery:
            return analyse.recovery(self.commits()[first:], fault, self._plan.workers)

        self.wait(lambda: now().complete, f"recovery from the death of rank {rank}")
        states = self._job.settings.states
        return analyse.with_bytes(now(), fault, read_states(Path(states))) if states else now()


@contextmanager
def running(system: System, plan: Plan, bench: Bench) -> Iterator[Running]:
    """Start a job of `system`; end all its processes afterwards, and remove its checkpoints."""
    folder = ROOT / "out" / "recovery" / system.name
    if (folder / FAILED).exists():
        # Why a job did not recover is in its logs alone. A repetition must not take them away.
        kept = folder.with_name(f"{folder.name}-failed")
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="bench-recovery-", dir=memory) as scratch,
        bench.children.group() as processes,
    ):
        settings = Settings(
            events=str(folder / "events.jsonl"),
            gate=f"{scratch}/gate",
            checkpoint=f"{scratch}/checkpoint"
            if plan.shards > 1 or plan.trainer
            else f"{scratch}/checkpoint.pt",
            checkpoint_every=plan.checkpoint_every if system.checkpoints else 0,
            state_mb=plan.state_mb,
            replicas=plan.replicas,
            shards=plan.shards,
            size=plan.size,
            states=str(folder / "states.jsonl") if plan.shards > 1 else "",
        )
        job = Job(settings, folder, processes)
        with closing(Running(system, plan, job, GateKeeper(Path(settings.gate)), bench.progress)) as seen:
            system.start(job)
            yield seen


def measure(system: System, plan: Plan, bench: Bench, result: Measured) -> None:
    """Measure one system into `result`, bit by bit. What goes wrong is in the result, not raised."""
    result.error = system.trouble()
    if result.error is None:
        cpu = ForeignCpu()
        with cpu:
            try:
                _measure(system, plan, result, bench)
            except (Failed, OSError) as error:
                result.error = str(error)
        result.foreign_cpu = cpu.share


def _measure(system: System, plan: Plan, result: Measured, bench: Bench) -> None:
    choose = random.Random(plan.seed)
    compare = plan.blocks > 0
    while len(result.recoveries) + len(result.failed_faults) < plan.faults or compare:
        with running(system, plan, bench) as job:
            job.settle(time.monotonic(), plan.settle_steps, 0.0)
            if compare:
                _compare_steps(job, plan, result, bench)
                compare = False
            _strike(job, plan, result, choose)
            result.full_step_s += analyse.typical_step_s(job.commits(), plan.workers)
        if len(result.failed_faults) >= 2 and not result.recoveries:
            raise Failed("no recovery: " + result.failed_faults[-1])


def _strike(job: Running, plan: Plan, result: Measured, choose: random.Random) -> None:
    """Kill and wait, as often as this job can take it or the plan asks."""
    left = plan.faults - len(result.recoveries) - len(result.failed_faults)
    for _ in range(min(left, job.system.faults_per_job or left)):
        # A system that goes on from a checkpoint is to have one.
        steps = max(plan.settle_steps, plan.checkpoint_every + 1 if job.system.checkpoints else 0)
        job.settle(time.monotonic(), steps, plan.settle_s)
        time.sleep(choose.uniform(0.0, 1.0))
        try:
            result.recoveries.append(job.kill_one(choose))
        except Failed as error:
            result.failed_faults.append(str(error))
            (job.folder / FAILED).touch()
            return


def _compare_steps(job: Running, plan: Plan, result: Measured, bench: Bench) -> None:
    """Steps of this job and of the same training without the system in turns, a block each."""
    plain_plan = Plan(replicas=plan.replicas, timeout_s=plan.timeout_s)
    first = job.halt()
    with running(job.system.unprotected() or Plain(job.system.python), plain_plan, bench) as plain:
        plain.settle(time.monotonic(), plan.settle_steps, 0.0)
        arms = [(job, first, result.step_s), (plain, plain.halt(), result.plain_step_s)]
        for block in range(plan.blocks):
            for arm, begun, times in arms if block % 2 else arms[::-1]:
                begin = begun + block * plan.block_steps
                arm.let_run_to(begin + plan.block_steps)
                times.append(analyse.block_step_s(arm.commits(), begin, begin + plan.block_steps))
    job.release()


def calibrate(plan: Plan, system: System, bench: Bench) -> tuple[float, float]:
    """Seconds of one plain step and of writing one checkpoint: medians of a short run of `system`."""
    every = 5
    plan = replace(plan, checkpoint_every=every)
    with running(system, plan, bench) as job:
        job.settle(time.monotonic(), plan.calibration_steps, 0.0)
        writer = [c for c in job.commits() if c.rank == 0][every:]
    after_save = analyse.spread(c.took_s for c in writer if c.step % every == 0)
    others = analyse.spread(c.took_s for c in writer if c.step % every)
    assert after_save is not None
    assert others is not None
    return others.median, max(0.0, after_save.median - others.median)
