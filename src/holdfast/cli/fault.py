"""`holdfast fault`: injects a fault into a running job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common import JobName


def fault(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="KIND [KEY=VALUE]...",
            help="The fault to inject, for example kill-node:node=1, or xid=79 node=2.",
        ),
    ],
    job: JobName = None,
) -> None:
    """Injects a fault into a running job: kill-worker, kill-node, stop-worker, ... as with `run --fault`."""
    import asyncio

    from holdfast.engines import jobs
    from holdfast.protocol.faults import join_words, parse_fault

    spec = join_words(words)
    parsed = parse_fault(spec)
    folder = jobs.existing(job)
    asyncio.run(_inject(folder, spec, deadly=parsed.kind == "kill-coordinator"))
    sys.stdout.write(
        f"injected {parsed} into the job {folder.name}; `holdfast events --job {folder.name}` shows the effects\n"
    )


async def _inject(folder: Path, spec: str, deadly: bool) -> None:
    """Sends the fault. `deadly`: it kills the coordinator itself."""
    # A coordinator that is killed cannot answer, so there no answer means success. Asking for the status first tells that
    # case apart from a job without a coordinator.
    from holdfast.engines.client import NoAnswer
    from holdfast.engines.reach import client_of

    async with client_of(folder) as client:
        if deadly:
            await client.get("/status")
        try:
            await client.post("/fault", spec)
        except NoAnswer:
            if not deadly:
                raise
