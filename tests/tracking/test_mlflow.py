"""`mlflow:URI`: a real MLflow in SQLite has each row once, through kills, goings back and starts (`make look-test`)."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_following import Job

from holdfast.coordinator.service.store import Store
from holdfast.errors import UsageError
from holdfast.tools.tracking import mlflow
from holdfast.tools.tracking.follower import read_ledger, tracker
from holdfast.tools.tracking.position import Batch, take_in

LATER = "2026-01-02T04:04:05.000+00:00"


def follows(ledger: Path, uri: str, folder: Path) -> None:
    with closing(Store(ledger, read_only=True)) as store, closing(tracker(f"mlflow:{uri}", folder)) as to:
        read_ledger(store, to)


def rows(database: Path) -> list[tuple[int, float]]:
    with closing(sqlite3.connect(database)) as db:
        return list(db.execute("select step, value from metrics where key = 'loss' order by timestamp, step"))


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.entities", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"holdfast-train\[mlflow\]"):
        tracker("mlflow:sqlite:///x.db", tmp_path)


def test_a_password_is_not_taken_from_a_command_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="MLFLOW_TRACKING_URI"):
        tracker("mlflow:https://me:secret@tracker", tmp_path)
    assert not list(tmp_path.iterdir())


def test_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UsageError, match="no tracking URI was given"):
        tracker("mlflow:", tmp_path)


@pytest.mark.parametrize(
    ("name", "known_as"), [("eval/loss", "eval/loss"), ("a%b", "a_b"), ("../x", "x"), ("/", "_")]
)
def test_names_that_mlflow_takes(name: str, known_as: str) -> None:
    assert mlflow._metric_name(name) == known_as


class Killed(Exception):
    """The follower, after the rows were taken in."""


class Server:
    """MLflow's client as the tracker calls it. It keeps rows as MLflow's table does, by their whole value."""

    def __init__(self) -> None:
        self.rows: set[tuple[object, ...]] = set()
        self.runs: dict[str, str] = {}
        self.writes = 0
        self.dies = False

    def get_experiment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(experiment_id=name)

    def search_runs(self, experiments: list[str], asked: str, max_results: int) -> list[SimpleNamespace]:
        found = [run for mark, run in self.runs.items() if mark in asked]
        return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in found]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        run = self.runs[tags[mlflow.TAG]] = f"run{len(self.runs)}"
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def log_batch(self, run: str, metrics: tuple[object, ...] = (), tags: tuple[object, ...] = ()) -> None:
        self.writes += 1
        self.rows |= {(run, *row) for row in metrics}
        if self.dies:
            raise Killed


def served(monkeypatch: pytest.MonkeyPatch) -> Server:
    """In place of MLflow."""
    server = Server()
    for name, module in {
        "mlflow.entities": SimpleNamespace(Metric=lambda *row: row, RunTag=lambda *tag: tag),
        "mlflow.tracking": SimpleNamespace(MlflowClient=lambda tracking_uri: server),
        "mlflow.exceptions": SimpleNamespace(MlflowException=OSError),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    return server


def test_what_is_written_again_is_the_same_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = served(monkeypatch)
    with closing(Store(tmp_path / "job.sqlite")) as store:
        job = Job(store)
        job.commits(0, 1, 2)
        with closing(tracker("mlflow:x", tmp_path)) as to, monkeypatch.context() as killed:
            # As if it was killed after the write and before the position was kept.
            killed.setattr(to._kept, "replace", lambda value: None)
            to.write(mlflow_batch(store, to))
        before = set(server.rows)
        assert {row[4] for row in before if row[1] == "loss"} == {0, 1, 2}
        follows(tmp_path / "job.sqlite", "x", tmp_path)
    assert (server.rows, len(server.runs)) == (before, 1)
    assert server.writes == 4  # rows and tags, twice


def test_an_event_that_comes_again_behind_other_steps_is_the_same_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running job gives its events at once, and its steps when they have settled: after a kill there are more of them."""
    server = served(monkeypatch)
    with closing(Store(tmp_path / "job.sqlite")) as store:
        job = Job(store)
        follows(tmp_path / "job.sqlite", "x", tmp_path)
        job.commits(0, 1, 2)
        job.happens()
        with closing(tracker("mlflow:x", tmp_path)) as to:
            unsettled = store.news(to.position.seq, to.position.place, until_s=0.0)
            server.dies = True
            with pytest.raises(Killed):
                to.write(take_in(to.position, unsettled))
        before = {row for row in server.rows if row[1] == "holdfast/event"}
        server.dies = False
        job.happens()
        follows(tmp_path / "job.sqlite", "x", tmp_path)
    after = {row for row in server.rows if row[1] == "holdfast/event"}
    assert before < after
    assert sorted((row[2], row[4]) for row in after) == [(1, 0), (2, 0), (3, 2)]  # event and step


def mlflow_batch(store: Store, to: mlflow.MLflow) -> Batch:
    news = store.news(0, 0)
    return take_in(to.position.at_beginning_of(news.ledger), news)


@pytest.mark.look
@pytest.mark.filterwarnings("default")  # those of MLflow's own use of SQLAlchemy
def test_a_real_mlflow_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    database = tmp_path / "ml.db"
    uri = f"sqlite:///{database}"
    first = tmp_path / "first.sqlite"
    with closing(Store(first)) as store:
        job = Job(store)
        job.commits(0, 1, 2, 3, figures=(("eval/a%", 1, 9.0),))
        with closing(tracker(f"mlflow:{uri}", tmp_path)) as to, monkeypatch.context() as killed:
            killed.setattr(to._kept, "replace", lambda value: None)
            to.write(mlflow_batch(store, to))
        follows(first, uri, tmp_path)
        assert [step for step, _ in rows(database)] == [0, 1, 2, 3]
        job.goes_back()
        job.commits(2, 3, 4)
        follows(first, uri, tmp_path)
        follows(first, uri, tmp_path)
    assert [step for step, _ in rows(database)] == [0, 1, 2, 3, 2, 3, 4]
    assert dict(rows(database)) == job.counts
    with closing(sqlite3.connect(database)) as db:
        assert list(db.execute("select step from metrics where key = 'holdfast/went_back'")) == [(2,)]
    second = tmp_path / "second.sqlite"
    with closing(Store(second)) as store:
        later = Job(store, LATER)
        later.commits(5)
        follows(second, uri, tmp_path)
    assert [step for step, _ in rows(database)] == [0, 1, 2, 3, 2, 3, 4, 5]
    with closing(sqlite3.connect(database)) as db:
        assert db.execute("select count(*) from runs").fetchone() == (1,)
        assert db.execute("select count(*) from tags where key like 'holdfast.event.%'").fetchone() == (2,)
