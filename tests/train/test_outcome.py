"""What a step gives to its replica when it is committed, and when a fault struck it."""

import time
from types import SimpleNamespace

import pytest
import torch

from holdfast.errors import CollectiveFailed
from holdfast.train.data_cursor import DataCursor
from holdfast.train.place import Seat
from holdfast.train.progress_report import Stage
from holdfast.train.step import Step


def nothing(*_):
    pass


class Replica:
    """Takes what a step gives. vote: what becomes of the vote."""

    device = torch.device("cpu")
    checks_local = False
    sharding = None
    place = SimpleNamespace(
        generation=1,
        weighs=True,
        seat=lambda: Seat(micro_batches=range(1), rank=0, world=1, idle=0, leaves=1),
    )

    def __init__(self, vote=nothing):
        self.vote = vote
        self.gradients = SimpleNamespace(
            exact=False,
            layout=0,
            fresh=True,
            expect=nothing,
            admit=nothing,
            before_backward=nothing,
            last=nothing,
            after_backward=nothing,
            seal=nothing,
            check_sealed=nothing,
            flush=nothing,
            finish=lambda scale: 1.0,
        )
        self.group = SimpleNamespace(
            channel=SimpleNamespace(send=nothing, receive=lambda step, own, counts: list(own))
        )
        self.state = SimpleNamespace(
            used=SimpleNamespace(check=lambda **_: None, before=nothing, after=nothing),
            guard=SimpleNamespace(before_update=nothing),
            buffer_rules=SimpleNamespace(after_micro=nothing, reduce=nothing, commit=nothing),
        )
        self.done = self.left = self.error = None

    begin_step = check = nothing
    phases = SimpleNamespace(enter=nothing, take=nothing, leave=nothing)

    def over_shards(self, step, squares):
        return squares

    def commit(self, prepared):
        self.done = prepared.finish(time.perf_counter())

    def half_made(self, error):
        return False

    def recover(self, outcome, error):
        self.left, self.error = outcome, error
        return True


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
    raise CollectiveFailed("struck")


def run(replica, batches=None, also=()):
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    step = Step(replica, batches or Batches(), 7, 0, DataCursor(3, 0, None, None, "refuse"))
    with step:
        for x in step:
            step.backward((weight * x).sum() + 6.0, weight=3)
        step.apply(optimizer, also=also)
    return step, weight


def test_a_step_that_counts_says_what_it_came_to():
    replica = Replica()
    step, weight = run(replica)
    assert step.committed
    assert replica.left is None
    assert (replica.done.index, replica.done.own_loss, replica.done.micro_batches) == (7, 2.0, 1)
    assert torch.equal(weight.detach(), -torch.ones(4))


def test_a_fault_after_the_gradient_is_there_leaves_a_step_that_can_still_be_committed_once():
    replica = Replica(vote=fail)
    step, weight = run(replica)
    assert (replica.left.stage, step.committed) == (Stage.PREPARED, False)
    assert torch.equal(weight.detach(), torch.zeros(4))
    done = replica.left.finish(time.perf_counter() + 1000.0)
    assert step.committed
    assert done.took_s < 0  # the wait for the decision is no part of it
    assert torch.equal(weight.detach(), -torch.ones(4))
    with pytest.raises(AssertionError):
        replica.left.finish(time.perf_counter())
    assert torch.equal(weight.detach(), -torch.ones(4))


def test_a_fault_before_leaves_an_open_step():
    replica = Replica()
    replica.check = fail
    step, _ = run(replica)
    assert (replica.left.stage, step.committed) == (Stage.OPEN, False)


@pytest.mark.parametrize(
    "how",
    [{"also": fail}, {"batches": Batches(ledger=fail)}],
    ids=["the update", "the record of its samples"],
)
def test_what_breaks_within_the_commit_leaves_a_torn_step(how):
    """The state may be that of neither step, so it must not be updated again."""
    replica = Replica()
    step, _ = run(replica, **how)
    assert (replica.left.stage, step.committed) == (Stage.TORN, False)
