"""Reading a blob from whoever has it: verified, from the nearest source, going on at the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from holdfast.checkpoint.checksums import damaged, whole_chunks
from holdfast.checkpoint.tier import Tier
from holdfast.errors import HoldfastError, StateError

WINDOW_BYTES = 8 << 20
"""So much is read at once; a multiple of a checksum's chunk. Smaller ones cost more turns of the interpreter than they
save by being summed while they are in the cache."""


class Source(Protocol):
    """Someone who has a blob."""

    where: str
    """For people."""

    def read_into(self, low: int, view: memoryview) -> None:
        """Fills `view` with the blob's bytes from `low` on; raises a HoldfastError when it cannot."""


class TierSource:
    """A blob in a durable tier."""

    def __init__(self, tier: Tier, name: str) -> None:
        self._tier, self._name = tier, name
        self.where = f"{tier.url}/{name}"

    def read_into(self, low: int, view: memoryview) -> None:
        """Fills `view` with the blob's bytes from `low` on."""
        self._tier.read_into(self._name, low, view)


class Blob:
    """One blob and its sources, nearest first. Thread-safe.

    Attributes:
        fetched_bytes: what was read so far, from any source.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        sums: bytes,
        nbytes: int,
        on_skip: Callable[[str], None] = lambda why: None,
    ) -> None:
        """on_skip: told, once for each source, why it is not used any more."""
        self.nbytes = nbytes
        self.fetched_bytes = 0
        self._sums = sums
        self._sources = list(sources)
        self._all = tuple(sources)
        self._passed_over = on_skip
        self._lock = threading.Lock()

    def fetch(self, low: int, high: int) -> memoryview:
        """The bytes [low, high), verified.

        Raises:
            StateError: no source has all of them; the message has every source's reason. Or the blob has no such bytes.
        """
        if not 0 <= low <= high <= self.nbytes:
            raise StateError(f"bytes {low} to {high} are outside of a blob of {self.nbytes} bytes")
        if low == high:
            return memoryview(b"")
        # The caller gets a slice of a larger, verified buffer. No byte reaches a tensor before the checksum
        # of its complete chunk was compared.
        begin, end = whole_chunks(low, high, self.nbytes)
        view = memoryview(bytearray(end - begin))
        self._fill(begin, view)
        return view[low - begin : high - begin]

    def fetch_into(self, low: int, view: memoryview) -> None:
        """The same, into `view`; bytes that are damaged everywhere may be left in it."""
        begin, end = whole_chunks(low, low + len(view), self.nbytes)
        # Aligned ranges are read straight into the caller's memory. This is the path of copies between nodes,
        # where a second copy would halve the rate. Unaligned ones must be cut out of a larger buffer.
        if begin == low and end == low + len(view):
            if len(view):
                self._fill(low, view)
        else:
            view[:] = self.fetch(low, low + len(view))

    def close(self) -> None:
        """Closes the sources that have a connection."""
        for source in self._all:
            close = getattr(source, "close", None)
            if close is not None:
                close()

    def _fill(self, low: int, view: memoryview) -> None:
        reasons = []
        # Nearest first. A source that failed or sent damaged bytes is dropped for the rest of this blob: a
        # disk or a memory that lied once would cost a retry for every window. All sources are tried before
        # the read fails, because different ones may be damaged at different places.
        for source in self._usable():
            try:
                source.read_into(low, view)
            except HoldfastError as error:
                why = f"{source.where}: {error}"
            else:
                with self._lock:
                    self.fetched_bytes += len(view)
                # Verified here, after the transfer, whatever the source is. A copy that was damaged in a
                # holder's memory, on the wire or on a disk is found in the same way.
                bad = next(damaged(view, low, self._sums), None)
                if bad is None:
                    return
                why = f"{source.where}: bytes {bad[0]} to {bad[1]} do not match their checksums"
            reasons.append(why)
            self._drop(source, why)
        raise StateError("; ".join(reasons) or "every source of these bytes failed")

    def _usable(self) -> list[Source]:
        with self._lock:
            return list(self._sources)

    def _drop(self, source: Source, why: str) -> None:
        with self._lock:
            # Several threads read the same blob, and each may fail at the same source. Only the first one
            # reports it, so that `on_skip` hears every source once.
            if source not in self._sources:
                return
            self._sources.remove(source)
        self._passed_over(why)
