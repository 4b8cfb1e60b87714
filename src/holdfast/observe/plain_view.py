"""The job as plain lines: for logs, pipes and `--no-ui`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.observe.event_text import Told
from holdfast.observe.printable import PrintableStream, printable
from holdfast.observe.progress import progress_line
from holdfast.protocol.job import JobSpec
from holdfast.protocol.ledger import LINE_WIDTH
from holdfast.protocol.units import clip

SILENCE_S = 2.0
LONGEST_SILENCE_S = 30.0
UNCUT = 100_000
"""Characters of a line in a file: a log of the job is searched, and has room."""

ENDING = "waiting for the last processes to end"


class PlainView:
    """Writes one line for each event to stderr, and the progress after two silent seconds, then ever more rarely.

    What rank 0 prints goes to stdout unchanged.
    """

    def __init__(self, spec: JobSpec, job_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec, self._job_dir, self._clock = spec, job_dir, clock
        self._last_s = self._heard_s = clock()
        self._silence_s = SILENCE_S
        self._status: dict[str, Any] | None = None
        self._over = False
        self._printed = PrintableStream()
        self._told = Told()

    def __enter__(self) -> PlainView:
        self._say(f"job {self._spec.name} in {self._job_dir}")
        return self

    def __exit__(self, *exc: object) -> None:
        return

    def event(self, entry: dict[str, Any]) -> None:
        """An entry of the ledger."""
        line = self._told.line(entry, width=LINE_WIDTH if sys.stderr.isatty() else UNCUT)
        self._over = self._over or entry["kind"] == "ended"
        if line:
            self._say(line, entry["t_s"])
            self._silence_s = SILENCE_S

    def status(self, status: dict[str, Any]) -> None:
        """The job as it is now."""
        self._status, self._heard_s = status, self._clock()
        self.tick()

    def tick(self) -> None:
        """Time passes: says something when nothing was said for a while."""
        now = self._clock()
        if now - self._last_s < self._silence_s:
            return
        line = ENDING if self._over else progress_line(self._spec, self._status)
        self._say(clip(line, LINE_WIDTH), self._job_time(now))
        # Ever more rarely: a log of a week that has a line each two seconds has nothing else in it.
        self._silence_s = min(2 * self._silence_s, LONGEST_SILENCE_S)

    def output(self, data: bytes) -> None:
        """What rank 0 printed."""
        # A file or a pipe gets the bytes as the script wrote them.
        if sys.stdout.isatty():
            sys.stdout.write(self._printed.feed(data))
        else:
            sys.stdout.buffer.write(data)
        sys.stdout.flush()
        # What the script prints ends a silence, too: a script that logs every step needs no lines about its progress.
        self._last_s = self._clock()

    def note(self, text: str) -> None:
        """Something about the launcher itself."""
        self._say(text, self._job_time(self._clock()))

    def ended(self, report: dict[str, Any]) -> None:
        """The report, and last of all what went wrong."""
        from holdfast.observe.tables import print_report

        print_report(report, self._job_dir, sys.stderr)

    def _job_time(self, now: float) -> float | None:
        """Seconds on the job's clock; unknown until the coordinator was heard."""
        if self._status is None:
            return None
        # The job's clock is the coordinator's, and goes on when that is replaced. This process measures only
        # the time since it last heard of it.
        return float(self._status["t_s"]) + now - self._heard_s

    def _say(self, text: str, t_s: float | None = None) -> None:
        self._last_s = self._clock()
        stamp = "" if t_s is None else f"{t_s:8.2f} s  "
        sys.stderr.write(f"[holdfast] {stamp}{printable(text)}\n")
        sys.stderr.flush()
