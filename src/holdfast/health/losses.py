"""When a loss jumps, and whose part of it stands out. Pure.

A job's loss goes up now and then; what is looked for is a jump that its own scatter does not explain. And a processor that
computes wrongly without noticing shows, if at all, in the same worker's part being off again and again, while every worker
gets random samples of the same data.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW = 64
"""So many losses before it are what a loss is held against."""
FEWEST = 16
SCALES = 8.0
"""A jump is so many times the robust scatter of the window (1.4826 x its median distance from the median), ..."""
SHARE = 0.5
"""... and so much of the median, ..."""
STARTED = 1e-3
"""... and so much of the highest median that there was: what a converged net has is noise, however it scatters, ..."""
LEAST = 1e-6
"""... and so much in any case: less than the rounding of a loss of one in float32."""
MOST_REST = 64 * WINDOW
"""After a jump was told, the next one is told only when no loss has jumped for so many steps: `WINDOW` after the first, and each
time twice as many, up to this."""

APART_SCALES = 10.0
TIMES = 3
"""So often within `RECENT` blocks the same worker's part stands out, and no other's, until it is said."""
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
        """The next loss. A jump is told once: not again before the loss has been down, or the window has risen to it, for a
        while, see `MOST_REST`. A loss that is no number is another matter than one that is high."""
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
        told = jumped and self._rested(step, math.isfinite(loss))
        # Values above the limit join the window as well. A loss that stays at a new level is the usual one
        # after half a window, and the jump is over; kept out, the report would never end.
        if math.isfinite(loss):
            self._window.append(loss)
        return Jump(step, loss, usual) if told else None

    def _rested(self, step: int, finite: bool) -> bool:
        """Whether a jump of this kind is told now."""
        if finite not in self._jumped:
            self._jumped[finite] = step, WINDOW
            return True
        last, rest = self._jumped[finite]
        told = step - last > rest
        self._jumped[finite] = step, min(MOST_REST, 2 * rest) if told else rest
        return told


@dataclass(frozen=True)
class Outlier:
    """A worker whose part of the loss stands out again and again."""

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
        """One block: per worker, its mean loss that was furthest from the job's. Of fewer than three nobody stands out."""
        if len(own) < 3:
            return None
        # NaN would make the order of the sort, and with it the median, arbitrary; as infinity it is simply
        # the worst.
        usual = statistics.median(x if math.isfinite(x) else math.inf for x in own.values())
        if not math.isfinite(usual):
            return None  # most of them: it is the script's
        self._highest = max(self._highest, abs(usual))
        off = {name: abs(x - usual) if math.isfinite(x) else math.inf for name, x in own.items()}
        # Before this block is added: a block in which one worker stands out must not widen the measure that
        # it is judged by.
        common = statistics.median(self._scatter) if len(self._scatter) >= FEWEST else None
        self._scatter.append(1.4826 * statistics.median(off.values()))
        if common is None:
            return None
        # The last two as for jumps: in a converged net one hard sample is far from all others, wherever it is computed.
        limit = max(APART_SCALES * common, SHARE * abs(usual), STARTED * self._highest, LEAST)
        apart = [name for name, far in off.items() if far > limit]
        # Two at once are the data's or the script's. A processor that computes wrongly is one machine, and
        # alone.
        worker = apart[0] if len(apart) == 1 else None
        self._recent.append(worker)
        if worker is None:
            return None
        counts = Counter(name for name in self._recent if name is not None)
        # If another worker stood out within the same blocks, losses of this job are just uneven, and nobody
        # is named.
        if counts[worker] < TIMES or len(counts) > 1:
            return None
        # Reported once. Said again it needs the same evidence again, after the core has had its time to act.
        self._recent.clear()
        return Outlier(worker, own[worker], usual, counts[worker])
