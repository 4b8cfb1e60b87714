"""Counts the steps that follow each other while nothing happens, and divides the wall time among its uses."""

from __future__ import annotations

import math
from collections import deque

import msgspec


class WallTime(msgspec.Struct, kw_only=True):
    """The uses of wall time, in seconds."""

    training: float = 0.0
    """Training: the time of the steps that count, at full size."""
    smaller: float = 0.0
    """Additional time because the job was smaller."""
    slow: float = 0.0
    """Additional time because a member was slow."""
    lost_steps: float = 0.0
    """Time in steps that did not count."""
    stalled: float = 0.0
    """Standing still after a fault."""
    changes: float = 0.0
    """Standing still for planned changes."""
    starting: float = 0.0
    """Before the first step."""
    given_up: float = 0.0
    """After the job had ended without success."""


class Steps:
    """Counts steps and wall time. ideal_s: duration of a step at full size. running: steps follow each other since
    `since_s`, from step `base` on, each in `step_s`, which is `ideal_s` times `speed` (for the size) and `slowness`
    (for slow members). halted_s, halted_for: since when, and why, they do not. untold: the coordinator has not been
    informed of the last ones. token: increases with every change of these. lost: steps that were committed and had to
    be repeated."""

    def __init__(self, ideal_s: float, begin_s: float) -> None:
        self.ideal_s = ideal_s
        self.spent = WallTime()
        self.committed = 0
        self.lost = 0
        self.running = False
        self.since_s = begin_s
        self.base = 0
        self.step_s = ideal_s
        self.speed = 1.0
        self.slowness = 1.0
        self.halted_s = begin_s
        self.halted_for = "starting"
        self.untold = False
        self.token = 0
        # Needed to find the step that was committed at an earlier time, for snapshots that were taken then.
        # Bounded, because a trial may have a million generations.
        self._segments: deque[tuple[float, int, float]] = deque(maxlen=4096)

    def start(self, now: float, speed: float, slowness: float) -> None:
        """Steps follow each other from now on."""
        self.running = True
        self.speed, self.slowness = speed, slowness
        self.step_s = self.ideal_s * speed * slowness
        self.since_s, self.base = now, self.committed
        self._segments.append((now, self.base, self.step_s))
        # Whatever was planned under the old token no longer holds.
        self.token += 1

    def settle(self, until_s: float, whole: bool = False) -> None:
        """Books the steps since the last call, up to a moment. whole: this moment is the end of a step."""
        passed_s = until_s - self.since_s
        steps = passed_s / self.step_s
        # At the end of a step rounding only removes errors of floating point. In the middle of one the floor
        # counts complete steps.
        done = round(steps) if whole else math.floor(steps + 1e-9)
        self.spent.training += done * self.ideal_s
        # The time of these steps, split by cause: their time at full size is training, the rest is due to the
        # size or to the slow member.
        self.spent.smaller += done * self.ideal_s * (self.speed - 1)
        self.spent.slow += done * self.ideal_s * self.speed * (self.slowness - 1)
        # The step that was cut off is lost.
        self.spent.lost_steps += passed_s - done * self.step_s
        self.committed = self.base = self.base + done
        self.since_s = until_s

    def halt(self, now: float, why: str, whole: bool = False, told: bool = False) -> None:
        """No step is committed from now on. told: the coordinator has been informed of the last step."""
        self.settle(now, whole)
        self.running, self.untold = False, not told
        self.halted_s, self.halted_for = now, why
        self.token += 1

    def went_back(self, step: int) -> None:
        """Training continues from a step; the steps beyond it are lost."""
        lost = max(0, self.committed - step)
        self.lost += lost
        # It was booked as training, but now has to be repeated.
        self.spent.training -= lost * self.ideal_s
        self.spent.lost_steps += lost * self.ideal_s
        self.committed = self.base = step

    def account(self, now: float) -> None:
        """Books the time of standing still up to now."""
        setattr(self.spent, self.halted_for, getattr(self.spent, self.halted_for) + now - self.halted_s)

    def committed_at(self, time_s: float) -> int:
        """The step that was committed at an earlier time, as far as it still counts."""
        # Never more than what still counts: a rewind may have undone steps of that time.
        for since_s, base, step_s in reversed(self._segments):
            if since_s <= time_s:
                return min(self.committed, base + math.floor((time_s - since_s) / step_s))
        return 0
