"""Hands the options that a command declares (`protocol/options.py`) to Typer."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Annotated, Any, get_args, get_origin

import typer

from holdfast.protocol.options import Argument, Declared, build, check, declared, is_options


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as Typer reads it. A parameter whose type is a dataclass becomes one option for each of its fields.

    The other parameters stay as they are. Before the function is called, the values are compared with their limits.

    Raises:
        UsageError: when the command is called with a value outside its limits.
    """
    own = inspect.signature(function, eval_str=True).parameters
    # Keyword only, because Python wants parameters without a default first elsewhere; an argument of the command line may
    # come after optional ones.
    read = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own.values() for p in _flat(parameter)
    ]

    def call(**given: Any) -> None:
        plain = {name: _tuple(value) for name, value in given.items()}
        arguments: dict[str, Any] = {}
        for name, parameter in own.items():
            if is_options(parameter.annotation):
                arguments[name] = build(parameter.annotation, _with_defaults(parameter.annotation, plain))
                check(arguments[name])
            else:
                arguments[name] = given[name]
        function(**arguments)

    # Not `functools.wraps`: it sets `__wrapped__`, and Typer would read the annotations of the function itself.
    update_wrapper(call, function, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())
    del call.__wrapped__  # type: ignore[attr-defined]
    call.__signature__ = inspect.Signature(read)  # type: ignore[attr-defined]
    return call


def given_flags(options: Any, defaults: Any) -> tuple[str, ...]:
    """The usual flag of every option of a dataclass that differs from these defaults, for messages."""
    kind: Any = type(options)
    return tuple(
        d.flag
        for d in declared(kind)
        if not isinstance(d.option, Argument) and getattr(options, d.name) != getattr(defaults, d.name)
    )


def _flat(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    if not is_options(parameter.annotation):
        return [parameter]
    return [_parameter(option) for option in declared(parameter.annotation)]


def _parameter(declared: Declared) -> inspect.Parameter:
    """One option or argument, as Typer wants it written."""
    option, kind, default = declared.option, declared.type, declared.default
    if get_origin(kind) is tuple:
        # Typer takes a tuple for an option with several values, and shows `[]` as a default. The dataclasses are frozen
        # and their fields are tuples, so `call` turns lists back.
        kind = list[get_args(kind)[0]] | None if default == () else list[get_args(kind)[0]]  # type: ignore[misc]
        default = None if default == () else default
    shared: dict[str, Any] = {
        "help": option.help,
        # A flag has no value: Typer would show `<bool>`.
        "metavar": option.metavar or "|".join(option.choices) or ("" if kind is bool else None),
        "show_default": option.default or True,
        "rich_help_panel": option.group or None,
    }
    made = (
        typer.Argument(**shared) if isinstance(option, Argument) else typer.Option(*declared.flags, **shared)
    )
    return inspect.Parameter(
        declared.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
        annotation=Annotated[kind, made],
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _with_defaults(options: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one dataclass. A list that was not given is None to Typer, so it keeps its default."""
    return {
        d.name: given[d.name] for d in declared(options) if given[d.name] is not None or d.default is None
    }
