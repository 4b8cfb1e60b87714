"""The commands by name. Each is imported when it is asked for, and all of them for the help.

A command is an entry point of the group `holdfast.commands`: a function that Typer reads, a `typer.Typer` with commands of its
own, or a command that Typer has made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import update_wrapper
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from holdfast import plugins
from holdfast.cli.common import JobName
from holdfast.distribution import NAME
from holdfast.errors import UsageError

Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", metavar="NAME", help="Kubernetes: namespace of the job that --job names."
    ),
]
LongNamespace = Annotated[
    str,
    typer.Option(
        "--namespace", metavar="NAME", help="Kubernetes: namespace of the job that --job names. Also -n."
    ),
]
"""Of commands whose `-n` is a number, too."""
Context = Annotated[
    str,
    typer.Option(
        "--context",
        metavar="NAME",
        help="Kubernetes: context of the kubeconfig. By default the current one.",
    ),
]


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


def give_places(app: typer.Typer) -> None:
    """Gives `-n` and `--context` to every command below that has `--job`, unless it says itself where its job is.

    The job is looked for in the cluster and remembered here. So the command's own code finds a folder of this home, whoever
    made the job, and need not know of places.
    """
    for command in app.registered_commands:
        command.callback, has_number = _placed(command.callback)
        if has_number:
            command.cls = NumberOrPlace
    if app.registered_callback is not None:
        app.registered_callback.callback, _ = _placed(app.registered_callback.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            give_places(group.typer_instance)


def _placed(function: Callable[..., Any] | None) -> tuple[Callable[..., Any] | None, bool]:
    """Whether its `-n` is a number already."""
    # As it is written: the annotations of commands that name no job need not be evaluated.
    own = inspect.signature(function).parameters if function is not None else {}
    if function is None or "namespace" in own or "job" not in own:
        return function, False
    own = inspect.signature(function, eval_str=True).parameters
    if own["job"].annotation != JobName:
        return function, False
    has_number = any("-n" in _flags(parameter) for parameter in own.values())

    def call(*, namespace: str, context_: str, **given: Any) -> None:
        if namespace or context_:
            given["job"] = _found(given["job"], namespace, context_)
        function(**given)

    update_wrapper(call, function, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())
    del call.__wrapped__  # type: ignore[attr-defined]  # Typer would read the annotations of the function itself
    keyword = inspect.Parameter.KEYWORD_ONLY
    more = {"namespace": LongNamespace if has_number else Namespace, "context_": Context}
    read = [p.replace(kind=keyword) for p in own.values()]
    read += [inspect.Parameter(name, keyword, default="", annotation=kind) for name, kind in more.items()]
    call.__signature__ = inspect.Signature(read)  # type: ignore[attr-defined]
    return call, has_number


def _flags(parameter: inspect.Parameter) -> list[Any]:
    # Typer takes the first of them for a default, until it has read the annotation.
    return [
        flag
        for mark in getattr(parameter.annotation, "__metadata__", ())
        for flag in (getattr(mark, "default", None), *(getattr(mark, "param_decls", None) or ()))
    ]


def _found(job: str | None, namespace: str, context: str) -> str:
    """The name of the job's folder."""
    # It imports the cluster's client, which other commands must not pay for.
    from holdfast.cli.kubernetes import located

    if job is None:
        raise UsageError(
            "--namespace and --context say where to look for a job, but not which one: pass its name with --job, too"
        )
    return located(job, namespace, context).name


class NumberOrPlace(TyperCommand):
    """A command whose `-n` is a number of lines. A namespace's name is no number, so both can be said as everywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """A namespace is given its long name."""
        return super().parse_args(ctx, list(_long(args)))


def _long(args: Iterable[str]) -> Iterator[str]:
    rest = iter(args)
    for word in rest:
        if word != "-n" or (value := next(rest, None)) is None:
            yield word
        else:
            yield from (word, value) if value.isdecimal() else ("--namespace", value)
