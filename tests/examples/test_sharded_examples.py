"""The examples under `holdfast run`, with replicas of several workers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from harness import end_leftovers, end_started, run

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = [EXAMPLES / "text/train.py", "--steps", 5, "--dim", 32, "--layers", 2, "--heads", 2, "--seq-len", 16]
TEXT += ["--global-batch", 16, "--micro-batch", 2, "--reduction", "exact"]
MATHSTRAL = EXAMPLES / "mathstral"


@pytest.fixture(autouse=True)
def nothing_left(tmp_path):
    yield
    end_started()
    end_leftovers(tmp_path)


def text_losses(tmp_path, parallel, nodes, shards):
    """Of the text example; its report says how many different shards there are."""
    texts = tmp_path / "texts"
    texts.mkdir(exist_ok=True)
    (texts / "a.txt").write_text("To be, or not to be, that is the question. " * 200)
    args = ["--parallel", parallel, "--text", texts, "--cache", tmp_path / "cache"]
    ran = run(tmp_path, "--nnodes", nodes, *TEXT, *args, job=parallel)
    assert ran.code == 0, ran.output[-3000:]
    assert len(ran.report["final"]["params_xxh3"].split(":")) == shards
    return ran.losses()


@pytest.mark.long
def test_the_text_example_learns_the_same_in_one_replica_or_two(tmp_path):
    fsdp = text_losses(tmp_path, "fsdp", 2, shards=2)
    assert len(fsdp) == 5
    assert text_losses(tmp_path, "hsdp", 4, shards=2) == fsdp  # at one shard degree to the bit


@pytest.mark.nightly
def test_the_text_example_learns_the_same_sharded_or_not(tmp_path):
    ddp = text_losses(tmp_path, "ddp", 2, shards=1)
    assert text_losses(tmp_path, "fsdp", 4, shards=4) == pytest.approx(ddp, rel=1e-5)


def holdfast(*args):
    """A command that must do its work."""
    command = [sys.executable, "-m", "holdfast.cli", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly  # three starts with transformers: 40 s
def test_a_mistral_model_is_trained_through_a_kill_and_comes_out_whole(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs pip install 'holdfast-train[mathstral]'")
    subprocess.run([sys.executable, MATHSTRAL / "make_tiny.py", tmp_path, "--exercises", "500"], check=True)
    tokens, model = tmp_path / "tokens", tmp_path / "model"
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    holdfast("data", "build", tmp_path / "text", "--out", tokens, "--tokenizer", model / "tokenizer.json")
    train = [
        MATHSTRAL / "train.py",
        MATHSTRAL / "tiny.toml",
        f"model.folder={model}",
        f"data.tokens={tokens}",
    ]
    train += ["train.steps=16"]
    calm = run(tmp_path, "--nnodes", 4, *train, job="calm")
    struck = run(
        tmp_path, "--nnodes", 4, "--spares", 1, "--fault", "kill-worker:rank=1,step=7", *train, job="struck"
    )
    assert (calm.code, struck.code) == (0, 0), struck.output[-3000:]
    assert len(struck.report["incidents"]) == 1
    assert struck.losses() == calm.losses()
    assert struck.report["final"]["params_xxh3"] == calm.report["final"]["params_xxh3"]

    holdfast("checkpoint", "export", tmp_path / "out", "--job", "struck", "--only", "model.", "--strip")
    (tmp_path / "out/config.json").write_text((model / "config.json").read_text())
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert digests(exported, 2) == calm.report["final"]["params_xxh3"]


def digests(model: torch.nn.Module, shards: int) -> str:
    """Of the pieces that the workers of a replica have of a model's parameters, as reports have them."""
    rows = [xxhash.xxh3_64() for _ in range(shards)]
    for p in model.parameters():
        for row, piece in zip(rows, p.detach().chunk(shards), strict=True):
            row.update(piece.contiguous().numpy().tobytes())
    return ":".join(row.hexdigest() for row in rows)
