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
"""Takes a file's label and whole lines of it."""


def last_lines(file: BinaryIO, lines: int) -> bytes:
    """The last lines of a file (0: all of it), read backward; leaves it at the end that was read up to."""
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
    """Passes on what is appended to any of several files, also those that are yet to come. Needs a running
    event loop.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._inotify = Inotify(self._changed)
        self._followed: dict[Path, _Followed] = {}

    def add(self, path: Path, label: str, lines: int) -> None:
        """Follows one more file, beginning with its last lines (0: with all of them)."""
        if path in self._followed:
            return
        self._inotify.watch(path.parent, MODIFIED | CREATED)
        self._followed[path] = _Followed(label, lines)
        self._copy(path)

    def look(self) -> None:
        """For files that other machines write: their changes are no events here."""
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
            data = last_lines(one.file, one.lines)
        else:
            data = one.file.read()
        whole, newline, one.rest = (one.rest + data).rpartition(b"\n")
        if newline:
            self._write(one.label, whole + newline)

    def close(self) -> None:
        """Passes on the rest, unfinished lines too, and closes everything."""
        for path, one in self._followed.items():
            self._copy(path)
            if one.rest:
                self._write(one.label, one.rest + b"\n")
            if one.file is not None:
                one.file.close()
        self._inotify.close()
