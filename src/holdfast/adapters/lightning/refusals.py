"""What of a LightningModule and a Trainer cannot work at level 2."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.utilities.model_helpers import is_overridden

from holdfast.adapters.lightning.samples import EpochPlan, validations
from holdfast.errors import UsageError

OURS = {
    "optimizer_step": "Holdfast makes the update when it commits the step",
    "optimizer_zero_grad": "Holdfast manages the gradients",
    "configure_gradient_clipping": "clipping needs the norm of the gradient of all workers; use gradient_clip_val",
    "backward": "Holdfast sums the gradients of all workers",
}
"""Hooks of a module that a step at level 2 has no place for, and why."""

CALLBACKS: dict[type, str] = {
    StochasticWeightAveraging: (
        "replaces the scheduler and the weights during the training; use EMAWeightAveraging or WeightAveraging"
    ),
    BaseFinetuning: (
        "adds parameters to the optimizer during the training; pass all of them to the optimizer at first, and "
        "freeze some with a learning rate of 0"
    ),
    ModelPruning: "changes weights outside of the step's commit",
    LearningRateFinder: (
        "trains and then restores the earlier state; find the learning rate in a separate run without Holdfast"
    ),
    BatchSizeFinder: (
        "trains and then restores the earlier state; find the batch size in a separate run without Holdfast"
    ),
}
"""Callbacks of Lightning's that cannot work, and what they do."""

_MOST_VALIDATIONS = 100_000


def refuse_data(trainer: Any, loader: Any) -> None:
    """Refuses training data that cannot be dealt.

    Raises:
        UsageError: with everything that cannot work, and what to write instead.
    """
    data = getattr(loader, "dataset", None)
    _raise(
        [
            (
                not (hasattr(data, "__len__") and hasattr(data, "__getitem__"))
                or not getattr(loader, "batch_size", None),
                "the training data does not have a length or access to samples by number, or makes its own batches: "
                "use a DataLoader with a map-style dataset and a batch_size",
            ),
            (
                bool(trainer.overfit_batches),
                "overfit_batches: Holdfast uses the samples of the whole dataset; pass a dataset with few samples",
            ),
            (
                bool(trainer.reload_dataloaders_every_n_epochs),
                "reload_dataloaders_every_n_epochs: the dataset of a job cannot change",
            ),
        ]
    )


def refuse(trainer: Any, module: Any) -> None:
    """Refuses what else cannot work, before anything is trained.

    Raises:
        UsageError: with everything that cannot work, and what to write instead.
    """
    overridden = [
        (is_overridden(name, module), f"{name}() is overridden: {why}") for name, why in OURS.items()
    ]
    _raise([*_checks(trainer, module), *_callbacks(trainer), *overridden])


def refuse_validation(trainer: Any, plan: EpochPlan, until: int) -> None:
    """Refuses validations between two batches of one update: a step is a transaction, and would be under way meanwhile.

    Raises:
        UsageError: there are such.
    """
    if not trainer.enable_validation:
        return
    for epoch, batch in islice(validations(trainer, plan, until), _MOST_VALIDATIONS):
        accumulate = plan.accumulated(epoch)
        if (batch + 1) % accumulate and batch + 1 != plan.batches:
            raise UsageError(
                f"val_check_interval={trainer.val_check_interval}: batch {batch} of epoch {epoch} is not the last "
                f"one of an update, which has {accumulate} batches there, and a validation cannot run within a step; "
                "choose a multiple of accumulate_grad_batches"
            )


def refuse_monitors(trainer: Any, trained: set[str]) -> None:
    """Refuses decisions by what one worker has logged of its own batches: the others would decide otherwise.

    trained: names that were logged while training.

    Raises:
        UsageError: a callback or a scheduler monitors one of them.
    """
    known = {name + end for name in trained for end in ("", "_step", "_epoch")}
    monitors = [
        (type(callback).__name__, getattr(callback, "monitor", None)) for callback in trainer.callbacks
    ] + [
        (type(config.scheduler).__name__, config.monitor)
        for config in trainer.lr_scheduler_configs
        if config.reduce_on_plateau
    ]
    _raise(
        [
            (
                monitor in known,
                f'{name} monitors "{monitor}", which each worker logs for its own training batches; monitor a value '
                "that validation_step logs, because every worker validates all of the validation data",
            )
            for name, monitor in monitors
        ]
    )


def _raise(checks: list[tuple[bool, str]]) -> None:
    wrong = [text for found, text in checks if found]
    if wrong:
        raise UsageError(
            'Trainer(strategy="holdfast") does not support this configuration:\n  ' + "\n  ".join(wrong)
        )


def _callbacks(trainer: Any) -> Iterator[tuple[bool, str]]:
    for callback in trainer.callbacks:
        for kind, why in CALLBACKS.items():
            yield isinstance(callback, kind), f"{type(callback).__name__} {why}"
        yield (
            isinstance(callback, Timer) and callback._duration is not None,
            "max_time or a Timer with a duration: the clocks of workers differ; set max_steps or max_epochs",
        )
        average = getattr(callback, "_average_model", None) if isinstance(callback, WeightAveraging) else None
        types = [
            {p.dtype for p in m.parameters()} for m in (average, trainer.lightning_module) if m is not None
        ]
        yield (
            len(types) == 2 and types[0] != types[1],
            f"{type(callback).__name__} averages in a precision that is not the module's, and each validation would "
            "round the weights to it; convert the module to that precision yourself, and leave precision= at 32-true",
        )
        yield (
            isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None,
            "ModelCheckpoint(train_time_interval=...): the clocks of workers differ; set every_n_train_steps",
        )


def _checks(trainer: Any, module: Any) -> list[tuple[bool, str]]:
    return [
        (
            trainer._val_check_time_interval is not None,
            "val_check_interval as a time: the clocks of workers differ; set a number of batches",
        ),
        (
            not module.automatic_optimization,
            "automatic_optimization is off: at level 2 Holdfast controls the step; write the training loop with "
            "holdfast.start",
        ),
        (
            len(trainer.optimizers) != 1,
            f"{len(trainer.optimizers)} optimizers: at level 2 a module can have only one",
        ),
        (
            trainer.gradient_clip_algorithm not in (None, "norm"),
            f"gradient_clip_algorithm={trainer.gradient_clip_algorithm}: only the global norm can be clipped; use "
            "'norm'",
        ),
        (
            trainer.max_steps == -1 and (trainer.max_epochs is None or trainer.max_epochs < 0),
            "max_steps=-1 and max_epochs=-1: a job needs an end; set one of them",
        ),
    ]
