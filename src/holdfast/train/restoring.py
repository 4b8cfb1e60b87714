"""Says how far the fetching of the state is, once that takes longer than two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SILENT_S = 2.0
EVERY_S = 1.0

Seen = Callable[[int, int], None]
"""Told, from several threads, of bytes as they come in and of how many there are in all; may raise to end it."""


class Restoring:
    """One restore. Thread-safe."""

    def __init__(self, say: Callable[[int, int], None]) -> None:
        """say: told now and then how many bytes are there, and of how many."""
        self._say = say
        self._due_s = time.monotonic() + SILENT_S
        self._nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int, total: int) -> None:
        """So many more bytes of `total`."""
        with self._lock:
            self._nbytes += nbytes
            now = time.monotonic()
            if now >= self._due_s:
                self._due_s = now + EVERY_S
                self._say(self._nbytes, total)
