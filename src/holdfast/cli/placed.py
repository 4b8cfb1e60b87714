"""`-n` and `--context` of every command that names a job: where on Kubernetes it is.

The job is looked for in the cluster and remembered here. So the command's own code finds a folder of this home, whoever made the job,
and need not know of places.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import update_wrapper
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from holdfast.cli.common import JobName

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


def give_places(app: typer.Typer) -> None:
    """To every command below that has `--job`, and does not say itself where its job is."""
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
    from holdfast.errors import UsageError

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
