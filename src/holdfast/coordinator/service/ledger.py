"""The ledger beside the event loop: one thread writes it, another reads it. Also its copies at agents.

A disk that is full, read-only, broken or gone must not cost a job anything. So a failed write is repeated for as long as the
job lives, and a write that hangs blocks only its own thread. Meanwhile everything that is to be written is added to one batch.
When the disk works again, the ledger gets all of it, in order.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.coordinator.kernel.state import Node
from holdfast.coordinator.service.queues import AgentLines, AgentQueue
from holdfast.coordinator.service.store import BATCHES, LedgerBatch, Store
from holdfast.coordinator.service.tally import StepSummary
from holdfast.errors import HoldfastError
from holdfast.protocol import messages as m
from holdfast.protocol.messages import LedgerMark
from holdfast.protocol.place import nearness

_log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 0.5
SLOW_S = 5.0
"""A write that takes longer is said to hang. Nothing depends on it but what people are told."""

READ_S = 20.0
CLOSE_S = 2.0
FAILURES = (sqlite3.Error, OSError, MemoryError)


class Unreadable(HoldfastError):
    """The ledger could not be read."""


class Ledger:
    """The writing side of a store, for one event loop. `trouble` is called with the reason when it cannot be written, and with
    None when it can again."""

    def __init__(
        self,
        path: Path,
        shared: bool,
        open_store: Callable[[], Store],
        trouble: Callable[[str | None], None],
        also: Callable[[int, LedgerBatch], None] = lambda number, batch: None,
        thread: Callable[[str], SideThread] | None = None,
    ) -> None:
        """shared: as for `Store`; then nobody else may open the file, and it is read between two writes.

        open_store: opens it for writing. Raises sqlite3.Error where that cannot be done now. also: is given each batch with its
        number, before it is written. thread: starts one by its name; None: a `SideThread`.
        """
        thread = thread or SideThread
        self._path, self._open, self._trouble, self._also = path, open_store, trouble, also
        # Opened at once, on the loop's thread: a ledger that cannot be opened at the start must fail the
        # start, and not the first write.
        self._store: Store | None = open_store()
        self._batches = self._store.batches()
        self._next = LedgerBatch()
        self._waiting: list[asyncio.Future[None]] = []
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._under_way: LedgerBatch | None = None
        # One thread for writing: SQLite's connection is used by one at a time, and batches keep their order
        # without a lock.
        self._pen = thread("ledger")
        # On a shared file system a second connection would need shared memory between processes, which does
        # not exist there, so reading takes turns with writing.
        self._eye = self._pen if shared else thread("ledger-reader")
        self._shared = shared
        self._writing: asyncio.Task[None] | None = None
        self.why: str | None = None
        """Why it cannot be written now; None: it can."""

    @property
    def store(self) -> Store:
        """For the time before anything else is done with it."""
        assert self._store is not None
        return self._store

    def write(self, batch: LedgerBatch) -> asyncio.Future[None]:
        """Has a batch written after those before it. The future is done when it is in the file. It fails only for a batch that
        never can be there, whatever the disk does."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # In the batch itself: whoever puts a copy and later batches together knows which of them the copy has.
        self._batches += 1
        batch.kept[BATCHES] = msgspec.msgpack.encode(self._batches)
        self._also(self._batches, batch)
        # Batches that wait become one. After an hour of a full disk everything is written in one transaction,
        # in order, with nothing missing.
        self._next.add(batch)
        self._waiting.append(written)
        self._idle.clear()
        self._news.set()
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        return written

    async def written(self, within_s: float) -> bool:
        """Waits until everything that was passed to `write` is in the file. Returns whether that was in time."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def read(self, what: Callable[[Store], T]) -> T:
        """Reads on a thread: everything is seen that was given before, if it can be written.

        Raises:
            Unreadable: it cannot be read, or not within `READ_S`.
        """
        # Reading waits for what was given before it, but not for a disk that is known to be broken: what can
        # be read then is better than nothing.
        if self.why is None:
            await self.written(SLOW_S)
        reading: asyncio.Future[T] = self._eye.do(lambda: self._read(what))
        try:
            async with asyncio.timeout(READ_S):
                await asyncio.wait([reading])
            return reading.result()
        except (*FAILURES, TimeoutError) as error:
            told = str(error) or f"no answer for {READ_S:g} s"
            raise Unreadable(f"the ledger {self._path} cannot be read: {told}") from error

    def unwritten(self) -> LedgerBatch:
        """The rows that are not known to be in the file."""
        batch = LedgerBatch()
        for part in (self._under_way, self._next):
            if part is not None:
                batch.add(part)
        return batch

    async def summary(self) -> StepSummary:
        """Of all committed steps: those of the file, and those that it could not take yet. Raises Unreadable."""
        left = LedgerBatch(steps=self.unwritten().steps)
        return await self.read(lambda store: store.summary(left))

    async def incidents(self, until: int) -> list[dict[str, Any]]:
        """See `Store.incidents`; with those that the file could not take yet. Raises Unreadable."""
        left = self.unwritten()
        return await self.read(lambda store: store.incidents(until, left))

    async def close(self, within_s: float) -> bool:
        """Ends it; whether everything was written."""
        done = await self.written(within_s)
        if self._writing is not None:
            self._writing.cancel()
        closing = self._pen.do(self._close)
        try:
            async with asyncio.timeout(CLOSE_S):
                await closing
        except (*FAILURES, TimeoutError):
            pass
        self._pen.end()
        self._eye.end()
        return done

    # ------------------------------------------------------------ on the event loop

    async def _write_all(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            batch, self._next = self._next, LedgerBatch()
            waiting, self._waiting = self._waiting, []
            self._under_way = batch
            try:
                # For as long as the job lives. Giving up would be a decision to lose the ledger, and nobody
                # here may take that.
                while not await self._try(batch):  # noqa: ASYNC110 - there is no event for "the disk has room again"
                    await asyncio.sleep(RETRY_S)
            except Exception as error:  # noqa: BLE001 - it cannot be written at any time: of whoever waits for it
                # A batch that can never be written (a value that SQLite refuses) is not retried for ever.
                # Whoever waits for it gets the error; the batches after it go on.
                for written in waiting:
                    written.set_exception(error)
                waiting = []
            self._under_way = None
            self._say(None)
            for written in waiting:
                if not written.done():
                    written.set_result(None)
            if not self._waiting:
                self._idle.set()

    async def _try(self, batch: LedgerBatch) -> bool:
        attempt = asyncio.ensure_future(self._pen.do(self._put, batch))
        # The attempt is not cancelled: the thread hangs in the disk and cannot be interrupted. It is only
        # reported, and then awaited.
        done, _ = await asyncio.wait([attempt], timeout=SLOW_S)
        if not done:
            self._say(f"no answer for {SLOW_S:g} s")
            await asyncio.wait([attempt])
        error = attempt.exception()
        if error is None:
            return True
        if not isinstance(error, FAILURES):
            raise error
        self._say(str(error) or type(error).__name__)
        return False

    def _say(self, why: str | None) -> None:
        before, self.why = self.why, why
        # Trouble is reported when it begins and when it ends, not for every attempt.
        if (before is None) != (why is None):
            self._trouble(why)

    # ------------------------------------------------------------ on the threads

    def _put(self, batch: LedgerBatch) -> None:
        if self._store is None:
            self._store = self._open()
        try:
            self._store.write(batch)
        except sqlite3.Error as error:
            # A full disk leaves the connection intact, so nothing is thrown away. After any other error it
            # may be the connection that is broken.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_FULL:
                # What was wrong may be of this connection: a file system that was mounted again is another one.
                store, self._store = self._store, None
                store.close()
            raise

    def _read(self, what: Callable[[Store], T]) -> T:
        if self._shared:
            if self._store is None:
                self._store = self._open()
            return what(self._store)
        store = Store(self._path, read_only=True)
        try:
            return what(store)
        finally:
            store.close()

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()


class SideThread:
    """Runs calls on a thread, one after the other. The process does not wait for the thread when it ends, because the thread
    may hang in a disk."""

    def __init__(self, name: str) -> None:
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        # A daemon thread, not one of an executor: Python would join the latter at exit, and a thread that
        # hangs in a disk never ends.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def do(self, what: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Calls it there; the result, or what it raised, comes in the future."""
        if not self._started:
            self._started = True
            self._thread.start()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._todo.put((lambda: what(*args), future))
        return future

    def end(self) -> None:
        """Nothing more is to be done."""
        self._todo.put(None)

    def _run(self) -> None:
        while (todo := self._todo.get()) is not None:
            what, future = todo
            try:
                result, error = what(), None
            except BaseException as raised:  # noqa: BLE001 - of whoever waits for it
                result, error = None, raised
            try:
                future.get_loop().call_soon_threadsafe(_tell, future, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return


def _tell(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


PART_BYTES = 4 << 20
BASE_AGAIN_BYTES = 64 << 20
"""After so many bytes of batches a holder is sent a new base: what it keeps does not grow with the job's length."""
_encoder = msgspec.msgpack.Encoder()


# ---------------------------------------------------------------- ledger copies
# Copies of the ledger at agents, where its file ends with the coordinator's machine.
#
# Each batch goes to a few agents in the moment in which it is given to the writer, before anything that it decides is done.
# An agent that becomes one of them is sent a copy of the file first. A successor asks all agents and goes on from the
# newest copy (`service.gathering`). Nobody waits for an agent: a successor that lacks the last batch is told again what
# happened since, as one whose predecessor died before it could write.
#
# A node that is lost keeps nothing that a successor could ask for, so another one takes its place at once. Its connection
# does not say so: to a machine without power it may stand for a quarter of an hour. A node that comes back has missed batches
# meanwhile. It is told to keep none, or a successor that hears it first would go on from an old ledger.


@dataclass
class _Keeper:
    """An agent that keeps a copy."""

    line: AgentQueue
    waiting: list[m.KeepLedger] = field(default_factory=list)
    """Batches that come after its base, while that is being read."""
    has_base: bool = False
    nbytes: int = 0
    """Of batches since its base."""


class LedgerCopies:
    """Sends the ledger to agents that keep a copy. Call `on_batch` for each batch, and `choose` whenever nodes may have come or
    gone."""

    def __init__(
        self,
        *,
        count: int,
        term: int,
        machine: str,
        lines: AgentLines,
        read_base: Callable[[], Awaitable[bytes]],
    ) -> None:
        """count: of copies; 0: none are kept. machine: the identity of this one; empty: not known. read_base: a copy of the file, with
        all batches that were given before."""
        self._count, self._term, self._machine = count, term, machine
        self._lines, self._read_base = lines, read_base
        self._keepers: dict[str, _Keeper] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._batch = 0

    def on_batch(self, number: int, batch: LedgerBatch) -> None:
        """Sends it to those who keep a copy."""
        self._batch = number
        if not self._keepers:
            return
        data = _encoder.encode(batch)
        parts = _parts(LedgerMark(self._term, number), data, base=False)
        for node, keeper in self._keepers.items():
            # Sent now, it would arrive before the base that it continues, and a copy with a hole is none.
            if not keeper.has_base:
                keeper.waiting += parts
                continue
            self._send(node, keeper, parts)
            keeper.nbytes += len(data)
            if keeper.nbytes > BASE_AGAIN_BYTES:
                self._begin(node, keeper)

    def choose(self, nodes: Mapping[str, Node]) -> None:
        """Keeps as many copies as are wanted. nodes: the job's, by name; all of them are looked at only where a copy is missing."""
        keepers = {node: keeper for node, keeper in self._keepers.items() if self._keeps(nodes, node)}
        self._lines.with_copy.update(self._keepers.keys() - keepers.keys())
        self._keepers = keepers
        self._begin_missing(nodes)
        self._end_others()

    def _begin_missing(self, nodes: Mapping[str, Node]) -> None:
        if sum(not _is_on(self._machine, nodes[node]) for node in self._keepers) >= self._count:
            return
        there = {
            node: nodes[node]
            for node, line in self._lines.by_node.items()
            if line.introduced and node in nodes and nodes[node].alive
        }
        for node in wanted_keepers(there, self._keepers, self._count, self._machine):
            if node not in self._keepers:
                keeper = self._keepers[node] = _Keeper(self._lines.by_node[node])
                self._begin(node, keeper)

    def _end_others(self) -> None:
        """Those who have an older copy, of an earlier coordinator or from before they were lost, keep none from now on."""
        # Not before there are newer ones: a machine that is lost in between must leave one behind.
        if not self._keepers or not all(keeper.has_base for keeper in self._keepers.values()):
            return
        for node in list(self._lines.with_copy):
            line = self._lines.by_node.get(node)
            # One without a connection says in its next hello what it has.
            if line is None or node in self._keepers:
                self._lines.with_copy.discard(node)
            elif line.introduced:
                self._lines.with_copy.discard(node)
                self._lines.send(node, m.KeepLedger(mark=LedgerMark(), data=b"", base=True))

    def _keeps(self, nodes: Mapping[str, Node], node: str) -> bool:
        # An agent that has connected again missed batches meanwhile.
        same = self._lines.by_node.get(node) is self._keepers[node].line
        return same and node in nodes and nodes[node].alive

    def close(self) -> None:
        """Nothing more is sent."""
        for task in self._tasks:
            task.cancel()

    def _begin(self, node: str, keeper: _Keeper) -> None:
        keeper.has_base, keeper.nbytes = False, 0
        # Taken here and not when the task runs: batches from now on wait with the keeper. One that came in between would
        # be in the base's mark and also follow it, and a copy that gets a batch twice is given up.
        # The file may have batches that also wait. Its reader knows which: a batch's number is in it.
        mark = LedgerMark(self._term, self._batch)
        task = asyncio.create_task(self._give_base(node, keeper, mark))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give_base(self, node: str, keeper: _Keeper, mark: LedgerMark) -> None:
        try:
            data = await self._read_base()
        except Unreadable as error:
            _log.warning("no copy of the ledger for %s: %s", node, error)
            # What it has is older than what others will have.
            if self._keepers.get(node) is keeper:
                del self._keepers[node]
                self._lines.with_copy.add(node)
            return
        # It may have been replaced while the base was read, by a new connection of the same node. Batches for
        # that one wait with its own keeper, and a base from here would come before them.
        if self._keepers.get(node) is keeper:
            keeper.has_base = True
            waiting, keeper.waiting = keeper.waiting, []
            self._send(node, keeper, [*_parts(mark, data, base=True), *waiting])

    def _send(self, node: str, keeper: _Keeper, parts: Iterable[m.KeepLedger]) -> None:
        if self._lines.by_node.get(node) is not keeper.line:
            return  # it is gone, which `choose` hears of
        for part in parts:
            self._lines.send(node, part)


def wanted_keepers(nodes: Mapping[str, Node], keepers: Iterable[str], count: int, machine: str) -> list[str]:
    """Who is to keep copies: those who do, and then others. nodes: that can. machine: the coordinator's. Pure.

    A copy on the coordinator's machine is lost with it, so it counts only where there is no other. Each further one goes where none
    stands yet (another zone, another rack, another machine), so that one switch takes the fewest.
    """
    found = [node for node in keepers if not _is_on(machine, nodes[node])][:count]
    left = sorted(set(nodes) - set(found))
    while left and len(found) < count:
        # One at a time: where the first copy goes changes which place is the furthest for the second.
        chosen = [nodes[node] for node in found]
        node = min(left, key=lambda name: (*_nearness(nodes[name], chosen, machine), name))
        left.remove(node)
        found.append(node)
    return found


def _is_on(machine: str, node: Node) -> bool:
    return bool(machine) and node.identity == machine


def _nearness(node: Node, chosen: Sequence[Node], machine: str) -> tuple[bool, bool, int]:
    """Whether it is lost with the coordinator's machine, or with one of others; how many levels of its place the nearest of
    them shares."""
    machines = {other.identity for other in chosen}
    return (
        _is_on(machine, node),
        bool(node.identity) and node.identity in machines,
        max((nearness(node.place, other.place) for other in chosen), default=0),
    )


def _parts(mark: LedgerMark, data: bytes, base: bool) -> list[m.KeepLedger]:
    """A frame of the connection has 16 MiB at most."""
    cuts = range(0, max(1, len(data)), PART_BYTES)
    return [
        m.KeepLedger(
            mark=mark,
            data=data[at : at + PART_BYTES],
            base=base,
            begins=at == 0,
            more=at + PART_BYTES < len(data),
        )
        for at in cuts
    ]
