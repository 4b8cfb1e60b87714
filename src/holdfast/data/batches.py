"""The micro-batches of a dataset, in its order, for `run.steps`."""

from __future__ import annotations

import logging
import math
import os
import time
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from holdfast.data.collate import Ids, Maker, describe, digest_of, on_device, unpacked
from holdfast.data.decoding import Decoders
from holdfast.data.fingerprint import identity
from holdfast.data.mapstyle import Shuffled, check_dataset
from holdfast.data.order import SampleOrder
from holdfast.data.prefetch import Key, PrefetchBuffer
from holdfast.data.samples import SampleLedger
from holdfast.data.seeds import kept_generators
from holdfast.errors import DataError, UsageError

_log = logging.getLogger(__name__)
ORDERED_AHEAD = 4096
"""Minimum number of samples whose order is computed at a time, because many cost little more than one."""
READ_AHEAD_STEPS = 2
SLOW_S = 0.5e-3
"""A micro-batch that took longer than this, and much longer than the fastest one, has probably waited for a disk."""
ADVISE_FOR_STEPS = 64
"""Number of steps after such a micro-batch for which the kernel is advised. Advising it costs as much as reading the
samples if they are in memory."""


class Order(Protocol):
    """The order of samples: the sample number at each position."""

    def at_many(self, positions: Any) -> Ids: ...


