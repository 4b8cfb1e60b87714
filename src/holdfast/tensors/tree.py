"""A nested state as plain values: dicts, lists and tuples become tagged pairs, and tensors numbers at the leaves.

The tree is msgpack or JSON on disk and between workers; nothing in it is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import StateError, UsageError
from holdfast.tensors import staging, wrappers
from holdfast.tensors.dtensor_shards import Leaf
from holdfast.tensors.index import MOST_DEPTH, StateIndex, TensorSpec, leaves

Placing = Callable[[dict[str, Any], torch.Tensor], torch.Tensor]
"""Makes a DTensor of a wrapper that is a shard of it, and of what `wrappers.shard_of` has noted."""


def by_width(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Their numbers, in the order in which `lay_out` wants them: the widest elements first."""
    return sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size())


def lay_out(leaves: Iterable[Leaf]) -> tuple[tuple[TensorSpec, ...], int]:
    """The bytes of tensors one after the other, and how many there are."""
    # Without gaps and in this order: they are written as one stream, checksums go over fixed parts of it,
    # and a reader finds a tensor by its offset alone. A file of safetensors can have no gaps, and each of its
    # tensors has to begin at a multiple of its element's size: so the widest are first.
    specs, offset = [], 0
    for leaf in leaves:
        nbytes = leaf.local.numel() * leaf.local.element_size()
        specs.append(
            TensorSpec(
                path=leaf.path,
                dtype=str(leaf.local.dtype)[6:],
                shape=tuple(leaf.local.shape),
                offset=offset,
                nbytes=nbytes,
                global_shape=leaf.global_shape,
                start=leaf.start,
                placed=leaf.placed,
            )
        )
        offset += nbytes
    return tuple(specs), offset


@dataclass(frozen=True)
class DismantledTensor:
    """A subtree of a tensor that is made of others, without its class: for those that only pass it on."""

    kind: str
    """"w" or "p", as in a tree."""
    about: dict[str, Any]
    value: Any
    """Of "w": what stands for the tensors that it is made of, by their attributes; of "p": the shard."""


def wrapped(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every tensor of a packed tree that is made of other tensors: its dotted path and subtree. Those within it are not
    named."""
    kind, value = tree
    if kind in ("w", "p"):
        yield path, tree
    elif kind in ("d", "l", "t"):
        for key, part in value if kind == "d" else enumerate(value):
            yield from wrapped(part, f"{path}.{key}")


def within_wrappers(index: StateIndex) -> set[str]:
    """The paths of those tensors of which other tensors are made."""
    found = (at for name, tree in index.tree.items() for at in wrapped(tree, name))
    return {path for at, tree in found for path, _, _ in leaves(tree, at)}


def shards_of_wrappers(index: StateIndex) -> Iterator[dict[str, Any]]:
    """How the shards that are wrappers lie, as `wrappers.shard_of` has it."""
    for name, tree in index.tree.items():
        yield from (part[1][0] for _, part in wrapped(tree, name) if part[0] == "p")


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Raises StateError for a dtype that this torch does not have."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"{spec.path}: this version of torch does not have the dtype {spec.dtype!r}")
    return dtype


def pack(value: Any, path: str, tensors: list[tuple[str, torch.Tensor]], depth: int = 0) -> Any:
    """A tree of ["x", plain], ["T", tensor number], ["d", [[key, tree]]], ["l", [tree]], ["t", [tree]].

    A tensor that is made of other tensors is ["w", [about, [[attribute, tree]]]], see `wrappers.Parts`; one of a DTensor's
    shard is within ["p", [how it lies, tree]].

    depth: of containers around it.

    Raises:
        UsageError: a value that is neither plain nor a tensor, or that is too deep within others to be loaded again.
    """
    if depth > MOST_DEPTH:
        raise UsageError(f"cannot protect {path[:60]}...: it is nested more than {MOST_DEPTH} deep")
    if isinstance(value, torch.Tensor):
        inside = wrappers.inside_of(value)
        if wrappers.is_wrapper(inside):
            apart = wrappers.taken_apart(path, inside)
            parts = [
                [name, pack(part, f"{path}.{name}", tensors, depth + 2)] for name, part in apart.inner.items()
            ]
            made = ["w", [apart.about, parts]]
            return ["p", [wrappers.shard_of(path, value), made]] if isinstance(value, DTensor) else made
        tensors.append((path, value))
        # Tensors become numbers, so that the tree stays small and can be read without their bytes. An
        # exporter or a check loads the tree of a state of any size.
        return ["T", len(tensors) - 1]
    if isinstance(value, DismantledTensor):
        if value.kind == "p":
            return ["p", [value.about | {"path": path}, pack(value.value, path, tensors, depth + 1)]]
        parts = [
            [name, pack(part, f"{path}.{name}", tensors, depth + 2)] for name, part in value.value.items()
        ]
        return ["w", [value.about, parts]]
    # A short list on purpose. Anything else would need pickle to come back, which runs code from whoever
    # wrote the file.
    if value is None or isinstance(value, bool | int | float | str):
        return ["x", value]
    if isinstance(value, Mapping):
        return ["d", [[_key(k, path), pack(v, f"{path}.{k}", tensors, depth + 1)] for k, v in value.items()]]
    if isinstance(value, list | tuple):
        kind = "l" if isinstance(value, list) else "t"
        return [kind, [pack(v, f"{path}.{i}", tensors, depth + 1) for i, v in enumerate(value)]]
    raise UsageError(
        f"cannot protect {path}: a {type(value).__name__} is neither a tensor nor a plain value; "
        "keep None, bool, int, float, str, list, tuple, dict and tensors in the state"
    )


def _key(key: Any, path: str) -> str | int:
    if isinstance(key, str | int):
        return key
    # Both formats keep strings and whole numbers apart as keys; an optimizer's state has numbers. Other keys
    # would come back as something else.
    raise UsageError(f"cannot protect {path}: the key {key!r} is neither a string nor a whole number")


def no_mesh(lies: dict[str, Any], shard: torch.Tensor) -> torch.Tensor:
    """For states whose tensors are all here.

    Raises:
        StateError: always.
    """
    raise StateError(
        f"{lies.get('path', 'a tensor')} is a shard of a DTensor, but this script does not determine on which mesh "
        "it is placed"
    )


def unpack(
    tree: Any,
    tensors: list[Any],
    inlined: Callable[[Any], Any] = lambda value: value,
    placing: Placing = no_mesh,
) -> Any:
    """Puts a packed tree together again. inlined: makes a tensor of a leaf that holds its bytes.

    Raises:
        StateError: a tree of another version, or with a tensor of a class that this process does not have.
    """
    kind, value = tree
    # A tree comes from a peer or from a file, so an unknown kind is an error of the data and not of the
    # program.
    match kind:
        case "T":
            return tensors[value]
        case "x":
            return value
        case "b":
            return inlined(value)
        case "d":
            return {k: unpack(v, tensors, inlined, placing) for k, v in value}
        case "l":
            return [unpack(v, tensors, inlined, placing) for v in value]
        case "t":
            return tuple(unpack(v, tensors, inlined, placing) for v in value)
        case "w":
            about, parts = value
            return wrappers.put_together(about, {k: unpack(v, tensors, inlined, placing) for k, v in parts})
        case "p":
            return placing(value[0], unpack(value[1], tensors, inlined, placing))
        case _:
            raise StateError(f"a state tree of another version: {kind!r}")


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable."""
    return staging.seen(staging.flat(tensor))
