"""A bounded buffer of micro-batches that are made before they are needed.

Its keys are (step, micro-batch). Nothing in it depends on rank or world size, so after a resize, or when a step is
retried, only those micro-batches are made that this worker's new share lacks.

Only the training thread accesses the buffer. The futures in it run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice

Key = tuple[int, int]
"""The step, and the number of the micro-batch in it."""

MOST_MICRO_BATCHES = 256


class PrefetchBuffer:
    """Packed micro-batches, each a future, in the order in which the worker will need them.

    Args:
        make: submits one to be made.
        until: the step before which training ends.
        steps: for how many steps the worker's share is made ahead.
        at_least: micro-batches ahead, however small the share; enough to keep every process busy.
        most_bytes: limit on the memory of the buffer. The next micro-batch is always allowed.
    """

    def __init__(
        self, make: Callable[[Key], Future[bytes]], until: int, steps: int, at_least: int, most_bytes: int
    ) -> None:
        self._make = make
        self._until = until
        self._steps, self._at_least, self._most_bytes = steps, at_least, most_bytes
        self._step, self._micros, self._taken = 0, range(0), 0
        self._entries: dict[Key, Future[bytes]] = {}
        self._nbytes = 0
        """Size of the largest micro-batch so far."""

    def aim(self, step: int, micros: range) -> None:
        """Sets the next step and, from there on, this worker's share. Micro-batches of the share that are there already
        are kept."""
        self._step, self._micros, self._taken = step, micros, 0
        # Keys contain neither rank nor world size, so after a resize the entries that lie in the new share
        # are still right and are kept.
        self._keep({key for key in self._entries if key[0] >= step and key[1] in micros})
        self._top_up()

    def take(self, step: int, micro: int) -> Future[bytes]:
        """The micro-batch. It stays until its step is over, because the step may be tried again."""
        key = (step, micro)
        # The entry is not removed: a step that fails after this is tried again with the same micro-batches,
        # and decoding them twice would double the cost of a retry.
        future = self._entries.get(key)
        if future is None:
            future = self._entries[key] = self._make(key)
        # Taking one out of turn, as in a retry of an older step, must not move the mark: the buffer would
        # believe that everything before it was used, and prefetch too far ahead.
        if step == self._step and micro in self._micros:
            self._taken = self._micros.index(micro) + 1
        self._top_up()
        return future

    def forget(self) -> None:
        """Discards everything."""
        self._keep(set())

    def keep_made(self) -> None:
        """Keeps only micro-batches that were made. Those that failed, and those under way that may fail likewise, are
        made again when they are needed."""
        self._keep({key for key, future in self._entries.items() if _made(future)})

    @property
    def keys(self) -> set[Key]:
        """Micro-batches that are there or being made."""
        return set(self._entries)

    def _keep(self, keys: set[Key]) -> None:
        # `cancel` only stops tasks that no process has begun. The others run to no purpose, at most one per
        # process.
        for key in [k for k in self._entries if k not in keys]:
            self._entries.pop(key).cancel()

    def _wanted(self) -> Iterator[Key]:
        """The next micro-batches, as many as are made ahead."""
        share = len(self._micros)
        count = min(max(self._steps * share, self._at_least), MOST_MICRO_BATCHES) if share else 0
        return islice(self._coming(), count)

    def _coming(self) -> Iterator[Key]:
        yield from ((self._step, micro) for micro in self._micros[self._taken :])
        for step in range(self._step + 1, self._until):
            yield from ((step, micro) for micro in self._micros)

    def _top_up(self) -> None:
        self._nbytes = max([self._nbytes, *(_nbytes(f) for f in self._entries.values())])
        wanted = list(self._wanted())
        # Sizes are unknown before the first batch is there. Guessing high could take all memory of a node
        # with a dataset of videos.
        most = self._at_least
        if self._nbytes:
            most = min(max(1, self._most_bytes // self._nbytes), 2 * MOST_MICRO_BATCHES)
        coming = set(wanted)
        # Micro-batches that were taken already are kept for a retry, but only in the room that the coming
        # ones leave. Giving up a coming one instead would stall the next step for certain, to save a retry
        # that may never come.
        others = [k for k, future in self._entries.items() if k not in coming and future.done()]
        for key in others[: max(0, len(others) + len(wanted) - most)]:
            del self._entries[key]
        for key in wanted[:most]:
            if key not in self._entries:
                self._entries[key] = self._make(key)


def _made(future: Future[bytes]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _nbytes(future: Future[bytes]) -> int:
    return len(future.result()) if _made(future) else 0
