"""How often a job is mended before it gives up: in a row without a new step, and nodes by the day."""

import pytest
from desk import Desk, running

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import DAY_S, TRAINED_S, Daily
from holdfast.protocol import messages as m

SPENT = "the restart budget is used up"


def lose(desk, worker, code=-9):
    """A member dies, the others park, and another is ready in its place."""
    at = desk.state.membership.committed
    desk.exits(worker, code)
    for name in desk.members():
        if not desk.state.membership.workers[name].exited:
            desk.parks(name, at)
    for name in desk.workers():
        if desk.state.membership.workers[name].phase == "starting":
            desk.ready(name)


def counted(desk):
    membership = desk.state.membership
    return membership.in_a_row.since(membership.committed)


def test_a_job_that_comes_further_is_mended_without_end():
    desk = running(2, min_nodes=2, max_restarts=1)
    for step in range(6, 30):
        lose(desk, desk.members()[0])
        desk.commit(step)
        assert desk.state.membership.outcome is None
    assert desk.state.membership.restarts_used == 24


def test_one_that_comes_no_further_ends():
    desk = running(2, min_nodes=2, max_restarts=3)
    for _ in range(4):
        assert desk.state.membership.outcome is None
        lose(desk, desk.members()[0], -11 if desk.state.membership.number % 2 else -9)
    assert (desk.state.membership.outcome, desk.state.membership.stop_reason) == ("failed", SPENT)


def test_a_step_that_was_committed_before_is_no_progress():
    desk = running(3, min_nodes=3, max_restarts=2)
    lose(desk, desk.members()[0])
    assert counted(desk) == 1
    desk.state.membership.committed -= 2  # it went back to a checkpoint
    for step in (4, 5):
        desk.commit(step)
        assert counted(desk) == 1
    desk.commit(6)
    assert counted(desk) == 0


def test_workers_that_are_lost_together_count_once():
    desk = running(8, min_nodes=1, max_restarts=2)
    for i, worker in enumerate(desk.members()[:6]):
        desk.exits(worker, -9)
        desk.wait(0.3 if i else 0.0)
    assert (desk.state.membership.restarts_used, counted(desk)) == (6, 1)
    assert desk.state.membership.stop_reason is None
    assert len(desk.sent(m.StartWorker)) == 8 + 6
    # Those in their place were started since, and are another loss.
    desk.exits(desk.sent(m.StartWorker)[-1][1].worker, 1)
    assert counted(desk) == 2


def test_none_is_none():
    desk = running(3, max_restarts=0)
    lose(desk, desk.members()[0])
    desk.commit(6)
    desk.lose("n1")
    assert len(desk.sent(m.StartWorker)) == 3
    assert not desk.did(e.ProvideNode)


def all_end(desk, code):
    first, *others = desk.members()
    desk.exits(first, code)
    for worker in others:
        desk.exits(worker, -15)


@pytest.mark.parametrize("trained_s", [TRAINED_S + 60.0, TRAINED_S / 2])
def test_a_script_that_numbers_its_own_steps_has_come_further_after_an_hour(trained_s):
    desk = Desk(1, max_restarts=2)
    desk.node("n0")
    for code in range(3, 9):
        all_end(desk, code)
        if desk.state.membership.stop_reason is None:
            desk.state.membership.in_a_row.at_s -= trained_s
    short = trained_s < TRAINED_S
    assert (desk.state.membership.stop_reason == SPENT) is short
    assert desk.state.membership.restarts_used == (3 if short else 6)


def test_one_that_always_begins_anew_comes_no_further():
    desk = Desk(1, max_restarts=2)
    desk.node("n0")
    desk.state.membership.counted.asked = True
    for code in range(3, 6):
        all_end(desk, code)
        if desk.state.membership.stop_reason is None:
            desk.state.membership.in_a_row.at_s -= 2 * TRAINED_S
    assert desk.state.membership.stop_reason == SPENT


def test_nodes_are_asked_for_by_the_day():
    desk = running(2, max_restarts=3)
    for i in range(1, 4):
        desk.lose(f"n{i}")
        desk.parks("n0.0#1", 5)
        assert len(desk.did(e.ProvideNode)) == i
        desk.node(f"n{i + 1}")
    desk.lose("n4")
    assert len(desk.did(e.ProvideNode)) == 3
    desk.state.membership.asked_daily.since_s -= DAY_S
    desk.wait(1.0)
    assert len(desk.did(e.ProvideNode)) == 4


def test_a_node_that_leaves_is_another_budget():
    daily = Daily()

    def used(count, now):
        return daily.used(count, over=now >= daily.until_s)

    assert used(-1, 10.0) == -1  # one was drained, and none asked for yet
    daily.roll(-1, 10.0)
    assert used(-1, 20.0) == -1
    assert used(2, 20.0) == 2
    assert used(7, 10.0 + DAY_S) == 0
    daily.roll(7, 10.0 + DAY_S)
    assert used(8, 11.0 + DAY_S) == 1


def test_as_many_nodes_as_the_job_has_may_be_lost_at_once():
    desk = running(6, max_restarts=2)
    for i in range(1, 6):
        desk.lose(f"n{i}")
    desk.parks("n0.0#1", 5)
    desk.wait(1.0)
    assert len(desk.did(e.ProvideNode)) == 5
