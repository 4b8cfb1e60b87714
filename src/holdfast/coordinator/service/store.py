"""What outlives the coordinator's process: SQLite in the job's folder.

The newest state of the core, the ledger of events, one row for every committed step and one for every value that the script
logged, with summaries of both. With write-ahead logging every committed row survives the death of the process.
"""

from __future__ import annotations

import itertools
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import msgspec

from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service import rollups
from holdfast.coordinator.service.tally import StepSummary, Tally, read_summary, read_tally
from holdfast.errors import Damaged
from holdfast.protocol import ledger
from holdfast.protocol.ledger import ABOUT_INCIDENTS, FACTS, IncidentExplained, IncidentFacts, add_incident
from holdfast.protocol.messages import ReportedStep
from holdfast.protocol.wire.decoding import decode

T = TypeVar("T")

_SCHEMA = """
create table if not exists kept (name text primary key, value blob not null);
create table if not exists events (
    seq integer primary key autoincrement, t_s real not null, utc text not null, kind text not null,
    fields text not null);
create table if not exists steps (
    step integer primary key, t_s real not null, loss real, took_s real, generation integer, world integer,
    made_in integer, weight real, grad_norm real, lr real, skipped integer, place integer);
create table if not exists redone (
    step integer not null, t_s real not null, loss real, took_s real, generation integer, world integer,
    made_in integer, weight real, grad_norm real, lr real, skipped integer, place integer,
    primary key (step, generation, made_in));
create index if not exists steps_by_place on steps (place);
create index if not exists redone_by_place on redone (place);
create table if not exists figures (
    name text not null, step integer not null, value real, generation integer not null,
    primary key (name, step)) without rowid;
"""


_COLUMNS = "step, t_s, loss, took_s, generation, world, made_in, weight, grad_norm, lr, skipped, place"

_UNSHOWN = ("made_in", "place")
"""Columns of `steps` that tell commits apart and put them in order."""

_COMPUTED_AGAIN = ":made_in > made_in"
"""Whether what is told now is another commit of a step than the row that is there: all that tell of one commit name the same
`made_in`."""

_NEXT_PLACE = "(select coalesce(max(place), 0) + 1 from steps)"

SNAPSHOT = "core"
"""Under which name the core's state is kept."""
BATCHES = "pages"
"""The name under which the number of the newest batch is kept. It says pages, because ledgers on disk do."""
SPOKEN = "protocol"
"""Under which name the version of the protocol is kept that the job's processes speak."""
KEEPERS = "keepers"
"""Under which name `Watchers.keepers` is kept."""


class _Cursor(sqlite3.Cursor):
    """SQLite's own messages quote what is in the file, and a damaged file may have bytes there that are no text."""

    def execute(self, *args: Any) -> Self:
        _as_damage(super().execute, *args)
        return self

    def executescript(self, *args: Any) -> Self:
        _as_damage(super().executescript, *args)
        return self

    def fetchone(self) -> Any:
        return _as_damage(super().fetchone)

    def fetchall(self) -> list[Any]:
        return _as_damage(super().fetchall)

    def __next__(self) -> Any:
        return _as_damage(super().__next__)


class SqliteConnection(sqlite3.Connection):
    """A connection that raises only sqlite3.Error, whatever is in the file."""

    def execute(self, *args: Any) -> Any:
        return self.cursor(_Cursor).execute(*args)

    def executescript(self, *args: Any) -> Any:
        return self.cursor(_Cursor).executescript(*args)


def _as_damage(do: Callable[..., T], *args: Any) -> T:
    try:
        return do(*args)
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(_DAMAGED) from error


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the ledger."""

    seq: int
    """Its number, from 1 and without gaps within one ledger."""
    t_s: float
    """Seconds since the job's start."""
    utc: str
    """The time on the coordinator's machine, ISO 8601."""
    kind: str
    fields: Any
    """A `LedgerEvent` as it is written; a dict as it was read."""


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One committed step."""

    step: int
    t_s: float
    """When the coordinator heard of it, in seconds since the job's start."""
    loss: float | None
    """Mean over the global batch; null: not known."""
    took_s: float | None
    """Null: not known."""
    generation: int
    world: int
    """Workers of the generation that committed it."""
    weight: float | None = None
    """Of the global batch: samples, tokens, or what else the script weighs by. Null in these columns: not known."""
    grad_norm: float | None = None
    """Of the global gradient before clipping; null also where that is not finite."""
    lr: float | None = None
    """The learning rate of the optimizer's first group in the update."""
    skipped: bool | None = None
    """It counts without an update."""


