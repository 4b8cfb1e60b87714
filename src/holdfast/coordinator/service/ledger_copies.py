"""Copies of the ledger at agents, where its file ends with the coordinator's machine.

Each page goes to a few agents in the moment in which it is given to the writer, before anything that it decides is done. An
agent that becomes one of them is sent a copy of the file first. A successor asks all agents and goes on from the newest copy
(`service.gathering`). Nobody waits for an agent: a successor that lacks the last page is told again what happened since, as
one whose predecessor died before it could write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.coordinator.service.agent_lines import AgentLines, Line
from holdfast.coordinator.service.ledger import Unreadable
from holdfast.coordinator.service.store import Page
from holdfast.protocol import messages as m
from holdfast.protocol.ledger_mark import LedgerMark
from holdfast.protocol.node_place import NodePlace

_log = logging.getLogger(__name__)
PART_BYTES = 4 << 20
BASE_AGAIN_BYTES = 64 << 20
"""After so many bytes of pages a holder is sent a new base: what it keeps does not grow with the job's length."""
_encoder = msgspec.msgpack.Encoder()


@dataclass
class _Keeper:
    """An agent that keeps a copy."""

    line: Line
    waiting: list[m.KeepLedger] = field(default_factory=list)
    """Pages that come after its base, while that is being read."""
    has_base: bool = False
    nbytes: int = 0
    """Of pages since its base."""


class LedgerCopies:
    """`on_page` for each page, `choose` whenever nodes may have come or gone."""

    def __init__(
        self, *, count: int, term: int, lines: AgentLines, read_base: Callable[[], Awaitable[bytes]]
    ) -> None:
        """count: of copies; 0: none are kept. read_base: a copy of the file, with all pages that were given before."""
        self._count, self._term, self._lines, self._read_base = count, term, lines, read_base
        self._keepers: dict[str, _Keeper] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._page = 0

    def on_page(self, number: int, page: Page) -> None:
        """Sends it to those who keep a copy."""
        self._page = number
        if not self._keepers:
            return
        data = _encoder.encode(page)
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

    def choose(self, places: Callable[[], Mapping[str, NodePlace]]) -> None:
        """Keeps as many copies as are wanted on nodes that live. places: of these nodes; asked only where one is missing."""
        if not self._count:
            return
        # An agent that has connected again missed pages meanwhile.
        self._keepers = {
            node: keeper
            for node, keeper in self._keepers.items()
            if self._lines.by_node.get(node) is keeper.line
        }
        if len(self._keepers) >= self._count:
            return
        lines = {node: line for node, line in self._lines.by_node.items() if line.introduced}
        there = {node: place for node, place in places().items() if node in lines}
        for node in new_keepers(there, self._keepers, self._count):
            keeper = self._keepers[node] = _Keeper(lines[node])
            self._begin(node, keeper)

    def close(self) -> None:
        """Nothing more is sent."""
        for task in self._tasks:
            task.cancel()

    def _begin(self, node: str, keeper: _Keeper) -> None:
        keeper.has_base, keeper.nbytes = False, 0
        # Taken here and not when the task runs: pages from now on wait with the keeper. One that came in between would
        # be in the base's mark and also follow it, and a copy that gets a page twice is given up.
        # The file may have pages that also wait. Its reader knows which: a page's number is in it.
        mark = LedgerMark(self._term, self._page)
        task = asyncio.create_task(self._give_base(node, keeper, mark))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give_base(self, node: str, keeper: _Keeper, mark: LedgerMark) -> None:
        try:
            data = await self._read_base()
        except Unreadable as error:
            _log.warning("no copy of the ledger for %s: %s", node, error)
            self._keepers.pop(node, None)
            return
        # It may have been replaced while the base was read, by a new connection of the same node. Pages for
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


def new_keepers(places: Mapping[str, NodePlace], keepers: Iterable[str], count: int) -> list[str]:
    """Who is to keep copies beside those that do: first where none stands yet (another zone, another rack), so that one switch
    takes the fewest. Pure."""
    chosen, found = [places[node] for node in keepers if node in places], []
    left = sorted(set(places) - set(keepers))
    while left and len(chosen) < count:
        # One at a time: where the first copy goes changes which place is the furthest for the second.
        node = min(left, key=lambda name: (_shared(places[name], chosen), name))
        left.remove(node)
        found.append(node)
        chosen.append(places[node])
    return found


def _shared(place: NodePlace, others: Iterable[NodePlace]) -> int:
    """How many levels of its place the nearest of others shares."""
    most = 0
    for other in others:
        same = 0
        for mine, theirs in zip(place, other, strict=False):
            if mine != theirs:
                break
            same += 1
        most = max(most, same)
    return most


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
