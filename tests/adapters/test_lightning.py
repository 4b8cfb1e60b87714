"""Lightning's Trainer at level 2: what it computes is what one undisturbed process computes, bit by bit."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
from bodies import digest
from ends import LIMIT_S, by_itself, ends
from harness import run
from resized import check, smaller_and_whole_again
from torch.utils.data import DataLoader, Dataset, IterableDataset

import holdfast.lightning  # before Lightning looks at the environment
from holdfast.adapters.versions import LIGHTNING
from holdfast.errors import StateChanged, UsageError

import lightning  # isort: skip
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization  # isort: skip
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop  # isort: skip

SCRIPT = Path(__file__).parent / "train_lightning.py"
STEPS = 18

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.framework("lightning"),
    # Lightning's own, of this version of torch and of a machine without a GPU.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


def alone(folder: Path, *options: str) -> dict:
    """By one process, which computes all micro-batches of a step."""
    return by_itself(folder, SCRIPT, folder, 4, *options)


def in_a_job(
    home: Path,
    *options: object,
    nodes: str = "2",
    script: tuple[str, ...] = (),
    worlds: tuple[int, ...] = (2,),
) -> list[dict]:
    """By two workers. worlds: the sizes that the job begins with."""
    (home / "out").mkdir()
    ran = run(home, "--nnodes", nodes, *options, SCRIPT, home / "out", 2, *script, timeout=LIMIT_S)
    check(ran, *worlds)
    return ends(home / "out")


def result(end: dict) -> dict:
    """Without what a newcomer was not there for."""
    return {name: value for name, value in end.items() if name not in ("ended", "batches", "validated")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    return alone(tmp_path_factory.mktemp("alone"))


@pytest.mark.long
@pytest.mark.capability("level 2", "kill")
def test_a_killed_worker_changes_nothing(tmp_path, undisturbed):
    ended = in_a_job(tmp_path, "--spares", 1, "--fault", "kill-worker:rank=0,step=8")
    assert [result(end) for end in ended] == 2 * [result(undisturbed)]
    newcomer, survivor = sorted((end["ended"] for end in ended), key=len)
    assert survivor == [*range(1, STEPS + 1)]  # each step's hooks once
    assert newcomer == survivor[-len(newcomer) :]
    every = [[epoch, batch] for epoch in range(3) for batch in range(12)]
    newcomer, survivor = sorted((end["batches"] for end in ended), key=len)
    assert survivor == every  # each batch's hooks once
    assert newcomer == every[-len(newcomer) :]
    for end in ended:
        assert end["validated"] == undisturbed["validated"][-len(end["validated"]) :]


@pytest.mark.long
@pytest.mark.capability("level 2")
def test_what_is_trained_is_what_lightning_counts(undisturbed):
    assert (undisturbed["steps"], undisturbed["epochs"]) == (STEPS, 3)
    assert undisturbed["seen"] == STEPS * 16  # without what the validations saw
    assert [step for step, _ in undisturbed["validated"]] == [6, 12, 18]
    assert undisturbed["rate"] == pytest.approx(1e-2 * 0.7**3)


@pytest.mark.nightly
@pytest.mark.capability("level 2")
@pytest.mark.parametrize("step", [5, 6, 7])
def test_an_update_that_fails_on_one_worker(tmp_path, undisturbed, step):
    """It fetches the state from the other, and its loops do what follows the step as if it had updated it itself."""
    ended = in_a_job(tmp_path, script=("0", str(step)))
    assert [result(end) for end in ended] == 2 * [result(undisturbed)]
    assert [end["ended"] for end in ended] == 2 * [undisturbed["ended"]]
    assert [end["validated"] for end in ended] == 2 * [undisturbed["validated"]]


@pytest.mark.nightly
@pytest.mark.capability("level 2")
def test_the_last_update_fails_on_one_worker(tmp_path, undisturbed):
    """The other one has the result, and the job may end with it."""
    ended = in_a_job(tmp_path, script=("0", str(STEPS)))
    assert ended
    assert all(result(end) == result(undisturbed) for end in ended)


@pytest.mark.nightly
@pytest.mark.capability("kill")
def test_a_survivor_that_goes_back_to_a_snapshot(tmp_path, undisturbed):
    """Of an epoch before: the other worker, which alone had the newest state, is lost in the same step."""
    options = ("--spares", 1, "--snapshot-every", 4, "--fault", "kill-worker:rank=0,step=7,phase=commit")
    ended = in_a_job(tmp_path, *options, script=("0", "8"))
    assert [result(end) for end in ended] == 2 * [result(undisturbed)]


@pytest.mark.nightly
@pytest.mark.capability("kill")
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "vote", "update", "commit"])
@pytest.mark.parametrize("step", [5, 6, 7])
def test_a_kill_in_any_phase_around_a_validation(tmp_path, undisturbed, phase, step):
    ended = in_a_job(tmp_path, "--spares", 1, "--fault", f"kill-worker:rank=1,step={step},phase={phase}")
    assert [result(end) for end in ended] == 2 * [result(undisturbed)]
    for end in ended:
        assert end["validated"] == undisturbed["validated"][-len(end["validated"]) :]


@pytest.mark.nightly
@pytest.mark.capability("resize")
def test_a_job_that_gets_smaller(tmp_path, undisturbed):
    ended = in_a_job(tmp_path, "--fault", "kill-node:node=1,step=5", nodes="1:2", worlds=(2, 1))
    assert {json.dumps(result(end)) for end in ended} == {json.dumps(result(undisturbed))}


@pytest.mark.nightly
@pytest.mark.capability("resize")
def test_a_job_that_gets_smaller_and_whole_again(tmp_path, monkeypatch, undisturbed):
    (tmp_path / "out").mkdir()
    smaller_and_whole_again(tmp_path, monkeypatch, SCRIPT, tmp_path / "out", 2)
    ended = ends(tmp_path / "out")
    assert [result(end) for end in ended] == 2 * [result(undisturbed)]
    newcomer, survivor = sorted((end["ended"] for end in ended), key=len)
    assert newcomer == survivor[-len(newcomer) :]


@pytest.mark.nightly
@pytest.mark.capability("kill")
def test_early_stopping_counts_through_a_kill(tmp_path):
    wanted = alone(tmp_path / "alone", "2")
    assert wanted["steps"] < 8 * 6
    ended = in_a_job(tmp_path, "--spares", 1, "--fault", "kill-worker:rank=0,step=10", script=("2",))
    assert [result(end) for end in ended] == 2 * [result(wanted)]


# ------------------------------------------------------------ what is refused


class Stream(IterableDataset):
    def __iter__(self):
        yield from ()


class Four(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(2)


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.line(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Later(Line):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.LazyLinear(1)


class OwnStep(Line):
    def optimizer_step(self, *args, **kwargs):
        """Another update."""


class TwoOptimizers(Line):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class Searching(Line):
    """With an optimizer that evaluates the loss by itself."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Annealing(Line):
    """With an optimizer that holds a closure, which would have to be saved."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        optimizer.param_groups[0]["anneal"] = lambda rate: rate / 2
        return optimizer


class Handle(torch.nn.Linear):
    """Holds something which cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


