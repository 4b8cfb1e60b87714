"""Reads small files of /proc and /sys: a file that does not exist gives nothing, and one that cannot be read says why."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.health.samples import Reading

READ_BYTES = 65_536
ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.EOPNOTSUPP, errno.EINVAL, errno.ESRCH}
"""Errors by which the kernel says that the machine, or its present state, does not have something (EINVAL: the carrier
of an interface that is administratively down)."""


def text(path: Path | str) -> str | None:
    """The whole file without the last line feed. None: it does not exist on this machine. Raises OSError otherwise."""
    try:
        # Plain system calls instead of Path.read_text: a round reads a file of every process and of every
        # device, and the objects of the buffered layers cost more than the reads. The bound on the agent's
        # processor share (docs/benchmarks.md) depends on it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(fd, READ_BYTES)
            if len(data) >= 4096:  # a file of sysfs fits a page and is read at once
                while more := os.read(fd, READ_BYTES):
                    data += more
        finally:
            os.close(fd)
    except OSError as error:
        # Absent and unreadable are kept apart, because they mean different things: what a machine does not
        # have gives no reading and no rule, what it has and cannot be read is Unknown.
        if error.errno in ABSENT:
            return None
        raise
    return data.decode(errors="replace").rstrip("\n\0")


def quiet(path: Path | str) -> str:
    """As `text`, but empty if it cannot be read for any reason: for values that only describe something."""
    try:
        return text(path) or ""
    except OSError:
        return ""


def names(folder: Path) -> list[str]:
    """Names of the entries of a folder, sorted; empty if there is no folder."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - iterdir() makes a Path of each, which costs more than all else
    except OSError:
        return []


def listing(folder: Path) -> list[str]:
    """As `names`, for a folder that says which devices a machine has: if it cannot be read, that must not look as if
    all devices were lost. Raises OSError."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - as in `names`
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise


def number(
    source: str, name: str, path: Path | str, subject: str = "", device: str = "", base: int = 10
) -> Iterator[Reading]:
    """The one number in a file, as a reading."""
    try:
        content = text(path)
        if content is not None:
            yield Reading(
                source=source,
                name=name,
                value=float(int(content.split()[0], base)),
                subject=subject,
                device=device,
            )
    # Drivers write `N/A`, nothing, or -1 into files of numbers. Each is Unknown for this value alone; the
    # source goes on with the next.
    except (OSError, ValueError, IndexError) as error:
        yield unknown(source, name, error, subject, device)


def attempt(source: str, name: str, work: Callable[[], float | None], subject: str = "") -> Iterator[Reading]:
    """Returns the value that `work` returns as a reading; None: the machine does not have it. Any error becomes an
    unknown reading, because the files may hold anything."""
    try:
        value = work()
    except (OSError, ValueError, IndexError, KeyError, ArithmeticError, StopIteration) as error:
        yield unknown(source, name, error, subject)
        return
    if value is not None:
        yield Reading(source=source, name=name, value=value, subject=subject)


def unknown(source: str, name: str, error: Exception | str, subject: str = "", device: str = "") -> Reading:
    """The reading of a value that should exist and cannot be read."""
    why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    # An empty reason would be shown as `no answer`, which is another fault.
    why = why or type(error).__name__
    if isinstance(error, OSError) and error.filename:
        why = f"{error.filename}: {why}"
    return Reading(source=source, name=name, value=None, subject=subject, device=device, why=why)


def keyed(content: str, separator: str | None = None) -> dict[str, str]:
    """Parses lines of `key value`, or `key: value`, into a dict."""
    pairs = (line.split(separator, 1) for line in content.splitlines())
    return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}
