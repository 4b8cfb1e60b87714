"""Reductions that become slower."""

import random

from holdfast.health.reductions import LEARNED, LOOKED_AT, WARM_UP, Reductions
from holdfast.protocol.phases import BLOCK_STEPS, Spent


def run(
    blocks, slow=lambda number: 1.0, workers=4, own=lambda rank, number: 0.1, late=lambda rank: -1, seed=1
):
    rng = random.Random(seed)
    watch, found = Reductions(), []
    for number in range(blocks):
        took_s = 0.05 * slow(number) * rng.lognormvariate(0, 0.2)
        ends_s = max(own(r, number) for r in range(workers)) + took_s
        said = [
            Spent(
                first=number * BLOCK_STEPS,
                micros=4,
                data_s=0.0,
                forward_s=o,
                backward_s=0.0,
                wait_s=ends_s - o,
                update_s=0.0,
                aside_s=0.0,
                loss=None,
                late=late(r),
            )
            for r, o in ((r, own(r, number)) for r in range(workers))
        ]
        if (change := watch.look(said)) is not None:
            found.append(change)
    return found


def test_noise_is_no_slow_link():
    for seed in range(20):
        assert run(1000, seed=seed) == []


def test_a_slow_rank_is_no_slow_link():
    assert run(300, own=lambda rank, number: 0.2 if rank == 2 and number > 100 else 0.1) == []


def test_a_slow_link_is_told_with_the_one_that_all_wait_for():
    late = lambda rank: 3 if rank == 2 else 2  # noqa: E731
    (found,) = run(200, slow=lambda number: 2.0 if number >= 100 else 1.0, late=late)
    assert found.slow
    assert found.rank == 2
    assert 480 <= found.since <= 520
    assert 1.6 < found.now_s / found.usual_s < 2.4
    assert found.share > 0.2


def test_without_one_that_stands_out_nobody_is_named_and_its_end_is_told():
    slow = lambda number: 2.5 if 100 <= number < 200 else 1.0  # noqa: E731
    first, second = run(400, slow=slow, late=lambda rank: (rank + 1) % 4)
    assert (first.slow, first.rank, second.slow) == (True, None, False)
    assert second.since >= 1000 - LOOKED_AT * BLOCK_STEPS


def test_what_costs_next_to_nothing_is_let_be():
    assert run(300, slow=lambda n: 3.0 if n > 100 else 1.0, own=lambda rank, number: 5.0) == []


def test_it_learns_first():
    assert run(WARM_UP + LEARNED + LOOKED_AT - 1, slow=lambda n: 1.0 if n < WARM_UP + LEARNED else 9.0) == []
    assert run(WARM_UP + LEARNED + LOOKED_AT, slow=lambda n: 1.0 if n < WARM_UP + LEARNED else 9.0)
