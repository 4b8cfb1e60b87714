"""`run --track` and `run --notify`: processes beside the job that follow its ledger, and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.protocol.machine.processes import python_module

if TYPE_CHECKING:
    from holdfast.engines.shown import View
    from holdfast.protocol.job_view import JobView

LAST_S = 60.0
"""How long trackers may take for the rest once the job has ended. What is missing then, the command by hand adds."""
LOG = "followers.log"
"""Within the job's folder of logs."""


def check(track: Sequence[str], notify: Sequence[str]) -> None:
    """Before anything is started. Raises UsageError: a target cannot be used."""
    if track:
        from holdfast.tools.tracking.follower import check_target

        for target in track:
            check_target(target)
    if notify:
        from holdfast.tools.tracking.notify import sender

        for target in notify:
            # Making one is the check of its file, its variable or its program. Nothing is sent.
            sender(target)


class Followers:
    """Passes everything on to a view, and starts the followers with the first event: before that they would find no ledger."""

    def __init__(
        self, view: View, job: str, logs: Path, track: Sequence[str] = (), notify: Sequence[str] = ()
    ) -> None:
        self._view, self._log = view, logs / LOG
        asked = {"track": track, "notify": notify}
        self._commands = [
            [command, "--job", job, *(word for target in targets for word in ("--to", target))]
            for command, targets in asked.items()
            if targets
        ]
        self._processes: list[asyncio.subprocess.Process] = []
        self._following: list[asyncio.Task[None]] = []

    def event(self, entry: dict[str, Any]) -> None:
        """See `View`."""
        if not self._following:
            self._following = [asyncio.create_task(self._follow(command)) for command in self._commands]
        self._view.event(entry)

    def status(self, status: JobView) -> None:
        """See `View`."""
        self._view.status(status)

    def output(self, data: bytes) -> None:
        """See `View`."""
        self._view.output(data)

    def note(self, text: str) -> None:
        """See `View`."""
        self._view.note(text)

    async def _follow(self, command: list[str]) -> None:
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *python_module("holdfast", *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C asks the job to stop. Its followers have to read how it ends.
                start_new_session=True,
            )
        self._processes.append(process)
        # One that fails costs the job nothing, but whoever counts on it has to know.
        if await process.wait():
            self._view.note(
                f"`holdfast {command[0]}` ended with exit code {process.returncode}: see {self._log}"
            )

    @property
    def has_begun(self) -> bool:
        """There is somebody to wait for."""
        return bool(self._following)

    async def end(self) -> None:
        """After the job's end: waits until they have read it, and ends whoever takes too long."""
        # This wait cancels nothing: who is late is ended below, and still waited for.
        _, late = await asyncio.wait(self._following, timeout=LAST_S)
        for process in self._processes:
            if process.returncode is None:
                process.terminate()
        # Until they are gone: no process may outlive the command that started it.
        if late:
            await asyncio.wait(late)
