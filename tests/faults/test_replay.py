"""Micro-batches are computed twice: training does not notice, and a bit that flips in a gradient is found."""

import pytest
from harness import HERE, run

from holdfast.train.replay import replay_of

pytestmark = pytest.mark.long
SCRIPT = HERE / "train_replayed.py"
STEPS = 30


def struck_step(nodes):
    """A step whose drawn micro-batch is the first of rank 1, where the fault strikes."""
    names = tuple(f"node{n}" for n in range(nodes))
    for step in range(5, STEPS):
        replay = replay_of(1, 0, step, 12, names)
        if replay is not None and replay.micro == 12 // nodes:
            return step
    raise AssertionError("no step of these")


def test_the_curve_has_the_same_bits_and_a_flipped_bit_is_found(tmp_path):
    plain = run(tmp_path, "--nnodes", 3, SCRIPT, STEPS, job="plain")
    twice = run(tmp_path, "--nnodes", 3, "--replay", "1/1", SCRIPT, STEPS, job="twice")
    fault = f"flip-bit:rank=1,step={struck_step(3)},phase=backward"
    struck = run(
        tmp_path,
        "--nnodes",
        3,
        "--spares",
        1,
        "--replay",
        "1/1",
        "--fault",
        fault,
        SCRIPT,
        STEPS,
        job="struck",
    )
    unseen = run(tmp_path, "--nnodes", 3, "--fault", fault, SCRIPT, STEPS, job="unseen")
    assert plain.code == 0, plain.output[-3000:]
    assert plain.report["incidents"] == twice.report["incidents"] == []
    (incident,) = struck.report["incidents"]
    # Nodes get ranks in the order in which their workers are ready, so the node of rank 1 is not always node1.
    struck_node = struck.fields("formed")[0]["workers"][1].partition(".")[0]
    assert (incident["cause_kind"], incident["node"]) == ("corruption", struck_node), struck.output[-3000:]
    assert plain.report["final"] == twice.report["final"]
    # What is found is never committed: nothing of it is in the state.
    assert struck.report["final"]["params_xxh3"] == plain.report["final"]["params_xxh3"]
    assert unseen.report["final"]["params_xxh3"] != plain.report["final"]["params_xxh3"]


def test_of_two_workers_both_are_named_and_the_step_is_computed_again(tmp_path):
    fault = f"flip-bit:rank=1,step={struck_step(2)},phase=backward"
    ran = run(tmp_path, "--nnodes", 2, "--replay", "1/1", "--fault", fault, SCRIPT, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    (incident,) = ran.report["incidents"]
    assert "no two agree" in incident["cause"]


def test_what_promises_no_bits_is_refused(tmp_path):
    ran = run(tmp_path, "--nnodes", 2, "--replay", "1/5", HERE / "train_tiny.py", STEPS)
    assert ran.code != 0
    assert 'reduction="exact"' in ran.output


def test_a_model_in_shards_is_refused_before_it_is_built(tmp_path):
    ran = run(tmp_path, "--nnodes", 2, "--replay", "1/5", HERE / "train_meshes.py", STEPS, "--layout", "fsdp")
    assert ran.report["outcome"] == "failed"
    said = " ".join(ran.output.split())
    assert "which no worker does after run.mesh(); start the job without --replay" in said
    assert ran.report["steps"]["committed"] == 0
