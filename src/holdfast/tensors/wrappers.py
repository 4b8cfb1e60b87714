"""Tensors that are made of other tensors: quantized moments, float8 parameters and their like.

Such a tensor has a shape and a dtype, but no memory of its own. Its class says of what it is made by `__tensor_flatten__`,
and makes one anew by `__tensor_unflatten__`, as torch.compile has it. Here it is taken apart into plain tensors, and what else
it consists of into plain values; so its very bits are saved, sent and compared, and nothing is quantized anew.

A class is named in the saved state and is never imported: the process that reads it must have it already.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.errors import StateError, UsageError
from holdfast.tensors.dtensor_shards import placed, start_of

Context = Any
"""What of a wrapper is not a tensor, as tagged pairs of plain values, see `_encoded`."""


class Parts(NamedTuple):
    """A wrapper, taken apart."""

    inner: dict[str, torch.Tensor]
    """The tensors that it is made of, by the attributes that hold them. Each may be a wrapper or a DTensor again."""
    about: dict[str, Any]
    """Its class, shape, stride and context: plain values. The same on every worker that has the same."""


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it is made of other tensors, and says of which. A DTensor is treated as what it is a shard of."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter or isinstance(tensor, DTensor):
        return False
    # A jagged tensor has it, too; what it says of its shape is no number.
    return bool(is_traceable_wrapper_subclass(tensor)) and not tensor.is_nested


def inside_of(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor the piece that is here, as the very object: a wrapper's `detach` may be no wrapper."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def parts_of(path: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory of which a tensor is made, nested, and their paths; any other tensor is its own. Of a DTensor
    whose shard is a wrapper: those of the shard."""
    inside = inside_of(tensor)
    if not is_wrapper(inside):
        yield path, tensor
        return
    for name in inside.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from parts_of(f"{path}.{name}", getattr(inside, name))


