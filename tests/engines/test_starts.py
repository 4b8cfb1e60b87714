"""The starts of a job: their ledgers, and the account of those whose ledgers were removed."""

import json
import shutil
from datetime import UTC, datetime, timedelta

import pytest
from desk import Desk, running

from holdfast.coordinator.service.store import Store
from holdfast.engines import starts

FIRST = datetime(2026, 1, 2, tzinfo=UTC)
APART_S = 1000.0
"""From the beginning of one start to that of the next."""


def leave_ledger(folder, began_at):
    """As a coordinator of level 2 leaves it after three steps of a second each, the first of which belongs to the start."""
    desk: Desk = running(2, committed=0)
    for step in (1, 2, 3):
        desk.wait(1.0)
        desk.commit(began_at + step)
    folder.mkdir(parents=True)
    store = Store(folder / "job.sqlite")
    store.begin()
    # As the wall clock of the coordinator's machine had it: one start a thousand seconds after the one before.
    utc = (FIRST + timedelta(seconds=1.0 + APART_S * began_at / 2)).isoformat()
    store.add_event(1.0, utc, "formed", {"generation": 1, "start": began_at})
    store.add_event(desk.now - desk.state.began_s, "u", "ended", {})
    store.save(desk.state)
    store.commit()
    store.close()


@pytest.fixture
def job(tmp_path):
    """Four starts, each of which goes on one step before the end of the one before. The newest is not put away."""
    for number in (1, 2, 3):
        leave_ledger(tmp_path / "runs" / str(number), 2 * (number - 1))
    leave_ledger(tmp_path / "now", 6)
    return tmp_path


def together(job):
    store = Store(job / "now" / "job.sqlite", read_only=True)
    try:
        return starts.all_starts(job, store)
    finally:
        store.close()


def test_one_sum_over_all_starts(job):
    found = together(job)
    assert found["starts"] == 4
    assert found["recomputed_s"] == pytest.approx(3.0, abs=0.3)
    assert found["productive_s"] == pytest.approx(5.0, abs=0.5)


def test_the_time_between_starts_has_a_name(job):
    found = together(job)
    last_s = found["wall_s"] / 4
    assert found["elapsed_s"] == pytest.approx(3 * APART_S + last_s, abs=1e-3)
    assert found["between_s"] == pytest.approx(found["elapsed_s"] - found["wall_s"], abs=1e-5)
    assert found["ettr"] == pytest.approx(found["productive_s"] / found["elapsed_s"], abs=1e-4)
    starts.keep_newest(job, 1)
    assert together(job)["ettr"] == found["ettr"]


def test_an_account_of_an_older_version_does_not_tell_when_the_first_start_began(job):
    starts.keep_newest(job, 1)
    path = job / "runs" / starts.EARLIER
    account = json.loads(path.read_text())
    del account["began_utc_s"]
    path.write_text(json.dumps(account))
    found = together(job)
    assert (found["elapsed_s"], found["between_s"], found["ettr"]) == (None, None, None)
    assert found["share"] is not None


def test_one_start_has_no_sum(job):
    shutil.rmtree(job / "runs")
    assert together(job) is None


def test_what_is_removed_stays_in_the_sum(job):
    before = together(job)
    starts.keep_newest(job, 1)
    assert [number for number, _ in starts.put_away(job)] == [3]
    assert together(job) == before
    starts.keep_newest(job, 1)  # there is nothing more to remove
    assert together(job) == before


def test_a_start_is_counted_once_though_its_removal_was_interrupted(job, monkeypatch):
    before = together(job)
    with monkeypatch.context() as patched:
        patched.setattr(starts.shutil, "rmtree", lambda *a, **k: None)
        starts.keep_newest(job, 2)
    assert len(starts.put_away(job)) == 3
    assert together(job) == before
    starts.keep_newest(job, 2)
    assert [number for number, _ in starts.put_away(job)] == [2, 3]
    assert together(job) == before


@pytest.mark.parametrize("damaged", ["runs/2/job.sqlite", "runs/earlier.json"])
def test_what_cannot_be_read_makes_the_sum_unknown(job, damaged):
    (job / damaged).write_text("{")
    found = together(job)
    assert (found["wall_s"], found["share"]) == (None, None)
    starts.keep_newest(job, 1)
    assert together(job)["share"] is None


def test_a_start_that_was_refused_is_none(job):
    (job / "runs" / "4").mkdir()
    assert together(job)["starts"] == 4
