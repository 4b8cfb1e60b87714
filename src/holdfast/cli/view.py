"""The view of a job that a command shows, and the file of its report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.observe.live import LiveView, PlainView
    from holdfast.protocol.job import JobSpec
    from holdfast.protocol.job_report import JobReport

TICK_S = 0.25


async def keep_ticking(view: LiveView | PlainView) -> None:
    """Until it is cancelled: also what nobody reports, such as the time, is shown as it changes."""
    import asyncio

    from holdfast.engines.shown import unread

    while True:
        await asyncio.sleep(TICK_S)
        with unread():
            view.tick()


def view_of(spec: JobSpec, job_dir: Path, no_ui: bool) -> LiveView | PlainView:
    """The live view on a terminal, plain lines elsewhere. Holdfast writes to stderr; stdout belongs to the script."""
    # Asked of stderr and not of stdout: with `holdfast run > log` the view can still draw, and the script's
    # output goes into the file as the script wrote it.
    if not no_ui and sys.stderr.isatty():
        from holdfast.observe.live import LiveView, terminal

        if (console := terminal(sys.stderr)) is not None:
            return LiveView(spec, job_dir, console)
    from holdfast.observe.live import PlainView

    return PlainView(spec, job_dir)


def write_report(ended: JobReport, path: Path) -> None:
    """For `--report`."""
    import msgspec

    from holdfast.protocol.job_report import encode_report

    # The blame is for the end of the screen. It quotes the script's log, which a report that is passed on should not.
    path.write_bytes(encode_report(msgspec.structs.replace(ended, blame=None)))
