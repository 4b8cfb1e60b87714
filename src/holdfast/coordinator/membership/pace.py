"""How fast the job gets on, by wall time, and when it will be done: the one place where both are counted.

What counts is where the job stands, and when. So whatever takes time between two commits (the script's evaluation, a slow
loader, a recovery, steps that are done again) makes the rate lower, as it makes the job longer.
"""

from __future__ import annotations

from bisect import bisect_right

from holdfast.coordinator.kernel.phases import JobPhase
from holdfast.coordinator.kernel.state import CoreState

LEAST_S = 60.0
MOST_S = 3600.0
"""The rate is that of the newer half of the time since the first step, but of no less and no more than this."""
POINTS = 32
"""So many points of the past lie in what the rate is counted over."""


def stepped(state: CoreState, at_s: float) -> None:
    """A step was committed, or at levels 0 and 1 made."""
    points, here = state.membership.pace, _position(state)
    if not points:
        points.append((at_s, here))
        return
    at_s = max(at_s, points[-1][0])  # words of two workers may arrive in any order
    # The first point and the newest are exact; between two others there is a stretch of the window.
    if len(points) > 2 and at_s - points[-2][0] < _window_s(points, at_s) / POINTS:
        points[-1] = at_s, here
    else:
        points.append((at_s, here))
    # A job that has ended is counted from its first point on, which therefore stays.
    del points[1 : _begin(points, at_s)]


def went_back(state: CoreState) -> None:
    """The job stands where it is now: steps beyond it did not stay, and got it nowhere."""
    here = _position(state)
    state.membership.pace = [(at_s, min(step, here)) for at_s, step in state.membership.pace]


def steps_per_s(state: CoreState, now: float) -> float | None:
    """Steps that stayed, per second of wall time: of the newer half of the time since the job's first step, of the last hour at
    most; of an ended job, from its first step to its last. None: fewer than two steps are known, or none of them stayed."""
    points = state.membership.pace
    ended = state.membership.phase is JobPhase.ENDED
    if len(points) < 2:
        return None
    begun_s, first = points[0 if ended else _begin(points, now)]
    last_s, last = points[-1]
    if last <= first or last_s <= begun_s:
        return None
    # The step that is under way is late only when it takes longer than the others did.
    late_s = 0.0 if ended else max(0.0, now - last_s - (last_s - begun_s) / (last - first))
    return (last - first) / (last_s - begun_s + late_s)


def _position(state: CoreState) -> int:
    """Steps that stayed, as far as is known; where only the script knows where it went on, steps that were made."""
    membership, counted = state.membership, state.membership.counted
    if membership.counts_steps:
        return membership.committed
    return counted.earlier + membership.committed - counted.lost


def _window_s(points: list[tuple[float, int]], now: float) -> float:
    return min(MOST_S, max(LEAST_S, (now - points[0][0]) / 2))


def _begin(points: list[tuple[float, int]], now: float) -> int:
    """The newest point that is as old as the window, else the first."""
    return max(0, bisect_right(points, now - _window_s(points, now), key=lambda point: point[0]) - 1)
