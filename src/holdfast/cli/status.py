"""`holdfast status`: what a job is doing now."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from holdfast.cli.common import AsJson, Format, JobName, Output, kept_state, ledger, width_of, write_as

WIDTH = 100


def status(job: JobName = None, as_json: AsJson = False, output: Output = None) -> None:
    """Shows what a job is doing: step, loss, ranks, nodes, incidents."""
    from holdfast.engines import jobs

    folder = jobs.existing(job)
    shown = read_status(folder)
    if not write_as(shown, as_json, output):
        _show(shown, output)


def read_status(folder: Path) -> dict[str, Any]:
    """The status from the coordinator, or from the ledger if the job does not run. `running` tells which."""
    import asyncio

    from holdfast.engines.client import NoAnswer
    from holdfast.engines.reach import client_of
    from holdfast.errors import UsageError

    async def ask() -> dict[str, Any]:
        async with client_of(folder) as client:
            answer: dict[str, Any] = await client.get("/status")
            return answer

    try:
        return {**asyncio.run(ask()), "running": True}
    except NoAnswer as error:
        try:
            return {**stored_status(folder), "running": False}
        except UsageError as missing:
            # Both: that a job is suspended is no less true because nothing of it is here.
            raise UsageError(f"{error}; {missing}") from None


def stored_status(folder: Path) -> dict[str, Any]:
    """The job as its last coordinator left it.

    Raises:
        UsageError: the job was never started.
    """
    from holdfast.coordinator.service.job_view import build_status

    with ledger(folder) as store:
        state = kept_state(store, folder)
        shown = build_status(state, state.began_s + store.last_t_s())
        last = store.last_step()
    # A coordinator that ends a job writes the outcome before it leaves. Nobody answers and there is none:
    # it was killed.
    if shown["outcome"] is None:
        shown |= {"phase": "ended", "outcome": "killed"}
    # The state was stored when something happened last; the steps after that are in their own table.
    if last is not None:
        shown["step"] = max(shown["step"], last + 1)
    return shown


def _show(shown: dict[str, Any], output: Format | None) -> None:
    from holdfast.observe.dashboard import board, headline
    from holdfast.observe.tables import PrintableConsole

    wide = output is Format.WIDE
    console = (
        PrintableConsole()
        if sys.stdout.isatty() and not wide
        else PrintableConsole(width=width_of(output, WIDTH))
    )
    if shown["running"]:
        few = console.is_terminal and not wide
        console.print(board(shown, rows=max(8, console.height - 12) if few else 10_000))
        return
    console.print(headline(shown))
    job = shown["job"]
    console.print(
        f"The job is not running. `holdfast report --job {job}` shows what it did.", highlight=False
    )
