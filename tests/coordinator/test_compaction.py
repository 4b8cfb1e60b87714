"""A ledger that lets go of old rows tells the same in its report, its totals and its curves, and does not grow."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from ledgers import BUCKETS, PIECE, STEPS, small

from holdfast.coordinator.service import rollups
from holdfast.coordinator.service.store import LedgerBatch, LedgerEntry, ReportedSteps, Store
from holdfast.coordinator.service.tally import Tally
from holdfast.protocol.messages import ReportedStep
from holdfast.web.timeline import JobTimeline

UTC = "2026-01-02T03:04:05.000+00:00"


def batch(at: int, count: int, made_in: int, rng: random.Random) -> LedgerBatch:
    told = tuple(
        ReportedStep(
            at + n, rng.random(), 0.1 + rng.random(), made_in=made_in, weight=2.0, skipped=n % 7 == 0
        )
        for n in range(count)
    )
    figures = [("accuracy", at + n, 0.5) for n in range(count)]
    said = ReportedSteps(t_s=1.0 + at, losses=told, generation=made_in, world=2, figures=figures)
    return LedgerBatch(steps=[said])


def rows(store: Store, table: str) -> int:
    return int(store._db.execute(f"select count(*) from {table}").fetchone()[0])


@pytest.mark.parametrize("begin", [0, 5_000])
def test_nothing_that_a_report_tells_is_lost(tmp_path: Path, begin: int) -> None:
    rng = random.Random(begin)
    with closing(Store(tmp_path / "whole.sqlite")) as whole:
        little = Store(tmp_path / "little.sqlite")
        at, made_in = begin, 1
        for turn in range(160):
            what = batch(at, rng.randrange(1, 60), made_in, rng)
            whole.write(what)
            with small():
                little.write(what)
                if turn % 40 == 17:  # another coordinator takes over
                    little.close()
                    little = Store(tmp_path / "little.sqlite")
            at += len(what.steps[0].losses)
            if rng.random() < 0.1:
                at, made_in = max(begin, at - rng.randrange(80)), made_in + 1
        told, all_of_it = little.summary(), whole.summary()
        assert (told.count, told.skipped, told.loss) == (all_of_it.count, all_of_it.skipped, all_of_it.loss)
        assert told.dropped is not None
        assert all_of_it.dropped is None
        assert told.dropped["steps"] == told.count - rows(little, "steps")
        one, other = little.tally(Tally()), whole.tally(Tally())
        assert (one.commits, one.redone, one.weight, one.newest) == (
            other.commits, other.redone, pytest.approx(other.weight), other.newest,
        )  # fmt: skip
        assert rows(little, "steps") <= STEPS + 3 * PIECE
        assert rows(little, "figures") == rows(little, "steps")
        for level in range(1, rollups.LEVELS):
            there = rows(little, f"rollups where level = {level}")
            assert there <= BUCKETS + 3 * PIECE
        # A curve of the whole job, and of what is kept, is the same; of what went it is coarser, and still whole.
        for points in (20, 100):
            seen, wanted = little.series(0, None, points), whole.series(0, None, points)
            assert seen["step"] == wanted["step"]
            assert seen["loss_min"] == wanted["loss_min"]
            assert seen["loss"] == pytest.approx(wanted["loss"])
        floor = little.dropped().floors[0]
        assert little.series(floor, None) == whole.series(floor, None)
        early = little.series(begin, begin + 63)
        assert early["step"][0] <= begin
        assert early["loss_min"][0] <= min(whole.series(begin, begin + 63)["loss"])
        little.close()


def test_a_step_far_below_is_committed_again(tmp_path: Path) -> None:
    rng = random.Random(1)
    with small(), closing(Store(tmp_path / "job.sqlite")) as store:
        for at in range(0, 2000, 50):
            store.write(batch(at, 50, 1, rng))
        before = store.summary().count
        curve = store.series(0, None, 20)
        store.write(batch(10, 5, 2, rng))
        # Its summary is all that is left of its neighbours, and stays.
        assert store.series(0, None, 20) == curve
        assert store.summary().count == before
        for at in range(2000, 3000, 50):
            store.write(batch(at, 50, 2, rng))
        assert store.summary().count == 3000
        assert store.tally(Tally()).steps == 3000


def test_old_generations_lose_the_names_of_their_workers(tmp_path: Path) -> None:
    names = [f"n{n}.0#1" for n in range(20)]
    with small(), closing(Store(tmp_path / "job.sqlite")) as store:
        for seq in range(1, 31):
            fields = {"generation": seq, "start": seq, "world": 20, "workers": names, "restore": []}
            fields |= {"applied": False, "source": "live"}
            store.write(
                LedgerBatch(
                    entries=[LedgerEntry(seq=seq, t_s=1.0 * seq, utc=UTC, kind="formed", fields=fields)]
                )
            )
        kept = [len(e.fields["workers"]) for e in store.events()]
        assert kept == [0] * 27 + [20] * 3
        assert [e.fields["world"] for e in store.events()] == [20] * 30
        assert store.dropped().unnamed == 27
        # Nobody seems to have left because nobody is named.
        timeline = JobTimeline()
        for row in store.raw_entries(0, 100):
            timeline.add(*row)
        assert {runs[-1][1] for runs in timeline.runs.values()} == {0}
        assert {len(runs) for runs in timeline.runs.values()} == {1}


def test_a_commit_that_fails_drops_nothing(tmp_path: Path) -> None:
    rng = random.Random(3)
    with small(), closing(Store(tmp_path / "job.sqlite")) as store:
        at = 0
        while not rollups._due(store._dropped, at + 49):
            store.write(batch(at, 50, 1, rng))
            at += 50
        before = store._dropped
        bad = batch(at, 50, 1, rng)
        bad.kept["x"] = object()  # type: ignore[assignment]
        with pytest.raises(Exception, match=r"bind|type"):
            store.write(bad)
        assert store._dropped is before
        assert msgspec.to_builtins(store.dropped()) == msgspec.to_builtins(before)
        assert store.summary().count == at
