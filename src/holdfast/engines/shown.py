"""A view whose reader may go away: a closed pipe, or a terminal that was closed, is no reason to lose the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from holdfast.protocol.job_view import JobView


class View(Protocol):
    """Who shows the job to a person."""

    def event(self, entry: dict[str, Any]) -> None:
        """An entry of the ledger."""

    def status(self, status: JobView) -> None:
        """The job as it is now."""

    def output(self, data: bytes) -> None:
        """What rank 0 printed."""

    def note(self, text: str) -> None:
        """Something about the launcher itself."""


class TolerantView:
    """Passes everything on to a view, and survives that nobody reads it any more.

    The launcher decides while it shows: it orders nodes, and it takes the stop that a person or a scheduler asks for. An
    error of a write in the midst of that would end the task that keeps the job alive, or swallow the stop. `holdfast run |
    head` and a lost ssh session did that.
    """

    def __init__(self, view: View) -> None:
        self._view = view

    def event(self, entry: dict[str, Any]) -> None:
        """An entry of the ledger."""
        with unread():
            self._view.event(entry)

    def status(self, status: JobView) -> None:
        """The job as it is now."""
        with unread():
            self._view.status(status)

    def output(self, data: bytes) -> None:
        """What rank 0 printed."""
        with unread():
            self._view.output(data)

    def note(self, text: str) -> None:
        """Something about the launcher itself."""
        with unread():
            self._view.note(text)


@contextmanager
def unread() -> Iterator[None]:
    """Around what is written to a person. A stream that fails leads nowhere from then on; the other one is still written.

    Rank 0's output has stdout to itself, so progress and errors still reach the terminal of `holdfast run | head`.
    """
    try:
        yield
    except BlockingIOError:
        # Somebody reads, but slowly, and made the terminal or pipe one that does not block. This piece is lost.
        return
    except OSError:
        # What is still in the streams' buffers cannot be written either: Python would fail on it as it ends.
        for stream in (sys.stdout, sys.stderr):
            _drop(stream)


def _drop(stream: Any) -> None:
    try:
        stream.flush()
    except BlockingIOError:
        return
    except OSError:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
