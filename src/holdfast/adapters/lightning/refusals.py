"""What of a LightningModule and a Trainer cannot work at level 2."""

from __future__ import annotations

from types import NoneType
from typing import Any

from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from holdfast.errors import UsageError

OURS = {
    "optimizer_step": "the update is the job's commit",
    "optimizer_zero_grad": "the job owns the gradients",
    "configure_gradient_clipping": "clipping takes the norm of the gradient of all workers; use gradient_clip_val",
    "backward": "the job adds the gradients of all workers",
    "on_before_batch_transfer": "a batch is a step of several micro-batches",
    "transfer_batch_to_device": "the job moves micro-batches",
    "on_after_batch_transfer": "a batch is a step of several micro-batches",
}
"""Hooks of a module that a step at level 2 has no place for, and why."""


def refuse(trainer: Any, module: Any, loader: Any) -> None:
    """Refuses what cannot work, before anything is trained.

    Raises:
        UsageError: with everything that cannot work, and what to write instead.
    """
    wrong = [text for found, text in _checks(trainer, module, loader) if found]
    wrong += [f"{name}() is overridden: {why}" for name, why in OURS.items() if is_overridden(name, module)]
    if wrong:
        raise UsageError('Trainer(strategy="holdfast") cannot train so:\n  ' + "\n  ".join(wrong))


def _checks(trainer: Any, module: Any, loader: Any) -> list[tuple[bool, str]]:
    data = getattr(loader, "dataset", None)
    sampler = getattr(loader, "sampler", None)
    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]
    schedulers = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    return [
        (
            not (hasattr(data, "__len__") and hasattr(data, "__getitem__"))
            or not getattr(loader, "batch_size", None),
            "the training data has no length and no samples by number, or batches of its own: give a DataLoader with a "
            "map-style dataset and a batch_size",
        ),
        (
            not isinstance(sampler, RandomSampler | SequentialSampler | DistributedSampler | NoneType),
            f"{type(sampler).__name__}: the order of samples is the job's; put the choice of samples into the dataset",
        ),
        (
            any(timer._duration is not None for timer in timers),
            "max_time or a Timer with a duration: no two workers have the same clock; set max_steps or max_epochs",
        ),
        (
            trainer._val_check_time_interval is not None,
            "val_check_interval as a time: no two workers have the same clock; give a number of steps",
        ),
        (
            bool(trainer.overfit_batches),
            "overfit_batches: the job deals samples of all the data; give a dataset of few samples",
        ),
        (
            not module.automatic_optimization,
            "automatic_optimization is off: a step at level 2 has one optimizer; write the loop with holdfast.start",
        ),
        (len(trainer.optimizers) != 1, f"{len(trainer.optimizers)} optimizers: a step at level 2 has one"),
        (
            trainer.gradient_clip_algorithm not in (None, "norm"),
            f"gradient_clip_algorithm={trainer.gradient_clip_algorithm}: the global norm is clipped; use 'norm'",
        ),
        (
            bool(schedulers),
            "ReduceLROnPlateau: it changes the learning rate between two steps, which a fault would undo; choose a "
            "schedule over steps or epochs",
        ),
        (
            trainer.max_steps == -1 and (trainer.max_epochs is None or trainer.max_epochs < 0),
            "max_steps=-1 and max_epochs=-1: a job has an end; set one of them",
        ),
        (
            bool(trainer.reload_dataloaders_every_n_epochs),
            "reload_dataloaders_every_n_epochs: a job has one data set",
        ),
    ]
