"""Events that wait for the core, in the order in which they came.

They wait while the ledger is written, which may take long. What comes many times a second must not pile up meanwhile: of
signs of life one of each node is enough, and words of progress add up to one of each worker.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.coordinator.kernel import events as ev
from holdfast.protocol import messages as m

MANY = 10_000
"""So many words wait before those that bring losses add up, too: their steps then have one time."""

AGED_S = 0.01
"""Who waited less is not older for it."""


@dataclass(slots=True)
class Waiting:
    """One event that waits for the core."""

    event: ev.Event
    came_s: float
    """When it came, on CLOCK_MONOTONIC."""
    line: Any = None
    """Of the agent that it came by; None: it came by none."""
    done: asyncio.Future[None] | None = None
    """Set when the event has had its effect; None: nobody waits for that."""

    def aged(self, now_s: float) -> ev.Event:
        """The event with its wait in its age, where it has one."""
        event, waited_s = self.event, now_s - self.came_s
        if waited_s < AGED_S or not isinstance(event, ev.NodeSays):
            return event
        message = event.message
        if isinstance(message, m.FromWorker):
            message = m.FromWorker(message.worker, message.message, message.age_s + waited_s)
        elif isinstance(message, m.FindingsReported):
            older = [msgspec.structs.replace(f, age_s=round(f.age_s + waited_s, 3)) for f in message.findings]
            message = m.FindingsReported(tuple(older))
        return ev.NodeSays(event.node, message)


class Inbox:
    """What was put and not taken yet."""

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []
        self._heard: set[str] = set()
        self._progress: dict[str, Waiting] = {}
        self._news = asyncio.Event()

    def put(self, event: ev.Event, line: Any = None) -> Waiting | None:
        """One more; None when it is part of one that waits already."""
        if isinstance(event, ev.NodeSays):
            # While a write hangs for a minute, every node sends hundreds of these. One is as good a sign of
            # life as all of them.
            if isinstance(event.message, m.Heartbeat) and event.node in self._heard:
                return None
            self._heard.add(event.node)
            if isinstance(event.message, m.FromWorker) and self._adds_up(event.node, event.message):
                return None
        elif isinstance(event, ev.NodeJoined | ev.NodeLost):
            # A node that joins or is lost is a border: merging an event behind it with one before it would
            # move that event to another session.
            self._heard.clear()
            self._progress.clear()
        waiting = Waiting(event, time.monotonic(), line)
        self._waiting.append(waiting)
        if (
            isinstance(event, ev.NodeSays)
            and isinstance(message := event.message, m.FromWorker)
            and isinstance(message.message, m.Progress)
        ):
            self._progress[message.worker] = waiting
        self._news.set()
        return waiting

    def wake(self) -> None:
        """Has `take` return, also with nothing."""
        self._news.set()

    async def take(self) -> list[Waiting]:
        """All that waits, as soon as something does."""
        await self._news.wait()
        self._news.clear()
        waiting, self._waiting = self._waiting, []
        self._heard.clear()
        self._progress.clear()
        return waiting

    def _adds_up(self, node: str, message: m.FromWorker) -> bool:
        """Whether it became part of the same worker's last word, both being of progress in one generation."""
        # Removed first, so that whatever comes of it, a later message never merges with one that is no longer
        # the worker's last.
        before = self._progress.pop(message.worker, None)
        if before is None or not isinstance(message.message, m.Progress):
            return False
        assert isinstance(before.event, ev.NodeSays)
        assert isinstance(before.event.message, m.FromWorker)
        older, newer = before.event.message.message, message.message
        assert isinstance(older, m.Progress)
        # Steps of two generations may overlap after a rewind. Added up, one of them would be lost.
        if older.generation != newer.generation:
            return False
        # Both bring losses: kept apart while there is room, since each carries the time of its steps.
        tell = (older.losses or older.figures) and (newer.losses or newer.figures)
        if tell and len(self._waiting) < MANY:
            return False
        both = msgspec.structs.replace(
            newer,
            committed=max(older.committed, newer.committed),
            median_s=newer.median_s if newer.median_s is not None else older.median_s,
            losses=older.losses + newer.losses,
            figures=older.figures + newer.figures,
            spent=older.spent + newer.spent,
        )
        age_s = before.event.message.age_s
        # In the place of the older one, so that nothing between the two is overtaken by it.
        before.event = ev.NodeSays(node, m.FromWorker(message.worker, both, age_s))
        self._progress[message.worker] = before
        return True
