"""Runs `holdfast run` for real and looks at what it leaves: report, ledger, processes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import tempfile
import termios
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pytest

import preloaded
from holdfast.coordinator.service.store import Store

HERE = Path(__file__).parent
TINY = HERE / "train_tiny.py"
TIERS = HERE / "train_tiers.py"

_started: list[subprocess.Popen[str]] = []
"""Launchers of the test that runs now."""


@dataclass
class Ran:
    """One run of the launcher that has ended."""

    code: int
    output: str
    report: dict
    job_dir: Path

    def losses(self) -> list[float]:
        store = Store(self.job_dir / "job.sqlite", read_only=True)
        try:
            return [s.loss for s in store.steps()]
        finally:
            store.close()

    def steps(self) -> list[int]:
        store = Store(self.job_dir / "job.sqlite", read_only=True)
        try:
            return [s.step for s in store.steps()]
        finally:
            store.close()

    def kinds(self) -> list[str]:
        store = Store(self.job_dir / "job.sqlite", read_only=True)
        try:
            return [e.kind for e in store.events()]
        finally:
            store.close()

    def fields(self, kind: str) -> list[dict]:
        store = Store(self.job_dir / "job.sqlite", read_only=True)
        try:
            return [e.fields for e in store.events() if e.kind == kind]
        finally:
            store.close()


def start(
    home: Path, *args: object, job: str = "job", preload: str = preloaded.MODULES, terminal: int | None = None
) -> subprocess.Popen[str]:
    """Starts the launcher; its report goes to HOME/JOB.json. preload: what warm processes import, once for all such jobs.
    terminal: on which it runs, instead of a pipe; it is closed here."""
    env = dict(os.environ, HOLDFAST_HOME=str(home))
    command = [*preloaded.launcher(preload), "run", "--job", job, "--no-ui"]
    command += [] if preload == preloaded.MODULES else ["--preload", preload]
    command += ["--report", str(home / f"{job}.json"), *map(str, args)]
    out, take = subprocess.PIPE, None
    if terminal is not None:
        out, take = terminal, partial(_take, terminal)
    process = subprocess.Popen(
        command,
        env=env,
        stdout=out,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=take,
    )
    if terminal is not None:
        os.close(terminal)
    _started.append(process)
    return process


def _take(terminal: int) -> None:
    """In the new process: the terminal is its own, and its end is heard of, also where the tests run under nohup."""
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_for(process: subprocess.Popen[str], *texts: str) -> None:
    """Reads the launcher's lines until every text was in one, in whatever order."""
    seen, missing = [], set(texts)
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        missing -= {text for text in missing if text in line}
        if not missing:
            return
    raise AssertionError(f"{sorted(missing)} never came:\n{''.join(seen)[-3000:]}")


def finish(process: subprocess.Popen[str], home: Path, job: str = "job", timeout: float = 100) -> Ran:
    """Waits for the launcher's end and checks that nothing of the job is left."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        end_leftovers(home)  # one that is stopped would hold the pipe for ever
        output, _ = process.communicate()
        raise AssertionError(f"the job did not end within {timeout} s:\n{output[-6000:]}") from None
    return ended(process, home, job, output or "")  # None: it had a terminal


def ended(process: subprocess.Popen[str], home: Path, job: str, output: str) -> Ran:
    """What a launcher that has ended leaves: nothing that runs."""
    report = home / f"{job}.json"
    job_dir = home / "jobs" / job
    left = leftovers(home)
    if left:
        end_leftovers(home)
    assert not left, f"left behind: {left}\n{output[-3000:]}"
    ran = Ran(process.returncode, output, json.loads(report.read_text()) if report.exists() else {}, job_dir)
    if ran.report and ran.report["outcome"] != "killed":  # then the launcher writes it, who counted nothing
        adds_up(ran.report["goodput"])
    return ran


def adds_up(goodput: dict) -> None:
    """Every second of the wall time is in exactly one class, and of a job that tells of its steps nearly all is explained."""
    assert abs(sum(goodput["classes"].values()) - goodput["wall_s"]) < 1e-3, goodput
    if goodput["computed_s"]:
        assert goodput["classes"].get("unexplained", 0.0) <= 0.01 * goodput["wall_s"], goodput


def run(
    home: Path, *args: object, job: str = "job", timeout: float = 100, preload: str = preloaded.MODULES
) -> Ran:
    """One job from start to end."""
    return finish(start(home, *args, job=job, preload=preload), home, job, timeout)


def leftovers(home: Path) -> dict[int, str]:
    """Processes that belong to jobs below `home`: its path is in their environment."""
    mark = f"HOLDFAST_HOME={home}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if command:
                        found[int(entry.name)] = command
            except OSError:
                continue
    return found


def agents(home: Path) -> dict[str, int]:
    """The processes of the nodes, by name."""
    found = {}
    for pid, command in leftovers(home).items():
        if node := re.search(r"holdfast\.agent .*--node=(\w+) ", command):
            found[node[1]] = pid
    return found


def held(home: Path, *but: int) -> list[int]:
    """Pidfds of the processes that belong to jobs below `home`; some of them live for a moment only."""
    fds = []
    for pid in leftovers(home):
        if pid not in but:
            try:
                fds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                continue
    return fds


def shared(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Ran]) -> Ran:
    """What `make` returns for a folder that it has to itself; made once for all processes of this test run."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    done = root / f"{name}.json"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            ran = make(Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root)))
            assert ran.code == 0, ran.output[-3000:]
            done.write_bytes(msgspec.json.encode(ran, enc_hook=str))
        return msgspec.json.decode(done.read_bytes(), type=Ran, dec_hook=lambda kind, value: kind(value))


def end_started() -> None:
    """Ends the launchers that a failed test left, and closes their pipes."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def end_leftovers(home: Path) -> None:
    """Ends what a failed test left."""
    for pid in leftovers(home):
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
