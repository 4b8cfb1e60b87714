"""Moments in 8 bits: codes and scales are bit-equal through kills and restarts."""

from pathlib import Path

import pytest
from harness import run

SCRIPT = Path(__file__).with_name("train_quantized.py")
STEPS = 20


def left(ran) -> dict[int, set[str]]:
    """What each step has left, on any worker that printed it."""
    found: dict[int, set[str]] = {}
    for path in ran.job_dir.rglob("*.log"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 3 and words[1] == "left":
                found.setdefault(int(words[0]), set()).add(words[2])
    return found


@pytest.mark.parametrize(
    ("kind", "shard", "fault"),
    [
        pytest.param("own", 1, "kill-worker:rank=1,step=7", marks=pytest.mark.nightly),
        # Each kind of tensor and each fault once in every run, all pairs at night.
        pytest.param("AdamW8bit", 1, "kill-node:rank=1,step=7", marks=pytest.mark.long),
        pytest.param("AdamW4bit", 1, "kill-worker:rank=0,step=1", marks=pytest.mark.nightly),
        pytest.param("AdamWFp8", 1, "kill-node:rank=1,step=7", marks=pytest.mark.nightly),
        pytest.param("float8", 2, "kill-node:rank=1,step=7", marks=pytest.mark.long),
        *(
            pytest.param(kind, shard, fault, marks=pytest.mark.nightly)
            for kind, shard, fault in (
                ("own", 1, "kill-node:rank=1,step=7"),
                ("own", 1, "kill-worker:rank=0,step=1"),
                ("AdamW8bit", 1, "kill-worker:rank=0,step=1"),
                ("AdamW4bit", 1, "kill-node:rank=1,step=7"),
                ("AdamWFp8", 1, "kill-worker:rank=0,step=1"),
                ("AdamW8bit", 2, "kill-node:rank=1,step=7"),
                ("AdamWFp8", 2, "kill-node:rank=1,step=7"),
            )
        ),
    ],
)
def test_what_is_made_of_other_tensors_is_bit_equal_through_a_kill(kind, shard, fault, tmp_path):
    given = ["--nnodes", 2 * shard, "--spares", 1, "--wait-for-spare", "--snapshot-every", 5]
    script = [SCRIPT, kind, STEPS, "--shard", shard]
    quiet = run(tmp_path, *given, *script, job="quiet")
    assert quiet.code == 0, quiet.output[-3000:]
    ran = run(tmp_path, *given, "--fault", fault, *script)
    assert ran.code == 0, ran.output[-3000:]
    assert len(ran.report["incidents"]) == 1
    assert ran.report["final"] == quiet.report["final"]
    assert ran.report["final"]["replicas_equal"]
    assert ran.losses() == quiet.losses()
    if shard == 1:
        assert set(left(quiet)) == set(range(STEPS))
        assert all(len(digests) == 1 for digests in left(quiet).values())
        assert left(ran) == left(quiet)


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("own", marks=pytest.mark.nightly), "AdamW8bit"])
def test_a_resumed_job_goes_on_with_the_same_codes_and_scales(kind, tmp_path):
    tier = f"{tmp_path / 'kept'},every=5"
    whole = run(tmp_path, "--nnodes", 2, SCRIPT, kind, STEPS, job="whole")
    assert whole.code == 0, whole.output[-3000:]
    for steps in (STEPS // 2, STEPS):
        ran = run(tmp_path, "--nnodes", 2, "--checkpoint", tier, SCRIPT, kind, steps, job="parts")
        assert ran.code == 0, ran.output[-3000:]
    assert ran.report["final"] == whole.report["final"]
    assert left(ran)[STEPS - 1] == left(whole)[STEPS - 1]


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("own", marks=pytest.mark.nightly), "AdamW4bit"])
def test_a_snapshot_has_the_codes_and_scales(kind, tmp_path):
    given = ["--nnodes", 1, "--snapshot-every", 5, SCRIPT, kind, STEPS]
    quiet = run(tmp_path, *given, job="quiet")
    ran = run(tmp_path, "--fault", "kill-worker:rank=0,step=12", *given)
    assert ran.code == quiet.code == 0, ran.output[-3000:]
    assert len(ran.report["incidents"]) == 1
    assert left(ran) == left(quiet)
    assert ran.report["final"] == quiet.report["final"]


@pytest.mark.long
def test_shards_that_cannot_be_cut_anew_are_refused_by_name(tmp_path):
    tier = f"{tmp_path / 'kept'},every=5"
    given = ["--nnodes", 2, "--checkpoint", tier, SCRIPT, "AdamW8bit"]
    assert run(tmp_path, *given, 10, "--shard", 2).code == 0
    ran = run(tmp_path, *given, STEPS)
    assert ran.code != 0
    said = " ".join(ran.output.split())
    assert "optimizer.state.0.exp_avg was saved as a shard at [0, 0] of (256, 64)" in said
    assert "start with the same sharding as when it was saved" in said
