"""Throughput over the last seconds."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0


class Rate:
    """Steps per second over a sliding window."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, t_s: float, step: int | None) -> None:
        """Takes in that `step` steps are committed at time t_s; None: unknown."""
        if step is None:
            return
        # After lost work the step goes back. A rate across that would be negative or too low.
        if self._seen and (step < self._seen[-1][1] or t_s < self._seen[-1][0]):
            self._seen.clear()
        self._seen.append((t_s, step))
        # Two points stay, however old: a job with steps of a minute has a rate too.
        while self._seen[-1][0] - self._seen[0][0] > WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()

    def per_s(self) -> float | None:
        """Steps per second; None until two points are known."""
        if len(self._seen) < 2:
            return None
        (t0, s0), (t1, s1) = self._seen[0], self._seen[-1]
        # None and not 0 where no step came: the job may be recovering, and "0 steps/s" would be a
        # measurement.
        return (s1 - s0) / (t1 - t0) if t1 > t0 and s1 > s0 else None
