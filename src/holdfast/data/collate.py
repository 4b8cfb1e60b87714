"""Makes a micro-batch from sample numbers: the same function in the worker and in its decoding processes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils.data import default_collate

from holdfast.data.seeds import loading_seed, seed_generators
from holdfast.errors import DataError
from holdfast.tensors.loaded import has_bytes
from holdfast.tensors.tree import buffer_of

Ids = npt.NDArray[np.int64]
Collate = Callable[[list[Any]], Any]

_SHOWN_IDS = 8
CPU = torch.device("cpu")
"""The device on which samples are made, even for training on a GPU: decoding processes have none."""


@dataclass(frozen=True)
class Maker:
    """Makes micro-batches of a dataset. The result is a function of the arguments, whichever process calls it."""

    dataset: Any
    """Has `batch(ids)`, or `__getitems__` or `__getitem__` as torch's map-style datasets do. A dataset that draws no
    random numbers may have an attribute `deterministic`, which saves seeding the generators."""
    collate: Collate | None
    """Samples to batch; None for the dataset's own `batch`, or torch's default."""
    seed: int
    """The run's seed; `__getitem__` may draw from the global generators of Python, numpy and torch."""

    def make(self, step: int, micro: int, ids: Ids) -> Any:
        """Micro-batch `micro` of the step, of these samples.

        Raises:
            DataError: the dataset raised an exception; the message names the dataset and the sample.
        """
        # Seeded for every micro-batch, so that augmentation depends on (seed, step, micro) alone. A generator
        # that ran on would make a sample depend on what the same process happened to load before.
        if not getattr(self.dataset, "deterministic", False):
            seed_generators(loading_seed(self.seed, step, micro), CPU)
        where = f"step {step}, micro-batch {micro}"
        if self.collate is None and hasattr(self.dataset, "batch"):
            return self._called(lambda: self.dataset.batch(ids), _named(ids), where)
        if hasattr(self.dataset, "__getitems__"):
            samples = self._called(lambda: self.dataset.__getitems__(ids.tolist()), _named(ids), where)
        else:
            get = self.dataset.__getitem__
            samples = [self._called(partial(get, i), f"sample {i}", where) for i in ids.tolist()]
        collate = self.collate or default_collate
        return self._called(lambda: collate(samples), f"the collation of {_named(ids)}", where)

    def _called(self, make: Callable[[], Any], what: str, where: str) -> Any:
        try:
            return make()
        except Exception as error:
            raise DataError(
                f"{what} of {describe(self.dataset)} ({where}): {type(error).__name__}: {error}"
            ) from error


def digest_of(batch: Any) -> int:
    """A digest of the numbers in a batch, however they are nested. Texts do not count, because a path may differ
    between nodes."""
    hasher = xxhash.xxh3_64()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if has_bytes(value):
                value = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
                hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
                hasher.update(buffer_of(value))
        elif isinstance(value, np.ndarray | np.generic):
            if value.dtype != object:
                hasher.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, int | float | complex):
            hasher.update(repr(value).encode())
        elif isinstance(value, Mapping):
            for part in value.values():
                add(part)
        elif isinstance(value, list | tuple):
            for part in value:
                add(part)

    add(batch)
    return hasher.intdigest()


def describe(dataset: Any) -> str:
    """A dataset's name for people: its class, and its path if it has one."""
    path = getattr(dataset, "path", None)
    return f"{type(dataset).__name__}({str(path)!r})" if path is not None else type(dataset).__name__


def _named(ids: Ids) -> str:
    shown = ", ".join(map(str, ids[:_SHOWN_IDS].tolist()))
    return f"samples {shown}{', ...' if len(ids) > _SHOWN_IDS else ''}"


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device. Copies go through pinned memory, so that they are asynchronous."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        if device.type == "cuda" and batch.device.type == "cpu":
            batch = batch.pin_memory()
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: on_device(part, device) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_device(part, device) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(part, device) for part in batch)
    # Asked before Mapping: a BatchEncoding is a Mapping too, and rebuilding it as a plain dict would lose its
    # methods.
    if hasattr(batch, "to"):  # the result of a user's collate function, for example a BatchEncoding
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: on_device(part, device) for key, part in batch.items()}
    return batch


# ---------------------------------------------------------------- between a worker and its decoding processes


class _Pickler(pickle.Pickler):
    """Pickles tensors as their plain bytes: without torch's serialization, and without shared memory, which takes a
    file descriptor for every waiting tensor."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not torch.Tensor or thing.layout is not torch.strided or thing.device.type != "cpu":
            return NotImplemented
        # As a bytearray, not bytes: the tensor at the other end is built over this memory, and the script may
        # write to it.
        flat = thing.detach().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (bytearray(flat.numpy()), thing.dtype, tuple(thing.shape))


def packed(batch: Any) -> bytes:
    """A batch as bytes for another process of this worker."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(batch)
    return stream.getvalue()


def unpacked(data: bytes) -> Any:
    """A new batch from `packed` bytes of this worker's own process; the script may change it in place."""
    # The data comes from this worker's own child, over a pipe that no other process has; data from a socket
    # is never unpickled.
    return pickle.loads(data)


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
