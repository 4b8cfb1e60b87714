"""`holdfast checkpoint export` and `import`; what is in the files is tested in tests/checkpoint/test_convert.py."""

import sys

import pytest
import torch
from blobs_on_tiers import flip
from ranks_on_tiers import save_states
from safetensors.torch import load_file

import holdfast as hf
from holdfast.checkpoint.archive import Archive
from holdfast.engines.jobs import JobFolder
from holdfast.observe import transfer_progress
from holdfast.protocol.job import JobSpec
from holdfast.protocol.snapshots import DurableTier, Saving


def state_of(step):
    return {"model": {"w": torch.full((5000,), float(step)), "b": torch.ones(3)}, "epoch": step}


@pytest.fixture
def tiers(home, tmp_path):
    """A job with steps 4 and 8 in each of two tiers."""
    tiers = [tmp_path / "near", tmp_path / "far"]
    folder = JobFolder("done")
    folder.prepare(
        JobSpec(
            name="done", script="train.py", saving=Saving(tiers=tuple(DurableTier(str(t)) for t in tiers))
        )
    )
    for tier in tiers:
        for step in (4, 8):
            save_states(Archive(str(tier)), step, [state_of(step)])
    folder.close()
    return tiers


def test_safetensors_there_and_back(holdfast, tiers, tmp_path):
    said = holdfast("checkpoint", "export", "out")
    assert [said.code, said.out] == [
        0,
        "step 8: 2 tensors of 20.0 kB and 1 value, 2 files: out\n",
    ]
    assert set(load_file(tmp_path / "out/model.safetensors")) == {"model.w", "model.b"}
    said = holdfast("checkpoint", "import", "out", "tier", "--step", "3")
    assert [said.code, said.out] == [0, f"step 3: 20.0 kB of 1 rank in {tmp_path}/tier/step-3\n"]
    assert holdfast("checkpoint", "verify", "tier").code == 0
    state = {"model": {"w": torch.zeros(5000), "b": torch.zeros(3)}, "epoch": 0}
    assert hf.checkpoint.load(state, source=str(tmp_path / "tier")) == 3
    assert state["epoch"] == 8
    assert torch.equal(state["model"]["w"], state_of(8)["model"]["w"])


@pytest.mark.parametrize("options", [["out.pt"], ["out.any", "--format", "torch"]])
def test_a_file_of_torch(holdfast, tiers, tmp_path, options):
    assert holdfast("checkpoint", "export", "--step", "4", *options).code == 0
    loaded = torch.load(tmp_path / options[0], weights_only=True)
    assert loaded["epoch"] == 4
    assert torch.equal(loaded["model"]["w"], state_of(4)["model"]["w"])
    assert holdfast("checkpoint", "import", options[0], f"file://{tmp_path}/tier", "--step", "4").code == 0
    assert Archive(str(tmp_path / "tier")).verify(4).world == 1


def test_options(holdfast, tiers, tmp_path):
    place = f"{tiers[1]}/step-4"
    said = holdfast("checkpoint", "export", place, "out", "--only", "model.", "--max-shard-size", "10K")
    assert said.out == "step 4: 2 tensors of 20.0 kB and 0 values, 4 files: out\n"
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "values.json",
    ]


def test_what_ranks_have_otherwise_is_said(holdfast, tmp_path):
    save_states(Archive(str(tmp_path / "tier")), 4, [{"same": 1, "rank": rank} for rank in range(9)])
    said = holdfast("checkpoint", "export", "tier", "out")
    named = ", ".join(f"rank-{n}.rank" for n in range(1, 6))
    assert said.out.endswith(f"the ranks have different values of {named} and 3 more\n")


def test_a_damaged_tier_is_passed_over(holdfast, tiers, tmp_path):
    for tier, code in zip(tiers, (0, 1), strict=True):
        archive = Archive(str(tier))
        flip(archive.tier, archive.manifest(8).shards[0].blob.name, 5)
        said = holdfast("checkpoint", "export", f"out-{tier.name}")
        assert said.code == code
    assert "near" in said.err
    assert "far" in said.err
    assert "--step chooses one of them" in said.err
    assert sorted(p.name for p in tmp_path.glob("*out*")) == ["out-near"]
    assert holdfast("checkpoint", "export", "out", "--step", "4").code == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["out", "--step", "5"], "there is no checkpoint of step 5; there are checkpoints of steps 4, 8"),
        (["nowhere", "out"], "the folder nowhere does not exist"),
        (["near", "there"], "there exists: choose another folder"),
        (["near", "there/out"], "there is not an existing folder: create it first"),
        (["near", "there.pt", "--format", "torch"], "there.pt exists: choose another file"),
        (["near", "out.safetensors"], "pass the name of a folder"),
        (["near", "far", "out"], "3 paths were given"),
        (["near", "out", "--max-shard-size", "5X"], "--max-shard-size must be a size (got '5X')"),
        (["near", "out", "--only", "x."], "names begin with epoch, model"),
        (["near", "out", "--strip"], "with --only"),
        (["near", "out.pt", "--only", "model.", "--strip"], "--strip works only with --format safetensors"),
    ],
)
def test_exports_that_are_refused(holdfast, tiers, tmp_path, arguments, why):
    (tmp_path / "there").write_text("mine")
    (tmp_path / "there.pt").write_text("mine")
    before = sorted(tmp_path.iterdir())
    said = holdfast("checkpoint", "export", *arguments)
    assert [said.code, said.out] == [2, ""]
    assert why in said.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere", "tier", "--step", "1"], "nowhere does not exist"),
        (["out.pt", "near", "--step", "4"], "near/step-4 already exists: choose another --step"),
        (["out.pt", "near/step-4", "--step", "5"], "near/step-4 is a single checkpoint"),
        (["train.py", "tier", "--step", "5"], "train.py"),
        (["out.pt", "ftp://tier", "--step", "5"], "ftp is not a known kind of tier"),
    ],
)
def test_imports_that_are_refused(holdfast, tiers, tmp_path, arguments, why):
    torch.save(state_of(1), tmp_path / "out.pt")
    before = sorted(tmp_path.iterdir())
    said = holdfast("checkpoint", "import", *arguments)
    assert [said.code, said.out] == [2, ""]
    assert why in said.err
    assert sorted(tmp_path.iterdir()) == before


def test_long_work_shows_progress(holdfast, tiers, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer_progress, "SILENT_S", 0.0)
    assert "exporting: 20.0 kB" in holdfast("checkpoint", "export", "out").err
    said = holdfast("checkpoint", "import", "out", "tier", "--step", "1")
    assert "reading: 20.0 kB" in said.err
    assert "writing: 20.0 kB" in said.err


def test_without_the_extra(holdfast, tiers, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    said = holdfast("checkpoint", "export", "out")
    assert said.code == 2
    assert "pip install 'holdfast-train[export]'" in said.err
    assert holdfast("checkpoint", "export", "out.pt").code == 0
    assert holdfast("checkpoint", "import", "out.pt", "tier", "--step", "1").code == 0
