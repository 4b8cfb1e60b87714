"""torchtitan's own data, so that any worker can compute any micro-batch of any step.

torchtitan's loaders are streams, one for each rank, and a rank's place in its stream is known to that rank alone. Here a
stream belongs to a micro-batch's number and not to a rank: whoever computes micro-batch 3 of a step reads stream 3. A
worker that gets a number which it did not have reads that stream from its begin up to the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torchtitan.tools.logging import logger

from holdfast.errors import DataError

FAR = 100
"""Batches; so many are read over without a word."""


class Streams:
    """The streams that this worker has read from. At most one batch of each is kept."""

    def __init__(self, open_stream: Callable[[int], Any], count: int) -> None:
        """open_stream: makes the loader of a number from 0 to count - 1."""
        self._open, self._count = open_stream, count
        self._read: dict[int, _Stream] = {}

    def batch(self, number: int, step: int) -> Any:
        """The batch of a stream for a step, from 0; a step that comes again gets the same one.

        Raises:
            DataError: the stream has ended.
        """
        stream = self._read.get(number)
        # A job that goes on from an older state needs what was before.
        if stream is None or stream.at > step + 1:
            stream = self._read[number] = _Stream(iter(self._open(number)))
        missing = step - stream.at
        if missing > FAR:
            logger.info(f"micro-batch {number}: skipping {missing} batches that other workers computed")
        while stream.at <= step:
            try:
                stream.last = next(stream.batches)
            except StopIteration:
                raise DataError(
                    f"stream {number} of {self._count} ended after {stream.at} batches, but step {step} needs one "
                    "more; use fewer --training.steps, or a data set that begins again at its end"
                ) from None
            stream.at += 1
        inputs, labels = stream.last
        # The trainer replaces tensors in the mapping by those on its device.
        return dict(inputs), labels


class _Stream:
    """Attributes:
    at: how many batches were read.
    last: the one that was read last.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches, self.at = batches, 0
        self.last: Any = None


class Numbers:
    """Stands for the data where the run deals micro-batches: their numbers say all."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def batch(self, ids: Any) -> Any:
        """Nothing but the numbers of the samples."""
        return ids
