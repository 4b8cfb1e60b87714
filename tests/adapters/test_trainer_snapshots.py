"""Hugging Face's Trainer at level 1: a killed training goes on from its newest snapshot, bit by bit."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from ends import ends
from killed import killed_and_gone_on, train, two_ranks

from holdfast.adapters import world
from holdfast.adapters.huggingface.snapshots import Snapshots
from holdfast.errors import UsageError

SCRIPT = Path(__file__).parent / "train_snapshots.py"
STEPS = 18

pytestmark = [pytest.mark.timeout(900), pytest.mark.framework("transformers")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("alone")
    assert train(SCRIPT, folder) == 0
    (end,) = ends(folder)
    assert end["steps"] == STEPS
    return end


@pytest.mark.nightly
@pytest.mark.capability("level 1")
@pytest.mark.parametrize("step", [5, 7, 12, STEPS])
def test_a_killed_training_goes_on(tmp_path, undisturbed, step):
    """From the middle of an epoch, from its begin (the step after 6), and from just before the end."""
    assert killed_and_gone_on(SCRIPT, tmp_path, step) == [{**undisturbed, "resumed": True}]


@pytest.mark.nightly
@pytest.mark.capability("level 1")
def test_ranks_of_ddp_go_on_together(tmp_path, monkeypatch):
    undisturbed, killed, _ = two_ranks(tmp_path, monkeypatch, SCRIPT)
    assert killed == [{**end, "resumed": True} for end in undisturbed]


@pytest.mark.parametrize("how", ["is_deepspeed_enabled", "is_fsdp_enabled"])
def test_a_state_that_is_split_is_refused(monkeypatch, how):
    monkeypatch.setattr(world, "_runs", [])
    trainer = SimpleNamespace(**{"is_deepspeed_enabled": False, "is_fsdp_enabled": False, how: True})
    with pytest.raises(UsageError, match="DeepSpeed and FSDP"):
        Snapshots(trainer, every=1)


def test_no_number_of_steps_is_refused():
    with pytest.raises(UsageError, match="every=0"):
        Snapshots(SimpleNamespace(), every=0)


def test_level_2_is_refused(monkeypatch):
    monkeypatch.setattr(world, "_runs", [object()])
    with pytest.raises(UsageError, match="leave Snapshots out"):
        Snapshots(SimpleNamespace(), every=1)


SEAMS = {
    "_load_from_checkpoint": "self resume_from_checkpoint model",
    "_load_optimizer_and_scheduler": "self checkpoint",
    "_load_rng_state": "self checkpoint",
}


@pytest.mark.parametrize("seam", SEAMS)
def test_a_seam_is_where_it_was(seam):
    """The methods that the Trainer asks for parts of a checkpoint."""
    assert " ".join(inspect.signature(getattr(transformers.Trainer, seam)).parameters) == SEAMS[seam]
