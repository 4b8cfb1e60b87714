"""Follows log files as they grow, woken by inotify."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from holdfast.observe.inotify import CREATED, MODIFIED, Inotify

_BLOCK_BYTES = 1 << 16
LAST_BYTES = 8 << 20
"""Limit on the bytes of the last lines, and of one line: a log without line feeds may have gigabytes."""
Write = Callable[[str, bytes], None]
"""Receives a file's label and complete lines of it."""
NOTHING = -1
"""In place of a number of lines: none of the lines that the file already has."""


def first_data(file: BinaryIO, at: int) -> int:
    """The offset of the first byte at or after `at` that is on disk. Agents punch a hole over the oldest part of a log
    that is larger than `--log-limit`, and a hole reads as zeros. Does not move the file's position."""
    try:
        number = file.fileno()
        before = os.lseek(number, 0, os.SEEK_CUR)
        try:
            return os.lseek(number, at, os.SEEK_DATA)
        finally:
            os.lseek(number, before, os.SEEK_SET)  # the file's buffer relies on its position
    except OSError:
        return at  # nothing follows, or it is not a file on a disk


def last_lines(file: BinaryIO, lines: int) -> Iterator[bytes]:
    """The last `lines` lines of a file (0: all of it), in blocks. Keeps at most LAST_BYTES in memory, and returns no
    more than that of a given number of lines."""
    # Backward in blocks, because a log may have gigabytes. The file is left at the end that was seen at the
    # start, and not at its end now: bytes that a worker appends meanwhile are read next, neither lost nor
    # shown twice.
    end = at = file.seek(0, os.SEEK_END)
    if lines <= 0:
        yield from _between(file, 0, end)
        return
    found = b""
    least = first_data(file, max(0, end - LAST_BYTES))
    while at > least and found.count(b"\n") <= lines:
        step = min(_BLOCK_BYTES, at - least)
        at -= step
        file.seek(at)
        found = file.read(step) + found
    file.seek(end)
    yield b"".join(found.splitlines(keepends=True)[-lines:])


def _between(file: BinaryIO, at: int, end: int) -> Iterator[bytes]:
    """The bytes between two offsets that are on disk. The file is left at the second one."""
    at = file.seek(first_data(file, at))
    while at < end and (block := file.read(min(_BLOCK_BYTES, end - at))):
        at += len(block)
        yield block
    file.seek(end)


def appended(file: BinaryIO) -> Iterator[bytes]:
    """Yields the bytes after the file's position, in blocks, up to its present end. Holes are skipped."""
    end = os.fstat(file.fileno()).st_size
    return _between(file, file.tell(), end) if end > file.tell() else iter(())


def last_said(line: bytes) -> bytes:
    """The text that a terminal shows after this line: of a progress bar, which is rewritten after each carriage return,
    the last part."""
    text = line.rstrip(b"\r\n")
    return text.rpartition(b"\r")[2] + (b"\n" if line.endswith(b"\n") else b"")


class WholeLines:
    """Splits blocks into complete lines."""

    def __init__(self) -> None:
        self.rest = b""
        """The line that is not complete yet."""

    def take(self, block: bytes) -> bytes:
        """The lines that this block completes, possibly none. A line longer than LAST_BYTES is passed on unfinished."""
        whole, newline, self.rest = (self.rest + block).rpartition(b"\n")
        if not newline and len(self.rest) > LAST_BYTES:
            whole, self.rest = self.rest, b""
        return whole + newline


@dataclass
class _Followed:
    label: str
    lines: int
    file: BinaryIO | None = None
    cut: WholeLines = field(default_factory=WholeLines)


class Tail:
    """Passes on the bytes appended to several files, including files that do not exist yet. Needs a running event loop."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._inotify = Inotify(self._changed)
        self._followed: dict[Path, _Followed] = {}

    def add(self, path: Path, label: str, lines: int) -> None:
        """Follows one more file, starting with its last `lines` lines (0: with all of them; NOTHING: after them)."""
        if path in self._followed:
            return
        # The folder and not the file: a worker's log is announced before the worker creates it.
        self._inotify.watch(path.parent, MODIFIED | CREATED)
        self._followed[path] = _Followed(label, lines)
        self._copy(path)

    def look(self) -> None:
        """Reads all files now. Inotify does not report changes that other machines make on a shared file system."""
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
            blocks = last_lines(one.file, one.lines)
        else:
            blocks = appended(one.file)
        # Complete lines only. Half a line would be labelled as a line of its own, and the lines of other workers would come
        # between its halves.
        for block in blocks:
            if whole := one.cut.take(block):
                self._write(one.label, whole)

    def close(self) -> None:
        """Passes on the rest, including unfinished lines, and closes everything."""
        for path, one in self._followed.items():
            self._copy(path)
            if one.cut.rest:
                self._write(one.label, one.cut.rest + b"\n")
            if one.file is not None:
                one.file.close()
        self._inotify.close()
