"""Who watches a running job: what is announced to them, and when the status is sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.coordinator.service.store import LedgerEntry

_log = logging.getLogger(__name__)

STATUS_EVERY_S = 0.2
KEPT = "kept"
"""What a watcher says who has written the ledger down."""


class Watcher:
    """Somebody who watches. What is announced while the past is still being read waits for it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._held: list[tuple[int, bytes | None]] | None = []
        self._read = 0

    def tell(self, data: bytes | None, seq: int = 0) -> None:
        """Queues an announcement; None: the last one was before. seq: of an event, which may have been read already."""
        # Already in what was read from the ledger. The announcement and the reading overlap, since an event
        # may be written between them.
        if 0 < seq <= self._read:
            return
        # The past is still being read on another thread. What is announced meanwhile is kept, or it would be
        # shown before what came before it.
        if self._held is not None:
            self._held.append((seq, data))
        else:
            self.queue.put_nowait(data)

    def begin(self, past: list[tuple[int, bytes]]) -> None:
        """The past comes first, and nothing twice."""
        held, self._held = self._held or [], None
        self._read = past[-1][0] if past else 0
        for _, data in past:
            self.queue.put_nowait(data)
        for seq, later in held:
            self.tell(later, seq)


class Watchers:
    """All who watch. `status` gives the status as it is now."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self.all: set[Watcher] = set()
        self._status, self._status_due = status, False
        self.also: Callable[[], None] = lambda: None
        """Called where something may be different from before: the page tells its viewers in its own time."""
        self.last: bytes | None = None
        """How the job ended: the last announcement, also to whoever comes after it; None: it runs."""
        self.keepers = 0
        """Who asked for the ledger at the end and has not left in order: connected, or cut off."""
        self.kept = asyncio.Event()
        """One of them has it."""

    def end(self, report: dict[str, Any]) -> None:
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
            for watcher in self.all:
                watcher.tell(data, value.seq if isinstance(value, LedgerEntry) else 0)

    def say(self, text: str) -> None:
        """Something about the coordinator itself: for whoever looks on, and for the log."""
        _log.info("%s", text)
        self.announce("log", {"text": text})

    def plan_status(self) -> None:
        self.also()
        # At most five times a second, whatever happens. The status is as large as the job.
        if self.all and not self._status_due:
            self._status_due = True
            asyncio.get_running_loop().call_later(STATUS_EVERY_S, self._send_status)

    def _send_status(self) -> None:
        self._status_due = False
        self.announce("status", self._status())


def announcement(kind: str, value: Any) -> bytes:
    return msgspec.json.encode({"kind": kind, "value": value})
