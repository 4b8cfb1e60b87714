"""Rules for buffers, as a user of an adapter gives them."""

import pytest
import torch

from holdfast.adapters.advice import TrainersAdvice
from holdfast.adapters.buffers import Buffers
from holdfast.errors import UsageError


class Declared:
    """What a run is told."""

    def __init__(self):
        self.calls = []

    def buffers(self, rule, *names):
        self.calls.append((rule, names))


def test_the_users_rules_come_after_that_of_batch_norms():
    run = Declared()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    Buffers({"model.*": "restore", "model.1.running_mean": "own"}, TrainersAdvice("wrap(Trainer, ")).declare(
        run, model=model
    )
    norms = ("model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked")
    assert run.calls == [("mean", norms), ("restore", ("model.*",)), ("own", ("model.1.running_mean",))]
    assert run.advice.buffer("sum", "model.x") == 'wrap(Trainer, buffers={"model.x": "sum"})'


def test_a_model_without_batch_norms_has_the_users_rules_alone():
    run = Declared()
    Buffers(None, TrainersAdvice("wrap(Trainer, ")).declare(run, model=torch.nn.Linear(2, 2))
    assert run.calls == []


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        ({"sum": "model.x"}, r'HoldfastStrategy\(buffers=\{"sum": "model\.x"\}\): choose one of'),
        (["model.x"], r"a list has no rule for each name; write HoldfastStrategy\(buffers=\{"),
        ("sum", "a str has no rule for each name"),
    ],
)
def test_what_is_no_rule_is_refused(rules, what):
    with pytest.raises(UsageError, match=what):
        Buffers(rules, TrainersAdvice("HoldfastStrategy("))
