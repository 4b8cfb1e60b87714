"""Summaries of committed steps, so that any range of a curve is read in constant time, however long the job is.

A bucket of level L is about 8^L steps in a row. It is computed anew from the eight buckets below it whenever one of its
steps is written, in the transaction of that step. So a step that is told twice, or that replaces one that was rolled back,
leaves a bucket right: a running sum could not take a minimum back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

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
"""

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
    """Computes the buckets of these steps anew, in the transaction that wrote them. floors: see `compaction.Dropped`."""
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
    steps whose weight and time are known. world: the fewest workers. floors: see `compaction.Dropped`; what went is shown
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
