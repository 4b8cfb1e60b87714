"""A state dict as a tree of plain values and a row of tensors, of one rank; tensors may be pieces (DTensor)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.layout import Index, TensorSpec
from holdfast.errors import UsageError
from holdfast.train.state import pack, unpack

SMALL_BYTES = 8 << 10
"""Smaller tensors (states of random generators and the like) go with the plain values, so that ranks that differ in
nothing else have equal rows, which are stored once."""


@dataclass(frozen=True)
class Leaf:
    """A tensor of the state: what of it is here, and where that begins in the whole."""

    path: str
    local: torch.Tensor
    whole: tuple[int, ...] = ()
    start: tuple[int, ...] = ()


@dataclass
class Flat:
    """A flattened state. tensors: in the row's order."""

    index: Index
    tensors: list[torch.Tensor]


def flatten(state: Mapping[str, Any], step: int) -> Flat:
    """Takes a state apart. Nothing is copied; tensors may be on any device.

    Raises:
        UsageError: a value that is neither plain nor a tensor, with its path.
    """
    found: list[tuple[str, torch.Tensor]] = []
    tree = {name: pack(plain(value), name, found) for name, value in state.items()}
    kept: dict[int, int] = {}
    small: dict[int, list[Any]] = {}
    leaves: list[Leaf] = []
    for number, (path, tensor) in enumerate(found):
        if not isinstance(tensor, DTensor) and tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            small[number] = _inline(tensor)
        else:
            kept[number] = len(leaves)
            leaves.append(leaf_of(path, tensor))
    specs, offset = [], 0
    for leaf in leaves:
        nbytes = leaf.local.numel() * leaf.local.element_size()
        dtype, shape = str(leaf.local.dtype)[6:], tuple(leaf.local.shape)
        specs.append(TensorSpec(leaf.path, dtype, shape, offset, nbytes, leaf.whole, leaf.start))
        offset += nbytes
    tree = {name: _renumber(value, kept, small) for name, value in tree.items()}
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
    if not isinstance(tensor, DTensor):
        return Leaf(path, tensor.detach())
    local = tensor.to_local().detach()
    start = _start_of(tensor, local)
    if start is None:
        raise UsageError(
            f"{path}: a DTensor placed as {tensor.placements} is no single box of the whole tensor"
        )
    return Leaf(path, local, tuple(tensor.shape), start)


_starts: dict[Any, tuple[int, ...] | None] = {}
"""Where a layout's local box begins. Asking torch takes 25 us for every tensor, which adds up to as much as copying a
hundred megabytes."""


def _start_of(tensor: DTensor, local: torch.Tensor) -> tuple[int, ...] | None:
    key = tensor.device_mesh, tensor.placements, tensor.shape, local.shape
    if key not in _starts:
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        whole = len(chunks) == 1 and tuple(chunks[0].sizes) == tuple(local.shape)
        _starts[key] = tuple(chunks[0].offsets) if whole else None
    return _starts[key]


def inlined(leaf: list[Any]) -> torch.Tensor:
    """The tensor of a leaf that went with the plain values."""
    dtype, shape, data = leaf
    value = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    )
    return value.view(getattr(torch, dtype)).reshape(tuple(shape))


def rebuild(tree: Any, tensors: list[Any]) -> Any:
    """The state from its tree, with these tensors at its leaves."""
    return unpack(tree, tensors, inlined)


def _inline(tensor: torch.Tensor) -> list[Any]:
    value = tensor.detach().cpu().contiguous()
    data = bytes(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""
    return ["b", [str(value.dtype)[6:], list(value.shape), data]]


def _renumber(tree: Any, kept: Mapping[int, int], small: Mapping[int, list[Any]]) -> Any:
    kind, value = tree
    match kind:
        case "T":
            return small[value] if value in small else ["T", kept[value]]
        case "d":
            return ["d", [[k, _renumber(v, kept, small)] for k, v in value]]
        case "l" | "t":
            return [kind, [_renumber(v, kept, small) for v in value]]
        case _:
            return tree
