"""A worker's log as lines, from its beginning on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from holdfast.health.samples import LogLine

SOURCE = "log"
CHUNK_BYTES = 1 << 20
"""Read at a time; of more than this that came at once, the older part is passed over: a log that is flooded must not
hold the agent up."""
LINE_BYTES = 1 << 14


class LogTail:
    """One worker's log. Nothing is open until somebody wants to read it."""

    def __init__(self, path: Path, worker: str) -> None:
        self.path, self.worker = path, worker
        self._file: BinaryIO | None = None
        self._rest = b""

    @property
    def followed(self) -> bool:
        """It is open."""
        return self._file is not None

    def open(self) -> None:
        """Begins with what the worker writes from now on."""
        self.path.touch()
        self._file = self.path.open("rb")
        self._file.seek(0, os.SEEK_END)

    def lines(self) -> list[LogLine]:
        """Whole lines since the last call."""
        if self._file is None:
            return []
        size = os.fstat(self._file.fileno()).st_size
        at = self._file.tell()
        # Truncated, by a user or a rotation that copies and empties. Without the jump back nothing would be
        # read until the log is as long as before.
        if size < at:
            self._file.seek(0)
        # Passing over the older part is a choice: the newest lines tell what is wrong now, and reading a
        # gigabyte of repeated warnings would delay the agent's own messages.
        elif size - at > CHUNK_BYTES:
            self._file.seek(size - CHUNK_BYTES)
            self._rest = b""
        data = self._rest + self._file.read(CHUNK_BYTES)
        whole, newline, rest = data.rpartition(b"\n")
        # The last line may be half written. Progress bars write without a line feed for hours, so the rest is
        # bounded.
        self._rest = rest[-LINE_BYTES:]
        if not newline:
            return []
        return [
            LogLine(SOURCE, text, self.worker) for text in whole.decode(errors="replace").splitlines() if text
        ]

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._file is not None:
            self._file.close()
            self._file = None
