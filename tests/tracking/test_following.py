"""A tracker that is killed at any moment ends with each step that counts exactly once, and so does one that never was."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from holdfast.coordinator.service.store import LedgerBatch, LedgerEntry, ReportedSteps, Store
from holdfast.errors import UsageError
from holdfast.protocol.messages import ReportedStep
from holdfast.tools.tracking.follower import read_ledger, tracker
from holdfast.tools.tracking.position import Position, WentBack, take_in

BEGAN = "2026-01-02T03:04:05.000+00:00"


class Job:
    """What a coordinator writes into a ledger."""

    def __init__(self, store: Store, utc: str = BEGAN) -> None:
        self.store, self._t_s, self._seq, self._made_in = store, 0.0, 0, 1
        self.counts: dict[int, float] = {}
        self._utc = utc
        self.happens()

    def happens(self) -> None:
        self._t_s += 1.0
        self._seq += 1
        fields = {"node": "node1", "host": "h", "slots": 1}
        entry = LedgerEntry(seq=self._seq, t_s=self._t_s, utc=self._utc, kind="node-joined", fields=fields)
        self.store.write(LedgerBatch(entries=[entry]))

    def commits(self, *steps: int, figures: tuple[tuple[str, int, float], ...] = ()) -> None:
        self._t_s += 1.0
        told = tuple(ReportedStep(n, self._t_s + n, 0.1, made_in=self._made_in) for n in steps)
        self.counts |= {x.step: x.loss for x in told}
        said = ReportedSteps(t_s=self._t_s, losses=told, generation=self._made_in, world=2, figures=figures)
        self.store.write(LedgerBatch(steps=[said]))

    def goes_back(self) -> None:
        self._made_in += 1


def test_a_commit_that_replaces_another_comes_after_it(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "job.sqlite")) as store:
        job = Job(store)
        job.commits(0, 1, 2, figures=(("eval", 1, 9.0), ("eval", 2, 8.0), ("other", 5, 1.0)))
        news = store.news(0, 0)
        assert [(x.row.step, x.place, x.made_in) for x in news.steps] == [(0, 1, 1), (1, 2, 1), (2, 3, 1)]
        assert [x.figures for x in news.steps] == [{}, {"eval": 9.0}, {"eval": 8.0}]
        assert (news.ledger, news.more, [e.seq for e in news.events]) == (BEGAN, False, [1])
        job.goes_back()
        job.commits(1)
        job.commits(2, 3)
        found = store.news(1, 3).steps
        assert [(x.row.step, x.place, x.made_in) for x in found] == [(1, 4, 2), (2, 5, 2), (3, 6, 2)]
        # What has not settled waits, and so does all after it.
        assert [x.row.step for x in store.news(0, 0, until_s=2.0).steps] == [0]


def test_a_late_word_is_no_going_back(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "job.sqlite")) as store:
        job = Job(store)
        job.commits(0, 2)
        job.commits(1)
        batch = take_in(Position(), store.news(0, 0))
        assert not any(isinstance(part, WentBack) for part in batch.parts)
        assert batch.position.step == 2


def test_a_job_that_went_back_before_anybody_followed(tmp_path: Path) -> None:
    """Steps 2 and 3 were rolled back and are not computed again yet."""
    with closing(Store(tmp_path / "job.sqlite")) as store:
        job = Job(store)
        job.commits(0, 1, 2, 3)
        job.goes_back()
        job.commits(1)
        follows(tmp_path / "job.sqlite", tmp_path / "out")
    assert [x["step"] for x in lines(tmp_path / "out") if x["kind"] == "step"] == [0, 1]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(path: Path, job: Job) -> None:
    steps = [x for x in lines(path) if x["kind"] == "step"]
    assert {x["step"]: x["loss"] for x in steps} == job.counts
    assert len(steps) == len(job.counts)
    seqs = [x["seq"] for x in lines(path) if x["kind"] == "event"]
    assert seqs == list(range(1, job.store.last_seq() + 1))


def dies(what: Callable[[], None], at: int) -> bool:
    """Does it in a child that is killed before its `at`-th call to the file system; whether it was."""
    child = os.fork()
    if not child:
        count = 0

        def hook(event: str, args: tuple[object, ...]) -> None:
            nonlocal count
            if event in ("open", "os.rename", "os.remove", "os.truncate"):
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        what()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def follows(ledger: Path, target: Path) -> None:
    with (
        closing(Store(ledger, read_only=True)) as store,
        closing(tracker(f"jsonl:{target}", target.parent)) as to,
    ):
        read_ledger(store, to)


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_every_call_to_the_file_system(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    target = tmp_path / "out.jsonl"
    with closing(Store(tmp_path / "job.sqlite")) as store:
        job, step = Job(store), 0
        for _ in range(5):
            for _ in range(rng.randint(1, 3)):
                job.commits(*range(step, step := step + rng.randint(1, 3)))
                if rng.random() < 0.5:
                    job.happens()
            if rng.random() < 0.6:
                job.goes_back()
                step = rng.randint(0, step)
                job.counts = {n: loss for n, loss in job.counts.items() if n < step}
                job.commits(step)
                step += 1
            at = 1
            while dies(lambda: follows(tmp_path / "job.sqlite", target), at):
                at += 1
                if rng.random() < 0.3:  # the page cache took a part of what was being written
                    with target.open("ab") as out:
                        out.write(b'{"kind":"st')
            check(target, job)


def test_a_later_start_goes_on_in_the_same_file(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    with closing(Store(tmp_path / "1.sqlite")) as store:
        first = Job(store)
        first.commits(0, 1, 2, 3)
        follows(tmp_path / "1.sqlite", target)
    with closing(Store(tmp_path / "2.sqlite")) as store:
        second = Job(store, "2026-01-03T03:04:05.000+00:00")
        second.commits(2, 3, 4)  # resumed from a save of step 2
        follows(tmp_path / "2.sqlite", target)
    steps = {x["step"]: x["loss"] for x in lines(target) if x["kind"] == "step"}
    assert steps == {n: first.counts[n] for n in (0, 1)} | second.counts
    assert [x["to_step"] for x in lines(target) if x["kind"] == "went-back"] == [2]


def test_two_followers_do_not_write_to_one_target(tmp_path: Path) -> None:
    with (
        closing(tracker(f"jsonl:{tmp_path / 'out'}", tmp_path)),
        pytest.raises(UsageError, match="another `holdfast track`"),
    ):
        tracker(f"jsonl:{tmp_path / 'out'}", tmp_path)
    with pytest.raises(UsageError, match="jsonl:PATH"):
        tracker("mlfow:x", tmp_path)


def test_tensorboard_shows_each_step_that_counts_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    target = f"tensorboard:{tmp_path / 'tb'}"
    with closing(Store(tmp_path / "job.sqlite")) as store:
        job = Job(store)
        job.commits(0, 1, 2, 3)
        with closing(tracker(target, tmp_path)) as to:
            read_ledger(store, to)
            # Written, and killed before it kept its position.
            job.commits(4)
            to._kept.replace = lambda value: None  # type: ignore[attr-defined, method-assign]
            read_once = take_in(to.position, store.news(to.position.seq, to.position.place))
            to.write(read_once)
        job.goes_back()
        job.commits(2, 3)
        job.counts.pop(4)
        job.happens()
        with closing(tracker(target, tmp_path)) as to:
            read_ledger(store, to)
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    found = [(x.step, round(x.value, 3)) for x in events.Scalars("loss")]
    assert found == [(n, loss) for n, loss in sorted(job.counts.items())]
    (run,) = (tmp_path / "tb" / "events").iterdir()
    texts = accumulator.EventAccumulator(str(run))
    texts.Reload()
    assert [x.step for x in texts.Tensors("node-joined/text_summary")] == [1, 2]
    assert msgspec.json.decode((tmp_path / "tb" / "holdfast.position").read_bytes())["position"]["step"] == 3
