"""How far a step got when it is committed, and when a fault struck it; what its replica can then do with it."""

import time
from types import SimpleNamespace

import pytest
import torch
from cluster import Worker, nothing

from holdfast.errors import CollectiveFault
from holdfast.train.data_cursor import DataCursor
from holdfast.train.reduction import GradientSum
from holdfast.train.replica import StepStage
from holdfast.train.step import Step


class Alone(Worker):
    """vote: what becomes of the vote."""

    def __init__(self, vote=nothing, check=nothing):
        self.model = torch.nn.ParameterList([torch.zeros(4)])
        super().__init__(self.model, torch.optim.SGD(self.model.parameters(), lr=1.0), GradientSum, 1)
        self.join(SimpleNamespace(rank=0, size=1, generation=1, intact=nothing, channel=Channel()))
        self.vote, self.check = vote, check
        self.done = self.left = self.error = None

    def end_update(self, step, resolved):
        self.done = step

    def half_made(self, error):
        return False

    def recover(self, step, error):
        self.left, self.error = step, error
        return True


class Channel:
    send_weights = staticmethod(nothing)

    def receive_weights(self, step, own, counts):
        return list(own)


class Batches:
    """One micro-batch. ledger: what becomes of the record of its samples."""

    aim = giving = nothing

    def __init__(self, ledger=nothing):
        self.committed = ledger

    def count(self):
        return 1

    def load(self, step, micro):
        return torch.ones(4)


def fail(*_):
    raise CollectiveFault("struck")


def run(replica, batches=None, also=()):
    weight = replica.model[0]
    step = Step(replica, batches or Batches(), 7, 0, DataCursor(3, 0, None, None, "refuse"))
    with step:
        for x in step:
            step.backward((weight * x).sum() + 6.0, weight=3)
        step.apply(replica.optimizer, also=also)
    return step, weight


def test_a_step_that_counts_says_what_it_came_to():
    replica = Alone()
    step, weight = run(replica)
    assert step.committed
    assert replica.left is None
    assert (replica.done.index, replica.done.own_loss, replica.done.micro_batches) == (7, 2.0, 1)
    assert torch.equal(weight.detach(), torch.full((4,), -1 / 3))


def test_a_fault_after_the_gradient_is_there_leaves_a_step_that_can_still_be_committed_once(monkeypatch):
    replica = Alone(vote=fail)
    step, weight = run(replica)
    assert (replica.left.stage, step.committed) == (StepStage.PREPARED, False)
    assert torch.equal(weight.detach(), torch.zeros(4))
    later = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 1000.0)
    monkeypatch.setattr("holdfast.train.replica.time", later)
    replica.left.commit(resolved=True)
    assert step.committed
    assert replica.done.took_s < 0  # the wait for the decision is no part of it
    assert torch.equal(weight.detach(), torch.full((4,), -1 / 3))
    with pytest.raises(AssertionError):
        replica.left.commit(resolved=True)
    assert torch.equal(weight.detach(), torch.full((4,), -1 / 3))


def test_a_fault_before_leaves_an_open_step():
    replica = Alone(check=fail)
    step, _ = run(replica)
    assert (replica.left.stage, step.committed) == (StepStage.OPEN, False)


@pytest.mark.parametrize(
    "how",
    [{"also": fail}, {"batches": Batches(ledger=fail)}],
    ids=["the update", "the record of its samples"],
)
def test_what_breaks_within_the_commit_leaves_a_partially_applied_step(how):
    """The state may be that of neither step, so it must not be updated again."""
    replica = Alone()
    step, _ = run(replica, **how)
    assert (replica.left.stage, step.committed) == (StepStage.PARTIALLY_APPLIED, False)
