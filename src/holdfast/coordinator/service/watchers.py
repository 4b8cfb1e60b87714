"""Watchers of a running job: they get events, the status as it changes, and announcements. The cost of a slow watcher is
bounded.

Events are in the ledger, so a watcher that is behind reads on from there, and nothing is queued for it in this process. The
status is made when it is sent. Only announcements and orders are queued, of which there are few.

The status is updated row by row, and only rows that changed since the last update are sent. An update goes over all nodes and
workers in pieces, between which other tasks run. A complete status, or a change of many rows, is put together in another thread
from rows that are never modified. So neither blocks the event loop, however large the job is, and a job that nobody watches is
not looked at.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from holdfast.coordinator.kernel.state import CoreState, Worker, WorkerPhase
from holdfast.coordinator.service import job_view
from holdfast.coordinator.service.ledger import Unreadable
from holdfast.coordinator.service.store import LedgerEntry, Store
from holdfast.protocol.engine_orders import EngineOrder, as_announced, kind_of
from holdfast.protocol.job_report import JobReport
from holdfast.protocol.job_view import CHANGED, COMMON, HEAD, WHOLE, NodeRow, ViewChange
from holdfast.protocol.messages import Generation

_log = logging.getLogger(__name__)

ROWS_AT_ONCE = 100
"""So many rows are looked at before others have their turn: a millisecond where all of them are made anew."""
WORKERS_AT_ONCE = 8 * ROWS_AT_ONCE
"""So many workers are passed over before others have their turn, where no row is made of them: a tenth of a millisecond. And so
many changed rows are put together at once; more of them, as in a new generation, in another thread."""


class _Row(NamedTuple):
    """What a worker's row was made of, and the row."""

    facts: tuple[Any, ...]
    is_common: bool
    """Its step is the common one, and is left out."""
    encoded: bytes


class _Moment(NamedTuple):
    """The status at one moment: what `StatusFeed` has, and replaces but never changes."""

    head: dict[str, Any]
    common: int | None
    nodes: list[tuple[NodeRow, bytes]]
    workers: list[_Row]

    def announcement(self) -> bytes:
        """For those who watch."""
        nodes, workers = (row for _, row in self.nodes), (row.encoded for row in self.workers)
        return _announced(WHOLE, _object(self.head | {"common": self.common}, nodes=nodes, workers=workers))

    def page(self) -> bytes:
        """For whoever asks once: with the step in every row of a worker."""
        start = b'{"step":%s,' % msgspec.json.encode(self.common)
        workers = (start + row.encoded[1:] if row.is_common else row.encoded for row in self.workers)
        return _object(self.head, nodes=(row for _, row in self.nodes), workers=workers)


