"""From options to a job's specification."""

import os
import sys

import pytest

from holdfast.cli.spec import check_replay, parse_nnodes, parse_nproc, plan
from holdfast.engines.jobs import exit_code
from holdfast.engines.run_options import FailureOptions, NodeOptions, RunOptions
from holdfast.errors import UsageError
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_options import HealthSpec
from holdfast.protocol.snapshots import Saving
from reports import report_of


@pytest.mark.parametrize(("text", "both"), [("4", (4, 4)), ("2:4", (2, 4)), ("1:1", (1, 1))])
def test_nnodes(text, both):
    assert parse_nnodes(text) == both


@pytest.mark.parametrize("text", ["", "-1", "1:2:3", "2:", ":2", "1.5", "0:4"])
def test_nnodes_refused(text):
    with pytest.raises(UsageError, match="--nnodes"):
        parse_nnodes(text)


def test_nproc_like_torchrun():
    assert parse_nproc("3") == 3
    assert parse_nproc("cpu") == len(os.sched_getaffinity(0))
    assert parse_nproc("auto") >= 1


def test_a_whole_command_line(home, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = plan(
        RunOptions(
            script="train.py",
            args=("--lr", "1"),
            job="j",
            preload=" json, ,os ",
            nodes=NodeOptions(nnodes="2:4", nproc_per_node="2", spares=1),
            failures=FailureOptions(faults=("kill-node:node=4,step=3", "raise:rank=7")),
        )
    )
    assert (spec.min_nodes, spec.max_nodes, spec.nproc, spec.spares) == (2, 4, 2, 1)
    assert spec.script == "train.py"  # as it was given
    assert spec.args == ("--lr", "1")
    assert spec.preload == ("json", "os")
    assert [f.kind for f in spec.faults] == ["kill-node", "raise"]
    assert spec.target == 8
    assert not home.exists()


def test_without_a_name_one_is_made_from_the_script(home):
    assert plan(RunOptions(script="train.py")).name.startswith("train-")


def test_what_is_not_given_is_what_a_specification_has_by_default(home):
    """The defaults stand in two places, because a specification is also read from disk: they agree."""
    planned = plan(RunOptions(script="train.py", job="j"))
    tiers = planned.saving.tiers
    assert planned == JobSpec(
        name="j", script=planned.script, cwd=str(home.parent), saving=Saving(tiers=tiers)
    )


def test_a_share_of_steps_to_compute_twice():
    for text, workers, every in (("", 1, 0), ("1/1", 2, 1), ("1/1000", 2, 1000)):
        check_replay(text, workers)
        assert HealthSpec(replay=text).replay_every == every


@pytest.mark.parametrize(
    ("text", "workers"), [("1/0", 4), ("2/3", 4), ("0.1", 4), ("1/x", 4), ("1000", 4), ("1/10", 1)]
)
def test_a_share_that_means_nothing_is_refused(text, workers):
    with pytest.raises(UsageError, match="--replay"):
        check_replay(text, workers)


def test_srun_around_the_command_is_refused(holdfast, monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text("")
    for name, value in (("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "4")):
        monkeypatch.setenv(name, value)
    said = holdfast("run", "--dry-run", "--nnodes", "4", str(tmp_path / "train.py"))
    assert said.code == 2
    assert "srun starts this command 4 times" in said.err
    assert "--engine slurm" in said.err
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert holdfast("run", "--dry-run", str(tmp_path / "train.py")).code == 0


@pytest.mark.parametrize(
    ("report", "code"),
    [
        ({"outcome": "finished"}, 0),
        ({"outcome": "failed"}, 1),
        ({"outcome": "killed"}, 1),
        ({"outcome": None}, 1),
        ({}, 1),
        ({"outcome": "finished", "unsaved": 0}, 3),
        ({"outcome": "stopped", "unsaved": 7}, 3),
        ({"outcome": "stopped"}, 75),
        ({"outcome": "stopped", "unsaved": None}, 75),
        ({"outcome": "left"}, 130),
    ],
)
def test_exit_codes(report, code):
    assert exit_code(report_of(report)) == code
