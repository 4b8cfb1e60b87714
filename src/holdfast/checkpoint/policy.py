"""When to save, and what to keep. Pure: the worker, the coordinator and the planner ask the same functions."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from holdfast.errors import UsageError


class Retention(msgspec.Struct, frozen=True):
    """What a tier keeps."""

    keep: int = 2
    """The newest so many."""
    keep_every: int = 0
    """For ever every step that this divides; 0: none."""

    def superfluous(self, steps: Iterable[int], spare: int | None = None) -> list[int]:
        """The steps that need not be kept, oldest first. Never the newest one, nor `spare`."""
        ordered = sorted(steps)
        # At least one is always kept, whatever `keep` says: retention must never delete the last checkpoint
        # of a job.
        recent = {*ordered[-max(1, self.keep) :], spare}
        return [s for s in ordered if s not in recent and not (self.keep_every and s % self.keep_every == 0)]


class Cadence(msgspec.Struct, frozen=True):
    """How often something is saved: at most one of the three is given; none: never."""

    steps: int = 0
    """Every so many; 0: not by steps."""
    seconds: float = 0.0
    """Every so many; 0: not by time."""
    auto: bool = False
    """As often as loses least."""

    @property
    def never(self) -> bool:
        """Whether nothing is ever saved."""
        return not (self.steps or self.seconds or self.auto)

    def due(self, step: int, since_s: float, interval_s: float = math.inf) -> bool:
        """Whether step `step` (committed steps) is to be saved.

        Args:
            since_s: seconds since the last one was saved (or the run began).
            interval_s: what `auto` has come to, see `formulas.daly_interval_s`.
        """
        if self.auto:
            return since_s >= interval_s
        if self.seconds:
            return since_s >= self.seconds
        return self.steps > 0 and step > 0 and step % self.steps == 0

    def __str__(self) -> str:
        if self.auto:
            return "auto"
        if self.seconds:
            return f"{self.seconds:g}s"
        return str(self.steps)


def parse_cadence(text: str) -> Cadence:
    """`100` (steps), `30s`, `10m`, `2h`, `auto`, or `0` for never.

    Raises:
        UsageError: anything else.
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    if text == "auto":
        return Cadence(auto=True)
    if text.isdigit():
        return Cadence(steps=int(text))
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * units[unit]
    except (ValueError, KeyError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"{text!r} is not an interval: use a number of steps (100), a time (30s, 10m, 2h), auto, or 0 for never"
        )
    return Cadence(seconds=seconds)


PRIOR_MTBF_S = 3 * 3600.0
"""What a run is thought to have before it has failed: 1,024 nodes at Llama 3's rate fail about every three hours."""


def mtbf_s(failures: int, ran_s: float, prior_s: float = PRIOR_MTBF_S) -> float:
    """Mean time between failures, from those seen and a prior that counts as one failure."""
    return (ran_s + prior_s) / (failures + 1)
