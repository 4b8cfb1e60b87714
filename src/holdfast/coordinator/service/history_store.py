"""Where the histories of machines are kept: a SQLite file, or a PostgreSQL database that many sites' jobs share; and how a
running job reads and writes them.

A history that cannot be had is never a reason not to train: whoever uses this says so and goes on.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from holdfast.coordinator.kernel.events import Remember
from holdfast.coordinator.kernel.history import KEPT_RECORDS, RecordKind, Remembered
from holdfast.coordinator.service.store import SqliteConnection
from holdfast.errors import HoldfastError, UsageError

FILE_NAME = "health.sqlite"
CONNECT_S = 5
TABLE = "holdfast_health"

_COLUMNS = "utc_s, machine, node, job, kind, rule, device, text, remedy"
_SCHEMA = f"""
create table if not exists {TABLE} (
    id {{serial}}, utc_s double precision not null, machine text not null, node text not null, job text not null,
    kind text not null, rule text not null, device text not null, text text not null, remedy text not null);
create index if not exists {TABLE}_machine on {TABLE} (machine);
create index if not exists {TABLE}_device on {TABLE} (device);
"""


def shown(where: str) -> str:
    """The location of a history for messages and logs: a URL without user and password, which may also be among its options."""
    if "://" not in where:
        return where
    parts = urlsplit(where)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class HistoryError(HoldfastError):
    """The history cannot be read or written. The message says where it is, and what is wrong."""


class HistoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One record. Fields that are not described are as in `history.Remembered`."""

    utc_s: float
    """When it was written, in seconds since 1970."""
    machine: str
    """Its lasting identity, else its node's name."""
    node: str
    job: str
    kind: RecordKind
    rule: str = ""
    device: str = ""
    text: str = ""
    remedy: str = ""

    def remembered(self, now_s: float) -> Remembered:
        """As the core is told of it."""
        age_s = max(0.0, now_s - self.utc_s)
        return Remembered(
            kind=self.kind,
            age_s=age_s,
            job=self.job,
            rule=self.rule,
            device=self.device,
            text=self.text,
            remedy=self.remedy,
        )


