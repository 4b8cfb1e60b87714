"""Rules for buffers, as a user of an adapter gives them."""

import pytest

from holdfast.adapters.buffers import Buffers, TrainersAdvice
from holdfast.errors import UsageError


class Declared:
    """What a run is told."""

    def __init__(self):
        self.calls = []

    def buffers(self, rule, *names):
        self.calls.append((rule, names))


def test_the_users_rules_are_declared_in_their_order():
    run = Declared()
    Buffers({"model.*": "restore", "model.1.running_mean": "own"}, TrainersAdvice("wrap(Trainer, ")).declare(
        run
    )
    assert run.calls == [("restore", ("model.*",)), ("own", ("model.1.running_mean",))]
    assert run.advice.buffer("sum", "model.x") == 'wrap(Trainer, buffers={"model.x": "sum"})'


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        ({"sum": "model.x"}, r'HoldfastStrategy\(buffers=\{"sum": "model\.x"\}\): choose one of'),
        (
            ["model.x"],
            r"must be a dict of names to rules, not a list; write for example HoldfastStrategy\(buffers=\{",
        ),
        ("sum", "must be a dict of names to rules, not a str"),
    ],
)
def test_what_is_no_rule_is_refused(rules, what):
    with pytest.raises(UsageError, match=what):
        Buffers(rules, TrainersAdvice("HoldfastStrategy("))
