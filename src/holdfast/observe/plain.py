"""The job as plain lines: for logs, pipes and `--no-ui`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from holdfast.observe.wording import event_line
from holdfast.protocol.job import JobSpec

PROGRESS_EVERY_S = 2.0


class PlainView:
    """Writes one line per event and, after two silent seconds, one about the progress."""

    def __init__(self, spec: JobSpec, job_dir: Path) -> None:
        self._spec, self._job_dir = spec, job_dir
        self._last_s = time.monotonic()
        self._last_step = -1

    def __enter__(self) -> PlainView:
        self._say(f"job {self._spec.name} in {self._job_dir}")
        return self

    def __exit__(self, *exc: object) -> None:
        return

    def event(self, entry: dict[str, Any]) -> None:
        """An entry of the ledger."""
        line = event_line(entry)
        if line:
            self._say(f"{entry['t_s']:8.2f} s  {line}")

    def status(self, status: dict[str, Any]) -> None:
        """Says something when nothing else was said for a while."""
        if time.monotonic() - self._last_s >= PROGRESS_EVERY_S:
            loss = "" if status["loss"] is None else f", loss {status['loss']:.4f}"
            self._say(
                f"{status['t_s']:8.2f} s  {status['phase']}: step {status['step']}{loss}, "
                f"{status['world']} of {status['target']} workers"
            )

    def output(self, data: bytes) -> None:
        """What rank 0 printed."""
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        self._last_s = time.monotonic()

    def note(self, text: str) -> None:
        """Something about the launcher itself."""
        self._say(text)

    def ended(self, report: dict[str, Any]) -> None:
        """The report, and last of all what went wrong."""
        from holdfast.observe.tables import print_report

        print_report(report)

    def _say(self, text: str) -> None:
        self._last_s = time.monotonic()
        sys.stderr.write(f"[holdfast] {text}\n")
        sys.stderr.flush()
