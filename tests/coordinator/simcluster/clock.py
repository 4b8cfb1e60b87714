"""Virtual time, and links on which messages take a while."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

Call = Callable[..., None]


class Timer:
    """One call in the future."""

    __slots__ = ("args", "call")

    def __init__(self, call: Call, args: tuple[Any, ...]) -> None:
        self.call: Call | None = call
        self.args = args

    def cancel(self) -> None:
        """The call will not happen."""
        self.call = None


class Clock:
    """Runs calls in the order of their times; equal times in the order they were asked for."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.events = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = 0

    def after(self, delay_s: float, call: Call, *args: Any) -> Timer:
        """Calls `call(*args)` in `delay_s` seconds."""
        return self.at(self.now + delay_s, call, *args)

    def at(self, time_s: float, call: Call, *args: Any) -> Timer:
        """Calls `call(*args)` at a time; now, when that is over."""
        timer = Timer(call, args)
        self._order += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._order, timer))
        return timer

    def step(self) -> bool:
        """Runs the next call. False when there is none."""
        while self._heap:
            self.now, _, timer = heapq.heappop(self._heap)
            if timer.call is not None:
                self.events += 1
                timer.call(*timer.args)
                return True
        return False


class Link:
    """One direction of a connection: in order, late by a random time, silent while held, lost when closed."""

    def __init__(self, clock: Clock, latency: Callable[[], float], deliver: Callable[[Any], None]) -> None:
        self._clock = clock
        self._latency = latency
        self._deliver = deliver
        self._last = 0.0
        self._held: deque[Any] | None = None
        self.closed = False

    def send(self, message: Any, draws: bool = True) -> None:
        """The message arrives later, after everything that was sent before it. draws: with a random delay of its own."""
        if not self.closed:
            self._last = max(self._last, self._clock.now + (self._latency() if draws else 0.0))
            self._clock.at(self._last, self._arrive, message)

    def _arrive(self, message: Any) -> None:
        if self.closed:
            return
        if self._held is not None:
            self._held.append(message)
        else:
            self._deliver(message)

    def hold(self) -> None:
        """The network goes silent; what is sent waits in its buffers."""
        if self._held is None:
            self._held = deque()

    def release(self) -> None:
        """The network is back and delivers what it kept."""
        held, self._held = self._held or deque(), None
        for message in held:
            self._arrive(message)

    def close(self) -> None:
        """What is still on its way is lost."""
        self.closed = True
