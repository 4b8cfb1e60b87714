"""Implements `holdfast.data.shuffled`: any map-style dataset, decoded by processes before it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.data.collate import Collate, describe
from holdfast.errors import UsageError
from holdfast.protocol.units import parse_size

MOST_WORKERS = 1024


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """A dataset, and how micro-batches are made from its samples. Made by `shuffled`."""

    dataset: Any
    workers: int
    """Number of decoding processes; 0: the worker decodes by itself."""
    collate: Collate | None
    """Samples to batch; None for the dataset's own `batch`, or torch's default."""
    steps_ahead: int
    """Number of steps whose batches are made ahead."""
    most_bytes: int
    """Limit on the memory of batches that were made and not used yet."""

    def __len__(self) -> int:
        return len(self.dataset)


def shuffled(
    dataset: Any,
    *,
    workers: int = 2,
    collate: Collate | None = None,
    steps_ahead: int = 2,
    memory: str = "1G",
) -> Shuffled:
    """A map-style dataset whose samples take time to make, for `run.steps`.

    Order, state and guarantees are those of every dataset; `workers` changes the speed, never the samples:
    random numbers that `__getitem__` draws from the global generators of Python, numpy and torch are keyed by (seed,
    step, micro-batch).

    Args:
        dataset: has `__len__` and `__getitem__` (or `__getitems__`, or `batch(ids)`), as
            `torch.utils.data.Dataset` has. It is pickled for the decoding processes.
        workers: number of decoding processes of each worker; 0: the worker decodes by itself.
        collate: list of samples to batch; by default the dataset's own `batch`, or torch's `default_collate`.
        steps_ahead: for how many steps the worker's share is decoded ahead.
        memory: limit of each worker for decoded batches.

    Raises:
        UsageError: not a map-style dataset, or an impossible setting.
    """
    if isinstance(dataset, Shuffled):
        raise UsageError(
            "holdfast.data.shuffled was applied to a dataset that is already shuffled; call it only once"
        )
    # Refused here and not in a decoding process, whose error would arrive with the first batch only.
    check_dataset(dataset)
    if not 0 <= workers <= MOST_WORKERS:
        raise UsageError(
            f"holdfast.data.shuffled: workers must be between 0 and {MOST_WORKERS} (got {workers}), for example 4"
        )
    if steps_ahead < 1:
        raise UsageError(
            f"holdfast.data.shuffled: steps_ahead must be at least 1 (got {steps_ahead}), for example 2"
        )
    if collate is not None and not callable(collate):
        raise UsageError("holdfast.data.shuffled: collate must be a function that takes a list of samples")
    return Shuffled(
        dataset=dataset,
        workers=workers,
        collate=collate,
        steps_ahead=steps_ahead,
        most_bytes=parse_size("memory", memory),
    )


def check_dataset(data: Any) -> None:
    """Raises UsageError if the data is not a map-style dataset, or is empty."""
    if not hasattr(data, "__len__") or not (
        hasattr(data, "__getitem__") or hasattr(data, "__getitems__") or hasattr(data, "batch")
    ):
        if (dataset := getattr(data, "dataset", None)) is not None and hasattr(dataset, "__getitem__"):
            raise UsageError(
                f"{describe(data)} assigns samples to workers itself, but with Holdfast the assignment changes "
                f"during a job: pass the data set that it loads, a {describe(dataset)}, and the batch size as "
                "micro_batch=. For decoding in other processes wrap it: holdfast.data.shuffled(dataset, workers=4)"
            )
        raise UsageError(
            f"{describe(data)} is not a map-style dataset: it needs `__len__` and `__getitem__` (or `batch(ids)`), "
            "because a job could not be resumed at the right position of a stream"
        )
    if len(data) < 1:
        raise UsageError("the dataset is empty")
