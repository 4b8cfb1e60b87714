"""`holdfast checkpoint` on what a job has saved."""

import json
import shutil

import msgspec
import pytest
import torch

from holdfast.checkpoint import api
from holdfast.checkpoint.layout import decode_manifest, encode_manifest
from holdfast.checkpoint.policy import Retention
from holdfast.engines.jobs import JobFolder
from holdfast.protocol.job import JobSpec
from holdfast.protocol.snapshots import DurableTier, Saving
from holdfast.protocol.verified import NOTES
from holdfast.train import restore, state_image


def spec(folder):
    tier = DurableTier(str(folder.path / "checkpoint"))
    return JobSpec(name="done", script="train.py", saving=Saving(tiers=(tier,)))


def row_of(folder):
    """The file that holds a checkpoint's bytes."""
    return next(folder.glob("rank-?.????????.safetensors"))


@pytest.fixture
def saved(home):
    """A job with two checkpoints."""
    folder = JobFolder("done")
    folder.prepare(spec(folder))
    for step in (4, 8):
        image = state_image.capture({"net": torch.nn.Linear(3, 2)}, step)
        restore.save(image, str(folder.path / "checkpoint"), Retention())
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


def test_a_state_that_is_small_is_shown_and_has_a_size(holdfast, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "_backends", {})
    monkeypatch.setenv("HOLDFAST_MEMORY", str(tmp_path / "memory"))
    place = str(tmp_path / "saved")
    api.save({"net": torch.nn.Linear(3, 2), "n": 1 << 70}, 5, to=place)
    for backend in api._backends.values():
        backend.close()
    said = holdfast("checkpoint", "show", place)
    assert "step 5: 2 tensors of 1 rank, 32 B" in said.out
    assert [line.split()[1:4] for line in said.out.splitlines()[2:]] == [
        ["net.weight", "float32", "2x3"],
        ["net.bias", "float32", "2"],
    ]
    assert json.loads(holdfast("checkpoint", "ls", place, "--json").out)[0]["bytes"] >= 32


def test_show(holdfast, saved):
    said = holdfast("checkpoint", "show", "--job", "done")
    assert "step 8: 2 tensors of 1 rank, 32 B" in said.out
    assert [line.split()[1:4] for line in said.out.splitlines()[2:]] == [
        ["net.weight", "float32", "2x3"],
        ["net.bias", "float32", "2"],
    ]


def test_verify(holdfast, saved):
    told = f"step 4: complete\nstep 8: complete\nthe newest complete checkpoint: {saved}/step-8\n"
    assert holdfast("checkpoint", "verify").out == told
    data = row_of(saved / "step-8")
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    said = holdfast("checkpoint", "verify")
    assert said.code == 1
    assert "step 4: complete\n" in said.out
    assert "step 8: NOT COMPLETE" in said.out
    assert "net.weight" in said.out
    assert said.out.endswith(f"the newest complete checkpoint: {saved}/step-4\n")
    said = holdfast("checkpoint", "verify", str(saved / "step-4"))
    assert [said.code, said.out] == [0, "step 4: complete\n"]
    row_of(saved / "step-4").unlink()
    assert holdfast("checkpoint", "verify").out.endswith("none of these checkpoints is complete\n")


def test_verify_tells_programs(holdfast, saved):
    nbytes = row_of(saved / "step-8").stat().st_size
    row_of(saved / "step-8").write_bytes(b"")
    said = holdfast("checkpoint", "verify", "--json")
    assert said.code == 1
    four, eight = json.loads(said.out)
    assert four == {"step": 4, "place": f"{saved}/step-4", "whole": True, "bytes": 32}
    assert [eight["step"], eight["whole"]] == [8, False]
    assert f"cut short: 0 of {nbytes} bytes" in eight["why"]


def read_back(holdfast, *args):
    return [(r["step"], r["whole"]) for r in json.loads(holdfast("checkpoint", "ls", *args, "--json").out)]


