"""From options to a job's specification."""

import os
import sys

import pytest

from holdfast.cli.spec import Options, parse_nnodes, parse_nproc, plan
from holdfast.errors import UsageError


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
        Options(
            "train.py",
            ("--lr", "1"),
            nnodes="2:4",
            nproc_per_node="2",
            spares=1,
            job="j",
            preload=" json, ,os ",
            faults=("kill-node:node=4,step=3", "raise:rank=7"),
        )
    )
    assert (spec.min_nodes, spec.max_nodes, spec.nproc, spec.spares) == (2, 4, 2, 1)
    assert spec.script == str(home.parent / "train.py")
    assert spec.args == ("--lr", "1")
    assert spec.preload == ("json", "os")
    assert [f.kind for f in spec.faults] == ["kill-node", "raise"]
    assert spec.target == 8
    assert not home.exists()


def test_without_a_name_one_is_made_from_the_script(home):
    assert plan(Options("train.py")).name.startswith("train-")
