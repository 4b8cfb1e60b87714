"""State that was not named: parameters and buffers that appear in a module or in an optimizer after `run.protect`, and what a
commit uses although nobody protected it.

A newcomer builds the same objects anew and fetches the state of those that were named. So it would not have what was added
since, and would begin a schedule or an average anew: replicas would go on with other learning rates, each of them healthy.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from holdfast.errors import UsageError
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


STEPPED = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.optim.swa_utils.AveragedModel,
    torch.amp.GradScaler,
)
"""What is used by a commit to change it."""


class UsedState:
    """Compares what `step.apply` is given with what is protected, in the first step."""

    def __init__(self, objects: Protected) -> None:
        self._objects = list(objects.values())
        self._known: set[int] = set()
        self._modules: list[tuple[str, torch.nn.Module, list[int]]] = []
        self._plain: dict[str, Any] | None = None
        self._first = True

    def check(
        self, optimizer: Any, scheduler: Any, scaler: Any, parts: Iterable[Callable[..., object]]
    ) -> None:
        """Before the first step is prepared, and in later ones where they have something else.

        Raises:
            UsageError: one keeps state that is not protected.
        """
        given = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        for role, thing in given.items():
            if thing is None or id(thing) in self._known:
                continue
            if not self._protects(role, thing) and (hasattr(thing, "state_dict") or role != "scheduler"):
                raise UsageError(
                    f"step.apply({role}=...): this {type(thing).__name__} is not protected, so a worker that joins "
                    f"later would start with a fresh one; call run.protect({role}={role}) before run.steps, together "
                    "with the other objects"
                )
            self._known.add(id(thing))
        if not self._first:
            return
        self._modules.clear()
        for name, thing in (found for part in parts for found in _reached(part)):
            if isinstance(thing, STEPPED) and not self._protects("", thing):
                raise UsageError(
                    f"step.apply(also=...) uses {name}, {_a(thing)} that is not protected: a worker that joins later "
                    f"would start with a fresh one; call run.protect({name.rpartition('.')[2]}=...) before "
                    "run.steps, together with the other objects"
                )
            if isinstance(thing, torch.nn.Module) and not any(thing in _modules_of(o) for o in self._objects):
                self._modules.append((name, thing, _writes(thing)))

    def before(self, scheduler: Any) -> None:
        """The first commit is about to be made."""
        if self._first and scheduler is not None and not hasattr(scheduler, "state_dict"):
            self._plain = dict(getattr(scheduler, "__dict__", {}))

    def after(self, scheduler: Any) -> None:
        """It has been made.

        Raises:
            UsageError: it has changed what is not protected.
        """
        if not self._first:
            return
        self._first = False
        now = getattr(scheduler, "__dict__", {})
        for name, was in (self._plain or {}).items():
            if isinstance(was, int | float) and now.get(name) != was:
                raise UsageError(
                    f"step.apply(scheduler=...): this {type(scheduler).__name__} keeps a count in its attribute "
                    f"{name} but does not have a state_dict, so a worker that joins later would start from zero; add "
                    "state_dict and load_state_dict to it and protect it, or compute the learning rate from "
                    "run.samples alone"
                )
        for name, module, was_written in self._modules:
            if _writes(module) != was_written:
                raise UsageError(
                    f"the commit of the first step changed {name}, {_a(module)} that is not protected: a worker that "
                    "joins later would have different values; protect it before run.steps"
                )
        self._modules.clear()

    def _protects(self, role: str, thing: Any) -> bool:
        if any(thing is other for other in self._objects):
            return True
        # Accelerate's wrappers, and containers of several.
        inner = getattr(thing, role, None) if role else None
        several = getattr(thing, f"{role}s", None) if role else None
        if isinstance(several, list) and several:
            return all(self._protects("", part) for part in several)
        return inner is not None and self._protects("", inner)


def _a(thing: Any) -> str:
    name = type(thing).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _modules_of(thing: Any) -> Iterable[torch.nn.Module]:
    return thing.modules() if isinstance(thing, torch.nn.Module) else ()


def _writes(module: torch.nn.Module) -> list[int]:
    return [-1 if t.is_inference() else t._version for t in (*module.parameters(), *module.buffers())]


def _reached(call: Any) -> Iterator[tuple[str, Any]]:
    """What a callable uses by name: a method's object, the arguments of a partial, and the variables of a function."""
    if isinstance(call, functools.partial):
        yield from _reached(call.func)
        yield from ((f"argument {i}", value) for i, value in enumerate(call.args))
        yield from call.keywords.items()
        return
    if (owner := getattr(call, "__self__", None)) is not None:
        yield type(owner).__name__, owner
    function = getattr(call, "__func__", call)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    # Not `co_names`, which has the names of attributes, too.
    read = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    yield from ((name, function.__globals__[name]) for name in sorted(read & function.__globals__.keys()))
    yield from zip(
        code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) :],
        function.__defaults__ or (),
        strict=False,
    )
