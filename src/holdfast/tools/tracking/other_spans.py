"""Traces that belong to no incident: one of each start of a job, and one of each checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.coordinator.service.store import LedgerEntry, NewStep
from holdfast.observe.traces import Span

START = "start"
"""Stands for the number of an incident in the ids of a start's trace."""
_MARKS = {"worker-started": "workers", "formed": "formed", "started": "formed"}
_SENT = "sent"


class Trace(NamedTuple):
    """One trace: its root, what it was made of in time, and what is known of it."""

    of: str
    """What its ids are made of, beside the ledger's name."""
    root: Span
    parts: tuple[Span, ...]
    attributes: Mapping[str, Any]
    is_good: bool = True


def hear(marks: Mapping[str, float], part: LedgerEntry | NewStep) -> tuple[dict[str, float], Trace | None]:
    """What is known of the start with one more part of the ledger, and its trace once it has made its first step.

    marks: when what came first, in seconds since the job's start. Of a start that ended before a step there is a trace that
    says so.
    """
    known = dict(marks)
    if _SENT in known:
        return known, None
    if isinstance(part, LedgerEntry):
        known.setdefault("begin", part.t_s)
        if (name := _MARKS.get(part.kind)) is not None:
            known.setdefault(name, part.t_s)
        if part.kind != "ended":
            return known, None
    end_s = part.t_s if isinstance(part, LedgerEntry) else part.row.t_s
    trace = _start(known, end_s, is_good=isinstance(part, NewStep))
    return {_SENT: 1.0}, trace


def _start(known: Mapping[str, float], end_s: float, is_good: bool) -> Trace:
    begin_s = known.get("begin", 0.0)
    # Each part ends where the next one begins. One whose end is not known reaches to the end of all.
    edges = [("nodes", begin_s), ("build", known.get("workers")), ("first_step", known.get("formed"))]
    there = [(name, at_s) for name, at_s in edges if at_s is not None]
    ends = [at_s for _, at_s in there[1:]] + [end_s]
    parts = tuple(Span(name, at_s, max(at_s, to_s)) for (name, at_s), to_s in zip(there, ends, strict=True))
    return Trace(START, Span("start", begin_s, max(begin_s, end_s)), parts, {}, is_good)


def checkpoint(entry: LedgerEntry) -> Trace | None:
    """Of a checkpoint that is complete; None: nobody measured when it began."""
    took_s = entry.fields.get("took_s")
    if entry.kind != "saved" or took_s is None:
        return None
    step, url = entry.fields["step"], entry.fields["url"]
    root = Span("checkpoint", max(0.0, entry.t_s - took_s), entry.t_s)
    about = {"holdfast.step": step, "holdfast.tier": url, "holdfast.skipped": entry.fields.get("skipped")}
    return Trace(f"checkpoint {step} {url}", root, (), about)
