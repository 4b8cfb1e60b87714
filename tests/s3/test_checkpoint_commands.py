"""`holdfast checkpoint` over the URL of a real S3 server: run with `make s3-test`."""

import os
import sys
import uuid

import pytest
import torch
from blobs_on_tiers import flip
from ranks_on_tiers import Piece, save_states
from safetensors.torch import load_file

from holdfast.checkpoint.archive import Archive
from holdfast.cli.app import main

pytestmark = pytest.mark.s3

WHOLE = torch.arange(3_000_000, dtype=torch.float32).view(3000, 1000)


@pytest.fixture
def url():
    url = f"s3://{os.environ['HOLDFAST_S3_BUCKET']}/{uuid.uuid4().hex}"
    yield url
    for step in Archive(url).steps():
        Archive(url).remove(step)


@pytest.fixture
def holdfast(monkeypatch, capfd):
    def call(*args):
        monkeypatch.setattr(sys, "argv", ["holdfast", "checkpoint", *map(str, args)])
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        out, err = capfd.readouterr()
        return code, out + err

    return call


def test_commands(holdfast, url, tmp_path):
    for step in (4, 8):
        pieces = [Piece.of(WHOLE + step, 0, 1300), Piece.of(WHOLE + step, 1300, 3000)]
        save_states(Archive(url), step, [{"m": {"w": piece}, "epoch": step} for piece in pieces])
    assert holdfast("ls", url)[0] == 0
    assert "3000x1000 at 1300,0" in holdfast("show", f"{url}/step-4")[1]
    code, said = holdfast("verify", url)
    assert [code, said.splitlines()[-1]] == [0, f"the newest complete checkpoint: {url}/step-8"]

    assert holdfast("export", url, tmp_path / "out")[0] == 0
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["m.w"], WHOLE + 8)
    assert holdfast("import", tmp_path / "out", url, "--step", "9")[0] == 0
    assert Archive(url).verify(9).nbytes == 12_000_000

    archive = Archive(url)
    flip(archive.tier, archive.manifest(9).shards[0].blob.name, 7)
    code, said = holdfast("verify", url)
    assert [code, said.splitlines()[-1]] == [1, f"the newest complete checkpoint: {url}/step-8"]
    assert holdfast("prune", url, "--keep", "1")[0] == 1
    archive.remove(9)
    assert holdfast("prune", url, "--keep", "1") == (0, f"{url}: 1 checkpoint removed: 4\n")