class DatasetBatches:
    """Micro-batches of a map-style dataset. A micro-batch is a function of (seed, step, number), whichever process loads it.

    A dataset with a cheap `batch` is read by the training thread when a micro-batch is needed; a thread that read ahead
    would save nothing, because
    both share the GIL. If it has `read_ahead(ids)`, that is called with the samples of the next steps, so that the
    kernel brings their pages in. A dataset that was passed through `holdfast.data.shuffled` is decoded ahead by processes.

    Attributes:
        dataset: the data set itself, without `holdfast.data.shuffled`.
    """

    def __init__(
        self,
        data: Any,
        *,
        global_batch: int,
        micro_batch: int,
        until: int,
        seed: int,
        device: torch.device,
        ledger: str | os.PathLike[str] | None = None,
        launch: str = "",
    ) -> None:
        """ledger, launch: see `SampleLedger`.

        Raises:
            UsageError: the sizes do not fit each other, or `data` is not a dataset; nothing is started then.
        """
        if micro_batch < 1 or global_batch < 1 or global_batch % micro_batch:
            raise UsageError(
                f"global_batch={global_batch} is not a multiple of micro_batch={micro_batch}; {_that_fit(global_batch, micro_batch)}"
            )
        if not 0 <= seed < 2**64:
            raise UsageError(f"seed must be between 0 and 2**64 - 1 (got {seed}), for example 0")
        how = (
            data
            if isinstance(data, Shuffled)
            else Shuffled(dataset=data, workers=0, collate=None, steps_ahead=READ_AHEAD_STEPS, most_bytes=0)
        )
        check_dataset(how.dataset)
        self.dataset = how.dataset
        # Everything that a micro-batch depends on is in this object and in (step, micro, ids). Rank, world
        # size and process are not, which is why a resize or a retry gives the same bytes.
        self._maker = Maker(how.dataset, how.collate, seed)
        # A mixture has its own order. It must depend on the dataset and the seed alone, because every worker
        # computes it for itself and the results are not compared.
        own_order = getattr(how.dataset, "order", None)
        self._order: Order = own_order(seed) if callable(own_order) else SampleOrder(len(data), seed)
        self._global_batch, self._micro_batch = global_batch, micro_batch
        # Only a window of the order is held. The complete order of a corpus would be gigabytes in every
        # worker.
        self._ordered: Ids = np.empty(0, np.int64)
        self._ordered_from = 0
        self._device = device
        self._until = until
        self._step, self._position = 0, 0
        self._given: dict[int, Ids] = {}
        self._advised: set[Key] = set()
        self._advise_until: int | None = None
        self._fastest_s = math.inf
        self._ledger = (
            SampleLedger(ledger, launch, len(data), global_batch, micro_batch, callable(own_order))
            if ledger
            else None
        )
        self._decoders = Decoders(self._maker, how.workers) if how.workers else None
        self._prefetched = PrefetchBuffer(
            self._begin, until, how.steps_ahead, 2 * how.workers, how.most_bytes
        )

    def probe(self) -> str | None:
        """A hash of a few samples, by which workers can check that they have the same data. None if loading a sample
        twice gives two different ones, or if the data set has a fingerprint."""
        if identity(self.dataset) is not None:
            return None
        last = len(self.dataset) - 1
        with kept_generators():
            try:
                # Loaded twice: a dataset that draws its own random numbers would make healthy workers look
                # different.
                first, second = (
                    [digest_of(self._maker.make(0, 0, np.array([i]))) for i in sorted({0, last // 2, last})]
                    for _ in range(2)
                )
            except DataError:
                return None  # reported in the step that needs the sample
        if first != second:
            return None
        return xxhash.xxh3_64_hexdigest(repr([len(self.dataset), *first]).encode())

    def count(self) -> int:
        """Micro-batches in a global batch."""
        return self._global_batch // self._micro_batch

    def aim(self, step: int, position: int, micros: range) -> None:
        """Sets this worker's share: of the step that begins at this position, and of those that follow until the next
        call."""
        # Samples that were loaded for an earlier attempt at a step must not be written into the ledger for
        # this one: the share may be different.
        self._given.clear()
        # Steps and positions normally advance together. If their difference changed, the state was loaded
        # from elsewhere, and everything prefetched belongs to other samples under the same (step, micro)
        # keys.
        if position - step * self._global_batch != self._position - self._step * self._global_batch:
            self._prefetched.forget()
            self._advised.clear()
        self._step, self._position = step, position
        if self._decoders is not None:
            self._prefetched.aim(step, micros)
        elif hasattr(self.dataset, "read_ahead"):
            if self._advise_until is None or step < self._advise_until:
                self._advise(step, micros)
            self._advise_until = self._advise_until or step + ADVISE_FOR_STEPS

    def load(self, step: int, micro: int) -> Any:
        """Micro-batch number `micro` of the step, on the run's device.

        Raises:
            DataError: a sample of it cannot be loaded.
        """
        if self._decoders is None:
            ids = self._ids(step, micro)
            began_s = time.perf_counter()
            batch = self._maker.make(step, micro, ids)
            self._took(step, time.perf_counter() - began_s)
        else:
            ids, batch = self._decoded(step, micro, self._decoders)
        # Recorded when the batch is handed out, not when it was prefetched: the ledger says what this worker
        # trained on.
        self._given[micro] = ids
        return on_device(batch, self._device)

    def again(self, step: int, micro: int) -> Any:
        """A micro-batch of the step that another worker computes too. It is made at once, and is not recorded in the ledger.

        Raises:
            DataError: a sample of it cannot be loaded.
        """
        return on_device(self._maker.make(step, micro, self._ids(step, micro)), self._device)

    def giving(self, step: int, generation: int) -> None:
        """Records in the ledger all samples of this worker's contribution to the step, before the other workers can
        have its gradient."""
        # Before this worker's last part of the gradient goes out. Later would be too late: the other workers
        # may commit the step with the gradient of a worker that died on its way to the vote, and its samples
        # would be missing from the proof.
        if self._ledger is not None:
            self._ledger.giving(generation, step, self._position, self._given)

    def committed(self, step: int, generation: int) -> None:
        """Records that the step, prepared in this generation, is committed."""
        if self._ledger is not None:
            self._ledger.committed(generation, step)

    def close(self) -> None:
        """Stops the work ahead, and closes the ledger."""
        self._prefetched.forget()
        if self._decoders is not None:
            self._decoders.close()
        if self._ledger is not None:
            self._ledger.close()

    # ------------------------------------------------------------ decoded ahead

    def _begin(self, key: Key) -> Any:
        assert self._decoders is not None
        return self._decoders.make(*key, self._ids(*key))

    def _decoded(self, step: int, micro: int, decoders: Decoders) -> tuple[Ids, Any]:
        future = self._prefetched.take(step, micro)
        if not future.done() and not decoders.up:
            # A process takes seconds to start, and would make the same batch.
            ids = self._ids(step, micro)
            return ids, self._maker.make(step, micro, ids)
        try:
            data = future.result()
        except BrokenProcessPool:
            data = self._decoded_again(step, micro, decoders)
        except DataError:
            self._prefetched.keep_made()  # decoded anew when the step is retried: the file system may have failed for a moment
            raise
        # The sample numbers come back with the batch from the process that made it. The ledger records what
        # was decoded, and not what this process believes it asked for.
        ids, batch = unpacked(data)
        return ids, batch

    def _decoded_again(self, step: int, micro: int, decoders: Decoders) -> bytes:
        """Starts new processes after one died, which ended all tasks under way, and decodes the micro-batch again. A
        second death is an error; one may be chance."""
        _log.warning("a decoding process died; starting new ones", extra={"step": step, "micro": micro})
        self._prefetched.forget()
        decoders.restart()
        try:
            return self._prefetched.take(step, micro).result()
        except BrokenProcessPool as error:
            self._prefetched.forget()
            decoders.restart()
            raise DataError(
                f"decoding processes of {describe(self.dataset)} died twice near step {step}, micro-batch {micro} "
                f"(samples {self._ids(step, micro).tolist()}): out of memory, or a crash in the decoder; try fewer "
                "workers, or workers=0 to see the crash itself"
            ) from error

    # ------------------------------------------------------------ order

    def _ids(self, step: int, micro: int) -> Ids:
        position = self._position + (step - self._step) * self._global_batch + micro * self._micro_batch
        # The order is a function of the position, so any window of it can be computed at any time. It is
        # computed in blocks because the vectorized permutation costs little more for thousands of positions
        # than for one.
        low = position - self._ordered_from
        if not 0 <= low <= len(self._ordered) - self._micro_batch:
            # The block begins at the step's first position, not at the one that is asked for: the worker's
            # other micro-batches of this step lie around it, in either direction.
            self._ordered_from = self._position
            count = max(ORDERED_AHEAD, 2 * (position + self._micro_batch - self._position))
            self._ordered = self._order.at_many(np.arange(self._position, self._position + count))
            low = position - self._ordered_from
        return self._ordered[low : low + self._micro_batch]

    def _took(self, step: int, took_s: float) -> None:
        self._fastest_s = min(self._fastest_s, took_s)
        # Reading ahead is switched on by evidence only. While the pages are in memory, advising the kernel
        # costs as much as the read itself.
        if took_s > SLOW_S and took_s > 8 * self._fastest_s:
            self._advise_until = step + ADVISE_FOR_STEPS

    def _advise(self, step: int, micros: range) -> None:
        coming = {
            (s, micro) for s in range(step, min(step + READ_AHEAD_STEPS, self._until) + 1) for micro in micros
        }
        for key in sorted(coming - self._advised):
            self.dataset.read_ahead(self._ids(*key))
        self._advised = coming


def _that_fit(global_batch: int, micro_batch: int) -> str:
    """Suggests the nearest sizes that can be used."""
    if micro_batch < 1 or global_batch < 1:
        return "both must be at least 1, for example global_batch=256, micro_batch=4"
    smaller = next(n for n in range(min(micro_batch, global_batch), 0, -1) if global_batch % n == 0)
    larger = -(-global_batch // micro_batch) * micro_batch
    return f"use micro_batch={smaller} or global_batch={larger}"
