"""The queue of events for the core, in the order of their arrival, and the queues of messages to agents.

Events wait while the ledger is written, which may take long. Frequent ones are merged meanwhile: of heartbeats one per node is
kept, and reports of progress are added up per worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import WSCloseCode, web

from holdfast.coordinator.kernel import events as ev
from holdfast.protocol import messages as m
from holdfast.protocol.generation_difference import NOTHING, difference
from holdfast.protocol.wire.frames import encode, encode_all, frames_of

MANY = 10_000
"""So many words wait before those that bring losses add up, too: their steps then have one time."""

AGED_S = 0.01
"""Who waited less is not older for it."""


@dataclass(slots=True)
class QueuedEvent:
    """One event that waits for the core."""

    event: ev.Event
    came_s: float
    """When it came, on the inbox's clock."""
    line: Any = None
    """Of the agent that it came by; None: it came by none."""
    done: asyncio.Future[None] | None = None
    """Set when the event has had its effect; None: nobody waits for that."""

    def aged(self, now_s: float) -> ev.Event:
        """The event with its wait in its age, where it has one."""
        event, waited_s = self.event, now_s - self.came_s
        if waited_s < AGED_S:
            return event
        if isinstance(event, ev.WorkersSay):
            return ev.WorkersSay(event.node, event.reports, waited_s)
        if not isinstance(event, ev.NodeSays):
            return event
        message = event.message
        if isinstance(message, m.FindingsReported):
            older = [msgspec.structs.replace(f, age_s=round(f.age_s + waited_s, 3)) for f in message.findings]
            message = m.FindingsReported(tuple(older))
        return ev.NodeSays(event.node, message)


class Inbox:
    """Events that are queued and not taken yet."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: list[QueuedEvent] = []
        self._count = 0
        self._heard: set[str] = set()
        self._progress: dict[str, tuple[QueuedEvent, int]] = {}
        self._news = asyncio.Event()

    def put(self, event: ev.Event, line: Any = None) -> QueuedEvent | None:
        """Queues an event; None: it was merged with those that wait already."""
        if isinstance(event, ev.WorkersSay):
            self._heard.add(event.node)
            if self._progress:
                left = tuple(report for report in event.reports if not self._adds_up(report))
                if not left:
                    return None
                event = ev.WorkersSay(event.node, left)
            waiting = QueuedEvent(event, self._clock(), line)
            for at, report in enumerate(event.reports):
                if isinstance(report.message, m.Progress):
                    self._progress[report.worker] = waiting, at
                else:  # nothing is merged across it
                    self._progress.pop(report.worker, None)
            self._count += len(event.reports)
        else:
            if isinstance(event, ev.NodeSays):
                # While a write hangs for a minute, every node sends hundreds of these. One is as good a sign of
                # life as all of them.
                if isinstance(event.message, m.Heartbeat) and event.node in self._heard:
                    return None
                self._heard.add(event.node)
            elif isinstance(event, ev.NodeJoined | ev.NodeLost):
                # A node that joins or is lost is a border: merging an event behind it with one before it would
                # move that event to another session.
                self._heard.clear()
                self._progress.clear()
            waiting = QueuedEvent(event, self._clock(), line)
            self._count += 1
        self._waiting.append(waiting)
        self._news.set()
        return waiting

    def wake(self) -> None:
        """Lets `take` return, even without an event."""
        self._news.set()

    async def take(self) -> list[QueuedEvent]:
        """All queued events, as soon as there is one."""
        await self._news.wait()
        self._news.clear()
        waiting, self._waiting, self._count = self._waiting, [], 0
        self._heard.clear()
        self._progress.clear()
        return waiting

    def _adds_up(self, report: m.FromWorker) -> bool:
        """Whether it became part of the same worker's last report, both being of progress in one generation."""
        # Removed first, so that whatever comes of it, a later report never merges with one that is no longer
        # the worker's last.
        found = self._progress.pop(report.worker, None)
        newer = report.message
        if found is None or not isinstance(newer, m.Progress):
            return False
        waiting, at = found
        assert isinstance(waiting.event, ev.WorkersSay)
        reports = waiting.event.reports
        older = reports[at].message
        assert isinstance(older, m.Progress)
        # Steps of two generations may overlap after a rewind. Added up, one of them would be lost.
        if older.generation != newer.generation:
            return False
        # Both bring losses: kept apart while there is room, since each carries the time of its steps.
        tell = (older.losses or older.figures) and (newer.losses or newer.figures)
        if tell and self._count < MANY:
            return False
        both = msgspec.structs.replace(
            newer,
            committed=max(older.committed, newer.committed),
            median_s=newer.median_s if newer.median_s is not None else older.median_s,
            losses=older.losses + newer.losses,
            figures=older.figures + newer.figures,
            spent=older.spent + newer.spent,
        )
        # In the place of the older one, so that nothing between the two is overtaken by it.
        merged = m.FromWorker(report.worker, both, reports[at].age_s)
        waiting.event = ev.WorkersSay(waiting.event.node, (*reports[:at], merged, *reports[at + 1 :]))
        self._progress[report.worker] = waiting, at
        return True


