"""`holdfast stop`: saves the state of a job and ends it."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.cli.common import JobName


def stop(job: JobName = None) -> None:
    """Stops a job after the step in flight, saves its state, and waits until it has ended."""
    import asyncio

    from holdfast.cli.checkpoint import job_archives
    from holdfast.cli.report import report_of
    from holdfast.engines import jobs

    folder = jobs.existing(job)
    if not jobs.is_running(folder):
        # What was asked for is so: a script that stops a job twice, or one that has just ended, has done no mistake.
        sys.stdout.write(f"the job {folder.name} is not running\n")
        return
    asyncio.run(_stop(folder))
    ended = report_of(folder)
    saved = max((step for archive in job_archives(folder) for step in archive.steps()), default=None)
    name = folder.name
    go_on = f"; `holdfast run --job {name} ...` resumes from step {saved}" if saved is not None else ""
    step = ended.steps.committed if ended.steps is not None else None
    where = "" if step is None else f" at step {step}"  # at level 0 only the script may know
    sys.stdout.write(f"the job {name} {ended.outcome}{where}{go_on}\n")


async def _stop(folder: Path) -> None:
    from holdfast.engines.reach import client_of

    async with client_of(folder) as client:
        await client.post("/stop?reason=holdfast%20stop", repeat=True)
        async for announcement in client.watch():
            if announcement.kind == "ended":
                return
