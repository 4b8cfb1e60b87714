"""The core's clock: seconds that never go back, across machines too.

A machine's own steady clock counts from its boot. A coordinator that goes on with the state of one on another machine
therefore carries the times over by UTC.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec


class Anchor(msgspec.Struct, frozen=True):
    """What the core's clock showed at a moment that any machine knows."""

    now_s: float
    """The core's clock."""
    utc_s: float
    """Seconds since 1970."""
    boot: str
    """Of which machine's run."""
    steady_s: float = 0.0
    """What that machine's own clock (CLOCK_MONOTONIC) showed."""


class CoreClock:
    """Call it for the time now. anchor: the newest of the coordinator before, None for a new job.

    No event of the state that goes with the anchor is later than the anchor, so a clock that begins there or later never
    goes back.
    """

    def __init__(self, anchor: Anchor | None, boot: str | None = None) -> None:
        self._boot = boot_id() if boot is None else boot
        if anchor is None:
            self._offset_s = 0.0
        # The same run of the same machine: its steady clock went on counting while no coordinator lived, so
        # no time is lost or invented.
        elif anchor.boot == self._boot:
            self._offset_s = anchor.now_s - anchor.steady_s
        else:  # UTC here may be behind: then no time has passed, rather than less than none
            passed_s = max(0.0, time.time() - anchor.utc_s)
            self._offset_s = anchor.now_s + passed_s - time.monotonic()
        self.anchor = self.mark()

    def __call__(self) -> float:
        return time.monotonic() + self._offset_s

    def mark(self) -> Anchor:
        """The time now, for the next coordinator: to be kept with every state."""
        steady_s = time.monotonic()
        return Anchor(steady_s + self._offset_s, time.time(), self._boot, steady_s)


def boot_id() -> str:
    """Which run of which machine this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
