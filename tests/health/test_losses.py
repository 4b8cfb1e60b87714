"""Jumps of a loss, and whose part of it stands out."""

import math
import random

import pytest

from holdfast.health.losses import TIMES, Losses, WorkerLosses


def falling(steps, seed=1, noise=0.1):
    rng = random.Random(seed)
    return [2.0 + 3.0 * math.exp(-step / 50) + rng.gauss(0, noise) for step in range(steps)]


def jumps(losses):
    watch = Losses()
    return [jump.step for step, loss in enumerate(losses) if (jump := watch.take(step, loss)) is not None]


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_that_falls_with_noise_does_not_jump(seed):
    assert jumps(falling(2000, seed)) == []


@pytest.mark.parametrize("loss", [12.0, math.nan, math.inf])
def test_a_jump_is_told_once(loss):
    curve = falling(300)
    curve[200:205] = [loss] * 5
    assert jumps(curve) == [200]


def test_a_loss_that_stays_high_is_the_new_one_and_may_jump_again():
    curve = falling(200) + [x + 8.0 for x in falling(200)] + [60.0]
    assert jumps(curve) == [200, 400]


@pytest.mark.parametrize("scale", [1e-12, 1e-4])
def test_the_noise_of_a_converged_net_is_no_jump(scale):
    """Of losses that fell from one to next to nothing, each may be many times the one before."""
    rng = random.Random(2)
    curve = [math.exp(-step / 8) for step in range(80)]
    curve += [scale * (100.0 if rng.random() < 0.1 else rng.random()) for _ in range(2000)]
    assert jumps([x if step < 80 else min(x, 3e-4) for step, x in enumerate(curve)]) == []


def test_a_loss_that_jumps_again_and_again_is_told_ever_more_seldom():
    curve = falling(20_000)
    for step in range(100, 20_000, 70):
        curve[step] = 12.0
    assert jumps(curve) == [100, 170]  # it has had no rest of 128 steps since
    assert jumps([*curve[:300], math.nan, *falling(100)]) == [100, 170, 300]
    rare = falling(40_000)
    for step in range(1_000, 40_000, 1_000):
        rare[step] = 12.0
    assert jumps(rare) == [1_000, 2_000, 3_000, 4_000, 5_000]


def test_a_loss_around_zero_has_a_scatter_too():
    rng = random.Random(3)
    curve = [rng.gauss(0, 1) for _ in range(3000)]
    assert jumps(curve) == []
    assert jumps([*curve[:100], 30.0]) == [100]


def test_steps_that_come_again_after_a_rewind_are_not_taken_twice():
    watch = Losses()
    for step, loss in enumerate(falling(100)):
        watch.take(step, loss)
    assert watch.take(50, 1000.0) is None


def parts(blocks, apart=()):
    """`apart`: block number to (worker, loss). Returns what was said."""
    rng = random.Random(5)
    watch, found = WorkerLosses(), []
    for number in range(blocks):
        own = {f"w{n}": 2.0 + rng.gauss(0, 0.1) for n in range(6)}
        own |= {worker: loss for at, worker, loss in apart if at == number}
        if (said := watch.look(own)) is not None:
            found.append((number, said.worker, said.times))
    return found


def test_a_worker_whose_part_is_off_again_and_again_is_named():
    assert parts(500) == []
    apart = [(30, "w3", 40.0), (60, "w3", math.nan), (90, "w3", 9.0)]
    assert parts(200, apart[:2]) == []
    assert parts(200, apart) == [(90, "w3", TIMES)]


def test_several_workers_in_turn_are_the_data():
    apart = [(20 + 10 * n, f"w{n % 3}", 40.0) for n in range(12)]
    assert parts(200, apart) == []


def test_most_workers_off_is_the_scripts():
    watch = WorkerLosses()
    for _ in range(40):
        assert watch.look({f"w{n}": math.nan if n else 2.0 for n in range(4)}) is None
    assert watch.look({"a": 1.0, "b": 100.0}) is None


def test_a_hard_sample_in_a_converged_net_is_nobodys_fault():
    """As the random faults found it: a median of 1e-5, and thrice a part of 1.5e-3 in the same worker."""
    watch, found = WorkerLosses(), []
    for number in range(300):
        usual = max(1e-5, 2.0 * math.exp(-number / 10))
        own = {f"w{n}": usual * (1 + 0.1 * n) for n in range(4)}
        if number in (200, 230, 260):
            own["w3"] = 1.5e-3
        found.append(watch.look(own))
    assert set(found) == {None}
