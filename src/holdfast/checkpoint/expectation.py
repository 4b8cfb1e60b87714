"""How large the first snapshot of a script will be, before the script saves it.

A script that finds nothing to load has given its state to `load` all the same. Only its optimizers are not what will be
saved, because they have no moments yet. So the size is read off when each of them has made a step. None of the
script's own code is called for that: a `state_dict` may take long, or wait for other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.checkpoint.flatten import SMALL_BYTES
from holdfast.tensors.dtensor_shards import local_of
from holdfast.tensors.wrappers import parts_of

MOST_DEEP = 8
"""So deep a state is looked into: lists and dicts may contain themselves."""

KNOWN = torch.nn.Module, torch.optim.Optimizer
"""Objects whose tensors can be seen without a call of their `state_dict`."""


class Expectation:
    """The size of a state that is to be saved for the first time. Keeps none of it alive."""

    def __init__(self) -> None:
        self._told: Callable[[int], None] | None = None
        self._owners: list[weakref.ref[Any]] = []
        self._plain_bytes = 0
        self._first: int | None = None
        self._hooked = False

    def begin(self, state: Mapping[str, Any], told: Callable[[int], None]) -> None:
        """Calls `told` with the bytes of this rank's part: now, or, if the state has optimizers, when they have moments. A
        state before this one is forgotten."""
        self._told, self._first = told, None
        owners: list[Any] = []
        self._plain_bytes = sum(map(_saved_bytes, _tensors(state, owners, MOST_DEEP)))
        known = [owner for owner in owners if isinstance(owner, KNOWN)]
        # Weak: the script may drop what it has loaded into, and its memory is to be free then.
        self._owners = [weakref.ref(owner) for owner in known]
        if not any(isinstance(owner, torch.optim.Optimizer) for owner in known):
            # An object of another kind may hold the optimizer, which is most of the state.
            if len(known) < len(owners):
                self._told = None
            self._tell()
        elif not self._hooked:
            self._hooked = True
            register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._told is None:
            return
        # When one steps again, all have stepped: a script with several optimizers calls them in turn.
        if self._first is None:
            self._first = id(optimizer)
        elif self._first == id(optimizer):
            self._tell()

    def _tell(self) -> None:
        told, self._told = self._told, None
        owners = [owner for ref in self._owners if (owner := ref()) is not None]
        self._owners = []
        nbytes = self._plain_bytes + sum(map(_saved_bytes, (t for o in owners for t in _owned(o))))
        if told is not None and nbytes:
            told(nbytes)


def _tensors(value: Any, owners: list[Any], deep: int) -> Iterable[torch.Tensor]:
    """The tensors of plain containers. Objects with a state of their own on the way are put into `owners`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, KNOWN) or hasattr(value, "state_dict"):
        owners.append(value)
    elif deep and isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part, owners, deep - 1)
    elif deep and isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, owners, deep - 1)


def _owned(owner: torch.nn.Module | torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """What a state dict of it contains: a tensor that has two names twice."""
    if isinstance(owner, torch.nn.Module):
        # A buffer that is not saved counts as well: a slot may be larger than what it takes.
        for _, tensor in (
            *owner.named_parameters(remove_duplicate=False),
            *owner.named_buffers(remove_duplicate=False),
        ):
            yield tensor
    else:
        yield from _tensors(owner.state, [], MOST_DEEP)


def _saved_bytes(tensor: torch.Tensor) -> int:
    """Of the blob; smaller tensors go with the plain values, see `flatten`."""
    total = 0
    for _, part in parts_of("", tensor):
        local = local_of(part)
        nbytes = local.numel() * local.element_size()
        total += nbytes if nbytes > SMALL_BYTES or isinstance(part, DTensor) else 0
    return total
