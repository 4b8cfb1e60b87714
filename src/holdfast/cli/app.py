"""The command line: `holdfast COMMAND`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import holdfast as package
from holdfast.cli.commands import Commands
from holdfast.distribution import NAME, way_out
from holdfast.errors import HoldfastError, UsageError

EXIT_USAGE = 2
EXIT_FAILED = 1

# `pretty_exceptions_enable=False`: Typer's own tracebacks may print local variables, and with them a job's
# token.
app = typer.Typer(
    name="holdfast",
    cls=Commands,
    help="Keeps PyTorch training running through failures and changes of capacity.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        from holdfast import __version__

        sys.stdout.write(f"holdfast {__version__}\n")
        raise typer.Exit()


def version() -> None:
    """Shows the versions of Holdfast, Python and torch."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    from holdfast import __version__

    try:
        torch = version_of("torch")
    except PackageNotFoundError:
        torch = "not installed"
    python = ".".join(map(str, sys.version_info[:3]))
    sys.stdout.write(f"holdfast {__version__}\nPython {python}\ntorch {torch}\n")


@app.callback()
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keeps PyTorch training running through failures and changes of capacity."""


def main() -> None:
    """Entry point of the console script. Exit code 2 for bad input, 1 for a job that failed."""
    if "start" not in getattr(package, "__all__", ()):
        sys.stderr.write(f"holdfast: {package.__file__} does not belong to {NAME}. {way_out()}\n")
        sys.exit(EXIT_USAGE)
    try:
        app()
    except UsageError as error:
        sys.stderr.write(f"holdfast: {error}\n")
        sys.exit(EXIT_USAGE)
    except HoldfastError as error:
        sys.stderr.write(f"holdfast: {error}\n")
        sys.exit(EXIT_FAILED)
    except OSError as error:
        # A file that cannot be read or written is the user's to mend, and a traceback names it last. Other errors of the
        # system are ours, and their traceback is wanted.
        if error.filename is None:
            raise
        sys.stderr.write(f"holdfast: {error.filename}: {error.strerror}{_way_out(error)}\n")
        sys.exit(EXIT_FAILED)


def _way_out(error: OSError) -> str:
    from pathlib import Path

    from holdfast.engines.jobs import home

    where, path = home().absolute(), Path(os.fsdecode(error.filename)).absolute()
    if path == where or where in path.parents:
        return f"; this path is in HOLDFAST_HOME ({where}): set HOLDFAST_HOME to a folder that you can read and write"
    return "; check the permissions of the file" if isinstance(error, PermissionError) else ""
