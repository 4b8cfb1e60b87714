"""Progress of what takes longer than two seconds: one line, rewritten in a terminal, repeated elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import IO

from holdfast.observe import units

SILENT_S = 2.0


class ByteCount:
    """Bytes that were dealt with. Says nothing in the first two seconds."""

    def __init__(self, stream: IO[str], what: str) -> None:
        self._stream, self._what = stream, what
        self._terminal = stream.isatty()
        self._began = self._said = time.monotonic()
        self._nbytes = 0
        self._open = False

    def add(self, nbytes: int) -> None:
        """So many more bytes."""
        self._nbytes += nbytes
        now = time.monotonic()
        if now - self._said >= SILENT_S:
            self._said = now
            rate = units.size(int(self._nbytes / (now - self._began)))
            line = f"{self._what}: {units.size(self._nbytes)}, {rate}/s"
            self._stream.write(f"\r\033[K{line}" if self._terminal else f"{line}\n")
            self._stream.flush()
            self._open = self._terminal

    def __enter__(self) -> ByteCount:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._stream.write("\r\033[K")
            self._stream.flush()
