"""The commands by name. Each is imported when it is asked for, and all of them for the help.

A command is an entry point of the group `holdfast.commands`: a function that Typer reads, a `typer.Typer` with commands of its
own, or a command that Typer has made.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from holdfast import plugins
from holdfast.cli.placed import give_places
from holdfast.distribution import NAME
from holdfast.errors import UsageError


class Commands(TyperGroup):
    """`holdfast COMMAND`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _ByName()


class _ByName(MutableMapping[str, Any]):
    """The commands, made when they are asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            if (point := plugins.find(plugins.COMMANDS, name)) is None:
                raise KeyError(name)
            self._made[name] = _command(point)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*plugins.names(plugins.COMMANDS), *self._made]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]


def _command(point: plugins.EntryPoint) -> Any:
    """The command as Typer runs it. One of another package that cannot be used says so, in the help and when it is called."""
    try:
        made = _made(point.name, point.load())
    except UsageError as error:
        return _made(point.name, _broken(error), ignore_unknown_options=True, allow_extra_args=True)
    except Exception as error:
        if point.package == NAME:
            raise
        problem = point.broken(f"{type(error).__name__}: {error}")
        return _made(point.name, _broken(problem), ignore_unknown_options=True, allow_extra_args=True)
    made.name = point.name
    return made


def _made(name: str, found: Any, **settings: Any) -> Any:
    if isinstance(found, typer.Typer):
        give_places(found)
        return typer.main.get_group(found)
    if isinstance(found, TyperCommand | TyperGroup):
        return found
    if not callable(found):
        raise TypeError("neither a function nor an app of Typer")
    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    alone.command(name, context_settings=settings)(found)
    give_places(alone)
    return typer.main.get_command(alone)


def _broken(problem: UsageError) -> Any:
    def call() -> None:
        raise problem

    call.__doc__ = str(problem)
    return call
