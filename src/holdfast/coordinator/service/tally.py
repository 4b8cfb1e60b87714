"""Totals of a ledger, brought up to date by what is new in it.

A scrape must cost the same after ten million steps as after ten. So a tally remembers how far it has read, and each
reading takes what came since. Only a new coordinator reads the ledger once from its beginning.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from holdfast.coordinator.service.rollups import Dropped, dropped
from holdfast.protocol.ledger import counted_as
from holdfast.protocol.wire.decoding import decode

BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds of the histograms' buckets; what is longer is in one more."""

_DETECTED = ("detect_s", "decide_s")
_REPAIRED = ("replace_s", "join_s", "restore_s", "first_step_s")

READ = ("incident-resumed", "incident-closed", "asked")
"""Events whose fields count, and not only their number."""


class Durations(msgspec.Struct):
    """A histogram."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """How many fell into each bucket, in that alone."""
    total_s: float = 0.0
    newest: dict[int, tuple[int, float, float]] = {}
    """Bucket to the newest that fell into it: incident, seconds, and when, in seconds since 1970."""

    def add(self, seconds: float, incident: int, utc_s: float) -> None:
        """One more."""
        bucket = bisect_left(BOUNDS_S, seconds)
        self.counts[bucket] += 1
        self.total_s += seconds
        # One for each bucket is all that an exemplar needs, so this does not grow
        # with the number of incidents.
        self.newest[bucket] = incident, seconds, utc_s


class NewestStep(msgspec.Struct, frozen=True, kw_only=True):
    """The commit that the ledger learned of last. Null: not known."""

    t_s: float
    loss: float | None
    grad_norm: float | None
    lr: float | None
    weight: float | None


class Tally(msgspec.Struct, kw_only=True):
    """What was counted so far, and how far that was read. `read_tally` gives a new one: one is never changed after that."""

    ledger: str = ""
    """The ledger's own name; empty: it has no event yet."""
    seq: int = 0
    place: int = 0
    redone_row: int = 0
    """How far events, commits and commits that count no more were read."""
    commits: int = 0
    """All, also those of steps that were computed again."""
    redone: int = 0
    """Of these, those that count no more."""
    weight: float | None = None
    """Sum over all commits. It never falls, so a rate of it is right also after the job went back; null: never told."""
    newest: NewestStep | None = None
    kinds: dict[str, int] = {}
    """Events by kind."""
    stalls: dict[str, Durations] = {}
    """By what the incident is counted as: from each fault to the next commit."""
    full_strength: dict[str, Durations] = {}
    """The same to the first commit at full strength."""
    phases: dict[str, Durations] = {}
    """By the incident's phase, without its `_s`."""
    asked: set[int] = set()
    """Incidents about which a person was asked, and that are open."""
    recovered: dict[str, int] = msgspec.field(default_factory=lambda: {"job": 0, "person": 0})
    """Incidents that came back to full strength, by who had to do something."""

    @property
    def steps(self) -> int:
        """Committed steps that count."""
        return self.commits - self.redone


_tallies = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Tally)


def read_tally(db: sqlite3.Connection, before: Tally) -> Tally:
    """The same with all that is new in the ledger."""
    encoder, decoder = _tallies
    # A copy: another thread may still make figures of the one before.
    tally = decoder.decode(encoder.encode(before))
    if _has(db, "events"):
        _read_events(db, tally)
    columns = _has(db, "steps")
    if columns and "place" not in columns:  # of before, which a reader may not change, and nobody writes to
        tally.commits = db.execute("select count(*) from steps").fetchone()[0]
    elif columns:
        _read_steps(db, tally)
    return tally


def _has(db: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in db.execute(f"pragma table_info({table})")}


def _read_steps(db: sqlite3.Connection, tally: Tally) -> None:
    # In one transaction, or a commit could move from `steps` to `redone` between the two readings.
    place, row = tally.place, tally.redone_row
    db.execute("begin")
    try:
        if not place:
            # A tally that begins has not seen what went. One that goes on has counted it while it was there.
            gone = dropped(db)
            tally.commits, tally.redone, tally.weight = gone.commits, gone.redone, gone.weight
        # A commit that was read in `steps` keeps its place when it moves to `redone`, so it is counted once.
        for table in ("steps", "redone"):
            count, weight, newest = db.execute(
                f"select count(*), sum(weight), max(place) from {table} where place > ?", (place,)
            ).fetchone()
            tally.commits += count
            tally.place = max(tally.place, newest or 0)
            # A script that tells no weight leaves it unknown: 0 would be drawn as a rate of nothing.
            if weight is not None:
                tally.weight = (tally.weight or 0.0) + weight
        count, newest = db.execute(
            "select count(place), max(rowid) from redone where rowid > ?", (row,)
        ).fetchone()
        tally.redone, tally.redone_row = tally.redone + count, newest or row
        last = db.execute(
            "select t_s, loss, grad_norm, lr, weight from steps order by place desc limit 1"
        ).fetchone()
    finally:
        db.execute("commit")
    if last is not None:
        tally.newest = NewestStep(t_s=last[0], loss=last[1], grad_norm=last[2], lr=last[3], weight=last[4])


