"""Random schedules of one job's life: everything that an API server, machines and people do to it."""

from collections import Counter

import pytest
from simkube.schedule import Schedule

SEEDS = 150
QUEUED_SEEDS = 60
GANG_SEEDS = 60
AGAIN_SEEDS = 300
NIGHTLY_BLOCKS, NIGHTLY_SEEDS = 10, 2000


def judge(
    seeds: range, queued: bool = False, gang: bool = False, again: bool = False, chosen: bool = False
) -> Counter[str]:
    happened: Counter[str] = Counter()
    for seed in seeds:
        schedule = Schedule(seed, queued=queued, gang=gang, again=again, chosen=chosen)
        problems = schedule.run()
        assert not problems, f"seed {seed}: {problems}"
        happened += schedule.happened
        happened[f"made {len(schedule.server.made) > 0}"] += 1
        happened["over"] += schedule.over
        happened["returned in its pod"] += schedule.cluster.returned
        happened["taken back"] += bool(schedule.taken_back)
        if (choices := schedule.cluster.choices) is not None:
            happened["another machine chosen"] += choices.replaced > 0
    return happened


def test_what_must_hold_holds() -> None:
    happened = judge(range(SEEDS))
    assert len(happened) > 20
    assert happened["over"] > SEEDS / 10
    assert happened["made True"] > SEEDS * 0.9
    assert happened["elsewhere"] > SEEDS / 50
    assert happened["returned in its pod"] > SEEDS / 10


def test_what_must_hold_holds_in_a_queue() -> None:
    happened = judge(range(QUEUED_SEEDS), queued=True)
    assert happened["taken back"] > QUEUED_SEEDS / 2


def test_what_must_hold_holds_where_kueue_chooses_the_machines() -> None:
    happened = judge(range(QUEUED_SEEDS), queued=True, chosen=True)
    assert happened["another machine chosen"] > QUEUED_SEEDS / 10


def test_what_must_hold_holds_in_a_gang() -> None:
    happened = judge(range(GANG_SEEDS), gang=True)
    assert happened["over"] > GANG_SEEDS / 10


def test_what_must_hold_holds_of_a_job_that_is_deleted_in_every_phase_and_made_again() -> None:
    happened = judge(range(AGAIN_SEEDS), again=True)
    phases = {what.removeprefix("deleted: ") for what in happened if what.startswith("deleted: ")}
    assert phases >= {
        *("None", "Starting", "Recovering", "Running", "Degraded", "Unknown"),
        *("Stopping", "Suspended", "Succeeded", "Failed"),
    }
    assert happened["met pods of the one before"] > AGAIN_SEEDS / 10
    assert happened["met objects of the one before"] > AGAIN_SEEDS / 10


def test_what_must_hold_holds_of_a_job_that_is_deleted_while_it_waits_and_made_again() -> None:
    assert judge(range(AGAIN_SEEDS // 2), again=True, queued=True)["deleted: Queued"]
    assert judge(range(AGAIN_SEEDS // 2), again=True, gang=True)["met pods of the one before"]


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(NIGHTLY_BLOCKS))
def test_what_must_hold_holds_for_many(block: int) -> None:
    start = SEEDS + block * NIGHTLY_SEEDS
    judge(range(start, start + NIGHTLY_SEEDS))
    judge(range(start, start + NIGHTLY_SEEDS), queued=True)
    judge(range(start, start + NIGHTLY_SEEDS), queued=True, chosen=True)
    judge(range(start, start + NIGHTLY_SEEDS), gang=True)
    judge(range(start, start + NIGHTLY_SEEDS), again=True)
    judge(range(start, start + NIGHTLY_SEEDS), again=True, queued=True)
    judge(range(start, start + NIGHTLY_SEEDS), again=True, gang=True)
