"""A ledger that cannot be written costs no step and no node. The real coordinator, a real SQLite file, real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from fakeagents import FENCES, Agent, Plane, serving

from holdfast.coordinator.__main__ import _take_up as take_up
from holdfast.coordinator.kernel import events as ev
from holdfast.coordinator.service import decision_loop, ledger, server
from holdfast.coordinator.service.store import (
    SNAPSHOT,
    LedgerBatch,
    LedgerEntry,
    ReportedSteps,
    Store,
    own_ledger,
)
from holdfast.protocol import messages as m
from holdfast.protocol.health import Finding, Remedy, Severity
from holdfast.protocol.job import JobSpec, Resume

MARK = Finding(
    rule="mark", severity=Severity.WARNING, remedy=Remedy.WATCH, source="hook", evidence="it was heard"
)
FAULTS = ("full", "read-only", "raises", "hangs")


class Faulty(Store):
    """A store whose file fails in one of the ways in which files do."""

    fault: str | None = None
    well = threading.Event()

    def begin(self) -> None:
        fault = type(self).fault
        pages = self._db.execute("pragma page_count").fetchone()[0] if fault == "full" else 1 << 30
        self._db.execute(f"pragma max_page_count={pages}")
        self._db.execute(f"pragma query_only={int(fault == 'read-only')}")
        if fault == "raises":
            raise sqlite3.OperationalError("disk I/O error")
        if fault == "hangs":
            type(self).well.wait()
        super().begin()


@pytest.fixture
def faulty(monkeypatch):
    monkeypatch.setattr(server, "Store", Faulty)
    monkeypatch.setattr(ledger, "SLOW_S", 0.2)
    monkeypatch.setattr(ledger, "RETRY_S", 0.05)
    yield Faulty
    mend()


def mend() -> None:
    Faulty.fault = None
    Faulty.well.set()


def spoil(fault: str) -> None:
    Faulty.well.clear()
    Faulty.fault = fault


async def fill(agent: Agent, other: Agent, plane: Plane) -> None:
    """Steps are committed until the ledger takes no more of them."""
    while not any("cannot be written" in line for line in plane.lines()):
        for _ in range(20):
            await agent.step()
            await other.step()
        await plane.committed(agent.committed)


@pytest.mark.parametrize("fault", FAULTS)
def test_training_goes_on_while_the_ledger_fails_and_nothing_is_missing_afterwards(tmp_path, faulty, fault):
    async def story() -> None:
        async with serving(tmp_path) as plane:
            first, second = await plane.pair()
            spoil(fault)
            plane.coordinator._loop.handle(ev.Overslept(0.5))  # the machine is slow as well
            await fill(first, second, plane)
            assert await plane.figure("holdfast_ledger_writable") == 0.0
            async with plane.session.post(f"{plane.url}/resize?nodes=1") as answer:
                assert (answer.status, "nothing was changed" in await answer.text()) == (503, True)
            assert [n.name for n in plane.state.membership.nodes.values() if n.alive] == ["n0", "n1"]
            await second.leave()  # a real fault meanwhile
            await first.beaten(3 * plane.timing.detection_s)
            assert not any(isinstance(x, m.Break) for x in first.heard.all), "it is not written yet"
            await first.step()
            mend()
            form = await first.told(m.JoinGeneration, 2)
            assert [x.node for x in form.generation.members] == ["n0"]
            assert form.generation.start == first.committed
            await first.step()
            assert (await plane.event("ledger-failed"))["reason"]
            assert (await plane.event("ledger-back"))["failed_s"] > 0
            assert await plane.figure("holdfast_ledger_writable") == 1.0
            await plane.committed(first.committed)
            assert await plane.figure("holdfast_steps_committed_total") == first.committed
            assert not first.closed
            assert not any(isinstance(x, FENCES) for x in first.heard.all)
            assert sum("ledger" in line for line in plane.lines()) == 2, plane.lines()

    asyncio.run(story())
    store = Store(tmp_path / "jobs" / "job" / "job.sqlite", read_only=True)
    events, steps = list(store.events()), store.steps()
    store.close()
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    assert [e.t_s for e in events if e.kind.startswith("ledger")] == sorted(
        e.t_s for e in events if e.kind.startswith("ledger")
    )
    kinds = [e.kind for e in events]
    assert kinds.count("node-lost") == 2  # the one that left, and this test's end
    assert kinds.index("node-lost") < kinds.index("broke") < len(kinds) - 1 - kinds[::-1].index("formed")
    assert [s.step for s in steps] == list(range(len(steps)))
    assert len(steps) > 20


def test_a_node_that_returns_from_behind_a_cut_tells_of_no_step_that_happened_there_alone(tmp_path: Path):
    """There it trained on, in a generation of the same number, under a coordinator that was superseded: found by random events on a
    real cluster. What it had committed with the others counts."""

    async def story() -> None:
        async with serving(tmp_path) as plane:
            first, second = await plane.pair()
            await first.says(m.Progress(generation=1, committed=4))  # what it says of its loss is on its way
            await second.step()
            await plane.committed(4)
            await first.leave()
            form = await second.told(m.JoinGeneration, 2)
            assert form.generation.start == 4
            back = await plane.agent("n0")
            told = tuple(m.ReportedStep(step, 9.0, 0.1, form.generation.number) for step in range(3, 9))
            figures = tuple((step, {"lr": 9.0}) for step in range(3, 9))
            number = form.generation.number
            tells = m.Progress(generation=number, committed=9, losses=told, figures=figures)
            for worker in (first.worker, "n0.0#99"):  # one that only the other coordinator knew
                await back.send(m.FromWorker(worker, tells))
                await back.send(m.FromWorker(worker, m.Parked(generation=number, committed=9, losses=told)))
            await back.told(m.Fence)
            await back.hello("another")
            await back.send(m.FindingsReported((MARK,)))
            await plane.event("finding")
            mine = m.ReportedStep(4, 1.0, 0.1, number)
            await second.says(m.Progress(generation=number, committed=5, losses=(mine,)))
            await plane.committed(5)

    asyncio.run(story())
    store = Store(tmp_path / "jobs" / "job" / "job.sqlite", read_only=True)
    steps = [(told.step, told.loss) for told in store.steps()]
    store.close()
    assert steps == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 9.0), (4, 1.0)]


def test_a_job_that_ends_does_not_wait_for_its_ledger_for_ever(tmp_path, faulty, monkeypatch):
    for module in (server, decision_loop):
        monkeypatch.setattr(module, "LAST_S", 0.3)

    async def story() -> None:
        async with serving(tmp_path) as plane:
            first, second = await plane.pair()
            spoil("raises")
            await first.step()
            await second.step()
            await plane.line("cannot be written")
            await (await plane.session.post(f"{plane.url}/stop")).read()
            for agent in (first, second):
                await agent.told(m.Stop)
                await agent.told(m.Shutdown)
            assert await plane.line("ends without its ledger")
            ended = await plane.heard.until(lambda said: said[0] == "ended")
            assert ended[1]["outcome"] == "stopped"
            assert ended[1]["steps"]["committed"] == 4
            assert ended[1]["final"]["loss"] == 1.0, plane.lines()
            await plane.serving

    asyncio.run(story())


def test_a_report_that_cannot_be_written_is_told_instead(tmp_path):
    async def story() -> None:
        async with serving(tmp_path) as plane:
            (tmp_path / "jobs" / "job" / "report.tmp").mkdir()
            await (await plane.session.post(f"{plane.url}/stop")).read()
            assert "report.json cannot be written" in await plane.line("cannot be written")
            ended = await plane.heard.until(lambda said: said[0] == "ended")
            assert ended[1]["outcome"] == "stopped"

    asyncio.run(story())


def test_what_a_batch_holds_is_there_once_however_often_it_is_written(tmp_path: Path):
    """After an error nobody knows whether the last commit is in the file."""
    store = Store(tmp_path / "job.sqlite")
    entries = [LedgerEntry(seq=i, t_s=float(i), utc="now", kind="kind", fields={"i": i}) for i in (1, 2)]
    batch = LedgerBatch(
        entries,
        [ReportedSteps(t_s=1.0, losses=(m.ReportedStep(0, 0.5, 0.1),), generation=1, world=2)],
        {"name": b"value"},
    )
    store.write(batch)
    store.write(batch)
    assert list(store.events()) == entries
    assert len(store.steps()) == 1
    assert store.kept("name") == b"value"
    store.close()


def told(store: Store, generation: int, *steps: m.ReportedStep) -> None:
    store.write(
        LedgerBatch(
            steps=[ReportedSteps(t_s=float(generation), losses=steps, generation=generation, world=2)]
        )
    )


def test_a_step_that_was_computed_again_keeps_its_commit_before(tmp_path: Path):
    """Also if it came to the same bits. Who tells again of the commit before, in a later generation, changes nothing."""
    store = Store(tmp_path / "job.sqlite")
    first = m.ReportedStep(7, 0.5, 0.1, made_in=1, weight=64.0, grad_norm=2.0, lr=0.1, skipped=False)
    again = first._replace(made_in=3, took_s=0.2)
    told(store, 1, first)
    told(store, 2, first)
    told(store, 2, first._replace(step=8, skipped=True, grad_norm=None))
    assert [(s.step, s.generation) for s in store.steps()] == [(7, 1), (8, 2)]
    assert store.redone() == []
    told(store, 3, again)
    told(store, 3, again)
    told(store, 4, first)
    counts, last = store.steps()
    assert (counts.took_s, counts.generation, counts.weight, counts.lr) == (0.2, 3, 64.0, 0.1)
    assert (counts.skipped, last.skipped, last.grad_norm) == (False, True, None)
    (before,) = store.redone()
    assert (before.step, before.took_s, before.generation, before.grad_norm) == (7, 0.1, 1, 2.0)
    store.close()


def test_a_coordinator_whose_ledger_cannot_be_opened_waits(tmp_path):
    """Its successors would fail as it does; and after the third the job would be over."""
    job_dir = tmp_path / "jobs" / "job"
    job_dir.mkdir(parents=True)
    (job_dir / "token").write_text("secret")
    (job_dir / "spec.json").write_bytes(msgspec.json.encode(JobSpec(name="job", script="x.py", max_nodes=1)))
    (job_dir / "resume.json").write_bytes(msgspec.json.encode(Resume()))
    locking = sqlite3.connect(job_dir / "job.sqlite", isolation_level=None)
    locking.execute("begin exclusive")
    with closing(locking), socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, "-m", "holdfast.coordinator", f"--job-dir={job_dir}"]
        command.append(f"--listen-fd={listening.fileno()}")
        port = listening.getsockname()[1]
        with subprocess.Popen(
            command, pass_fds=[listening.fileno()], stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            assert "cannot be opened (database is locked)" in process.stderr.readline()
            locking.execute("rollback")
            for path in ("status", "stop"):
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/{path}", headers={"Authorization": "Bearer secret"}
                )
                request.method = "POST" if path == "stop" else "GET"
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert answer.status == 200
            assert process.wait(60) == 0
            assert process.stderr.read() == ""


@pytest.mark.parametrize("damage", ["no database", "no state"])
def test_a_coordinator_whose_ledger_is_damaged_waits_for_another(tmp_path, caplog, damage):
    """The job trains on, and would not where its coordinator ended."""
    (tmp_path / "token").write_text("secret")
    path = own_ledger(tmp_path, 0)
    if damage == "no database":
        path.write_bytes(b"nothing that SQLite knows" * 1000)
    else:
        with closing(Store(path)) as store:
            store.begin()
            store.keep(SNAPSHOT, b"\xc1")
            store.commit()
    launcher, lifeline = os.pipe()
    os.close(lifeline)  # it is gone: the second attempt is not made
    given = SimpleNamespace(job_dir=tmp_path, term=0, copies=0, lifeline=launcher)
    spec = JobSpec(name="job", script="train.py")
    assert take_up(given, spec, Resume()) is None
    os.close(launcher)
    assert f"the ledger {path} is damaged" in caplog.text


def test_a_name_that_is_no_text_any_more_is_damage_like_any_other(tmp_path):
    """SQLite quotes it in its own message, which then is no text either."""
    path = tmp_path / "job.sqlite"
    with closing(Store(path)) as store:
        store.keep("core", b"state")
        store._db.execute("pragma wal_checkpoint(truncate)")
    whole = path.read_bytes()
    at = (
        whole.index(b"create table kept")
        if b"create table kept" in whole
        else whole.lower().index(b"table kept")
    )
    path.write_bytes(whole[:at] + b"\xef\xff\xfe" + whole[at + 3 :])
    with closing(Store(path, read_only=True)) as store, pytest.raises(sqlite3.DatabaseError):
        store.kept("core")
