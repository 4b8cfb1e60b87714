"""Detects that the reduction itself has become slower, because of a link, a switch or a network card. Pure.

With a slow link all workers wait, and about equally long. So the shortest wait of any worker is the time of the
communication itself; a slow worker does not change it, because it is the one that waits least. In a ring, the rank at
the receiving end of a slow link gets its last piece last, and the others wait for its vote: its link is the one to
inspect first.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.protocol.phases import Spent

LEARNED = 24
"""Number of blocks of steps from which the usual time is learned, after the first `WARM_UP`."""
WARM_UP = 2
SLOWER = 1.5
WORTH = 0.05
"""The slowdown must cost at least this share of a step's time."""
LOOKED_AT, OF_THEM = 16, 12
"""The number of blocks that are considered, and how many of them must be slow."""
MOST = 2 / 3
"""The share of the other workers that must wait longest for the same rank, in most of these blocks, for its link to be
named."""


@dataclass(frozen=True, kw_only=True)
class ReductionChange:
    """The reduction became slow, or is as fast as before again."""

    slow: bool
    since: int
    """The first step of the block in which it began."""
    usual_s: float
    """Seconds of a step that the reduction takes, as learned at the start."""
    now_s: float
    """The same over the most recent blocks."""
    share: float
    """The share of a step that the difference costs."""
    rank: int | None
    """The rank whose link seems to be slow; None: no single one."""


class Reductions:
    """The reductions of one generation."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._recent: deque[tuple[int, float, float, int | None]] = deque(maxlen=LOOKED_AT)
        self._skip = WARM_UP
        self._slow = False

    def look(self, spent: Sequence[Spent]) -> ReductionChange | None:
        """Takes one block of steps of all workers."""
        # One worker alone waits for nobody.
        if len(spent) < 2:
            return None
        if self._skip:
            self._skip -= 1
            return None
        # The minimum, because the slowest worker waits least and what it waits is communication only. Every
        # other worker's wait contains that worker's slowness.
        least_s = min(s.wait_s for s in spent)
        # Learned anew for each generation, after the first blocks: another set of nodes has another ring, and
        # the first steps contain connection set-up and compilation.
        if len(self._first) < LEARNED:
            self._first.append(least_s)
            return None
        step_s = statistics.median(s.step_s for s in spent)
        self._recent.append((spent[0].first, least_s, step_s, _named(spent)))
        if len(self._recent) < LOOKED_AT:
            return None
        return self._weigh(statistics.median(self._first))

    def _weigh(self, usual_s: float) -> ReductionChange | None:
        # Both a ratio and a share of the step: half as slow again is noise where the reduction takes 1% of
        # the step, and costs nothing.
        slow = [x for x in self._recent if x[1] > SLOWER * usual_s and x[1] - usual_s > WORTH * x[2]]
        # 12 of 16 to become slow and at most 4 of 16 to be well again. The gap keeps a reduction at the limit
        # from being reported at every block.
        if self._slow == (len(slow) >= OF_THEM) or (self._slow and len(slow) > LOOKED_AT - OF_THEM):
            return None
        self._slow = not self._slow
        seen = slow or list(self._recent)
        now_s = statistics.median(x[1] for x in seen)
        share = (now_s - usual_s) / statistics.median(x[2] for x in seen)
        names = Counter(x[3] for x in seen if x[3] is not None)
        rank, times = names.most_common(1)[0] if names else (None, 0)
        # The rank is only named if most of the slow blocks name the same one. A switch slows all links, and
        # no single rank's link is the cause.
        return ReductionChange(
            slow=self._slow,
            since=seen[0][0],
            usual_s=usual_s,
            now_s=now_s,
            share=share,
            rank=rank if times > len(seen) / 2 else None,
        )


def _named(spent: Sequence[Spent]) -> int | None:
    """The rank that most of the others wait for longest."""
    names = Counter(s.late for s in spent if s.late >= 0)
    # Of two workers each waits for the other.
    if not names or len(spent) < 3:
        return None
    rank, times = names.most_common(1)[0]
    return rank if times >= MOST * (len(spent) - 1) else None
