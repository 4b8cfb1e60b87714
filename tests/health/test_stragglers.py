"""The test for stragglers on made-up step times."""

import pytest
from bench.stragglers.noises import NOISES
from bench.stragglers.simulate import quiet, slowed

from holdfast.health.stragglers import Stragglers

EVEN = NOISES[0]
BY_NAME = {noise.name.split(",")[0]: noise for noise in NOISES}
QUICK = ("even", "heavy tails (Student", "garbage collections", "one machine")


@pytest.mark.parametrize("noise", NOISES, ids=lambda n: n.name)
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_noise_alone_raises_no_alarm(noise, workers):
    assert quiet(noise, workers, windows=300, seed=workers).false == 0


@pytest.mark.parametrize("name", ["even", "garbage collections", "one machine"])
@pytest.mark.parametrize("workers", [3, 8])
def test_ten_percent_are_found_within_50_steps(name, workers):
    noise = BY_NAME[name]
    found = slowed(noise, workers, runs=50, seed=7)
    assert found.in_time >= 0.98
    assert found.wrong == 0


def test_of_two_the_slower_one_is_named_later():
    assert slowed(EVEN, 2, runs=30, seed=1).median >= slowed(EVEN, 3, runs=30, seed=1).median
    assert slowed(EVEN, 2, runs=30, seed=1).wrong == 0


def look(test, *blocks, first=0):
    """Blocks of times in milliseconds for workers a, b, ...; returns what changed, in short."""
    changes = []
    for number, block in enumerate(blocks):
        own = {name: ms / 1e3 for name, ms in zip("abcdefgh", block, strict=False)}
        for change in test.look(first + 5 * number, own):
            changes.append((change.worker, change.slow, change.since))
    return changes


def test_a_slow_worker_is_named_once_and_its_recovery_too():
    test = Stragglers()
    quick, slow = (100, 101, 99), (100, 101, 150)
    assert look(test, *[quick] * 6, *[slow] * 10) == [("c", True, 30)]
    assert test.ratio("c") == pytest.approx(1.5, rel=0.02)
    ((worker, slow, step),) = look(test, *[quick] * 10, first=100)
    assert (worker, slow) == ("c", False)
    assert step <= 140
    assert look(test, *[quick] * 10, first=200) == []


@pytest.mark.parametrize("noisy", [(100, 101, 106), (100, 101, 112)])
def test_a_little_noise_just_before_a_large_slowdown_is_no_part_of_it(noisy):
    """Of a worker that is half as slow again, a block that is a tenth slower than its peers is nearer to them."""
    quick, slow = (100, 101, 99), (100, 101, 150)
    assert look(Stragglers(), *[quick] * 5, noisy, *[slow] * 10) == [("c", True, 30)]
    assert look(Stragglers(), *[quick] * 4, noisy, noisy, *[slow] * 10) == [("c", True, 30)]
    # A small slowdown that is of the size looked for begins where it rises.
    assert look(Stragglers(), *[quick] * 6, *[(100, 101, 112)] * 12)[0][2] == 30


def test_a_worker_that_is_slow_from_the_first_step_is_named_within_50():
    (found,) = look(Stragglers(), *[(100, 101, 99, 112)] * 10)
    assert found == ("d", True, 0)


def test_the_slower_half_is_named_when_half_are_slow_and_nobody_when_most_are():
    half = look(Stragglers(), *[(100, 100, 100, 130, 130)] * 12)
    assert {worker for worker, _, _ in half} == {"d", "e"}
    assert look(Stragglers(), *[(100, 130, 130, 130, 130)] * 12) == []


def test_five_percent_are_let_be():
    assert look(Stragglers(), *[(100, 100, 105)] * 40) == []


def test_one_alone_has_no_peers():
    assert look(Stragglers(), *[(100,)] * 20) == []
