"""Checkpoints of a real job whose bytes went bad: an older one is taken, and it is said which."""

import pytest
from conftest import STEPS
from harness import TINY, run
from test_snapshots import flip, kill_all, paused_at, remove_memory_of

from holdfast.checkpoint.archive import Archive

EVERY = 10


def saved(home):
    """A job that was killed whole, its memory lost: only its checkpoints are left."""
    tier = home / "saved"
    options = ["--snapshot-every", EVERY, "--checkpoint", f"{tier},every={EVERY},keep=9"]
    kill_all(home, paused_at(home, 65, *options))
    remove_memory_of(home)
    archive = Archive(str(tier))
    assert len(archive.steps()) >= 3
    return archive, options


def damage(archive, step):
    path = archive.tier.folder / archive.manifest(step).shards[0].blob.name
    flip(path, path.stat().st_size // 2)


@pytest.mark.nightly
def test_an_older_checkpoint_is_taken_for_one_with_a_flipped_bit(tmp_path, undisturbed):
    archive, options = saved(tmp_path)
    *_, older, newer, newest = archive.steps()
    archive.tier.remove(archive.manifest(newest).shards[0].blob.name)  # seen at the start
    damage(archive, newer)  # seen as it is loaded
    ran = run(tmp_path, "--nnodes", 3, *options, TINY, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert f"step-{newest}" in next(x for x in ran.output.splitlines() if "skipped a checkpoint" in x)
    said = ran.fields("checkpoint-unread")
    assert [(f["step"], f["instead"]) for f in said] == [(newer, archive.where(older))]
    assert "do not match their checksums" in said[0]["reason"]
    assert f"step {newer} cannot be loaded" in ran.output
    assert ran.steps()[0] == older
    assert ran.losses() == undisturbed.losses()[older:]
    assert ran.report["final"] == undisturbed.report["final"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("tier", "kind"),
    [
        ("memory", "kill-node"),
        *(
            pytest.param(tier, kind, marks=pytest.mark.nightly)
            for tier in ("memory", "disk")
            for kind in ("kill-node", "kill-worker", "stop-node", "kill-coordinator")
            if (tier, kind) != ("memory", "kill-node")
        ),
    ],
)
def test_a_fault_while_everybody_loads_changes_no_bit(tmp_path, undisturbed, tier, kind):
    """Everything was killed; of those that load what was saved one is struck too."""
    options = ["--snapshot-every", EVERY, "--checkpoint", f"{tmp_path / 'saved'},every={EVERY}"]
    kill_all(tmp_path, paused_at(tmp_path, 65, *options))
    if tier == "disk":
        remove_memory_of(tmp_path)
    rank = "" if kind == "kill-coordinator" else "rank=1,"
    options += ["--spares", 1, "--detection", 0.5, "--fault", f"{kind}:{rank}phase=transfer"]
    ran = run(tmp_path, "--nnodes", 3, *options, TINY, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert len(ran.report["incidents"]) >= 1
    begin = ran.steps()[0]
    assert 65 - 2 * EVERY <= begin <= 65
    assert ran.losses() == undisturbed.losses()[begin:]
    assert ran.report["final"] == undisturbed.report["final"]


@pytest.mark.long
def test_nothing_is_begun_anew_when_no_checkpoint_is_whole(tmp_path):
    archive, options = saved(tmp_path)
    steps = archive.steps()
    for step in steps:
        damage(archive, step)
    ran = run(tmp_path, "--nnodes", 3, *options, TINY, STEPS)
    assert (ran.code, ran.report["outcome"]) == (1, "failed"), ran.output[-3000:]
    assert "no checkpoint could be loaded" in ran.report["reason"]
    assert [f["step"] for f in ran.fields("checkpoint-unread")] == steps[::-1]
    assert ran.steps() == []
    assert archive.steps() == steps
