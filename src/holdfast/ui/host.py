"""`holdfast ui` as a host of the page: all jobs of this home, running or not."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from holdfast.engines import jobs
from holdfast.errors import HoldfastError, UsageError
from holdfast.ui.ended import EndedJob
from holdfast.ui.proxy import RunningJob
from holdfast.ui.remote import RemoteJob
from holdfast.web.sources import Refused, Source

KEY_FILE = "page-key"
LISTED = 50
"""Jobs of the list, the newest first."""
OPEN_KEPT = 4
"""Ended jobs whose stories are kept in memory."""
LIST_S = 3.0
"""A list is good for others for so long."""


class UiHost:
    """See `web.application.Host`. `close` ends its threads."""

    def __init__(
        self, job: str | None, may_act: bool, look: Callable[[list[Path]], Awaitable[list[dict[str, Any]]]]
    ) -> None:
        """job: the one that is shown at first; None: the newest. look: what is known of jobs, by their folders."""
        self.may_act = may_act
        self.more_jobs = 0
        self._job, self._look = job, look
        self._ended: dict[tuple[str, float], EndedJob] = {}
        self._list: tuple[float, list[dict[str, Any]]] = (-LIST_S, [])

    async def jobs(self) -> list[dict[str, Any]]:
        """See `Host.jobs`."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._list[0] >= LIST_S:
            # A home may be on a network file system, and a slow one must not stop the streams of this loop.
            try:
                folders = await asyncio.to_thread(jobs.folders)
                self._list = now_s, await self._look(folders[:LISTED])
            except (HoldfastError, OSError) as error:
                raise Refused(f"the list of jobs cannot be read: {error}", 503) from error
            self.more_jobs = max(0, len(folders) - LISTED)
        return self._list[1]

    async def source(self, job: str) -> Source:
        """See `Host.source`."""
        try:
            folder, running, started_s, is_remote = await asyncio.to_thread(self._find, job)
        # An OSError: the folder was removed meanwhile, or is another user's.
        except (UsageError, OSError) as error:
            raise Refused(str(error), 404) from error
        if running:
            # It holds nothing open, so it is made for each request and nobody has to
            # close it when the job ends.
            return RemoteJob(folder) if is_remote else RunningJob(folder)
        # By its start: a job that is started again has another ledger when it ends again.
        key = folder.name, started_s
        if key not in self._ended:
            # Each has a thread and a story in memory. Whoever looks through many old
            # jobs must not collect them.
            while len(self._ended) >= OPEN_KEPT:
                self._ended.pop(next(iter(self._ended))).close()
            self._ended[key] = EndedJob(folder)
        return self._ended[key]

    def _find(self, job: str) -> tuple[Path, bool, float, bool]:
        folder = jobs.existing(job or self._job)
        allocation = jobs.read_allocation(folder)
        is_remote = allocation is not None and allocation.engine == "kubernetes"
        return folder, jobs.is_running(folder), (folder / "spec.json").stat().st_mtime, is_remote

    def close(self) -> None:
        """Ends what reads ledgers."""
        for source in self._ended.values():
            source.close()


def page_key(home: Path) -> str:
    """The secret that cookies of `holdfast ui` are signed with; made at the first call. Remove the file to end all sessions.

    Raises:
        UsageError: it cannot be made or read.
    """
    path = home / KEY_FILE
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            # Created with its mode and exclusively: at no moment can another user read it.
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            found = path.read_text()
            # A shorter one is left by a full disk, or by a process that was killed as it
            # wrote. It could be guessed.
            if len(found) >= 32:
                return found
            raise UsageError(f"{path} is damaged: remove it, and open the page with a new link") from None
        with os.fdopen(fd, "w") as out:
            out.write(key := secrets.token_urlsafe(32))
        return key
    except OSError as error:
        raise UsageError(f"{path} cannot be used ({error.strerror}): set HOLDFAST_HOME") from None
