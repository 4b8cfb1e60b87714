"""What a row of bytes means: the tree of a state, and each tensor's shape and place. Free of torch."""

from __future__ import annotations

from typing import Any

import msgspec


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor, or one piece of a sharded one, and its place in the row.

    dtype: torch's name without `torch.`. shape: of the piece. whole, start: the shape of the tensor that it is a
    piece of, and where in it the piece begins; empty for a tensor that is not sharded. placed: how it lies on the mesh
    of a replica, where `holdfast.Run` saved it (`tensors.dtensor_shards.placed`).
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    whole: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    placed: str = ""


class Index(msgspec.Struct, frozen=True):
    """What the bytes of a row mean. tree: nested [kind, value] pairs, see `holdfast.tensors.tree`."""

    step: int
    tree: Any
    tensors: tuple[TensorSpec, ...]
    nbytes: int


# Made once, and not by whoever reads first: msgspec 0.22 crashes where two threads are the first to decode a type.
_indexes = msgspec.msgpack.Decoder(Index)
_indexes_of_peers = msgspec.json.Decoder(Index)


def decode_index(data: bytes | memoryview) -> Index:
    """Reads an index, as a worker gives it to its agent (msgpack). Raises msgspec.MsgspecError."""
    return _indexes.decode(data)


def decode_index_of_peer(data: bytes) -> Index:
    """Reads an index, as workers give it to each other (JSON). Raises msgspec.MsgspecError."""
    return _indexes_of_peers.decode(data)
