"""Goodput over all starts of a job (each a `holdfast run`), from the state that each start left in its ledger.

A start's own account calls the steps productive that stayed in it. Where the next start went on before they ended, they
were done again: so the accounts are not simply added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.membership import step_accounting, wall_time
from holdfast.coordinator.service import goodput
from holdfast.protocol.phases import TimeClass

_DIVIDED = (TimeClass.PRODUCTIVE, TimeClass.RECOMPUTED)


class Start(msgspec.Struct, kw_only=True):
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


def summed(earlier: Account, starts: Sequence[Start | None]) -> dict[str, Any]:
    """What `goodput.shown` has, over `earlier` and `starts`, oldest first. None among them: it cannot be read, and so nothing
    is known. starts: their number. elapsed_s: from the beginning of the first to the end of the newest; between_s: the part of
    it that is in no start, and so in no class. ettr: productive_s over elapsed_s."""
    account = earlier
    for number in range(len(starts)):
        account = _with(account, starts[number], starts[number + 1 :])
    found = {kind: account.seconds[kind] for kind in TimeClass if account.seconds.get(kind)}
    unknown = [kind for kind in TimeClass if kind in account.unknown]
    if not account.known:
        found, unknown = {}, list(TimeClass)
    shown = goodput.totals(found, unknown)
    # Of a start that cannot be read not even the length is known, so there is no wall time of all.
    shown |= {} if account.known else {"wall_s": None}
    return {"starts": account.starts} | shown | _elapsed(account, starts[-1] if starts else None, shown)


def _elapsed(account: Account, newest: Start | None, shown: Mapping[str, Any]) -> dict[str, float | None]:
    """The time from the first start on, which has that between two starts. By the clocks of the machines that they ran on."""
    if account.began_utc_s is None or newest is None or newest.began_utc_s is None or shown["wall_s"] is None:
        return {"elapsed_s": None, "between_s": None, "ettr": None}
    end_s = newest.began_utc_s + newest.now - newest.state.began_s
    # Clocks of two machines may differ by more than there was between two starts: no time is negative.
    elapsed_s = max(end_s - account.began_utc_s, shown["wall_s"])
    productive_s = shown["productive_s"]
    return {
        "elapsed_s": round(elapsed_s, goodput.DIGITS),
        "between_s": round(elapsed_s - shown["wall_s"], goodput.DIGITS),
        "ettr": None if productive_s is None else round(productive_s / max(elapsed_s, 1e-9), 4),
    }


def forget(earlier: Account, number: int, first: Start | None, later: Sequence[Start | None]) -> Account:
    """The account with one start more, of this number, whose ledger is about to be removed. later: the starts after it."""
    return msgspec.structs.replace(_with(earlier, first, later), through=number)


def _with(account: Account, start: Start | None, later: Sequence[Start | None]) -> Account:
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


def _corrected(start: Start, later: Sequence[Start | None]) -> tuple[dict[str, float], list[TimeClass], int]:
    """A start's classes without what later starts did again, the classes that these hide, and how far it reached."""
    # The state is changed as if the job itself had gone back. It is a copy of the ledger's, which stays.
    state = start.state
    wall_time.closes(state, start.now)
    back = _went_back_to(state, later)
    if isinstance(back, int):
        wall_time.went_back(state, back)
    found = {kind.value: s for kind, s in wall_time.classes(state, start.now).items()}
    unknown = goodput.unknown_of(state, start.now)
    if back is None and TimeClass.PRODUCTIVE in found:
        found[TimeClass.COMPUTED] = sum(found.pop(kind, 0.0) for kind in _DIVIDED)
        unknown = [*unknown, *_DIVIDED]
    reached = state.membership.committed if state.membership.counts_steps else 0
    # Steps after the point that a later start went back to did not stay, so they were not reached.
    return found, unknown, min(reached, back) if isinstance(back, int) else reached


_NOWHERE = "nowhere"
"""No later start went back into this one."""


def _went_back_to(state: CoreState, later: Sequence[Start | None]) -> int | str | None:
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
