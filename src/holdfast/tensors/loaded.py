"""An object takes its state, and then has the very bits that were saved.

What is saved are the bytes of a dense tensor. An expanded tensor has fewer bytes than elements: it is written where its elements lie.
Anything whose bytes are not those of its elements is refused by name, before it is relied upon.

`load_state_dict` alone does not promise that: a module copies into its parameters, which quantizes them anew and fails where
they are expanded, and an optimizer casts what it keeps to the dtype of its parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from holdfast.errors import StateError, UsageError
from holdfast.tensors.wrappers import alike, check, inside_of, is_wrapper, moved, parts_of, same_settings

MOST_COUNTED = 1 << 22
"""Elements of a tensor of unusual strides whose places are counted one by one. A larger one is taken to overlap itself."""


def check_writable(path: str, tensor: torch.Tensor) -> None:
    """Sees that a tensor is one whose bytes can be read and written.

    Args:
        tensor: of a DTensor, the piece that is here.

    Raises:
        UsageError: it has no bytes of its own, none that can be read as its elements, or elements that share memory in
            another way than by `expand`.
    """
    kind = type(tensor).__name__
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        what = "nested tensor" if tensor.is_nested else f"{tensor.layout} {tensor.dtype} tensor"
        raise UsageError(f"{path}: a {what} cannot be saved; save a dense tensor or a DTensor")
    if hasattr(tensor, "local_shards"):
        raise UsageError(f"{path}: a {kind} cannot be saved; save a dense tensor or a DTensor")
    if tensor.device.type == "meta":
        raise UsageError(
            f"{path}: a tensor on meta cannot be saved: it has no data yet (it is on the meta device); call to_empty() and "
            "initialize it"
        )
    if is_wrapper(tensor) or (tensor.numel() and not _address(tensor)):
        raise UsageError(
            f"{path}: a {kind} cannot be saved: it does not have its own memory, and does not define "
            "__tensor_flatten__ and __tensor_unflatten__, which would return its inner tensors; keep a plain tensor "
            "in the state"
        )
    if overlaps(tensor):
        raise UsageError(
            f"{path}: elements of this tensor share memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}), so it "
            "could not be restored; keep tensor.clone() in the state"
        )


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether it is surely no wrapper, whatever its class says of itself."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) or not tensor.numel() or has_bytes(tensor)


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether it has elements whose bytes can be read where it lies."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return plain and tensor.numel() > 0 and bool(_address(tensor))


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of a class that has none
        return 0


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements along a dimension are one and the same place in memory, as `expand` makes them."""
    return not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory in another way than by `expand`, such as windows that `as_strided` or `unfold` made."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return False
    lines = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if stride and size > 1
    )
    reach, apart = 0, True
    for stride, size in lines:
        apart = apart and stride > reach
        reach += stride * (size - 1)
    if apart:
        return False
    places = torch.zeros(1, dtype=torch.int64)
    for stride, size in lines:
        if len(places) * size > MOST_COUNTED:
            return True
        places = (places[:, None] + torch.arange(size)[None] * stride).reshape(-1)
    return len(torch.unique(places)) < len(places)


