"""Files of a running job's folder are gone: what its processes know they put back, and nobody healthy ends."""

import os
import shutil
import signal

import pytest
from harness import TINY, finish, start, wait_for

from holdfast.protocol.network.endpoint import read_endpoint

STEPS = 150
PUT_BACK = "token", "spec.json", "resume.json", "identity", "lock"


@pytest.mark.long
def test_whatever_is_deleted_the_job_trains_on(tmp_path, undisturbed):
    job_dir = tmp_path / "jobs" / "job"
    at = "kill-worker:rank=1,step=100"
    process = start(tmp_path, "--nnodes", 3, "--spares", 1, "--fault", at, TINY, STEPS, "--device-s", 0.05)
    wait_for(process, "generation 1:")
    pid = read_endpoint(job_dir).pid
    token = (job_dir / "token").read_bytes()
    for name in (*PUT_BACK, "coordinator.json"):
        (job_dir / name).unlink()
    shutil.rmtree(job_dir / "logs")
    wait_for(process, *(f"{name} was missing and has been restored" for name in PUT_BACK))
    assert (job_dir / "token").read_bytes() == token
    (job_dir / "token").unlink()
    os.kill(
        pid, signal.SIGKILL
    )  # the next one needs what was deleted, and so does a worker in the place of another
    ran = finish(process, tmp_path)
    assert ran.code == 0, ran.output[-3000:]
    assert "never retrieved" not in ran.output
    assert ran.losses() == undisturbed.losses()
    assert ran.report["final"] == undisturbed.report["final"]
    causes = sorted(i["cause"] for i in ran.report["incidents"])
    assert causes == ["killed by signal 9 (SIGKILL)", "the coordinator was lost"]


@pytest.mark.long
def test_a_job_without_its_lock_stays_one_job(tmp_path):
    process = start(tmp_path, "--nnodes", 2, TINY, 1_000_000, "--device-s", 0.02)
    wait_for(process, "generation 1:")
    (tmp_path / "jobs" / "job" / "lock").unlink()
    wait_for(process, "lock was missing and has been restored")
    other = start(tmp_path, "--nnodes", 2, TINY, 10)
    output, _ = other.communicate(timeout=60)
    assert other.returncode == 2
    assert "a job named 'job' is running" in output
    process.send_signal(signal.SIGINT)
    assert finish(process, tmp_path).report["outcome"] == "stopped"
