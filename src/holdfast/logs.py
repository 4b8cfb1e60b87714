"""Where Holdfast's own log lines go, and what they look like: the standard `logging`, set up once in every process.

Modules log with `logging.getLogger(__name__)` and pass fields by `extra`. Only the entry points of Holdfast's processes
call `configure`. `import holdfast` configures nothing: a script that uses the library alone decides for itself.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from typing import NamedTuple, NoReturn

from holdfast.errors import UsageError

VARIABLE = "HOLDFAST_LOG"
"""`LEVEL[,json]`, for example `debug` or `info,json`. `holdfast run --log-level` takes the same and wins."""

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
PENDING_LINES = 10_000
"""Lines that may wait for a file that does not take them. What comes after them is dropped: memory is bounded."""
FILE_BYTES = 64 << 20
"""A file that has so many moves to `.1`, in the place of the one that was there: with it a process has twice as many at most."""
CLOSE_S = 1.0
"""How long the end of a process waits for its last lines to reach the file."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# To the last @: a password may have one too.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s'\"]+@")
_BARE = re.compile(r"[^\s\"=\\]+")


class LogSettings(NamedTuple):
    """What a user asked of the log."""

    level: int | None
    """A level of `logging`; None: the process's own default."""
    as_json: bool = False
    """One JSON object per line instead of key=value text."""


def parse_settings(text: str, name: str = VARIABLE) -> LogSettings:
    """`LEVEL[,json]`, either part of which may be left out. name: of the option or variable, for the error.

    Raises:
        UsageError: it is something else.
    """
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    as_json = "json" in words
    levels = [word for word in words if word != "json"]
    if len(levels) > 1 or any(level not in LEVELS for level in levels):
        raise UsageError(
            f"{name} must be one of {', '.join(LEVELS)}, with or without ,json (got {text!r}), for example debug or "
            "info,json"
        )
    return LogSettings(LEVELS[levels[0]] if levels else None, as_json)


def configure(
    asked: str,
    context: Mapping[str, str],
    *,
    default: int = logging.INFO,
    file: Path | None = None,
    others: bool = True,
    secrets: tuple[str, ...] = (),
) -> Callable[[], None]:
    """Sets logging up for this process; returns what undoes it and writes the last lines.

    Args:
        asked: `LEVEL[,json]`, as the job has it.
        context: fields of every line of this process, for example its job and node.
        default: the level when `asked` names none.
        file: gets every line. Then stderr, which a person may be watching, gets warnings and errors only.
        others: also what other libraries (asyncio, aiohttp) warn of. Not in a process that runs a user's script: its root
            logger is the script's.
        secrets: never written, whatever an error's text contains.
    """
    settings = parse_settings(asked)
    formatter = LineFormatter(context, settings.as_json, secrets)
    ours = logging.getLogger("holdfast")
    target = logging.getLogger() if others else ours
    handlers: list[logging.Handler] = []
    writer: _Writer | None = None
    if file is not None:
        # A log file is in the job's folder, which may be on a file system that hangs. Only the writer's thread may
        # wait for it: an agent or a coordinator whose loop waited would count as lost.
        pending: queue.Queue[logging.LogRecord] = queue.Queue(PENDING_LINES)
        writer = _Writer(pending, file)
        handlers.append(_Pending(pending))
        writer.start()
    shown = logging.StreamHandler(sys.stderr)
    if file is not None:
        shown.setLevel(logging.WARNING)
    handlers.append(shown)
    for handler in handlers:
        handler.setFormatter(formatter)
        target.addHandler(handler)
    ours.setLevel(default if settings.level is None else settings.level)
    # A script may have set the root logger up for itself. It must not get our lines a second time.
    ours.propagate = others

    def close() -> None:
        if not handlers:
            return  # closed before
        while handlers:
            target.removeHandler(handlers.pop())
        ours.setLevel(logging.NOTSET)
        ours.propagate = True
        if writer is not None:
            # QueueListener.stop has no time limit, and the file may never take the last lines.
            ending = threading.Thread(target=writer.stop, daemon=True)
            ending.start()
            ending.join(CLOSE_S)

    return close


