"""Follows a worker's log line by line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from holdfast.health.samples import LogLine

SOURCE = "log"
CHUNK_BYTES = 1 << 20
"""Bytes read at a time. If more arrived at once, the older part is skipped, so that a flooded log does not delay the
agent."""
LINE_BYTES = 1 << 14


class LogTail:
    """One worker's log. No file is open until reading is asked for."""

    def __init__(self, path: Path, worker: str) -> None:
        self.path, self.worker = path, worker
        self._file: BinaryIO | None = None
        self._rest = b""

    @property
    def followed(self) -> bool:
        """Whether the file is open."""
        return self._file is not None

    def open(self) -> None:
        """Opens the file at its end: reading begins with what the worker writes from now on."""
        self.path.touch()
        self._file = self.path.open("rb")
        self._file.seek(0, os.SEEK_END)

    def lines(self) -> list[LogLine]:
        """The complete lines since the last call."""
        if self._file is None:
            return []
        size = os.fstat(self._file.fileno()).st_size
        at = self._file.tell()
        # Truncated, by a user or a rotation that copies and empties. Without the jump back nothing would be
        # read until the log is as long as before.
        if size < at:
            self._file.seek(0)
        # The older part is skipped on purpose: the newest lines tell what is wrong now, and reading a
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
        """Closes the descriptor."""
        if self._file is not None:
            self._file.close()
            self._file = None
