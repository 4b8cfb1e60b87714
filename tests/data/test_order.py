"""The sample order: a permutation per epoch, the same from every side, at any distance."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data import SampleOrder
from holdfast.data.order import MAX_SAMPLES

SIZES = [
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    97,
    127,
    128,
    129,
    1009,
    1023,
    1024,
    1025,
    4095,
    4097,
    65537,
]
seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**63 - 1)

GOLDEN_10 = [0, 6, 9, 8, 5, 1, 2, 7, 3, 4, 4, 2, 5, 3, 8, 0, 9, 6, 1, 7]
GOLDEN_BILLION = [424127902, 7693557, 656792035, 647877373]


def epoch_of(order: SampleOrder, epoch: int) -> np.ndarray:
    return order.at_many(np.arange(order.samples) + epoch * order.samples)


@pytest.mark.parametrize("samples", SIZES)
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_sample_comes_once_per_epoch(samples, epoch):
    order = epoch_of(SampleOrder(samples, seed=3), epoch)
    assert np.array_equal(np.sort(order), np.arange(samples))


@settings(deadline=None, max_examples=40)
@given(samples=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 10**12))
def test_every_sample_comes_once_per_epoch_for_any_size_seed_and_epoch(samples, seed, epoch):
    order = epoch_of(SampleOrder(samples, seed), epoch)
    assert np.array_equal(np.sort(order), np.arange(samples))


@settings(deadline=None, max_examples=60)
@given(samples=st.integers(1, MAX_SAMPLES), seed=seeds, asked=st.lists(positions, max_size=80))
def test_one_by_one_and_many_at_once_agree_across_epochs(samples, seed, asked):
    order = SampleOrder(samples, seed)
    assert order.at_many(np.array(asked, dtype=np.int64)).tolist() == [
        order.at(position) for position in asked
    ]


@settings(deadline=None, max_examples=40)
@given(samples=st.integers(100, MAX_SAMPLES), seed=seeds, start=st.integers(0, 2**62), data=st.data())
def test_one_by_one_and_many_at_once_agree_on_runs(samples, seed, start, data):
    order = SampleOrder(samples, seed)
    run = np.arange(start, start + data.draw(st.integers(1, 100)))
    assert order.at_many(run).tolist() == [order.at(position) for position in run.tolist()]


def test_many_keeps_the_shape_and_gives_int64():
    order = SampleOrder(1000, seed=0)
    for shape in [(), (0,), (3, 4), (8, 2, 5)]:
        asked = np.arange(np.prod(shape, dtype=int), dtype=np.uint32).reshape(shape)
        got = order.at_many(asked)
        assert (got.shape, got.dtype) == (shape, np.int64)
    assert order.at_many(np.arange(40).reshape(5, 8))[2, 3] == order.at(19)


def test_the_order_never_changes_between_versions():
    """A resumed job would silently repeat and skip samples if this function changed."""
    assert [SampleOrder(10, seed=0).at(position) for position in range(20)] == GOLDEN_10
    assert SampleOrder(10**9, seed=2**64 - 1).at_many(10**15 + np.arange(4)).tolist() == GOLDEN_BILLION


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [epoch_of(SampleOrder(500, seed), epoch) for seed in range(6) for epoch in range(6)]
    orders.append(np.arange(500))
    for number, one in enumerate(orders):
        for other in orders[:number]:
            # Two independent permutations agree in one place on average, in 12 or more once in a billion.
            assert np.count_nonzero(one == other) < 12


@pytest.mark.parametrize("key", ["seed", "epoch"])
def test_all_permutations_of_a_small_set_are_equally_likely(key):
    trials = 4800
    if key == "epoch":
        drawn = SampleOrder(4, seed=1).at_many(np.arange(4 * trials)).reshape(trials, 4)
    else:
        drawn = np.array(
            [[SampleOrder(4, seed).at(position) for position in range(4)] for seed in range(trials)]
        )
    found = dict.fromkeys(permutations(range(4)), 0)
    for order in drawn.tolist():
        found[tuple(order)] += 1
    assert chi_square(found.values()) < 60  # 23 degrees of freedom: exceeded once in 30,000


@pytest.mark.parametrize("samples", [1000, 1024, 100_003])
def test_a_stretch_of_an_epoch_covers_the_samples_evenly(samples):
    stretch = SampleOrder(samples, seed=5).at_many(np.arange(samples // 2))
    counts, _ = np.histogram(stretch, bins=20, range=(0, samples))
    assert chi_square(counts) < 50  # 19 degrees of freedom: exceeded once in 10,000


def test_neighbours_in_the_order_are_no_neighbours_in_the_file():
    steps = np.diff(SampleOrder(10_000, seed=2).at_many(np.arange(10_000)))
    # The mean distance of two independent samples is a third of the range.
    assert abs(np.abs(steps).mean() / 10_000 - 1 / 3) < 0.02
    assert len(np.unique(steps)) > 5_000


def test_a_position_far_away_costs_no_more_than_the_first():
    order = SampleOrder(12_345_678_901, seed=9)
    far = 10**15 + np.arange(100)
    assert order.at_many(far).tolist() == [order.at(position) for position in far.tolist()]
    assert 0 <= order.at(2**63 - 1) < order.samples


@settings(deadline=None, max_examples=50)
@given(
    samples=st.integers(1, 10**6),
    step=st.integers(0, 10**9),
    micro_batch=st.integers(1, 6),
    micros=st.integers(1, 12),
    world=st.integers(1, 12),
)
def test_a_step_has_the_same_samples_however_it_is_shared_out(samples, step, micro_batch, micros, world):
    order = SampleOrder(samples, seed=4)
    global_batch = micro_batch * micros
    alone = order.at_many(step * global_batch + np.arange(global_batch))
    shares = {
        micro: order.micro_batch_samples(step, micro, micro_batch, global_batch)
        for rank in range(world)
        for micro in range(rank, micros, world)
    }
    assert np.concatenate([shares[micro] for micro in range(micros)]).tolist() == alone.tolist()
    # Nor does it matter how large the micro-batches are.
    assert order.micro_batch_samples(step, 0, global_batch, global_batch).tolist() == alone.tolist()


def test_steps_run_across_the_seam_of_two_epochs_without_loss():
    order = SampleOrder(10, seed=0)
    stream = np.concatenate([order.micro_batch_samples(step, 0, 4, 4) for step in range(5)])
    assert sorted(stream[:10].tolist()) == sorted(stream[10:].tolist()) == list(range(10))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda order: order.micro_batch_samples(0, 0, 3, 8), "not a multiple"),
        (lambda order: order.micro_batch_samples(0, 0, 0, 8), "at least 1"),
        (lambda order: order.micro_batch_samples(0, 2, 4, 8), "micro-batch 2 of step 0 does not exist"),
        (lambda order: order.micro_batch_samples(-1, 0, 4, 8), "step must be at least 0"),
        (lambda order: order.micro_batch_samples(2**62, 0, 4, 8), "past position"),
        (lambda order: order.at(-1), r"position must be between .* \(got -1\)"),
        (lambda order: order.at(2**63), "position must be between|positions run"),
        (lambda order: order.at_many([3, -1]), r"position must be between .* \(got -1\)"),
        (lambda order: order.at_many(np.arange(-1, 50)), "span -1 to 49"),
        (
            lambda order: order.at_many(np.arange(50, dtype=np.uint64) + np.uint64(2**63)),
            "position must be between|positions run",
        ),
        (lambda order: SampleOrder(0, seed=0), "between 1 and"),
        (lambda order: SampleOrder(MAX_SAMPLES + 1, seed=0), "between 1 and"),
        (lambda order: SampleOrder(1, seed=-1), r"seed must be between .* \(got -1\)"),
        (lambda order: SampleOrder(1, seed=2**64), "seed must be between"),
    ],
)
def test_what_has_no_order_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call(SampleOrder(10, seed=0))


def test_fractions_are_no_positions():
    with pytest.raises(TypeError, match="must be integers"):
        SampleOrder(10, seed=0).at_many(np.array([0.5]))
    with pytest.raises(TypeError):
        SampleOrder(10, seed=0).at(0.5)


def chi_square(counts) -> float:
    counts = np.array(list(counts))
    return float(((counts - counts.mean()) ** 2).sum() / counts.mean())
