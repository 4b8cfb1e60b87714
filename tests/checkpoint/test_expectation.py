"""The size of a state that is to be saved for the first time."""

import gc
import weakref

import pytest
import torch

from holdfast.checkpoint.api import Expectation
from holdfast.checkpoint.loading import flatten


def trained(model, optimizer, steps=1):
    for _ in range(steps):
        model(torch.ones(2, model.in_features)).sum().backward()
        optimizer.step()


@pytest.fixture
def model():
    return torch.nn.Linear(300, 200)


def test_optimizers_are_measured_when_each_has_made_a_step(model):
    other = torch.nn.Linear(64, 64)
    adam, momentum = (
        torch.optim.Adam(model.parameters()),
        torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9),
    )
    state = {"net": {"a": model, "b": [other]}, "adam": adam, "momentum": momentum, "epoch": 3}
    told = []
    Expectation().begin(state, told.append)
    trained(model, adam)
    trained(other, momentum)
    assert told == []
    trained(model, adam)
    exact = flatten({"a": model, "b": other, "adam": adam, "momentum": momentum}, 0).index.nbytes
    assert told == [exact]
    trained(model, adam, 3)
    assert told == [exact]


def test_a_state_without_optimizers_is_measured_at_once(model):
    tied = torch.nn.Sequential(model, torch.nn.Linear(300, 200))
    tied[1].weight = model.weight
    state = {"model": tied, "extra": torch.zeros(10_000), "generator": torch.get_rng_state()[:100]}
    told = []
    Expectation().begin(state, told.append)
    assert told == [flatten(state, 0).index.nbytes]


def test_nothing_is_told_of_a_state_whose_size_cannot_be_seen(model):
    class Own:
        def state_dict(self):
            raise AssertionError("the script's own code is not called")

        def load_state_dict(self, state):
            raise AssertionError

    told = []
    expectation = Expectation()
    expectation.begin({"own": Own(), "step": 5}, told.append)
    expectation.begin({"model": model, "own": Own()}, told.append)
    trained(model, torch.optim.Adam(model.parameters()), 3)
    assert told == []


def test_only_the_newest_state_counts(model):
    adam = torch.optim.Adam(model.parameters())
    told, newer = [], []
    expectation = Expectation()
    expectation.begin({"model": model, "optimizer": adam}, told.append)
    trained(model, adam)
    expectation.begin({"model": model}, newer.append)
    trained(model, adam, 3)
    assert [told, newer] == [[], [(300 * 200) * 4]]


def test_a_state_that_was_dropped_is_not_kept_alive(model):
    adam = torch.optim.Adam(model.parameters())
    dropped = torch.nn.Linear(300, 200)
    told = []
    Expectation().begin({"model": dropped, "optimizer": adam}, told.append)
    alive = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert alive() is None
    trained(model, adam, 2)
    assert told == [flatten({"optimizer": adam}, 0).index.nbytes]
