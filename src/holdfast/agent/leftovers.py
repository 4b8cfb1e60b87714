"""What ended workers leave behind: processes that they started and did not wait for.

The agent is their reaper: the kernel makes it the parent of every process whose own parent ends. A worker leads a session of
its own, which its children belong to unless one leaves it on purpose (`setsid`, as daemons do): that one is the user's, and
is left alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from holdfast.protocol.machine.processes import stat_of

_CLEANS_UP = b"multiprocessing.resource_tracker"
"""In the command line of the process that removes a worker's shared memory when the worker is gone. It ends by itself."""


class _Left(NamedTuple):
    pid: int
    is_dead: bool


class Leftovers:
    """They hold ports and devices that the next attempt needs. So they are ended with a worker that failed; those of one that
    has done its work may still be at something, and are ended before the next worker starts here, or with the job."""

    def __init__(self) -> None:
        self._sessions: dict[int, bool] = {}
        """Of ended workers, by their numbers: whether what is left in them is to end."""

    def began(self, pid: int) -> None:
        """A new worker, whose number an earlier one may have had; nothing of the earlier ones may be in its way."""
        self._sessions.pop(pid, None)
        self._sessions = dict.fromkeys(self._sessions, True)
        self.look()

    def ended(self, pid: int, code: int) -> None:
        """A worker that has just ended."""
        self._sessions[pid] = code != 0
        self.look()

    def look(self) -> None:
        """After each SIGCHLD: reaps what has ended, ends what is to end, and forgets sessions of which nothing is left."""
        if not self._sessions:
            return
        left = self._find()
        for session, members in left.items():
            for each in members:
                if each.is_dead:
                    _reap(each.pid)
                elif self._sessions[session]:
                    _kill(_family(each.pid), signal.SIGKILL)
        self._sessions = {
            session: ends
            for session, ends in self._sessions.items()
            if session in left or _has_group(session)
        }

    async def end(self, grace_s: float) -> None:
        """With the job: SIGTERM, and SIGKILL after the grace."""
        living = [each.pid for members in self._find().values() for each in members if not each.is_dead]
        _kill((pid for each in living for pid in _family(each)), signal.SIGTERM)
        async with asyncio.TaskGroup() as group:
            for pid in living:
                group.create_task(_gone(pid, grace_s))
        self._sessions = dict.fromkeys(self._sessions, True)
        self.look()

    def _find(self) -> dict[int, list[_Left]]:
        found: dict[int, list[_Left]] = {}
        for pid in _children(os.getpid()):
            stat = stat_of(pid)
            # Who leads a session of that number is a new process that was given the number of the worker, which is gone.
            if stat is not None and stat.session in self._sessions and stat.session != pid:
                found.setdefault(stat.session, []).append(_Left(pid, stat.state in "ZX"))
        return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:  # the thread or the process is gone
            continue
    return found


def _family(pid: int) -> list[int]:
    """The process and its descendants, without those that clean up after it."""
    try:
        if _CLEANS_UP in Path(f"/proc/{pid}/cmdline").read_bytes():
            return []
    except OSError:
        return []
    return [pid, *(below for child in _children(pid) for below in _family(child))]


def _kill(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):  # it is gone, or it runs as somebody else
            continue


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _has_group(pid: int) -> bool:
    """Whether anything is left in the process group of a worker, whose children may be another one's still."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def _gone(pid: int, within_s: float) -> None:
    """Waits until one of our children has ended."""
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(held, ended.set)
    try:
        async with asyncio.timeout(within_s):
            await ended.wait()
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(held)
        os.close(held)
