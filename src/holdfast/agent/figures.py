"""The newest readings of a node that are figures for people, told to the coordinator now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from holdfast.health.samples import Line, Reading
from holdfast.protocol import messages as m
from holdfast.protocol.health import MOST_READINGS, NODE_FIGURES, SUBJECT_CHARS

STALE_S = 180.0
"""Three periods of the slowest source."""
GATHER_S = 1.0
"""Sources with the same period are read one after the other, and what they read is one message."""


class Figures:
    """Readings come on the threads that read; `later` and `send` belong to the agent's loop.

    Nothing is sent by a clock: a round of readings is what wakes this, and rounds are 30 seconds apart or more.
    """

    def __init__(
        self,
        later: Callable[[float, Callable[[], None]], None],
        send: Callable[[m.NodeReadings], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """later: calls something on the loop after so many seconds; from any thread."""
        self._later, self._send, self._clock = later, send, clock
        self._lock = threading.Lock()
        self._newest: dict[tuple[str, str], tuple[float, float]] = {}
        self._due = False

    def take(self, readings: Iterable[Reading | Line]) -> None:
        """What one source has read."""
        now = self._clock()
        found = {
            (one.name, one.subject[:SUBJECT_CHARS]): (now, float(one.value))
            for one in readings
            if isinstance(one, Reading) and one.name in NODE_FIGURES and isinstance(one.value, int | float)
        }
        if not found:
            return
        with self._lock:
            # A machine with hundreds of virtual interfaces: the first that were seen stay, so a series does not flicker.
            for key, value in found.items():
                if key in self._newest or len(self._newest) < MOST_READINGS:
                    self._newest[key] = value
            due, self._due = self._due, True
        if not due:
            self._later(GATHER_S, self._tell)

    def _tell(self) -> None:
        with self._lock:
            self._due = False
            # Sources have different periods, so what was told before is told again, until it is old: then its device is gone.
            oldest = self._clock() - STALE_S
            self._newest = {k: v for k, v in self._newest.items() if v[0] >= oldest}
            told = tuple((name, subject, value) for (name, subject), (_, value) in self._newest.items())
        self._send(m.NodeReadings(told))
