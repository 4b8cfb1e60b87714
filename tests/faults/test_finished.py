"""A job that has all its steps leaves the last state in its durable tiers, from which the next one goes on."""

import re

import pytest
import torch
from conftest import STEPS
from harness import TINY, run
from s3server import S3Server
from safetensors.torch import load_file
from test_snapshots import memory_of

from holdfast.checkpoint.archive import Archive
from holdfast.tools.conversion.convert import export_torch


@pytest.mark.long
def test_the_result_of_training_is_a_checkpoint_in_every_tier(tmp_path, undisturbed):
    near, far = tmp_path / "near", tmp_path / "far"
    options = ["--nnodes", 3, "--snapshot-every", 0]
    options += ["--checkpoint", f"{near},every=0", "--checkpoint", f"{far},every=0"]
    first = run(tmp_path, *options, TINY, STEPS - 50)
    assert first.code == 0, first.output[-3000:]
    for tier in (near, far):
        archive = Archive(str(tier))
        assert archive.steps() == [STEPS - 50]
        assert archive.verify(STEPS - 50).world == 1
    assert first.report["saved"]["step"] == STEPS - 50
    told = "".join(first.output.split())  # long paths are wrapped
    assert f"step{STEPS - 50}in{first.report['saved']['url']}" in told
    assert not memory_of(tmp_path)
    losses = first.losses()
    second = run(tmp_path, *options, TINY, STEPS)
    assert second.code == 0, second.output[-3000:]
    assert losses + second.losses() == undisturbed.losses()
    assert second.report["final"] == undisturbed.report["final"]
    assert Archive(str(near)).steps() == [STEPS - 50, STEPS]
    tensors = {}
    for path in (near / f"step-{STEPS}").glob("*.safetensors"):
        tensors |= load_file(path)
    export_torch(Archive(str(near)), STEPS, tmp_path / "out.pt")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.equal(tensors[f"model.{name}"], tensor) for name, tensor in state["model"].items())
    for number, moments in state["optimizer"]["state"].items():
        assert all(torch.equal(tensors[f"optimizer.state.{number}.{k}"], t) for k, t in moments.items())


@pytest.mark.nightly
def test_one_member_reads_it_for_all(tmp_path, undisturbed, monkeypatch):
    """The object store sends every byte once, to however many replicas."""
    with S3Server() as store:
        given = {"AWS_ENDPOINT_URL": store.endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        for name, value in {**given, "AWS_REGION": "eu-west-3"}.items():
            monkeypatch.setenv(name, value)
        options = ["--nnodes", 3, "--snapshot-every", 0, "--checkpoint", "s3://bucket/run,every=0"]
        first = run(tmp_path, *options, TINY, STEPS - 50)
        assert first.code == 0, first.output[-3000:]
        (row,) = [key for key in store.objects if re.search(r"\.\w{8}\.safetensors$", key)]
        losses, data, before = first.losses(), store.objects[row], len(store.asked)
        header = 8 + int.from_bytes(data[:8], "little")
        second = run(tmp_path, *options, TINY, STEPS)
        assert second.code == 0, second.output[-3000:]
        ranges = [r.headers["Range"] for r in store.asked[before:] if (r.kind, r.key) == ("get", row)]
    ends = [re.fullmatch(r"bytes=(\d+)-(\d+)", text) for text in ranges]
    assert min(int(e[1]) for e in ends) == header
    assert sum(int(e[2]) - int(e[1]) + 1 for e in ends) == len(data) - header
    assert losses + second.losses() == undisturbed.losses()
    assert second.report["final"] == undisturbed.report["final"]


@pytest.mark.nightly
def test_rank_0_writes_it_where_there_is_no_memory_for_it(tmp_path):
    options = ["--snapshot-memory", "1K"]
    ran = run(tmp_path, "--nnodes", 2, *options, TINY, 40)
    assert ran.code == 0, ran.output[-3000:]
    archive = Archive(ran.report["saved"]["url"])
    assert (ran.report["saved"]["step"], archive.verify(40).step) == (40, 40)
    again = run(tmp_path, "--nnodes", 2, *options, TINY, 40)
    assert (again.code, again.steps(), again.report["saved"]["step"]) == (0, [], 40), again.output[-3000:]


@pytest.mark.long
def test_the_last_state_survives_the_node_that_writes_it(tmp_path, undisturbed):
    """Killed in the last step's update, the last state comes from the survivors."""
    tier = tmp_path / "saved"
    fault = f"kill-node:rank=0,step={STEPS - 1},phase=update"
    options = ["--spares", 1, "--fault", fault, "--checkpoint", f"{tier},every=0"]
    ran = run(tmp_path, "--nnodes", 3, *options, TINY, STEPS)
    assert ran.code == 0, ran.output[-3000:]
    assert Archive(str(tier)).verify(STEPS).step == STEPS
    assert ran.report["final"]["params_xxh3"] == undisturbed.report["final"]["params_xxh3"]
