"""Lightning's Trainer at level 2 against plain Lightning: the same script does the same, hook by hook.

Both run in this process: under plain Python a training with the adapter is a job of one.
"""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import holdfast.lightning  # noqa: F401 - before Lightning looks at the environment
from holdfast.adapters.lightning.refusals import refuse_monitors
from holdfast.errors import UsageError

import lightning  # isort: skip
from lightning.pytorch.callbacks import (  # isort: skip
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger  # isort: skip
from lightning.pytorch.loops.optimization.automatic import Closure  # isort: skip
from lightning.pytorch.utilities.exceptions import MisconfigurationException  # isort: skip

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.framework("lightning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    # Lightning's own, of settings that a drawn case has and a person would not choose.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

HOOKS = (
    "on_fit_start",
    "on_fit_end",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)


@dataclass
class Case:
    """A training. Plain values, so that a failing one can be read."""

    samples: int = 12
    batch: int = 2
    drop_last: bool = False
    accumulate: int = 1
    accumulate_from: dict[int, int] = field(default_factory=dict)
    epochs: int = 3
    max_steps: int = -1
    limit: float | int = 1.0
    validate: bool = True
    val_check_interval: float | int = 1.0
    check_val_every_n_epoch: int | None = 1
    optimizer: str = "sgd"
    scheduler: str = "none"
    interval: str = "step"
    frequency: int = 1
    clip: float | None = None
    precision: Any = "32-true"
    order: str = "as it is"
    callbacks: tuple[str, ...] = ()
    sanity: int = 0
    none_at: int = -1
    stop_at: int = -1


class Net(lightning.LightningModule):
    """Records which of its hooks come when."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
        self.seen: list[Any] = []

    def loss(self, batch):
        x, y = batch
        return (self.net(x).squeeze(-1) - y).square().mean()

    def training_step(self, batch, batch_idx):
        self.note("training_step", batch_idx, batch[1].tolist())
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return None if self.trainer.global_step == self.case.none_at else loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.note("on_before_batch_transfer")
        return batch

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = len(self.seen)

    def lr_scheduler_step(self, scheduler, metric):
        self.note("lr_scheduler_step")
        if self.case.scheduler == "doubled":
            scheduler.step()
        super().lr_scheduler_step(scheduler, metric)

    def note(self, name, *more):
        rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        at = (self.trainer.current_epoch, self.trainer.global_step, self.trainer.fit_loop.total_batch_idx)
        self.seen.append((name, at, rates, self.trainer.is_last_batch, *more))

    def configure_optimizers(self):
        case = self.case
        kind = torch.optim.AdamW if case.optimizer == "adamw" else torch.optim.SGD
        more = {"momentum": 0.9, "weight_decay": 0.1} if case.optimizer == "sgd" else {}
        optimizer = kind(self.parameters(), 0.05, **more)
        schedulers = torch.optim.lr_scheduler
        match case.scheduler:
            case "none":
                return optimizer
            case "step" | "doubled":
                scheduler = schedulers.StepLR(optimizer, 2, 0.5)
            case "onecycle":
                # Not beyond its end: a schedule over epochs comes to fewer steps.
                total = int(self.trainer.estimated_stepping_batches) + 1
                scheduler = schedulers.OneCycleLR(optimizer, 0.1, total_steps=total)
            case "cosine":
                scheduler = schedulers.CosineAnnealingLR(optimizer, 5)
            case "plateau":
                scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        found = {"scheduler": scheduler, "interval": case.interval, "frequency": case.frequency}
        return {"optimizer": optimizer, "lr_scheduler": {**found, "monitor": "val_loss", "strict": False}}


def _hook(name):
    def hook(self, *args, **kwargs):
        numbers = [a for a in args if isinstance(a, int)]
        self.note(name, *numbers)

    return hook


class Watching(Callback):
    """As the module, and it keeps a count for checkpoints."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.losses: list[float] = []

    def state_dict(self):
        return {"counts": self.counts}

    def load_state_dict(self, state):
        self.counts = state["counts"]

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.counts["on_train_batch_end"] = self.counts.get("on_train_batch_end", 0) + 1
        trainer.should_stop |= trainer.fit_loop.total_batch_idx == module.case.stop_at
        self.losses.append(float(outputs["loss"]) if outputs else -1.0)


for _name in HOOKS:
    setattr(Net, _name, _hook(_name))
    if _name not in vars(Watching):
        setattr(
            Watching,
            _name,
            lambda self, *args, _name=_name: self.counts.update({_name: self.counts.get(_name, 0) + 1}),
        )


def data(samples: int) -> TensorDataset:
    x = torch.sin(torch.arange(samples * 4.0).reshape(samples, 4))
    return TensorDataset(x, torch.arange(float(samples)) / samples)


def loader(case: Case) -> DataLoader:
    dataset = data(case.samples)
    more: dict[str, Any] = {"batch_size": case.batch, "drop_last": case.drop_last}
    match case.order:
        case "shuffled by its own generator":
            more |= {"shuffle": True, "generator": torch.Generator().manual_seed(7)}
        case "weighted":
            generator = torch.Generator().manual_seed(8)
            more["sampler"] = WeightedRandomSampler(
                range(1, case.samples + 1), case.samples, generator=generator
            )
        case "subset":
            generator = torch.Generator().manual_seed(9)
            more["sampler"] = SubsetRandomSampler(range(0, case.samples, 2), generator=generator)
    return DataLoader(dataset, **more)


def callbacks(case: Case, folder: Path) -> list[Callback]:
    found: list[Callback] = [Watching()]
    for name in case.callbacks:
        match name:
            case "stopping":
                found.append(EarlyStopping("val_loss", patience=1, min_delta=0.05, strict=False))
            case "average":
                found.append(WeightAveraging(use_buffers=False))
            case "ema":
                found.append(EMAWeightAveraging(decay=0.5, update_every_n_steps=2))
            case "best":
                found.append(
                    ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=2, save_last=True)
                )
            case "steps":
                found.append(ModelCheckpoint(folder / "steps", every_n_train_steps=2, save_top_k=-1))
            case "epochs":
                found.append(
                    ModelCheckpoint(folder / "epochs", every_n_epochs=2, filename="same", save_top_k=-1)
                )
    if case.accumulate_from:
        found.append(GradientAccumulationScheduler(dict(case.accumulate_from)))
    return found


def train(case: Case, folder: Path, **options: Any) -> dict[str, Any]:
    """What there is to compare at the end of a training."""
    folder.mkdir(parents=True)
    lightning.seed_everything(3, verbose=False)
    module, own = Net(case), callbacks(case, folder)
    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_epochs=case.epochs,
        max_steps=case.max_steps,
        accumulate_grad_batches=case.accumulate,
        limit_train_batches=case.limit,
        limit_val_batches=1.0 if case.validate else 0,
        val_check_interval=case.val_check_interval,
        check_val_every_n_epoch=case.check_val_every_n_epoch,
        gradient_clip_val=case.clip,
        precision=case.precision,
        num_sanity_val_steps=case.sanity,
        callbacks=own,
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in own),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    Closure.warning_cache.clear()  # each is said once in a process
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, loader(case), DataLoader(data(5), 2))
    optimizer = trainer.optimizers[0].state_dict()
    return {
        "hooks": module.seen,
        "counts": own[0].counts,
        "losses": own[0].losses,
        "loops": trainer.fit_loop.state_dict(),
        "steps": (trainer.global_step, trainer.current_epoch),
        "groups": optimizer["param_groups"],
        "moments": optimizer["state"],
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "weights": module.state_dict(),
        "metrics": dict(trainer.callback_metrics),
        "callbacks": {
            type(callback).__name__: callback.state_dict()
            for callback in own
            if not isinstance(callback, Watching)
        },
        "warnings": sorted({str(warning.message) for warning in told}),
        "files": sorted(str(file.relative_to(folder)) for file in folder.rglob("*.ckpt")),
    }


