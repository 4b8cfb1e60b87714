"""The starts of a job (each a `holdfast run`): the ledger of each, and an account of those that were removed."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import msgspec

from holdfast.coordinator.service.all_starts import Account, LedgerStart, forget, summed
from holdfast.coordinator.service.store import Store, began_utc_s, newest_ledger
from holdfast.errors import Damaged, HoldfastError
from holdfast.protocol.wire.decoding import decode
from holdfast.protocol.wire.stored import decode_file

EARLIER = "earlier.json"
"""In `runs/`: the account of starts whose folders were removed."""

_FORMED = "formed"


def put_away(job_dir: Path) -> list[tuple[int, Path]]:
    """Folders of the starts before the newest one that are kept, oldest first, with their numbers from 1."""
    # By number and not by name: 10 comes after 9, and the account depends on the order.
    return sorted((int(d.name), d) for d in (job_dir / "runs").glob("*") if d.name.isdigit())


def all_starts(job_dir: Path, newest: Store) -> dict[str, Any] | None:
    """The goodput over all starts of a job, see `summed`; None: there was only one."""
    earlier = _earlier(job_dir / "runs")
    # A start that was refused before it had a ledger has trained nothing.
    before = [
        read(folder)
        for number, folder in put_away(job_dir)
        if number > earlier.through and newest_ledger(folder).exists()
    ]
    if not before and not earlier.starts:
        return None
    return summed(earlier, [*before, _start(newest)])


def read(folder: Path) -> LedgerStart | None:
    """What the ledger in a folder has of its start; None: it cannot be read."""
    try:
        # A writer would bring an older ledger's tables up to date, and nobody may change
        # what an ended start has left.
        store = Store(newest_ledger(folder), read_only=True)
    except (OSError, sqlite3.Error, HoldfastError):
        return None
    try:
        return _start(store)
    finally:
        store.close()


def keep_newest(job_dir: Path, count: int) -> None:
    """Removes the folders of the oldest starts, after their accounts are in `EARLIER`."""
    there = put_away(job_dir)
    for place, (number, folder) in enumerate(there[: max(0, len(there) - count)]):
        runs, earlier = folder.parent, _earlier(folder.parent)
        # The number says that it is in the account: whoever dies between these lines leaves a folder that nobody counts
        # a second time.
        if number > earlier.through and newest_ledger(folder).exists():
            later = [read(f) for _, f in there[place + 1 :] if newest_ledger(f).exists()]
            work = runs / f".{EARLIER}"
            # Written beside and renamed: a kill leaves the old account or the new one, and never half of one.
            work.write_bytes(msgspec.json.encode(forget(earlier, number, read(folder), later)))
            work.rename(runs / EARLIER)
        # What cannot be removed now is tried again later. It is in the account, so it counts once.
        shutil.rmtree(folder, ignore_errors=True)


_accounts = msgspec.json.Decoder(Account)


def _earlier(runs: Path) -> Account:
    try:
        return decode_file(_accounts.decode, runs / EARLIER)
    except FileNotFoundError:
        return Account()
    except (OSError, Damaged):
        # Damaged is unknown and not empty: goodput without those starts would look too good.
        return Account(starts=1, known=False)


def _start(store: Store) -> LedgerStart | None:
    try:
        state = store.load()
        if state is None:
            return None
        # The first generation tells what the start went on from. Later ones tell where
        # it went back to by itself.
        formed = (e.fields.get("start") for e in store.events() if e.kind == _FORMED)
        began_at = next(formed, None) if state.membership.counts_steps else None
        return LedgerStart(
            state=state,
            now=state.began_s + store.last_t_s(),
            began_at=began_at,
            began_utc_s=_began_utc_s(store),
        )
    except (sqlite3.Error, HoldfastError, AttributeError):
        return None


def _began_utc_s(store: Store) -> float | None:
    first = next(iter(store.raw_entries(0, 1)), None)
    if first is None:
        return None
    try:
        return decode(began_utc_s, (first[2], first[1]), "the first event")
    except Damaged:
        return None
