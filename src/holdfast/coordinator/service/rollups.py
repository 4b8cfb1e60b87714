"""Summaries of committed steps and of what scripts log, so that any range of a curve is read in constant time, however long the
job is; and what a ledger lets go of, so that its size follows what happened to the job and not how long it trained.

A bucket of level L is about 8^L steps in a row. It is computed anew from the eight buckets below it whenever one of its
steps is written, in the transaction of that step. So a step that is told twice, or that replaces one that was rolled back,
leaves a bucket right: a running sum could not take a minimum back.

Kept are all events, the newest steps with what the script logged for them, and summaries of both for all steps. Rows of old steps
go when their summary is written, and old summaries when a coarser one is. Of old generations the names of the workers go,
which are nearly all of such an entry. What a report tells of the rows that went is counted before they go.

Names that scripts log have a bound: `run.log` refuses more than `messages.MOST_FIGURES`, and the core takes no more of them
(`membership.workers`). So a commit makes a bounded number of summaries, and nothing here counts names again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from holdfast.protocol.wire.decoding import decode

FACTOR = 8
LEVELS = 7
"""8^7 steps are two million, so ten million steps are five buckets of the highest level."""
POINTS = 2000
"""At most so many points of a curve: more than a screen has columns."""
SCHEMA = """
create table if not exists rollups (
    level integer not null, bucket integer not null, n integer not null, t0 real, t1 real,
    loss_n integer, loss_sum real, loss_min real, loss_max real,
    grad_n integer, grad_sum real, grad_min real, grad_max real,
    took_n integer, took_sum real, took_min real, took_max real,
    weight_n integer, weight_sum real, weight_took real, lr real, world_min integer, world_max integer,
    primary key (level, bucket)) without rowid;
create table if not exists figure_rollups (
    name text not null, level integer not null, bucket integer not null,
    n integer not null, sum real, min real, max real,
    primary key (name, level, bucket)) without rowid;
