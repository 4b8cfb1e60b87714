"""The exact reduction with real processes: one curve, bit by bit, in every world and through changes of it."""

import os
import re
import signal
import subprocess
import sys

import pytest
from harness import HERE, finish, run, start, wait_for

SCRIPT = HERE / "train_exact.py"
STEPS = 60


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], str]:
    """Losses and digest of the parameters of a job of one under plain python, with no word about threads."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, SCRIPT, str(STEPS)], env=env, capture_output=True, text=True, check=True, timeout=100
    )
    losses = [float.fromhex(word) for word in re.findall(r"^LOSS \d+ (\S+)$", done.stdout, re.MULTILINE)]
    (digest,) = re.findall(r"PARAMS (\w+)", done.stdout)
    assert len(losses) == STEPS
    return losses, digest


@pytest.mark.parametrize("nodes", [1, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 3))])
def test_every_world_has_the_curve_of_one_worker(tmp_path, alone, nodes):
    ran = run(tmp_path, "--nnodes", nodes, SCRIPT, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert (ran.losses(), ran.report["final"]["params_xxh3"]) == alone


@pytest.mark.nightly  # test_exact_elastic has it, among other things
def test_going_on_smaller_and_growing_again_changes_no_bit(tmp_path, alone):
    ran = run(tmp_path, "--nnodes", "1:3", "--fault", "kill-node:rank=1,step=10", SCRIPT, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert [n for _, n in ran.report["world"]["history"]][:2] == [3, 2]
    assert (ran.losses(), ran.report["final"]["params_xxh3"]) == alone


def interrupted(home) -> int:
    """A job that was asked to stop, and wrote its state; how many steps it has committed."""
    process = start(home, "--nnodes", 2, "--fault", "stop-worker:rank=0,step=10", SCRIPT, STEPS)
    wait_for(process, "injecting")
    process.send_signal(signal.SIGINT)
    stopped = finish(process, home)
    assert stopped.report["outcome"] == "stopped", stopped.output
    return stopped.report["steps"]["committed"]


@pytest.mark.long
def test_a_state_that_does_not_fit_is_refused_or_follows_its_rule(tmp_path, monkeypatch):
    """Of another number of threads, of another global batch; a refused start leaves it as it was."""
    done = interrupted(tmp_path)
    with monkeypatch.context() as changed:
        changed.setenv("OMP_NUM_THREADS", "2")
        refused = run(tmp_path, "--nnodes", 2, SCRIPT, done + 5)
        assert refused.code == 1
        assert "OMP_NUM_THREADS" in refused.output
    refused = run(tmp_path, "--nnodes", 2, SCRIPT, done + 5, 44)
    assert refused.code == 1
    assert "was saved with 22" in refused.output
    assert "batch_changed" in refused.output
    told = run(tmp_path, "--nnodes", 2, SCRIPT, done + 5, 44, "linear")
    assert told.code == 0, told.output[-3000:]
    assert told.steps() == list(range(done, done + 5))
    log = "".join(path.read_text() for path in told.job_dir.rglob("*.log"))
    samples = done * 22 + 5 * 44
    rate = 1e-2 * 2 * min(1.0, (samples + 64) / 512)
    said = {int(s): float(r) for r, s in re.findall(r"RATE (\S+) SAMPLES (\d+)", log)}
    assert said[samples] == pytest.approx(rate)
