"""A durable tier to which nothing comes: training goes on, people are told, and what is due meanwhile is skipped."""

from desk import TIER, Desk, running

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase
from holdfast.coordinator.service.job_view import build_status
from holdfast.observe.dashboard import saved_line
from holdfast.observe.event_text import event_line
from holdfast.protocol import messages as m
from holdfast.protocol.job_view import TierView
from holdfast.protocol.snapshots import DurableTier, Saving

EVERY_2 = Saving(tiers=(DurableTier(TIER.url, "2"),))


def stuck(step: int = 6) -> Desk:
    """The checkpoint of a step is on its way, and nothing is heard of it."""
    desk = running(2, saving=EVERY_2)
    desk.snapshot(step, "n0", "n1")
    assert [x.step for x in desk.state.storage.storing] == [step]
    return desk


def tier(desk: Desk) -> TierView:
    return build_status(desk.state, desk.now).saving.tiers[0]


def lines(desk: Desk, kind: str) -> list[str]:
    return [event_line({"kind": kind, "fields": f}) for f in desk.records(kind)]


def moves(desk: Desk, nbytes: int) -> None:
    node, order = desk.sent(m.StoreShard)[-1]
    desk.do(e.NodeSays(node, m.StoreProgress(TIER.url, order.key, nbytes, 4000)))


def test_it_is_said_once_after_a_while_and_training_goes_on():
    desk = stuck()
    desk.wait(desk.core.timing.tier_s - 1)
    assert not desk.records("tier-slow")
    assert tier(desk).slow is False
    desk.wait(2)
    desk.wait(3 * desk.core.timing.tier_s)
    assert [r["step"] for r in desk.records("tier-slow")] == [6]
    assert tier(desk).slow is True
    assert "checkpoint MAKES NO PROGRESS" in saved_line(build_status(desk.state, desk.now)).plain
    assert lines(desk, "tier-slow") == ["no data of step 6 has reached checkpoint for 30.0 s"]
    assert desk.state.membership.phase is JobPhase.RUNNING


def test_one_that_is_slow_but_moves_is_not_said_to_stand_still():
    desk = stuck()
    for nbytes in range(1000, 4000, 1000):
        desk.wait(desk.core.timing.tier_s - 1)
        moves(desk, nbytes)
    assert not desk.records("tier-slow")
    desk.wait(desk.core.timing.tier_s + 1)
    assert lines(desk, "tier-slow") == [
        "no data of step 6 has reached checkpoint for 30.0 s (3.00 kB of 4.00 kB)"
    ]
    moves(desk, 3500)
    assert tier(desk).slow is False


def test_what_is_due_meanwhile_is_skipped_with_a_word():
    desk = stuck()
    for step in (7, 8, 9, 10):
        desk.snapshot(step, "n0", "n1")
    assert [x.step for x in desk.state.storage.storing] == [6]
    assert desk.complete_snapshots()[-1] == 10
    assert lines(desk, "checkpoint-skipped") == [
        "step 8 is not saved: step 6 is still being written to checkpoint"
    ]
    desk.stores()
    assert lines(desk, "saved") == ["step 6 is saved in checkpoint (2 checkpoints skipped meanwhile)"]
    assert desk.state.storage.totals.tiers[TIER.url].skipped == 2
    desk.snapshot(11, "n0", "n1")
    assert [x.step for x in desk.state.storage.storing] == [11], (
        "the next one, and those of steps 8 and 10 are passed by"
    )


def test_one_that_nobody_wants_any_more_is_still_in_the_way():
    desk = stuck()
    desk.core.state.storage.storing[0].void = True
    desk.wait(desk.core.timing.tier_s + 1)
    assert tier(desk).slow is True


def test_a_coordinator_that_is_lost_meanwhile_says_it_too():
    desk = stuck()
    desk.crash()
    desk.back()
    desk.wait(desk.core.timing.tier_s + 1)
    assert [r["step"] for r in desk.records("tier-slow")] == [6]


def test_at_the_end_it_is_given_up_after_the_time_of_a_start():
    desk = stuck()
    desk.commit(9)
    for worker in desk.members():
        desk.says(worker, m.Done(committed=9, params_xxh3="bits", loss=0.5, held=True))
    desk.snapshot(9, "n0", "n1")
    for worker in desk.members():
        desk.exits(worker, 0)
    desk.wait(desk.core.timing.start_s - 5)
    assert desk.state.membership.phase is not JobPhase.ENDED
    desk.wait(6)
    assert (desk.state.membership.phase, desk.state.membership.outcome) == (JobPhase.ENDED, "finished")
    assert desk.records("tier-failed")[0]["reason"] == "no data of it has reached checkpoint for 300 s"