class NewStep(msgspec.Struct, frozen=True, kw_only=True):
    """A commit that a follower of the ledger has not read yet."""

    place: int
    """In the order in which the ledger learned of the commits that count."""
    made_in: int
    """The generation that computed it. One that computes a step below others that were told goes back to it."""
    row: StepRow
    figures: dict[str, float | None]
    """What the script logged for it; null: not finite."""


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What came into a ledger after a position of a follower."""

    ledger: str
    """The ledger's own name: another start of the job has another. Empty: it has no event yet."""
    began_utc_s: float
    """When the job began, in seconds since 1970; times of the ledger count from it."""
    events: list[LedgerEntry]
    steps: list[NewStep]
    more: bool
    """There is more than was asked for at once."""


class ReportedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Committed steps as one message of a worker reports them."""

    t_s: float
    """When the message arrived, in seconds since the job's start."""
    losses: tuple[ReportedStep, ...]
    generation: int
    world: int
    """Workers of `generation`."""
    figures: Sequence[tuple[str, int, float]] = ()
    """(name, step, value) of each value that the script logged."""


class LedgerBatch(msgspec.Struct):
    """Rows that are written to the ledger in one transaction.

    Writing a batch again changes nothing, so a writer that does not know whether it was written may repeat it: entries have
    their numbers already, and steps and values replace themselves."""

    entries: list[LedgerEntry] = []
    steps: list[ReportedSteps] = []
    kept: dict[str, bytes] = {}
    """Small named values, of which the newest counts."""

    def add(self, later: LedgerBatch) -> None:
        """Adds the rows of a later batch to this one."""
        self.entries += later.entries
        self.steps += later.steps
        self.kept |= later.kept