def same(ours: Any, plain: Any, exact: bool, at: str = "") -> None:
    """Raises where two results differ. exact: their tensors have the same bits."""
    if isinstance(plain, torch.Tensor):
        assert torch.equal(ours, plain) if exact else torch.allclose(ours, plain, 1e-4, 1e-6), at
    elif isinstance(plain, float) and not exact:
        assert ours == pytest.approx(plain, rel=1e-4, abs=1e-6), at
    elif isinstance(plain, dict):
        assert ours.keys() == plain.keys(), at
        for key in plain:
            same(ours[key], plain[key], exact, f"{at}.{key}")
    elif isinstance(plain, list | tuple):
        assert len(ours) == len(plain), at
        for number, (one, other) in enumerate(zip(ours, plain, strict=True)):
            same(one, other, exact, f"{at}.{number}")
    else:
        assert ours == plain, at


def compare(case: Case, folder: Path) -> None:
    """Trains twice. The bits are the same where the order of additions is: a norm is added up in another one."""
    exact = case.clip is None
    try:
        plain = train(copy.deepcopy(case), folder / "run")
    except (ValueError, MisconfigurationException) as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            train(copy.deepcopy(case), folder / "other", strategy="holdfast")
        return
    (folder / "run").rename(folder / "plain")
    ours = train(copy.deepcopy(case), folder / "run", strategy="holdfast")
    for name in plain:
        same(ours[name], plain[name], exact, name)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(samples=11, accumulate=2, scheduler="step", frequency=2),
        Case(samples=11, accumulate=4, optimizer="adamw", scheduler="onecycle", clip=0.01),
        Case(samples=13, batch=3, drop_last=True, accumulate=2, scheduler="cosine", interval="epoch"),
        Case(accumulate_from={0: 1, 1: 2, 2: 4}, scheduler="step"),
        Case(val_check_interval=2, accumulate=2, scheduler="plateau", interval="step", frequency=2),
        Case(epochs=5, scheduler="plateau", interval="epoch", callbacks=("stopping", "best")),
        Case(val_check_interval=4, check_val_every_n_epoch=None, callbacks=("steps", "epochs", "best")),
        Case(val_check_interval=0.5, check_val_every_n_epoch=2, limit=4, sanity=1, scheduler="doubled"),
        Case(samples=17, limit=0.5, accumulate=2, max_steps=5, callbacks=("average",)),
        Case(callbacks=("ema", "best"), optimizer="adamw"),
        Case(precision="64-true", optimizer="adamw"),
        Case(precision="bf16-mixed", accumulate=2),
        Case(samples=9, order="shuffled by its own generator", accumulate=2),
        Case(samples=9, order="weighted"),
        Case(samples=16, order="subset", epochs=2),
        Case(none_at=2, optimizer="bare"),
        Case(stop_at=4, accumulate=3),
        Case(stop_at=5, accumulate=3, callbacks=("ema",)),
        Case(epochs=0),
        Case(limit=0),
    ],
    ids=lambda case: (
        " ".join(f"{name}={value}" for name, value in vars(case).items() if value != getattr(Case(), name))
        or "plain"
    ),
)
def test_a_training_is_that_of_plain_lightning(tmp_path, case):
    compare(case, tmp_path)


