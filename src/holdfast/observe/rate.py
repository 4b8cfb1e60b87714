"""Throughput, as it was over the last seconds."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0


class Rate:
    """Steps per second over a sliding window."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, t_s: float, step: int | None) -> None:
        """`step` steps are committed at time t_s; None: it is not known how many. A step that goes back (lost work) starts a
        new window."""
        if step is None:
            return
        if self._seen and (step < self._seen[-1][1] or t_s < self._seen[-1][0]):
            self._seen.clear()
        self._seen.append((t_s, step))
        while self._seen[-1][0] - self._seen[0][0] > WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()

    def per_s(self) -> float | None:
        """None until it is known."""
        if len(self._seen) < 2:
            return None
        (t0, s0), (t1, s1) = self._seen[0], self._seen[-1]
        return (s1 - s0) / (t1 - t0) if t1 > t0 and s1 > s0 else None
