"""Replicas that are the stages of a pipeline: their numbers are those of one worker, and whatever is lost, those of an
undisturbed run, bit by bit."""

import pytest
from harness import HERE, finish, run, start
from test_meshes import check, told

SCRIPT = HERE / "train_pipeline.py"
STEPS = 16

pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "more"),
    [
        (2, ()),
        pytest.param(2, ("--schedule", "gpipe", "--reduction", "fast"), marks=pytest.mark.nightly),
        pytest.param(4, ("--shard", "2"), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_loss_and_norm_are_those_of_one_worker(tmp_path, nodes, more):
    alone = run(tmp_path, "--nnodes", 1, SCRIPT, 6, "--schedule", "one", job="alone")
    ran = run(tmp_path, "--nnodes", nodes, SCRIPT, 6, *more)
    check(ran)
    assert told(ran)[0] == pytest.approx(told(alone)[0], rel=2e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "fault", "more"),
    [
        (2, "kill-worker:rank=1,step=8,phase=backward", ()),
        pytest.param(2, "kill-worker:rank=0,step=8,phase=backward", (), marks=pytest.mark.nightly),
        pytest.param(2, "kill-worker:rank=1,step=8,phase=reduce", (), marks=pytest.mark.nightly),
        pytest.param(2, "kill-worker:rank=2,step=8,phase=vote", (), marks=pytest.mark.nightly),
        pytest.param(2, "kill-worker:rank=3,step=8,phase=update", (), marks=pytest.mark.nightly),
        pytest.param(2, "kill-worker:rank=1,step=8", ("--schedule", "gpipe"), marks=pytest.mark.nightly),
        pytest.param(4, "kill-worker:rank=1,step=8", ("--shard", "2"), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_lost_worker_changes_no_bit(tmp_path, nodes, fault, more):
    """Two replicas, one of which loses a worker in the middle of its schedule, against one that nobody disturbs. The other one
    keeps its connections: it leaves the step together, though its stages are at different calls."""
    expected = run(tmp_path, "--nnodes", nodes, SCRIPT, STEPS, *more, job="expected")
    ran = run(
        tmp_path, "--nnodes", f"{nodes}:{2 * nodes}", "--fault", fault, SCRIPT, STEPS, *more, timeout=180
    )
    check(ran)
    assert 1 in ran.fields("formed")[1]["groups_connected_in"]
    assert ran.losses() == expected.losses()
    assert ran.report["final"]["params_xxh3"] == expected.report["final"]["params_xxh3"]
    assert ran.report["steps"]["lost"] == 0


@pytest.mark.long
def test_a_stage_that_does_not_say_its_shapes_is_refused_with_a_sentence(tmp_path):
    process = start(tmp_path, "--nnodes", 2, SCRIPT, 6, "--silent")
    ran = finish(process, tmp_path)
    assert ran.report["outcome"] == "failed"
    assert "does not specify its shapes" in ran.output
    assert ran.report["steps"]["committed"] == 0
