"""Progress of work that takes longer than two seconds: one line, rewritten in a terminal, ever more rarely elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO

from holdfast.protocol import units

SILENT_S = 2.0
LONGEST_SILENCE_S = 30.0
REPORTED_EVERY_S = 1.0


Seen = Callable[[int, int], None]
"""Called from several threads with the bytes just processed and the total; may raise to end the work."""


class HowFar:
    """Progress that one process reports to another: first after two seconds, then once a second. Thread-safe."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        """report: called with the bytes processed so far, and the total."""
        self._report = report
        self._due_s = time.monotonic() + SILENT_S
        self._nbytes = 0
        self._reported = False
        self._lock = threading.Lock()

    def add(self, nbytes: int, total: int) -> None:
        """Adds processed bytes."""
        with self._lock:
            self._nbytes += nbytes
            # Reported under the lock: two threads that reported one after the other without it could do so in the
            # wrong order, and progress would go back.
            now = time.monotonic()
            if now >= self._due_s:
                self._due_s = now + REPORTED_EVERY_S
                self._reported = True
                self._report(self._nbytes, total)

    def over(self, total: int) -> None:
        """Reports the end, if there was a report before."""
        # Work that took less than two seconds is never reported.
        if self._reported:
            self._report(total, total)


class ByteCount:
    """Shows how many bytes were processed. Silent for the first two seconds. Thread-safe."""

    def __init__(self, to: IO[str] | Callable[[str], None], what: str, total: int | None = None) -> None:
        """to: a stream, or a function that is called with each line. total: all bytes, if known."""
        self._to, self._what, self._total = to, what, total
        self._terminal = not callable(to) and to.isatty()
        self._began = self._shown_s = time.monotonic()
        self._silence_s = SILENT_S
        self._lock = threading.Lock()
        self._nbytes = 0
        self._open = False

    def add(self, nbytes: int) -> None:
        """Adds processed bytes."""
        with self._lock:
            self._nbytes += nbytes
            now = time.monotonic()
            if now - self._shown_s < self._silence_s:
                return
            self._shown_s = now
            if not self._terminal:
                self._silence_s = min(2 * self._silence_s, LONGEST_SILENCE_S)
            self._print(self._line(now))

    def _line(self, now: float) -> str:
        rate = self._nbytes / (now - self._began)
        line = f"{self._what}: {units.size(self._nbytes)}"
        if self._total is None:
            return f"{line}, {units.size(int(rate))}/s"
        line += f" of {units.size(self._total)}, {units.size(int(rate))}/s"
        # The remaining time is only known once there is a byte.
        return f"{line}, {units.seconds(max(0, self._total - self._nbytes) / rate)} left" if rate else line

    def _print(self, line: str) -> None:
        if callable(self._to):
            self._to(line)
            return
        self._to.write(f"\r\033[K{line}" if self._terminal else f"{line}\n")
        self._to.flush()
        self._open = self._terminal

    def __enter__(self) -> ByteCount:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Only a terminal has a line to clear: lines in a file stay, as the record of what took so long.
        if self._open and not callable(self._to):
            self._to.write("\r\033[K")
            self._to.flush()