FAREWELL_S = 2.0
"""So long the last words to a connection may take before it is closed anyway."""


async def drain(
    queue: Any,
    socket: web.WebSocketResponse,
    code: Callable[[], WSCloseCode] = lambda: WSCloseCode.OK,
) -> None:
    """Sends what is queued, in order, until cancelled or the other side is gone; after None it closes with the code."""
    try:
        while (data := await queue.get()) is not None:
            await socket.send_bytes(data)
        await socket.close(code=code())
    except (ConnectionError, OSError):
        return


class AgentQueue(asyncio.Queue[bytes | None]):
    """A connection of an agent: what it is sent, in order; None: the end.

    Attributes:
        session: of the agent's last hello. known: the one that the core knows on this node; when the connection ends, it
            is this one that is lost.
        introduced: the core has heard of it; before that, orders are for the agent that it knows.
    """

    def __init__(self, node: str, session: str, transport: asyncio.Transport | None) -> None:
        super().__init__()
        self.node, self.session, self.known, self.transport = node, session, session, transport
        self.introduced = False
        self.base = NOTHING
        """The newest generation that its agent has."""
        self.forms: list[tuple[str, m.JoinGeneration]] = []
        """Orders to join the same generation, of which the agent is sent one `Form`."""
        self.waiting: list[bytes] = []
        """Messages that are to be sent in one frame."""


class AgentLines:
    """The connection that represents each node, and the messages that are sent on it."""

    def __init__(self) -> None:
        self.by_node: dict[str, AgentQueue] = {}
        self.with_copy: set[str] = set()
        """Connected nodes that have a copy of the ledger which may be old: none of its batches were sent to them for a while."""
        self._collected: dict[str, AgentQueue] | None = None
        self._changes: dict[str, msgspec.Raw] = {}
        self._formed: m.Generation | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Collects what is sent within the block. At its end each node is sent one frame, with a generation once for all workers."""
        self._collected = {}
        try:
            yield
        finally:
            lines, self._collected = self._collected, None
            for line in lines.values():
                self._flush(line)

    def send(self, node: str, message: m.ToAgent) -> None:
        """Queues a message for a node's agent, if the core has heard of the one that is connected."""
        # Until the core has heard of this agent, its orders are meant for the one before. A dropped order is
        # repeated when the agent's hello is handled.
        if (line := self.by_node.get(node)) is None or not line.introduced:
            return
        if isinstance(message, m.Relay) and isinstance(message.message, m.JoinGeneration):
            join = message.message
            if line.forms and line.forms[0][1].generation is not join.generation:
                self._form(line)
            line.forms.append((message.worker, join))
        else:
            self._form(line)  # what comes after an order to join must not overtake it
            line.waiting.append(encode(message))
        if self._collected is None:
            self._flush(line)
        else:
            self._collected[node] = line

    def _flush(self, line: AgentQueue) -> None:
        self._form(line)
        for frame in frames_of(line.waiting):
            line.put_nowait(encode_all(frame))
        line.waiting = []

    def _form(self, line: AgentQueue) -> None:
        if not line.forms:
            return
        generation = line.forms[0][1].generation
        # By identity: the core makes one Generation per formation, and nearly all agents have the same one before it.
        if self._formed is not generation:
            self._formed, self._changes = generation, {}
        change: Any = self._changes.get(line.base.digest)
        if change is None:
            change = self._changes[line.base.digest] = msgspec.Raw(encode(difference(line.base, generation)))
        orders = tuple((name, msgspec.structs.replace(join, generation=NOTHING)) for name, join in line.forms)
        line.waiting.append(encode(m.Form(change=change, orders=orders)))
        line.base, line.forms = generation, []
