"""Log files as they grow, woken by inotify."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from holdfast.observe.inotify import CREATED, MODIFIED, Inotify

_BLOCK_BYTES = 1 << 16
Write = Callable[[str, bytes], None]
"""Takes a file's label and complete lines of it."""
NOTHING = -1
"""Instead of a number of lines: of what a file has, none."""


def last_lines(file: BinaryIO, lines: int) -> bytes:
    """The last lines of a file (0: all of it)."""
    # Backward in blocks, because a log may have gigabytes. The file is left at the end that was seen at the start, and not at
    # its end now: what a worker appends meanwhile is read next, neither lost nor shown twice.
    end = at = file.seek(0, os.SEEK_END)
    found = b""
    while at > 0 and (lines <= 0 or found.count(b"\n") <= lines):
        step = min(_BLOCK_BYTES, at)
        at -= step
        file.seek(at)
        found = file.read(step) + found
    file.seek(end)
    return found if lines <= 0 else b"".join(found.splitlines(keepends=True)[-lines:])


@dataclass
class _Followed:
    label: str
    lines: int
    file: BinaryIO | None = None
    rest: bytes = b""


class Tail:
    """Passes on what is appended to several files, including files that do not exist yet. Needs a running event loop."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._inotify = Inotify(self._changed)
        self._followed: dict[Path, _Followed] = {}

    def add(self, path: Path, label: str, lines: int) -> None:
        """Follows one more file, beginning with its last lines (0: with all of them; NOTHING: after them)."""
        if path in self._followed:
            return
        # The folder and not the file: a worker's log is announced before the worker creates it.
        self._inotify.watch(path.parent, MODIFIED | CREATED)
        self._followed[path] = _Followed(label, lines)
        self._copy(path)

    def look(self) -> None:
        """Looks at all files now. Inotify does not report what other machines write to a shared file system."""
        self._changed()

    def _changed(self) -> None:
        for path in self._followed:
            self._copy(path)

    def _copy(self, path: Path) -> None:
        one = self._followed[path]
        if one.file is None:
            try:
                one.file = path.open("rb")
            except FileNotFoundError:
                return
            if one.lines == NOTHING:
                one.file.seek(0, os.SEEK_END)
                return
            data = last_lines(one.file, one.lines)
        else:
            data = one.file.read()
        # Complete lines only. Half a line would be labelled as a line of its own, and the lines of other workers would come
        # between its halves.
        whole, newline, one.rest = (one.rest + data).rpartition(b"\n")
        if newline:
            self._write(one.label, whole + newline)

    def close(self) -> None:
        """Passes on the rest, including unfinished lines, and closes everything."""
        for path, one in self._followed.items():
            self._copy(path)
            if one.rest:
                self._write(one.label, one.rest + b"\n")
            if one.file is not None:
                one.file.close()
        self._inotify.close()
