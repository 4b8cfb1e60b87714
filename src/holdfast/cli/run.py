"""`holdfast run`: launches a training script and keeps it running."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.options import command
from holdfast.cli.run_options import RunOptions

if TYPE_CHECKING:
    from holdfast.engines.jobs import JobFolder
    from holdfast.observe.live import LiveView
    from holdfast.observe.plain_view import PlainView
    from holdfast.protocol.job import JobSpec

# Options behind SCRIPT belong to the script. With interspersed options its own `--report` or `--port` would
# be taken for Holdfast's.
CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": False}
EXIT_FAILED = 1
TICK_S = 0.25


@command
def run(options: RunOptions) -> None:
    """Runs a training script on several nodes and keeps it running through failures."""
    from holdfast.cli.spec import plan

    spec = plan(options)
    if options.dry_run:
        from holdfast.cli.slurm import print_script

        print_script(spec)
        return
    from holdfast.cli import followers

    followers.check(options.track, options.notify)
    outcome = _run(spec, options)
    if outcome not in ("finished", "stopped"):
        sys.exit(EXIT_FAILED)


def _run(spec: JobSpec, options: RunOptions) -> str | None:
    """Runs the job to its end, shows it and writes its report; returns its outcome."""
    import asyncio

    from holdfast.engines.jobs import JobFolder
    from holdfast.engines.shown import unread
    from holdfast.errors import UsageError

    # Holds the job's lock from here to `close`. Two launchers of one job would each start a coordinator, and
    # both would write the same ledger.
    folder = JobFolder(spec.name)
    view = _view(spec, folder.path, options.no_ui)
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
        _write_report(ended, options.report)
    with unread():
        view.ended(ended)
    return ended.get("outcome")


async def _launch(
    spec: JobSpec, folder: JobFolder, view: LiveView | PlainView, options: RunOptions
) -> dict[str, Any]:
    import asyncio

    from holdfast import logs
    from holdfast.cli.followers import Followers
    from holdfast.engines.local.launcher import LocalLauncher
    from holdfast.engines.shown import Shown, unread

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            with unread():
                view.tick()

    ticking = asyncio.create_task(tick())
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


def _view(spec: JobSpec, job_dir: Path, no_ui: bool) -> LiveView | PlainView:
    """The live view on a terminal, plain lines elsewhere. Holdfast writes to stderr; stdout belongs to the script."""
    # Asked of stderr and not of stdout: with `holdfast run > log` the view can still draw, and the script's
    # output goes into the file as the script wrote it.
    if not no_ui and sys.stderr.isatty():
        from holdfast.observe.live import LiveView, terminal

        if (console := terminal(sys.stderr)) is not None:
            return LiveView(spec, job_dir, console)
    from holdfast.observe.plain_view import PlainView

    return PlainView(spec, job_dir)


def _write_report(ended: dict[str, Any], path: Path) -> None:
    import msgspec

    # The blame is for the end of the screen. It quotes the script's log, which a report that is passed on
    # should not.
    shown = {k: v for k, v in ended.items() if k != "blame"}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(shown), indent=1) + b"\n")
