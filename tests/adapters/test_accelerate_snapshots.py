"""Accelerate at level 1: a killed training goes on from its newest snapshot, bit by bit."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.utils import DistributedType
from ends import ends
from gate import KILLED_AT
from killed import killed_and_gone_on, train, two_ranks
from torch.utils.data import DataLoader

from holdfast.adapters import world
from holdfast.adapters.accelerate.snapshots import SPLITTING, Snapshots
from holdfast.adapters.versions import ACCELERATE
from holdfast.checkpoint import flush
from holdfast.errors import UsageError

SCRIPT = Path(__file__).parent / "train_accelerate_snapshots.py"
STEPS = 24

pytestmark = [pytest.mark.timeout(900), pytest.mark.framework("accelerate")]


@pytest.fixture(autouse=True)
def level_1(monkeypatch):
    """Other tests of this process import an adapter of level 2."""
    monkeypatch.setattr(world, "_runs", [])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The end of a training that nobody killed, with the one sampler or the other."""
    found = {}

    def end(seedable: int) -> dict:
        if seedable not in found:
            folder = tmp_path_factory.mktemp("alone")
            assert train(SCRIPT, folder, 0, seedable) == 0
            (found[seedable],) = ends(folder)
            assert found[seedable]["steps"] == STEPS
        return found[seedable]

    return end


@pytest.mark.long
@pytest.mark.capability("level 1")
@pytest.mark.parametrize(
    ("step", "seedable"),
    [
        (9, 0),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((6, 0), (7, 0), (STEPS, 0), (9, 1))),
    ],
)
def test_a_killed_training_goes_on(tmp_path, undisturbed, step, seedable):
    """From the middle of an epoch, from its last batch (6), from its first one, and from the last step of all."""
    found = killed_and_gone_on(SCRIPT, tmp_path, step, seedable)
    assert found == [{**undisturbed(seedable), "resumed": step}]


@pytest.mark.nightly
@pytest.mark.capability("level 1")
def test_ranks_of_ddp_go_on_together(tmp_path, monkeypatch):
    undisturbed, killed, _ = two_ranks(tmp_path, monkeypatch, SCRIPT)
    (resumed,) = {end["resumed"] for end in killed}
    assert 0 < resumed < KILLED_AT
    assert killed == [{**end, "resumed": resumed} for end in undisturbed]


@pytest.fixture
def prepared():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    loaders = [DataLoader(torch.ones(8, 1), 2), DataLoader(torch.ones(8, 1), 2)]
    yield accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), *loaders)
    accelerator.free_memory()
    accelerator.end_training()


def test_gradients_that_are_kept_over_batches_are_not_lost(tmp_path, prepared):
    """A save after each batch is one after each update."""
    accelerator, model, optimizer, loader, _ = prepared
    snapshots = Snapshots(accelerator, every=1, to=f"{tmp_path},every=1,keep=9")
    saved = []
    for step, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        saved.append(snapshots.save(step))
        flush()
    assert saved == [False, True, False, True]


def test_what_was_loaded_by_load_state_stays_when_it_is_newer(tmp_path, prepared):
    accelerator, model, *_ = prepared
    to = f"{tmp_path},every=1,keep=9"
    assert Snapshots(accelerator, every=1, to=to).save(7)
    before = model.weight.detach().clone()
    model.weight.data.add_(1)
    later = Snapshots(accelerator, every=1, to=to)
    assert later.newest(own=7) is None
    assert torch.equal(model.weight, before + 1)
    assert later.newest(own=6) == 7
    assert torch.equal(model.weight, before)


def test_a_save_within_a_loop_over_other_data_is_refused(tmp_path, prepared):
    accelerator, _, _, loader, tests = prepared
    snapshots = Snapshots(accelerator, every=1, to=str(tmp_path))
    iter_of_training, iter_of_tests = iter(loader), iter(tests)
    next(iter_of_training), next(iter_of_tests)
    with pytest.raises(UsageError, match="another data loader"):
        snapshots.save(1)


def test_skipping_by_hand_is_refused(tmp_path, prepared):
    accelerator, _, _, loader, _ = prepared
    Snapshots(accelerator, every=1, to=str(tmp_path))
    with pytest.raises(UsageError, match="remove skip_first_batches"):
        accelerator.skip_first_batches(loader, 1)


def test_an_accelerator_that_prepared_nothing_is_refused():
    with pytest.raises(UsageError, match="after prepare"):
        Snapshots(SimpleNamespace(_models=[]), every=1)


@pytest.mark.capability("sharded", refused=True)
@pytest.mark.parametrize("how", SPLITTING)
def test_a_state_that_is_split_is_refused(how):
    with pytest.raises(UsageError, match=f"{how.value} splits"):
        Snapshots(SimpleNamespace(_models=[1], distributed_type=how), every=1)


@pytest.mark.capability("sharded", refused=True)
def test_a_mesh_is_refused():
    meshed = SimpleNamespace(_models=[1], distributed_type=DistributedType.MULTI_GPU, parallelism_config=1)
    with pytest.raises(UsageError, match="parallelism_config splits"):
        Snapshots(meshed, every=1)


def test_loaders_that_keep_their_place_elsewhere_are_refused():
    dispatched = DataLoaderDispatcher.__new__(DataLoaderDispatcher)
    stateful = DataLoaderShard.__new__(DataLoaderShard)
    stateful.use_stateful_dataloader = True
    for loader, why in ((dispatched, "dispatch_batches=False"), (stateful, "remove use_stateful_dataloader")):
        fake = SimpleNamespace(_models=[1], distributed_type=DistributedType.NO, _dataloaders=[loader])
        with pytest.raises(UsageError, match=why):
            Snapshots(fake, every=1)


@pytest.mark.parametrize("version", ["1.1.1", "1.16.0"])
def test_a_version_that_is_not_supported_is_refused(version):
    with pytest.raises(UsageError, match=r"accelerate>=1\.2,<1\.16"):
        ACCELERATE.check(version, "Snapshots")


def test_a_level_2_is_refused(monkeypatch):
    monkeypatch.setattr(world, "_runs", [object()])
    with pytest.raises(UsageError, match="remove either Snapshots"):
        Snapshots(SimpleNamespace(_models=[1]), every=1)


def test_a_loader_says_when_it_reads():
    """The order of what `_Place` listens to."""
    source = inspect.getsource(DataLoaderShard.__iter__)
    parts = (
        "self.begin()",
        "self.set_epoch(self.iteration)",
        "self._update_state_dict()",
        "next_batch = next(",
        "batch_index >= self.skip_batches",
        "yield current_batch",
        "self.end_of_dataloader = True",
        "self._update_state_dict()",
        "yield current_batch",
        "self.iteration += 1",
        "self.end()",
    )
    at = 0
    for part in parts:
        at = source.index(part, at) + 1
    assert source.count("self._update_state_dict()") == 2
    for name in ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"):
        assert name in inspect.getsource(Accelerator.__init__)
