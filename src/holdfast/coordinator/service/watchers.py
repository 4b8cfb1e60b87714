"""Who watches a running job: events, the status as it changes, and words. What one who reads slowly costs has a bound.

Events are in the ledger, so a watcher that is behind reads on from there, and nothing is kept for it in this process. The
status is made from what there is when it is sent. What is left to be queued are words and orders, of which there are few.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from holdfast.coordinator.service.ledger import Unreadable
from holdfast.coordinator.service.status_feed import StatusFeed
from holdfast.coordinator.service.store import LedgerEntry, Store
from holdfast.protocol.engine_orders import EngineOrder, as_announced, kind_of

_log = logging.getLogger(__name__)

STATUS_EVERY_S = 0.2
STATUS_SHARE = 20
"""A look at the status of a large job is followed by a pause of so many times its length: a twentieth of a core at most."""
QUEUE_BYTES = 256 * 1024
"""Queued for one watcher at most; and so much of the ledger is read for it at once."""
PIECE = 16
"""So many announcements are sent to one watcher before others have their turn: usually half a millisecond. Each is a call of the
kernel, and where that wakes the reader up a call takes 80 microseconds."""

Reading = Callable[[Callable[[Store], Any]], Awaitable[Any]]


class _Queued(NamedTuple):
    data: bytes
    seq: int
    """Of an event; 0: it is none."""
    must_arrive: bool


class Watcher:
    """Somebody who watches. Its sender is `send`; everything else only queues, or wakes it."""

    def __init__(self, after: int) -> None:
        """after: number of the newest event that it has."""
        self._sent, self._shown = after, 0
        self._queue: deque[_Queued] = deque()
        self._nbytes = 0
        self._woken = asyncio.Event()
        # At first it has nothing of what happened: the past is read from the ledger, as all that it misses later.
        self._behind, self._dropped = True, False
        self._ends = self._lost = False
        self._said = 0

    def tell(self, data: bytes, seq: int = 0, must_arrive: bool = True) -> None:
        """Queues an announcement. seq: of an event. must_arrive: the connection is given up before this is left out."""
        if 0 < seq <= self._sent:
            return
        self._queue.append(_Queued(data, seq, must_arrive and not seq))
        self._nbytes += len(data)
        if self._nbytes > QUEUE_BYTES:
            self._make_room()
        self._woken.set()

    def _make_room(self) -> None:
        # Events are in the ledger. Words are not, and nothing depends on them.
        kept = [one for one in self._queue if one.must_arrive]
        self._queue = deque(kept)
        self._nbytes = sum(len(one.data) for one in kept)
        self._behind = self._dropped = True
        # Orders that nobody takes. Whoever connects again is given all that are open, so none of them is lost.
        self._lost = self._nbytes > QUEUE_BYTES

    def end(self) -> None:
        """Nothing more is announced: it is sent what is queued, and closed."""
        self._ends = True
        self._woken.set()

    def wake(self) -> None:
        """There is another status."""
        self._woken.set()

    async def send(self, socket: web.WebSocketResponse, read: Reading, feed: StatusFeed) -> WSCloseCode:
        """Sends until the end, or until it is cancelled; how to close the connection."""
        while not self._lost:
            self._woken.clear()
            if self._behind:
                await self._read_on(socket, read)
            elif self._queue:
                await self._next(socket)
            elif self._ends:
                return WSCloseCode.OK
            elif feed.version > self._shown:
                # From the version before, the change is the same for all who keep up. Who does not gets all of it.
                if feed.version == self._shown + 1 and self._shown:
                    self._shown, text = feed.version, feed.change
                else:
                    self._shown, text = await feed.whole()
                await self._say(socket, text)
            else:
                await self._woken.wait()
        return WSCloseCode.TRY_AGAIN_LATER

    async def _next(self, socket: web.WebSocketResponse) -> None:
        one = self._queue.popleft()
        self._nbytes -= len(one.data)
        if one.seq:
            # Read from the ledger already: an event may be written, read and announced in any order of the last two.
            if one.seq <= self._sent:
                return
            self._sent = one.seq
        await self._say(socket, one.data)

    async def _say(self, socket: web.WebSocketResponse, text: bytes) -> None:
        # As the bytes that it is: as a string it would be decoded and encoded again, and a whole status has megabytes.
        await socket.send_frame(text, WSMsgType.TEXT)
        # A socket with room takes thousands without a pause, and nobody else would have a turn.
        self._said += 1
        if self._said % PIECE == 0:
            await asyncio.sleep(0)

    async def _read_on(self, socket: web.WebSocketResponse, read: Reading) -> None:
        self._dropped = False
        try:
            found, more = await read(lambda store: _past(store, self._sent))
        except Unreadable as error:
            # A ledger that cannot be read is no reason to see nothing: the live events follow.
            self._behind = False
            await self._say(socket, announcement("log", {"text": str(error)}))
            return
        for seq, data in found:
            self._sent = seq
            await self._say(socket, data)
        # One that was left out of the queue meanwhile may be newer than what was read.
        self._behind = more or self._dropped


class Watchers:
    """All who watch. `feed`: the status."""

    def __init__(self, feed: StatusFeed, keepers: Iterable[str] = ()) -> None:
        """keepers: of the coordinator before this one."""
        self.all: set[Watcher] = set()
        self.feed = feed
        self._status_due: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._again, self._pause_s = False, STATUS_EVERY_S
        self.also: Callable[[], None] = lambda: None
        """Called where something may be different from before: the page tells its viewers in its own time."""
        self.last: bytes | None = None
        """How the job ended: the last announcement, also to whoever comes after it; None: it runs."""
        self.keepers = set(keepers)
        """Who asked for the ledger at the end and has not left in order: connected, or cut off and about to come again. By
        the name that each has chosen: one whose connection broke is not counted twice."""
        self.served = asyncio.Event()
        """One of them has the ledger."""
        self.engines: set[asyncio.Event] = set()
        """Set at each new order: an engine's connection, which reads all open ones then."""

    def announce_end(self, report: dict[str, Any]) -> None:
        """The last announcement."""
        self.last = announcement("ended", report)
        for watcher in self.all:
            watcher.tell(self.last)

    def announce(self, kind: str, value: Any) -> None:
        if kind == "event":
            self.also()
        # Nothing is encoded if nobody watches; most jobs run for most of their time without anybody looking.
        if self.all:
            data = announcement(kind, value)
            seq = value.seq if isinstance(value, LedgerEntry) else 0
            for watcher in self.all:
                watcher.tell(data, seq, must_arrive=kind != "log")

    def announce_order(self, order: EngineOrder) -> None:
        """To whoever watches, and to engines that wait for orders alone."""
        self.announce(kind_of(order), as_announced(order))
        for news in self.engines:
            news.set()

    def say(self, text: str) -> None:
        """Something about the coordinator itself: for whoever looks on, and for the log."""
        _log.info("%s", text)
        self.announce("log", {"text": text})

    def plan_status(self) -> None:
        self.also()
        if not self.all:
            return
        # At most five times a second, whatever happens, and less often where a look takes long.
        if self._looking is not None:
            self._again = True
        elif self._status_due is None:
            self._status_due = asyncio.get_running_loop().call_later(self._pause_s, self._begin_look)

    def _begin_look(self) -> None:
        self._status_due = None
        self._looking = asyncio.create_task(self._look_again())

    async def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            began = loop.time()
            self._again = False
            await self.look()
            self._pause_s = max(STATUS_EVERY_S, STATUS_SHARE * (loop.time() - began))
        finally:
            self._looking = None
        # Something happened behind the place that the look had come to.
        if self._again:
            self.plan_status()

    async def look(self) -> None:
        """The status as it is now, for all who watch."""
        await self.feed.look()
        for watcher in self.all:
            watcher.wake()

    def end(self) -> None:
        """All are sent what is queued for them, and closed."""
        for watcher in self.all:
            watcher.end()
        self.close()

    def close(self) -> None:
        """No status is made any more."""
        if self._status_due is not None:
            self._status_due.cancel()
        if self._looking is not None:
            self._looking.cancel()


def announcement(kind: str, value: Any) -> bytes:
    return msgspec.json.encode({"kind": kind, "value": value})


def _past(store: Store, after: int) -> tuple[list[tuple[int, bytes]], bool]:
    """Events after a number as they are announced, up to a bound in bytes; and whether there are more."""
    found: list[tuple[int, bytes]] = []
    nbytes = 0
    for seq, t_s, utc, kind, fields in store.raw_entries_after(after):
        # The fields are JSON already, and are sent as they are.
        entry = LedgerEntry(seq=seq, t_s=t_s, utc=utc, kind=kind, fields=msgspec.Raw(fields.encode()))
        found.append((seq, announcement("event", entry)))
        nbytes += len(found[-1][1])
        if nbytes > QUEUE_BYTES:
            return found, True
    return found, False
