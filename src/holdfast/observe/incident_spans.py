"""The phases of an incident as stretches of time, for traces. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Facts = Mapping[str, Any]
"""The fields of an incident's event, see `protocol.ledger.incidents.IncidentFacts`."""


class Span(NamedTuple):
    """A stretch of time, in seconds since the job's start."""

    name: str
    begin_s: float
    end_s: float


def whole(facts: Facts) -> Span | None:
    """From the fault to full strength, or as far as it came; None: not even its begin is known."""
    began_s = facts.get("t_s")
    if began_s is None:
        return None
    # The latest end that is known: full strength comes after the stall, and the stall after the detection.
    known = [facts.get(name) for name in ("full_strength_s", "stall_s", "detect_s")]
    return Span("incident", began_s, began_s + next((x for x in known if x is not None), 0.0))


def phases(facts: Facts) -> list[Span]:
    """Its phases in their order. None overlaps another, and all are within the whole.

    The ledger has durations, of which some run beside each other: a newcomer starts while it is decided. Each phase gets the
    part that comes after those before it.
    """
    span = whole(facts)
    if span is None:
        return []
    detected_s = span.begin_s + (facts.get("detect_s") or 0.0)
    ends = [("detect", detected_s if facts.get("detect_s") is not None else None)]
    ends += [(n, _after(detected_s, facts.get(f"{n}_s"))) for n in ("decide", "replace")]
    # From here on backward: the first step is what the ledger dates last.
    if (step_s := facts.get("first_step_s")) is not None:
        joined_s = span.end_s - step_s
        restored = facts.get("restore_s")
        ends.append(("join", joined_s - (restored or 0.0) if facts.get("join_s") is not None else None))
        ends += [("restore", joined_s if restored is not None else None), ("first_step", span.end_s)]
    found, at_s = [], span.begin_s
    for name, end_s in ends:
        if end_s is not None and (until_s := min(end_s, span.end_s)) > at_s:
            found.append(Span(name, at_s, until_s))
            at_s = until_s
    return found


def _after(begin_s: float, took_s: float | None) -> float | None:
    return None if took_s is None else begin_s + took_s
