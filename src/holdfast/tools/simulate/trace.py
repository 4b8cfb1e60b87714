"""Recorded traces of the presence of nodes. Read from CSV or JSON, our own or the public spot-instance traces'.

- `t_s,node,event` (CSV with this head; `event` is up or down), or JSON: a list of {"t_s": 60, "node": "a", "up": true}.
- {"metadata": {"gap_seconds": 300}, "data": [16, 15, ...]}: the number of nodes at every tick (spot-traces).
- `2021-12-11, 11:11:30, 55`: the number of nodes from then on (Bamboo).

A count does not identify nodes: those that came last leave first, because no node is better than another.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from holdfast.errors import UsageError
from holdfast.protocol.wire.decoding import decode


class NodeChange(msgspec.Struct, frozen=True):
    """A node is there from a time on, or is not there any more."""

    t_s: float
    """Seconds since the trace's start."""
    node: str
    up: bool


class NodeTrace(msgspec.Struct, frozen=True):
    """A record of the presence of nodes."""

    changes: tuple[NodeChange, ...]
    """In the order of their times."""
    ends_s: float
    """Seconds since the trace's start."""
    most: int
    """The largest number of nodes at once."""


def parse(name: str, text: str) -> NodeTrace:
    """Reads a trace. name: that of the file, for error messages.

    Raises:
        UsageError: it is not a trace; the message names the line.
    """
    stripped = text.lstrip()
    if not stripped:
        raise UsageError(f"trace {name} is empty; for example\nt_s,node,event\n0,a,up\n3600,a,down")
    # Recognized by the content, not by the file's name: public traces have all kinds of names.
    if stripped[0] in "[{":
        return _json(name, text)
    if stripped[0].isdigit():
        return _dated_counts(name, text)
    return _events_csv(name, text)


def _events_csv(name: str, text: str) -> NodeTrace:
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    if not {"t_s", "node", "event"} <= set(reader.fieldnames or ()):
        raise UsageError(
            f"trace {name}: the head is {','.join(reader.fieldnames or ())}; it must be t_s,node,event"
        )
    changes = []
    for row in reader:
        at = f"trace {name}, line {reader.line_num}"
        if row["event"] not in ("up", "down"):
            raise UsageError(f"{at}: event {row['event']!r} is neither up nor down")
        changes.append(NodeChange(_time(at, row["t_s"]), str(row["node"]), row["event"] == "up"))
    return _ordered(name, changes)


def _json(name: str, text: str) -> NodeTrace:
    found: Any = decode(msgspec.json.decode, text, f"trace {name} is no JSON", error=UsageError)
    if isinstance(found, list):
        what = f'trace {name} is no list of changes; for example {{"t_s": 60, "node": "a", "up": true}}'
        read = partial(msgspec.convert, type=list[NodeChange])
        return _ordered(name, decode(read, found, what, error=UsageError))
    try:
        gap_s = float(found["metadata"]["gap_seconds"])
        counts = [int(x) for x in found["data"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"trace {name}: metadata.gap_seconds and data are missing, or no numbers") from error
    if gap_s <= 0:
        raise UsageError(f"trace {name}: metadata.gap_seconds: {gap_s:g} is not positive; for example 300")
    return _counts(name, ((i * gap_s, n) for i, n in enumerate(counts)), gap_s)


def _dated_counts(name: str, text: str) -> NodeTrace:
    points: list[tuple[float, int]] = []
    first: datetime | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            day, clock, count = (x.strip() for x in line.split(","))
            at = datetime.fromisoformat(f"{day} {clock}")
            # The first line is time 0, so a trace can begin on any day. Its clock has no time zone: if it
            # goes back for winter time within a trace, `_ordered` refuses it.
            first = first or at
            points.append(((at - first).total_seconds(), int(count)))
        except ValueError as error:
            raise UsageError(
                f"trace {name}, line {number}: {line!r} is not like 2021-12-11, 11:11:30, 55"
            ) from error
    return _counts(name, points, 60.0)


def _counts(name: str, points: Iterable[tuple[float, int]], last_s: float) -> NodeTrace:
    there: list[str] = []
    changes: list[NodeChange] = []
    at_s, made = 0.0, 0
    for at_s, count in points:
        if count < 0:
            raise UsageError(f"trace {name}: {count} nodes at {at_s:g} s")
        # Last in, first out. Which nodes left is not recorded, and any other order would make nodes return
        # more often than the record shows.
        while len(there) > count:
            changes.append(NodeChange(at_s, there.pop(), False))
        while len(there) < count:
            there.append(f"t{made}")
            made += 1
            changes.append(NodeChange(at_s, there[-1], True))
    return _ordered(name, changes, at_s + last_s)


def _ordered(name: str, changes: list[NodeChange], ends_s: float | None = None) -> NodeTrace:
    if not changes:
        raise UsageError(f"trace {name}: no node is ever there")
    times = [c.t_s for c in changes]
    # Refused and not sorted: a trace out of order is usually one with a wrong column.
    if min(times) < 0 or times != sorted(times):
        raise UsageError(f"trace {name}: times must not be negative, nor go back")
    there, most = set[str](), 0
    for change in changes:
        (there.add if change.up else there.discard)(change.node)
        most = max(most, len(there))
    return NodeTrace(tuple(changes), times[-1] + 60.0 if ends_s is None else ends_s, most)


def _time(at: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{at}: t_s {text!r} is no number of seconds") from None