@st.composite
def cases(draw) -> Case:
    accumulate_from = draw(st.sampled_from([{}, {}, {0: 2, 1: 1}, {1: 4}]))
    validation = draw(st.sampled_from([(1.0, 1), (1.0, 2), (0.5, 1), (2, 1), (4, None), (3, None)]))
    return Case(
        samples=draw(st.integers(8, 23)),
        batch=draw(st.integers(1, 3)),
        drop_last=draw(st.booleans()),
        accumulate=1 if accumulate_from else draw(st.sampled_from([1, 2, 3, 4])),
        accumulate_from=accumulate_from,
        epochs=draw(st.integers(1, 4)),
        max_steps=draw(st.sampled_from([-1, -1, 3, 7])),
        limit=draw(st.sampled_from([1.0, 1.0, 0.7, 3])),
        validate=draw(st.booleans()),
        val_check_interval=validation[0],
        check_val_every_n_epoch=validation[1],
        optimizer=draw(st.sampled_from(["sgd", "adamw"])),
        scheduler=draw(st.sampled_from(["none", "step", "doubled", "onecycle", "cosine", "plateau"])),
        interval=draw(st.sampled_from(["step", "epoch"])),
        frequency=draw(st.sampled_from([1, 2, 3])),
        clip=draw(st.sampled_from([None, 0.01])),
        precision=draw(st.sampled_from(["32-true", "64-true", "bf16-mixed"])),
        order=draw(st.sampled_from(["as it is", "shuffled by its own generator", "weighted", "subset"])),
        callbacks=tuple(
            draw(
                st.lists(
                    st.sampled_from(["stopping", "average", "ema", "best", "steps", "epochs"]),
                    unique=True,
                    max_size=3,
                )
            )
        ),
        sanity=draw(st.sampled_from([0, 2])),
    )


