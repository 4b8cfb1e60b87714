"""Summaries of what scripts log with `run.log`, for each name by itself: as `rollups` has them of steps, and kept as long.

Names have a bound: `run.log` refuses more than `messages.MOST_FIGURES`, and the core takes no more of them
(`membership.script_metrics`). So a commit makes a bounded number of summaries, and nothing here counts names again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from holdfast.coordinator.service.rollups import FACTOR, LEVELS, POINTS, level_of, tables

SCHEMA = """
create table if not exists figure_rollups (
    name text not null, level integer not null, bucket integer not null,
    n integer not null, sum real, min real, max real,
    primary key (name, level, bucket)) without rowid;
"""

# A value that is not a number is null: it is in no mean, and a bucket of nothing else has no mean.
_OF_VALUES = "count(value), sum(value), min(value), max(value)"
_OF_BUCKETS = "sum(n), sum(sum), min(min), max(max)"


def roll_up(db: sqlite3.Connection, told: Iterable[tuple[str, int]], floors: Sequence[int]) -> None:
    """Computes the buckets of these values anew, in the transaction that wrote them. So one that is told twice, or that
    replaces the value of a step that was rolled back, leaves a bucket right.

    told: (name, step). floors: see `compaction.Dropped`.
    """
    buckets: dict[int, set[str]] = {}
    for name, step in told:
        buckets.setdefault(step // FACTOR, set()).add(name)
    # From below: each level is made of the one below it, which is right by then.
    for level in range(1, LEVELS + 1):
        # One whose parts have gone stays as it is: it cannot be computed from what is left of them.
        buckets = {b: names for b, names in buckets.items() if b * FACTOR**level >= floors[level - 1]}
        table, part, what = _below(level)
        # All names of a bucket in one statement: a script that logs dozens of values in every step costs seven of them.
        db.executemany(
            f"insert or replace into figure_rollups select name, {level}, ?, {what} from {table} "
            f"name in (select value from json_each(?)) and {part} >= ? and {part} < ? group by name",
            [
                (b, msgspec.json.encode(sorted(names)).decode(), b * FACTOR, (b + 1) * FACTOR)
                for b, names in buckets.items()
            ],
        )
        above: dict[int, set[str]] = {}
        for b, names in buckets.items():
            above.setdefault(b // FACTOR, set()).update(names)
        buckets = above


def _below(level: int) -> tuple[str, str, str]:
    """Of what a level is made: the table with its condition, the column of its parts, and what is taken of them."""
    if level == 1:
        return "figures where", "step", _OF_VALUES
    return f"figure_rollups where level = {level - 1} and", "bucket", _OF_BUCKETS


def drop(db: sqlite3.Connection, level: int, bucket: int) -> None:
    """Removes the summaries of a level below a bucket, in the transaction that removes those of the steps."""
    for name in names(db, "figure_rollups"):
        db.execute(
            "delete from figure_rollups where name = ? and level = ? and bucket < ?", (name, level, bucket)
        )


def names(db: sqlite3.Connection, table: str = "figures") -> list[str]:
    """Of what the script logged, in order. table: `figures`, or `figure_rollups`, which has also those of which only
    summaries are left. They are ordered by name, so names are found by jumps and not by reading all of it."""
    # Each column with its table: `figure_rollups` has an `n` of its own, and any other may come.
    found = db.execute(
        f"with recursive known(it) as (select min(t.name) from {table} t union all select (select min(t.name) from {table} t "
        "where t.name > known.it) from known where known.it is not null) select it from known where it is not null"
    )
    return [name for (name,) in found]


def known_names(db: sqlite3.Connection) -> list[str]:
    """Of all that was ever logged, in order."""
    there = tables(db)
    found = {name for table in ("figures", "figure_rollups") if table in there for name in names(db, table)}
    return sorted(found)


def series(
    db: sqlite3.Connection,
    name: str,
    first: int,
    last: int,
    points: int = POINTS,
    floors: Sequence[int] = (),
) -> dict[str, list[Any]]:
    """The curve of one name over the steps first..last, as columns of at most `points` values, the steps ascending.

    step: the first of the bucket; a bucket in which nothing was logged is left out. value: the mean of what was logged in it, with
    `value_min` and `value_max` beside it; None: it was no number. floors: see `compaction.Dropped`; what went is shown by the
    finest level that has the whole range.
    """
    level = level_of(first, last, points, floors)
    width = FACTOR**level
    low, high = first // width, last // width
    if "figures" not in tables(db):
        rows = []
    elif level:
        # Above the highest level there are so many steps that a bucket of it is but a part of a point.
        at = min(level, LEVELS)
        parts = FACTOR ** (level - at)
        rows = db.execute(
            f"select bucket / {parts}, {_OF_BUCKETS} from figure_rollups where name = ? and level = {at} "
            f"and bucket between ? and ? group by 1 order by 1",
            (name, low * parts, (high + 1) * parts - 1),
        ).fetchall()
    else:
        rows = db.execute(
            f"select step, {_OF_VALUES} from figures where name = ? and step between ? and ? group by 1 order by 1",
            (name, first, last),
        ).fetchall()
    return {
        "step": [bucket * width for bucket, *_ in rows],
        "value": [total / n if n and total is not None else None for _, n, total, *_ in rows],
        "value_min": [least for *_, least, _ in rows],
        "value_max": [most for *_, most in rows],
    }
