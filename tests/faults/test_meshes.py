"""Meshes of the script's own in a replica: experts, context, replicas within it, tensors that FSDP2 does not shard, and several
of these at once. The numbers are those of one worker, and whatever is lost, those of an undisturbed run, bit by bit."""

import re

import pytest
from harness import HERE, finish, run, start

SCRIPT = HERE / "train_meshes.py"
STEPS = 16
LIMIT_S = 240
"""Of a job: up to eight workers share the machine's processors."""

pytestmark = pytest.mark.timeout(600)


def told(ran):
    """Losses and norms by step, and the buffers at the end."""
    lines = {line for log in (ran.job_dir / "logs").glob("*/*.log") for line in log.read_text().splitlines()}
    numbers = {}
    for line in lines:
        if match := re.match(r"norm: (\d+) (\S+) (\S+)$", line):
            numbers[int(match[1])] = [float(match[2]), float(match[3])]
    buffers = sorted(line for line in lines if line.startswith("buffer:"))
    return [x for step in sorted(numbers) for x in numbers[step]], buffers


def check(ran):
    assert ran.report["outcome"] == "finished", ran.output[-3000:]
    assert ran.report["final"]["replicas_equal"] is True


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "nodes", "more"),
    [
        ("experts", 2, ()),
        ("context", 2, ()),
        ("tensor", 2, ("--dense",)),
        pytest.param("tensor", 2, ("--dense", "--reduction", "fast"), marks=pytest.mark.nightly),
        pytest.param("experts-fsdp", 4, (), marks=pytest.mark.nightly),
        pytest.param("replicas", 4, (), marks=pytest.mark.nightly),
        pytest.param("nameless", 2, ("--dense",), marks=pytest.mark.nightly),
        pytest.param("twice", 4, ("--dense",), marks=pytest.mark.nightly),
        pytest.param("experts-tensor", 4, (), marks=pytest.mark.nightly),
        pytest.param("context-tensor", 4, (), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_loss_norm_and_buffers_are_those_of_one_worker(tmp_path, layout, nodes, more):
    alone = run(tmp_path, "--nnodes", 1, SCRIPT, 6, "--layout", "one", *more, job="alone")
    ran = run(tmp_path, "--nnodes", nodes, SCRIPT, 6, "--layout", layout, *more, timeout=LIMIT_S)
    check(ran)
    (numbers, buffers), (expected, as_alone) = told(ran), told(alone)
    assert numbers == pytest.approx(expected, rel=2e-5)
    assert buffers == as_alone


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "nodes", "more"),
    [
        ("experts", 2, ()),
        pytest.param("nameless", 2, ("--dense",), marks=pytest.mark.nightly),
        pytest.param("context", 2, (), marks=pytest.mark.nightly),
        pytest.param("tensor", 2, ("--dense",), marks=pytest.mark.nightly),
        pytest.param("experts-fsdp", 4, (), marks=pytest.mark.nightly),
        pytest.param("replicas", 4, (), marks=pytest.mark.nightly),
        pytest.param("twice", 4, ("--dense",), marks=pytest.mark.nightly),
        pytest.param("experts-tensor", 4, (), marks=pytest.mark.nightly),
        pytest.param("context-tensor", 4, (), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_lost_worker_changes_no_bit(tmp_path, layout, nodes, more):
    """Two replicas, one of which loses a worker, against one replica that nobody disturbs."""
    told_both = (SCRIPT, STEPS, "--layout", layout, *more)
    expected = run(tmp_path, "--nnodes", nodes, *told_both, job="expected", timeout=LIMIT_S)
    fault = ("--fault", "kill-worker:rank=1,step=8")
    ran = run(tmp_path, "--nnodes", f"{nodes}:{2 * nodes}", *fault, *told_both, timeout=LIMIT_S)
    check(ran)
    assert ran.losses() == expected.losses()
    assert ran.report["final"]["params_xxh3"] == expected.report["final"]["params_xxh3"]
    assert told(ran)[1] == told(expected)[1]
    assert ran.report["steps"]["lost"] == 0


@pytest.mark.long
def test_messages_without_stages_are_refused_with_a_sentence(tmp_path):
    process = start(tmp_path, "--nnodes", 2, SCRIPT, 6, "--layout", "fsdp", "--pipeline")
    ran = finish(process, tmp_path)
    assert ran.report["outcome"] == "failed"
    assert (
        "two workers of a replica can send messages to each other only as stages of a pipeline"
        in " ".join(ran.output.split())
    )
    assert ran.report["steps"]["committed"] == 0
