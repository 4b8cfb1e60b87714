"""Mixtures: shares at every point of the stream, each source in its own order, everything a function of the position."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data import Mixture, TokenDataset
from holdfast.data.order import SampleOrder


class Numbers:
    """A data set of numbers, as small as one can be."""

    def __init__(self, count, first=0):
        self.count, self.first = count, first
        self.fingerprint = f"{count:08x}{first:08x}"

    def __len__(self):
        return self.count

    def batch(self, ids):
        return (torch.as_tensor(np.asarray(ids) + self.first),)

    def __repr__(self):
        return f"Numbers({self.count})"


@pytest.fixture
def files(tmp_path):
    """Three token files; the tokens of a file are a hundred times its number."""
    for number, length in enumerate((81, 41, 201)):
        np.save(tmp_path / f"{number}.npy", np.full(length, 100 * number, np.uint16))
    return [TokenDataset(tmp_path / f"{number}.npy", 4) for number in range(3)]


def sources_of(mixture, positions):
    of = np.full(len(positions), -1)
    for source, rows, _ in mixture.order(0).draws(np.asarray(positions)):
        of[rows] = source
    return of


weights = st.lists(st.integers(1, 10**6), min_size=1, max_size=40).map(lambda w: [x / sum(w) for x in w])


@settings(deadline=None, max_examples=60)
@given(weights=weights, data=st.data())
def test_every_prefix_has_every_share(weights, data):
    mixture = Mixture([(Numbers(10), w) for w in weights])
    of = sources_of(mixture, np.arange(3000))
    counts = np.cumsum(of[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, 3001)[:, None] * np.array(mixture.weights)
    most = 0.5 if len(weights) <= 2 else 2.0
    assert np.abs(counts - shares).max() <= most + 1e-6
    point = data.draw(st.integers(0, 3000))
    assert mixture.drawn(point) == (counts[point - 1].tolist() if point else [0] * len(weights))


@settings(deadline=None, max_examples=30)
@given(weights=weights, start=st.integers(0, 2**61))
def test_far_out_it_is_as_exact(weights, start):
    mixture = Mixture([(Numbers(10), w) for w in weights])
    positions = np.arange(start, start + 500)
    seen = [0] * len(weights)
    for source, rows, draws in mixture.order(0).draws(positions):
        assert np.array_equal(np.sort(draws), np.arange(draws.min(), draws.min() + len(rows)))
        assert draws.min() == mixture.drawn(start)[source]
        seen[source] = len(rows)
    assert [a + b for a, b in zip(mixture.drawn(start), seen, strict=True)] == mixture.drawn(start + 500)
    assert sum(mixture.drawn(start)) == start


def test_usual_weights_come_in_usual_patterns():
    mixture = Mixture([(Numbers(10), 0.5), (Numbers(10), 0.25), (Numbers(10), 0.25)])
    of = sources_of(mixture, np.arange(400))
    assert all(sorted(of[low : low + 4]) == [0, 0, 1, 2] for low in range(0, 400, 4))


def test_every_source_comes_whole_before_it_repeats():
    mixture = Mixture([(Numbers(70), 0.6), (Numbers(11), 0.3), (Numbers(5), 0.1)])
    ids = mixture.order(seed=3).at_many(np.arange(1000))
    for source, (low, high) in enumerate([(0, 70), (70, 81), (81, 86)]):
        own = ids[(ids >= low) & (ids < high)] - low
        assert len(own) == mixture.drawn(1000)[source]
        epochs = [own[at : at + high - low] for at in range(0, len(own), high - low)]
        assert all(len(set(epoch.tolist())) == len(epoch) for epoch in epochs)
        assert not np.array_equal(epochs[0], epochs[1])


@settings(deadline=None, max_examples=30)
@given(positions=st.lists(st.integers(0, 2**62 - 1), max_size=50), seed=st.integers(0, 2**64 - 1))
def test_a_position_is_the_same_alone_and_in_company(positions, seed):
    order = Mixture([(Numbers(70), 0.6), (Numbers(11), 0.4)]).order(seed)
    assert order.at_many(positions).tolist() == [order.at(position) for position in positions]


def test_the_seed_changes_samples_not_shares():
    mixture = Mixture([(Numbers(70), 0.6), (Numbers(11), 0.4)])
    one, two = (mixture.order(seed).at_many(np.arange(200)) for seed in (1, 2))
    assert not np.array_equal(one, two)
    assert np.array_equal(one < 70, two < 70)
    assert np.array_equal(one, mixture.order(1).at_many(np.arange(200)))


def test_one_source_of_all_the_weight_is_that_source():
    order = Mixture([(Numbers(9), 1.0)]).order(4)
    ids = order.at_many(np.arange(18))
    assert sorted(ids[:9]) == sorted(ids[9:]) == list(range(9))


def test_batches_come_from_the_right_files(files):
    mixture = Mixture(zip(files, (0.5, 0.2, 0.3), strict=True))
    ids = mixture.order(0).at_many(np.arange(64))
    tokens, labels = mixture.batch(ids)
    assert tokens.shape == labels.shape == (64, 4)
    assert Counter(tokens[:, 0].tolist()) == {0: 32, 100: 13, 200: 19}
    of = np.searchsorted([20, 30, 80], ids, side="right")
    assert (tokens[:, 0] == torch.as_tensor(100 * of)).all()
    assert len(mixture) == 80
    assert mixture.seq_len == 4
    assert mixture[25][0].tolist() == [100] * 4
    assert mixture.batch([])[0].shape == (0, 4)
    assert mixture.batch([2, 1])[0].tolist() == [[0] * 4] * 2


def test_a_mixture_of_mixtures(files):
    inner = Mixture([(files[0], 0.5), (files[1], 0.5)])
    outer = Mixture([(inner, 0.5), (files[2], 0.5)])
    ids = outer.order(0).at_many(np.arange(400))
    tokens, _ = outer.batch(ids)
    assert Counter(tokens[:, 0].tolist()) == {0: 100, 100: 100, 200: 200}


def test_a_pickled_mixture_is_its_paths(files):
    mixture = Mixture([(files[0], 0.5), (files[1], 0.5)])
    again = pickle.loads(pickle.dumps(mixture))
    assert again.fingerprint == mixture.fingerprint
    assert again.order(5).at_many(np.arange(99)).tolist() == mixture.order(5).at_many(np.arange(99)).tolist()
    assert len(pickle.dumps(mixture)) < 2000


def test_repeats_are_counted_and_told():
    mixture = Mixture([(Numbers(70), 0.6), (Numbers(10), 0.4)])
    assert mixture.drawn(100) == [60, 40]
    assert mixture.epochs(100) == [60 / 70, 4.0]
    first, second = mixture.summary(100).splitlines()
    assert first == "60.0000%: 60 samples, 0.86 epochs of 70: Numbers(70)"
    assert second == "40.0000%: 40 samples, 4.00 epochs of 10, repeats 3 times: Numbers(10)"


def test_the_fingerprint_sees_sources_their_order_and_weights():
    a, b = Numbers(5), Numbers(6)
    variants = [
        Mixture([(a, 0.5), (b, 0.5)]),
        Mixture([(b, 0.5), (a, 0.5)]),
        Mixture([(a, 0.6), (b, 0.4)]),
        Mixture([(a, 0.5), (Numbers(7), 0.5)]),
        Mixture([(a, 1.0)]),
    ]
    assert len({m.fingerprint for m in variants}) == len(variants)
    assert all(len(m.fingerprint) == 16 for m in variants)


def test_thirds_are_thirds():
    assert Mixture([(Numbers(1), 1 / 3)] * 3).weights == [1 / 3] * 3
    assert Mixture([(Numbers(1), 0.333333)] * 3).weights == [1 / 3] * 3


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([], "at least one"),
        ([0.5, 0.6], r"sum to 1.1, not to 1; in these proportions they are 0.454545, 0.545455"),
        ([3, 1], "they are 0.75, 0.25"),
        ([1, 1, 1], "they are 0.333334, 0.333333, 0.333333"),
        ([1.5, -0.5], "weight 1 of the mixture is -0.5"),
        ([1.0, 0.0], "weight 1 of the mixture is 0.0; remove the source"),
        ([1.0, float("nan")], "is nan"),
        ([float("inf")], "is inf"),
        ([1 - 1e-10, 1e-10], "weight 1 of the mixture, 1e-10, is less than a billionth"),
    ],
)
def test_weights_that_do_not_work(weights, says):
    with pytest.raises(ValueError, match=says):
        Mixture([(Numbers(10), w) for w in weights])


def test_sources_that_do_not_work(files, tmp_path):
    with pytest.raises(ValueError, match=r"source 1 of the mixture, Numbers\(0\), is empty"):
        Mixture([(Numbers(1), 0.5), (Numbers(0), 0.5)])
    with pytest.raises(ValueError, match=r"source 0 .* does not have batch"):
        Mixture([([1, 2], 1.0)])
    longer = TokenDataset(tmp_path / "0.npy", 5)
    with pytest.raises(
        ValueError,
        match=r"samples of different lengths \(4, 5 tokens\); open all of them with the same seq_len",
    ):
        Mixture([(files[0], 0.5), (longer, 0.5)])


def test_positions_and_numbers_that_are_not_there():
    mixture = Mixture([(Numbers(10), 1.0)])
    with pytest.raises(ValueError, match="positions of a mixture run from 0"):
        mixture.order(0).at_many([-1])
    with pytest.raises(ValueError, match="positions of a mixture run from 0"):
        mixture.order(0).at_many([2**62])
    with pytest.raises(TypeError, match="must be integers"):
        mixture.order(0).at_many([0.5])
    for ids in ([10], [-1]):
        with pytest.raises(IndexError, match="has 10 samples"):
            mixture.batch(ids)


def test_orders_of_sources_differ():
    same = Mixture([(Numbers(50), 0.5), (Numbers(50), 0.5)])
    ids = same.order(0).at_many(np.arange(100))
    assert not np.array_equal(ids[ids < 50], ids[ids >= 50] - 50)
    assert not np.array_equal(ids[ids < 50], SampleOrder(50, 0).at_many(np.arange(50)))
