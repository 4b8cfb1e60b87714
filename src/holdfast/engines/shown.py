"""A view whose reader may go away: a closed pipe, or a terminal that was closed, is no reason to lose the job."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Protocol


class View(Protocol):
    """Who shows the job to a person."""

    def event(self, entry: dict[str, Any]) -> None:
        """An entry of the ledger."""

    def status(self, status: dict[str, Any]) -> None:
        """The job as it is now."""

    def output(self, data: bytes) -> None:
        """What rank 0 printed."""

    def note(self, text: str) -> None:
        """Something about the launcher itself."""


class Shown:
    """Passes everything on to a view until it cannot be written any more; from then on nothing is shown.

    The launcher decides while it shows: it orders nodes, and it takes the stop that a person or a scheduler asks for. An
    error of a write in the midst of that would end the task that keeps the job alive, or swallow the stop. `holdfast run |
    head` and a lost ssh session did that.
    """

    def __init__(self, view: View) -> None:
        self._view: View | None = view

    def event(self, entry: dict[str, Any]) -> None:
        """An entry of the ledger."""
        self._show("event", entry)

    def status(self, status: dict[str, Any]) -> None:
        """The job as it is now."""
        self._show("status", status)

    def output(self, data: bytes) -> None:
        """What rank 0 printed."""
        self._show("output", data)

    def note(self, text: str) -> None:
        """Something about the launcher itself."""
        self._show("note", text)

    def _show(self, what: str, value: object) -> None:
        if self._view is None:
            return
        try:
            getattr(self._view, what)(value)
        except OSError:
            self._view = None
            # What is still in the streams' buffers cannot be written either: Python would fail on it as it ends.
            for stream in (sys.stdout, sys.stderr):
                _drop(stream)


def _drop(stream: Any) -> None:
    try:
        stream.flush()
    except OSError:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
