"""What a report tells of a job's steps: a few figures, which SQLite computes on the thread that reads."""

from __future__ import annotations

import sqlite3

import msgspec

from holdfast.coordinator.service.compaction import Dropped


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
