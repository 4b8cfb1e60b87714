"""What the bytes of a state mean: the tree of a state, and each tensor's shape and place. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import StateError
from holdfast.protocol.wire.decoding import decode


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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
    global_shape: tuple[int, ...] = ()
    """Shape of the tensor that it is a piece of; empty for a tensor that is not sharded."""
    start: tuple[int, ...] = ()
    """Where in that tensor the piece begins; empty for a tensor that is not sharded."""
    placed: str = ""
    """How it lies on the DeviceMesh of a replica, see `tensors.dtensor_shards.placed`. Only `holdfast.Run` writes it."""


class StateIndex(msgspec.Struct, frozen=True):
    """What the bytes of a state mean."""

    step: int
    """Committed steps that are in it."""
    tree: Any
    """Nested [kind, value] pairs, see `holdfast.tensors.tree`."""
    tensors: tuple[TensorSpec, ...]
    """In the order of their bytes, without gaps; the widest elements first, so that each begins at a multiple of its own."""
    nbytes: int
    """Of all tensors together."""


MOST_DEPTH = 200
"""Of the containers in each other. Those who walk a tree call themselves, at most twice for each."""


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


def with_leaves(tree: Any, leaf: Callable[[str, Any], Any]) -> Any:
    """The same packed tree with other leaves: leaf(kind, value) gives what is in the place of each."""
    kind, value = tree
    match kind:
        case "d":
            return [kind, [[key, with_leaves(part, leaf)] for key, part in value]]
        case "l" | "t":
            return [kind, [with_leaves(part, leaf) for part in value]]
        case "w":
            return [kind, [value[0], [[at, with_leaves(part, leaf)] for at, part in value[1]]]]
        case "p":
            return [kind, [value[0], with_leaves(value[1], leaf)]]
        case _:
            return leaf(kind, value)


LARGE = "int"
"""Stands where a dtype would: a whole number of more than 64 bits, as NumPy's generators have, in decimal digits."""


class SmallTensor(NamedTuple):
    """One that lies with the plain values, see `holdfast.checkpoint.loading`."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    global_shape: tuple[int, ...] = ()
    """Never a piece of another."""
    start: tuple[int, ...] = ()


def small_tensors(index: StateIndex) -> list[SmallTensor]:
    """Those that are not among the bytes of the state."""
    found = []
    for name, tree in index.tree.items():
        for path, kind, value in leaves(tree, name):
            if kind == "b" and value[0] != LARGE:
                found.append(SmallTensor(path, value[0], tuple(value[1]), len(value[2])))
    return found


# Made once, and not by whoever reads first: msgspec 0.22 crashes where two threads are the first to decode a type.
_indexes = msgspec.msgpack.Decoder(StateIndex)


def decode_index(data: bytes | memoryview) -> StateIndex:
    """Reads an index, as workers give it to their agents and to each other (msgpack; JSON would make None of infinities).

    Raises:
        StateError: it is none, or says what cannot be.
    """
    return decode(
        lambda read: checked(_indexes.decode(read)), data, "the index of a state is damaged", error=StateError
    )


def checked(index: StateIndex, data: type | tuple[type, ...] = bytes) -> StateIndex:
    """The same index, if it is one that a state can be made of: those who read it walk its tree without looking.

    Args:
        data: what stands for the bytes of a small tensor.

    Raises:
        ValueError: a tree is none, or too deep; a tensor lies outside of the bytes.
    """
    if not isinstance(index.tree, dict):
        raise ValueError("its tree has no names")
    for spec in index.tensors:
        if min(spec.offset, spec.nbytes, *spec.shape, *spec.global_shape, *spec.start, 0) < 0:
            raise ValueError(f"{spec.path} has a negative size")
        if spec.offset + spec.nbytes > index.nbytes:
            raise ValueError(f"{spec.path} ends after the last of {index.nbytes} bytes")
    # Not recursive: this is what finds a tree that is too deep for those that are.
    open_ = [(tree, str(name), 0) for name, tree in index.tree.items()]
    while open_:
        tree, path, depth = open_.pop()
        if depth > MOST_DEPTH:
            raise ValueError(f"{path[:60]} is nested more than {MOST_DEPTH} deep")
        if not isinstance(tree, list) or len(tree) != 2:
            raise ValueError(f"{path}: {str(tree)[:60]} is not [kind, value]")
        kind, value = tree
        if kind == "T" and not (isinstance(value, int) and 0 <= value < len(index.tensors)):
            raise ValueError(f"{path}: there is no tensor {value!r}")
        if kind == "b" and not _is_small(value, data):
            raise ValueError(f"{path}: {str(value)[:60]} is not a small tensor")
        if kind in ("d", "l", "t", "w", "p"):
            open_ += [(part, f"{path}.{key}", depth + 1) for key, part in _parts(kind, value, path)]
    return index


def _is_small(value: Any, data: type | tuple[type, ...]) -> bool:
    """Whether it has dtype, shape and bytes."""
    if not isinstance(value, list) or len(value) != 3:
        return False
    dtype, shape, there = value
    whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    return isinstance(dtype, str) and whole and isinstance(there, data)


def _parts(kind: str, value: Any, path: str) -> list[tuple[Any, Any]]:
    """The trees in a tree, with their keys. A kind of a later version has none here; it is refused where it is loaded."""
    if not isinstance(value, list):
        raise ValueError(f"{path}: {str(value)[:60]} is not a list")
    if kind in ("l", "t"):
        return list(enumerate(value))
    if kind in ("w", "p"):
        if len(value) != 2 or not isinstance(value[0], dict):
            raise ValueError(f"{path}: a tensor of other tensors says nothing about itself")
        if kind == "p":
            return [("", value[1])]
        value = value[1]
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    if not pairs or not all(isinstance(key, str | int) for key, _ in value):
        raise ValueError(f"{path}: {str(value)[:60]} is not a list of keys and values")
    return [(key, part) for key, part in value]
