"""The core under random schedules of faults, delays, duplicates and coordinator crashes, on a virtual clock.

A schedule that breaks an invariant raises with its seed and its last events; `HOLDFAST_SEED=N` replays it.
"""

import os

import pytest
from simcluster import run_seed

BATCH = 25
BATCHES = 14


def seeds(first: int, count: int) -> range:
    """The seeds to run: one alone when `HOLDFAST_SEED` names it."""
    chosen = os.environ.get("HOLDFAST_SEED")
    return range(int(chosen), int(chosen) + 1) if chosen else range(first, first + count)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_schedule_breaks_an_invariant(batch):
    for seed in seeds(batch * BATCH, BATCH):
        run_seed(seed)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_tens_of_thousands_of_schedules():
    count = int(os.environ.get("HOLDFAST_SCHEDULES", "30000"))
    first = int(os.environ.get("HOLDFAST_FIRST", "100000"))
    print(f"schedules {first} to {first + count - 1}")
    for seed in seeds(first, count):
        run_seed(seed)
