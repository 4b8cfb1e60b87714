"""Reports changes of files on the running event loop, through Linux's inotify."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

MODIFIED, CREATED = 0x2, 0x100
_IN_NONBLOCK = 0o4000
_BLOCK_BYTES = 1 << 16
WITHOUT_S = 0.5
"""How often `changed` is called, in seconds, if the kernel has no inotify instance left for this user (the limit is 128
by default)."""


class Inotify:
    """Calls `changed` when a watched file, or a file in a watched folder, changed."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """Raises OSError when the kernel has no inotify at all."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._changed = changed
        self._fd: int = self._libc.inotify_init1(_IN_NONBLOCK)
        self._timer: asyncio.TimerHandle | None = None
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._woken)
            return
        number = ctypes.get_errno()
        # Running out of instances is no reason to fail: an IDE of the same user may hold all of them. The
        # files are polled then.
        if number != errno.EMFILE:
            raise OSError(number, f"inotify: {os.strerror(number)}")
        self._timer = asyncio.get_running_loop().call_later(WITHOUT_S, self._look)

    def watch(self, path: Path, events: int = MODIFIED) -> int:
        """Watches a file or a folder; returns the watch's number."""
        number: int = self._libc.inotify_add_watch(self._fd, os.fsencode(path), events)
        return number

    def forget(self, watch: int) -> None:
        """Ends one watch."""
        self._libc.inotify_rm_watch(self._fd, watch)

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WITHOUT_S, self._look)
        self._changed()

    def _woken(self) -> None:
        # It does not matter which files changed: `changed` looks at all of them. The events are only read to
        # clear them, so that the event loop does not wake up again at once.
        try:
            os.read(self._fd, _BLOCK_BYTES)
        except BlockingIOError:
            return
        self._changed()

    def close(self) -> None:
        """Ends all watches."""
        if self._timer is not None:
            self._timer.cancel()
        else:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
