"""Detects a jump of the loss, and a worker whose own loss stands out. Pure.

A job's loss goes up now and then; a jump is a rise that its usual scatter does not explain. A processor that computes
wrongly without an error shows, if at all, in the loss of the same worker being off repeatedly, while every worker gets
random samples of the same data.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW = 64
"""Number of preceding losses that a loss is compared with."""
FEWEST = 16
SCALES = 8.0
"""A jump exceeds the window's median by at least this many robust standard deviations of the window (1.4826 x the
median distance from the median), ..."""
SHARE = 0.5
"""... and by this share of the median, ..."""
STARTED = 1e-3
"""... and by this share of the highest median so far: the loss of a converged net is mostly noise, however it scatters,
..."""
LEAST = 1e-6
"""... and by this amount in any case: it is more than the rounding of a loss of one in float32."""
MOST_REST = 64 * WINDOW
"""After a jump was reported, the next one is reported only if no loss has jumped for this many steps: `WINDOW` after
the first, doubled each time, up to this."""

APART_SCALES = 10.0
TIMES = 3
"""How often the loss of the same worker, and of no other, must stand out within `RECENT` blocks before it is reported."""
RECENT = 100


@dataclass(frozen=True)
class Jump:
    """A loss that its window does not explain."""

    step: int
    loss: float
    usual: float
    """The window's median."""


class Losses:
    """The job's loss, step by step."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._last = -1
        self._highest = 0.0
        self._jumped: dict[bool, tuple[int, int]] = {}

    def take(self, step: int, loss: float) -> Jump | None:
        """Takes the next loss; returns the jump if it is to be reported. A jump is reported once: not again until the
        loss has been down, or the window has risen to it, for some time (see `MOST_REST`). A loss that is not finite is
        tracked apart from one that is high."""
        # Steps that are repeated after a recovery give the same losses again; counted twice they would make
        # the window narrower than it is.
        if step <= self._last:
            return None
        self._last = step
        if len(self._window) < FEWEST:
            if math.isfinite(loss):
                self._window.append(loss)
            return None
        usual = statistics.median(self._window)
        self._highest = max(self._highest, abs(usual))
        scatter = 1.4826 * statistics.median(abs(x - usual) for x in self._window)
        # Written as `not <=`: every comparison with NaN is false, so a loss that is no number jumps. An
        # infinite one does so anyway.
        jumped = not loss - usual <= max(SCALES * scatter, SHARE * abs(usual), STARTED * self._highest, LEAST)
        report = jumped and self._rested(step, math.isfinite(loss))
        # Values above the limit join the window as well. A loss that stays at a new level is the usual one
        # after half a window, and the jump is over; kept out, the report would never end.
        if math.isfinite(loss):
            self._window.append(loss)
        return Jump(step, loss, usual) if report else None

    def _rested(self, step: int, finite: bool) -> bool:
        """Whether a jump of this kind (finite or not) is to be reported now."""
        if finite not in self._jumped:
            self._jumped[finite] = step, WINDOW
            return True
        last, rest = self._jumped[finite]
        report = step - last > rest
        self._jumped[finite] = step, min(MOST_REST, 2 * rest) if report else rest
        return report


@dataclass(frozen=True)
class Outlier:
    """A worker whose own loss stands out repeatedly."""

    worker: str
    loss: float
    usual: float
    times: int


class WorkerLosses:
    """Each worker's own mean loss, block of steps by block of steps."""

    def __init__(self) -> None:
        self._scatter: deque[float] = deque(maxlen=WINDOW)
        self._recent: deque[str | None] = deque(maxlen=RECENT)
        self._highest = 0.0

    def look(self, own: Mapping[str, float]) -> Outlier | None:
        """Takes one block: for each worker, the mean loss that was furthest from the job's. With fewer than three
        workers none can stand out."""
        if len(own) < 3:
            return None
        # NaN would make the order of the sort, and with it the median, arbitrary; as infinity it is simply
        # the worst.
        usual = statistics.median(x if math.isfinite(x) else math.inf for x in own.values())
        if not math.isfinite(usual):
            return None  # most losses are not finite: the script is the cause
        self._highest = max(self._highest, abs(usual))
        off = {name: abs(x - usual) if math.isfinite(x) else math.inf for name, x in own.items()}
        # Before this block is added: a block in which one worker stands out must not widen the measure that
        # it is judged by.
        common = statistics.median(self._scatter) if len(self._scatter) >= FEWEST else None
        self._scatter.append(1.4826 * statistics.median(off.values()))
        if common is None:
            return None
        # The last two terms as for jumps: in a converged net, one hard sample is far from all others on
        # whichever worker it is computed.
        limit = max(APART_SCALES * common, SHARE * abs(usual), STARTED * self._highest, LEAST)
        apart = [name for name, far in off.items() if far > limit]
        # If two stand out at once, the data or the script is the cause. A processor that computes wrongly
        # affects one worker only.
        worker = apart[0] if len(apart) == 1 else None
        self._recent.append(worker)
        if worker is None:
            return None
        counts = Counter(name for name in self._recent if name is not None)
        # If another worker stood out within the same blocks, the losses of this job are merely uneven, and no
        # worker is reported.
        if counts[worker] < TIMES or len(counts) > 1:
            return None
        # Reported once. Another report needs the same evidence again, after the core has had time to act.
        self._recent.clear()
        return Outlier(worker, own[worker], usual, counts[worker])
