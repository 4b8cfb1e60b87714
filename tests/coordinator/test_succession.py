"""A coordinator that goes on with what one on another machine left: terms, clock, ledger."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from holdfast.coordinator.kernel.events import StopRequested
from holdfast.coordinator.service import server
from holdfast.coordinator.service.decision_loop import Anchor, CoreClock
from holdfast.coordinator.service.server import Coordinator
from holdfast.coordinator.service.store import FIRST, Store, newest_ledger, own_ledger, succeed
from holdfast.protocol.job import JobSpec, Resume
from holdfast.protocol.leadership import claim_term, newest_term


def test_a_term_is_claimed_once(tmp_path: Path) -> None:
    assert newest_term(tmp_path) == 0
    assert claim_term(tmp_path, 1, "n1")
    assert not claim_term(tmp_path, 1, "n2")
    assert claim_term(tmp_path, 2, "n2")
    assert newest_term(tmp_path) == 2


def test_a_superseded_coordinator_that_begins_late_leaves_its_successors_ledger_alone(tmp_path: Path) -> None:
    for name in (FIRST, "job-2.sqlite", "job-3.sqlite"):
        (tmp_path / name).touch()
    assert own_ledger(tmp_path, 1) == tmp_path / FIRST
    assert own_ledger(tmp_path, 2) == tmp_path / "job-2.sqlite"
    assert newest_ledger(tmp_path) == own_ledger(tmp_path, 3)


def test_the_clock_goes_on_on_another_machine() -> None:
    anchor = Anchor(now_s=5_000_000.0, utc_s=time.time() - 7.0, boot="the other machine")
    assert CoreClock(anchor, boot="this machine")() == pytest.approx(5_000_007.0, abs=1.0)


def test_the_clock_of_one_machine_is_its_own() -> None:
    first = CoreClock(None, boot="this machine")
    again = CoreClock(first.anchor, boot="this machine")
    assert again() == pytest.approx(time.monotonic(), abs=1.0)
    assert again() >= first.anchor.now_s


def test_the_clock_does_not_go_back_where_utc_is_behind() -> None:
    anchor = Anchor(5_000_000.0, time.time() + 3600.0, "the other machine", steady_s=12.0)
    assert CoreClock(anchor, boot="this machine")() >= anchor.now_s


def test_the_clock_goes_on_when_a_successor_is_started_again_on_its_own_machine() -> None:
    first = Anchor(5_000_000.0, time.time() - 7.0, "the other machine", steady_s=12.0)
    successor = CoreClock(first, boot="this machine")
    again = CoreClock(successor.anchor, boot="this machine")
    assert again() == pytest.approx(successor(), abs=1.0)
    assert again() >= successor.anchor.now_s - 1e-3


def test_every_state_is_kept_with_the_time_of_the_core(tmp_path: Path) -> None:
    """Else a successor elsewhere would begin at the time at which its predecessor began."""
    job_dir = tmp_path / "jobs" / "job"
    job_dir.mkdir(parents=True)
    (job_dir / "token").write_text("token")

    async def handled() -> float:
        coordinator = Coordinator(job_dir, JobSpec(name="job", script="x.py"), Resume())
        now_s = coordinator._clock()
        deciding = asyncio.create_task(coordinator._loop.decide_all())
        await coordinator._loop.effect(StopRequested("test"))
        deciding.cancel()
        assert await coordinator._ledger.close(5.0)
        await coordinator._memory.close()
        return now_s

    handled_s = asyncio.run(handled())
    store = Store(job_dir / FIRST, read_only=True)
    value = store.kept("clock")
    store.close()
    assert value is not None
    assert msgspec.msgpack.decode(value, type=Anchor).now_s >= handled_s


def test_a_successor_has_a_ledger_of_its_own(tmp_path: Path) -> None:
    old = Store(tmp_path / FIRST, shared=True)
    old.add_event(1.0, "2026-11-21T23:00:00", "formed", {"generation": 1})
    path = succeed(tmp_path, 2)
    old.add_event(
        2.0, "2026-11-21T23:00:01", "formed", {"generation": 2}
    )  # superseded, and does not know it yet
    assert newest_ledger(tmp_path) == path
    new = Store(path, shared=True)
    new.add_event(3.0, "2026-11-21T23:00:02", "formed", {"generation": 3})
    copy = Store.of(new.copy())
    for store in (new, copy):
        assert [e.fields["generation"] for e in store.events()] == [1, 3]
    for store in (old, new, copy):
        store.close()


WRITER = """
import sys
from pathlib import Path
from holdfast.coordinator.service.store import Store
from holdfast.protocol.leadership import newest_term

