"""Trackers of a real job that loses everything it can lose: each commit once, incidents as markers, one run (`make look-test`)."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
from harness import end_leftovers, end_started, finish, held, leftovers, start
from servers import until

from holdfast.coordinator.service.store import LedgerEntry, StepRow, Store
from holdfast.observe.event_text import event_line
from holdfast.tools.tracking.mlflow import TEXT_CHARS

SCRIPT = Path(__file__).parent / "train_gated.py"
EVERY = 20
"""Steps between two snapshots."""
ALL_DIE, ENDS, FOLLOWED, STEPS = 70, 100, 115, 130
"""Before this step all workers die at once; before this one all processes of the first start do. The second
start waits before the third until it is followed, so its follower reads the first one's end while this one runs."""
FAULTS = (
    "kill-worker:rank=1,step=15",
    "kill-worker:rank=0,step=30",
    "kill-coordinator:step=45",
    *(f"kill-worker:rank={rank},step={ALL_DIE},phase=backward" for rank in range(3)),
)


@contextmanager
def shut(gate: Path) -> Iterator[IO[bytes]]:
    """Workers wait at the gate until its file is closed."""
    with gate.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def kill(fds: list[int]) -> None:
    """All at once, and waits until they are gone. Stopped first: nobody is to see another one's end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for fd in fds:
            try:
                signal.pidfd_send_signal(fd, number)
            except ProcessLookupError:
                continue
    for fd in fds:
        assert select.select([fd], [], [], 40)[0]
        os.close(fd)


def kill_follower(home: Path) -> None:
    [pid] = [pid for pid, command in leftovers(home).items() if " track " in command]
    kill([os.pidfd_open(pid)])


class Ledger:
    """What one start of the job left."""

    def __init__(self, path: Path) -> None:
        with closing(Store(path, read_only=True)) as store:
            self.name = store.news(0, 0, limit=1).ledger
            self.began_utc_s = store.news(0, 0, limit=1).began_utc_s
            self.steps: list[StepRow] = store.steps()
            self.redone: list[StepRow] = store.redone()
            self.events: list[LedgerEntry] = list(store.events())

    def incidents(self) -> list[int]:
        return [entry.fields["id"] for entry in self.events if entry.kind == "incident-opened"]


def newest_step(ledger: Path) -> int:
    with closing(Store(ledger, read_only=True)) as store:
        return store.steps()[-1].step


def lines(path: Path, kind: str) -> list[dict[str, Any]]:
    """Those of one kind; a follower that is killed, or writes now, may have left the last one unfinished."""
    if not path.exists():
        return []
    whole = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in whole if line["kind"] == kind]


class Tracked:
    """What MLflow's own client finds."""

    def __init__(self, uri: str) -> None:
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)

    def run(self) -> Any:
        """The only one."""
        experiment = self._client.get_experiment_by_name("holdfast")
        [run] = self._client.search_runs([experiment.experiment_id])
        return run

    def points(self, name: str) -> list[tuple[int, float, int]]:
        """Step, value and milliseconds since 1970 of each point of a metric, in the order of time."""
        found = self._client.get_metric_history(self.run().info.run_id, name)
        return sorted(((x.step, x.value, x.timestamp) for x in found), key=lambda point: point[2])


def milliseconds(ledger: Ledger, t_s: float) -> int:
    return round((ledger.began_utc_s + t_s) * 1000)


def check_mlflow(tracked: Tracked, ledgers: list[Ledger], counts: dict[int, float], back: list[int]) -> None:
    """Each commit of each start is one point. Of a step that was computed again the newest point is the one that counts."""
    losses = tracked.points("loss")
    commits = Counter(
        (row.step, row.loss, milliseconds(ledger, row.t_s))
        for ledger in ledgers
        for row in ledger.steps + ledger.redone
    )
    assert Counter(losses) == commits
    assert set(commits.values()) == {1}
    assert {step: value for step, value, _ in losses} == counts
    assert [value for _, value, _ in tracked.points("holdfast/went_back")] == back
    twice = tracked.points("twice")
    assert all(value == 2 * step for step, value, _ in twice)
    assert {(step, at) for step, _, at in twice} <= {(step, at) for step, _, at in losses}

    markers = {
        f"holdfast.event.{re.sub(r'[^0-9]', '', ledger.name)}.{entry.seq:06d}": (ledger, entry, text)
        for ledger in ledgers
        for entry in ledger.events
        if (text := event_line(msgspec.to_builtins(entry), width=TEXT_CHARS))
    }
    tags = {k: v for k, v in tracked.run().data.tags.items() if k.startswith("holdfast.event.")}
    assert tags == {name: text for name, (_, _, text) in markers.items()}
    assert Counter((value, at) for _, value, at in tracked.points("holdfast/event")) == Counter(
        (entry.seq, milliseconds(ledger, entry.t_s)) for ledger, entry, _ in markers.values()
    )
    opened = [entry.fields["id"] for _, entry, _ in markers.values() if entry.kind == "incident-opened"]
    assert opened == [number for ledger in ledgers for number in ledger.incidents()]


