"""A checkpoint that was found: what is in it, and how to read its rows from the nearest who has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import Head, TensorSpec, digest
from holdfast.checkpoint.peers import peer_of
from holdfast.checkpoint.pull import Pull
from holdfast.checkpoint.rows import Row
from holdfast.errors import StateError
from holdfast.protocol.snapshots import Copy, Holder, Shard

Said = Callable[[str], None]


@dataclass
class Found:
    """A whole checkpoint. heads: by rank. open_row: a rank's row over connections of its own, to be closed.

    identity: of what was saved, wherever it is read from.
    fetched_bytes: what was read of its rows.
    """

    step: int
    where: str
    heads: list[Head]
    open_row: Callable[[int], Row]
    identity: str = ""
    fetched_bytes: int = 0
    _pieces: dict[str, list[tuple[int, TensorSpec]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, head in enumerate(self.heads):
            for spec in head.index.tensors:
                self._pieces.setdefault(spec.path, []).append((rank, spec))

    @property
    def world(self) -> int:
        """Ranks that saved it."""
        return len(self.heads)

    def paths(self) -> list[str]:
        """Every tensor's path, in the order of the ranks."""
        return list(self._pieces)

    def pieces(self, path: str, reader: int = 0) -> list[tuple[int, TensorSpec]]:
        """The pieces of a tensor, each once, and the rank that saved it.

        Where several ranks saved the same piece, a reader of the same rank reads its own; others spread over them.
        """
        by_place: dict[tuple[int, ...], list[tuple[int, TensorSpec]]] = {}
        there = self._pieces.get(path, [])
        # A rank that has nothing of a tensor may say that it begins where another one's piece does.
        for rank, spec in [p for p in there if p[1].nbytes] or there:
            by_place.setdefault(spec.start, []).append((rank, spec))
        return [
            next((p for p in same if p[0] == reader), same[reader % len(same)]) for same in by_place.values()
        ]


def find_in_archive(archive: Archive, step: int, passed_over: Said = lambda why: None) -> Found:
    """The checkpoint of a step in a durable tier.

    Raises:
        StateError: not there, or not whole as far as its manifest and heads tell.
        TierError: the tier cannot be read.
    """
    manifest = archive.manifest(step)
    heads = [archive.head(shard) for shard in manifest.shards]
    for shard, head in zip(manifest.shards, heads, strict=True):
        size = archive.tier.size(shard.row.name)
        if size != head.index.nbytes:
            what = "is not there" if size is None else f"has {size} of {head.index.nbytes} bytes"
            raise StateError(f"{archive.tier.url}/{shard.row.name} {what}")
    return Found(
        step,
        archive.where(step),
        heads,
        lambda rank: archive.row(manifest.shards[rank], heads[rank], passed_over),
        _identity(manifest.shards),
    )


def find_in_memory(
    shards: Sequence[tuple[Copy, tuple[Holder, ...]]],
    token: str,
    passed_over: Said = lambda why: None,
    own_node: str = "",
) -> Found:
    """A snapshot in the memory of agents; of each shard the holders, nearest first. own_node: the reader's.

    Raises:
        StateError: a shard's head cannot be had from any of its holders.
    """
    ordered = sorted(shards, key=lambda s: s[0].key.rank)
    if [c.key.rank for c, _ in ordered] != list(range(ordered[0][0].key.world)):
        raise StateError(f"the snapshot of step {ordered[0][0].key.step} is not whole in memory")
    heads = [Pull(c.key, holders, token).head(c.shard.head)[1] for c, holders in ordered]

    def open_row(rank: int) -> Row:
        copy, holders = ordered[rank]
        peers = [peer_of(h, token, copy.key, own_node) for h in holders]
        return Row(peers, heads[rank].sums, heads[rank].index.nbytes, passed_over)

    step = ordered[0][0].key.step
    nodes = sorted({h.node for _, holders in ordered for h in holders[:1]})
    return Found(
        step,
        f"step {step} in the memory of {', '.join(nodes)}",
        heads,
        open_row,
        _identity([c.shard for c, _ in ordered]),
    )


def _identity(shards: Sequence[Shard]) -> str:
    return digest("".join(s.head.xxh3 for s in shards).encode())
