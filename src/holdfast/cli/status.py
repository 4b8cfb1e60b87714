"""`holdfast status`: what a job is doing now."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.common import AsJson, Format, JobName, Output, kept_state, ledger, width_of, write_as

if TYPE_CHECKING:
    from holdfast.protocol.job_view import JobView

WIDTH = 100


def status(job: JobName = None, as_json: AsJson = False, output: Output = None) -> None:
    """Shows what a job is doing: step, loss, ranks, nodes, incidents."""
    import msgspec

    from holdfast.engines import jobs

    view, running = read_view(jobs.existing(job))
    if not write_as({**msgspec.to_builtins(view), "running": running}, as_json, output):
        _show(view, running, output)


def read_view(folder: Path) -> tuple[JobView, bool]:
    """The job as the coordinator tells it, or as the ledger has it if the job does not run; and whether it runs."""
    import asyncio

    from holdfast.engines.client import NoAnswer
    from holdfast.engines.reach import client_of
    from holdfast.errors import UsageError

    async def ask() -> JobView:
        async with client_of(folder) as client:
            return await client.view()

    try:
        return asyncio.run(ask()), True
    except NoAnswer as error:
        try:
            return stored_view(folder), False
        except UsageError as missing:
            # Both: that a job is suspended is no less true because nothing of it is here.
            raise UsageError(f"{error}; {missing}") from None


def stored_view(folder: Path) -> JobView:
    """The job as its last coordinator left it.

    Raises:
        UsageError: the job was never started.
    """
    from holdfast.coordinator.service.job_view import status_left

    with ledger(folder) as store:
        state = kept_state(store, folder)
        return status_left(state, state.began_s + store.last_t_s(), store.last_step())


def _show(view: JobView, running: bool, output: Format | None) -> None:
    from holdfast.observe.dashboard import board, headline
    from holdfast.observe.tables import PrintableConsole

    wide = output is Format.WIDE
    console = (
        PrintableConsole()
        if sys.stdout.isatty() and not wide
        else PrintableConsole(width=width_of(output, WIDTH))
    )
    if running:
        few = console.is_terminal and not wide
        console.print(board(view, rows=max(8, console.height - 12) if few else 10_000))
        return
    console.print(headline(view))
    console.print(
        f"The job is not running. `holdfast report --job {view.job}` shows what it did.", highlight=False
    )
