"""Parameters and buffers that appear after the state was named, in a module or in an optimizer.

A newcomer builds the same objects anew and fetches their state, so it would not have what was added since. And a gradient of
it would be added up by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.train.state_image import Protected, persistent_buffers


class AddedState:
    """Compares what protected modules and optimizers hold with what they held at first. Reads no tensor."""

    def __init__(self, objects: Protected) -> None:
        self._modules = {name: thing for name, thing in objects.items() if isinstance(thing, torch.nn.Module)}
        self._optimizers = [
            (name, thing, _sizes(thing))
            for name, thing in objects.items()
            if isinstance(thing, torch.optim.Optimizer)
        ]
        self._names = set(_names(self._modules))
        self._note()

    def found(self) -> str | None:
        """The path of one that was added."""
        for name, optimizer, sizes in self._optimizers:
            for number, now in enumerate(_sizes(optimizer)):
                if number >= len(sizes):
                    return f"{name}.param_groups.{number}"
                if now > sizes[number]:
                    return f"{name}.param_groups.{number}.params.{sizes[number]}"
        if all(len(held) == count for held, count in self._counts) and all(
            held.get(name) is was for held, name, was in self._children
        ):
            return None
        added = next((path for path in _names(self._modules) if path not in self._names), None)
        if added is None:
            self._note()  # what was added holds no state, such as a metric that is made when it is needed
        return added

    def _note(self) -> None:
        modules = [module for thing in self._modules.values() for module in thing.modules()]
        # Counts alone would not show a child that took another's place, nor a parameter that was declared
        # as None and is one now.
        self._counts = [
            (held, len(held)) for m in modules for held in (m._parameters, m._buffers, m._modules)
        ]
        self._children: list[tuple[Mapping[str, Any], str, Any]] = [
            (m._modules, name, child) for m in modules for name, child in m._modules.items()
        ]
        self._children += [
            (held, name, None)
            for m in modules
            for held in (m._parameters, m._buffers)
            for name, tensor in held.items()
            if tensor is None
        ]


def _names(modules: dict[str, torch.nn.Module]) -> Iterator[str]:
    for name, module in modules.items():
        yield from (f"{name}.{n}" for n, _ in module.named_parameters())
    yield from (at.path for at in persistent_buffers(modules))


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]
