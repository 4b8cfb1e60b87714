"""A job's status as it is sent to those who watch: whole once, then only what has changed.

The status is as large as the job. Nearly all of it stays the same from one look to the next: what moves with every step is
one number that all members share. So a row of a worker leaves its `step` out where it is that number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from holdfast.errors import ProtocolError
from holdfast.protocol.wire.decoding import decode

WHOLE, CHANGED = "status", "status-changed"
"""Kinds of announcements."""
LEDGER_KEPT = "kept"
"""What a watcher says who asked for the ledger at the end, and has written it down."""


class StatusChange(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from the status that the same connection was sent before."""

    head: dict[str, Any] = {}
    """Values by key, of all keys but `nodes` and `workers`."""
    common: int | None = None
    """The step of every row of a worker that names none."""
    nodes: list[dict[str, Any]] = []
    """New or changed rows, whole. A node never leaves the list."""
    workers: list[dict[str, Any]] = []
    gone: list[str] = []
    """Names of workers that left the list."""


class Status:
    """The status that one connection has been sent, put together by whoever listens to it."""

    def __init__(self) -> None:
        self._head: dict[str, Any] | None = None
        self._common: int | None = None
        self._nodes: dict[str, dict[str, Any]] = {}
        self._workers: dict[str, dict[str, Any]] = {}

    def whole(self, status: dict[str, Any]) -> dict[str, Any]:
        """Takes in a whole status; what it is now."""
        self._head = {k: v for k, v in status.items() if k not in ("nodes", "workers", "common")}
        # A coordinator of before tells every step in its row, and no common one.
        self._common = status.get("common")
        self._nodes = {row["node"]: row for row in status["nodes"]}
        self._workers = {row["worker"]: row for row in status["workers"]}
        return self._now(self._head)

    def changed(self, told: Any) -> dict[str, Any] | None:
        """Takes in what changed; None: there is nothing that it could be a change of."""
        if self._head is None:
            return None
        change = decode(partial(msgspec.convert, type=StatusChange), told, "a status", error=ProtocolError)
        self._head |= change.head
        self._common = change.common
        self._nodes |= {row["node"]: row for row in change.nodes}
        self._workers |= {row["worker"]: row for row in change.workers}
        for name in change.gone:
            self._workers.pop(name, None)
        return self._now(self._head)

    def _now(self, head: dict[str, Any]) -> dict[str, Any]:
        # Rows of their own: who is given this status may keep it while the next change is taken in.
        return head | {
            "nodes": list(self._nodes.values()),
            "workers": [{"step": self._common, **row} for row in self._workers.values()],
        }
