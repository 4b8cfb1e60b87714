"""What the bytes of a state mean: the tree of a state, and each tensor's shape and place. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor, or one piece of a sharded one, and where its bytes begin."""

    path: str
    """Dotted path in the state's tree, from the name under which the object is protected."""
    dtype: str
    """Torch's name without `torch.`: a name that msgpack and JSON can hold."""
    shape: tuple[int, ...]
    """Of the piece."""
    # Written down although they follow from the order and the shapes: a reader that wants one tensor need not
    # know every dtype of the torch that wrote the file.
    offset: int
    """Where it begins, in bytes from the beginning of the state."""
    nbytes: int
    """Its size."""
    # Empty means "not sharded" and not "unknown". Checkpoints from before sharding lack these three fields, and
    # all their tensors are complete, so the defaults say what is true of them.
    # The name on disk and on the wire is the one that the first checkpoints have.
    global_shape: tuple[int, ...] = msgspec.field(default=(), name="whole")
    """Shape of the tensor that it is a piece of; empty for a tensor that is not sharded."""
    start: tuple[int, ...] = ()
    """Where in that tensor the piece begins; empty for a tensor that is not sharded."""
    placed: str = ""
    """How it lies on the DeviceMesh of a replica, see `tensors.dtensor_shards.placed`. Only `holdfast.Run` writes it."""


class Index(msgspec.Struct, frozen=True):
    """What the bytes of a state mean."""

    step: int
    """Committed steps that are in it."""
    tree: Any
    """Nested [kind, value] pairs, see `holdfast.tensors.tree`."""
    tensors: tuple[TensorSpec, ...]
    """In the order of their bytes, without gaps."""
    nbytes: int
    """Of all tensors together."""


def leaves(
    tree: Any, path: str, undivided: Callable[[Any], bool] = lambda tree: False
) -> Iterator[tuple[str, str, Any]]:
    """Every leaf of a packed tree: its dotted path, kind and value. undivided: subtrees that count as one leaf."""
    kind, value = tree
    if kind in ("d", "l", "t", "w") and not undivided(tree):
        for key, part in value if kind == "d" else value[1] if kind == "w" else enumerate(value):
            yield from leaves(part, f"{path}.{key}", undivided)
    elif kind == "p":
        yield from leaves(value[1], path, undivided)
    else:
        yield path, kind, value


LARGE = "int"
"""Stands where a dtype would: a whole number of more than 64 bits, as NumPy's generators have, in decimal digits."""


class SmallTensor(NamedTuple):
    """One that lies with the plain values, see `holdfast.checkpoint.flatten`."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    global_shape: tuple[int, ...] = ()
    """Never a piece of another."""
    start: tuple[int, ...] = ()


def small_tensors(index: Index) -> list[SmallTensor]:
    """Those that are not among the bytes of the state."""
    found = []
    for name, tree in index.tree.items():
        for path, kind, value in leaves(tree, name):
            if kind == "b" and value[0] != LARGE:
                found.append(SmallTensor(path, value[0], tuple(value[1]), len(value[2])))
    return found


# Made once, and not by whoever reads first: msgspec 0.22 crashes where two threads are the first to decode a type.
_indexes = msgspec.msgpack.Decoder(Index)


def decode_index(data: bytes | memoryview) -> Index:
    """Reads an index, as workers give it to their agents and to each other (msgpack; JSON would make None of infinities). Raises
    msgspec.MsgspecError."""
    return _indexes.decode(data)
