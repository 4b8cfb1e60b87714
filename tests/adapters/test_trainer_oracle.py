"""Hugging Face's Trainer at level 2 against the plain Trainer: the same script does the same, event by event.

Both run in this process: under plain Python a training with the adapter is a job of one. The plain Trainer gets a sampler in the
job's order.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Sampler

import holdfast.transformers as adapter  # before transformers looks at the environment
from holdfast.data.order import SampleOrder
from holdfast.errors import UsageError

import transformers  # isort: skip
from transformers.trainer_callback import ExportableState  # isort: skip

pytestmark = [pytest.mark.timeout(900), pytest.mark.framework("transformers")]

EVENTS = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_evaluate",
    "on_save",
    "on_log",
)
WORDS, LENGTH, SEED = 32, 8, 5
OWN = ("runtime", "_per_second", "total_flos")
"""How logged values end that are read from a clock, or are not counted."""


@dataclass
class Case:
    """A training. Plain values, so that a failing one can be read."""

    samples: int = 24
    batch: int = 2
    accumulate: int = 1
    epochs: float = 2
    max_steps: int = -1
    clip: float = 1.0
    warmup: int = 3
    decay: float = 0.1
    schedule: str = "linear"
    smoothing: float = 0.0
    logs: int = 3
    evaluations: int | str = 0
    """Steps between two, or "epoch"."""
    saves: int | str = 0
    patience: int = 0
    stop_at: int = 0
    """A callback ends the training after this step."""
    end_epoch_at: int = 0
    """A callback ends the epoch after this step."""
    model: str = "llama"
    optim: str = "adamw_torch"


class Tokens(Dataset):
    """Of some, labels do not count."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([(index * 7 + place * (1 + index % 3)) % WORDS for place in range(LENGTH)])
        labels = tokens.clone()
        labels[: 1 + index % (LENGTH // 2)] = -100
        return {"input_ids": tokens, "labels": labels}


class Regression(torch.nn.Module):
    """Not one of transformers': its loss is a mean, and it takes no number of items."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Embedding(WORDS, 4)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, input_ids, labels=None):
        found = self.head(self.body(input_ids)).squeeze(-1)
        return {"loss": (found - labels / WORDS).square().mean(), "logits": found}


def model_of(case: Case) -> torch.nn.Module:
    transformers.set_seed(0)
    if case.model == "regression":
        model: torch.nn.Module = Regression()
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=WORDS,
                hidden_size=8,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
            )
        )
    model.pooler = torch.nn.Linear(8, 8)  # never used, and its weight decays where it has a gradient
    return model


class Watching(transformers.TrainerCallback, ExportableState):
    """Every event with what the Trainer says of itself then."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.seen: list[Any] = []

    def state(self):
        return {"args": {}, "attributes": {}}

    def note(self, name, args, state, control, optimizer=None, **more):
        at = (
            state.global_step,
            state.epoch,
            state.best_metric,
            state.best_global_step,
            state.is_world_process_zero,
        )
        asked = (
            control.should_log,
            control.should_evaluate,
            control.should_save,
            control.should_training_stop,
        )
        # The schedule is stepped in the commit, which comes before this event.
        rates = [group["lr"] for group in optimizer.param_groups if name != "on_optimizer_step"]
        self.seen.append((name, at, asked, rates, len(state.log_history)))
        if name == "on_step_end":
            control.should_training_stop |= state.global_step == self.case.stop_at
            control.should_epoch_stop |= state.global_step == self.case.end_epoch_at


for _name in EVENTS:
    setattr(Watching, _name, lambda self, *given, _name=_name, **more: self.note(_name, *given, **more))


class InTheJobsOrder(Sampler[int]):
    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self):
        first = self.epoch * self.samples
        self.epoch += 1
        yield from SampleOrder(self.samples, SEED).at_many(np.arange(first, first + self.samples)).tolist()


class Plain(transformers.Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return InTheJobsOrder(len(self.train_dataset))


def train(case: Case, kind: type, folder: Path) -> dict[str, Any]:
    """What there is to compare at the end of a training."""
    model, watching = model_of(case), Watching(case)
    pooler = model.pooler.weight.detach().clone()
    steps = {"eval": case.evaluations, "save": case.saves}
    strategies: dict[str, Any] = {}
    for name, every in steps.items():
        strategies[f"{name}_strategy"] = every if isinstance(every, str) else "steps" if every else "no"
        if isinstance(every, int) and every:
            strategies[f"{name}_steps"] = every
    callbacks: list[transformers.TrainerCallback] = [watching]
    if case.patience:
        callbacks.append(transformers.EarlyStoppingCallback(case.patience, early_stopping_threshold=0.05))
    trainer = kind(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=case.batch,
            gradient_accumulation_steps=case.accumulate,
            num_train_epochs=case.epochs,
            max_steps=case.max_steps,
            max_grad_norm=case.clip,
            warmup_steps=case.warmup,
            weight_decay=case.decay,
            lr_scheduler_type=case.schedule,
            label_smoothing_factor=case.smoothing,
            logging_steps=case.logs,
            learning_rate=1e-2,
            optim=case.optim,
            seed=SEED,
            metric_for_best_model="loss" if case.evaluations else None,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **strategies,
        ),
        train_dataset=Tokens(case.samples),
        eval_dataset=Tokens(5),
        callbacks=callbacks,
    )
    out = trainer.train()
    assert torch.equal(trainer.model.pooler.weight, pooler)
    state = {
        name: value
        for name, value in vars(trainer.state).items()
        if name not in ("log_history", "total_flos", "stateful_callbacks")
    }
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer).state_dict()
    return {
        "events": watching.seen,
        "history": [_logged(logs) for logs in trainer.state.log_history],
        "state": state,
        "control": vars(trainer.control),
        "callbacks": [vars(c) for c in callbacks if not isinstance(c, Watching)],
        "out": (out.global_step, out.training_loss, _logged(out.metrics)),
        "groups": optimizer["param_groups"],
        "moments": optimizer["state"],
        "scheduler": trainer.lr_scheduler.state_dict(),
        "weights": dict(trainer.model.state_dict()),
        "files": sorted(
            str(file.relative_to(folder)) for file in folder.rglob("*") if "holdfast" not in file.name
        ),
    }


