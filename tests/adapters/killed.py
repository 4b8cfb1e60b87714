"""Trainings at level 1 that end without an end, and are started again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ends import LIMIT_S, ends
from gate import GATE, KILLED_AT, Gate
from harness import finish, run, start


def train(script: Path, folder: Path, *arguments: object) -> int:
    """By one process without a job, whose snapshots go to its folder. Its exit code: scripts end themselves with 9 at the
    step that they are given."""
    folder.mkdir(exist_ok=True)
    env = dict(os.environ, OMP_NUM_THREADS="1", HOLDFAST_CHECKPOINT=f"{folder / 'saved'},every=1,keep=1")
    command = [sys.executable, script, folder, *arguments]
    return subprocess.run([*map(str, command)], env=env, capture_output=True, timeout=LIMIT_S).returncode


def killed_and_gone_on(script: Path, folder: Path, step: int, *arguments: object) -> list[dict]:
    """The ends of a training that ended itself at a step, without an end, and was started again."""
    assert train(script, folder, step, *arguments) == 9
    assert not ends(folder)
    assert train(script, folder, 0, *arguments) == 0
    return ends(folder)


def two_ranks(
    home: Path, monkeypatch: pytest.MonkeyPatch, script: Path, *arguments: object
) -> tuple[list[dict], list[dict], str]:
    """The ends of two ranks that nobody disturbed; of two, one of which was killed after a snapshot; and the latter's output."""
    calm, killed = home / "undisturbed", home / "killed"
    calm.mkdir()
    killed.mkdir()
    ran = run(calm, "--nnodes", 2, script, calm, *arguments, timeout=LIMIT_S)
    assert ran.code == 0, ran.output
    assert not ran.report["incidents"]
    gate = Gate(home / "gate")
    monkeypatch.setenv(GATE, str(home / "gate"))
    # The rank that waits is no hang: by default a standstill is found after a multiple of a step's time.
    options = ("--nnodes", 2, "--detection", 600, "--fault", f"kill-worker:rank=1,step={KILLED_AT}")
    process = start(killed, *options, script, killed, *arguments)
    gate.open_when_saved(process.pid, killed / "jobs" / "job", LIMIT_S)
    again = finish(process, killed, timeout=LIMIT_S)
    assert again.code == 0, again.output
    assert len(again.report["incidents"]) == 1
    assert len(ends(calm)) == 2
    return ends(calm), ends(killed), again.output
