"""What scripts give Accelerate that a worker of a job has otherwise: a backend for process groups, and an order of samples."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from accelerate.state import PartialState
from torch.utils.data import BatchSampler, RandomSampler

_log = logging.getLogger(__name__)


def ignore(given: Collection[str]) -> None:
    """Says so of what a script has given for DDP and its process group, if anything."""
    if given:
        _log.warning(
            "%s: ignored, because these settings are for DistributedDataParallel and its process group, and Holdfast "
            "sums the gradients itself",
            ", ".join(given),
        )


def leave_out() -> None:
    """From here on Accelerate's state takes no backend for a process group: no worker has one. Scripts name one for torchrun
    (`ddp_backend` in TrainingArguments, `InitProcessGroupKwargs`), and Accelerate, which finds no launcher, would then ask torch for a
    group that nobody has made, and end with an error. Here and not in a trainer: TrainingArguments are made before there is one.
    """
    own = PartialState.__init__
    if hasattr(own, "_holdfast"):
        return

    @functools.wraps(own)
    def without(self: Any, *args: Any, backend: str | None = None, **more: Any) -> None:
        own(self, *args, **more)

    without._holdfast = True  # type: ignore[attr-defined]
    PartialState.__init__ = without


def own_order(loader: Any) -> str | None:
    """What of a prepared or unprepared DataLoader chooses samples, groups them or repeats them; None: it shuffles a dataset, and the
    job may shuffle it in its place."""
    batches = getattr(loader, "batch_sampler", None)
    # Accelerate puts the samplers of a loader into a new one, whose own `sampler` says nothing.
    sampler: Any = getattr(batches, "sampler", None)
    if type(sampler) not in (RandomSampler, SeedableRandomSampler):
        return type(sampler or batches).__name__
    if type(batches) is not BatchSampler:
        return type(batches).__name__
    if sampler.replacement:
        return f"{type(sampler).__name__}(replacement=True)"
    if len(sampler) != len(loader.dataset):
        return f"{type(sampler).__name__}(num_samples={len(sampler)}) of {len(loader.dataset)} samples"
    return None
