"""Shows the job as it runs: on a terminal, where events scroll by and the present state stays below them; and as plain
lines, for logs, pipes and `--no-ui`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from holdfast.observe.dashboard import board, progress_line
from holdfast.observe.event_text import EventLines
from holdfast.observe.printable import PrintableStream, printable
from holdfast.observe.tables import PrintableConsole, print_report
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_report import JobReport
from holdfast.protocol.job_view import JobView
from holdfast.protocol.ledger import LINE_WIDTH
from holdfast.protocol.units import clip, clock

WIDTH, STAMP_WIDTH = 100, 12
FIXED_ROWS = 12
"""Rows of a terminal that are not for ranks: headers, incidents, and some room for lines that scroll by."""

_EVENT_STYLES = {
    "incident-opened": "bold yellow",
    "incident-resumed": "green",
    "incident-closed": "green",
    "failed": "red",
    "node-lost": "red",
    "fault-injected": "magenta",
    "stop-requested": "yellow",
    "ended": "bold",
}


def terminal(stream: TextIO) -> PrintableConsole | None:
    """A console that can redraw its output; None if the stream is not such a terminal."""
    console = PrintableConsole(file=stream)
    return console if console.is_terminal and not console.is_dumb_terminal else None


class LiveView:
    """Events and rank 0's output scroll by above a picture of ranks, nodes and incidents."""

    def __init__(self, spec: JobSpec, job_dir: Path, console: PrintableConsole) -> None:
        self._spec, self._job_dir, self._console = spec, job_dir, console
        self._began_s = time.monotonic()
        self._view: JobView | None = None
        self._rest = b""
        self._lines = EventLines()
        self._live = Live(
            get_renderable=self._picture,
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> LiveView:
        self._console.print(Text(f"job {self._spec.name} in {self._job_dir}", style="dim"), soft_wrap=True)
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exc: object) -> None:
        # `output` holds a line back until it is complete. The last line that a script printed before it was
        # killed often is not.
        if self._rest:
            self.output(b"\n")
        self._live.stop()

    def event(self, entry: dict[str, Any]) -> None:
        """An entry of the ledger."""
        line = self._lines.line(entry, width=min(WIDTH, self._console.width) - STAMP_WIDTH)
        if entry["kind"] == "ended" and self._view is not None:
            outcome = entry["fields"]["outcome"]
            self._view = msgspec.structs.replace(self._view, phase="ended", outcome=outcome)
        if line:
            style = _EVENT_STYLES.get(entry["kind"], "")
            # Not folded, so that a path in it is copied as one.
            text = Text.assemble((f"{entry['t_s']:8.2f} s  ", "dim"), (line, style))
            self._console.print(text, soft_wrap=True)

    def status(self, status: JobView) -> None:
        """The job as it is now."""
        self._view = status
        self._live.refresh()

    def tick(self) -> None:
        """Redraws the picture, because times in it have advanced."""
        self._live.refresh()

    def output(self, data: bytes) -> None:
        """Shows the output of rank 0: in complete lines on a terminal, unchanged elsewhere."""
        # If stdout goes to a file while the view is on stderr, the bytes must reach it as the script wrote
        # them.
        if not sys.stdout.isatty():
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            # A progress bar rewrites its line after a carriage return. Only the last text of the line is
            # shown: the returns would move the cursor into the picture below.
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            self._console.print(Text.from_ansi(printable(text, colours=True)), soft_wrap=True)

    def note(self, text: str) -> None:
        """Shows a message about the launcher itself."""
        self._console.print(Text(text, style="dim"), soft_wrap=True)

    def ended(self, report: JobReport) -> None:
        """Prints the report and, at the very end, the error if there was one."""
        print_report(report, self._job_dir, self._console.file)

    def _picture(self) -> RenderableType:
        rule = Text("─" * min(self._console.width, WIDTH), style="dim")
        view = self._view
        if view is None or view.generation == 0:
            elapsed = clock(time.monotonic() - self._began_s)
            line = Text.assemble(
                (self._spec.name, "bold"), f"  {progress_line(self._spec, view)}  ", (elapsed, "dim")
            )
            return Group(rule, line)
        rows = max(4, self._console.height - FIXED_ROWS - min(5, len(view.incidents)))
        return Group(rule, board(view, rows))


SILENCE_S = 2.0
LONGEST_SILENCE_S = 30.0
UNCUT = 100_000
"""The longest line in a file: a log of the job is searched, and has room."""

ENDING = "waiting for the last processes to end"


class PlainView:
    """Writes one line for each event to stderr, and the progress after two silent seconds, then ever more rarely.

    Output of rank 0 goes to stdout unchanged.
    """

    def __init__(self, spec: JobSpec, job_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec, self._job_dir, self._clock = spec, job_dir, clock
        self._last_s = self._status_s = clock()
        self._silence_s = SILENCE_S
        self._view: JobView | None = None
        self._over = False
        self._printed = PrintableStream()
        self._lines = EventLines()

    def __enter__(self) -> PlainView:
        self._print(f"job {self._spec.name} in {self._job_dir}")
        return self

    def __exit__(self, *exc: object) -> None:
        return

    def event(self, entry: dict[str, Any]) -> None:
        """An entry of the ledger."""
        line = self._lines.line(entry, width=LINE_WIDTH if sys.stderr.isatty() else UNCUT)
        self._over = self._over or entry["kind"] == "ended"
        if line:
            self._print(line, entry["t_s"])
            self._silence_s = SILENCE_S

    def status(self, status: JobView) -> None:
        """The job as it is now."""
        self._view, self._status_s = status, self._clock()
        self.tick()

    def tick(self) -> None:
        """Prints the progress if nothing was printed for a while."""
        now = self._clock()
        if now - self._last_s < self._silence_s:
            return
        line = ENDING if self._over else progress_line(self._spec, self._view)
        self._print(clip(line, LINE_WIDTH), self._job_time(now))
        # Ever more rarely: otherwise the log of a week would consist of little but a line every two seconds.
        self._silence_s = min(2 * self._silence_s, LONGEST_SILENCE_S)

    def output(self, data: bytes) -> None:
        """Writes the output of rank 0 to stdout."""
        # A file or a pipe gets the bytes as the script wrote them.
        if sys.stdout.isatty():
            sys.stdout.write(self._printed.feed(data))
        else:
            sys.stdout.buffer.write(data)
        sys.stdout.flush()
        # The script's output ends a silence, too: a script that logs every step needs no lines about its
        # progress.
        self._last_s = self._clock()

    def note(self, text: str) -> None:
        """Prints a message about the launcher itself."""
        self._print(text, self._job_time(self._clock()))

    def ended(self, report: JobReport) -> None:
        """Prints the report and, at the very end, the error if there was one."""
        print_report(report, self._job_dir, sys.stderr)

    def _job_time(self, now: float) -> float | None:
        """Seconds on the job's clock; None until the coordinator has sent a status."""
        if self._view is None:
            return None
        # The job's clock is the coordinator's, and continues when the coordinator is replaced. This process
        # measures only the time since the last status.
        return self._view.t_s + now - self._status_s

    def _print(self, text: str, t_s: float | None = None) -> None:
        self._last_s = self._clock()
        stamp = "" if t_s is None else f"{t_s:8.2f} s  "
        sys.stderr.write(f"[holdfast] {stamp}{printable(text)}\n")
        sys.stderr.flush()
