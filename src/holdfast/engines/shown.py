"""A view whose reader may go away: a closed pipe or terminal must not end the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from holdfast.protocol.job_view import JobView


class View(Protocol):
    """Shows a job to a person."""

    def event(self, entry: dict[str, Any]) -> None:
        """An entry of the ledger."""

    def status(self, status: JobView) -> None:
        """The job's current status."""

    def output(self, data: bytes) -> None:
        """What rank 0 printed."""

    def note(self, text: str) -> None:
        """Something about the launcher itself."""


class TolerantView:
    """Passes everything on to a view, and ignores errors of writing when the output is no longer read.

    The launcher shows the job in between its other work, such as starting nodes or handling a stop that a person or a scheduler
    requested. An error of a write would end the task that keeps the job alive, or lose the stop, as happened with `holdfast run |
    head` and with lost ssh sessions.
    """

    def __init__(self, view: View) -> None:
        self._view = view

    def event(self, entry: dict[str, Any]) -> None:
        """An entry of the ledger."""
        with unread():
            self._view.event(entry)

    def status(self, status: JobView) -> None:
        """The job's current status."""
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
    """Context for writes to a person. A stream that fails is redirected to /dev/null from then on; the other one is still
    written.

    Only rank 0's output goes to stdout, so that with `holdfast run | head` progress and errors still reach the terminal.
    """
    try:
        yield
    except BlockingIOError:
        # The terminal or pipe was made non-blocking and its reader is slow. This piece of output is lost.
        return
    except OSError:
        # The rest in the streams' buffers cannot be written either, and Python would fail to do so at its exit.
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
