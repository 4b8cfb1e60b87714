"""Follows the log of one worker at a time and writes it to the agent's output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.observe.inotify import Inotify
from holdfast.observe.log_tail import appended


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
        """Follows this file from now on, where it was left."""
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
        """Follows this file no longer, if it is the one. What it has so far is printed."""
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
