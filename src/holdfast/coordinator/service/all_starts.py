"""The starts of a job (each a `holdfast run`): the goodput of one and over all of them, from the state that each left in its
ledger, and what was asked for differently from one to the next.

A start's own account calls the steps productive that stayed in it. Where the next start went on before they ended, they
were done again: so the accounts are not simply added.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.membership import step_accounting, wall_time
from holdfast.coordinator.service.store import Store, newest_ledger
from holdfast.errors import HoldfastError
from holdfast.protocol.job import JobSpec
from holdfast.protocol.phases import TimeClass

_STEPS = (
    TimeClass.COMPUTED,
    TimeClass.PRODUCTIVE,
    TimeClass.RECOMPUTED,
    TimeClass.SLOW_RANKS,
    TimeClass.DATA_WAIT,
    TimeClass.SNAPSHOT_STALL,
    TimeClass.FEWER_WORKERS,
    TimeClass.IDLE_DIVISION,
)

DIGITS = 6
"""Of seconds: the classes, each rounded by itself, still add up to the wall time to a millisecond."""

_DIVIDED = (TimeClass.PRODUCTIVE, TimeClass.RECOMPUTED)


class LedgerStart(msgspec.Struct, kw_only=True):
    """One start of a job, as its ledger has it."""

    state: CoreState
    now: float
    """On the clock of the state: when it ended, or was last heard of."""
    began_at: int | None
    """At level 2: the committed steps that its first generation went on from. None: there was none."""
    began_utc_s: float | None = None
    """When it began, in seconds since 1970. None: not known."""


class Account(msgspec.Struct, kw_only=True):
    """Starts whose ledgers are gone, added up: what `runs/earlier.json` has."""

    starts: int = 0
    through: int = 0
    """Number of the newest of them. A folder with this number or one below is about to be removed."""
    known: bool = True
    """False: one of them could not be read."""
    began_utc_s: float | None = None
    """When the first of them began, in seconds since 1970. None: not known."""
    seconds: dict[str, float] = {}
    """By class."""
    unknown: list[str] = []
    reached: int = 0
    """At level 2: committed steps that stayed, as far as the starts after them had gone back."""


def summed(earlier: Account, starts: Sequence[LedgerStart | None]) -> dict[str, Any]:
    """What `job_view.goodput_of` has, over `earlier` and `starts`, oldest first. None among them: it cannot be read, and so nothing
    is known. starts: their number. elapsed_s: from the beginning of the first to the end of the newest; between_s: the part of
    it that is in no start, and so in no class. ettr: productive_s over elapsed_s."""
    account = earlier
    for number in range(len(starts)):
        account = _with(account, starts[number], starts[number + 1 :])
    found = {kind: account.seconds[kind] for kind in TimeClass if account.seconds.get(kind)}
    unknown = [kind for kind in TimeClass if kind in account.unknown]
    if not account.known:
        found, unknown = {}, list(TimeClass)
    shown = goodput_totals(found, unknown)
    # Of a start that cannot be read not even the length is known, so there is no wall time of all.
    shown |= {} if account.known else {"wall_s": None}
    return {"starts": account.starts} | shown | _elapsed(account, starts[-1] if starts else None, shown)


def _elapsed(
    account: Account, newest: LedgerStart | None, shown: Mapping[str, Any]
) -> dict[str, float | None]:
    """The time from the first start on, which has that between two starts. By the clocks of the machines that they ran on."""
    if account.began_utc_s is None or newest is None or newest.began_utc_s is None or shown["wall_s"] is None:
        return {"elapsed_s": None, "between_s": None, "ettr": None}
    end_s = newest.began_utc_s + newest.now - newest.state.began_s
    # Clocks of two machines may differ by more than there was between two starts: no time is negative.
    elapsed_s = max(end_s - account.began_utc_s, shown["wall_s"])
    productive_s = shown["productive_s"]
    return {
        "elapsed_s": round(elapsed_s, DIGITS),
        "between_s": round(elapsed_s - shown["wall_s"], DIGITS),
        "ettr": None if productive_s is None else round(productive_s / max(elapsed_s, 1e-9), 4),
    }


def forget(
    earlier: Account, number: int, first: LedgerStart | None, later: Sequence[LedgerStart | None]
) -> Account:
    """The account with one start more, of this number, whose ledger is about to be removed. later: the starts after it."""
    return msgspec.structs.replace(_with(earlier, first, later), through=number)


def _with(account: Account, start: LedgerStart | None, later: Sequence[LedgerStart | None]) -> Account:
    # One that cannot be read makes every sum unknown: a total without it would look too good.
    if start is None:
        return Account(starts=account.starts + 1, through=account.through, known=False)
    # The first one's, and no other's: where that is not known, the whole is not.
    began_utc_s = account.began_utc_s if account.starts else start.began_utc_s
    found, unknown, reached = _corrected(start, later)
    # Its first generation went back into starts that are gone: which of their seconds that was, nobody knows any more.
    if start.began_at is not None and start.began_at < account.reached:
        unknown = [*unknown, *_DIVIDED]
    kinds = account.seconds.keys() | found.keys()
    return Account(
        starts=account.starts + 1,
        through=account.through,
        known=account.known,
        began_utc_s=began_utc_s,
        seconds={kind: account.seconds.get(kind, 0.0) + found.get(kind, 0.0) for kind in sorted(kinds)},
        unknown=sorted({*account.unknown, *unknown}),
        reached=max(account.reached, reached),
    )


def _corrected(
    start: LedgerStart, later: Sequence[LedgerStart | None]
) -> tuple[dict[str, float], list[TimeClass], int]:
    """A start's classes without what later starts did again, the classes that these hide, and how far it reached."""
    # The state is changed as if the job itself had gone back. It is a copy of the ledger's, which stays.
    state = start.state
    wall_time.closes(state, start.now)
    back = _went_back_to(state, later)
    if isinstance(back, int):
        wall_time.went_back(state, back)
    found = {kind.value: s for kind, s in wall_time.classes(state, start.now).items()}
    unknown = unknown_classes(state, wall_time.classes(state, start.now))
    if back is None and TimeClass.PRODUCTIVE in found:
        found[TimeClass.COMPUTED] = sum(found.pop(kind, 0.0) for kind in _DIVIDED)
        unknown = [*unknown, *_DIVIDED]
    reached = state.membership.committed if state.membership.counts_steps else 0
    # Steps after the point that a later start went back to did not stay, so they were not reached.
    return found, unknown, min(reached, back) if isinstance(back, int) else reached


