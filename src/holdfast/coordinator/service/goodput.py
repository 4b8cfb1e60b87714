"""Goodput: which part of the wall time went into steps that stayed, and what became of the rest."""

from __future__ import annotations

from typing import Any

from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.membership import wall_time
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


def shown(state: CoreState, now: float) -> dict[str, Any]:
    """Over all starts of the job's workers, in seconds. Unknown is None, and `unknown` names the classes that it hides.

    productive_s: steps that stayed, without what was lost in them; share: of wall_s. recomputed_s: steps that were rolled back
    and done again. computed_s: all steps, with what was lost in them. classes: every class that has any time; their sum is
    wall_s. recent: wall_s, productive_s, share and classes of the last hour.
    """
    recent = wall_time.recent(state, now)
    found = wall_time.classes(state, now)
    return totals(found, _unknown(state, found)) | {"recent": _shares(recent, _unknown(state, recent))}


def totals(found: dict[TimeClass, float], unknown: list[TimeClass]) -> dict[str, Any]:
    """What `shown` has of an account, but for `recent`. unknown: classes whose time cannot be told from that of others."""
    recomputed_s = _known(found, unknown, TimeClass.RECOMPUTED)
    silent = TimeClass.PRODUCTIVE in unknown and TimeClass.COMPUTED not in found
    computed_s = None if silent else sum(found.get(kind, 0.0) for kind in _STEPS)
    return _shares(found, unknown) | {
        "recomputed_s": _rounded(recomputed_s),
        "computed_s": _rounded(computed_s),
        "unknown": [kind.value for kind in unknown],
    }


def unknown_of(state: CoreState, now: float) -> list[TimeClass]:
    """What `shown` names as unknown."""
    return _unknown(state, wall_time.classes(state, now))


def _shares(found: dict[TimeClass, float], unknown: list[TimeClass]) -> dict[str, Any]:
    wall_s = sum(found.values())
    productive_s = _known(found, unknown, TimeClass.PRODUCTIVE)
    return {
        "wall_s": round(wall_s, DIGITS),
        "productive_s": _rounded(productive_s),
        "share": None if productive_s is None else round(productive_s / max(wall_s, 1e-9), 4),
        "classes": {kind.value: round(seconds, DIGITS) for kind, seconds in found.items()},
    }


def _unknown(state: CoreState, found: dict[TimeClass, float]) -> list[TimeClass]:
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
