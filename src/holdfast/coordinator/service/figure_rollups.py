"""Summaries of what the script logs, of the same levels and by the same rules as those of steps (`rollups`).

A value is kept by itself as long as the row of its step. After that its buckets are all that is left of it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from holdfast.coordinator.service.rollups import FACTOR, LEVELS, POINTS, level_of

ROLLED = "figures-rolled-up"
"""Under which name the place of the newest step is kept that was written together with summaries of values."""

SCHEMA = """
create table if not exists figure_rollups (
    name text not null, level integer not null, bucket integer not null,
    n integer not null, total real, low real, high real,
    primary key (name, level, bucket)) without rowid;
"""

_OF_VALUES = "count(value), sum(value), min(value), max(value)"
_OF_BUCKETS = "sum(n), sum(total), min(low), max(high)"


def roll_up(db: sqlite3.Connection, written: Iterable[tuple[str, int]], floors: Sequence[int]) -> None:
    """Computes the buckets of these values, (name, step), anew, in the transaction that wrote them. floors: see
    `compaction.Dropped`."""
    named: dict[int, set[str]] = {}
    for name, step in written:
        named.setdefault(step // FACTOR, set()).add(name)
    for level in range(1, LEVELS + 1):
        # One whose parts have gone stays as it is, as in `rollups.roll_up`.
        named = {b: names for b, names in named.items() if b * FACTOR**level >= floors[level - 1]}
        # All names of a bucket with one statement: a script may log dozens in each step.
        db.executemany(
            f"insert or replace into figure_rollups select f.name, {level}, ?, {_below(level)} group by f.name",
            [(b, _json(names), b * FACTOR, (b + 1) * FACTOR) for b, names in named.items()],
        )
        above: dict[int, set[str]] = {}
        for bucket, names in named.items():
            above.setdefault(bucket // FACTOR, set()).update(names)
        named = above


def _below(level: int) -> str:
    # A cross join keeps SQLite to the order of the tables: a few names, and the range of each by the key.
    if level == 1:
        return (
            f"{_OF_VALUES} from (select value as name from json_each(?)) j cross join figures f "
            "where f.name = j.name and f.step >= ? and f.step < ?"
        )
    return (
        f"{_OF_BUCKETS} from (select value as name from json_each(?)) j cross join figure_rollups f "
        f"where f.name = j.name and f.level = {level - 1} and f.bucket >= ? and f.bucket < ?"
    )


def _json(names: Iterable[str]) -> str:
    return msgspec.json.encode(sorted(names)).decode()


def catch_up(db: sqlite3.Connection, place: int, floors: Sequence[int]) -> None:
    """Summarizes all values again where somebody wrote steps without it: an older version of this program.

    place: of the newest step in the file. What such a version let go of is in no summary.
    """
    row = db.execute("select value from kept where name = ?", (ROLLED,)).fetchone()
    if row is not None and int(row[0]) == place:
        return
    # One transaction: a kill leaves the old summaries, and the old mark.
    db.execute("begin")
    for level in range(1, LEVELS + 1):
        # Below the floor of its parts a summary is all that is left, and stays.
        first = -(-floors[level - 1] // FACTOR**level)
        db.execute("delete from figure_rollups where level = ? and bucket >= ?", (level, first))
        below, part, what = (
            ("figures where", "step", _OF_VALUES)
            if level == 1
            else (f"figure_rollups where level = {level - 1} and", "bucket", _OF_BUCKETS)
        )
        db.execute(
            f"insert into figure_rollups select name, {level}, {part} / {FACTOR}, {what} from {below} {part} >= ? "
            f"group by name, {part} / {FACTOR}",
            (first * FACTOR,),
        )
    mark(db, place)
    db.execute("commit")


def mark(db: sqlite3.Connection, place: int) -> None:
    """The summaries hold the values of all steps up to this place."""
    db.execute("insert or replace into kept values (?, ?)", (ROLLED, str(place).encode()))


def drop(db: sqlite3.Connection, names: Iterable[str], level: int, bucket: int) -> None:
    """Removes a level's buckets below this one; a coarser level has them."""
    db.executemany(
        "delete from figure_rollups where name = ? and level = ? and bucket < ?",
        [(name, level, bucket) for name in names],
    )


def names(db: sqlite3.Connection) -> list[str]:
    """Of what the script logged, sorted; also those of which only summaries are left."""
    there = {row[0] for row in db.execute("select name from sqlite_master where type = 'table'")}
    tables = there & {"figures", "figure_rollups"}
    return sorted({name for table in tables for name in names_in(db, table)})


def names_in(db: sqlite3.Connection, table: str) -> list[str]:
    """Of `figures` or `figure_rollups`. These are ordered by name, so names are found by jumps and not by reading all rows."""
    found = db.execute(
        f"with recursive names(n) as (select min(name) from {table} union all select (select min(name) from {table} "
        "where name > n) from names where n is not null) select n from names where n is not null"
    )
    return [name for (name,) in found]


def series(
    db: sqlite3.Connection,
    name: str,
    first: int,
    last: int,
    points: int = POINTS,
    floors: Sequence[int] = (),
) -> dict[str, list[Any]]:
    """The curve of one name over the steps first..last, as `rollups.series`: step, value (a mean), value_min, value_max.

    A value that is not finite is None by itself, and counts in no bucket.
    """
    level = level_of(first, last, points, floors)
    width = FACTOR**level
    there = {row[0] for row in db.execute("select name from sqlite_master where type = 'table'")}
    if "figures" not in there:
        rows = []
    elif level == 0:
        rows = db.execute(
            "select step, 1, value, value, value from figures where name = ? and step between ? and ? order by step",
            (name, first, last),
        ).fetchall()
    elif "figure_rollups" in there and level <= LEVELS:
        rows = db.execute(
            "select bucket, n, total, low, high from figure_rollups where name = ? and level = ? "
            "and bucket between ? and ? order by bucket",
            (name, level, first // width, last // width),
        ).fetchall()
    else:
        # A ledger of before, which a reader may not change: slow, and right.
        rows = db.execute(
            f"select step / {width}, {_OF_VALUES} from figures where name = ? and step / {width} between ? and ? "
            "group by 1 order by 1",
            (name, first // width, last // width),
        ).fetchall()
    return {
        "step": [row[0] * width for row in rows],
        "value": [row[2] / row[1] if row[1] and row[2] is not None else None for row in rows],
        "value_min": [row[3] for row in rows],
        "value_max": [row[4] for row in rows],
    }
