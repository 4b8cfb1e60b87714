"""Reading a blob from whoever has it: verified, from the nearest source, going on at the next; whole, over several connections at once,
into a slot or wherever the caller puts its bytes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.checkpoint.layout import Head, damaged, seal, whole_chunks
from holdfast.checkpoint.memory import PooledSlot, SlotPool
from holdfast.checkpoint.snapshot_server import SnapshotPeer, peer_of
from holdfast.checkpoint.tier import Tier
from holdfast.errors import HoldfastError, StateError
from holdfast.protocol.snapshots import Holder, Key, Part

WINDOW_BYTES = 8 << 20
"""So much is read at once; a multiple of a checksum's chunk. Smaller ones cost more turns of the interpreter than they
save by being summed while they are in the cache."""


class BlobSource(Protocol):
    """Someone who has a blob."""

    where: str
    """For people."""

    def read_into(self, low: int, view: memoryview) -> None:
        """Fills `view` with the blob's bytes from `low` on; raises a HoldfastError when it cannot."""


class TierSource:
    """A blob in a durable tier."""

    def __init__(self, tier: Tier, name: str, begin: int) -> None:
        """begin: where in its file the blob begins."""
        self._tier, self._name, self._begin = tier, name, begin
        self.where = f"{tier.url}/{name}"

    def read_into(self, low: int, view: memoryview) -> None:
        """Fills `view` with the blob's bytes from `low` on."""
        self._tier.read_into(self._name, self._begin + low, view)


class Blob:
    """One blob and its sources, nearest first. Thread-safe.

    Attributes:
        fetched_bytes: what was read so far, from any source.
    """

    def __init__(
        self,
        sources: Sequence[BlobSource],
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

    def _usable(self) -> list[BlobSource]:
        with self._lock:
            return list(self._sources)

    def _drop(self, source: BlobSource, why: str) -> None:
        with self._lock:
            # Several threads read the same blob, and each may fail at the same source. Only the first one
            # reports it, so that `on_skip` hears every source once.
            if source not in self._sources:
                return
            self._sources.remove(source)
        self._passed_over(why)


STREAMS = 4
"""Connections of one transfer between machines, where one is often held to a part of what the network carries."""

LOOPBACK_STREAMS = 2
"""Within one machine two fill what memory carries; more only take processor time."""


@dataclass(eq=False, kw_only=True)
class Pull:
    """One transfer of one shard from its holders. `abort` ends it from another thread."""

    key: Key
    holders: Sequence[Holder]
    """Nearest first."""
    token: str
    """Of the job."""
    streams: int = 0
    """Connections; 0: as many as the way to the holders needs."""
    own_node: str = ""
    """The name of the reader's node, if it may read a slot from its file."""
    fetched_bytes: int = 0
    """Read so far, from any holder."""
    on_skip: Callable[[str], None] = lambda why: None
    """Called with the reason when a holder is not used any more."""
    _peers: set[SnapshotPeer] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _aborted: bool = False

    def head(self, part: Part | None = None) -> tuple[bytes, Head]:
        """The shard's head, as bytes and decoded. part: what it must be.

        Raises:
            StateError: nobody gives it.
        """
        reasons = []
        peers = self._connect(0)
        try:
            for peer in peers:
                try:
                    return peer.head(part)
                except HoldfastError as error:
                    self._check_aborted()
                    reasons.append(str(error))
        finally:
            for peer in peers:
                self._let_go(peer)
        raise StateError("; ".join(reasons) or f"no node holds the snapshot of step {self.key.step}")

    def run(self, head: Head, take: Callable[[Blob, int, int], None]) -> None:
        """Calls `take(blob, low, high)` for every window, from several threads; it reads these bytes from the blob. Each
        thread has a stripe of its own, so that one request serves all of it.

        Raises:
            StateError: no holder has all of them, or the transfer was aborted.
        """
        nbytes = head.index.nbytes
        windows = -(-nbytes // WINDOW_BYTES)
        # At least one stream for each holder, so that every holder's bandwidth is used, but never more
        # streams than windows.
        count = max(1, min(max(self.streams or self._enough(), len(self.holders)), windows))
        # Edges lie on windows, and windows on chunks: no two streams share a checksum's chunk, so none reads
        # what another one reads.
        edges = [windows * i // count * WINDOW_BYTES for i in range(count)] + [nbytes]
        failed = threading.Event()  # then the others need not go on

        def stream(number: int) -> None:
            low, end = edges[number], edges[number + 1]
            # Connections belong to one thread: HTTP answers come in the order of requests, so two threads on
            # one connection would read each other's bytes.
            peers = self._connect(number)
            blob = Blob(peers, head.sums, nbytes, self._skip)
            for peer in peers:
                peer.ahead = end
            try:
                while low < end and not failed.is_set():
                    self._check_aborted()
                    take(blob, low, min(low + WINDOW_BYTES, end))
                    low += WINDOW_BYTES
            except BaseException:
                failed.set()
                # After an abort the reason is the abort. What the shut connections raise looks like a fault
                # of the holders, and the coordinator would count it against them.
                self._check_aborted()
                raise
            finally:
                with self._lock:
                    self.fetched_bytes += blob.fetched_bytes
                for peer in peers:
                    self._let_go(peer)

        if count == 1:
            stream(0)
            return
        with ThreadPoolExecutor(count, thread_name_prefix="holdfast-pull") as pool:
            for job in [pool.submit(stream, i) for i in range(count)]:
                job.result()

    def abort(self) -> None:
        """Ends the transfer at once."""
        with self._lock:
            self._aborted = True
            for peer in self._peers:
                peer.abort()

    def _enough(self) -> int:
        local = all(h.host.startswith("127.") or h.host in ("localhost", "::1") for h in self.holders)
        return LOOPBACK_STREAMS if local else STREAMS

    def _connect(self, first: int) -> list[SnapshotPeer]:
        """A connection to every holder, made when it is used; the streams begin with different ones."""
        with self._lock:
            self._check_aborted()
            # Stream i begins with holder i: the streams spread over the holders, and each can go on with all
            # the others when its own fails.
            order = list(itertools.islice(itertools.cycle(self.holders), first, first + len(self.holders)))
            peers = [peer_of(h, self.token, self.key, self.own_node) for h in order]
            self._peers.update(peers)
            return peers

    def _check_aborted(self) -> None:
        if self._aborted:
            raise StateError("the transfer was aborted")

    def _skip(self, why: str) -> None:
        if not self._aborted:
            self.on_skip(why)

    def _let_go(self, peer: SnapshotPeer) -> None:
        with self._lock:
            self._peers.discard(peer)
        peer.close()


def replicate(pool: SlotPool, pull: Pull, part: Part | None) -> PooledSlot:
    """Brings a snapshot into a slot of this node's. Blocks for as long as the transfer takes.

    Args:
        part: the head that its owner reported.

    Raises:
        TierError: no memory for it here.
        StateError: no holder has all of it.
    """
    # The head comes first: it says how large a slot must be, and has the sums against which every byte is
    # verified before `received` seals the slot.
    data, head = pull.head(part)
    slot = pool.begin(pull.key, head.index.nbytes)
    try:
        with slot.blob as target:

            def take(blob: Blob, low: int, high: int) -> None:
                with target[low:high] as view:
                    blob.fetch_into(low, view)

            pull.run(head, take)
        pool.received(slot, seal(head.index, head.sums, data))
    except BaseException:
        # Also for KeyboardInterrupt and the like: a slot that stayed WRITING would never be reused, and two
        # of them are all that a shard has.
        pool.drop(slot)
        raise
    return slot
