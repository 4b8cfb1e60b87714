"""fp16 in the adapters: a step whose gradient overflows is skipped on all workers, and counted as the framework counts it."""

from __future__ import annotations

from pathlib import Path

import half
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from ends import LIMIT_S, by_itself, ends
from harness import run
from torch.utils.data import DataLoader, Dataset

import holdfast.lightning  # before Lightning looks at the environment
import holdfast.transformers
from holdfast.accelerate import Accelerator
from holdfast.adapters import world
from holdfast.adapters.huggingface.snapshots import Snapshots
from holdfast.errors import UsageError

import lightning  # isort: skip
from lightning.pytorch.plugins import MixedPrecision  # isort: skip

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    # Its scheduler steps with a skipped first step, also without Holdfast.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
]
SKIPPED = [0, 4, 5, 9, 13, 17]
"""Of 18 steps: three that fit, and one or two for which the scale has grown too much."""
SCRIPTS = {
    "transformers": ("train_trainer.py", ["--half", "--accumulate"]),
    "lightning": ("train_lightning.py", []),
    "accelerate": ("train_accelerate.py", []),
}


def arguments(framework: str, folder: Path, accumulate: int) -> list[object]:
    script, options = SCRIPTS[framework]
    rest = {"lightning": [0, 0, "half"], "accelerate": ["half"]}.get(framework, [])
    return [Path(__file__).with_name(script), folder, *options, accumulate, *rest]


OWN = {"ended", "epochs", "saves", "validated", "committed", "losses", "evaluated", "main", "skipped"}
"""What a newcomer was not there for."""


def common(end: dict) -> dict:
    return {name: value for name, value in end.items() if name not in OWN}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(name, marks=[pytest.mark.framework(name), pytest.mark.capability("kill")])
        for name in SCRIPTS
    ],
)
def test_a_kill_beside_skipped_steps(tmp_path, framework):
    """The newcomer fetches the scale, between two steps that are skipped."""
    alone = by_itself(tmp_path / "alone", *arguments(framework, tmp_path / "alone", 4))
    assert alone["skipped"] == SKIPPED
    (tmp_path / "out").mkdir()
    fault = ("--spares", 1, "--fault", "kill-worker:rank=0,step=8")
    ran = run(tmp_path, "--nnodes", 2, *fault, *arguments(framework, tmp_path / "out", 2), timeout=LIMIT_S)
    assert ran.code == 0, ran.output
    ended = ends(tmp_path / "out")
    assert [common(end) for end in ended] == 2 * [common(alone)]
    newcomer, survivor = sorted((end["skipped"] for end in ended), key=len)
    assert survivor == SKIPPED
    assert newcomer == SKIPPED[-3:]


class Ones(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"x": torch.ones(2), "labels": torch.ones(1)}


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(self.line.weight)
        torch.nn.init.zeros_(self.line.bias)

    def forward(self, x, labels=None):
        return {"loss": (self.line(x) - labels).square().mean()}


def too_large() -> torch.amp.GradScaler:
    """For the first step alone. A power of two leaves the other gradients as they are."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-126)


def trainer(folder: Path, steps: int, **options: object) -> transformers.Trainer:
    own = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        max_steps=steps,
        logging_steps=1,
        lr_scheduler_type="constant",
        optim="sgd",
        learning_rate=0.1,
        per_device_train_batch_size=2,
        **options,
    )
    return holdfast.transformers.Trainer(model=Line(), args=own, train_dataset=Ones())


@pytest.mark.framework("transformers")
def test_the_trainer_counts_a_skipped_step(tmp_path):
    full = trainer(tmp_path, 2)
    full.train()
    skipping = trainer(tmp_path, 3, fp16=True)
    skipping.accelerator.scaler = too_large()
    skipping.train()
    assert skipping.state.global_step == 3
    assert skipping.lr_scheduler.last_epoch == 2
    assert torch.equal(skipping.model.line.weight, full.model.line.weight)
    logs = [entry for entry in skipping.state.log_history if "loss" in entry]
    assert ["grad_norm" in entry for entry in logs] == [False, True, True]
    assert logs[0]["loss"] == 0.0  # it overflowed, and there is none before it: as the Trainer counts it
    assert all(0 < entry["loss"] < 10 for entry in logs[1:])


@pytest.mark.framework("accelerate")
def test_accelerate_says_that_a_step_was_skipped():
    def trained(steps: int, scaler: torch.amp.GradScaler | None) -> tuple[torch.Tensor, list[bool]]:
        PartialState._reset_state()
        AcceleratorState._reset_state()
        accelerator, skipped = Accelerator(mixed_precision="fp16"), []
        accelerator.scaler = scaler
        model, loader = Line(), DataLoader(Ones(), batch_size=2, shuffle=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in accelerator.steps(loader, until=steps):
            with step:
                for batch in step:
                    accelerator.backward(model(**batch)["loss"])
                step.apply(optimizer)
            skipped.append(accelerator.optimizer_step_was_skipped)
        return model.line.weight, skipped

    full, none = trained(2, None)
    weight, skipped = trained(3, too_large())
    assert (none, skipped) == ([False, False], [True, False, False])
    assert torch.equal(weight, full)


@pytest.mark.framework("accelerate")
def test_gradients_are_unscaled_by_the_step():
    PartialState._reset_state()
    AcceleratorState._reset_state()
    with pytest.raises(UsageError, match=r"unscale_gradients\(\): .*remove the call"):
        Accelerator().unscale_gradients()


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scaled = Line(), []

    def training_step(self, batch, batch_idx):
        return self.net(**batch)["loss"]

    def on_before_backward(self, loss):
        self.scaled.append(float(loss.detach()) > 1e30)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.framework("lightning")
def test_lightning_counts_a_skipped_step():
    def fit(steps: int, *plugins: MixedPrecision) -> tuple[Module, int]:
        module = Module()
        fitter = lightning.Trainer(
            strategy="holdfast",
            max_steps=steps,
            plugins=[*plugins],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        fitter.fit(module, DataLoader(Ones(), 2, shuffle=True))
        return module, fitter.global_step

    full, _ = fit(2)
    half_way, steps = fit(3, MixedPrecision("16-mixed", "cpu", too_large()))
    assert steps == 3
    assert half_way.scaled == [True, False, False]  # the hook sees what Lightning shows it
    assert not any(full.scaled)
    assert half_way.net.line.weight.allclose(full.net.line.weight, atol=1e-3)  # computed with half the digits


@pytest.mark.framework("transformers")
def test_snapshots_of_a_trainer_have_its_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "_runs", [])

    def fp16() -> transformers.Trainer:
        own = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=4, fp16=True
        )
        made = transformers.Trainer(model=Line(), args=own, train_dataset=Ones())
        half.set_up(made.accelerator)
        return made

    first = fp16()
    Snapshots(first, every=3, to=str(tmp_path / "saved"))
    first.train()
    second = fp16()
    newest = Snapshots(second, every=3, to=str(tmp_path / "saved")).newest()
    assert second.accelerator.scaler.state_dict()["scale"] != half.scaler().state_dict()["scale"]
    second.train(resume_from_checkpoint=newest)
    assert second.accelerator.scaler.state_dict() == first.accelerator.scaler.state_dict()
    assert torch.equal(second.model.line.weight, first.model.line.weight)
