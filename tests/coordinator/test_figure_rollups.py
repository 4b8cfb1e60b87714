"""The curve of what a script logs equals a look at every value, after anything that may be written, and outlives its rows."""

from __future__ import annotations

import math
import random
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ledgers import BUCKETS, PIECE, counted, small

from holdfast.cli.report import _points
from holdfast.coordinator.service import rollups
from holdfast.coordinator.service.page import _series
from holdfast.coordinator.service.store import LedgerBatch, ReportedSteps, Store
from holdfast.protocol.messages import ReportedStep
from holdfast.web.application import PageRefused

Values = dict[int, float | None]


def batch(at: int, count: int, generation: int, figures: list[tuple[str, int, float]]) -> LedgerBatch:
    told = tuple(ReportedStep(at + n, 1.0 + at + n, 0.1, made_in=generation) for n in range(count))
    said = ReportedSteps(t_s=1.0 + at, losses=told, generation=generation, world=2, figures=figures)
    return LedgerBatch(steps=[said])


def logged(at: int, count: int, rng: random.Random) -> list[tuple[str, int, float]]:
    """Of one name in every step, of another in every fifth, and now and then one that is no number."""
    every = [("accuracy", at + n, rng.random()) for n in range(count)]
    fifth = [("held out", at + n, rng.gauss(0, 9)) for n in range(count) if (at + n) % 5 == 0]
    return every + fifth + ([("odd", at, math.nan), ("odd", at + 1, 1.0)] if rng.random() < 0.2 else [])


