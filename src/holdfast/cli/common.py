"""Options and readers that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from holdfast.coordinator.kernel.state import CoreState
    from holdfast.coordinator.service.store import Store

JobName = Annotated[
    str | None, typer.Option("--job", metavar="NAME", show_default="the newest job", help="The job's name.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


WIDE = 10_000
"""Characters of a line that nothing is folded in."""


class Format(StrEnum):
    """How a table is printed."""

    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[
    Format | None,
    typer.Option(
        "-o",
        "--output",
        help="Format of the output. wide: every column, with full paths. json or yaml: for programs.",
    ),
]


def write_as(value: object, as_json: bool, output: Format | None) -> bool:
    """Prints a value for programs, if that was asked for; whether it was."""
    if as_json or output is Format.JSON:
        write_json(value)
    elif output is Format.YAML:
        import msgspec
        import yaml

        sys.stdout.write(yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False, allow_unicode=True))
    return as_json or output in (Format.JSON, Format.YAML)


def width_of(output: Format | None, usual: int) -> int:
    """Characters of a line of a table."""
    return WIDE if output is Format.WIDE else usual


def write_json(value: object) -> None:
    """Prints a value as JSON, for `--json`."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def kept_state(store: Store, folder: Path) -> CoreState:
    """The job as its last coordinator left it. Raises UsageError when it was never started."""
    from holdfast.errors import UsageError

    state = store.load()
    if state is None:
        raise UsageError(never_started(folder, "its ledger is empty"))
    return state


def never_started(folder: Path, why: str) -> str:
    """Of a job whose coordinator has left nothing. why: what is missing."""
    logs = folder / "logs"
    try:
        has_logs = any(logs.iterdir())
    except OSError:
        has_logs = False
    # What has logs was started, and they say why nothing else came of it.
    if has_logs:
        return f"the job {folder.name!r} ended before it wrote a ledger ({why}): see its logs in {logs}"
    return f"the job {folder.name!r} was never started: {why}"


@contextmanager
def ledger(folder: Path) -> Iterator[Store]:
    """The job's file, for reading; works while the job runs and long after.

    Raises:
        UsageError: the job has none, or it cannot be read.
    """
    import sqlite3

    from holdfast.coordinator.service.store import Store, newest_ledger
    from holdfast.errors import UsageError

    path = newest_ledger(folder)
    # SQLite's locks and shared memory do not work across the machines of a shared file system. While a cluster runs the job,
    # its coordinator is on another machine and writes the file, so it is asked for a consistent copy instead.
    copy = _copy_from_afar(folder)
    if copy is None and not path.is_file():
        raise UsageError(_why_no_ledger(folder, path))
    store = Store(path, read_only=True) if copy is None else Store.of(copy)
    try:
        yield store
    except sqlite3.Error as error:
        raise UsageError(f"the ledger {path} cannot be read: {error}") from error
    finally:
        store.close()


def _why_no_ledger(folder: Path, path: Path) -> str:
    from holdfast.engines.jobs import read_allocation

    allocation = read_allocation(folder)
    if allocation is not None and allocation.engine == "kubernetes":
        return (
            f"the ledger of the job {folder.name!r} was lost with its coordinator's pod: no `holdfast run` or "
            "`holdfast attach` was running here when the job ended, which would have copied it"
        )
    return never_started(folder, f"{path} does not exist")


def _copy_from_afar(folder: Path) -> bytes | None:
    """The ledger of a job that a cluster runs, from its coordinator. None: the file itself can be read."""
    import asyncio

    from holdfast.engines.client import NoAnswer
    from holdfast.engines.jobs import read_allocation
    from holdfast.engines.reach import client_of

    allocation = read_allocation(folder)
    if allocation is None or allocation.over:
        return None

    async def ask() -> bytes:
        async with client_of(folder) as client:
            return await client.get_bytes("/ledger")

    try:
        return asyncio.run(ask())
    except NoAnswer:
        # No coordinator, no writer: the file is safe to read.
        return None