def check_source(path: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Sees that `overwrite` can be done. Nothing is written.

    Raises:
        StateError: another shape, or the target is expanded, and the values differ where it has one place for them.
    """
    if target.shape != source.shape:
        raise StateError(f"{path}: {tuple(source.shape)} cannot be written into {tuple(target.shape)}")
    if is_expanded(target):
        once = _once(target, source)
        if not torch.equal(_bits(once.expand(source.shape)), _bits(source)):
            raise StateError(
                f"{path} is an expanded tensor here, and was saved with different values along the expanded dimensions: "
                "register tensor.clone() instead"
            )


def write_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Writes the values of a tensor into one that `check` has accepted; of an expanded one, where its elements lie."""
    with torch.no_grad():
        _once(target, target).copy_(_once(target, source))


def _once(target: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Of `tensor` what there is of `target` in memory: of an expanded dimension its first element."""
    tensor = tensor.detach()
    for dim, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.contiguous()  # of one element, with any stride
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


Path = str


def _check_kind(path: str, tensor: torch.Tensor, given: Any) -> None:
    kind, saved = type(inside_of(tensor)), type(inside_of(given))
    if saved is not kind and not (issubclass(kind, torch.nn.Parameter) and saved is torch.Tensor):
        raise UsageError(
            f"{path}: state_dict gives a {saved.__name__} of this {kind.__name__}, so what is saved would not be what is "
            f"trained; let {kind.__name__}.detach give a {kind.__name__} of the same tensors, or keep a plain tensor"
        )


def check_restorable(name: str, thing: Any, state: Any) -> None:
    """Sees that `load` can bring back what a state has. Reads no data.

    Raises:
        UsageError: a tensor of it can be saved, and not be restored; or `state_dict` gives something else than is there.
    """
    if isinstance(thing, torch.nn.Module):
        for key, tensor in (*thing.named_parameters(), *thing.named_buffers()):
            if key in state and not is_ordinary(inside_of(tensor)):
                _check_kind(f"{name}.{key}", tensor, state[key])
    # These are written to by us. What another object makes of a tensor that it is given is its own.
    known = isinstance(thing, torch.nn.Module | torch.optim.Optimizer) or not hasattr(
        thing, "load_state_dict"
    )
    for path, tensor in tensors_of(name, state):
        check(path, tensor)
        for at, part in parts_of(path, tensor):
            piece = inside_of(part)
            check_writable(at, piece)
            if not known and is_expanded(piece):
                raise UsageError(
                    f"{at} is an expanded tensor (shape {tuple(piece.shape)}, strides {piece.stride()}), into which "
                    f"{type(thing).__name__}.load_state_dict could not copy: keep tensor.clone() in the state"
                )


def check_fits(path: Path, value: Any, given: Any) -> None:
    """Sees that a value of a state, or a module, can be given what was saved of it. Nothing is written.

    Raises:
        UsageError: a tensor here is of a kind that cannot be written to.
        StateError: a tensor here is of another kind than the saved one, or cannot hold its values.
    """
    if isinstance(value, torch.nn.Module):
        value = _tensors_in(value)
    if isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor):
        for at, part in parts_of(path, value):
            check_writable(at, inside_of(part))
        _check_source(path, value, given)
    elif isinstance(value, Mapping) and isinstance(given, Mapping):
        for key in given:
            check_fits(f"{path}.{key}", value.get(key), given[key])
    elif isinstance(value, list | tuple) and isinstance(given, list | tuple):
        for number, (mine, part) in enumerate(zip(value, given, strict=False)):
            check_fits(f"{path}.{number}", mine, part)


def overwrite(path: Path, live: torch.Tensor, given: torch.Tensor) -> None:
    """A tensor of a state stays the same object, with the bits of another one of its kind.

    Raises:
        StateError: they are of two kinds; nothing was written.
    """
    _check_source(path, live, given)
    _overwrite_as(path, live, given)


def load(name: str, thing: Any, state: Any, left_out: Collection[str] = ()) -> None:
    """Gives an object its state. left_out: what of a module's is not in it.

    Raises:
        StateError: it is of another kind; or the object does not have it afterwards.
        Whatever its load_state_dict raises.
    """
    if isinstance(thing, torch.nn.Module):
        _load_module(name, thing, state, left_out)
        return
    if isinstance(thing, torch.optim.Optimizer):
        # Before torch moves it: that may quantize it anew, or give a plain tensor.
        state = _beside_parameters(thing, state)
        thing.load_state_dict(state)
        _put_back_casts(thing, state)
        return
    thing.load_state_dict(state)
    if any(is_wrapper(inside_of(t)) for _, t in tensors_of(name, state)):
        _settle(name, thing.state_dict(), state)


def _load_module(
    name: str, module: torch.nn.Module, state: Mapping[str, Any], left_out: Collection[str]
) -> None:
    live = _tensors_in(module)
    own = [k for k, t in live.items() if k in state and _is_ours(t, state[k])]
    # All are looked at before the first is written to.
    for key in own:
        _check_source(f"{name}.{key}", live[key], state[key])
    if own or left_out:
        rest = {k: v for k, v in state.items() if k not in own}
        found = module.load_state_dict(rest, strict=False)
        wrong = sorted({*found.missing_keys, *found.unexpected_keys} - {*left_out, *own})
        if wrong:
            raise ValueError(f"{wrong[0]} is only in the state or only in the module")
    else:
        module.load_state_dict(state)
    for key in own:
        _overwrite_as(f"{name}.{key}", live[key], state[key])


def _tensors_in(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By the names of its state. The very objects: what `state_dict` gives of a wrapper is another one of the same parts."""
    given = {k: t for k, t in module.state_dict().items() if isinstance(t, torch.Tensor)}
    held = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return given | {k: t for k, t in held if k in given}


def _is_ours(live: torch.Tensor, given: Any) -> bool:
    """Whether `Module.load_state_dict` would not write the very bits."""
    if not isinstance(given, torch.Tensor):
        return False
    pair = inside_of(live), inside_of(given)
    return any(map(is_wrapper, pair)) or is_expanded(pair[0])


def _check_source(path: Path, live: torch.Tensor, given: torch.Tensor) -> None:
    live, given = inside_of(live), inside_of(given)
    if not is_wrapper(live) and not is_wrapper(given):
        check_source(path, live, given)
        return
    if type(live) is not type(given):
        raise StateError(
            f"{path} is a {type(live).__name__} in this script, but a {type(given).__name__} was saved"
        )
    if not same_settings(live, given):
        raise StateError(
            f"{path}: the settings of this {type(live).__name__} (returned by its __tensor_flatten__) differ from "
            "those that were saved"
        )
    for at, part in _attributes(given):
        if isinstance(mine := getattr(live, at, None), torch.Tensor):
            _check_source(f"{path}.{at}", mine, part)


def _overwrite_as(path: Path, live: torch.Tensor, given: torch.Tensor) -> None:
    _overwrite(live, given)
    if not alike(live, given):
        raise StateError(
            f"{path} could not be converted to the saved type, a {type(inside_of(given)).__name__}"
        )


def _overwrite(live: torch.Tensor, given: torch.Tensor) -> None:
    """The live tensor stays the same object, with the bits of the given one."""
    live, given = inside_of(live), inside_of(given)
    if not is_wrapper(live):
        if live.data_ptr() != given.data_ptr():
            write_into(live, given)
        return
    parts = dict(_attributes(given))
    # Parts may come and go, as a scale that is computed ahead. The names that `__tensor_flatten__` gives are attributes.
    for at in [at for at, _ in _attributes(live) if at not in parts]:
        setattr(live, at, None)
    for at, part in parts.items():
        mine = getattr(live, at, None)
        if isinstance(mine, torch.Tensor):
            _overwrite(mine, part)
        else:
            setattr(live, at, part)


def _attributes(wrapper: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for at in wrapper.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield at, getattr(wrapper, at)


def _settle(path: Path, live: Any, given: Any) -> None:
    """Of what an object has taken: the bits of tensors that are made of others."""
    if isinstance(given, torch.Tensor):
        if not is_wrapper(inside_of(given)):
            return
        if not isinstance(live, torch.Tensor):
            raise StateError(f"{path} is a {type(live).__name__} after load_state_dict, not a tensor")
        overwrite(path, live, given)
    elif isinstance(given, Mapping) and isinstance(live, Mapping):
        for key in given:
            _settle(f"{path}.{key}", live.get(key), given[key])
    elif isinstance(given, list | tuple) and isinstance(live, list | tuple) and len(live) == len(given):
        for number, (mine, part) in enumerate(zip(live, given, strict=True)):
            _settle(f"{path}.{number}", mine, part)


def _moments(
    optimizer: torch.optim.Optimizer, state: Any
) -> Iterator[tuple[torch.Tensor, Mapping[Any, Any]]]:
    """Every parameter of an optimizer, and what a state has of it. Of an optimizer that has its states otherwise: nothing."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = state.get("state") if isinstance(state, Mapping) else None
    for number, given in saved.items() if isinstance(saved, Mapping) else ():
        if isinstance(number, int) and number < len(parameters) and isinstance(given, Mapping):
            yield parameters[number], given


def _beside_parameters(optimizer: torch.optim.Optimizer, state: Any) -> Any:
    """The state with all that is made of other tensors on the device of its parameter."""

    def beside(value: Any, device: torch.device) -> Any:
        if isinstance(value, torch.Tensor):
            return moved(value, device) if is_wrapper(value) else value
        if isinstance(value, dict):
            return {key: beside(part, device) for key, part in value.items()}
        return type(value)(beside(v, device) for v in value) if type(value) in (list, tuple) else value

    states = {id(given): beside(given, p.device) for p, given in _moments(optimizer, state)}
    if not states:
        return state
    return {**state, "state": {k: states.get(id(v), v) for k, v in state["state"].items()}}


def _put_back_casts(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """What torch cast to the dtype of the parameter is what was saved again: a moment in another precision than its
    parameter, or one that is quantized."""
    for parameter, given in _moments(optimizer, state):
        held = optimizer.state.get(parameter)
        if isinstance(held, dict):
            _uncast(held, given)


def _uncast(mine: Any, given: Any) -> Any:
    if isinstance(mine, torch.Tensor) and isinstance(given, torch.Tensor):
        inner = inside_of(mine), inside_of(given)
        same = type(inner[0]) is type(inner[1]) and mine.dtype == given.dtype and not is_wrapper(inner[1])
        return mine if same or mine is given else moved(given, mine.device)
    if isinstance(mine, dict) and isinstance(given, Mapping):
        for key in given:
            if key in mine:
                mine[key] = _uncast(mine[key], given[key])
    elif type(mine) in (list, tuple) and isinstance(given, list | tuple) and len(mine) == len(given):
        return type(mine)(_uncast(part, other) for part, other in zip(mine, given, strict=True))
    return mine


def tensors_of(path: Path, state: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors of nested dicts, lists and tuples, and their paths."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, part in state.items():
            yield from tensors_of(f"{path}.{key}", part)
    elif isinstance(state, list | tuple):
        for number, part in enumerate(state):
            yield from tensors_of(f"{path}.{number}", part)