"""

STEPS_KEPT = 1_000_000
"""About 80 MB of rows, and 40 bytes for each value that the script logs in a step."""

BUCKETS_KEPT = 250_000
"""Of each level of summaries, and as many of each name that the script logs; of the first they are two million steps."""

PIECE = 4096
"""So many rows go at once: some milliseconds of the thread that writes."""

NAMED_KEPT = 200
"""Generations whose workers are named: of 16,000 workers a quarter of a megabyte each."""

UNNAMED_AT_ONCE = 16

NAMES_BYTES = 4096
"""The names of fewer workers stay: they cost no more than other entries."""

DROPPED = "dropped"
"""Under which name `Dropped` is kept."""


_COLUMNS = (
    "n, t0, t1, loss_n, loss_sum, loss_min, loss_max, grad_n, grad_sum, grad_min, grad_max, "
    "took_n, took_sum, took_min, took_max, weight_n, weight_sum, weight_took, lr, world_min, world_max"
)
# A step whose weight is known and whose time is not must not count in tokens per second, so the time of the steps with a
# weight is summed by itself.
_OF_STEPS = (
    "count(*), min(t_s), max(t_s), count(loss), sum(loss), min(loss), max(loss), "
    "count(grad_norm), sum(grad_norm), min(grad_norm), max(grad_norm), "
    "count(took_s), sum(took_s), min(took_s), max(took_s), "
    "count(weight), sum(case when took_s is not null then weight end), sum(case when weight is not null then took_s end), "
    "max(lr), min(world), max(world)"
)
_OF_BUCKETS = (
    "sum(n), min(t0), max(t1), sum(loss_n), sum(loss_sum), min(loss_min), max(loss_max), "
    "sum(grad_n), sum(grad_sum), min(grad_min), max(grad_max), "
    "sum(took_n), sum(took_sum), min(took_min), max(took_max), "
    "sum(weight_n), sum(weight_sum), sum(weight_took), max(lr), min(world_min), max(world_max)"
)


def roll_up(db: sqlite3.Connection, steps: Iterable[int], floors: Sequence[int]) -> None:
    """Computes the buckets of these steps anew, in the transaction that wrote them. floors: see `Dropped`."""
    buckets = sorted({step // FACTOR for step in steps})
    # From below: each level is made of the one below it, which is right by then.
    for level in range(1, LEVELS + 1):
        # One whose parts have gone stays as it is: it cannot be computed from what is left of them.
        buckets = [b for b in buckets if b * FACTOR**level >= floors[level - 1]]
        # A bucket without steps gets no row: sums over nothing would write one full of nulls.
        db.executemany(
            f"insert or replace into rollups select {level}, ?, {_below(level)} having count(*) > 0",
            [(b, b * FACTOR, (b + 1) * FACTOR) for b in buckets],
        )
        buckets = sorted({b // FACTOR for b in buckets})


def _below(level: int) -> str:
    if level == 1:
        return f"{_OF_STEPS} from steps where step >= ? and step < ?"
    return f"{_OF_BUCKETS} from rollups where level = {level - 1} and bucket >= ? and bucket < ?"


def series(
    db: sqlite3.Connection, first: int, last: int, points: int = POINTS, floors: Sequence[int] = ()
) -> dict[str, list[Any]]:
    """Curves of the steps first..last as columns of at most `points` values, the steps ascending. Unknown is None.

    step: the first of the bucket. loss, grad_norm, step_s: means, with `_min` and `_max` beside them. weight_per_s: of the
    steps whose weight and time are known. world: the fewest workers. floors: see `Dropped`; what went is shown
    by the finest level that has the whole range.
    """
    level = level_of(first, last, points, floors)
    if "steps" not in tables(db):
        return _columns([], 1)
    width = FACTOR**level
    low, high = first // width, last // width
    if level == 0:
        what = f"step, {_OF_STEPS} from steps where step between ? and ? group by step order by step"
    elif level <= LEVELS:
        what = f"bucket, {_COLUMNS} from rollups where level = {level} and bucket between ? and ? order by bucket"
    else:
        # A point of more steps than the highest level has in a bucket. Not from the steps, of which the old ones may have gone.
        parts = FACTOR ** (level - LEVELS)
        what = (
            f"bucket / {parts}, {_OF_BUCKETS} from rollups where level = {LEVELS} and bucket / {parts} between ? and ? "
            "group by 1 order by 1"
        )
    return _columns(db.execute(f"select {what}", (low, high)).fetchall(), width)


def tables(db: sqlite3.Connection) -> set[str]:
    """Those in the file."""
    return {name for (name,) in db.execute("select name from sqlite_master where type = 'table'")}


def level_of(first: int, last: int, points: int, floors: Sequence[int]) -> int:
    """The finest level whose buckets of the steps first..last are at most `points`, and that has all of them; 0: the steps."""
    level = 0
    # Two more than the quotient: the range may begin and end in the middle of a bucket.
    while (last - first) // FACTOR**level + 2 > points:
        level += 1
    while level < LEVELS and level < len(floors) and first < floors[level]:
        level += 1
    return level


def _columns(rows: list[tuple[Any, ...]], width: int) -> dict[str, list[Any]]:
    names = ["bucket", *_COLUMNS.split(", ")]
    by = {name: [row[i] for row in rows] for i, name in enumerate(names)}

    def mean(what: str) -> list[float | None]:
        sums, counts = by[f"{what}_sum"], by[f"{what}_n"]
        return [s / n if n and s is not None else None for s, n in zip(sums, counts, strict=True)]

    return {
        "step": [b * width for b in by["bucket"]],
        "t_s": by["t1"],
        "loss": mean("loss"),
        "loss_min": by["loss_min"],
        "loss_max": by["loss_max"],
        "grad_norm": mean("grad"),
        "grad_norm_min": by["grad_min"],
        "grad_norm_max": by["grad_max"],
        "lr": by["lr"],
        "step_s": mean("took"),
        "step_s_min": by["took_min"],
        "step_s_max": by["took_max"],
        "weight_per_s": [
            w / t if w is not None and t else None
            for w, t in zip(by["weight_sum"], by["weight_took"], strict=True)
        ],
        # The fewest and not a mean: between 8 and 16 workers there is a size that the job never had.
        "world": by["world_min"],
    }


# A value that is not a number is null: it is in no mean, and a bucket of nothing else has no mean.
_OF_VALUES = "count(value), sum(value), min(value), max(value)"
_OF_FIGURE_BUCKETS = "sum(n), sum(sum), min(min), max(max)"


def roll_up_figures(db: sqlite3.Connection, told: Iterable[tuple[str, int]], floors: Sequence[int]) -> None:
    """Computes the buckets of these values anew, in the transaction that wrote them. So one that is told twice, or that
    replaces the value of a step that was rolled back, leaves a bucket right.

    told: (name, step). floors: see `Dropped`.
    """
    buckets: dict[int, set[str]] = {}
    for name, step in told:
        buckets.setdefault(step // FACTOR, set()).add(name)
    # From below: each level is made of the one below it, which is right by then.
    for level in range(1, LEVELS + 1):
        # One whose parts have gone stays as it is: it cannot be computed from what is left of them.
        buckets = {
            b: figure_names for b, figure_names in buckets.items() if b * FACTOR**level >= floors[level - 1]
        }
        table, part, what = _below_figures(level)
        # All names of a bucket in one statement: a script that logs dozens of values in every step costs seven of them.
        db.executemany(
            f"insert or replace into figure_rollups select name, {level}, ?, {what} from {table} "
            f"name in (select value from json_each(?)) and {part} >= ? and {part} < ? group by name",
            [
                (b, msgspec.json.encode(sorted(figure_names)).decode(), b * FACTOR, (b + 1) * FACTOR)
                for b, figure_names in buckets.items()
            ],
        )
        above: dict[int, set[str]] = {}
        for b, figure_names in buckets.items():
            above.setdefault(b // FACTOR, set()).update(figure_names)
        buckets = above


def _below_figures(level: int) -> tuple[str, str, str]:
    """Of what a level is made: the table with its condition, the column of its parts, and what is taken of them."""
    if level == 1:
        return "figures where", "step", _OF_VALUES
    return f"figure_rollups where level = {level - 1} and", "bucket", _OF_FIGURE_BUCKETS


def _drop_figures(db: sqlite3.Connection, level: int, bucket: int) -> None:
    """Removes the summaries of a level below a bucket, in the transaction that removes those of the steps."""
    for name in figure_names(db, "figure_rollups"):
        db.execute(
            "delete from figure_rollups where name = ? and level = ? and bucket < ?", (name, level, bucket)
        )


def figure_names(db: sqlite3.Connection, table: str = "figures") -> list[str]:
    """Of what the script logged, in order. table: `figures`, or `figure_rollups`, which has also those of which only
    summaries are left. They are ordered by name, so names are found by jumps and not by reading all of it."""
    # Each column with its table: `figure_rollups` has an `n` of its own, and any other may come.
    found = db.execute(
        f"with recursive known(it) as (select min(t.name) from {table} t union all select (select min(t.name) from {table} t "
        "where t.name > known.it) from known where known.it is not null) select it from known where it is not null"
    )
    return [name for (name,) in found]


def known_figure_names(db: sqlite3.Connection) -> list[str]:
    """Of all that was ever logged, in order."""
    there = tables(db)
    found = {
        name for table in ("figures", "figure_rollups") if table in there for name in figure_names(db, table)
    }
    return sorted(found)


def figure_series(
    db: sqlite3.Connection,
    name: str,
    first: int,
    last: int,
    points: int = POINTS,
    floors: Sequence[int] = (),
) -> dict[str, list[Any]]:
    """The curve of one name over the steps first..last, as columns of at most `points` values, the steps ascending.

    step: the first of the bucket; a bucket in which nothing was logged is left out. value: the mean of what was logged in it, with
    `value_min` and `value_max` beside it; None: it was no number. floors: see `Dropped`; what went is shown by the
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
            f"select bucket / {parts}, {_OF_FIGURE_BUCKETS} from figure_rollups where name = ? and level = {at} "
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


