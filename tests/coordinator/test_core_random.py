"""The core against random schedules of faults, delays and restarts. See `simcluster` for what is simulated.

pytest tests/coordinator/test_core_random.py                  some hundreds of schedules
pytest tests/coordinator/test_core_random.py -m nightly       HOLDFAST_SCHEDULES of them (30,000)
HOLDFAST_SEED=123 pytest tests/coordinator/test_core_random.py   that one again

From seed SHARDED on replicas are several workers.
"""

import os
from collections import Counter

import pytest
from simcluster import run_seed
from simcluster.plan import SHARDED

REPLAY = os.environ.get("HOLDFAST_SEED")
NIGHTLY = int(os.environ.get("HOLDFAST_SCHEDULES", "30000"))
BLOCK = 100
FIRST_NIGHTLY = 1_000
SEEDS = [int(REPLAY)] if REPLAY else [*range(320), *range(SHARDED, SHARDED + 40)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_schedule(seed):
    print(run_seed(seed))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", range(0 if REPLAY else -(-NIGHTLY // BLOCK)))
def test_many_random_schedules(block):
    for seed in range(FIRST_NIGHTLY + block * BLOCK, FIRST_NIGHTLY + min((block + 1) * BLOCK, NIGHTLY)):
        print(f"seed {seed}", flush=True)
        run_seed(seed)
        if seed % 3 == 0:
            run_seed(SHARDED + seed)


def test_a_seed_is_one_schedule():
    assert run_seed(7) == run_seed(7)


def test_the_schedules_are_eventful():
    ran = [run_seed(seed) for seed in range(1000, 1400)]
    outcomes = Counter((s.level, s.outcome) for s in ran)
    assert {(2, "finished"), (2, "stopped"), (2, "failed"), (0, "finished")} <= set(outcomes)
    assert sum(s.incidents for s in ran) > 200
    assert sum(s.generations for s in ran) > 250
    assert sum(s.crashes for s in ran) > 40
    assert sum(s.committed for s in ran) > 1000
    restored = Counter(source for s in ran for source, times in s.restored for _ in range(times))
    assert restored["memory"] > 20
    assert restored["disk"] > 20
    assert sum(s.snapshots for s in ran) > 1000
    assert sum(s.checkpoints for s in ran) > 300
    assert sum(s.acts for s in ran) > 150
    assert sum(s.withheld for s in ran) > 150
    assert sum(s.readmitted for s in ran) > 15
    assert sum(s.swaps for s in ran) > 5


def test_schedules_of_sharded_replicas_are_eventful():
    ran = [run_seed(seed) for seed in range(SHARDED + 100, SHARDED + 130)]
    assert {"finished", "stopped"} <= {s.outcome for s in ran}
    assert sum(s.generations for s in ran) > 60
    assert sum(s.rebuilt for s in ran) > 0
    assert sum(s.beside for s in ran) > 0
    assert sum(s.kept for s in ran) > 0
    restored = Counter(source for s in ran for source, times in s.restored for _ in range(times))
    assert restored["memory"] > 0
    assert restored["disk"] > 0