class StatusFeed:
    """One for all who watch. Each of them knows the `version` that it was sent."""

    def __init__(self, state: CoreState, clock: Callable[[], float]) -> None:
        self.version = 0
        """Counts the looks. 0: there was none yet."""
        self.change = b""
        """The announcement of what the newest version has and the one before it has not."""
        self._state, self._clock = state, clock
        self._head: dict[str, Any] = {}
        self._common: int | None = None
        self._nodes: dict[str, tuple[NodeRow, bytes]] = {}
        self._workers: dict[str, _Row] = {}
        self._members: Generation | None = None
        self._ranks: dict[str, int] = {}
        self._whole: tuple[int, bytes] = (0, b"")
        self._looking, self._writing = asyncio.Lock(), asyncio.Lock()

    async def look(self) -> None:
        """Brings it up to date."""
        # One after the other: two looks that take turns would each send a part of what changed.
        async with self._looking:
            await self._number_members()
            nodes = await self._changed_nodes()
            workers, gone, latest = await self._changed_workers()
            view = job_view.status_head(self._state, self._clock(), *latest)
            head = {name: getattr(view, name) for name in HEAD}
            told = {k: v for k, v in head.items() if k not in self._head or self._head[k] != v}
            self._head = head
            values = {"head": told, "common": self._common, "gone": gone}
            assert {*values, "nodes", "workers"} == set(ViewChange.__struct_fields__)
            if len(nodes) + len(workers) <= WORKERS_AT_ONCE:
                self.change = _change(values, nodes, workers)
            else:
                self.change = await asyncio.to_thread(_change, values, nodes, workers)
            # In the same turn as the change, with none in between: whoever sees a version finds its own change.
            self.version += 1

    async def whole(self) -> tuple[int, bytes]:
        """A version, and the announcement of all of it."""
        # One after the other: who watches the same version is given the same bytes.
        async with self._writing:
            if self._whole[0] != self.version:
                version, now = self.version, self._now()
                self._whole = version, await asyncio.to_thread(now.announcement)
            return self._whole

    async def page(self) -> bytes:
        """The status as JSON, for whoever asks once: with the step in every row of a worker."""
        await self.look()
        return await asyncio.to_thread(self._now().page)

    def _now(self) -> _Moment:
        return _Moment(self._head, self._common, list(self._nodes.values()), list(self._workers.values()))

    async def _number_members(self) -> None:
        generation = self._state.membership.generation
        # Members of a generation never change, so their ranks are looked up once for each.
        if generation is self._members:
            return
        ranks: dict[str, int] = {}
        members = generation.members if generation else ()
        for begin in range(0, len(members), WORKERS_AT_ONCE):
            ranks.update((x.worker, x.rank) for x in members[begin : begin + WORKERS_AT_ONCE])
            await asyncio.sleep(0)
        self._members, self._ranks = generation, ranks

    async def _changed_nodes(self) -> list[bytes]:
        found = []
        # A list of its own: in the pauses the core adds nodes, which an iteration of the dict would not survive.
        for number, node in enumerate(list(self._state.membership.nodes.values())):
            if number % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
                await asyncio.sleep(0)
            row = job_view.node_row(node)
            known = self._nodes.get(node.name)
            if known is None or known[0] != row:
                encoded = msgspec.json.encode(row)
                self._nodes[node.name] = row, encoded
                found.append(encoded)
        return found

    async def _changed_workers(self) -> tuple[list[bytes], list[str], tuple[float | None, float | None]]:
        # A list of its own: in the pauses the core adds and removes workers.
        all_workers = list(self._state.membership.workers.values())
        there: list[Worker] = []
        # What most members have. In a change it is one number, and without it would be a row for each of them.
        counts: Counter[int | None] = Counter()
        for begin in range(0, len(all_workers), WORKERS_AT_ONCE):
            piece = [
                w for w in all_workers[begin : begin + WORKERS_AT_ONCE] if w.phase is not WorkerPhase.GONE
            ]
            counts.update(w.committed for w in piece if w.name in self._ranks)
            there += piece
            await asyncio.sleep(0)
        self._common = counts.most_common(1)[0][0] if counts else None
        found: list[bytes] = []
        names: set[str] = set()
        latest = job_view.Latest()
        for number, worker in enumerate(there):
            if number % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
                await asyncio.sleep(0)
            names.add(worker.name)
            latest.add(worker, worker.name in self._ranks)
            if (encoded := self._renewed(worker)) is not None:
                found.append(encoded)
        await asyncio.sleep(0)
        gone: list[str] = []
        # Nobody else writes the rows: one look has the lock at a time.
        known = list(self._workers)
        for begin in range(0, len(known), WORKERS_AT_ONCE):
            gone += [name for name in known[begin : begin + WORKERS_AT_ONCE] if name not in names]
            await asyncio.sleep(0)
        # All of them at once: a whole that is made in a pause has either all who left or none.
        for name in gone:
            del self._workers[name]
        return found, gone, latest.told()

    def _renewed(self, worker: Worker) -> bytes | None:
        """Its row where that is another one than before."""
        rank = self._ranks.get(worker.name)
        restoring = job_view.is_restoring(self._state, worker)
        restored = worker.restored if restoring else None
        is_common = worker.committed == self._common
        step = None if is_common else worker.committed
        # Compared before a row is made: of thousands of workers a few have changed.
        # Who reads a checkpoint says no bytes, so that it still does is a fact of its own.
        facts = rank, worker.phase, restoring, restored, step, worker.log
        known = self._workers.get(worker.name)
        if known is not None and known.facts == facts and known.is_common == is_common:
            return None
        row = job_view.worker_row(self._state, worker, rank)
        if is_common:
            row = msgspec.structs.replace(row, step=COMMON)
        encoded = msgspec.json.encode(row)
        self._workers[worker.name] = _Row(facts, is_common, encoded)
        return encoded


def _object(values: dict[str, Any], **lists: Iterable[bytes]) -> bytes:
    """A JSON object of these values, and of lists whose rows are encoded already."""
    rows = [b'"%s":[%s]' % (name.encode(), b",".join(encoded)) for name, encoded in lists.items()]
    return b"{%s}" % b",".join([msgspec.json.encode(values)[1:-1], *rows])


def _change(values: dict[str, Any], nodes: list[bytes], workers: list[bytes]) -> bytes:
    """The announcement of these values and rows; see `ViewChange`."""
    return _announced(CHANGED, _object(values, nodes=nodes, workers=workers))


def _announced(kind: str, value: bytes) -> bytes:
    return b'{"kind":%s,"value":%s}' % (msgspec.json.encode(kind), value)


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


class JobWatcher:
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
        self.all: set[JobWatcher] = set()
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

    def announce_end(self, report: JobReport) -> None:
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
