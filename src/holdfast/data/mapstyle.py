"""`holdfast.data.shuffled`: any map-style dataset, decoded by processes ahead of need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.data.collate import Collate, describe
from holdfast.errors import UsageError
from holdfast.protocol.units import parse_size

MOST_WORKERS = 1024


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """A dataset, and how its samples become micro-batches. Made by `shuffled`."""

    dataset: Any
    workers: int
    """Decoding processes; 0: the worker decodes by itself."""
    collate: Collate | None
    """Samples to batch; None for the dataset's own `batch`, or torch's default."""
    steps_ahead: int
    """Batches of so many steps are made ahead."""
    most_bytes: int
    """Of batches that are made and not taken."""

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

    Order, state and guarantees are those of every dataset; `workers` changes how fast a sample comes, never what it is:
    what `__getitem__` draws from the global generators of Python, numpy and torch is keyed by (seed, step, micro-batch).

    Args:
        dataset: has `__len__` and `__getitem__` (or `__getitems__`, or `batch(ids)`), as
            `torch.utils.data.Dataset` has. Its processes get it pickled.
        workers: decoding processes of each worker; 0: the worker decodes by itself.
        collate: list of samples to batch; by default the dataset's own `batch`, or torch's `default_collate`.
        steps_ahead: how many steps' share is decoded ahead.
        memory: of each worker, for what is decoded ahead.

    Raises:
        UsageError: no map-style dataset, or a setting that cannot be.
    """
    if isinstance(dataset, Shuffled):
        raise UsageError(
            "holdfast.data.shuffled was applied to a dataset that is already shuffled; call it only once"
        )
    # Refused now and not in a decoding process, whose error would arrive with the first batch.
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
    """Raises UsageError for what is no map-style dataset, or an empty one."""
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
