"""What `run.log` is given is in the ledger, the status, the report and the metrics, once for every step."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Ran, run

from holdfast.coordinator.service.store import Store

LOGGING = Path(__file__).with_name("train_logging.py")
STEPS = 60


def figures(ran: Ran, name: str) -> list[tuple[int, float | None]]:
    store = Store(ran.job_dir / "job.sqlite", read_only=True)
    try:
        return store.figures(name)
    finally:
        store.close()


def holdfast(home: Path, *words: str) -> str:
    env = dict(os.environ, HOLDFAST_HOME=str(home))
    command = [sys.executable, "-m", "holdfast.cli", *words, "--job", "job"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.long
def test_what_a_script_logs_arrives_once_though_workers_and_the_coordinator_die(tmp_path):
    faults = ["--fault", "kill-worker:rank=0,step=20,phase=vote", "--fault", "kill-coordinator:step=35"]
    ran = run(tmp_path, "--nnodes", 2, "--spares", 1, *faults, LOGGING, STEPS, 0)
    assert ran.code == 0, ran.output[-3000:]
    twice = dict(figures(ran, "twice"))
    # The rank 0 that was killed had not told of its last milliseconds, and the others do not log.
    assert set(twice) >= set(range(21, STEPS))
    assert all(value == 2 * step for step, value in twice.items())
    assert {value for _, value in figures(ran, "rank")} == {0.0}
    assert [step for step, _ in figures(ran, "seldom")][-3:] == [30, 40, 50]
    assert {value for _, value in figures(ran, "not/finite")} == {None}
    newest = {
        "twice": {"step": STEPS - 1, "value": 2.0 * (STEPS - 1)},
        "rank": {"step": STEPS - 1, "value": 0.0},
        "seldom": {"step": 50, "value": 0.5},
        "not/finite": {"step": STEPS - 1, "value": None},
    }
    assert ran.report["figures"] == newest
    assert json.loads(holdfast(tmp_path, "status", "--json"))["figures"] == newest
    assert re.search(rf"logged +not/finite \S+ of step {STEPS - 1}, rank 0 of step", ran.output)
    assert f'holdfast_run_value{{name="twice"}} {2.0 * (STEPS - 1)}' in holdfast(tmp_path, "metrics")


def test_a_rank_0_that_is_killed_has_told_of_the_step_before(tmp_path):
    steps, kill = 12, "kill-worker:rank=0,step=7,phase=backward"
    ran = run(tmp_path, "--nnodes", 2, "--spares", 1, "--fault", kill, LOGGING, steps, 0.03)
    assert ran.code == 0, ran.output[-3000:]
    assert figures(ran, "twice") == [(step, 2.0 * step) for step in range(steps)]
    store = Store(ran.job_dir / "job.sqlite", read_only=True)
    try:
        rows, redone = store.steps(), store.redone()
    finally:
        store.close()
    assert {(row.weight, row.lr, row.skipped) for row in rows} == {(12.0, 0.01, False)}
    assert all(row.grad_norm is not None and row.grad_norm > 0 for row in rows)
    assert redone == []  # the step that was struck was committed once
