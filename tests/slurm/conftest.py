"""What all tests on the real Slurm have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from realslurm import STEPS, TRAIN, Job, mend


@pytest.fixture(scope="session")
def home() -> Path:
    """The shared folder."""
    if "HOLDFAST_SLURM_DIR" not in os.environ:
        pytest.skip("there is no Slurm: make slurm-test starts one")
    path = Path(os.environ["HOLDFAST_SLURM_DIR"]) / "shared" / f"home-{os.getpid()}"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def whole_cluster(request: pytest.FixtureRequest):
    yield
    if request.node.get_closest_marker("slurm") is not None:
        mend()


@pytest.fixture(scope="session")
def undisturbed(home: Path) -> list[float]:
    """The losses of the same training on one worker that nothing happens to."""
    env = dict(os.environ, HOLDFAST_HOME=str(home), OMP_NUM_THREADS="1")
    argv = [sys.executable, "-m", "holdfast.cli", "run", "--no-ui", "--job", "alone", TRAIN, STEPS]
    subprocess.run([*map(str, argv)], env=env, check=True, timeout=100, capture_output=True)
    job = Job.__new__(Job)
    job.dir = home / "jobs" / "alone"
    return job.losses()
