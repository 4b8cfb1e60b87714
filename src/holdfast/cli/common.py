"""What several commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from holdfast.coordinator.kernel.state import CoreState
    from holdfast.coordinator.service.store import Store

JobName = Annotated[str | None, typer.Option("--job", help="The job's name; without it the newest.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def write_json(value: object) -> None:
    """What `--json` asks for."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def kept_state(store: Store, folder: Path) -> CoreState:
    """The job as its last coordinator left it. Raises UsageError when it was never started."""
    from holdfast.errors import UsageError

    state = store.load()
    if state is None:
        raise UsageError(f"the job {folder.name!r} was never started")
    return state


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
    if not path.is_file():
        raise UsageError(f"the job {folder.name!r} was never started: there is no {path}")
    copy = _copy_from_afar(folder)
    store = Store(path, read_only=True) if copy is None else Store.of(copy)
    try:
        yield store
    except sqlite3.Error as error:
        raise UsageError(f"the ledger {path} cannot be read: {error}") from error
    finally:
        store.close()


def _copy_from_afar(folder: Path) -> bytes | None:
    """The ledger of a job that a cluster runs: its coordinator alone can open the file. None: it is free to be read."""
    import asyncio

    from holdfast.engines.client import JobClient, NoAnswer
    from holdfast.engines.jobs import read_allocation

    allocation = read_allocation(folder)
    if allocation is None or allocation.over:
        return None

    async def ask() -> bytes:
        async with JobClient(folder) as client:
            return await client.get_bytes("/ledger")

    try:
        return asyncio.run(ask())
    except NoAnswer:
        return None