def test_when_it_was_read_back_is_listed(holdfast, saved):
    assert read_back(holdfast) == [(4, None), (8, None)]
    row_of(saved / "step-8").write_bytes(b"")
    holdfast("checkpoint", "verify")
    assert read_back(holdfast) == read_back(holdfast, str(saved)) == [(4, True), (8, False)]
    four, eight = holdfast("checkpoint", "ls", "-o", "wide").out.splitlines()[1:]
    assert ("DAMAGED" in four, "DAMAGED" in eight) == (False, True)
    assert four.split()[-1] == f"{saved}/step-4"


def test_a_place_that_is_named_is_remembered_by_the_job_that_saves_there(holdfast, saved, tmp_path):
    assert holdfast("checkpoint", "verify", str(saved / "step-4")).code == 0
    assert read_back(holdfast, "--job", "done") == [(4, True), (8, None)]
    # A copy is another checkpoint, which no job here saves: nothing is known of it before or after.
    shutil.copytree(saved, tmp_path / "copy")
    assert holdfast("checkpoint", "verify", str(tmp_path / "copy")).code == 0
    assert read_back(holdfast, str(tmp_path / "copy")) == [(4, None), (8, None)]


def test_a_step_that_is_saved_again_was_not_read_back(holdfast, saved):
    holdfast("checkpoint", "verify")
    manifest = saved / "step-8" / "manifest.json"
    known = decode_manifest(manifest.read_bytes(), "")
    manifest.write_bytes(
        encode_manifest(msgspec.structs.replace(known, saved_at="2031-01-01T00:00:00+00:00"))
    )
    assert read_back(holdfast) == [(4, True), (8, None)]


def test_lines_of_notes_that_cannot_be_read_are_left_out(holdfast, saved):
    (saved.parent / NOTES).write_bytes(b"\xff{\n" + b"x" * (1 << 20) + b"\n")
    holdfast("checkpoint", "verify")
    assert read_back(holdfast) == [(4, True), (8, True)]
    # The file was too long, so what cannot be read is gone.
    assert len((saved.parent / NOTES).read_bytes().splitlines()) == 2


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_place(holdfast, saved, scheme):
    place = f"{scheme}{saved}"
    assert [r["step"] for r in json.loads(holdfast("checkpoint", "ls", place, "--json").out)] == [4, 8]
    assert holdfast("checkpoint", "show", f"{place}/step-4").out.startswith("step 4: 2 tensors")
    assert holdfast("checkpoint", "verify", f"{place}/step-8/").out == "step 8: complete\n"
    assert holdfast("checkpoint", "prune", place, "--keep", "1").out == f"{saved}: 1 checkpoint removed: 4\n"


def test_show_tells_programs(holdfast, saved):
    told = json.loads(holdfast("checkpoint", "show", "--json").out)
    assert [told["manifest"]["step"], told["manifest"]["world"]] == [8, 1]
    names = [t["path"] for t in told["shards"][0]["index"]["tensors"]]
    assert names == ["net.weight", "net.bias"]


def test_a_newest_one_that_is_damaged(holdfast, saved):
    """It is listed, and said what it is; it takes no whole one along."""
    (saved / "step-8" / "manifest.json").write_text("{}")
    said = holdfast("checkpoint", "ls")
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [["4", "32"], ["8", "–"]]
    assert "step 8 is not complete" in said.err
    assert "is not the manifest" in json.loads(holdfast("checkpoint", "ls", "--json").out)[1]["trouble"]
    said = holdfast("checkpoint", "show")
    assert [said.code, said.out] == [1, ""]
    assert "step-8/manifest.json is not the manifest of a checkpoint" in said.err
    said = holdfast("checkpoint", "prune", "--keep", "1")
    assert said.code == 1
    assert "newest checkpoint is not complete" in said.err
    assert sorted(d.name for d in saved.iterdir()) == ["step-4", "step-8"]
    assert holdfast("checkpoint", "prune", "--keep", "1", "--no-verify").code == 0
    assert [d.name for d in saved.iterdir()] == ["step-8"]


