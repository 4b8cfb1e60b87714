"""Jobs on a real Slurm of six nodes, each a machine of its own as far as it can tell: see cluster.sh.

`make slurm-test` starts it. Figures are printed: how long a job took from the fault until it trained again.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from realslurm import (
    NODES,
    STEPS,
    TRAIN,
    USER,
    Job,
    as_user,
    cluster,
    configured,
    events,
    hurry,
    members,
    on_node,
    open_to_others,
    paced,
    slurm,
    state,
    told,
    until,
)

from holdfast.engines.jobs import EXIT_STOPPED
from holdfast.engines.slurm.engine import TIME_LIMIT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


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
        until(lambda: "down" in state(victim), "Slurm knows")
        assert "holdfast lost" in slurm("sinfo", "-h", "-n", victim, "-p", "train", "-o", "%E")

        status = job.training(3, spares=1)  # a node from a follow-up allocation is the spare now
        drained = next(n for n in members(status) if n != head)
        slurm("scontrol", "update", f"nodename={drained}", "state=drain", "reason=fan")
        left = job.event("node-left", node=drained)
        assert "Slurm drains the node: fan" in left["fields"]["reason"]
        until(
            lambda: state(drained) in ("draining", "drained"),
            "drained",
        )

        job.training(3, spares=0)
        cluster("kill", head)  # the batch script and the coordinator die with it
        status = job.training(3, beyond=status.step + 40)
        assert job.coordinator != head
        hurry(job)
        assert job.wait(120) == 0
    report = job.report()
    told("lost", report)
    assert report["outcome"] == "finished"
    assert job.losses() == undisturbed
    until(lambda: not slurm("squeue", "-h"), "nothing is left in the queue")


def test_a_job_that_makes_room_is_queued_again_and_goes_on(home: Path, undisturbed: list[float]) -> None:
    with Job(home, "room", "--nnodes", 3, "--requeue", TRAIN, *paced(home, "room")) as job:
        before = job.training(3, beyond=40)
        slurm(
            "sbatch", "--partition=urgent", "--nodes=6", "--exclusive", "--wrap=sleep 1", "--output=/dev/null"
        )
        until(lambda: (job.dir / "report.json").exists(), "it stopped")
        stopped = job.report()
        assert stopped["outcome"] == "stopped"
        assert (stopped["cause"], stopped["reason"]) == ("preemption", "Slurm ends the whole allocation")
        assert stopped["saved"]["step"] >= before.step
        until(lambda: (job.dir / "runs" / "1" / "report.json").exists(), "it begins again")
        status = job.training(3, beyond=stopped["steps"]["committed"])
        # They read their state from disk, and have it.
        assert {row.state for row in status.workers} == {"member"}
        hurry(job)
        assert job.wait(100) == 0
    assert job.report()["outcome"] == "finished"
    assert job.losses() == undisturbed[-len(job.losses()) :]
    assert len(job.losses()) + stopped["saved"]["step"] == STEPS


def test_the_time_limit_is_an_end_in_order(home: Path) -> None:
    args = ["--partition", "short", "--time", 2, "--stop-before", 55, TRAIN, *paced(home, "limit")]
    with Job(home, "limit", "--nnodes", 2, *args) as job:
        job.training(2)
        # What follows it by `&&`, or by Slurm's `afterok`, must not take half a training for a whole one.
        assert job.wait(100) == EXIT_STOPPED
    report = job.report()
    assert report["outcome"] == "stopped"
    assert (report["cause"], report["reason"]) == ("time-limit", TIME_LIMIT)
    assert report["saved"]["step"] == report["steps"]["committed"]
    said = " ".join(job.log.read_text().split())
    saved = f"Step {report['saved']['step']} is saved: the same command with --job limit continues from it."
    assert said.endswith(f"what now {saved}")
    # Its nodes have done what they were to do.
    assert "is lost" not in said


def test_a_node_cut_off_fences_itself(home: Path, undisturbed: list[float]) -> None:
    with Job(
        home, "cut", "--nnodes", 3, "--spares", 1, "--wait-for-spare", TRAIN, *paced(home, "cut")
    ) as job:
        status = job.training(3, spares=1)
        head = job.coordinator
        victim = next(n for n in members(status) if n != head)
        cluster("cut", victim)
        lost = job.event("node-lost", node=victim)
        closed = job.event("incident-closed", lost["seq"])
        job.event("node-taken", lost["seq"], node=victim)
        cluster("heal", victim)
        until(lambda: not on_node(victim, "holdfast.agent"), "its agent and workers are gone")
        assert not any(
            e["seq"] > closed["seq"] and e["fields"].get("node") == victim for e in events(job, "node-joined")
        )

        status = job.training(3, beyond=status.step)
        cluster("cut", head)  # the coordinator's: most nodes miss it, so one of them takes over
        until(lambda: job.coordinator != head, "another has the coordinator")
        cluster("heal", head)  # what lives there is turned away, or comes back as a new node
        status = job.training(3, beyond=status.step + 20)
        assert job.coordinator != head
        hurry(job)
        assert job.wait(100) == 0
    told("cut", job.report())
    assert job.losses() == undisturbed


@pytest.mark.nightly
def test_a_batch_host_cut_off_for_long_comes_back(home: Path, undisturbed: list[float]) -> None:
    """Slurm ends the batch script there, and with it the job: it is queued again, and goes on."""
    args = ["--nnodes", 3, "--spares", 1, "--wait-for-spare", "--requeue", TRAIN, *paced(home, "back")]
    with configured(SlurmdTimeout=5), Job(home, "back", *args) as job:
        status = job.training(3, spares=1)
        head = job.coordinator
        cluster("cut", head)
        until(lambda: job.coordinator != head, "another has the coordinator")
        until(lambda: "down" in state(head), "Slurm gives it up")
        status = job.training(3, beyond=status.step)
        cluster("heal", head)
        until(lambda: (job.dir / "runs" / "1" / "report.json").exists(), "the job is queued again")
        stopped = json.loads((job.dir / "runs" / "1" / "report.json").read_text())
        assert stopped["outcome"] == "stopped"
        assert stopped["saved"]["step"] >= status.step
        job.training(3, beyond=stopped["steps"]["committed"])
        hurry(job)
        assert job.wait(100) == 0
    assert job.report()["outcome"] == "finished"
    assert job.losses() == undisturbed[-len(job.losses()) :]
    assert len(job.losses()) + stopped["saved"]["step"] == STEPS


@pytest.fixture
def users_home(home: Path):
    """Of an ordinary user, who can use Python on every node."""
    path = home.parent / "games"
    path.mkdir()
    shutil.chown(path, USER, USER)
    for node in NODES:
        open_to_others(node)
    yield path
    for node in NODES:
        cluster("kill", node)


def test_an_ordinary_user_has_everything_but_draining(users_home: Path, undisturbed: list[float]) -> None:
    args = ["--nnodes", 3, "--spares", 2, "--wait-for-spare", "--blast-radius", 1, TRAIN]
    login = as_user("n6", users_home)
    with Job(users_home, "mine", *args, *paced(users_home, "mine"), login=login) as job:
        status = job.training(3, spares=2)
        head = job.coordinator
        sick = next(n for n in members(status) if n not in (head, "n6"))
        assert job.command("fault", "xid=79", f"node={sick}").returncode == 0
        left = job.event("node-lost", node=sick)
        job.event("incident-closed", left["seq"])
        until(lambda: f"{sick} is not drained in Slurm" in job.notes(), "it is said")
        assert "this job does not use it any more, but other jobs may" in job.notes()
        until(lambda: state(sick) == "idle", "Slurm has it")

        status = job.training(
            3, spares=2
        )  # one of them from a follow-up allocation, which is not the sick node
        assert sick not in {w.node for w in status.workers if w.state != "gone"}
        cluster("kill", head)
        status = job.training(3, beyond=status.step + 20)
        assert job.coordinator != head
        hurry(job)
        assert job.wait(100) == 0
    told("mine", job.report())
    assert job.losses() == undisturbed
    assert {p.owner() for p in job.dir.rglob("*")} == {USER}


def test_commands_from_elsewhere_and_a_submitter_that_dies(home: Path) -> None:
    with Job(home, "far", "--nnodes", 2, TRAIN, *paced(home, "far")) as job:
        job.training(2, beyond=5)
        job.process.send_signal(signal.SIGHUP)
        job.process.wait(10)
        shown = job.command("status", "--json")
        assert json.loads(shown.stdout)["world"] == 2
        assert {e["kind"] for e in events(job, "formed")} == {"formed"}
        assert "running" in job.command("report", "--json").stdout
        assert job.command("logs", "--rank", "0").returncode == 0
        stopped = job.command("stop")
        assert stopped.returncode == 0, stopped.stderr
        assert "stopped at step" in stopped.stdout
    until(lambda: not slurm("squeue", "-h"), "the queue is empty")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--partition", "nope"], "invalid partition specified: nope"),
        (["--nnodes", 40], "Requested node configuration is not available"),
        (["--partition", "short", "--time", 30], "the partition 'short' allows at most 2 minutes"),
        (["--time", 1], "60 s is too short"),
    ],
)
def test_what_slurm_would_never_run_is_refused(home: Path, args: list[object], said: str) -> None:
    with Job(home, "bad", *args, TRAIN, 5) as job:
        assert job.wait(30) == 2
    assert said in job.log.read_text()
    assert not job.dir.exists()
    assert not slurm("squeue", "-h")


def test_a_slurm_that_is_down_or_not_there(home: Path) -> None:
    cluster("slurmctld", "stop")
    try:
        with Job(home, "down", TRAIN, 5) as job:
            assert job.wait(60) == 2
    finally:
        cluster("slurmctld", "start")
    assert "Slurm refused the job: " in job.log.read_text()
    assert not job.dir.exists()
    until(lambda: "UP" in slurm("scontrol", "ping", check=False), "Slurm is back")
