"""The threads that use a disk: their calls take a while, fail or hang, and what was not answered may be lost."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simcluster.clock import Clock

from holdfast.coordinator.service.ledger import _tell
from virtual.loop import VirtualLoop


@dataclass
class Disk:
    """What a machine's disk does, by the thread's name."""

    clock: Clock
    draw: Callable[[str], float]
    """A random number of [0, 1) by a label."""
    write_s: float = 0.002
    fails_until_s: float = 0.0
    hangs_until_s: float = 0.0
    errors: int = 0
    hung: int = 0


@dataclass
class _Call:
    what: Callable[[], Any]
    future: asyncio.Future[Any]


class DiskThread:
    """Instead of a `SideThread`: the call is made by the clock, in one go, when the disk has answered."""

    def __init__(self, disk: Disk, loop: VirtualLoop, name: str) -> None:
        self._disk, self._loop, self.name = disk, loop, name
        self._todo: deque[_Call] = deque()
        self._busy: _Call | None = None
        loop.at_end.append(self._on_end)

    def do(self, what: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """See `SideThread.do`."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._todo.append(_Call(lambda: what(*args), future))
        if self._busy is None:
            self._next()
        return future

    def end(self) -> None:
        """See `SideThread.end`."""

    def _next(self) -> None:
        if not self._todo:
            return
        disk, clock = self._disk, self._disk.clock
        call = self._busy = self._todo.popleft()
        answered_s = clock.now + disk.write_s * (0.2 + 1.6 * disk.draw(f"{self.name} answers"))
        if clock.now < disk.hangs_until_s:
            disk.hung += 1
            answered_s = max(answered_s, disk.hangs_until_s)
        clock.at(answered_s, self._answer, call)

    def _answer(self, call: _Call) -> None:
        if not self._loop.alive or self._busy is not call:
            return
        if self._loop.state.name == "STOPPED":
            self._loop.on_continue.append(lambda: self._answer(call))
            return
        result, error = None, None
        disk = self._disk
        if disk.clock.now < disk.fails_until_s and disk.draw(f"{self.name} fails") < 0.8:
            disk.errors += 1
            # The error may come of what follows the write, such as a sync: then it is in the file.
            if disk.draw(f"{self.name} wrote") < 0.3:
                self._run(call)
            told = "disk I/O error"
            error = sqlite3.OperationalError(told) if self.name.startswith("ledger") else OSError(told)
        else:
            result, error = self._run(call)
        self._busy = None
        self._loop.call_soon(_tell, call.future, result, error)
        self._next()

    def _run(self, call: _Call) -> tuple[Any, Any]:
        try:
            return call.what(), None
        except BaseException as raised:
            return None, raised

    def _on_end(self) -> None:
        """The process is killed. What its disk was about to answer may be in the file, or not."""
        call, self._busy = self._busy, None
        if call is not None and self.name == "ledger" and self._disk.draw("killed while writing") < 0.5:
            self._run(call)
        self._todo.clear()