def ending(found: dict[str, Any]) -> dict[str, Any]:
    """Of it what a member of a job can say in JSON, and what does not depend on its folder."""
    state = found["state"]
    return {
        "history": [logs for logs in found["history"] if "train_loss" not in logs],
        "loss": found["out"][1],
        "weights": {name: tensor.tolist() for name, tensor in found["weights"].items()},
        "best": (state["best_metric"], state["best_global_step"]),
        "best_checkpoint": Path(state["best_model_checkpoint"]).name,
        "steps": found["out"][0],
    }


def _logged(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in logs.items() if not name.endswith(OWN)}


def same(ours: Any, plain: Any, at: str = "") -> None:
    """Raises where two results differ by more than another order of additions explains."""
    if isinstance(plain, torch.Tensor):
        assert torch.allclose(ours, plain, 1e-3, 2e-5), at
    elif isinstance(plain, float):
        assert ours == pytest.approx(plain, rel=1e-3, abs=2e-5), at
    elif isinstance(plain, dict):
        assert ours.keys() == plain.keys(), at
        for key in plain:
            same(ours[key], plain[key], f"{at}.{key}")
    elif isinstance(plain, list | tuple):
        assert len(ours) == len(plain), (at, ours, plain)
        for number, (one, other) in enumerate(zip(ours, plain, strict=True)):
            same(one, other, f"{at}.{number}")
    else:
        assert ours == plain, at


def compare(case: Case, folder: Path) -> None:
    plain = train(case, Plain, folder / "run")
    (folder / "run").rename(folder / "plain")
    ours = train(case, adapter.Trainer, folder / "run")
    for name in plain:
        same(ours[name], plain[name], name)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(accumulate=2, samples=32, clip=0.3, schedule="cosine", evaluations=4, saves=3),
        pytest.param(
            Case(accumulate=3, samples=36, smoothing=0.1, evaluations="epoch", saves="epoch"),
            marks=pytest.mark.long,
        ),
        pytest.param(Case(epochs=6, evaluations="epoch", patience=1), marks=pytest.mark.long),
        Case(model="regression", accumulate=2, clip=0.0, optim="sgd"),
        Case(max_steps=7, accumulate=2, samples=16, evaluations=5, saves=5),
        pytest.param(Case(stop_at=5, evaluations="epoch"), marks=pytest.mark.long),
        pytest.param(Case(epochs=1.5, accumulate=2), marks=pytest.mark.long),
    ],
    ids=lambda case: (
        " ".join(f"{name}={value}" for name, value in vars(case).items() if value != getattr(Case(), name))
        or "plain"
    ),
)
def test_a_training_is_that_of_the_plain_trainer(tmp_path, case):
    compare(case, tmp_path)


