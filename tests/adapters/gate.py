"""Where a rank of a job waits until the test has seen that a snapshot is complete.

Five steps of these scripts take a fraction of a second. On a machine with other things to do, a kill in the fifth may come before
both ranks' shards of any snapshot are known to be there, and the training rightly begins anew.
"""

from __future__ import annotations

import asyncio
import os
import select
from pathlib import Path

GATE = "HOLDFAST_TEST_GATE"
"""The folder of the two pipes: who waits writes into `here`, and reads `go` until that ends."""

KILLED_AT = 5
"""The step in which rank 1 is killed. It waits before it, and the other one then waits for its gradient."""


def wait(step: int, rank: int) -> None:
    """In a script, with the steps so far: the first time that one comes here who has to wait, it does. Nobody does without a
    gate."""
    if (step, rank) != (KILLED_AT - 1, 1):
        return
    folder = Path(os.environ.get(GATE, "/nowhere"))
    try:
        (folder / "open").rename(folder / "taken")
    except FileNotFoundError:
        return
    (folder / "here").write_text("x")
    (folder / "go").read_bytes()


class Gate:
    """In a test: made before the job starts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        for name in ("here", "go"):
            os.mkfifo(folder / name)
        (folder / "open").touch()
        self._go = folder / "go"
        self._here = os.open(folder / "here", os.O_RDWR)

    def open_when_saved(self, launcher: int, job_dir: Path, within_s: float) -> None:
        """Somebody waits, and a snapshot is complete: whoever waits goes on. Nobody waits for a job whose launcher, a child of
        this process, has ended."""
        ended = os.pidfd_open(launcher)
        try:
            ready, _, _ = select.select([self._here, ended], [], [], within_s)
            assert ready, "nobody came to the gate"
            if self._here not in ready:
                return
            assert asyncio.run(_first_snapshot(job_dir, within_s)), "the job ended without a snapshot"
        finally:
            os.close(ended)
            os.close(self._here)
        os.close(os.open(self._go, os.O_WRONLY))


async def _first_snapshot(job_dir: Path, within_s: float) -> bool:
    from holdfast.engines.reach import client_of  # scripts need none of it

    async with asyncio.timeout(within_s), client_of(job_dir) as client:
        async for announcement in client.watch():
            if announcement.kind == "event" and announcement.value["kind"] == "snapshot":
                return True
    return False
