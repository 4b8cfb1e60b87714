"""The core's clock: seconds that never go back, across machines too.

A machine's own steady clock counts from its boot. A coordinator that goes on with the state of one on another machine
therefore carries the times over by UTC.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec


class Anchor(msgspec.Struct, frozen=True):
    """What the core's clock showed at a moment that any machine knows. boot: of which machine's run."""

    now_s: float
    utc_s: float
    boot: str


class CoreClock:
    """Call it for the time now. anchor: of the coordinator before, None for a new job."""

    def __init__(self, anchor: Anchor | None, boot: str | None = None) -> None:
        boot = boot_id() if boot is None else boot
        steady_s, utc_s = time.monotonic(), time.time()
        self._offset_s = 0.0
        if anchor is not None:
            elsewhere = anchor.boot != boot
            self._offset_s = anchor.now_s + utc_s - anchor.utc_s - steady_s if elsewhere else 0.0
            if not elsewhere and anchor.now_s > steady_s:
                self._offset_s = anchor.now_s - steady_s
        self.anchor = Anchor(steady_s + self._offset_s, utc_s, boot)

    def __call__(self) -> float:
        return time.monotonic() + self._offset_s


def boot_id() -> str:
    """Which run of which machine this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
