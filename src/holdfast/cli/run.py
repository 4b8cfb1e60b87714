"""`holdfast run`: launches a training script and keeps it running."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import command
from holdfast.cli.run_options import RunOptions
from holdfast.cli.torchrun import ALL_OPTIONS
from holdfast.cli.view import keep_ticking, view_of, write_report

if TYPE_CHECKING:
    from holdfast.engines.jobs import JobFolder
    from holdfast.observe.live import LiveView, PlainView
    from holdfast.protocol.job import JobSpec

# Options behind SCRIPT belong to the script. With interspersed options its own `--report` or `--port` would
# be taken for Holdfast's.
CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def _help_all(context: typer.Context, asked: bool) -> None:
    if asked:
        context.meta[ALL_OPTIONS] = True
        context.get_help()  # it prints
        raise typer.Exit()


@command
def run(
    options: RunOptions,
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all", callback=_help_all, is_eager=True, metavar="", help="Show all options and exit."
        ),
    ] = False,
) -> None:
    """Runs a training script on several nodes and keeps it running through failures."""
    if options.engine == "kubernetes":
        from holdfast.cli.kubernetes import run_on_kubernetes

        sys.exit(run_on_kubernetes(options))
    from holdfast.cli.spec import plan

    spec = plan(options)
    if options.dry_run:
        _show(spec)
        return
    from holdfast.cli import followers

    followers.check(options.track, options.notify)
    from holdfast.engines.jobs import EXIT_UNSAVED, exit_code

    ended = _run(spec, options)
    code = exit_code(ended)
    if code == EXIT_UNSAVED:
        saved = ended.get("saved")
        there = (
            f"the newest checkpoint there is of step {saved['step']}"
            if saved
            else "there is no checkpoint there"
        )
        here = (
            "; `holdfast run` with this --job continues from the snapshot in memory"
            if ended.get("in_memory")
            else ""
        )
        sys.stderr.write(
            f"[holdfast] the last state, of step {ended['unsaved']}, was not saved to a durable tier: {there}{here} "
            f"(exit code {EXIT_UNSAVED})\n"
        )
    sys.exit(code)


def _show(spec: JobSpec) -> None:
    """`--dry-run`: what would be started."""
    if spec.engine == "slurm":
        from holdfast.cli.slurm import print_script

        print_script(spec)
        return
    import msgspec

    from holdfast.cli.yaml_file import yaml_text

    sys.stdout.write(yaml_text([msgspec.to_builtins(spec)]))


def _run(spec: JobSpec, options: RunOptions) -> dict[str, Any]:
    """Runs the job to its end, shows it and writes its report; returns that."""
    import asyncio

    from holdfast.engines.jobs import JobFolder
    from holdfast.engines.shown import unread
    from holdfast.errors import UsageError

    # Holds the job's lock from here to `close`. Two launchers of one job would each start a coordinator, and
    # both would write the same ledger.
    folder = JobFolder(spec.name)
    view = view_of(spec, folder.path, options.no_ui)
    try:
        with view:
            ended = asyncio.run(_launch(spec, folder, view, options))
    except UsageError:
        # The job never started. Its folder would make the name look taken, and `holdfast status` show an
        # empty job.
        folder.discard()
        raise
    finally:
        folder.close()
    # Before anything is printed: a terminal that is gone, or a pipe that closed, must not cost the report.
    if options.report is not None:
        write_report(ended, options.report)
    with unread():
        view.ended(ended)
    return ended


async def _launch(
    spec: JobSpec, folder: JobFolder, view: LiveView | PlainView, options: RunOptions
) -> dict[str, Any]:
    import asyncio

    from holdfast import logs
    from holdfast.cli.followers import Followers
    from holdfast.engines.local.launcher import LocalLauncher
    from holdfast.engines.shown import Shown

    ticking = asyncio.create_task(keep_ticking(view))
    port = options.port
    shown = Followers(view, spec.name, folder.path / "logs", options.track, options.notify)
    try:
        if spec.engine == "slurm":
            from holdfast.cli.slurm import submit_and_follow

            return await submit_and_follow(spec, folder, Shown(shown))
        # Without other libraries' warnings: what is written before the old logs are put away is put away
        # with them.
        close_log = logs.configure(
            spec.log, {"job": spec.name}, file=folder.path / "logs" / "launcher.log", others=False
        )
        try:
            if spec.engine == "ssh":
                from holdfast.engines.ssh.launcher import SshLauncher

                return await SshLauncher(spec, folder, shown, port).run()
            if spec.engine == "join":
                from holdfast.engines.join.launcher import JoinLauncher

                return await JoinLauncher(spec, folder, shown, port).run()
            return await LocalLauncher(spec, folder, shown, port).run()
        finally:
            close_log()
    finally:
        if shown.has_begun:
            # They read on for as long as something of the job runs, and by its lock this process does. It has ended:
            # nothing of it is removed after this.
            folder.close()
            await shown.end()
        ticking.cancel()
