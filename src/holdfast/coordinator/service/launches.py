"""The starts of a job (each a `holdfast run`), and what was asked for differently from one to the next."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from holdfast.coordinator.service.store import Store, newest_ledger
from holdfast.errors import HoldfastError
from holdfast.protocol.job import JobSpec

SHOWN = 10
_NOT_ASKED_FOR = frozenset({"name"})


def launches(job_dir: Path, spec: JobSpec, store: Store) -> dict[str, Any]:
    """The newest starts, newest first: number, when it began, outcome, committed steps, and `changes`: [option, before, now].

    store: the ledger of the newest start.
    """
    before = sorted((int(d.name), d) for d in (job_dir / "runs").glob("*") if d.name.isdigit())
    known = [(number, _earlier(folder)) for number, folder in before[-SHOWN:]]
    newest = max((number for number, _ in before), default=0) + 1
    first = store.raw_entries(0, 1)
    told: dict[str, Any] = {"utc": first[0][2] if first else None, "outcome": None, "steps": None}
    state = store.load()
    if state is not None:
        told |= {"outcome": state.membership.outcome, "steps": state.step}
    known.append((newest, {"spec": msgspec.to_builtins(spec), **told}))
    shown: list[dict[str, Any]] = []
    last: Mapping[str, Any] | None = None
    for number, start in known:
        # Of one whose ledger is gone or cannot be read nothing is known, so neither is a difference to it.
        changes = None if last is None or start is None else differences(last, start["spec"])
        facts = {} if start is None else {k: start[k] for k in ("utc", "outcome", "steps")}
        shown.append(
            {"number": number, "utc": None, "outcome": None, "steps": None, **facts, "changes": changes}
        )
        last = start["spec"] if start is not None else None
    return {"launches": shown[::-1]}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    """[option, before, now] of each value that differs; groups of options are looked into."""
    found: list[list[str]] = []
    for name in sorted(before.keys() | now.keys()):
        one, other = before.get(name), now.get(name)
        if one == other or name in _NOT_ASKED_FOR:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += differences(one, other, f"{prefix}{name}.")
        else:
            found.append([f"{prefix}{name}", _words(one), _words(other)])
    return found


def _words(value: Any) -> str:
    if isinstance(value, list | tuple) and all(isinstance(x, str) for x in value):
        return " ".join(value) or "–"
    return (
        value
        if isinstance(value, str) and value
        else "–"
        if value in (None, "")
        else msgspec.json.encode(value).decode()
    )


@lru_cache(maxsize=64)
def _earlier(folder: Path) -> dict[str, Any] | None:
    """What one start left; nobody changes it any more, so it is read once. None: it cannot be read."""
    try:
        with closing(Store(newest_ledger(folder), read_only=True)) as store:
            state = store.load()
            first = store.raw_entries(0, 1)
    except (sqlite3.Error, HoldfastError):
        return None
    if state is None:
        return None
    return {
        "spec": msgspec.to_builtins(state.spec),
        "utc": first[0][2] if first else None,
        "outcome": state.membership.outcome or "killed",
        "steps": state.step,
    }