def test_an_epoch_that_a_callback_ends_early_is_refused(tmp_path):
    with pytest.raises(UsageError, match="should_epoch_stop after step 4, in the middle of an epoch"):
        train(Case(end_epoch_at=4), adapter.Trainer, tmp_path)


@pytest.mark.long
def test_trainings_one_after_the_other_leave_nothing_open(tmp_path):
    """As in a notebook. The newest has what it needs; those before it have no thread and no descriptor any more."""
    counts = []
    for number in range(4):
        train(Case(max_steps=1), adapter.Trainer, tmp_path / str(number))
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert counts[1:] == counts[:1] * 3


# ------------------------------------------------------------ two workers


@pytest.mark.long
@pytest.mark.capability("level 2", "kill")
def test_two_workers_train_what_the_plain_trainer_does_through_a_kill(tmp_path):
    """Which accumulates over twice as many micro-batches. `train_loss` is of all steps, also where a worker came late."""
    from ends import LIMIT_S, ends
    from harness import run  # not in a worker, which imports this file
    from resized import check

    options = {"samples": 32, "evaluations": 4, "saves": 4, "epochs": 3, "clip": 0.3}
    plain = train(Case(**options, accumulate=4), Plain, tmp_path / "plain")
    fault = ("--spares", 1, "--fault", "kill-worker:rank=0,step=5")
    script = Path(__file__).with_name("train_oracle.py")
    out = tmp_path / "out"
    ran = run(
        tmp_path,
        "--nnodes",
        2,
        *fault,
        script,
        out,
        json.dumps({**options, "accumulate": 2}),
        timeout=LIMIT_S,
    )
    check(ran)
    ended = ends(out)
    assert len(ended) == 2
    for end in ended:
        same(end, json.loads(json.dumps(ending(plain))))


# ------------------------------------------------------------ a loss that ignores num_items_in_batch


class AllCount(Tokens):
    """Each micro-batch has as many labels."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = super().__getitem__(index)["input_ids"]
        return {"input_ids": tokens, "labels": tokens}


def mean_of_a_micro_batch(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


class Own:
    """compute_loss of a script's own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"])
        loss = mean_of_a_micro_batch(outputs, labels)
        return (loss, outputs) if return_outputs else loss


def first_step(kind: type, folder: Path, accumulate: int, **options: Any) -> tuple[float, float]:
    """Its loss and gradient norm."""
    trainer = kind(
        model=model_of(Case()),
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulate,
            max_steps=1,
            logging_steps=1,
            seed=SEED,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=AllCount(24),
        **options,
    )
    trainer.train()
    (logs,) = [logs for logs in trainer.state.log_history if "loss" in logs]
    return logs["loss"], logs["grad_norm"]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("how", ["compute_loss", "compute_loss_func"])
def test_a_mean_of_each_micro_batch_is_averaged_where_the_trainer_adds_it_up(tmp_path, accumulate, how):
    """As docs/transformers.md says: the Trainer takes it for a part of the mean over all micro-batches of the step."""
    if how == "compute_loss":
        plain, options = type("Plain", (Own, Plain), {}), {}
        ours = adapter.wrap(type("Trainer", (Own, transformers.Trainer), {}))
    else:
        plain, ours, options = Plain, adapter.Trainer, {"compute_loss_func": mean_of_a_micro_batch}
    loss, norm = first_step(ours, tmp_path, accumulate, **options)
    wanted = first_step(plain, tmp_path, accumulate, **options)
    assert (loss * accumulate, norm * accumulate) == pytest.approx(wanted, rel=1e-4)


def test_a_mean_that_says_so_is_that_of_the_plain_trainer(tmp_path):
    if not hasattr(transformers.Trainer, "loss_is_scaled_for_ga"):
        pytest.skip("not in this version of transformers")
    said = {"loss_is_scaled_for_ga": False}
    loss = first_step(adapter.wrap(type("T", (Own, transformers.Trainer), said)), tmp_path, 3)
    assert loss == pytest.approx(first_step(type("P", (Own, Plain), said), tmp_path, 3), rel=1e-4)
