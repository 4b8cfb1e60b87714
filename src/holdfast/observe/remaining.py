"""When a job will be done, for the page and the terminal: what is left of its steps, at the speed that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.protocol import units


def remaining(
    until: int | None, step: int | None, step_s: float | None, goodput: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Steps left, and the seconds that they take: `least_s` if nothing fails from now on, `eta_s` with the share of the time that
    went into progress so far, `most_s` with the lesser of that and the last hour's. None: the number of all steps is
    not known.

    until: committed steps of the whole job. step: committed so far. step_s: of one step. goodput: as the status has it.
    """
    if not until:
        return None
    left = max(0, until - (step or 0))
    recent = (goodput.get("recent") or {}).get("share")
    share = goodput.get("share")
    least_s = None if step_s is None else left * step_s

    def at(share: float | None) -> float | None:
        # A job that has only started has no share that says anything of the rest.
        return None if least_s is None or not share else round(least_s / share, 3)

    known = [s for s in (share, recent) if s]
    return {
        "until": until,
        "left": left,
        "least_s": None if least_s is None else round(least_s, 3),
        "eta_s": at(share),
        "most_s": at(min(known, default=None)),
    }


def remaining_words(found: Mapping[str, Any] | None) -> str:
    """`3 min 05 s left`, or `1,200 steps left` where nobody knows how long they take; empty where nothing is known. Short: a line
    of progress has 100 columns."""
    if found is None:
        return ""
    if not found["left"]:
        return "all steps are done"
    seconds = found["eta_s"] if found["eta_s"] is not None else found["least_s"]
    return f"{units.plural(found['left'], 'step') if seconds is None else units.seconds(seconds)} left"


def of_status(status: Mapping[str, Any], rate: float | None = None) -> dict[str, Any] | None:
    """The same of a status. rate: steps per second, where it was measured."""
    step_s = 1.0 / rate if rate else status.get("median_s")
    return remaining(status.get("until"), status["step"], step_s, status.get("goodput") or {})
