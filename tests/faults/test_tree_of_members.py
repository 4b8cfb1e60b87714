"""A job whose control channel is a tree: the same curve as in a mesh, also when a member between others dies in a vote."""

import pytest
from harness import TINY, Ran, run, shared

from holdfast.protocol.job import FAN_OUT_VARIABLE

STEPS = 40


@pytest.fixture(scope="module")
def mesh(tmp_path_factory) -> Ran:
    return shared(tmp_path_factory, "mesh", lambda home: run(home, "--nnodes", 4, TINY, STEPS))


@pytest.mark.parametrize("fan_out", [1, 2])
def test_a_tree_trains_what_a_mesh_trains(tmp_path, monkeypatch, mesh, fan_out):
    assert mesh.code == 0, mesh.output[-3000:]
    monkeypatch.setenv(FAN_OUT_VARIABLE, str(fan_out))
    ran = run(tmp_path, "--nnodes", 4, TINY, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert ran.report["incidents"] == []
    assert ran.losses() == mesh.losses()
    assert ran.report["final"] == mesh.report["final"]


@pytest.mark.parametrize(
    ("fan_out", "phase"),
    [
        (1, "vote"),
        *(pytest.param(k, p, marks=pytest.mark.long) for k, p in ((2, "vote"), (1, "update"), (1, "commit"))),
    ],
)
def test_a_member_between_others_that_dies_costs_no_bit(tmp_path, monkeypatch, mesh, fan_out, phase):
    """Before it has sent its vote; and after it has passed the result on, with its update made or not."""
    monkeypatch.setenv(FAN_OUT_VARIABLE, str(fan_out))
    fault = f"kill-worker:rank=1,phase={phase},step=15"
    ran = run(tmp_path, "--nnodes", 4, "--spares", 1, "--fault", fault, TINY, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert len(ran.report["incidents"]) == 1
    assert ran.losses() == mesh.losses()
    assert ran.report["final"] == mesh.report["final"]


def test_what_is_no_fan_out_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv(FAN_OUT_VARIABLE, "many")
    ran = run(tmp_path, "--nnodes", 2, TINY, STEPS)
    assert ran.code == 2
    assert f"{FAN_OUT_VARIABLE}='many': must be a whole number of 1 or more, for example 8" in ran.output
    assert not (tmp_path / "jobs").exists()