_NOWHERE = "nowhere"
"""No later start went back into this one."""


def _went_back_to(state: CoreState, later: Sequence[LedgerStart | None]) -> int | str | None:
    """The position in this start that the starts after it went back to. None: nobody knows."""
    trained = [x for x in later if x is None or x.state.membership.number]
    if not trained:
        return _NOWHERE
    if None in trained or not state.membership.number:
        return None if state.membership.number else _NOWHERE
    levels = {x.state.membership.counts_steps for x in trained if x is not None}
    if levels != {state.membership.counts_steps}:
        return None  # another script, whose steps say nothing of those here
    if state.membership.counts_steps:
        begun = [x.began_at for x in trained if x is not None and x.began_at is not None]
        return min(begun) if begun else _NOWHERE
    return _of_its_states(state, [x.state for x in trained if x is not None])


def _of_its_states(state: CoreState, later: Sequence[CoreState]) -> int | str | None:
    """At levels 0 and 1: a script that loads with `holdfast.checkpoint` has told what it went on from."""
    given, lowest = state.membership.counted.given, None
    for number, after in enumerate(later):
        name = step_accounting.began_with(after)
        at = None if name is None else given.get(name)
        # A later one may have gone on from a state of a start between. The next one's is of this start, or unknown.
        if at is None and number == 0:
            return None
        if at is not None:
            lowest = at if lowest is None else min(lowest, at)
    return lowest


def goodput_totals(found: dict[TimeClass, float], unknown: list[TimeClass]) -> dict[str, Any]:
    """The fields of `Goodput` of an account, but for `recent`. unknown: classes whose time cannot be told from that of others."""
    recomputed_s = _known(found, unknown, TimeClass.RECOMPUTED)
    silent = TimeClass.PRODUCTIVE in unknown and TimeClass.COMPUTED not in found
    computed_s = None if silent else sum(found.get(kind, 0.0) for kind in _STEPS)
    return time_shares(found, unknown) | {
        "recomputed_s": _rounded(recomputed_s),
        "computed_s": _rounded(computed_s),
        "unknown": [kind.value for kind in unknown],
    }


def time_shares(found: dict[TimeClass, float], unknown: list[TimeClass]) -> dict[str, Any]:
    """The fields of `protocol.job_view.TimeShares`."""
    wall_s = sum(found.values())
    productive_s = _known(found, unknown, TimeClass.PRODUCTIVE)
    return {
        "wall_s": round(wall_s, DIGITS),
        "productive_s": _rounded(productive_s),
        "share": None if productive_s is None else round(productive_s / max(wall_s, 1e-9), 4),
        "classes": {kind.value: round(seconds, DIGITS) for kind, seconds in found.items()},
    }


def unknown_classes(state: CoreState, found: dict[TimeClass, float]) -> list[TimeClass]:
    """Classes whose time, or a part of it, cannot be told from that of others."""
    if TimeClass.UNEXPLAINED in found:
        return [TimeClass.START, TimeClass.PRODUCTIVE, TimeClass.RECOMPUTED, TimeClass.RESTART]
    if wall_time.is_divided(state):
        return []
    return [TimeClass.PRODUCTIVE, TimeClass.RECOMPUTED]


def _known(found: dict[TimeClass, float], unknown: list[TimeClass], kind: TimeClass) -> float | None:
    return None if kind in unknown else found.get(kind, 0.0)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, DIGITS)


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
