"""Reading what Slurm 22.05 and 24.11 print: recorded on the test cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.engines.slurm import parse
from holdfast.engines.slurm.launcher import wants_requeue
from holdfast.protocol.notices import NoticeCause
from reports import report_of

SAID = Path(__file__).parent / "said"


def said(name: str) -> str:
    return (SAID / name).read_text()


@pytest.mark.parametrize("name", sorted(p.name for p in SAID.glob("*-nodes.*")))
def test_nodes_of_every_version_and_format(name: str) -> None:
    nodes = {n.name: n for n in parse.parse_nodes(said(name))}
    assert [n.address for n in nodes.values()] == ["10.77.0.11", "10.77.0.15", "10.77.0.16"]
    assert nodes["n1"].usable
    assert not nodes["n1"].going
    assert not nodes["n5"].usable
    assert not nodes["n5"].going
    assert nodes["n5"].reason == "holdfast a: silent"
    assert nodes["n6"].going
    assert nodes["n6"].reason == "gpu 3: Xid 79 (fell off)"


@pytest.mark.parametrize("name", sorted(p.name for p in SAID.glob("*-jobs.txt")))
def test_jobs_that_wait_and_run(name: str) -> None:
    waiting, running = parse.parse_jobs(said(name))
    assert waiting.state == "PENDING"
    assert "DOWN, DRAINED or reserved" in waiting.reason
    assert waiting.nodes == ""
    assert waiting.left_s == 3 * 86400
    assert running.state == "RUNNING"
    assert running.batch_host == "n1"
    assert running.nodes == "n[1-3]"
    assert running.left_s is not None
    assert 200 < running.left_s <= 300


@pytest.mark.parametrize("name", sorted(p.name for p in SAID.glob("*-steps.txt")))
def test_the_newest_step_of_a_name(name: str) -> None:
    steps = parse.parse_steps(said(name))
    job = steps["agent-n1"].partition(".")[0]
    assert steps == {"agent-n1": f"{job}.0", "batch": f"{job}.batch"}
    assert parse.parse_steps("7.2|agent-n1\n7.10|agent-n1\n7.9|agent-n1\n") == {"agent-n1": "7.10"}


def test_a_node_that_does_not_answer() -> None:
    (node,) = parse.parse_nodes(
        "NodeName=n1 NodeAddr=n1 State=DOWN*+DRAIN Reason=Not responding [slurm@2026-11-21]"
    )
    assert node.states == {"DOWN", "NOT_RESPONDING", "DRAIN"}
    assert not node.usable
    assert not node.going
    assert node.reason == "Not responding"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("4:00:00", 14400),
        ("2-0", 172800),
        ("1-12:30", 131400),
        ("364-23:59:57", 31535997),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_times(text: str, seconds: float | None) -> None:
    assert parse.parse_limit(text) == seconds


def test_errors_without_their_frame() -> None:
    text = (
        "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: ...\n"
    )
    assert parse.plain_error(text) == "invalid partition specified: nope"
    assert parse.plain_error("allocation failure: Requested node configuration is not available") == (
        "allocation failure: Requested node configuration is not available"
    )
    assert parse.parse_version("slurm-wlm 22.05.8") == (22, 5)
    assert parse.parse_config("KillWait                = 30 sec\nSlurmdPort = 6818\n")["KillWait"] == "30 sec"


def test_what_is_queued_again() -> None:
    def again(outcome: str, cause: NoticeCause | None) -> bool:
        return wants_requeue(report_of({"outcome": outcome, "cause": cause, "reason": "in whatever words"}))

    assert again("stopped", NoticeCause.TIME_LIMIT)
    assert again("stopped", NoticeCause.PREEMPTION)
    assert again("failed", NoticeCause.NODES)
    assert not again("stopped", NoticeCause.STOP)
    assert not again("stopped", NoticeCause.RESIZE)
    assert not again("failed", NoticeCause.FAILURE)
    # All steps were done as the time ran out.
    assert not again("finished", NoticeCause.TIME_LIMIT)
    # Nobody wrote a report; and words alone are no reason.
    assert not wants_requeue(report_of({"outcome": "killed", "reason": "stopped at once"}))
    assert not again("failed", None)
    person = "Slurm ends the job: the time limit: the whole allocation: too few workers"
    assert not wants_requeue(report_of({"outcome": "stopped", "cause": "stop", "reason": person}))
