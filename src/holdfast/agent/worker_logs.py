"""The logs of an agent's workers: one of them is followed to the agent's own output, and the room of all of them on disk is bounded."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from holdfast.observe.inotify import Inotify
from holdfast.observe.log_tail import appended
from holdfast.protocol.job import LOG_KEPT_SHARE

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Of include/uapi/linux/falloc.h."""

LOOK_S = 1.0
"""A worker exceeds its limit by at most what it writes in this time. (inotify would wake the agent for every line that is written,
and tells nothing of a network file system's other clients.)"""
ALIGN_BYTES = 1 << 20
"""A hole ends at a multiple of this, which is one of the block size of every file system: a part of a block would not be
given back, but filled with zeros that readers take for data."""


class LogFollower:
    """Prints what one worker writes, including what it wrote before it was chosen."""

    def __init__(self, also: Callable[[], None]) -> None:
        """also: called too when a file of `inotify` changed. A user has few inotify instances: an agent takes one."""
        self.inotify = Inotify(self._changed)
        self._also = also
        self._watch: int | None = None
        self._path: Path | None = None
        self._offsets: dict[Path, int] = {}

    def follow(self, path: Path) -> None:
        """Follows this file from now on, from where it was left."""
        if path == self._path:
            return
        if self._watch is not None:
            self.inotify.forget(self._watch)
        self._path = path
        # The worker creates its log when it starts, which may be later. inotify cannot watch a file that does
        # not exist.
        path.touch()
        # The watch first and the copy second: what is written between the two is an event. The other way
        # round it would be shown only with the next line.
        self._watch = self.inotify.watch(path)
        self._copy()

    def leave(self, path: Path) -> None:
        """Stops following this file, if it is the one. What it has so far is printed."""
        if path != self._path:
            return
        self._copy()
        if self._watch is not None:
            self.inotify.forget(self._watch)
        self._path, self._watch = None, None

    def append_quietly(self, path: Path, text: str) -> None:
        """Adds text to a log without printing it. A traceback is printed once, with the closing error."""
        if path == self._path:
            self._copy()
        with path.open("ab") as log:
            log.write(text.encode())
            self._offsets[path] = log.tell()

    def _changed(self) -> None:
        self._copy()
        self._also()

    def _copy(self) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("rb") as log:
                log.seek(self._offsets.get(self._path, 0))
                for block in appended(log):
                    sys.stdout.buffer.write(block)
                sys.stdout.buffer.flush()
                self._offsets[self._path] = log.tell()
        except FileNotFoundError:
            self._path = None  # somebody removed it
        except BrokenPipeError:
            self._path = None  # the launcher is gone: nobody looks any more

    def close(self) -> None:
        """Prints the rest and closes the descriptor."""
        self._copy()
        self.inotify.close()


class LogLimit:
    """Bounds the room that logs take on disk. Looks at them in a thread of its own: they may be on a file system that hangs, for which the
    agent's loop must not wait.

    A worker writes to its log through a descriptor that nobody else can move, so the file is not rotated: a hole is punched over its
    oldest part. Descriptors, offsets and the size of the file stay as they were; only the bytes are gone, and readers skip them
    (`observe.log_tail.first_data`).
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._holes: dict[Path, int] = {}
        self._changes = threading.Lock()
        self._closed = threading.Event()
        self._told = False

    def start(self) -> None:
        """Begins to look. The thread ends with `close`, or with the process."""
        threading.Thread(target=self._run, name="log limit", daemon=True).start()

    def add(self, log: Path) -> None:
        """Looks at this file from now on."""
        with self._changes:
            self._holes.setdefault(log, 0)

    def remove(self, log: Path) -> None:
        """Nobody writes to this file any more."""
        with self._changes:
            self._holes.pop(log, None)

    def close(self) -> None:
        """Looks no longer."""
        self._closed.set()

    def look(self) -> None:
        """Punches what is due."""
        with self._changes:
            logs = dict(self._holes)
        for log, hole in logs.items():
            try:
                end = self._punch(log, hole)
            except FileNotFoundError:
                continue  # the worker has written nothing yet, or somebody removed the file
            except OSError as error:
                self._tell(log, error)
                self.remove(log)
                continue
            with self._changes:
                if log in self._holes:
                    self._holes[log] = end

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            self.look()

    def _punch(self, log: Path, hole: int) -> int:
        """Where the hole ends now. hole: where it ended at the look before."""
        size = log.stat().st_size
        if size < hole:
            return 0  # the script emptied its log
        if size - hole <= self._limit:
            return hole
        end = int(size - LOG_KEPT_SHARE * self._limit) // ALIGN_BYTES * ALIGN_BYTES
        if end <= hole:
            return hole
        file = os.open(log, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if _libc.fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, 0, end):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(log))
        finally:
            os.close(file)
        return end

    def _tell(self, log: Path, error: OSError) -> None:
        """Once for all logs: they are in one folder."""
        if self._told:
            return
        self._told = True
        cannot = error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
        why = "its file system cannot punch holes" if cannot else str(error)
        _log.warning(
            "%s is larger than --log-limit, and its oldest part cannot be deleted: %s. Training continues, and the "
            "logs of this node's workers grow without a limit",
            log,
            why,
        )