class Store:
    """The job's file. One writer (the coordinator), any number of readers."""

    def __init__(self, path: Path, read_only: bool = False, shared: bool = False) -> None:
        """shared: the file is on a file system of several machines, where SQLite's index of the log in shared memory
        does not work: this process alone opens it, and what is committed survives the machine."""
        # Read-only by SQLite's own mode and not by discipline: a command that looks at a job must not be able
        # to lock its coordinator out.
        uri = f"file:{quote(str(path))}?mode={'ro' if read_only else 'rwc'}"
        # Several threads may use it, one after the other.
        self._db = sqlite3.connect(
            uri, uri=True, isolation_level=None, check_same_thread=False, factory=SqliteConnection
        )
        self._dropped = rollups.Dropped()
        if read_only:
            return
        try:
            if shared:
                self._db.execute("pragma locking_mode=exclusive")
            self._db.execute("pragma journal_mode=wal")
            self._db.execute(f"pragma synchronous={'full' if shared else 'normal'}")
            self._db.executescript(_SCHEMA + rollups.SCHEMA)
            self._dropped = rollups.dropped(self._db)
            # Only upward: an older version that continues a newer ledger must not claim that it wrote
            # everything in it.
            if self.version < ledger.VERSION:
                self._db.execute(f"pragma user_version={ledger.VERSION}")
        except BaseException:
            self._db.close()
            raise

    @classmethod
    def of(cls, data: bytes) -> Store:
        """What `copy` gave, for reading."""
        store = cls.__new__(cls)
        store._db = sqlite3.connect(":memory:", isolation_level=None, factory=SqliteConnection)
        store._dropped = rollups.Dropped()
        # In memory: whoever reads a copy leaves no file beside the ledger that could be taken for it.
        store._db.deserialize(data)
        store._dropped = rollups.dropped(store._db)
        return store

    @property
    def version(self) -> int:
        """The newest version of the ledger's events that wrote into it; 0: one before they were numbered."""
        return int(self._db.execute("pragma user_version").fetchone()[0])

    def begin(self) -> None:
        """What follows is written together."""
        self._db.execute("begin")

    def commit(self) -> None:
        """Everything since `begin` is in the file now."""
        self._db.execute("commit")

    def write(self, batch: LedgerBatch) -> None:
        """All of it, or nothing: then it raises sqlite3.Error, and may be called again."""
        self.begin()
        try:
            self._db.executemany(
                # Ignored if its number is there already: this batch may have been written before, with an
                # answer that was lost.
                "insert or ignore into events values (?, ?, ?, ?, ?)",
                [(e.seq, e.t_s, e.utc, e.kind, _text(e.fields)) for e in batch.entries],
            )
            for reported in batch.steps:
                self.add_steps(reported.t_s, reported.losses, reported.generation, reported.world)
                self.add_figures(reported.figures, reported.generation)
            steps = [told.step for reported in batch.steps for told in reported.losses]
            self._roll_up(steps)
            logged = [(name, step) for reported in batch.steps for name, step, _ in reported.figures]
            rollups.roll_up_figures(self._db, logged, self._dropped.floors)
            for name, value in batch.kept.items():
                self.keep(name, value)
            formed = any(e.kind in ("formed", "started") for e in batch.entries)
            dropped = rollups.compact(self._db, self._dropped, max(steps, default=None), formed)
            self.commit()
            # Only now: what was removed in a transaction that failed is still there.
            self._dropped = dropped
        except BaseException:
            # The error may have ended the transaction by itself; a second rollback would raise, and hide the
            # first error.
            if self._db.in_transaction:
                self._db.execute("rollback")
            raise

    def save(self, state: CoreState) -> None:
        """Replaces the snapshot."""
        self.keep(SNAPSHOT, msgspec.msgpack.encode(state))

    def load(self) -> CoreState | None:
        """The newest snapshot.

        Raises:
            sqlite3.DatabaseError: it is none, as of everything else in the file that is damaged.
        """
        value = self.kept(SNAPSHOT)
        if value is None:
            return None
        try:
            return state_of(value)
        except Damaged as error:
            raise sqlite3.DatabaseError(str(error)) from error

    def keep(self, name: str, value: bytes) -> None:
        """A small named value."""
        self._db.execute("insert or replace into kept values (?, ?)", (name, value))

    def kept(self, name: str) -> bytes | None:
        """A small named value; None when it was never kept. Raises sqlite3.DatabaseError: it is damaged."""
        row = self._db.execute("select value from kept where name = ?", (name,)).fetchone()
        if row is None:
            return None
        # Not `bytes(...)`: of a number, which a damaged row may have, that would be so many bytes.
        if not isinstance(row[0], bytes):
            raise sqlite3.DatabaseError(f"{name!r} in it is damaged")
        return row[0]

    def batches(self) -> int:
        """Number of the newest batch; 0: there is none, or it is of a version that did not number them."""
        return self.kept_as(BATCHES, _numbers) or 0

    def kept_as(self, name: str, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
        """A small named value that was kept as msgpack; None when it was never kept. Raises sqlite3.DatabaseError: it is damaged."""
        value = self.kept(name)
        if not value:
            return None
        return decode(decoder.decode, value, f"{name!r} in it is damaged", error=sqlite3.DatabaseError)

    def add_event(self, t_s: float, utc: str, kind: str, fields: Any) -> LedgerEntry:
        """Appends to the ledger."""
        cursor = self._db.execute(
            "insert into events (t_s, utc, kind, fields) values (?, ?, ?, ?)", (t_s, utc, kind, _text(fields))
        )
        return LedgerEntry(seq=cursor.lastrowid or 0, t_s=t_s, utc=utc, kind=kind, fields=fields)

    def events(self, after: int = 0) -> Iterator[LedgerEntry]:
        """The ledger from `after` on, oldest first."""
        query = "select seq, t_s, utc, kind, fields from events where seq > ? order by seq"
        for seq, t_s, utc, kind, fields in self._db.execute(query, (after,)):
            yield _entry(seq, t_s, utc, kind, fields)

    def last_seq(self) -> int:
        """Number of the newest event; 0 when there is none."""
        return int(self._db.execute("select coalesce(max(seq), 0) from events").fetchone()[0])

    def last_t_s(self) -> float:
        """Time of the newest event or step; 0 when there is none."""
        # The newest by its number, which is found by one look at an index: the time rises with it. A search for the
        # largest time would read every step, as the first thing that a coordinator does that takes over.
        queries = ("events order by seq", "steps order by place")
        found = [
            row for query in queries for row in self._db.execute(f"select t_s from {query} desc limit 1")
        ]
        return max((float(t_s) for (t_s,) in found), default=0.0)

    def _has(self, table: str) -> bool:
        """False: the coordinator that made the file was killed before it made its tables, and a reader makes none."""
        return table in rollups.tables(self._db)

    def add_steps(self, t_s: float, losses: Iterable[ReportedStep], generation: int, world: int) -> None:
        """Committed steps; one that was told already keeps its first row. Of one that was computed again the newest commit
        counts, and `redone` has those before."""
        rows = [told._asdict() | {"t_s": t_s, "generation": generation, "world": world} for told in losses]
        self._db.executemany(
            f"insert or ignore into redone ({_COLUMNS}) select {_COLUMNS} from steps where step = :step and {_COMPUTED_AGAIN}",
            rows,
        )
        names = _COLUMNS.split(", ")
        # A commit that replaces another comes last. So whoever has read up to a place finds all that is new
        # after it, also steps that the job went back to and that are below those it has.
        values = [_NEXT_PLACE if n == "place" else f":{n}" for n in names]
        self._db.executemany(
            f"insert into steps ({_COLUMNS}) values ({', '.join(values)}) on conflict(step) do update set "
            f"{', '.join(f'{n} = excluded.{n}' for n in names)} where {_COMPUTED_AGAIN}",
            rows,
        )

    def _roll_up(self, steps: list[int]) -> None:
        # In the transaction that wrote the steps: whoever reads finds both or neither.
        if steps:
            rollups.roll_up(self._db, steps, self._dropped.floors)

    def series(
        self, first: int = 0, last: int | None = None, points: int = rollups.POINTS
    ) -> dict[str, list[Any]]:
        """See `rollups.series`. last: None: the newest step."""
        newest = self.last_step()
        if newest is None:
            return rollups.series(self._db, 0, 0, points)
        last = newest if last is None else min(last, newest)
        return rollups.series(self._db, max(0, first), last, points, self.dropped().floors)

    def figure_series(
        self, name: str, first: int = 0, last: int | None = None, points: int = rollups.POINTS
    ) -> dict[str, list[Any]]:
        """The curve of what the script logged under this name, see `rollups.figure_series`. last: None: the newest step."""
        newest = self.last_step()
        last = (newest or 0) if last is None else min(last, newest or 0)
        return rollups.figure_series(self._db, name, max(0, first), last, points, self.dropped().floors)

    def figure_names(self) -> list[str]:
        """Of all that the script ever logged, in order; also where only summaries are left."""
        return rollups.known_figure_names(self._db)

    def dropped(self) -> rollups.Dropped:
        """What is not in the file any more."""
        return rollups.dropped(self._db)

    def last_step(self) -> int | None:
        """Number of the newest committed step; None: there is none."""
        if not self._has("steps"):
            return None
        found = self._db.execute("select max(step) from steps").fetchone()[0]
        return None if found is None else int(found)

    def step_at(self, t_s: float) -> int | None:
        """The newest step that was committed until then; None: there is none, or its row has gone."""
        if (last := self.last_step()) is None:
            return None
        first = self._db.execute("select min(step) from steps").fetchone()[0]
        low, high = int(first), last + 1
        found = None
        # By halves: times rise with the steps, because a step that is done again takes the row of the one before.
        while low < high:
            middle = (low + high) // 2
            row = self._db.execute(
                "select step, t_s from steps where step >= ? order by step limit 1", (middle,)
            ).fetchone()
            if row is not None and row[1] <= t_s:
                found, low = int(row[0]), int(row[0]) + 1
            else:
                high = middle
        return found

    def entries(self, after: int, limit: int) -> list[LedgerEntry]:
        """At most `limit` events after a number, oldest first."""
        return [_entry(*row) for row in self.raw_entries(after, limit)]

    def raw_entries(self, after: int, limit: int) -> list[tuple[int, float, str, str, str]]:
        """As `entries`: (seq, t_s, utc, kind, the fields as JSON)."""
        if not self._has("events"):
            return []
        query = "select seq, t_s, utc, kind, fields from events where seq > ? order by seq limit ?"
        rows: list[tuple[int, float, str, str, str]] = self._db.execute(query, (after, limit)).fetchall()
        return rows

    def raw_entries_after(self, after: int) -> Iterator[tuple[int, float, str, str, str]]:
        """As `raw_entries`, one after the other, for whoever stops by a bound of its own."""
        yield from self._db.execute(
            "select seq, t_s, utc, kind, fields from events where seq > ? order by seq", (after,)
        )

    def incidents(self, until: int, left: LedgerBatch | None = None) -> list[dict[str, Any]]:
        """What the events tell of incidents up to a number, in their order: the fields of `IncidentFacts`. left: as for `steps`."""
        kinds = ", ".join(f"'{kind}'" for kind in sorted(ABOUT_INCIDENTS))
        rows = self._db.execute(f"select kind, fields from events where kind in ({kinds}) order by seq")
        told = [
            (e.kind, _text(e.fields)) for e in (left.entries if left else []) if e.kind in ABOUT_INCIDENTS
        ]
        found: dict[int, dict[str, Any]] = {}
        for kind, text in itertools.chain(rows, told):
            event: IncidentFacts | IncidentExplained
            if kind in FACTS:
                event = decode(_facts.decode, text, _DAMAGED, error=sqlite3.DatabaseError)
            else:
                event = decode(_explained.decode, text, _DAMAGED, error=sqlite3.DatabaseError)
            if event.id <= until:
                add_incident(found, kind, msgspec.structs.asdict(event))
        for known in found.values():
            known.pop("explained", None)
        return list(found.values())

    def newest_steps(self, count: int) -> list[StepRow]:
        """The last committed steps, ascending."""
        return self._rows("steps", f"desc limit {count}")[::-1]

    def add_figures(self, figures: Iterable[tuple[str, int, float]], generation: int) -> None:
        """What the script logged: (name, step, value). A value that is told again, or anew for a step that was computed again,
        replaces the one before; a late word of an older generation does not. One that is NaN is null."""
        self._db.executemany(
            "insert into figures values (?, ?, ?, ?) on conflict(name, step) do update set "
            "value = excluded.value, generation = excluded.generation where excluded.generation >= generation",
            [(name, step, value, generation) for name, step, value in figures],
        )

    def figures(self, name: str) -> list[tuple[int, float | None]]:
        """(step, value) of each step in which the script logged this, in their order."""
        known = self._db.execute("select 1 from sqlite_master where type = 'table' and name = 'figures'")
        if known.fetchone() is None:  # a ledger from before there were any, which a reader may not change
            return []
        query = "select step, value from figures where name = ? order by step"
        return list(self._db.execute(query, (name,)))

    def steps(self, left: LedgerBatch | None = None) -> list[StepRow]:
        """All committed steps in their order. left: what the file does not have yet, as if it had."""
        if left is not None and left.steps:
            with closing(Store.of(self.copy())) as copy:
                copy.write(left)
                return copy.steps()
        return self._rows("steps")

    def summary(self, left: LedgerBatch | None = None) -> StepSummary:
        """What a report tells of all committed steps. left: as for `steps`."""
        if left is not None and left.steps:
            with closing(Store.of(self.copy())) as copy:
                copy.write(left)
                return copy.summary()
        return read_summary(self._db, self.dropped())

    def redone(self) -> list[StepRow]:
        """Commits that do not count any more, in the order of their steps: of steps that were computed again from an older
        state. The newest commit of each is in `steps`."""
        return self._rows("redone")

    def _rows(self, table: str, tail: str = "") -> list[StepRow]:
        if not self._has(table):
            return []
        names = [n for n in _COLUMNS.split(", ") if n not in _UNSHOWN]
        order = "step" if tail else "step, made_in, generation"
        query = f"select {', '.join(names)} from {table} order by {order} {tail}"
        rows = [dict(zip(names, row, strict=True)) for row in self._db.execute(query)]
        return [_step_row(row) for row in rows]

    def news(self, seq: int, place: int, until_s: float = math.inf, limit: int = 500) -> News:
        """What a follower has not read yet, oldest first: at most `limit` events and as many commits.

        seq, place: of the newest event and commit that it has read. until_s: commits that were told later, in seconds since
        the job's start, wait for the next time: what the script logs for a step may be told a moment after it.
        """
        if not self._has("events"):
            return News(ledger="", began_utc_s=0.0, events=[], steps=[], more=False)
        first = self._db.execute("select utc, t_s from events order by seq limit 1").fetchone()
        events = [x for x, _ in zip(self.events(seq), range(limit), strict=False)]
        steps = self._new_steps(place, until_s, limit)
        return News(
            ledger=first[0] if first else "",
            began_utc_s=decode(began_utc_s, first, _DAMAGED, error=sqlite3.DatabaseError) if first else 0.0,
            events=events,
            steps=steps,
            more=limit in (len(events), len(steps)),
        )

    def _new_steps(self, place: int, until_s: float, limit: int) -> list[NewStep]:
        if not self._has("steps"):
            return []
        names = [n for n in _COLUMNS.split(", ") if n not in _UNSHOWN]
        found = self._db.execute(
            f"select place, made_in, {', '.join(names)} from steps where place > ? and t_s <= ? order by place limit ?",
            (place, until_s, limit),
        ).fetchall()
        rows = [dict(zip(names, row[2:], strict=True)) for row in found]
        figures = self._figures_of([row["step"] for row in rows])
        return [
            NewStep(
                place=at,
                made_in=made or 0,
                row=_step_row(row),
                figures=figures.get(row["step"], {}),
            )
            for (at, made, *_), row in zip(found, rows, strict=True)
        ]

    def _figures_of(self, steps: list[int]) -> dict[int, dict[str, float | None]]:
        if not steps or not self._has("figures"):
            return {}
        found: dict[int, dict[str, float | None]] = {}
        for name in rollups.figure_names(self._db):
            query = (
                "select step, value from figures where name = ? and step in (select value from json_each(?))"
            )
            for step, value in self._db.execute(query, (name, msgspec.json.encode(steps).decode())):
                found.setdefault(step, {})[name] = value
        return found

    def tally(self, before: Tally) -> Tally:
        """The totals with all that came since `before`, at the cost of that alone."""
        return read_tally(self._db, before)

    def copy(self) -> bytes:
        """The whole file, as it is now: for those who cannot open it themselves."""
        with closing(sqlite3.connect(":memory:")) as memory:
            self._db.backup(memory)
            data = bytearray(memory.serialize())
        # The header's two bytes for the journal mode: in WAL mode a reader would look for the file of the
        # log, which a copy in memory does not have.
        data[18:20] = b"\x01\x01"
        return bytes(data)

    def close(self) -> None:
        """Closes the file."""
        self._db.close()


_DAMAGED = "what is in it is damaged"
_numbers = msgspec.msgpack.Decoder(int)
_fields = msgspec.json.Decoder()
_facts = msgspec.json.Decoder(IncidentFacts)
_explained = msgspec.json.Decoder(IncidentExplained)
_state = msgspec.msgpack.Decoder(CoreState)


def state_of(snapshot: bytes) -> CoreState:
    """The core's state, as `Store.save` wrote it. Raises Damaged."""
    state: CoreState = decode(_state.decode, snapshot, "the state in it is damaged")
    return state


def _entry(seq: int, t_s: float, utc: str, kind: str, fields: str) -> LedgerEntry:
    read = decode(_fields.decode, fields, _DAMAGED, error=sqlite3.DatabaseError)
    return LedgerEntry(seq=seq, t_s=t_s, utc=utc, kind=kind, fields=read)


def _step_row(row: dict[str, Any]) -> StepRow:
    as_row = partial(msgspec.convert, type=StepRow, strict=False)
    made: StepRow = decode(as_row, row, _DAMAGED, error=sqlite3.DatabaseError)
    return made


def began_utc_s(first: tuple[str, float]) -> float:
    """When a ledger's clock began, from the `utc` and `t_s` of one of its rows. Raises ValueError."""
    utc, t_s = first
    return datetime.fromisoformat(utc).timestamp() - t_s


def _text(fields: Any) -> str:
    return msgspec.json.encode(fields).decode()


def spoken(ledger: Path) -> int | None:
    """The version of the protocol that a job's processes speak, of its ledger; None: it does not tell now."""
    try:
        with closing(Store(ledger, read_only=True)) as store:
            return store.kept_as(SPOKEN, _numbers)
    except (OSError, sqlite3.Error):
        return None


FIRST = "job.sqlite"
LOCK_S = 1.0
"""A lock that is not given back for so long is held by who writes, is stopped, or is gone."""
QUIET_S = 0.5
"""Two looks of a coordinator that is superseded, see `protocol.leadership`: one that lives and is about to write has ended."""


def newest_ledger(job_dir: Path) -> Path:
    """Where the job's ledger is: a coordinator that took over on another machine has one of its own."""
    numbers = [int(p.stem.removeprefix("job-")) for p in job_dir.glob("job-*.sqlite")]
    return job_dir / (f"job-{max(numbers)}.sqlite" if numbers else FIRST)


def own_ledger(job_dir: Path, term: int) -> Path:
    """The ledger of a term. One that was superseded before it could begin must not open, and so lock, its successor's."""
    path = job_dir / f"job-{term}.sqlite"
    return path if path.exists() else job_dir / FIRST


def succeed(job_dir: Path, term: int) -> Path:
    """A copy of the newest ledger for a new term, complete to the last commit: whoever still writes into the old one changes
    nothing. Blocks for as long as somebody does.

    Raises:
        sqlite3.Error: the old ledger cannot be read.
    """
    old, new = newest_ledger(job_dir), job_dir / f"job-{term}.sqlite"
    work = job_dir / f".job-{term}.sqlite"
    # The copy is made beside and renamed when it is complete. A successor that dies here leaves a file that
    # nobody mistakes for a ledger. Where neither way succeeds, a coordinator still writes, and ends when it sees the new term.
    while not (_copy_locked(old, work) or _copy_quiet(old, work)):
        pass
    work.replace(new)
    return new


def _copy_locked(old: Path, work: Path) -> bool:
    """The usual way: a coordinator that has ended holds no lock any more. False: somebody holds it."""
    try:
        _copy(f"file:{old}", work)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True


def _copy_quiet(old: Path, work: Path) -> bool:
    """Where the lock is never given back: its process is stopped, or a machine holds it that is gone.

    Read is without locks then, which is right as long as nobody writes: so the files must not have changed for a while
    before, nor until the copy is complete. SQLite reads the log itself, into its own memory, and changes nothing.
    """
    before = _stamps(old)
    # Unchanged before, during and after: then a copy without locks read a state that existed. A coordinator that still
    # lives looks at its term twice in this time, and ends before it writes again.
    time.sleep(QUIET_S)  # there is no event for another machine's file
    if _stamps(old) != before:
        return False
    try:
        _copy(f"file:{old}?mode=ro&vfs=unix-none", work)
    except sqlite3.DatabaseError:
        if _stamps(old) == before:
            raise
        return False
    return _stamps(old) == before


def _copy(uri: str, work: Path) -> None:
    work.unlink(missing_ok=True)
    with (
        closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=LOCK_S)) as source,
        closing(sqlite3.connect(work)) as copy,
    ):
        source.execute("pragma locking_mode=exclusive")  # or else SQLite wants its index in shared memory
        source.execute(
            "select count(*) from sqlite_master"
        ).fetchone()  # the lock; `backup` would wait for ever
        source.backup(copy)


def _stamps(ledger: Path) -> list[tuple[int, int] | None]:
    """What changes with every write. Opened for it: so a network file system asks its server."""
    stamps: list[tuple[int, int] | None] = []
    for path in (ledger, ledger.with_name(ledger.name + "-wal")):
        try:
            # NFS caches attributes for seconds, and asks the server only when a file is opened. With `stat`
            # alone, a writer on another machine would be missed.
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
            stamps.append((status.st_mtime_ns, status.st_size))
        except FileNotFoundError:
            stamps.append(None)
    return stamps