def fit(folder, module, data, **options):
    options = {"max_steps": 1, "strategy": "holdfast", **options}
    trainer = lightning.Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, DataLoader(data, 2))
    return trainer


@pytest.mark.parametrize(
    ("module", "data", "options", "what"),
    [
        (Line, Stream, {}, "map-style"),
        (OwnStep, Four, {}, "optimizer_step"),
        (Later, Four, {}, "does not have a shape"),
        (TwoOptimizers, Four, {}, "2 optimizers"),
        (Searching, Four, {}, r"LBFGS\.step needs a closure"),
        (Annealing, Four, {}, r"optimizer.*param_groups\.0\.anneal"),
        (Line, Four, {"max_steps": -1, "max_epochs": -1}, "an end"),
        (
            Line,
            Four,
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            "gradient_clip_algorithm",
        ),
        (Line, Four, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 1}, "reload_dataloaders"),
        (Line, Four, {"max_time": "00:01:00:00"}, "max_time"),
        (Line, Four, {"val_check_interval": "00:01:00:00"}, "val_check_interval"),
        (Line, Four, {"overfit_batches": 1}, "overfit_batches"),
    ],
)
def test_what_cannot_work_is_refused_before_a_step(tmp_path, module, data, options, what):
    with pytest.raises(UsageError, match=what):
        fit(tmp_path, module(), data(), **options)