def check_json_lines(path: Path, ledgers: list[Ledger], counts: dict[int, float], back: list[int]) -> None:
    """Each step that counts is one line, and each event of each start."""
    steps = lines(path, "step")
    assert [(x["step"], x["loss"]) for x in steps] == sorted(counts.items())
    assert all(x["figures"].get("twice", 2 * x["step"]) == 2 * x["step"] for x in steps)
    assert [x["to_step"] for x in lines(path, "went-back")] == back
    told = [(x["seq"], x["event"], x["fields"]) for x in lines(path, "event")]
    assert told == [(x.seq, x.kind, x.fields) for ledger in ledgers for x in ledger.events]


@pytest.mark.look
@pytest.mark.timeout(300)  # two starts of a job and four of MLflow, on machines that others use too
@pytest.mark.filterwarnings("default")  # those of MLflow's own use of SQLAlchemy
def test_a_job_that_loses_everything_is_one_run_with_each_commit_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    out, uri, folder = tmp_path / "out.jsonl", f"sqlite:///{tmp_path / 'ml.db'}", tmp_path / "jobs/job"
    to = [f"mlflow:{uri}", f"jsonl:{out}"]
    options: list[object] = ["--nnodes", 3, "--snapshot-every", EVERY, "--detection", 60]
    options += [word for target in to for word in ("--track", target)]
    script = [SCRIPT, STEPS, tmp_path]
    tracked = Tracked(uri)

    def following() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "holdfast", "track", "--job", "job"]
        command += [word for target in to for word in ("--to", target)]
        return subprocess.Popen(command, env={**os.environ, "HOLDFAST_HOME": str(tmp_path)})

    def comes(what: Callable[[], object], why: str) -> None:
        until(lambda: what() or None, why)

    try:
        with ExitStack() as all_die, shut(tmp_path / str(ENDS)):
            all_die.enter_context(shut(tmp_path / str(ALL_DIE)))
            faults = [word for fault in FAULTS for word in ("--fault", fault)]
            process = start(tmp_path, *options, *faults, *script)
            # The lines are on the disk, and the rows of the same steps are on their way to MLflow's database.
            comes(lambda: lines(out, "step"), "the follower begins")
            kill_follower(tmp_path)
            second = following()
            # What is rolled back next is tracked already: it has to be taken back, and not only left out.
            comes(lambda: len(lines(out, "step")) == ALL_DIE, "all lines before the loss")
            comes(lambda: len(tracked.points("loss")) == ALL_DIE, "all rows before the loss")
            all_die.close()
            comes(lambda: lines(out, "went-back"), "the follower goes back with the job")
            kill_follower(tmp_path)
            second.wait()
            # Nobody follows from here to the end of this start: the next one has to read it out of its folder.
            comes(lambda: newest_step(folder / "job.sqlite") == ENDS - 1, "the job is at its last gate")
            kill(held(tmp_path))
            process.communicate()
        with shut(tmp_path / str(FOLLOWED)):
            again = start(tmp_path, *options, "--fault", f"kill-worker:rank=0,step={FOLLOWED}", *script)
            comes(lambda: len(lines(out, "went-back")) == 2, "the second start is followed")
        ran = finish(again, tmp_path)
        assert ran.code == 0, ran.output[-3000:]
    finally:
        end_started()
        end_leftovers(tmp_path)

    ledgers = [Ledger(folder / "runs/1/job.sqlite"), Ledger(folder / "job.sqlite")]
    assert [len(ledger.incidents()) for ledger in ledgers] == [len(FAULTS), 1]
    # The loss of all workers, and the end of all processes, cost the steps since a snapshot.
    back = [ledgers[0].redone[0].step, ledgers[1].steps[0].step]
    assert [0 < ALL_DIE - back[0] <= 2 * EVERY, 0 < ENDS - back[1] <= 2 * EVERY] == [True, True], back
    assert [row.step for row in ledgers[0].redone] == list(range(back[0], ALL_DIE))
    counts = {row.step: row.loss for ledger in ledgers for row in ledger.steps if row.loss is not None}
    assert list(counts) == list(range(STEPS))
    check_json_lines(out, ledgers, counts, back)
    check_mlflow(tracked, ledgers, counts, back)