def with_parts(path: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What to look at to see whether a tensor was changed: the tensors with memory, and before them every wrapper around
    them. Torch counts a write that a wrapper's class makes at the wrapper, and not at what it is made of."""
    inside = inside_of(tensor)
    yield path, inside
    if is_wrapper(inside):
        for name in inside.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from with_parts(f"{path}.{name}", getattr(inside, name))


def taken_apart(path: str, tensor: torch.Tensor) -> Parts:
    """A wrapper as what it is made of.

    Raises:
        UsageError: its context has a value that cannot be saved.
    """
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    kind = type(tensor)
    about = {
        "class": _name(kind),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "context": _encoded(context, f"{path}: a {kind.__qualname__}"),
    }
    return Parts({name: getattr(tensor, name) for name in names}, about)


def put_together(about: Mapping[str, Any], inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The opposite of `taken_apart`; it shares the memory of `inner`.

    Raises:
        StateError: this process has no such class, or the class refuses it.
    """
    try:
        module, _, name = about["class"].partition(":")
        found = _classes(about["class"])
        if found:
            devices = [t.device for t in inner.values()]
            context = _decoded(about["context"], devices[0] if devices else torch.device("cpu"))
            # A class that is defined in a function is there several times where that was called several times.
            made = found[-1].__tensor_unflatten__(
                dict(inner), context, torch.Size(about["shape"]), tuple(about["stride"])
            )
    except (
        TypeError,
        ValueError,
        KeyError,
        IndexError,
        AttributeError,
        RuntimeError,
        AssertionError,
    ) as error:
        raise StateError(f"a tensor subclass cannot be restored from the saved data: {error!r}") from error
    if not found:
        raise StateError(
            f"the state contains a {name} of {module}, which this script has not imported: import {module} before "
            "the state is loaded"
        )
    if not isinstance(made, torch.Tensor):
        raise StateError(f"{about['class']} made a {type(made).__name__} of what was saved")
    return made


def shard_of(path: str, tensor: DTensor) -> dict[str, Any]:
    """Of a DTensor whose shard is a wrapper: how it lies, in plain values. Nobody can tell how the tensors in the wrapper
    would be cut elsewhere, so it can only be restored as it lies.

    Raises:
        UsageError: its placement keeps no contiguous box of it (or sums that are still to be reduced).
    """
    local = tensor._local_tensor
    start = start_of(tensor, local)
    if start is None:
        raise UsageError(
            f"{path}: the local part of a DTensor placed as {tensor.placements} is not a single box of the whole tensor"
        )
    return {
        "path": path,
        "placed": placed(tensor),
        "shape": list(tensor.shape),
        "start": list(start),
        "local": list(local.shape),
    }


def check(path: str, tensor: torch.Tensor) -> None:
    """Sees that what `taken_apart` makes of a wrapper can be put together again. Reads no data.

    Raises:
        UsageError: it cannot.
    """
    inside = inside_of(tensor)
    if not is_wrapper(inside):
        return
    apart = taken_apart(path, inside)
    for name, part in apart.inner.items():
        check(f"{path}.{name}", part)
    try:
        again = taken_apart(path, put_together(apart.about, apart.inner))
    except (StateError, AttributeError) as error:
        raise UsageError(f"{path}: {error}; keep plain tensors in the state") from error
    if again.about != apart.about or list(again.inner) != list(apart.inner):
        raise UsageError(
            f"{path}: a {type(inside).__qualname__} changes when it passes through __tensor_flatten__ and "
            "__tensor_unflatten__, so it could not be restored; keep plain tensors in the state"
        )


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are of one kind: wrappers of the same class with the same parts and context, or plain tensors of
    one dtype and shape."""
    one, other = inside_of(one), inside_of(other)
    if is_wrapper(one) != is_wrapper(other):
        return False
    if not is_wrapper(one):
        return one.dtype == other.dtype and one.shape == other.shape
    mine, theirs = taken_apart("", one), taken_apart("", other)
    return (
        same_settings(one, other)
        and list(mine.inner) == list(theirs.inner)
        and all(alike(part, theirs.inner[name]) for name, part in mine.inner.items())
    )


def same_settings(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two wrappers differ in nothing but the tensors that they are made of, and in how they lie in memory."""
    mine, theirs = taken_apart("", one).about, taken_apart("", other).about
    return {**mine, "stride": None} == {**theirs, "stride": None}


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on another device, bit by bit: a wrapper's own `to` may quantize it anew."""
    if not is_wrapper(tensor):
        return tensor.to(device)
    apart = taken_apart("", tensor)
    inner = {name: moved(part, device) for name, part in apart.inner.items()}
    if all(part is apart.inner[name] for name, part in inner.items()):
        return tensor
    return put_together(apart.about, inner)


# ---------------------------------------------------------------- classes


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _classes(name: str) -> list[type[Any]]:
    """Tensor classes of this name that are there, in the order in which they were defined."""
    found = []
    todo: list[type[Any]] = [torch.Tensor]
    while todo:
        below = type.__subclasses__(todo.pop())
        found += [c for c in below if _name(c) == name and hasattr(c, "__tensor_unflatten__")]
        todo += below
    return found


def _value_class(name: str) -> Any:
    """The class of a value in a context, among those that this process has imported; None: it has none of that name."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # Not by getattr: a module may import something when it is asked for a name.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


# ---------------------------------------------------------------- contexts


_NAMED: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "format": torch.memory_format}
"""Torch's constants, which are saved by their names in torch."""


def _encoded(value: Any, where: str) -> Context:
    """[kind, plain value].

    Raises:
        UsageError: another value than these.
    """
    if type(value) is float and not math.isfinite(value):
        return ["float", str(value)]  # JSON knows none of these
    if value is None or type(value) in (bool, float, str) or _is_word(value):
        return ["x", value]
    for kind, constants in _NAMED.items():
        if isinstance(value, constants):
            return [kind, str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        # Without its number, which differs between the workers of a node.
        return ["device", value.type]
    if isinstance(value, enum.Enum):
        return ["enum", [_found(value, where), value.name]]
    if isinstance(value, torch.Size):
        return ["size", [int(n) for n in value]]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["named", [_found(value, where), [_encoded(v, where) for v in value]]]
    if type(value) in (list, tuple):
        return ["l" if type(value) is list else "t", [_encoded(v, where) for v in value]]
    if type(value) is dict:
        return ["d", [[_encoded(k, where), _encoded(v, where)] for k, v in value.items()]]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [[f.name, _encoded(getattr(value, f.name), where)] for f in dataclasses.fields(value)]
        return ["fields", [_found(value, where), fields]]
    raise UsageError(
        f"{where} has a {type(value).__name__} in what __tensor_flatten__ returns, which cannot be saved; only plain "
        "values, torch's dtypes, sizes and devices, enumerations, named tuples and dataclasses can be saved"
    )


def _is_word(value: Any) -> bool:
    """Whether it is a whole number of 64 bits, as msgpack holds them."""
    return type(value) is int and -(1 << 63) <= value < 1 << 64


def _found(value: Any, where: str) -> str:
    name = _name(type(value))
    if _value_class(name) is not type(value):
        raise UsageError(
            f"{where} has a {type(value).__qualname__} in what __tensor_flatten__ returns, whose class cannot be "
            "found by its name: define it at the top level of a module"
        )
    return name


def _decoded(tagged: Context, device: torch.device) -> Any:
    """The opposite of `_encoded`. device: of the tensors that the value comes with. Runs no code of the classes that are
    named.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is none, or of classes that are not here.
    """
    kind, value = tagged
    if kind in _NAMED:
        found = getattr(torch, value)
        if not isinstance(found, _NAMED[kind]):
            raise ValueError(f"torch.{value} is not a {kind}")
        return found
    each: Callable[[Any], list[Any]] = lambda values: [_decoded(v, device) for v in values]  # noqa: E731
    match kind:
        case "x":
            return value
        case "float":
            return float(value)
        case "device":
            return device if device.type == value else torch.device(value)
        case "enum":
            return _value_of(value[0], lambda c: issubclass(c, enum.Enum))[value[1]]
        case "size":
            return torch.Size(value)
        case "named":
            named = _value_of(value[0], lambda c: issubclass(c, tuple) and hasattr(c, "_fields"))
            return tuple.__new__(named, each(value[1]))
        case "l":
            return each(value)
        case "t":
            return tuple(each(value))
        case "d":
            return {_decoded(k, device): _decoded(v, device) for k, v in value}
        case "fields":
            kind_of = _value_of(value[0], dataclasses.is_dataclass)
            made = object.__new__(kind_of)
            if {name for name, _ in value[1]} != {f.name for f in dataclasses.fields(kind_of)}:
                raise ValueError(f"{value[0]} has other fields in this script")
            for name, part in value[1]:
                object.__setattr__(made, name, _decoded(part, device))
            return made
        case _:
            raise ValueError(f"a context of another version: {kind!r}")


def _value_of(name: str, fits: Callable[[type], bool]) -> Any:
    found = _value_class(name)
    if found is None or not fits(found):
        raise ValueError(f"this script has not imported {name.replace(':', '.')}")
    return found
