"""A checkpoint that was located: what is in it, and how to read its blobs from the nearest who has them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import Head, digest
from holdfast.checkpoint.replicate import Blob, Pull
from holdfast.checkpoint.snapshot_server import peer_of
from holdfast.errors import StateError, TierError, UnreadError
from holdfast.protocol.snapshots import Copy, Holder, Shard
from holdfast.tensors.index import TensorSpec

OnSkip = Callable[[str], None]


class Heads(Sequence[Head]):
    """The heads of all ranks, each fetched when it is first asked for. Thread-safe.

    Each of N ranks that load what N ranks saved needs but its own: all of them would be N squared requests.
    """

    def __init__(self, count: int, fetch: Callable[[int], Head]) -> None:
        """fetch: a rank's head; may raise StateError and TierError."""
        self._fetch = fetch
        self._there: list[Head | None] = [None] * count
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._there)

    @overload
    def __getitem__(self, rank: int) -> Head: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Head]: ...
    def __getitem__(self, rank: int | slice) -> Head | list[Head]:
        """Raises UnreadError when it cannot be had."""
        if isinstance(rank, slice):
            return [self[i] for i in range(*rank.indices(len(self)))]
        # Held during the fetch: several reading threads ask for the same head at once, and one request is to
        # serve them all.
        with self._lock:
            head = self._there[rank]
            if head is None:
                try:
                    head = self._there[rank] = self._fetch(rank)
                except (StateError, TierError) as error:
                    raise UnreadError(str(error)) from error
            return head

    def check(self, reader: int, readers: int) -> None:
        """Fetches a reader's share of them: together the readers see whether all are there.

        Raises:
            UnreadError: one is not.
        """
        for rank in range(reader, len(self), readers):
            self[rank]


@dataclass(kw_only=True)
class Located:
    """A complete checkpoint, and how to read it."""

    step: int
    where: str
    """The tier or the nodes, for messages."""
    heads: Sequence[Head]
    """By rank."""
    open_blob: Callable[[int], Blob]
    """A rank's blob over connections of its own; the caller closes it."""
    identity: str = ""
    """Of what was saved, wherever it is read from."""
    fetched_bytes: int = 0
    """Read from its blobs so far."""
    _own: dict[int, dict[str, TensorSpec]] = field(default_factory=dict)

    @cached_property
    def _pieces(self) -> dict[str, list[tuple[int, TensorSpec]]]:
        pieces: dict[str, list[tuple[int, TensorSpec]]] = {}
        for rank, head in enumerate(self.heads):
            for spec in head.index.tensors:
                pieces.setdefault(spec.path, []).append((rank, spec))
        return pieces

    @property
    def world(self) -> int:
        """Ranks that saved it."""
        return len(self.heads)

    def nearest(self, reader: int) -> int:
        """The rank whose plain values and whole tensors a reader takes: its own, where there is one."""
        # By the remainder, so that readers beyond the saved ranks spread over all of them, and do not all ask
        # the first.
        return reader % self.world

    def own(self, path: str, reader: int) -> TensorSpec | None:
        """The piece of a tensor that the nearest rank saved; needs no other rank's head."""
        rank = self.nearest(reader)
        if rank not in self._own:
            self._own[rank] = {t.path: t for t in self.heads[rank].index.tensors}
        return self._own[rank].get(path)

    def paths(self) -> list[str]:
        """Every tensor's path, in the order of the ranks."""
        return list(self._pieces)

    def pieces(self, path: str, reader: int = 0) -> list[tuple[int, TensorSpec]]:
        """The pieces of a tensor, each once, and the rank that saved it.

        Where several ranks saved the same piece, a reader of the same rank reads its own; others spread over them.
        """
        by_place: dict[tuple[int, ...], list[tuple[int, TensorSpec]]] = {}
        # Replicated tensors are saved by every rank. Readers beyond the first spread over the copies by their
        # rank, or N new ranks would all read from rank 0's node.
        there = self._pieces.get(path, [])
        # A rank that has nothing of a tensor may say that it begins where another one's piece does.
        for rank, spec in [p for p in there if p[1].nbytes] or there:
            by_place.setdefault(spec.start, []).append((rank, spec))
        return [
            next((p for p in same if p[0] == reader), same[reader % len(same)]) for same in by_place.values()
        ]


def find_in_archive(
    archive: Archive, step: int, on_skip: OnSkip = lambda why: None, reader: int = 0, readers: int = 1
) -> Located:
    """The checkpoint of a step in a durable tier.

    Args:
        reader, readers: of so many readers that tell each other, this one looks at its share of the shards.

    Raises:
        StateError: not there, or not complete as far as its manifest and heads tell.
        TierError: the tier cannot be read.
    """
    manifest = archive.manifest(step)

    def fetch(rank: int) -> Head:
        head = archive.head(manifest.shards[rank])
        archive.check_size(manifest.shards[rank], head)
        return head

    # Each reader fetches its share of the heads now, and others only on demand. Together the readers have
    # checked all of them, so a checkpoint that lacks a shard is passed over before anybody loads a byte.
    heads = Heads(manifest.world, fetch)
    heads.check(reader, readers)
    return Located(
        step=step,
        where=archive.where(step),
        heads=heads,
        open_blob=lambda rank: archive.blob(manifest.shards[rank], heads[rank], on_skip),
        identity=_identity(manifest.shards),
    )


def find_in_memory(
    shards: Sequence[tuple[Copy, tuple[Holder, ...]]],
    token: str,
    on_skip: OnSkip = lambda why: None,
    own_node: str = "",
    reader: int = 0,
    readers: int = 1,
) -> Located:
    """A snapshot in the memory of agents; of each shard the holders, nearest first. own_node: the reader's. reader,
    readers: as above.

    Raises:
        StateError: a shard's head cannot be had from any of its holders.
    """
    ordered = sorted(shards, key=lambda s: s[0].key.rank)
    # The coordinator offers only complete snapshots, but its answer may be older than an eviction or a loss
    # of a node. A missing rank must fail here and not as an index error in the middle of a load.
    if [c.key.rank for c, _ in ordered] != list(range(ordered[0][0].key.world)):
        raise StateError(f"the snapshot of step {ordered[0][0].key.step} is not complete in memory")

    def fetch(rank: int) -> Head:
        copy, holders = ordered[rank]
        return Pull(key=copy.key, holders=holders, token=token).head(copy.shard.head)[1]

    heads = Heads(len(ordered), fetch)
    heads.check(reader, readers)

    def open_blob(rank: int) -> Blob:
        copy, holders = ordered[rank]
        peers = [peer_of(h, token, copy.key, own_node) for h in holders]
        return Blob(peers, heads[rank].sums, heads[rank].index.nbytes, on_skip)

    step = ordered[0][0].key.step
    nodes = sorted({h.node for _, holders in ordered for h in holders[:1]})
    return Located(
        step=step,
        where=f"step {step} in the memory of {', '.join(nodes)}",
        heads=heads,
        open_blob=open_blob,
        identity=_identity([c.shard for c, _ in ordered]),
    )


def _identity(shards: Sequence[Shard]) -> str:
    return digest("".join(s.head.xxh3 for s in shards).encode())