def _read_events(db: sqlite3.Connection, tally: Tally) -> None:
    # A ledger's name is when it began. It is read once, so that all exemplars of a start
    # lead to the same traces.
    if not tally.ledger:
        first = db.execute("select utc from events order by seq limit 1").fetchone()
        tally.ledger = first[0] if first else ""
    for kind, count in db.execute(
        "select kind, count(*) from events where seq > ? group by kind", (tally.seq,)
    ):
        tally.kinds[kind] = tally.kinds.get(kind, 0) + count
    query = "select seq, utc, kind, fields from events where seq > ? order by seq"
    for seq, utc, kind, fields in db.execute(query, (tally.seq,)):
        tally.seq = seq
        if kind in READ:
            read = partial(_happened, tally, kind, utc)
            decode(read, fields, "a row of it is damaged", error=sqlite3.DatabaseError)


def _happened(tally: Tally, kind: str, utc: str, fields: str) -> None:
    happened(tally, kind, msgspec.json.decode(fields), datetime.fromisoformat(utc).timestamp())


def happened(tally: Tally, kind: str, fields: dict[str, Any], utc_s: float) -> None:
    """Takes in one event of an incident; of others nothing but their number counts."""
    if kind == "asked":
        if fields.get("incident"):
            tally.asked.add(fields["incident"])
        return
    number = fields["id"]
    # What it was counted as then: a counter may not move from one label to another when the cause is found later.
    label = counted_as(fields.get("fault"), fields.get("rule"), fields.get("cause_kind"))
    told, table, phases = (
        (fields.get("stall_s"), tally.stalls, _DETECTED)
        if kind == "incident-resumed"
        else (fields.get("full_strength_s"), tally.full_strength, _REPAIRED)
    )
    if told is not None:
        table.setdefault(label, Durations()).add(told, number, utc_s)
    for name in phases:
        if (took := fields.get(name)) is not None:
            tally.phases.setdefault(name.removesuffix("_s"), Durations()).add(took, number, utc_s)
    if kind == "incident-closed":
        tally.recovered["person" if number in tally.asked else "job"] += 1
        # Forgotten with the close: if the incident opens again, only a new question
        # makes it a person's recovery.
        tally.asked.discard(number)


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Of all committed steps; null: not known."""

    count: int = 0
    median_s: float | None = None
    """Median time of a step, of those that have a row of their own."""
    skipped: int | None = None
    """Steps that count without an update."""
    loss: float | None = None
    """Of the newest step that has one."""
    dropped: dict[str, int] | None = None
    """How many rows went, by what they were; null: none."""


def read_summary(db: sqlite3.Connection, gone: Dropped) -> StepSummary:
    """Reads it. Takes a second for a million steps, in SQLite and not in Python."""
    there = {row[1] for row in db.execute("pragma table_info(steps)")}
    if not there:  # a ledger from before there were any, which a reader may not change
        return StepSummary()
    # Below the floor is only what was committed again after its row had gone: it is counted there.
    count = db.execute("select count(*) from steps where step >= ?", (gone.floors[0],)).fetchone()[0]
    skipped = None
    if "skipped" in there:
        skipped = db.execute("select sum(skipped) from steps where step >= ?", (gone.floors[0],)).fetchone()[
            0
        ]
    if gone.skipped is not None:
        skipped = gone.skipped + (skipped or 0)
    newest = db.execute("select loss from steps where loss is not null order by step desc limit 1").fetchone()
    left = {"steps": gone.steps, "figures": gone.figures, "names of workers": gone.unnamed}
    return StepSummary(
        count=gone.steps + count,
        median_s=_median(db),
        skipped=skipped,
        loss=newest[0] if newest else None,
        dropped={k: n for k, n in left.items() if n} or None,
    )


def _median(db: sqlite3.Connection) -> float | None:
    known = db.execute("select count(took_s) from steps").fetchone()[0]
    if not known:
        return None
    # As `statistics.median`: of an even number the mean of the two in the middle.
    middle = db.execute(
        "select took_s from steps where took_s is not null order by took_s limit ? offset ?",
        (2 - known % 2, (known - 1) // 2),
    ).fetchall()
    return float(sum(row[0] for row in middle) / len(middle))
