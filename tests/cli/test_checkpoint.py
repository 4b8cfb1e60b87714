"""`holdfast checkpoint` on what a job has saved."""

import json

import pytest
import torch

from holdfast.checkpoint.policy import Retention
from holdfast.engines.jobs import JobFolder
from holdfast.protocol.job import JobSpec
from holdfast.protocol.snapshots import DurableTier, Saving
from holdfast.train import durable, state


def spec(folder):
    tier = DurableTier(str(folder.path / "checkpoint"))
    return JobSpec("done", "train.py", saving=Saving(tiers=(tier,)))


def row_of(folder):
    """The file that holds a checkpoint's bytes."""
    return next(folder.glob("*.bin"))


@pytest.fixture
def saved(home):
    """A job with two checkpoints."""
    folder = JobFolder("done")
    folder.prepare(spec(folder))
    for step in (4, 8):
        image = state.capture({"net": torch.nn.Linear(3, 2)}, step)
        durable.save(image, str(folder.path / "checkpoint"), Retention())
    folder.close()
    return folder.path / "checkpoint"


def test_ls(holdfast, saved):
    said = holdfast("checkpoint", "ls")
    assert said.code == 0
    assert [line.split()[:4] for line in said.out.splitlines()[1:]] == [
        ["4", "32", "B", "1"],
        ["8", "32", "B", "1"],
    ]
    told = json.loads(holdfast("checkpoint", "ls", str(saved), "--json").out)
    assert [(r["step"], r["bytes"]) for r in told] == [(4, 32), (8, 32)]


def test_show(holdfast, saved):
    said = holdfast("checkpoint", "show", "--job", "done")
    assert "step 8: 2 tensors of 1 rank, 32 B" in said.out
    assert [line.split()[1:4] for line in said.out.splitlines()[2:]] == [
        ["net.weight", "float32", "2x3"],
        ["net.bias", "float32", "2"],
    ]


def test_verify(holdfast, saved):
    assert holdfast("checkpoint", "verify").out == "step 4: whole\nstep 8: whole\n"
    data = row_of(saved / "step-8")
    data.write_bytes(b"x" + data.read_bytes()[1:])
    said = holdfast("checkpoint", "verify")
    assert said.code == 1
    assert "step 4: whole\n" in said.out
    assert "step 8: NOT WHOLE" in said.out
    assert "net.weight" in said.out
    assert holdfast("checkpoint", "verify", str(saved / "step-4")).code == 0


def test_the_next_start_takes_the_older_whole_one(home, saved):
    row_of(saved / "step-8").write_bytes(b"")
    folder = JobFolder("done")
    notes = []
    durable_found = folder.prepare(spec(folder), notes.append)
    folder.close()
    assert durable_found is not None
    assert durable_found.step == 4
    assert len(notes) == 1
    assert "step-8" in notes[0]
    assert "cut short" in notes[0]


@pytest.mark.parametrize("what", ["ls", "show", "verify"])
def test_nothing_is_there(holdfast, saved, tmp_path, what):
    said = holdfast("checkpoint", what, str(tmp_path / "nowhere"))
    assert said.code == 2
    assert "is no folder" in said.err
    said = holdfast("checkpoint", what, str(tmp_path))
    assert said.code == 2
    assert "no checkpoint is in" in said.err


def test_prune(holdfast, saved):
    said = holdfast("checkpoint", "prune", "--keep", "1")
    assert said.out.strip().endswith("1 checkpoint removed: 4")
    assert [d.name for d in saved.iterdir()] == ["step-8"]
    assert holdfast("checkpoint", "prune", str(saved / "step-8")).code == 2
