"""Summaries of steps equal what a look at every step gives, after anything that may be written."""

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from ledgers import counted

from holdfast.coordinator.service import rollups
from holdfast.coordinator.service.store import LedgerBatch, ReportedSteps, Store
from holdfast.protocol.messages import ReportedStep


def told(step: int, loss: float, made_in: int, **more: float) -> ReportedStep:
    return ReportedStep(step, loss, 0.1, made_in=made_in, **more)


def write(store: Store, steps: list[ReportedStep], generation: int = 1) -> None:
    said = ReportedSteps(t_s=1.0 + steps[-1].step, losses=tuple(steps), generation=generation, world=2)
    store.write(LedgerBatch(steps=[said]))


def expected(store: Store, first: int, last: int, width: int) -> list[tuple[int, float, float, float]]:
    rows = [s for s in store.steps() if first // width <= s.step // width <= last // width]
    found = []
    for bucket in sorted({r.step // width for r in rows}):
        losses = [r.loss for r in rows if r.step // width == bucket and r.loss is not None]
        found.append((bucket * width, sum(losses) / len(losses), min(losses), max(losses)))
    return found


def shown(series: dict[str, list]) -> list[tuple[int, float, float, float]]:
    return list(zip(series["step"], series["loss"], series["loss_min"], series["loss_max"], strict=True))


def same(store: Store, first: int, last: int, points: int, width: int) -> None:
    found, wanted = shown(store.series(first, last, points)), expected(store, first, last, width)
    assert [f[0] for f in found] == [w[0] for w in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one[1:] == pytest.approx(other[1:])
    assert len(found) <= points


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_written_in_whatever_order(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with closing(Store(tmp_path / "job.sqlite")) as store:
        at, generation = 0, 1
        for _ in range(120):
            count = rng.randrange(1, 20)
            batch = [told(at + n, rng.random(), generation) for n in range(count)]
            write(store, batch, generation)
            if rng.random() < 0.3:
                write(store, batch, generation)  # told twice
            at += count
            if rng.random() < 0.2:  # the job goes back
                at, generation = max(0, at - rng.randrange(40)), generation + 1
        for points, width in ((2000, 1), (300, 8), (40, 64), (8, 512)):
            same(store, 0, at - 1, points, width)
        same(store, at // 3, at // 2, 20, 64 if (at // 2 - at // 3) // 8 + 2 > 20 else 8)


def test_a_read_touches_as_many_rows_however_long_the_job_is(tmp_path: Path) -> None:
    """Of ten thousand steps and of a hundred thousand: no more than the points and the look at the newest step."""
    took = []
    for steps in (10_000, 100_000):
        path = tmp_path / f"{steps}.sqlite"
        Store(path).close()
        with closing(sqlite3.connect(path)) as db:
            db.executemany(
                "insert into steps (step, t_s, loss, world, place) values (?, ?, 1.0, 2, ?)",
                [(n, n, n + 1) for n in range(steps)],
            )
            db.commit()
        with closing(Store(path)) as store:
            store._roll_up(range(steps))
            found, ticks = counted(store, store.series)
            assert 250 <= len(found["step"]) <= rollups.POINTS
            took.append(ticks)
    assert took[1] <= 2 * took[0] + 100


def test_a_point_of_more_steps_than_the_highest_level_has(tmp_path: Path) -> None:
    """Of steps of which most have gone: the newest million have rows."""
    with closing(Store(tmp_path / "job.sqlite")) as store:
        for at, loss in ((0, 2.0), (5_000_000, 4.0), (20_000_000, 9.0)):
            write(store, [told(at, loss, 1)])
        assert [row.step for row in store.steps()] == [20_000_000]
        assert shown(store.series(points=2)) == [(0, 5.0, 2.0, 9.0)]
        assert shown(store.series(points=3)) == [(0, 3.0, 2.0, 4.0), (8**8, 9.0, 9.0, 9.0)]


def test_what_is_not_known_is_null(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "job.sqlite")) as store:
        assert store.series()["step"] == []
        write(store, [ReportedStep(n, 2.0, None, made_in=1) for n in range(64)])
        found = store.series(0, 63, 10)
        assert found["step_s"] == found["weight_per_s"] == found["grad_norm"] == [None] * 8
        assert found["world"] == [2] * 8
