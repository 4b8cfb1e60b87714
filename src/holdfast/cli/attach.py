"""`holdfast attach`: shows a running job again, until it ends or this command does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import JobName

if TYPE_CHECKING:
    from holdfast.protocol.job_report import JobReport


def attach(
    job: JobName = None,
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace", "-n", metavar="NAME", help="Kubernetes: namespace of the job that --job names."
        ),
    ] = "",
    context: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="NAME",
            help="Kubernetes: context of the kubeconfig. By default the current one.",
        ),
    ] = "",
    no_ui: Annotated[
        bool, typer.Option("--no-ui", help="Print plain lines instead of the live view.")
    ] = False,
) -> None:
    """Shows a running job again. Ctrl-C ends this command and not the job."""
    from holdfast.engines import jobs
    from holdfast.errors import UsageError

    # Where a place is said, or nothing is known here, the cluster is asked. Its answer makes the folder.
    if job is not None and (
        namespace or context or not (jobs.job_dir(jobs.check_name(job)) / "spec.json").is_file()
    ):
        from holdfast.cli.kubernetes import located

        folder = located(job, namespace, context)
    elif namespace or context:
        raise UsageError(
            "--namespace and --context say where to look for a job, but not which one: pass its name with --job, too"
        )
    else:
        folder = jobs.existing(job)
    if not jobs.is_running(folder):
        sys.stdout.write(
            f"the job {folder.name} is not running; `holdfast report --job {folder.name}` shows what it did\n"
        )
        sys.exit(jobs.exit_code(_known_end(folder)))
    allocation = jobs.read_allocation(folder)
    if allocation is not None and allocation.engine == "kubernetes":
        from holdfast.cli.kubernetes import follow

        sys.exit(follow(folder, no_ui))
    sys.exit(jobs.exit_code(_look_on(folder, no_ui)))


def _look_on(folder: Path, no_ui: bool) -> JobReport:
    """At a job that another command runs here, or that Slurm runs; returns its report."""
    import asyncio
    import signal

    from holdfast.cli.view import view_of
    from holdfast.engines import jobs
    from holdfast.engines.reach import client_of
    from holdfast.engines.shown import TolerantView
    from holdfast.protocol.job_report import JobReport

    view = view_of(jobs.read_spec(folder), folder, no_ui)
    shown = TolerantView(view)

    async def watch() -> JobReport | None:
        watching = asyncio.current_task()
        assert watching is not None
        # Of our own, as every launcher has it: a script that starts this command with `&` has SIGINT ignored, and then
        # Python raises no KeyboardInterrupt.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, watching.cancel)
        async with client_of(folder) as client:
            async for announcement in client.watch():
                match announcement.kind:
                    case "event":
                        shown.event(announcement.value)
                    case "status":
                        shown.status(announcement.value)
                    case "ended":
                        ended: JobReport = announcement.value
                        return ended
        return None

    try:
        with view:
            ended = asyncio.run(watch())
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write(f"[holdfast] the job {folder.name} continues without this command\n")
        return JobReport(job=folder.name, incidents=[], outcome=jobs.LEFT)
    if ended is None:
        sys.stderr.write(f"[holdfast] the job {folder.name} is not running any more\n")
        return _known_end(folder)
    view.ended(ended)
    return ended


def _known_end(folder: Path) -> JobReport:
    """The report of a job that does not run; without an outcome where nothing here tells how it ended."""
    from holdfast.cli.report import report_of
    from holdfast.errors import HoldfastError
    from holdfast.protocol.job_report import JobReport

    try:
        return report_of(folder)
    except HoldfastError:
        return JobReport(job=folder.name, incidents=[])