def exit_now(code: int) -> NoReturn:
    """Ends this process without Python's teardown, and from any thread. The last lines have CLOSE_S to reach the file."""
    try:
        # A thread of its own writes the file. `os._exit` would end it between the line that says why the process ends
        # and the write, and that line is the one that people look for.
        for handler in (*logging.getLogger().handlers, *logging.getLogger("holdfast").handlers):
            if isinstance(handler, _Pending):
                handler.wait_until_written(CLOSE_S)
        for stream in (sys.stdout, sys.stderr):
            # Whoever read them may be gone, and a process may be started without them.
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
    finally:
        os._exit(code)


class LineFormatter(logging.Formatter):
    """One line per event: `time=... level=info logger=agent.agent msg="..." job=... node=...`, or the same as JSON.

    Fields of an event (`extra`) follow those of the process. In text a traceback follows its line, indented.
    """

    def __init__(self, context: Mapping[str, str], as_json: bool, secrets: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._context = {name: value for name, value in context.items() if value}
        self._as_json = as_json
        self._secrets = tuple(filter(None, secrets))

    def format(self, record: logging.LogRecord) -> str:
        """The complete line, without what is secret."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name.removeprefix("holdfast."),
            "msg": record.getMessage(),
            **self._context,
            **{k: v for k, v in vars(record).items() if k not in _STANDARD and v is not None},
        }
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            if trace:
                fields["traceback"] = trace
            return self._without_secrets(json.dumps(fields, default=str))
        line = " ".join(f"{name}={_value(value)}" for name, value in fields.items())
        indented = "".join(f"\n    {each}" for each in trace.splitlines())
        return self._without_secrets(line + indented)

    def _without_secrets(self, line: str) -> str:
        # Errors of libraries quote the URL that failed, and a site may have its password in it.
        line = _CREDENTIALS.sub("***@", line)
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return line


def _value(value: object) -> str:
    """As logfmt has it: quoted where it is not one plain word."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


class _Pending(QueueHandler):
    """Hands lines to the thread that writes them."""

    def __init__(self, pending: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(pending)
        self._pending = pending

    def wait_until_written(self, most_s: float) -> None:
        """Waits until the file has every line, for `most_s` seconds at most."""
        # `Queue.join` waits for the same condition, but has no time limit.
        with self._pending.all_tasks_done:
            self._pending.all_tasks_done.wait_for(lambda: not self._pending.unfinished_tasks, most_s)

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            # The file has taken nothing for thousands of lines. The process matters more than its log.
            return


class _Writer(QueueListener):
    """The thread that appends lines to a file. It is opened again where it was moved: a new start of a job puts the old
    logs away.

    Not a handler of `logging`: a process that exits takes the lock of every handler, and would wait for ever for the one
    that a write to a file system that hangs holds.
    """

    def __init__(self, pending: queue.Queue[logging.LogRecord], path: Path) -> None:
        super().__init__(pending)
        self._path = path
        self._file = -1

    def enqueue_sentinel(self) -> None:
        # A full queue refuses the sentinel of the base class, which does not wait for room.
        self.queue.put(self._sentinel)  # type: ignore[attr-defined]

    def handle(self, record: logging.LogRecord) -> None:
        """Writes one line. A full disk, or a folder that cannot be reached, loses lines, but never the thread."""
        try:
            if not self._is_current():
                self._close()
                self._path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                # For its owner alone: lines quote commands, paths and errors of the user's script.
                self._file = os.open(self._path, flags, 0o600)
            os.write(self._file, f"{record.getMessage()}\n".encode(errors="backslashreplace"))
            # After the line: whoever opens the file next begins a new one.
            if os.fstat(self._file).st_size >= FILE_BYTES:
                self._path.replace(f"{self._path}.1")
        except OSError:
            # Nobody is told: a traceback on stderr for each line would help nobody.
            return

    def stop(self) -> None:
        """Writes what waits, and closes the file."""
        super().stop()
        self._close()

    def _is_current(self) -> bool:
        """Whether the open file is still the one at the path."""
        if self._file < 0:
            return False
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._file >= 0:
            # Forgotten first: a close that fails has closed it too.
            closing, self._file = self._file, -1
            os.close(closing)
