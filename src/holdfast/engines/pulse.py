"""Whether a coordinator is stopped or hangs: its loop writes into a pipe, and its launcher counts the silence.

Nothing healthy may be ended for the slowness of anybody, so silence is counted in looks of our own, each of which counts
for the time between two looks at most. A launcher that was itself stopped, or came late, finds one silent look. And only
that time counts in which the coordinator could have spoken: not what it spends waiting for a disk, which it would do after
a restart, too, and of a wait for the processor only what it got of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from holdfast.protocol.job_options import Timing

READ_BYTES = 65536
_TICKS = os.sysconf("SC_CLK_TCK")


class Look(NamedTuple):
    """What is seen of a process."""

    state: str
    """Its letter in /proc/PID/stat; 'X' when it is gone."""
    used_s: float
    """Processor time that it has used so far."""


class Silence:
    """How long a coordinator has been silent. It counts from its first word on: a start takes as long as it takes; but one
    that is stopped is never about to speak."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._began = False
        self._used_s = 0.0
        self.stopped_s = self.silent_s = 0.0

    @property
    def every_s(self) -> float:
        """From one look to the next: in between it speaks twice."""
        return self._timing.heartbeat_s

    def looked(self, spoke: bool, look: Look) -> None:
        """One look. spoke: something came since the last one."""
        # The processor time since the last look. A coordinator that was ready to run and got no processor
        # could not have spoken.
        used_s, self._used_s = look.used_s - self._used_s, look.used_s
        stopped = look.state in "Tt"
        self.stopped_s = self.stopped_s + self.every_s if stopped and not spoke else 0.0
        # A start may take long on a slow file system, and a restart would take just as long.
        self._began = self._began or spoke
        if spoke or not self._began:
            self.silent_s = 0.0
        elif look.state == "R":
            self.silent_s += min(used_s, self.every_s)
        # D is a wait for a disk. A coordinator that is restarted would wait for the same disk.
        elif look.state != "D":
            self.silent_s += self.every_s

    def verdict(self) -> str | None:
        """What is wrong with it; None: nothing that is known."""
        # Stopped is seen and not inferred, so a shorter time is enough for it than for silence.
        if self.stopped_s >= self._timing.detection_s:
            return f"its process has been stopped for {self.stopped_s:g} s"
        if self.silent_s >= self._timing.hang_s:
            return f"its event loop has not run for {self.silent_s:.1f} s"
        return None


def has_spoken(pulse: int) -> bool:
    """Whether something came. pulse: the reading end, which does not block."""
    try:
        return bool(os.read(pulse, READ_BYTES))
    except BlockingIOError:
        return False


def look(pid: int) -> Look:
    """A look at a child of this process that was not waited for, so that the number is its own."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return Look("X", 0.0)
    fields = text[text.rindex(")") + 2 :].split()
    return Look(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS)
