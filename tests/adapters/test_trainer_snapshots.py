"""Hugging Face's Trainer at level 1: a killed training goes on from its newest snapshot, bit by bit."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from ends import ends
from killed import killed_and_gone_on, train, two_ranks

from holdfast import checkpoint
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
    with pytest.raises(UsageError, match="remove either Snapshots"):
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


class Stream(torch.utils.data.IterableDataset):
    """Without a length: five batches of one sample."""

    def __iter__(self):
        for number in range(5):
            yield {"x": torch.full((2,), float(number)), "labels": torch.ones(1)}


class Line(torch.nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.line, self.seen = torch.nn.Linear(2, 1), seen

    def forward(self, x, labels=None):
        self.seen.append(int(x[0, 0]))
        return {"loss": (self.line(x) - labels).square().mean()}


class Stops(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop |= state.global_step == self.step


def stream(folder, stop=None, resume=None, snapshots=0):
    """Which samples a training reads: to this step, or from the newest state on. snapshots: steps between two."""
    seen = []
    transformers.set_seed(0)
    trainer = transformers.Trainer(
        model=Line(seen),
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=1,
            max_steps=12,
            save_strategy="steps",
            save_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Stream(),
        callbacks=[Stops(stop)],
    )
    if snapshots:
        resume = Snapshots(trainer, every=snapshots, to=str(folder / "snapshots")).newest()
        assert resume is not None or stop is not None
    trainer.train(resume_from_checkpoint=resume)
    checkpoint.flush()
    return seen


@pytest.mark.parametrize(("step", "read"), [(3, [3, 4, 0, 1, 2, 3, 4, 0, 1]), (7, [0, 1, 2, 3, 4])])
def test_a_stream_without_a_length_goes_on_as_from_the_trainers_own_checkpoint(
    tmp_path, monkeypatch, step, read
):
    """In its first pass with the next sample; in a later one with the first of a pass. So it is on the page."""
    monkeypatch.setattr(world, "_runs", [])
    undisturbed = stream(tmp_path / "whole")
    assert undisturbed == [*range(5), *range(5), 0, 1]
    assert stream(tmp_path / "own", stop=step) == undisturbed[:step]
    # A snapshot of a step is taken when the next one begins.
    assert stream(tmp_path / "ours", stop=step + 1, snapshots=step) == undisturbed[: step + 1]
    assert stream(tmp_path / "own", resume=str(tmp_path / "own" / f"checkpoint-{step}")) == read
    assert stream(tmp_path / "ours", snapshots=100) == read