def drawn(case: Case, factory: Any) -> None:
    folder = factory.mktemp("drawn")
    try:
        compare(case, folder)
    except UsageError as error:
        # Refused by name, before anything is trained; and only what has to be.
        if not re.search(
            "is not the last one of an update|averages in a precision that is not the module's", str(error)
        ):
            raise
        event("refused")


SETTINGS = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.long
@settings(SETTINGS, max_examples=8)
@given(case=cases())
def test_a_drawn_training_is_that_of_plain_lightning(tmp_path_factory, case):
    drawn(case, tmp_path_factory)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(SETTINGS, max_examples=300)
@given(case=cases())
def test_many_drawn_trainings_are_those_of_plain_lightning(tmp_path_factory, case):
    drawn(case, tmp_path_factory)


# ------------------------------------------------------------ what is refused, by name and before anything trains


@pytest.mark.parametrize(
    ("callback", "name"),
    [
        (lambda: StochasticWeightAveraging(0.1), "StochasticWeightAveraging"),
        (lambda: BackboneFinetuning(), "BackboneFinetuning"),
        (lambda: ModelPruning("l1_unstructured", amount=0.5), "ModelPruning"),
        (lambda: LearningRateFinder(), "LearningRateFinder"),
        (
            lambda: ModelCheckpoint(train_time_interval=timedelta(minutes=1)),
            r"ModelCheckpoint\(train_time_interval",
        ),
    ],
)
def test_a_callback_that_cannot_work_is_refused_by_name(tmp_path, callback, name):
    module = Net(Case())
    module.backbone = torch.nn.Linear(1, 1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="holdfast",
        max_epochs=1,
        callbacks=[callback()],
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
    )
    with pytest.raises(UsageError, match=name):
        trainer.fit(module, loader(Case()))
    assert module.seen == []


@pytest.mark.parametrize(
    "case",
    [
        Case(samples=12, accumulate=4, val_check_interval=3),
        Case(samples=10, accumulate=2, val_check_interval=4, check_val_every_n_epoch=None),
        Case(accumulate_from={1: 4}, val_check_interval=2),
    ],
)
def test_a_validation_within_an_update_is_refused(tmp_path, case):
    with pytest.raises(UsageError, match="is not the last one of an update"):
        train(case, tmp_path / "run", strategy="holdfast")


def test_a_schedule_by_what_one_worker_logs_is_refused():
    """Of several workers each would decide by its own batches."""
    callback = EarlyStopping("train_loss_epoch")
    trainer = SimpleNamespace(callbacks=[callback], lr_scheduler_configs=[])
    refuse_monitors(trainer, {"val_loss"})
    with pytest.raises(UsageError, match='EarlyStopping monitors "train_loss_epoch"'):
        refuse_monitors(trainer, {"train_loss"})


# ------------------------------------------------------------ what belongs to rank 0


def test_what_is_logged_is_what_plain_lightning_logs(tmp_path):
    """In the same folders, with the same steps."""
    texts = []
    for options in ({}, {"strategy": "holdfast"}):
        folder = tmp_path / str(len(texts))
        lightning.seed_everything(3, verbose=False)
        case = Case(samples=11, accumulate=2, scheduler="step")
        trainer = lightning.Trainer(
            accelerator="cpu",
            default_root_dir=folder,
            max_epochs=2,
            accumulate_grad_batches=2,
            log_every_n_steps=1,
            logger=CSVLogger(folder),
            callbacks=[LearningRateMonitor()],
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(Net(case), loader(case), DataLoader(data(5), 2))
        texts.append(
            {
                str(file.relative_to(folder)): file.read_text() if file.suffix == ".csv" else ""
                for file in sorted(folder.rglob("*.*"))
            }
        )
    assert texts[0] == texts[1]
    assert any("version_0/metrics.csv" in name for name in texts[1])
