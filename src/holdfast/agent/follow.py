"""Follows the log of one worker at a time and writes it to the agent's output, woken by inotify."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from pathlib import Path

_IN_MODIFY = 0x2
_IN_NONBLOCK = 0o4000
_libc = ctypes.CDLL(None, use_errno=True)


class LogFollower:
    """Prints what a worker writes from the moment it is chosen on, beginning with what it wrote before."""

    def __init__(self) -> None:
        self._fd: int = _libc.inotify_init1(_IN_NONBLOCK)
        self._watch = -1
        self._path: Path | None = None
        self._offsets: dict[Path, int] = {}
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._changed)

    def follow(self, path: Path) -> None:
        """Follows this file from now on, where it was left."""
        if path == self._path or self._fd < 0:
            return
        if self._watch >= 0:
            _libc.inotify_rm_watch(self._fd, self._watch)
        self._path = path
        path.touch()
        self._watch = _libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_MODIFY)
        self._copy()

    def append_quietly(self, path: Path, text: str) -> None:
        """Adds to a log what is shown elsewhere: a traceback is printed once, with the closing error."""
        if path == self._path:
            self._copy()
        with path.open("ab") as log:
            log.write(text.encode())
            self._offsets[path] = log.tell()

    def _changed(self) -> None:
        try:
            os.read(self._fd, 65536)
        except BlockingIOError:
            return
        self._copy()

    def _copy(self) -> None:
        if self._path is None:
            return
        with self._path.open("rb") as log:
            log.seek(self._offsets.get(self._path, 0))
            data = log.read()
        self._offsets[self._path] = self._offsets.get(self._path, 0) + len(data)
        try:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            self._path = None  # the launcher is gone: nobody looks any more

    def close(self) -> None:
        """Prints the rest and gives the descriptor back."""
        self._copy()
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