@pytest.fixture
def two_tiers(home, tmp_path):
    """A job with two tiers, which have one step in common."""
    tiers = [tmp_path / "near", tmp_path / "far"]
    folder = JobFolder("done")
    folder.prepare(
        JobSpec(
            name="done", script="train.py", saving=Saving(tiers=tuple(DurableTier(str(t)) for t in tiers))
        )
    )
    for step, tier in ((4, 1), (8, 0), (8, 1)):
        image = state_image.capture({"net": torch.nn.Linear(3, 2)}, step)
        restore.save(image, str(tiers[tier]), Retention())
    folder.close()
    return tiers


def test_two_tiers(holdfast, two_tiers):
    near, far = two_tiers
    places = [r["place"] for r in json.loads(holdfast("checkpoint", "ls", "--json").out)]
    assert places == [f"{far}/step-4", f"{near}/step-8", f"{far}/step-8"]
    assert f"in {near}/step-8\n" in holdfast("checkpoint", "show").out
    assert holdfast("checkpoint", "verify").out == (
        f"step 4 in {far}/step-4: complete\nstep 8 in {near}/step-8: complete\nstep 8 in {far}/step-8: complete\n"
        f"the newest complete checkpoint: {near}/step-8\n"
    )
    row_of(near / "step-8").write_bytes(b"")
    assert holdfast("checkpoint", "verify").out.endswith(f"the newest complete checkpoint: {far}/step-8\n")
    said = holdfast("checkpoint", "prune", "--keep", "1")
    assert said.out == f"{near}: 0 checkpoints removed\n{far}: 1 checkpoint removed: 4\n"


def test_a_tier_that_cannot_be_read(holdfast, two_tiers):
    near, far = two_tiers
    shutil.rmtree(near)
    near.write_text("no folder")
    said = holdfast("checkpoint", "ls", "--json")
    assert [r["place"] for r in json.loads(said.out)] == [f"{far}/step-4", f"{far}/step-8"]
    assert f"skipped a checkpoint: the disk tier {near}" in said.err
    said = holdfast("checkpoint", "verify")
    assert said.code == 1
    assert said.out.count(": complete") == 2
    shutil.rmtree(far)
    far.write_text("no folder")
    said = holdfast("checkpoint", "ls")
    assert [said.code, said.out] == [1, ""]
    assert str(near) in said.err
    assert str(far) in said.err


def test_the_next_start_takes_the_older_whole_one(home, saved):
    row_of(saved / "step-8").write_bytes(b"")
    folder = JobFolder("done")
    notes = []
    resume = folder.prepare(spec(folder), notes.append)
    folder.close()
    assert [d.step for d in resume.checkpoints] == [4]
    assert list(resume.passed_over) == [n.removeprefix("skipped a checkpoint: ") for n in notes]
    assert len(notes) == 1
    assert "step-8" in notes[0]
    assert "cut short" in notes[0]


@pytest.mark.parametrize("what", ["ls", "show", "verify"])
def test_nothing_is_there(holdfast, saved, tmp_path, what):
    said = holdfast("checkpoint", what, str(tmp_path / "nowhere"))
    assert said.code == 2
    assert "does not exist" in said.err
    said = holdfast("checkpoint", what, str(tmp_path))
    assert said.code == 2
    assert "does not contain a checkpoint" in said.err


def test_prune(holdfast, saved):
    said = holdfast("checkpoint", "prune", "--keep", "1")
    assert said.out.strip().endswith("1 checkpoint removed: 4")
    assert [d.name for d in saved.iterdir()] == ["step-8"]
    assert holdfast("checkpoint", "prune", str(saved / "step-8")).code == 2