class HistoryStore:
    """All machines' records. Used by one thread. Every method raises HistoryError."""

    def __init__(self, where: str, must_exist: bool = False) -> None:
        """where: a path, or `postgresql://...`. must_exist: a file that is not there has no records, and is not made."""
        self.where = where
        postgres = "://" in where
        self._mark = "%s" if postgres else "?"
        self._db: Any = None
        if postgres:
            self._db, self._errors = _connect_postgres(where)
        else:
            self._errors = (sqlite3.Error, OSError)
            if must_exist and not Path(where).is_file():
                return
            try:
                Path(where).parent.mkdir(parents=True, exist_ok=True)
                self._db = sqlite3.connect(
                    where, isolation_level=None, timeout=CONNECT_S, factory=SqliteConnection
                )
            except self._errors as error:
                raise HistoryError(f"the history of machines {where} cannot be opened: {error}") from error
        serial = "bigserial primary key" if postgres else "integer primary key autoincrement"
        for statement in _SCHEMA.format(serial=serial).strip().split(";\n"):
            self._run(statement)

    def add(self, entry: HistoryRecord) -> None:
        """Keeps a record."""
        marks = ", ".join([self._mark] * 9)
        # As parameters and never as a part of the statement: records quote kernel logs and scripts, which
        # others write.
        values = tuple(str(v) if isinstance(v, RecordKind) else v for v in msgspec.structs.astuple(entry))
        self._run(f"insert into {TABLE} ({_COLUMNS}) values ({marks})", values)

    def past(self, machine: str, devices: Sequence[str] = ()) -> tuple[HistoryRecord, ...]:
        """The newest records of a machine, and of its devices wherever they were then, oldest first."""
        where = f"machine = {self._mark}"
        if devices:
            # Devices by themselves: a GPU that was moved to another machine brings its record along.
            where += f" or (device <> '' and device in ({', '.join([self._mark] * len(devices))}))"
        # The newest KEPT_RECORDS: newest first with a limit, then turned round, so the index does the work
        # and the core gets them in their order.
        query = f"select {_COLUMNS} from {TABLE} where {where} order by id desc limit {KEPT_RECORDS}"
        return tuple(reversed(self._entries(query, (machine, *devices))))

    def all(self) -> list[HistoryRecord]:
        """Everything, oldest first."""
        return self._entries(f"select {_COLUMNS} from {TABLE} order by id", ())

    def close(self) -> None:
        """Gives the connection back."""
        if self._db is not None:
            self._db.close()

    def _entries(self, query: str, values: tuple[Any, ...]) -> list[HistoryRecord]:
        try:
            return [_entry(*row) for row in self._run(query, values)]
        except ValueError as error:
            raise HistoryError(
                f"the history of machines {shown(self.where)} has a record that this version cannot read: {error}"
            ) from error

    def _run(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        # No file is made where one was to be: at a wrong path, an empty history would look like machines
        # without faults, and the next look would find a file there.
        if self._db is None:
            return []
        try:
            cursor = self._db.execute(statement, values)
            return list(cursor.fetchall()) if cursor.description else []
        except self._errors as error:
            advice = (
                "move the file away to begin a new history"
                if "://" not in self.where
                else "check that the server is running"
            )
            raise HistoryError(
                f"the history of machines {shown(self.where)} cannot be used: {error}; {advice}"
            ) from error


def _entry(
    utc_s: float, machine: str, node: str, job: str, kind: str, rule: str, device: str, text: str, remedy: str
) -> HistoryRecord:
    return HistoryRecord(
        utc_s=utc_s,
        machine=machine,
        node=node,
        job=job,
        kind=RecordKind(kind),
        rule=rule,
        device=device,
        text=text,
        remedy=remedy,
    )


def _connect_postgres(url: str) -> tuple[Any, tuple[type[Exception], ...]]:
    if not url.startswith(("postgresql://", "postgres://")):
        scheme = url.partition("://")[0]
        raise HistoryError(
            f"the history of machines {scheme}://...: use a file, or postgresql://USER@HOST/DATABASE"
        )
    try:
        import psycopg
    except ImportError as error:
        raise HistoryError(
            "the history of machines is in PostgreSQL, but psycopg is not installed: pip install "
            "'holdfast-train[postgres]'"
        ) from error
    try:
        return psycopg.connect(url, autocommit=True, connect_timeout=CONNECT_S), (psycopg.Error, OSError)
    except psycopg.Error as error:
        raise HistoryError(
            f"the history of machines in PostgreSQL cannot be reached: {error}".strip()
        ) from error


def machines_meant(known: Iterable[tuple[str, str]], name: str) -> list[str]:
    """The machines that a person may mean: by identity, by the name of a node it was, or by a part of the identity.

    known: machines, each with the name of a node that it was.
    """
    pairs = list(known)
    machines = list(dict.fromkeys(machine for machine, _ in pairs))
    if name in machines:
        return [name]
    by_node = list(dict.fromkeys(machine for machine, node in pairs if node == name))
    return by_node or [machine for machine in machines if name and name in machine]


def the_one(meant: Sequence[str], name: str) -> str:
    """Raises UsageError: none or several are meant."""
    if len(meant) == 1:
        return meant[0]
    if not meant:
        raise UsageError(
            f"there is no history of a machine {name!r}; `holdfast node ls` shows the machines that have one"
        )
    raise UsageError(f"{name!r} is ambiguous: choose one of {', '.join(meant[:5])}")


def find_machine(entries: Sequence[HistoryRecord], name: str) -> str:
    """The machine that a person means. Raises UsageError: none or several are meant."""
    return the_one(machines_meant(((e.machine, e.node) for e in entries), name), name)


def now_s() -> float:
    """The time that records are of."""
    return time.time()


PAST_S = 2.0
PAUSE_S = 60.0


# ---------------------------------------------------------------- history writer
# The history of machines beside a running job: read as nodes join, written as decided, on a thread of its own.
#
# A database that is slow or away costs a joining node two seconds once, and is then left alone for a minute.


class JobHistory:
    """A job's access to the histories of machines. `trouble` is called once, with the reason, if they cannot be used."""

    def __init__(self, where: str, job: str, trouble: Callable[[str], None]) -> None:
        self._where, self._job, self._trouble = where, job, trouble
        self._thread = ThreadPoolExecutor(1, "history")
        self._history: HistoryStore | None = None
        self._paused_until_s = 0.0
        self._reported = False

    async def past(self, machine: str, devices: Sequence[str]) -> tuple[Remembered, ...]:
        """What is known of a machine; nothing when it cannot be had in time."""
        if not machine or time.monotonic() < self._paused_until_s:
            return ()
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._thread, self._read, machine, devices)
        try:
            return await asyncio.wait_for(reading, PAST_S)
        except HistoryError as error:
            self._failed(str(error))
        except TimeoutError:
            self._failed(f"the history of machines {shown(self._where)} did not answer within {PAST_S:g} s")
        return ()

    def remember(self, record: Remember) -> None:
        """Keeps a record."""
        entry = HistoryRecord(
            utc_s=now_s(),
            machine=record.machine,
            node=record.node,
            job=self._job,
            kind=record.kind,
            rule=record.rule,
            device=record.device,
            text=record.text,
            remedy=record.remedy,
        )
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._thread, self._write, entry)
        writing.add_done_callback(self._written)

    async def close(self) -> None:
        """Returns when all is written, or that takes too long."""
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        await asyncio.wait([closing], timeout=PAST_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _written(self, writing: asyncio.Future[None]) -> None:
        if not writing.cancelled() and (error := writing.exception()) is not None:
            self._failed(str(error))

    def _failed(self, why: str) -> None:
        # A database that does not answer costs one join its waiting time, not every join. After the pause it
        # is tried again.
        self._paused_until_s = time.monotonic() + PAUSE_S
        if not self._reported:
            self._reported = True
            self._trouble(why)

    # ------------------------------------------------------------ on the thread

    def _read(self, machine: str, devices: Sequence[str]) -> tuple[Remembered, ...]:
        if self._history is None:
            history = HistoryStore(self._where, must_exist=True)
            # Opened for each reading and not kept: the file appears when some job writes the first record,
            # and an open handle to nothing would never see it.
            if "://" not in self._where:
                try:
                    return tuple(e.remembered(now_s()) for e in history.past(machine, devices))
                finally:
                    history.close()
            self._history = history
        return tuple(e.remembered(now_s()) for e in self._history.past(machine, devices))

    def _write(self, entry: HistoryRecord) -> None:
        if self._history is None:
            self._history = HistoryStore(self._where)
        self._history.add(entry)

    def _close(self) -> None:
        if self._history is not None:
            self._history.close()
