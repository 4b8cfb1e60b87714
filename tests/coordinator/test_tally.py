"""A tally that read a ledger in pieces has counted what one has that read it at once."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from holdfast.coordinator.service.store import LedgerBatch, LedgerEntry, ReportedSteps, Store
from holdfast.coordinator.service.tally import Tally
from holdfast.protocol.messages import ReportedStep

BEGAN = "2026-01-02T03:04:05.000+00:00"


def commits(store: Store, t_s: float, steps: range, made_in: int) -> None:
    told = tuple(ReportedStep(n, t_s + n, 0.1, weight=4.0, made_in=made_in) for n in steps)
    store.write(LedgerBatch(steps=[ReportedSteps(t_s=t_s, losses=told, generation=made_in, world=2)]))


def happens(store: Store, kind: str, fields: dict[str, object]) -> None:
    seq = store.last_seq() + 1
    store.write(
        LedgerBatch(entries=[LedgerEntry(seq=seq, t_s=float(seq), utc=BEGAN, kind=kind, fields=fields)])
    )


def closed(number: int, took_s: float) -> dict[str, object]:
    return {"id": number, "cause_kind": "process", "full_strength_s": took_s, "replace_s": took_s / 2}


@pytest.mark.parametrize("seed", range(3))
def test_in_pieces_or_at_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with closing(Store(tmp_path / "job.sqlite")) as store:
        tally, step, made_in, told = Tally(), 0, 1, 0
        for i in range(60):
            new = rng.randint(1, 5)
            commits(store, float(i), range(step, step + new), made_in)
            step, told = step + new, told + new
            if rng.random() < 0.3:
                happens(store, "incident-closed", closed(i, rng.random() * 100))
            if rng.random() < 0.3:  # the job goes back, also beyond what was read last
                step, made_in = rng.randint(0, step), made_in + 1
            if rng.random() < 0.5:
                tally = store.tally(tally)
        tally = store.tally(tally)
        at_once = store.tally(Tally())
        assert msgspec.to_builtins(tally) == msgspec.to_builtins(at_once)
        assert (tally.steps, tally.commits, tally.weight) == (len(store.steps()), told, 4.0 * told)
        assert tally.newest is not None
        assert tally.newest.t_s == max(row.t_s for row in store.steps())
        assert sum(tally.full_strength["process"].counts) == tally.kinds["incident-closed"]


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "job.sqlite")) as store:
        commits(store, 1.0, range(20_000), 1)
        tally = store.tally(Tally())
        commits(store, 2.0, range(20_000, 20_001), 1)
        looked: list[int] = []
        # Called after every 100 instructions of SQLite's machine: a scan of all steps takes thousands of calls.
        store._db.set_progress_handler(lambda: looked.append(1), 100)
        assert store.tally(tally).steps == 20_001
        assert len(looked) < 20
