"""A process of a job that breaks: its log has the reason."""

import subprocess
import sys

import pytest

from holdfast.engines.jobs import JobFolder
from holdfast.protocol.job import JobSpec


@pytest.fixture
def job_dir(tmp_path, monkeypatch):
    """The folder of a job that is about to start."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    folder = JobFolder("broken")
    folder.prepare(JobSpec(name="broken", script="train.py"))
    yield folder.path
    folder.close()


def log_of(job_dir, module, *arguments, log):
    ran = subprocess.run(
        [sys.executable, "-m", module, f"--job-dir={job_dir}", *arguments], capture_output=True, timeout=60
    )
    assert ran.returncode == 1
    return (job_dir / "logs" / log).read_text()


def test_of_a_coordinator(job_dir):
    text = log_of(job_dir, "holdfast.coordinator", "--listen-fd=999", log="coordinator.log")
    assert 'msg="the coordinator broke"' in text
    assert "Bad file descriptor" in text


def test_of_an_agent(job_dir):
    arguments = (
        "--node=n0",
        "--host=203.0.113.1",  # no machine has it: it is for documentation
        f"--memory={job_dir / 'memory'}",
        f"--log-file={job_dir / 'logs' / 'n0.log'}",
    )
    text = log_of(job_dir, "holdfast.agent", *arguments, log="n0.log")
    assert 'msg="the agent broke"' in text
    assert "Cannot assign requested address" in text