job_dir, until = Path(sys.argv[1]), int(sys.argv[2])
store = Store(job_dir / "job.sqlite", shared=True)
store._db.execute("pragma synchronous=off")
store._db.execute("pragma wal_autocheckpoint=10")
number = 0
while newest_term(job_dir) < until:
    number += 1
    store.begin()
    for half in (1, 2):
        store.add_event(float(number), "2026-11-21T23:00:00", "written", {"number": number, "half": half})
    store.commit()
    print(number, flush=True)
"""


def check_copy(path: Path) -> list[int]:
    """The numbers of a copy that is whole, and has either both halves of a commit or neither."""
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("pragma integrity_check").fetchone() == ("ok",)
    with closing(Store(path, shared=True)) as store:
        written = [(e.fields["number"], e.fields["half"]) for e in store.events()]
    numbers = [number for number, half in written if half == 2]
    assert written == [(number, half) for number in range(1, len(numbers) + 1) for half in (1, 2)]
    return numbers


@contextmanager
def writing(job_dir: Path, until: int) -> Iterator[subprocess.Popen[bytes]]:
    """A coordinator's ledger, written as fast as it goes by a process that looks after every commit whether it is superseded."""
    command = [sys.executable, "-c", WRITER, str(job_dir), str(until)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as writer:
        try:
            assert writer.stdout is not None
            while int(writer.stdout.readline()) < 50:
                pass
            yield writer
        finally:
            writer.kill()


def test_a_ledger_is_taken_over_from_a_coordinator_that_still_writes(tmp_path: Path) -> None:
    """One that has not heard yet that it is superseded: what it commits until it ends is in the copy."""
    assert claim_term(tmp_path, 1, "n1")
    with writing(tmp_path, 2) as writer, ThreadPoolExecutor(1) as beside:
        copying = beside.submit(succeed, tmp_path, 2)
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(200)]
        assert claim_term(tmp_path, 2, "n2")
        said += [int(line) for line in writer.stdout]
        assert writer.wait() == 0
        numbers = check_copy(copying.result(60))
    assert numbers[-1] == said[-1]


def said_already(pipe: int) -> bytes:
    return os.read(pipe, 1 << 20) if select.select([pipe], [], [], 0)[0] else b""


def test_a_ledger_is_taken_over_from_a_coordinator_that_is_stopped(tmp_path: Path) -> None:
    """It never gives its lock back. All that it said to be written is in the copy; it changes nothing there afterwards."""
    with writing(tmp_path, 2) as writer:
        assert writer.stdout is not None
        writer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
        said = [50, *map(int, said_already(writer.stdout.fileno()).split())]
        path = succeed(tmp_path, 2)
        numbers = check_copy(path)
        writer.send_signal(signal.SIGCONT)
        writer.stdout.readline()
    assert numbers[-1] >= said[-1]
    assert check_copy(path) == numbers


def test_a_ledger_is_taken_over_from_a_coordinator_that_was_killed(tmp_path: Path) -> None:
    with writing(tmp_path, 2) as writer:
        writer.kill()
        assert writer.stdout is not None
        said = [int(line) for line in writer.stdout]
        writer.wait()
    assert check_copy(succeed(tmp_path, 2))[-1] >= max(said, default=0)


def test_a_folder_that_cannot_be_read_for_a_moment_hides_no_later_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failed look at the shared folder was once the last."""
    looks: list[int | None] = [None, None, 1, 2]

    def look(job_dir: Path) -> int:
        if (found := looks.pop(0)) is None:
            raise OSError("stale file handle")
        return found

    monkeypatch.setattr(server, "newest_term", look)
    monkeypatch.setattr(server, "LOOK_S", 0.0)
    job_dir = tmp_path / "jobs" / "job"
    job_dir.mkdir(parents=True)
    (job_dir / "token").write_text("token")

    async def watched() -> bool:
        coordinator = Coordinator(job_dir, JobSpec(name="job", script="x.py"), Resume(), term=1)
        await coordinator._watch_term()
        assert await coordinator._ledger.close(5.0)
        await coordinator._memory.close()
        return coordinator.superseded

    assert asyncio.run(watched())
    assert not looks
