"""What a ledger lets go of, so that its size follows what happened to the job and not how long it trained.

Kept are all events, the newest steps with what the script logged for them, and summaries of both for all steps. Rows of old steps
go when their summary is written, and old summaries when a coarser one is. Of old generations the names of the workers go,
which are nearly all of such an entry. What a report tells of the rows that went is counted before they go.

Each call removes a piece of bounded size, in the transaction of the commit that made it necessary.
"""

from __future__ import annotations

import sqlite3

import msgspec

from holdfast.coordinator.service import figure_rollups, rollups
from holdfast.protocol.wire.decoding import decode

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
    floors: list[int] = msgspec.field(default_factory=lambda: [0] * (rollups.LEVELS + 1))
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
    for level in range(rollups.LEVELS):
        if newest - before.floors[level] >= _kept(level) + PIECE * rollups.FACTOR**level:
            found.append(level)
    return found


def _kept(level: int) -> int:
    """So many of the newest steps a level has."""
    return STEPS_KEPT if level == 0 else BUCKETS_KEPT * rollups.FACTOR**level


def _drop_level(db: sqlite3.Connection, after: Dropped, level: int, newest: int) -> None:
    width = rollups.FACTOR**level
    table = "steps where step" if level == 0 else f"rollups where level = {level} and bucket"
    # Not from where the floor was: a job that began at step 1,000,000 has no rows below it.
    first = db.execute(f"select min({table.rpartition(' ')[2]}) from {table} >= 0").fetchone()[0]
    if first is None:
        return
    most = min((first + PIECE) * width, newest - _kept(level))
    # Up to the edge of a bucket of the next level, of which nothing but whole ones may be below the floor: a bucket that
    # is computed anew from half of its parts would lose the other half.
    edge = width * rollups.FACTOR
    floor = max(after.floors[level], most // edge * edge)
    if level == 0:
        _count(db, after, floor)
        _drop_steps(db, after, floor)
    else:
        db.execute("delete from rollups where level = ? and bucket < ?", (level, floor // width))
        figure_rollups.drop(db, level, floor // width)
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
    for name in figure_rollups.names(db):
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
            # The rest of the entry stays: what a report and a story tell of a generation is its size.
            db.execute(
                "update events set fields = json_set(fields, '$.workers', json('[]'), '$.unnamed', json('true')) "
                "where seq = ?",
                (seq,),
            )
            after.unnamed += 1
