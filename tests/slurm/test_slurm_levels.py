"""Jobs at level 0 and 1 on a real Slurm: the loss of a node is a restart of all, a spare among them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from realslurm import ROOT, Job, cluster, members, told

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]
SCRIPTS = ROOT / "tests" / "faults"
STEPS = 150
PACE_S = 0.05
EVERY = 5


def run_and_lose_a_node(job: Job) -> None:
    """A node that trains loses its power when there is a state to go on from, and the spare gets a rank."""
    before = members(job.training(2, beyond=40))
    victim = next(n for n in before if n != job.coordinator)
    cluster("kill", victim)
    lost = job.event("node-lost", node=victim)
    job.event("incident-closed", lost["seq"])
    after = members(job.training(2))
    assert job.wait(90) == 0
    # One that tests before this one made a lemon is left out too, where there is another.
    assert len(set(after)) == 2
    assert victim not in after
    (incident,) = job.report()["incidents"]
    assert incident["node"] == victim
    told(job.name, job.report())


def test_a_torchrun_script_loses_a_node(home: Path) -> None:
    script = SCRIPTS / "train_ddp.py"
    args = ["--nnodes", 2, "--spares", 1, "--wait-for-spare", script, STEPS, home / "own.pt", PACE_S]
    with Job(home, "level0", *args) as job:
        run_and_lose_a_node(job)
    assert f"finished at {STEPS} as one of 2" in job.log.read_text()


def test_two_lines_of_checkpoints_and_a_node_is_lost(home: Path) -> None:
    script = SCRIPTS / "train_tiers.py"
    with Job(
        home, "level1", "--nnodes", 2, "--spares", 1, "--wait-for-spare", script, STEPS, EVERY, PACE_S
    ) as job:
        run_and_lose_a_node(job)
    said = "".join(p.read_text() for p in (job.dir / "logs").rglob("*.log"))
    begins = {(int(r), int(step)) for r, step in re.findall(r"rank (\d) begins at (\d+)", said)}
    (again,) = {step for _, step in begins} - {
        0
    }  # from memory: what the lost node had was on another one, too
    assert begins == {(0, 0), (1, 0), (0, again), (1, again)}
    for rank in (0, 1):
        sums = f"{float((rank + 1) * sum(range(STEPS)))!r} {(rank + 1) * STEPS}"
        assert re.search(rf"rank {rank} ends with \S+ {re.escape(sums)}", said)