class Dropped(msgspec.Struct, kw_only=True):
    """What is not in the ledger any more."""

    steps: int = 0
    """Steps without a row of their own; each counts once."""
    commits: int = 0
    """Their rows, with those of commits that count no more."""
    redone: int = 0
    """Of these, those that count no more."""
    skipped: int | None = None
    """Of `steps`, those that count without an update; null: not known of any."""
    weight: float | None = None
    """Sum of the weights of `commits`; null: never told."""
    figures: int = 0
    """Values that the script logged."""
    unnamed: int = 0
    """Generations whose workers are not named any more."""
    unnamed_seq: int = 0
    """The newest entry that was looked at for that."""
    floors: list[int] = msgspec.field(default_factory=lambda: [0] * (LEVELS + 1))
    """For each level of summaries, 0 for the steps themselves: the first step of which it has everything."""


_dropped = msgspec.msgpack.Decoder(Dropped)


def dropped(db: sqlite3.Connection) -> Dropped:
    """What went so far."""
    # A file of before, or an empty one, has no such table.
    if not db.execute("select 1 from sqlite_master where name = 'kept'").fetchone():
        return Dropped()
    row = db.execute("select value from kept where name = ?", (DROPPED,)).fetchone()
    if row is None:
        return Dropped()
    return decode(_dropped.decode, row[0], "what went from it is damaged", error=sqlite3.DatabaseError)


