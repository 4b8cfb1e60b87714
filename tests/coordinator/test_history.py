"""Histories of machines: what records mean, and where they are kept."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from holdfast.coordinator.kernel.events import Remember
from holdfast.coordinator.kernel.history import RecordKind, Remembered, standing
from holdfast.coordinator.service.history_store import (
    HistoryError,
    HistoryRecord,
    HistoryStore,
    JobHistory,
    find_machine,
    now_s,
    shown,
)
from holdfast.errors import UsageError

DAY_S = 86_400.0


def seen(
    kind: RecordKind = RecordKind.INCIDENT, days: float = 1.0, job: str = "a", **more: str
) -> Remembered:
    return Remembered(kind=kind, age_s=days * DAY_S, job=job, **more)


# ---------------------------------------------------------------- what records mean


def test_repeated_incidents_in_several_jobs_make_a_lemon():
    assert standing([seen(), seen(), seen(job="b")]).lemon == "3 incidents in 2 jobs within 30 days"
    assert not standing([seen(), seen(), seen()]).lemon  # one job's
    assert not standing([seen(), seen(job="b")]).lemon
    assert not standing([seen(days=40), seen(days=35, job="b"), seen(job="c")]).lemon
    assert standing([seen(RecordKind.LOST), seen(RecordKind.LOST, job="b"), seen(job="c")]).lemon


def test_quarantine_lasts_until_checks_are_passed_or_a_person_says_so():
    held = seen(RecordKind.QUARANTINED, 3.0, text="xid-79", rule="xid-79")
    assert standing([held]).quarantine == "xid-79"
    assert not standing([held, seen(RecordKind.READMITTED)]).quarantine
    assert not standing([held, seen(RecordKind.CLEARED)]).quarantine
    assert not standing([held, seen(RecordKind.FALSE_POSITIVE, rule="xid-79")]).quarantine
    assert standing([held, seen(RecordKind.FALSE_POSITIVE, rule="other")]).quarantine
    assert standing([held, seen(RecordKind.READMITTED), held]).quarantine


def test_a_rule_that_was_wrong_twice_is_on_trial_on_that_machine():
    wrong = seen(RecordKind.FALSE_POSITIVE, rule="hot")
    assert standing([wrong]).trial == ()
    assert standing([wrong, wrong]).trial == ("hot",)


def test_what_was_cleared_counts_no_more():
    bad = [seen(), seen(), seen(job="b")]
    assert not standing([*bad, seen(RecordKind.CLEARED)]).lemon
    acts = [
        seen(RecordKind.ACTED, rule="x", remedy="reboot"),
        seen(RecordKind.ACTED, rule="y", remedy="reboot"),
    ]
    assert [r.rule for r in standing([*acts, seen(RecordKind.FALSE_POSITIVE, rule="x")]).acts] == ["y"]


def test_faults_of_a_device_that_was_taken_out_are_not_the_machine_s_any_more():
    held = seen(RecordKind.QUARANTINED, text="ecc", device="GPU-1")
    assert standing([held], ["GPU-1", "GPU-2"]).quarantine
    assert not standing([held], ["GPU-2"]).quarantine
    assert standing([held]).quarantine  # nobody knows what it has


# ---------------------------------------------------------------- where they are kept


def entry(machine: str = "M1", kind: RecordKind = RecordKind.INCIDENT, **more: str) -> HistoryRecord:
    return HistoryRecord(utc_s=now_s(), machine=machine, node=f"node-{machine}", job="job", kind=kind, **more)


def keeps_and_finds(where: str) -> None:
    history = HistoryStore(where)
    history.add(entry(rule="xid-79", device="GPU-1", text="it's gone; drop table"))
    history.add(entry("M2", rule="ecc", device="GPU-2"))
    history.add(entry("M2", RecordKind.LOST))
    history.close()
    again = HistoryStore(where)
    assert [e.text for e in again.past("M1")] == ["it's gone; drop table"]
    assert [e.machine for e in again.past("M3", ["GPU-2", "GPU-9"])] == ["M2"]
    assert len(again.all()) == 3
    for _ in range(70):
        again.add(entry("M4"))
    assert len(again.past("M4")) == 64
    again.close()


def test_a_file(tmp_path):
    keeps_and_finds(str(tmp_path / "sub" / "health.sqlite"))


def test_reading_makes_no_file(tmp_path):
    history = HistoryStore(str(tmp_path / "health.sqlite"), must_exist=True)
    assert history.all() == []
    history.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_history_is_named(tmp_path):
    path = tmp_path / "health.sqlite"
    path.write_text("these are not the bytes of a database, but enough of them")
    with pytest.raises(HistoryError, match=r"health.sqlite cannot be used.*move the file away"):
        HistoryStore(str(path))


def test_what_is_neither_a_file_nor_postgresql_is_refused():
    with pytest.raises(HistoryError, match="use a file, or postgresql"):
        HistoryStore("mysql://root:secret@h/db")


def test_a_url_is_shown_without_its_password():
    assert shown("postgresql://me:secret@db:5432/site?password=secret") == "postgresql://db:5432/site"
    assert shown("/var/lib/health.sqlite") == "/var/lib/health.sqlite"


def test_a_machine_is_found_by_what_people_call_it():
    entries = [entry("serial:A17"), entry("serial:B17"), entry("serial:B17")]
    assert find_machine(entries, "serial:A17") == find_machine(entries, "A17") == "serial:A17"
    assert find_machine(entries, "node-serial:B17") == "serial:B17"
    with pytest.raises(UsageError, match="choose one of serial:A17, serial:B17"):
        find_machine(entries, "17")
    with pytest.raises(UsageError, match="node ls"):
        find_machine(entries, "C")


# ---------------------------------------------------------------- beside a running job


def test_a_job_reads_what_another_wrote(tmp_path):
    where, said = str(tmp_path / "health.sqlite"), []

    async def job(name: str) -> tuple[Remembered, ...]:
        memory = JobHistory(where, name, said.append)
        known = await memory.past("M1", ["GPU-1"])
        memory.remember(
            Remember(
                machine="M1",
                kind=RecordKind.QUARANTINED,
                node="n1",
                rule="xid-79",
                device="GPU-1",
                text="xid-79: gone",
            )
        )
        await memory.close()
        return known

    assert asyncio.run(job("first")) == ()
    [record] = asyncio.run(job("second"))
    assert (record.kind, record.job, record.text) == (RecordKind.QUARANTINED, "first", "xid-79: gone")
    assert record.age_s < 60
    assert said == []


def test_a_history_that_cannot_be_had_is_said_once_and_the_job_goes_on(tmp_path):
    path, said = tmp_path / "health.sqlite", []
    path.write_text("these are not the bytes of a database, but enough of them")

    async def job() -> None:
        memory = JobHistory(str(path), "job", said.append)
        assert await memory.past("M1", ()) == ()
        assert await memory.past("M1", ()) == ()
        memory.remember(Remember(machine="M1", kind=RecordKind.LOST, node="n1"))
        await memory.close()

    asyncio.run(job())
    assert len(said) == 1
    assert "move the file away" in said[0]


def test_a_database_that_is_not_there(tmp_path):
    pytest.importorskip("psycopg")
    with pytest.raises(HistoryError, match="cannot be reached"):
        HistoryStore(f"postgresql:///x?host={tmp_path}")


POSTGRES = shutil.which("postgres") or next(
    iter(map(str, Path("/usr/lib/postgresql").glob("*/bin/postgres"))), None
)


@contextmanager
def postgresql() -> Iterator[str]:
    """A server of this test's own, reached by a socket in its folder; its URL. Not below pytest's folder, which is closed to
    the user as whom root must start it."""
    with tempfile.TemporaryDirectory(prefix="holdfast-test-") as folder:
        Path(folder).chmod(0o777)
        with served(Path(folder)) as where:
            yield where


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A server whose files are in this folder."""
    tools = Path(str(POSTGRES)).resolve().parent
    owner = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []
    data = folder / "data"
    initdb = [*owner, tools / "initdb", "-D", data, "-U", "me", "-A", "trust", "--no-sync"]
    subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL)
    serve = [*owner, tools / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-F"]
    with subprocess.Popen(serve, stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        try:
            assert any(b"ready to accept" in line for line in server.stderr)
            yield f"postgresql://me:secret@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)  # it does not wait for who is connected


@pytest.mark.skipif(POSTGRES is None, reason="no PostgreSQL here")
def test_postgresql():
    pytest.importorskip("psycopg")
    said: list[str] = []

    async def job(name: str, where: str) -> tuple[Remembered, ...]:
        memory = JobHistory(where, name, said.append)
        known = await memory.past("M7", ())
        memory.remember(Remember(machine="M7", kind=RecordKind.LOST, node="n1"))
        await memory.close()
        return known

    async def until_it_is_gone(where: str, server: ExitStack) -> None:
        memory = JobHistory(where, "third", said.append)
        assert [r.job for r in await memory.past("M7", ())] == ["first", "second"]
        server.close()
        assert await memory.past("M7", ()) == await memory.past("M7", ()) == ()
        await memory.close()

    with ExitStack() as server:
        where = server.enter_context(postgresql())
        keeps_and_finds(where)
        assert asyncio.run(job("first", where)) == ()
        assert [r.job for r in asyncio.run(job("second", where))] == ["first"]
        assert said == []
        asyncio.run(until_it_is_gone(where, server))
    assert len(said) == 1
    assert "check that the server is running" in said[0]
    assert "secret" not in said[0]


def test_the_file_is_readable_by_others_tools(tmp_path):
    history = HistoryStore(str(tmp_path / "h.sqlite"))
    history.add(entry())
    history.close()
    db = sqlite3.connect(tmp_path / "h.sqlite")
    assert db.execute("select machine, kind from holdfast_health").fetchall() == [("M1", "incident")]
    db.close()
