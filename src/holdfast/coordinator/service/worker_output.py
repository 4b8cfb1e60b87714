"""What a worker left in the job's folder: the last lines of its log, and its stack. Read for people, on the reading thread."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from holdfast.observe.log_tail import first_data, last_said
from holdfast.observe.printable import uncoloured
from holdfast.protocol import units

LINES = 200
_BYTES = 64_000
"""Of a log's end, so much is read: a log may have many gigabytes."""
_LINE_CHARS = 2000
_STACK_LINES = 60
_NEAR_S = 60.0
"""A stack that was written so long before an incident is of another one."""
_NAME = re.compile(r"(?P<node>[\w:-][\w.:-]{0,200})\.\d{1,9}#\d{1,18}", re.ASCII)
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", (?P<rest>line \d+ in .*)')
_LIBRARY = re.compile(
    r".*/(?:site|dist)-packages/|.*/lib/python3\.\d+/|<|" + re.escape(f"{Path(__file__).parents[3]}/"),
    re.ASCII,
)
"""What comes before the name of a module that is not the script's own."""
_TRACEBACK = "Traceback (most recent call last):"


def tail(job_dir: Path, path: str, lines: int = LINES) -> dict[str, Any]:
    """path, lines, note: the last lines of a worker's log as text without colours, if it is in the job's folder. Else there are
    no lines, and the note says where it is, or that nobody knows."""
    if not path:
        return {"path": None, "lines": [], "note": "where its output goes is not known"}
    real = _inside(job_dir, path)
    if real is None:
        return {"path": path, "lines": [], "note": "the log is on its node, under this path"}
    try:
        found = _end_of(real)[-lines:]
    except OSError as error:  # removed meanwhile, or of somebody who lets nobody read it
        return {"path": path, "lines": [], "note": f"the log cannot be read: {error.strerror}"}
    return {"path": path, "lines": found, "note": "" if found else "it printed nothing"}


def usual_log(job_dir: Path, worker: str) -> str:
    """Where agents write the log of a worker; empty: it is no name of a worker."""
    # The name may be a viewer's word. One that is no worker's leads nowhere.
    named = _NAME.fullmatch(worker)
    if named is None:
        return ""
    return str(job_dir / "logs" / named["node"] / f"{worker.replace('#', '-')}.log")


def stack(job_dir: Path, log: str, lines: list[str], from_utc_s: float | None) -> dict[str, Any]:
    """lines, source: the stack that a worker wrote when it was looked at, the innermost call first; else the last traceback in
    the lines of its log. No lines: there is none.

    from_utc_s: when its incident began; None: not known, and then no older stack can be told from its own.
    """
    real = _inside(job_dir, log.removesuffix(".log") + ".stacks") if log and from_utc_s is not None else None
    if real is not None and (main := _main_thread(real, from_utc_s or 0.0)):
        return {"lines": main, "source": "as it stood still, the innermost call first"}
    begins = [n for n, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    if not begins:
        return {"lines": [], "source": ""}
    found = lines[begins[-1] :]
    # It ends with the error, the first line that is not indented.
    ends = next((n for n, line in enumerate(found[1:], 1) if line and not line.startswith((" ", "\t"))), None)
    whole = found if ends is None else found[: ends + 1]
    return {
        "lines": whole[-_STACK_LINES:],
        "source": "the last traceback in its log, the innermost call last",
    }


def _main_thread(path: Path, from_utc_s: float) -> list[str]:
    """The main thread's calls in a file of stacks; empty: they are older, or cannot be read."""
    try:
        if path.stat().st_mtime < from_utc_s - _NEAR_S:
            return []
        # Faulthandler writes the main thread last.
        threads = "\n".join(_end_of(path)).strip().split("\n\n")
    except OSError:
        return []
    return _folded(threads[-1].splitlines()[1:])[:_STACK_LINES]


def _folded(frames: list[str]) -> list[str]:
    """The innermost call, and those of the script. Of libraries' calls between them, and of Holdfast's, the number."""
    found: list[str] = []
    hidden = 0
    for n, line in enumerate(frames):
        frame = _FRAME.fullmatch(line)
        library = _LIBRARY.match(frame["path"]) if frame else None
        if n and library:
            hidden += 1
            continue
        if hidden:
            found.append(f"  … {units.plural(hidden, 'call')} of libraries")
            hidden = 0
        # Of a library's file the part that names the module.
        found.append(
            f'  File "{frame["path"][library.end() :]}", {frame["rest"]}'
            if frame and library and library[0] != "<"
            else line
        )
    return found + ([f"  … {units.plural(hidden, 'call')} of libraries"] if hidden else [])


def _inside(job_dir: Path, path: str) -> Path | None:
    """The file, if it is one of the job's folder."""
    # The path came from an agent. Nothing outside of the job's folder is shown, whatever it says.
    real, home = Path(path).resolve(), job_dir.resolve()
    return real if real.is_relative_to(home) and real.is_file() else None


def _end_of(path: Path) -> list[str]:
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - _BYTES)
        file.seek(first_data(file, begin))
        data = file.read(_BYTES)
    # A progress bar writes over its own line: what a terminal shows is behind the last return.
    said = [last_said(line).decode(errors="backslashreplace") for line in data.split(b"\n")]
    return [uncoloured(line)[:_LINE_CHARS] for line in (said[:-1] if said and not said[-1] else said)]
