"""A frozen base is fetched by a newcomer that has another, and is in no snapshot."""

from pathlib import Path

import pytest
from harness import run

SCRIPT = Path(__file__).with_name("train_adapter.py")
STEPS = 30


@pytest.mark.parametrize(
    ("shard", "reduction"),
    [
        pytest.param(1, "exact", marks=pytest.mark.long),
        pytest.param(1, "fast", marks=pytest.mark.nightly),
        pytest.param(2, "exact", marks=pytest.mark.nightly),
        pytest.param(2, "fast", marks=pytest.mark.nightly),
    ],
)
def test_a_newcomer_with_another_base_trains_with_that_of_the_others(shard, reduction, tmp_path):
    members = 2 * shard
    script = [SCRIPT, STEPS, "--members", members, "--shard", shard, "--reduction", reduction]
    given = ["--nnodes", members, "--spares", 1, "--wait-for-spare"]
    quiet = run(tmp_path, *given, *script, job="quiet")
    assert quiet.code == 0, quiet.output[-3000:]
    assert quiet.report["final"]["replicas_equal"]
    assert quiet.report["final"]["covered"] == ["model", "optimizer", "base"]
    ran = run(tmp_path, *given, "--fault", "kill-node:rank=1,step=12", *script)
    assert ran.code == 0, ran.output[-3000:]
    assert len(ran.report["incidents"]) == 1
    assert "built another base" in "".join(path.read_text() for path in ran.job_dir.rglob("*.log"))
    assert ran.report["final"] == quiet.report["final"]
    assert ran.losses() == quiet.losses()
    if shard == 1:  # and the checkpoint is enough for a script that builds the base
        script[1] = STEPS + 5
        further = run(tmp_path, *given, *script)
        assert further.code == 0, further.output[-3000:]
        assert further.steps() == list(range(STEPS, STEPS + 5))
