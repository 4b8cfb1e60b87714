"""The examples under `holdfast run`, with replicas of several workers."""

from pathlib import Path

import pytest
from harness import end_leftovers, end_started, run

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = [EXAMPLES / "text/train.py", "--steps", 5, "--dim", 32, "--layers", 2, "--heads", 2, "--seq-len", 16]
TEXT += ["--global-batch", 16, "--micro-batch", 2, "--reduction", "exact"]


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


@pytest.mark.nightly
def test_the_text_example_learns_the_same_in_one_replica_or_two(tmp_path):
    fsdp = text_losses(tmp_path, "fsdp", 2, shards=2)
    assert len(fsdp) == 5
    assert text_losses(tmp_path, "hsdp", 4, shards=2) == fsdp  # at one shard degree to the bit


@pytest.mark.nightly
def test_the_text_example_learns_the_same_sharded_or_not(tmp_path):
    ddp = text_losses(tmp_path, "ddp", 2, shards=1)
    assert text_losses(tmp_path, "fsdp", 4, shards=4) == pytest.approx(ddp, rel=1e-5)
