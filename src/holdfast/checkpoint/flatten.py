"""A state dict as a tree of plain values and a blob of tensors, of one rank; tensors may be pieces (DTensor)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import StateError, UsageError
from holdfast.protocol.wire.decoding import decode
from holdfast.tensors import writable
from holdfast.tensors.dtensor_shards import Leaf, piece_of
from holdfast.tensors.index import LARGE, Index, TensorSpec
from holdfast.tensors.loaded import check_restorable
from holdfast.tensors.tree import Placing, no_mesh, pack, unpack

SMALL_BYTES = 8 << 10
"""Smaller tensors (states of random generators and the like) go with the plain values, so that ranks that differ in
nothing else have equal blobs, which are stored once."""


@dataclass
class Flat:
    """A flattened state."""

    index: Index
    tensors: list[torch.Tensor]
    """In the blob's order."""


def flatten(state: Mapping[str, Any], step: int) -> Flat:
    """Takes a state apart. Nothing is copied; tensors may be on any device.

    Raises:
        UsageError: a value that is neither plain nor a tensor, or a tensor that could not be restored, with its path.
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    tree = {}
    for name, value in state.items():
        part = plain(value)
        check_restorable(name, value, part)
        tree[name] = pack(part, name, tensors)
    # A path names a tensor when it is loaded, and for other sharding it is the only name. Two of one path
    # would be saved, and one of them loaded twice.
    twice = [path for path, count in Counter(path for path, _ in tensors).items() if count > 1]
    if twice:
        raise UsageError(f"two tensors of the state have the same path {twice[0]}: rename one of them")
    kept: dict[int, int] = {}
    small: dict[int, list[Any]] = {}
    leaves: list[Leaf] = []
    for number, (path, tensor) in enumerate(tensors):
        # Small tensors go with the values for two reasons: a read for each would cost a request to an object
        # store, and random states, which differ between ranks, would make every rank's blob different, so
        # that replicas could not share one.
        if not isinstance(tensor, DTensor) and tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            small[number] = _inline(path, tensor)
        else:
            kept[number] = len(leaves)
            leaves.append(leaf_of(path, tensor))
    # Without gaps and in this order: the blob is written as one stream, checksums go over fixed parts of it,
    # and a reader finds a tensor by its offset alone.
    specs, offset = [], 0
    for leaf in leaves:
        nbytes = leaf.local.numel() * leaf.local.element_size()
        dtype, shape = str(leaf.local.dtype)[6:], tuple(leaf.local.shape)
        specs.append(
            TensorSpec(
                path=leaf.path,
                dtype=dtype,
                shape=shape,
                offset=offset,
                nbytes=nbytes,
                global_shape=leaf.global_shape,
                start=leaf.start,
            )
        )
        offset += nbytes
    tree = {name: _final(value, name, kept, small) for name, value in tree.items()}
    return Flat(Index(step, tree, tuple(specs), offset), [leaf.local for leaf in leaves])


def plain(value: Any) -> Any:
    """An object's state dict; any other value as it is."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    return value


def leaf_of(path: str, tensor: torch.Tensor) -> Leaf:
    """What a rank has of a tensor.

    Raises:
        UsageError: a DTensor whose placement keeps no contiguous box of it (or sums that are still to be reduced).
    """
    return piece_of(path, tensor if isinstance(tensor, DTensor) else _strided(path, tensor))


def inlined(leaf: list[Any]) -> Any:
    """The tensor, or the large whole number, of a leaf that went with the plain values.

    Raises:
        StateError: its bytes are none of its dtype and shape.
    """
    return decode(_inlined, leaf, "a small tensor of the state is damaged", error=StateError)


def _inlined(leaf: list[Any]) -> Any:
    dtype, shape, data = leaf
    if dtype == LARGE:
        return int(data)
    value = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    )
    try:
        return value.view(getattr(torch, dtype)).reshape(tuple(shape))
    except RuntimeError as error:  # torch's own word for a shape that does not fit
        raise ValueError(str(error).partition("\n")[0]) from None


def rebuild(tree: Any, tensors: list[Any], placing: Placing = no_mesh) -> Any:
    """The state from its tree, with these tensors at its leaves. placing: makes a DTensor of a shard that is a wrapper."""
    return unpack(tree, tensors, inlined, placing)


def _strided(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as bytes in memory.

    Raises:
        UsageError: it is none: sparse, quantized, without data, or a piece of a kind that is not known here.
    """
    writable.check(path, tensor)
    return tensor.detach().resolve_conj().resolve_neg()


def _inline(path: str, tensor: torch.Tensor) -> list[Any]:
    value = _strided(path, tensor).cpu().clone(memory_format=torch.contiguous_format)
    data = bytes(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""
    return ["b", [str(value.dtype)[6:], list(value.shape), data]]


def _final(tree: Any, path: str, kept: Mapping[int, int], small: Mapping[int, list[Any]]) -> Any:
    """The tree as it is saved: the blob's tensors by their number there, plain values that every reader can read."""
    kind, value = tree
    match kind:
        case "T":
            return small[value] if value in small else ["T", kept[value]]
        case "d":
            return ["d", [[_key(k, path), _final(v, f"{path}.{k}", kept, small)] for k, v in value]]
        case "l" | "t":
            return [kind, [_final(v, f"{path}.{i}", kept, small) for i, v in enumerate(value)]]
        case "w":
            about, parts = value
            return [kind, [about, [[at, _final(v, f"{path}.{at}", kept, small)] for at, v in parts]]]
        case "p":
            return [kind, [value[0], _final(value[1], path, kept, small)]]
        case _:
            return _exact(value, path)


def _key(key: Any, path: str) -> str | int:
    kind, value = _exact(key, path)
    if kind != "x":
        raise UsageError(f"{path}: the key {key} has more than 64 bits")
    exact: str | int = value
    return exact


def _exact(value: Any, path: str) -> list[Any]:
    """A leaf of a plain value, and of no subclass of it (numpy's floats, enumerations).

    Raises:
        UsageError: text that is not Unicode.
    """
    if value is None or isinstance(value, bool):
        return ["x", value]
    if isinstance(value, float):
        # By the base type's own method: a subclass may override `__float__`, and its class could not be
        # loaded again.
        return ["x", float.__float__(value)]
    if isinstance(value, int):
        # msgpack holds 64 bits, NumPy's generators have 128. Larger numbers travel as decimal text and come
        # back exactly.
        number = int.__int__(value)
        if -(1 << 63) <= number < 1 << 64:
            return ["x", number]
        return ["b", [LARGE, [], str(number).encode()]]
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{path}: {text!r} cannot be saved: {error}") from error
    return ["x", text]