def expected(values: Values, first: int, last: int, width: int) -> dict[str, list[Any]]:
    """What the curve is by a look at every value."""
    buckets: dict[int, list[float | None]] = defaultdict(list)
    for step, value in sorted(values.items()):
        if first // width <= step // width <= last // width:
            buckets[step // width].append(value)
    known = {b: [v for v in there if v is not None] for b, there in buckets.items()}
    return {
        "step": [b * width for b in buckets],
        "value": [sum(there) / len(there) if there else None for there in known.values()],
        "value_min": [min(there, default=None) for there in known.values()],
        "value_max": [max(there, default=None) for there in known.values()],
    }


def same(found: dict[str, list[Any]], wanted: dict[str, list[Any]]) -> None:
    assert found.keys() == wanted.keys()
    for name, column in wanted.items():
        assert found[name] == pytest.approx(column), name


def values(store: Store, name: str) -> Values:
    return dict(store.figures(name))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_logged_in_whatever_order(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with closing(Store(tmp_path / "job.sqlite")) as store:
        at, generation = 0, 1
        for _ in range(120):
            count = rng.randrange(1, 20)
            what = batch(at, count, generation, logged(at, count, rng))
            store.write(what)
            if rng.random() < 0.3:
                store.write(what)  # told twice
            if (
                rng.random() < 0.3
            ):  # told a moment after its step, or too late: by a generation that counts no more
                late = batch(0, 0, rng.randrange(1, generation + 1), logged(at, count, rng))
                store.write(late)
            at += count
            if rng.random() < 0.2:  # the job goes back
                at, generation = max(0, at - rng.randrange(40)), generation + 1
        assert store.figure_names() == ["accuracy", "held out", "odd"]
        for name in store.figure_names():
            for points, width in ((2000, 1), (300, 8), (40, 64), (8, 512), (2, 8**4)):
                found = store.figure_series(name, 0, at - 1, points)
                same(found, expected(values(store, name), 0, at - 1, width))
                assert len(found["step"]) <= points
        same(
            store.figure_series("held out", at // 3, at // 2, 2000),
            expected(values(store, "held out"), at // 3, at // 2, 1),
        )


def test_a_curve_outlives_the_rows_of_its_steps(tmp_path: Path) -> None:
    """Of a ledger that lets go it is what it is of one that does not, with the rewinds that happened in between."""
    rng = random.Random(5)
    with closing(Store(tmp_path / "whole.sqlite")) as whole:
        little = Store(tmp_path / "little.sqlite")
        at, generation = 0, 1
        for turn in range(160):
            count = rng.randrange(1, 60)
            figures = logged(at, count, rng) + ([("early", at, 1.0 * at)] if at < 100 else [])
            what = batch(at, count, generation, figures)
            whole.write(what)
            with small():
                little.write(what)
                if turn % 40 == 17:  # another coordinator takes over
                    little.close()
                    little = Store(tmp_path / "little.sqlite")
            at += count
            if rng.random() < 0.1:
                at, generation = max(0, at - rng.randrange(80)), generation + 1
        floors = little.dropped().floors
        assert 0 < floors[1] < floors[0]
        assert min(values(little, "accuracy")) >= floors[0]
        assert values(little, "early") == {}
        # Also of a name that is in no row any more.
        assert little.figure_names() == whole.figure_names() == ["accuracy", "early", "held out", "odd"]
        for name in whole.figure_names():
            for points in (20, 100):
                found = little.figure_series(name, 0, None, points)
                same(found, whole.figure_series(name, 0, None, points))
            # Of what is kept each value; of what went the finest that there is, and all of it.
            same(little.figure_series(name, floors[0]), whole.figure_series(name, floors[0]))
            early = little.figure_series(name, floors[1], floors[0] - 1)
            same(early, expected(values(whole, name), floors[1], floors[0] - 1, 8))
            # As long as that of the loss: both are at the same steps.
            assert set(early["step"]) <= set(little.series(floors[1], floors[0] - 1)["step"])
        assert rows(little, "level = 1 and name = 'accuracy'") <= BUCKETS + 3 * PIECE
        little.close()


def rows(store: Store, where: str) -> int:
    return int(store._db.execute(f"select count(*) from figure_rollups where {where}").fetchone()[0])


def test_a_step_far_below_is_logged_again(tmp_path: Path) -> None:
    rng = random.Random(1)
    with small(), closing(Store(tmp_path / "job.sqlite")) as store:
        for at in range(0, 2000, 50):
            store.write(batch(at, 50, 1, logged(at, 50, rng)))
        curve = store.figure_series("accuracy", 0, None, 20)
        store.write(batch(10, 5, 2, [("accuracy", 10 + n, 99.0) for n in range(5)]))
        # Its summary is all that is left of its neighbours, and stays: as that of the loss does.
        assert store.figure_series("accuracy", 0, None, 20) == curve


def test_a_read_touches_as_many_rows_however_long_the_job_is(tmp_path: Path) -> None:
    took = []
    for steps in (10_000, 100_000):
        path = tmp_path / f"{steps}.sqlite"
        Store(path).close()
        with closing(sqlite3.connect(path)) as db:
            db.executemany(
                "insert into steps (step, t_s, place) values (?, 1.0, 1)", [(n,) for n in range(steps)]
            )
            db.executemany("insert into figures values ('a', ?, 1.0, 1)", [(n,) for n in range(steps)])
            db.commit()
        with closing(Store(path)) as store:
            rollups.roll_up_figures(store._db, [("a", n) for n in range(steps)], store.dropped().floors)
            found, ticks = counted(store, lambda: store.figure_series("a"))
            assert 250 <= len(found["step"]) <= rollups.POINTS
            names, more = counted(store, store.figure_names)
            assert names == ["a"]
            took.append(ticks + more)
    assert took[1] <= 2 * took[0] + 100


def test_the_page_has_one_of_them_beside_its_curves(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "job.sqlite")) as store:
        store.write(batch(0, 20, 1, [("accuracy", n, 0.5 * n) for n in range(20)]))
        found = _series(store, {"from": "8", "to": "15", "points": "4", "figure": "accuracy"})
        assert found["figures"] == ["accuracy"]
        assert found["figure"] == {
            "name": "accuracy",
            "columns": {"step": [8], "value": [5.75], "value_min": [4.0], "value_max": [7.5]},
        }
        # By itself: a page that shows sixty of them asks sixty times, and not for the steps each time.
        assert "columns" not in found
        steps = _series(store, {"from": "8", "to": "15", "points": "4"})
        assert (steps["columns"]["step"], steps["figures"]) == ([8], ["accuracy"])
        assert "figure" not in steps
        with pytest.raises(
            PageRefused, match="this job has not logged a value named 'loss'; logged names: accuracy"
        ):
            _series(store, {"figure": "loss"})


def test_the_picture_of_the_loss_begins_at_the_first_step(tmp_path: Path) -> None:
    """`holdfast report --curve`, after rows of old steps have gone."""
    with small(), closing(Store(tmp_path / "job.sqlite")) as store:
        for at in range(0, 2000, 50):
            store.write(batch(at, 50, 1, []))
        store.write(batch(10, 5, 2, []))  # of which there is a row again
        floor = store.dropped().floors[0]
    found = _points(tmp_path)
    steps = [step for step, _, _ in found]
    assert (steps[0], steps[-1]) == (0, 1999)
    assert steps == sorted(set(steps))
    assert [loss for step, _, loss in found if step >= floor] == [1.0 + n for n in range(floor, 2000)]
    # Where a step was let go, the mean of its neighbours is within half a bucket of what it was.
    width = steps[1]
    assert all(loss == pytest.approx(1.0 + step + (width - 1) / 2) for step, _, loss in found if step < floor)
