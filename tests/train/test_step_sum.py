"""Sums of plain numbers: the same bits on every worker, and whoever had which part of them."""

import math
import random

import pytest
import torch
from cluster import Cluster

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.train.control_channel import OF_A_SUM
from holdfast.train.step_sum import MOST_NUMBERS, addends


def summed(*values):
    """What each worker gives, in the order of the ranks."""
    given = [addends(v) for v in values]
    assert len({g.fingerprint for g in given}) == 1
    return given[0].total(given[0].columns_of(g.messages() for g in given))


@pytest.mark.parametrize("seed", range(20))
def test_a_sum_of_lists_is_rounded_once_however_they_are_split(seed):
    rng = random.Random(seed)
    numbers = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-20, 20) for _ in range(rng.randint(1, 300))]
    cuts = sorted(rng.randint(0, len(numbers)) for _ in range(5))
    parts = [numbers[a:b] for a, b in zip([0, *cuts], [*cuts, len(numbers)], strict=True)]
    assert summed(*({"x": part} for part in parts)) == {"x": math.fsum(numbers)}


def test_numbers_and_tensors_are_added():
    found = summed(
        {"n": 3, "row": torch.tensor([[1.0, 2.0]]), "flag": torch.tensor(True)},
        {"n": 2.5, "row": torch.tensor([[10.0, math.nan]]), "flag": torch.tensor(False)},
    )
    assert (found["n"], float(found["flag"])) == (5.5, 1.0)
    assert found["row"].shape == (1, 2)
    assert found["row"][0, 0] == 11.0
    assert found["row"][0, 1].isnan()


@pytest.mark.parametrize(
    ("numbers", "total"),
    [([], 0.0), ([math.inf, 1.0], math.inf), ([1e308, 1e308], math.inf), ([math.inf, -math.inf], math.nan)],
)
def test_what_has_no_exact_sum_is_no_error(numbers, total):
    for found in (summed({"x": numbers})["x"], summed(*({"x": [n]} for n in numbers or [0.0]))["x"]):
        assert found == total or (math.isnan(found) and math.isnan(total))


def test_what_cannot_be_summed_is_refused():
    with pytest.raises(UsageError, match=r"step\.sum\(name=\.\.\.\).*pass numbers"):
        addends({"name": "text"})
    with pytest.raises(UsageError, match="too many"):
        addends({"x": torch.zeros(MOST_NUMBERS)})


def test_other_names_and_a_worker_that_makes_no_sum_are_told_apart():
    assert addends({"a": 1, "b": 2}).fingerprint != addends({"b": 2, "a": 1}).fingerprint
    assert addends({"a": 1}).fingerprint != addends({"a": torch.ones(1)}).fingerprint
    cluster = Cluster(2)
    first, second = cluster.join(1)
    try:
        first.channel.send(3 | OF_A_SUM, (0.0, 0.0, 1.0))
        second.channel.send(3, (1.0, 0.0, 0.0))
        with pytest.raises(UsageError, match=r"rank 0 is in step\.sum\(\), and rank 1 is not"):
            first.channel.receive_heads(3 | OF_A_SUM, (0.0, 0.0, 1.0), [])
        with pytest.raises(UsageError, match=r"rank 0 is in step\.sum\(\), and rank 1 is not"):
            second.channel.receive(3, [(1.0, 0.0, 0.0)])
    finally:
        for group in (first, second):
            group.abort()
            group.close()
        cluster.close()


def test_a_sum_goes_before_the_first_backward():
    def main(run):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=optimizer)
        data = torch.utils.data.TensorDataset(torch.ones(8, 4))
        for step in run.steps(data, global_batch=4, micro_batch=2, until=1):
            for where in ("before", "inside", "after"):
                if where == "inside":
                    with step:
                        assert step.sum({"x": 2}) == {"x": 2.0}
                        for (x,) in step:
                            step.backward(model(x).sum())
                        with pytest.raises(UsageError, match=r"before the first step\.backward"):
                            step.sum({"x": 2})
                        step.apply(optimizer)
                else:
                    with pytest.raises(UsageError, match="inside `with step`"):
                        step.sum({"x": 2})

    hf.start(main)
