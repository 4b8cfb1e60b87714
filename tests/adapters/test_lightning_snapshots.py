"""Lightning's Trainer at level 1: a killed training goes on from its newest snapshot, bit by bit."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch
from ends import ends
from gate import KILLED_AT
from killed import killed_and_gone_on, train, two_ranks
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch.utils.data import DataLoader

from holdfast.adapters import world
from holdfast.adapters.lightning.snapshots import Snapshots
from holdfast.errors import UsageError

SCRIPT = Path(__file__).parent / "train_lightning_snapshots.py"
STEPS = 24

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.framework("lightning"),
    # Lightning's own, of this version of torch and of a machine without a GPU.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


@pytest.fixture(autouse=True)
def level_1(monkeypatch):
    """Other tests of this process import holdfast.lightning."""
    monkeypatch.setattr(world, "_runs", [])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("alone")
    assert train(SCRIPT, folder) == 0
    (end,) = ends(folder)
    assert end["steps"] == STEPS
    return end


@pytest.mark.long
@pytest.mark.capability("level 1")
@pytest.mark.parametrize(
    "step", [3, *(pytest.param(s, marks=pytest.mark.nightly) for s in (2, 6, 9, STEPS - 1))]
)
def test_a_killed_training_goes_on(tmp_path, undisturbed, step):
    """Just after a validation, in the middle of an epoch, from its begin (6), and from just before the end."""
    assert killed_and_gone_on(SCRIPT, tmp_path, step) == [{**undisturbed, "began": step}]


@pytest.mark.nightly
@pytest.mark.capability("level 1")
def test_ranks_of_ddp_go_on_together(tmp_path, monkeypatch):
    undisturbed, killed, output = two_ranks(tmp_path, monkeypatch, SCRIPT)
    assert output.count("batches of the epoch that were already trained on") == 1
    (began,) = {end["began"] for end in killed}
    assert 0 < began < KILLED_AT
    assert killed == [{**end, "began": began} for end in undisturbed]


class Module(lightning.LightningModule):
    """Counts its updates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.updates = 0

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def on_before_zero_grad(self, optimizer):
        self.updates += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


class FromIterator(Module):
    def training_step(self, dataloader_iter):
        return self.net(next(dataloader_iter)[0]).sum()


def trainer(folder: Path, *callbacks: lightning.Callback, epochs: int = 1) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=[*callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )


def data(**more) -> DataLoader:
    return DataLoader(torch.ones(8, 1), 2, **more)


def test_a_checkpoint_of_lightnings_own_wins_when_it_is_newer(tmp_path):
    """A snapshot of step 3 is there, and its checkpoint is of step 4, or of step 2 with another one."""
    to = str(tmp_path / "saved")
    # One alone: a snapshot whose turn comes while another is being written is left out.
    trainer(tmp_path, Snapshots(every=3, to=to)).fit(Module(), data())
    for steps, left in ((4, 4), (2, 5)):
        own = trainer(tmp_path, epochs=1)
        own.fit_loop.epoch_loop.max_steps = steps
        own.fit(Module(), data())
        own.save_checkpoint(tmp_path / f"{steps}.ckpt")
        module = Module()
        trainer(tmp_path, Snapshots(every=9, to=to), epochs=2).fit(
            module, data(), ckpt_path=tmp_path / f"{steps}.ckpt", weights_only=False
        )
        assert module.updates == left


def test_a_test_after_the_training_reads_what_the_user_names(tmp_path, monkeypatch):
    snapshots = Snapshots(every=1, to=str(tmp_path / "saved"))
    trained, module = trainer(tmp_path, snapshots), Module()
    trained.fit(module, data())
    trained.save_checkpoint(tmp_path / "end.ckpt")
    end = module.net.weight.detach().clone()
    module.net.weight.data.zero_()
    module.test_step = lambda batch, batch_idx: None
    trained.test(module, data(), ckpt_path=tmp_path / "end.ckpt", weights_only=False, verbose=False)
    assert torch.equal(module.net.weight, end)


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
@pytest.mark.capability("sharded", refused=True)
def test_a_state_that_is_split_is_refused(strategy):
    with pytest.raises(UsageError, match=f"{strategy.__name__} splits"):
        Snapshots(every=1).setup(SimpleNamespace(strategy=strategy.__new__(strategy)), Module(), "fit")


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter`:UserWarning")
def test_data_whose_place_cannot_be_found_is_refused(tmp_path):
    own = data(shuffle=True, generator=torch.Generator())
    with pytest.raises(UsageError, match="remove generator="):
        trainer(tmp_path, Snapshots(every=1, to=str(tmp_path))).fit(Module(), own)
    with pytest.raises(UsageError, match="with the argument batch"):
        trainer(tmp_path, Snapshots(every=1, to=str(tmp_path))).fit(FromIterator(), data())


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path):
    module = Module()
    module.on_save_checkpoint = lambda checkpoint: checkpoint.update(where=tmp_path)
    with pytest.raises(UsageError, match="where"):
        trainer(tmp_path, Snapshots(every=3, to=str(tmp_path))).fit(module, data())
    assert module.updates == 0


def test_a_second_training_with_it_is_refused(tmp_path):
    snapshots = Snapshots(every=9, to=str(tmp_path / "saved"))
    trainer(tmp_path, snapshots).fit(Module(), data())
    with pytest.raises(UsageError, match="create one for each Trainer"):
        trainer(tmp_path, snapshots).fit(Module(), data())


def test_level_2_is_refused(monkeypatch):
    monkeypatch.setattr(world, "_runs", [object()])
    with pytest.raises(UsageError, match="remove either Snapshots"):
        Snapshots(every=1)


SEAMS = {
    (_CheckpointConnector, "resume_start"): "self checkpoint_path weights_only",
    (_CheckpointConnector, "dump_checkpoint"): "self weights_only",
    (_FitLoop, "setup_data"): "self",
    (_TrainingEpochLoop, "on_run_start"): "self data_fetcher",
    (_TrainingEpochLoop, "advance"): "self data_fetcher",
}


@pytest.mark.parametrize(("owner", "seam"), SEAMS)
def test_a_seam_is_where_it_was(owner, seam):
    assert " ".join(inspect.signature(getattr(owner, seam)).parameters) == SEAMS[owner, seam]