def compact(db: sqlite3.Connection, before: Dropped, newest: int | None, generations: bool) -> Dropped:
    """Removes a piece of what is too much. newest: step that was written; None: none was. generations: one was formed.

    Returns what went so far: `before` itself if nothing was too much.
    """
    due = _due(before, newest) if newest is not None else []
    if not due and not generations:
        return before
    after = _dropped.decode(msgspec.msgpack.encode(before))
    for level in due:
        _drop_level(db, after, level, newest or 0)
    if generations:
        _drop_names(db, after)
    db.execute("insert or replace into kept values (?, ?)", (DROPPED, msgspec.msgpack.encode(after)))
    return after


def _due(before: Dropped, newest: int) -> list[int]:
    """Levels that have a piece too many: by arithmetic alone, so that a commit costs nothing where nothing goes."""
    found = []
    # The highest level stays: it is what a curve of the whole job is drawn from, two million steps a row.
    for level in range(LEVELS):
        if newest - before.floors[level] >= _kept(level) + PIECE * FACTOR**level:
            found.append(level)
    return found


def _kept(level: int) -> int:
    """So many of the newest steps a level has."""
    return STEPS_KEPT if level == 0 else BUCKETS_KEPT * FACTOR**level


def _drop_level(db: sqlite3.Connection, after: Dropped, level: int, newest: int) -> None:
    width = FACTOR**level
    table = "steps where step" if level == 0 else f"rollups where level = {level} and bucket"
    # Not from where the floor was: a job that began at step 1,000,000 has no rows below it.
    first = db.execute(f"select min({table.rpartition(' ')[2]}) from {table} >= 0").fetchone()[0]
    if first is None:
        return
    most = min((first + PIECE) * width, newest - _kept(level))
    # Up to the edge of a bucket of the next level, of which nothing but whole ones may be below the floor: a bucket that
    # is computed anew from half of its parts would lose the other half.
    edge = width * FACTOR
    floor = max(after.floors[level], most // edge * edge)
    if level == 0:
        _count(db, after, floor)
        _drop_steps(db, after, floor)
    else:
        db.execute("delete from rollups where level = ? and bucket < ?", (level, floor // width))
        _drop_figures(db, level, floor // width)
    after.floors[level] = floor


def _count(db: sqlite3.Connection, after: Dropped, floor: int) -> None:
    # A step below the floor of before went once already, and was committed again since: as a step it was counted then.
    row = db.execute(
        "select count(*), sum(skipped) from steps where step >= ? and step < ?", (after.floors[0], floor)
    ).fetchone()
    after.steps += row[0]
    if row[1] is not None:
        after.skipped = (after.skipped or 0) + row[1]
    again = db.execute("select count(*) from steps where step < ?", (after.floors[0],)).fetchone()[0]
    for table in ("steps", "redone"):
        count, weight = db.execute(
            f"select count(*), sum(weight) from {table} where step < ?", (floor,)
        ).fetchone()
        after.commits += count
        after.redone += count if table == "redone" else again
        if weight is not None:
            after.weight = (after.weight or 0.0) + weight


def _drop_steps(db: sqlite3.Connection, after: Dropped, floor: int) -> None:
    for table in ("steps", "redone"):
        db.execute(f"delete from {table} where step < ?", (floor,))
    for name in figure_names(db):
        after.figures += db.execute("delete from figures where name = ? and step < ?", (name, floor)).rowcount


def _drop_names(db: sqlite3.Connection, after: Dropped) -> None:
    old = db.execute(
        "select seq, length(fields) from events where seq > ? and kind in ('formed', 'started') "
        "order by seq desc limit -1 offset ?",
        (after.unnamed_seq, NAMED_KEPT),
    ).fetchall()[-UNNAMED_AT_ONCE:]
    for seq, nbytes in reversed(old):
        after.unnamed_seq = seq
        if nbytes > NAMES_BYTES:
            # The rest of the entry stays: what a report and a timeline tell of a generation is its size.
            db.execute(
                "update events set fields = json_set(fields, '$.workers', json('[]'), '$.unnamed', json('true')) "
                "where seq = ?",
                (seq,),
            )
            after.unnamed += 1
