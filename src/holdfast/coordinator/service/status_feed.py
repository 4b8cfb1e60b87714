"""The status of a running job, kept up to date row by row: what changed since the last look is all that is sent.

A look goes over all nodes and workers, in pieces between which others have their turn. The whole, and a change of many
rows, are put together in another thread, out of rows that no one changes. So neither holds the event loop, however large
the job is, and a job that nobody watches is not looked at.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from holdfast.coordinator.kernel.membership_state import Worker
from holdfast.coordinator.kernel.phases import WorkerPhase
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service import report
from holdfast.protocol.messages import Generation
from holdfast.protocol.wire.status_change import CHANGED, WHOLE, StatusChange

PIECE = 100
"""So many rows are looked at before others have their turn: a millisecond where all of them are made anew."""
MANY = 8 * PIECE
"""So many workers are passed over before others have their turn, where no row is made of them: a tenth of a millisecond. And so
many changed rows are put together at once; more of them, as in a new generation, in another thread."""


class _Row(NamedTuple):
    """What a worker's row was made of, and the row."""

    facts: tuple[Any, ...]
    is_common: bool
    """Its step is the common one, and is left out."""
    encoded: bytes


class _Whole(NamedTuple):
    """The status at one moment: what `StatusFeed` has, and replaces but never changes."""

    head: dict[str, Any]
    common: int | None
    nodes: list[tuple[dict[str, Any], bytes]]
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
        self._nodes: dict[str, tuple[dict[str, Any], bytes]] = {}
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
            head = report.status_head(self._state, self._clock(), *latest)
            told = {k: v for k, v in head.items() if k not in self._head or self._head[k] != v}
            self._head = head
            values = {"head": told, "common": self._common, "gone": gone}
            assert {*values, "nodes", "workers"} == set(StatusChange.__struct_fields__)
            if len(nodes) + len(workers) <= MANY:
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

    def _now(self) -> _Whole:
        return _Whole(self._head, self._common, list(self._nodes.values()), list(self._workers.values()))

    async def _number_members(self) -> None:
        generation = self._state.membership.generation
        # Members of a generation never change, so their ranks are looked up once for each.
        if generation is self._members:
            return
        ranks: dict[str, int] = {}
        members = generation.members if generation else ()
        for begin in range(0, len(members), MANY):
            ranks.update((x.worker, x.rank) for x in members[begin : begin + MANY])
            await asyncio.sleep(0)
        self._members, self._ranks = generation, ranks

    async def _changed_nodes(self) -> list[bytes]:
        found = []
        # A list of its own: in the pauses the core adds nodes, which an iteration of the dict would not survive.
        for number, node in enumerate(list(self._state.membership.nodes.values())):
            if number % PIECE == PIECE - 1:
                await asyncio.sleep(0)
            row = report.node_row(node)
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
        for begin in range(0, len(all_workers), MANY):
            piece = [w for w in all_workers[begin : begin + MANY] if w.phase is not WorkerPhase.GONE]
            counts.update(w.committed for w in piece if w.name in self._ranks)
            there += piece
            await asyncio.sleep(0)
        self._common = counts.most_common(1)[0][0] if counts else None
        found: list[bytes] = []
        names: set[str] = set()
        latest = report.Latest()
        for number, worker in enumerate(there):
            if number % PIECE == PIECE - 1:
                await asyncio.sleep(0)
            names.add(worker.name)
            latest.add(worker, worker.name in self._ranks)
            if (encoded := self._renewed(worker)) is not None:
                found.append(encoded)
        await asyncio.sleep(0)
        gone: list[str] = []
        # Nobody else writes the rows: one look has the lock at a time.
        known = list(self._workers)
        for begin in range(0, len(known), MANY):
            gone += [name for name in known[begin : begin + MANY] if name not in names]
            await asyncio.sleep(0)
        # All of them at once: a whole that is made in a pause has either all who left or none.
        for name in gone:
            del self._workers[name]
        return found, gone, latest.told()

    def _renewed(self, worker: Worker) -> bytes | None:
        """Its row where that is another one than before."""
        rank = self._ranks.get(worker.name)
        restoring = report.is_restoring(self._state, worker)
        restored = worker.restored if restoring else None
        is_common = worker.committed == self._common
        step = None if is_common else worker.committed
        # Compared before a row is made: of thousands of workers a few have changed.
        # Who reads a checkpoint says no bytes, so that it still does is a fact of its own.
        facts = rank, worker.phase, restoring, restored, step, worker.log
        known = self._workers.get(worker.name)
        if known is not None and known.facts == facts and known.is_common == is_common:
            return None
        row = report.worker_row(self._state, worker, rank)
        if is_common:
            del row["step"]
        encoded = msgspec.json.encode(row)
        self._workers[worker.name] = _Row(facts, is_common, encoded)
        return encoded


def _object(values: dict[str, Any], **lists: Iterable[bytes]) -> bytes:
    """A JSON object of these values, and of lists whose rows are encoded already."""
    rows = [b'"%s":[%s]' % (name.encode(), b",".join(encoded)) for name, encoded in lists.items()]
    return b"{%s}" % b",".join([msgspec.json.encode(values)[1:-1], *rows])


def _change(values: dict[str, Any], nodes: list[bytes], workers: list[bytes]) -> bytes:
    """The announcement of these values and rows; see `StatusChange`."""
    return _announced(CHANGED, _object(values, nodes=nodes, workers=workers))


def _announced(kind: str, value: bytes) -> bytes:
    return b'{"kind":%s,"value":%s}' % (msgspec.json.encode(kind), value)
