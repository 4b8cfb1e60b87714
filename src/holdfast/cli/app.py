"""The command line: `holdfast COMMAND`."""

from __future__ import annotations

import sys

import typer

from holdfast.cli import events, fault, logs, run, status
from holdfast.errors import HoldfastError

app = typer.Typer(
    name="holdfast",
    help="Keeps PyTorch training running through failures and changes of capacity.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run", context_settings=run.CONTEXT)(run.run)
app.command("status")(status.status)
app.command("events")(events.events)
app.command("logs")(logs.logs)
app.command("fault")(fault.fault)


def main() -> None:
    """Entry point of the console script. Exit code 2 for bad input, 1 for a job that failed."""
    try:
        app()
    except HoldfastError as error:
        sys.stderr.write(f"holdfast: {error}\n")
        sys.exit(2)
