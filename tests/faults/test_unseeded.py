"""Scripts that seed nothing: workers draw different numbers, as under torchrun, and level 2 still trains one model."""

import re

import pytest
from harness import HERE, TINY, run

RANKS = 4
ATTEMPTS = 2


@pytest.mark.long
def test_no_two_ranks_and_no_two_attempts_draw_the_same_numbers(tmp_path) -> None:
    told = tmp_path / "told"
    ran = run(tmp_path, "--nnodes", 2, "--nproc-per-node", 2, "--spares", 1, HERE / "draw.py", told)
    assert ran.code == 0, ran.output[-3000:]
    lines = [line.split() for line in told.read_text().splitlines()]
    assert len(lines) == RANKS * ATTEMPTS
    for of_one_library in zip(*lines, strict=True):
        assert len(set(of_one_library)) == RANKS * ATTEMPTS, lines


@pytest.mark.long
def test_replicas_that_begin_with_different_weights_train_the_same_model(tmp_path) -> None:
    fault = "kill-worker:rank=1,step=10"
    ran = run(tmp_path, "--nnodes", 2, "--spares", 1, "--fault", fault, TINY, 30, "--unseeded")
    assert ran.code == 0, ran.output[-3000:]
    logs = "".join(log.read_text() for log in (ran.job_dir / "logs").rglob("*.log"))
    begun = re.findall(r"begins with (\S+)", logs)
    assert len(set(begun)) >= 3, begun  # two members and the spare
    assert "bit-equal in all replicas" in ran.output
    assert len(ran.report["incidents"]) == 1
