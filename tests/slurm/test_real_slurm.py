"""Jobs on a real Slurm of six nodes, each a machine of its own as far as it can tell: see cluster.sh.

`make slurm-test` starts it. Figures are printed: how long a job took from the fault until it trained again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from realslurm import Job, cluster, members, mend, slurm, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]
TRAIN = Path(__file__).parent / "train_paced.py"
STEPS = 1000
PACE_S = 0.05


@pytest.fixture(scope="session")
def home() -> Path:
    """The shared folder."""
    path = Path(os.environ["HOLDFAST_SLURM_DIR"]) / "shared" / f"home-{os.getpid()}"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def whole_cluster():
    yield
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


def paced(home: Path, name: str) -> list[object]:
    """Arguments of the script: slow until `hurry`."""
    return [STEPS, PACE_S, home / f"{name}.hurry"]


def hurry(job: Job) -> None:
    """The rest of the steps as fast as can be."""
    (job.home / f"{job.name}.hurry").touch()


def told(what: str, report: dict) -> None:
    """Prints what the incidents cost."""
    for i in report["incidents"]:
        print(
            f"\n{what}: {i['cause']}: detected after {i['detect_s']} s, training after {i['stall_s']} s, "
            f"at full strength after {i['full_strength_s']} s",
            end="",
        )


def test_nodes_lost_drained_and_the_coordinators_own(home: Path, undisturbed: list[float]) -> None:
    with Job(
        home, "lost", "--nnodes", 3, "--spares", 1, "--wait-for-spare", TRAIN, *paced(home, "lost")
    ) as job:
        status = job.training(3, spares=1)
        head = job.coordinator

        victim = next(n for n in members(status) if n != head)
        cluster("kill", victim)  # power loss: the spare in the allocation takes over
        lost = job.event("node-lost", node=victim)
        job.event("incident-closed", lost["seq"])
        until(lambda: "down" in slurm("sinfo", "-h", "-n", victim, "-p", "train", "-o", "%T"), "Slurm knows")
        assert "holdfast lost" in slurm("sinfo", "-h", "-n", victim, "-p", "train", "-o", "%E")

        status = job.training(3, spares=1)  # a node from a follow-up allocation is the spare now
        drained = next(n for n in members(status) if n != head)
        slurm("scontrol", "update", f"nodename={drained}", "state=drain", "reason=fan")
        left = job.event("node-left", node=drained)
        assert "Slurm drains it: fan" in left["fields"]["reason"]
        until(
            lambda: slurm("sinfo", "-h", "-n", drained, "-p", "train", "-o", "%T") in ("draining", "drained"),
            "drained",
        )

        job.training(3, spares=0)
        cluster("kill", head)  # the batch script and the coordinator die with it
        status = job.training(3, beyond=status["step"] + 40)
        assert job.coordinator != head
        hurry(job)
        assert job.wait(120) == 0
    report = job.report()
    told("lost", report)
    assert report["outcome"] == "finished"
    assert job.losses() == undisturbed
    until(lambda: not slurm("squeue", "-h"), "nothing is left in the queue")
