"""Whether the order of a loader's samples may be the job's: no choice of the script's is in it."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, RandomSampler


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
