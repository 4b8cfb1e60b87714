"""What a script at level 0 or 1 needs by itself in a step, where nobody knows its phases.

Ranks that train together make their steps together, and torch records the end of none of gloo's collectives. But a thread
that waits in one of them has no processor and asks for none. So what the training thread was on a processor, or in the
queue for one, is its own. That holds on CPUs: beside a GPU the thread may spin while it waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from holdfast.protocol.phases import BLOCK_STEPS, Spent
from holdfast.train.step_timing import mean_without_longest


class ThreadClock:
    """Seconds that the calling thread was on a processor, or waited for one."""

    def __init__(self) -> None:
        # The link is followed once: what is read later is still of the thread that opened it. It stays open as long
        # as the process lives.
        try:
            self._waits = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._waits = -1

    def __call__(self) -> float:
        """Call it in the thread that made the clock. A kernel without counts of waits leaves them out."""
        fields = os.pread(self._waits, 64, 0).split() if self._waits >= 0 else []
        return time.thread_time() + (int(fields[1]) / 1e9 if len(fields) > 1 else 0.0)


class OwnTime:
    """Blocks of steps, as `StepTimer` has them at level 2."""

    def __init__(self, own: Callable[[], float], wall: Callable[[], float] = time.perf_counter) -> None:
        """own: a clock of what counts; wall: of all time."""
        self._own, self._wall = own, wall
        self._last: tuple[float, float] | None = None
        self._steps: list[tuple[float, float]] = []

    def stepped(self, step: int) -> Spent | None:
        """An optimizer step with this number, from 0, is made. Returns the block that it completes, if there is one."""
        own_s, wall_s = self._own(), self._wall()
        last, self._last = self._last, (own_s, wall_s)
        if step % BLOCK_STEPS == 0:
            self._steps = []
        if last is None:  # this step began with the script's imports
            return None
        self._steps.append((own_s - last[0], wall_s - last[1]))
        if len(self._steps) < BLOCK_STEPS or (step + 1) % BLOCK_STEPS:
            return None
        own, whole = (mean_without_longest(parts) for parts in zip(*self._steps, strict=True))
        return Spent(
            first=step + 1 - BLOCK_STEPS,
            micros=1,
            data_s=0.0,
            forward_s=0.0,
            backward_s=0.0,
            wait_s=max(0.0, whole - own),
            update_s=0.0,
            aside_s=0.0,
            thread_s=own,
        )


def trains_on_cpu(optimizer: Any) -> bool:
    """Whether all that it updates lies there."""
    return all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
