"""The starts of a job (each a `holdfast run`): their ledgers, and an account of those whose ledgers were removed."""

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
"""File in `runs/` with the account of the starts whose folders were removed."""

_FORMED = "formed"


def put_away(job_dir: Path) -> list[tuple[int, Path]]:
    """The numbers (from 1) and folders of the earlier starts that are kept, oldest first."""
    # Sorted by number and not by name, because 10 comes after 9 and the account depends on the order.
    return sorted((int(d.name), d) for d in (job_dir / "runs").glob("*") if d.name.isdigit())


def all_starts(job_dir: Path, newest: Store) -> dict[str, Any] | None:
    """The goodput over all starts of a job, see `summed`; None: there was only one start."""
    earlier = _earlier(job_dir / "runs")
    # Without starts that were refused before they had a ledger, since they have not trained.
    before = [
        read(folder)
        for number, folder in put_away(job_dir)
        if number > earlier.through and newest_ledger(folder).exists()
    ]
    if not before and not earlier.starts:
        return None
    return summed(earlier, [*before, _start(newest)])


def read(folder: Path) -> LedgerStart | None:
    """A start, from the ledger in its folder; None: the ledger cannot be read."""
    try:
        # Read-only, because opening it for writing would upgrade an older ledger's tables, and what an ended start has left must
        # not be changed.
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
        # The account has the number of the last start in it. So if this process dies before the folder is removed, the start is
        # not counted a second time.
        if number > earlier.through and newest_ledger(folder).exists():
            later = [read(f) for _, f in there[place + 1 :] if newest_ledger(f).exists()]
            work = runs / f".{EARLIER}"
            # Written to a temporary file and renamed, so that a kill leaves the old account or the new one, and never half of
            # one.
            work.write_bytes(msgspec.json.encode(forget(earlier, number, read(folder), later)))
            work.rename(runs / EARLIER)
        # A folder that cannot be removed now is tried again later. It is in the account, so it counts only once.
        shutil.rmtree(folder, ignore_errors=True)


_accounts = msgspec.json.Decoder(Account)


def _earlier(runs: Path) -> Account:
    try:
        return decode_file(_accounts.decode, runs / EARLIER)
    except FileNotFoundError:
        return Account()
    except (OSError, Damaged):
        # A damaged account counts as unknown and not as empty: goodput without those starts would look too good.
        return Account(starts=1, known=False)


def _start(store: Store) -> LedgerStart | None:
    try:
        state = store.load()
        if state is None:
            return None
        # The first generation has the step that the start resumed from. Later ones have the steps to which it went back by
        # itself.
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
