"""The command line: `holdfast COMMAND`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import holdfast as package
from holdfast.cli import (
    agent,
    attach,
    check,
    checkpoint,
    convert,
    data,
    events,
    fault,
    health,
    logs,
    ls,
    metrics,
    node,
    notify,
    plan,
    report,
    resize,
    rm,
    run,
    site,
    status,
    stop,
    track,
    ui,
    why,
)
from holdfast.cli.placed import give_places
from holdfast.cli.torchrun import RunCommand
from holdfast.distribution import NAME, way_out
from holdfast.errors import HoldfastError, UsageError

EXIT_USAGE = 2
EXIT_FAILED = 1

# `pretty_exceptions_enable=False`: Typer's own tracebacks may print local variables, and with them a job's
# token.
app = typer.Typer(
    name="holdfast",
    help="Keeps PyTorch training running through failures and changes of capacity.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
# What a command needs it imports inside its function. All commands are imported here, so what one of them
# imported at its top would be paid for by each, and by the refusal of a misspelt option.
app.command("run", cls=RunCommand, context_settings=run.CONTEXT)(run.run)
app.command("agent")(agent.agent)
app.command("attach")(attach.attach)
app.command("ls")(ls.ls)
app.command("status")(status.status)
app.command("events")(events.events)
app.command("logs")(logs.logs)
app.command("report")(report.report)
app.command("track")(track.track)
app.command("notify")(notify.notify)
app.command("ui")(ui.ui)
app.command("fault")(fault.fault)
app.command("check")(check.check)
app.command("resize")(resize.resize)
app.command("drain")(resize.drain)
app.command("stop")(stop.stop)
app.command("rm")(rm.rm)
app.command("why")(why.why)
checkpoint.app.command("export")(convert.export)
checkpoint.app.command("import")(convert.import_)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(data.app, name="data")
app.add_typer(site.app, name="slurm")
app.add_typer(node.app, name="node")
app.add_typer(health.app, name="health")
app.add_typer(plan.app, name="plan")
app.add_typer(metrics.app, name="metrics")
give_places(app)


def _version(asked: bool) -> None:
    if asked:
        from holdfast import __version__

        sys.stdout.write(f"holdfast {__version__}\n")
        raise typer.Exit()


@app.command("version")
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
