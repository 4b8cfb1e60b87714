"""Copies of the ledger at agents, where its file ends with the coordinator's machine.

Each page goes to a few agents in the moment in which it is given to the writer, before anything that it decides is done. An
agent that becomes one of them is sent a copy of the file first. A successor asks all agents and goes on from the newest copy
(`service.gathering`). Nobody waits for an agent: a successor that lacks the last page is told again what happened since, as
one whose predecessor died before it could write.

A node that is lost keeps nothing that a successor could ask for, so another one takes its place at once. Its connection does not
say so: to a machine without power it may stand for a quarter of an hour. A node that comes back has missed pages meanwhile. It is
told to keep none, or a successor that hears it first would go on from an old ledger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.coordinator.kernel.membership_state import Node
from holdfast.coordinator.service.agent_lines import AgentLines, Line
from holdfast.coordinator.service.ledger import Unreadable
from holdfast.coordinator.service.store import Page
from holdfast.protocol import messages as m
from holdfast.protocol.messages import LedgerMark
from holdfast.protocol.place import nearness

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
        self,
        *,
        count: int,
        term: int,
        machine: str,
        lines: AgentLines,
        read_base: Callable[[], Awaitable[bytes]],
    ) -> None:
        """count: of copies; 0: none are kept. machine: the identity of this one; empty: not known. read_base: a copy of the file, with
        all pages that were given before."""
        self._count, self._term, self._machine = count, term, machine
        self._lines, self._read_base = lines, read_base
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
        # An agent that has connected again missed pages meanwhile.
        same = self._lines.by_node.get(node) is self._keepers[node].line
        return same and node in nodes and nodes[node].alive

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
            # What it has is older than what others will have.
            if self._keepers.get(node) is keeper:
                del self._keepers[node]
                self._lines.with_copy.add(node)
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