def test_a_model_that_cannot_be_copied_trains_as_any_other(tmp_path):
    module = Line()
    module.line = Handle(2, 1)
    assert fit(tmp_path, module, Four()).global_step == 1


def test_a_rule_for_a_buffer_that_is_not_there_is_refused(tmp_path):
    strategy = holdfast.lightning.HoldfastStrategy(buffers={"model.seen": "sum"})
    line = r'HoldfastStrategy\(buffers=\{"model\.seen": "sum"\}\): none of the protected modules has a buffer of this name'
    with pytest.raises(UsageError, match=line):
        fit(tmp_path, Line(), Four(), strategy=strategy)


class Halving(Line):
    """Changes itself after each step, outside of the commit."""

    def on_train_batch_end(self, *args):
        halve(self)


def halve(module):
    with torch.no_grad():
        module.line.weight.mul_(0.5)


def test_a_hook_that_changes_the_module_is_told_what_to_write(tmp_path):
    with pytest.raises(StateChanged) as caught:
        fit(tmp_path, Halving(), Four(), max_steps=3)
    text = str(caught.value)
    assert "HoldfastStrategy(on_commit=lambda step: update(model))" in text
    assert "step.apply(optimizer" not in text


def test_what_is_written_so_is_part_of_the_commit(tmp_path):
    module, seen = Line(), []

    def change(step):
        seen.append(step.index)
        halve(module)

    fit(
        tmp_path,
        module,
        Four(),
        max_steps=3,
        strategy=holdfast.lightning.HoldfastStrategy(on_commit=change),
    )
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("version", ["2.5.1", "2.7.0", "3.0"])
def test_other_versions_are_refused(version):
    with pytest.raises(UsageError, match=version):
        LIGHTNING.check(version, "holdfast.lightning")


def test_two_trainings_of_a_script_without_a_job(tmp_path):
    for _ in range(2):
        assert fit(tmp_path, Line(), Four()).global_step == 1


# ------------------------------------------------------------ the seams


SEAMS = {
    (_TrainingEpochLoop, "reset"): "self",
    (_TrainingEpochLoop, "advance"): "self data_fetcher",
    (_TrainingEpochLoop, "on_advance_end"): "self data_fetcher",
    (_TrainingEpochLoop, "update_lr_schedulers"): "self interval update_plateau_schedulers",
    (_TrainingEpochLoop, "_update_learning_rates"): "self interval update_plateau_schedulers",
    (_TrainingEpochLoop, "_should_check_val_fx"): "self data_fetcher",
    (_AutomaticOptimization, "run"): "self optimizer batch_idx kwargs",
    (_AutomaticOptimization, "_training_step"): "self kwargs",
}


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam[1])
def test_a_seam_is_where_it_was(seam):
    """The methods of Lightning's loops that the adapter replaces or calls, with their parameters."""
    kind, name = seam
    assert " ".join(inspect.signature(getattr(kind, name)).parameters) == SEAMS[seam]


READ = {
    (_TrainingEpochLoop, "reset"): "65900c493f49b481",
    (_TrainingEpochLoop, "advance"): "a89952bfe388338e",
    (_TrainingEpochLoop, "on_advance_end"): "8edd3ae965992094",
    (_TrainingEpochLoop, "update_lr_schedulers"): "22b3ea647a978e62",
    (_AutomaticOptimization, "run"): "2f8e8f756d6b4a95",
    (_AutomaticOptimization, "_training_step"): "d2394d36b08ca846",
}
"""Of 2.6.0 to 2.6.6: what the adapter does in the place of Lightning, or goes by."""


@pytest.mark.parametrize("method", READ, ids=lambda method: method[1])
def test_what_the_adapter_does_in_its_place_has_been_read(method):
    """Red with a new version: read what changed, do the same in the adapter, and take the new digest."""
    kind, name = method
    assert digest(getattr(kind, name)) == READ[method]


def test_the_strategy_is_known_by_its_name():
    from lightning.pytorch.strategies import StrategyRegistry

    assert StrategyRegistry["holdfast"]["strategy"] is holdfast.lightning.HoldfastStrategy
