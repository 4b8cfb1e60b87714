"""A nested state as plain values: dicts, lists and tuples become tagged pairs, and tensors numbers at the leaves.

The tree is msgpack or JSON on disk and between workers; nothing in it is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from holdfast.errors import StateError, UsageError
from holdfast.tensors import staging
from holdfast.tensors.index import TensorSpec


def leaves(
    tree: Any, path: str, undivided: Callable[[Any], bool] = lambda tree: False
) -> Iterator[tuple[str, str, Any]]:
    """Every leaf of a packed tree: its dotted path, kind and value. undivided: subtrees that count as one leaf."""
    kind, value = tree
    if kind in ("d", "l", "t") and not undivided(tree):
        for key, part in value if kind == "d" else enumerate(value):
            yield from leaves(part, f"{path}.{key}", undivided)
    else:
        yield path, kind, value


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Raises StateError for a dtype that this torch does not have."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"{spec.path}: this torch knows no dtype {spec.dtype!r}")
    return dtype


def pack(value: Any, path: str, tensors: list[tuple[str, torch.Tensor]]) -> Any:
    """A tree of ["x", plain], ["T", tensor number], ["d", [[key, tree]]], ["l", [tree]], ["t", [tree]].

    Raises:
        UsageError: a value that is neither plain nor a tensor.
    """
    if isinstance(value, torch.Tensor):
        tensors.append((path, value))
        # Tensors become numbers, so that the tree stays small and can be read without their bytes. An
        # exporter or a check loads the tree of a state of any size.
        return ["T", len(tensors) - 1]
    # A short list on purpose. Anything else would need pickle to come back, which runs code from whoever
    # wrote the file.
    if value is None or isinstance(value, bool | int | float | str):
        return ["x", value]
    if isinstance(value, Mapping):
        return ["d", [[_key(k, path), pack(v, f"{path}.{k}", tensors)] for k, v in value.items()]]
    if isinstance(value, list | tuple):
        kind = "l" if isinstance(value, list) else "t"
        return [kind, [pack(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]]
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


def unpack(tree: Any, tensors: list[Any], inlined: Callable[[Any], Any] = lambda value: value) -> Any:
    """Puts a packed tree together again. inlined: makes a tensor of a leaf that holds its bytes.

    Raises:
        StateError: a tree of another version.
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
            return {k: unpack(v, tensors, inlined) for k, v in value}
        case "l":
            return [unpack(v, tensors, inlined) for v in value]
        case "t":
            return tuple(unpack(v, tensors, inlined) for v in value)
        case _:
            raise StateError(f"a state tree of another version: {kind!r}")


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable."""
    return staging.seen(staging.flat(tensor))
