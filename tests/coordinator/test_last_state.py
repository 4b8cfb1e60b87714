"""All steps are done: the last state becomes a checkpoint before the job ends."""

from desk import TIER, Desk, copy_of, running

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase
from holdfast.protocol import messages as m
from holdfast.protocol.job import Durable
from holdfast.protocol.snapshots import DurableTier, Saving

FAR = "s3://bucket/run"
LAST = 9


def done(nodes: int = 2, **spec: object) -> Desk:
    """Every member has all steps, and gave its last state to its agent; then its process ended."""
    desk = running(nodes, **spec)
    desk.commit(LAST)
    for worker in desk.members():
        desk.says(worker, m.Done(committed=LAST, params_xxh3="bits", loss=0.5, held=True))
    for worker in desk.members():
        desk.exits(worker, 0)
    return desk


def outcome(desk: Desk) -> str | None:
    return desk.state.membership.outcome if desk.state.membership.phase is JobPhase.ENDED else None


def test_the_job_ends_when_the_last_state_is_in_its_tier():
    desk = done()
    assert outcome(desk) is None, "the agents sum it up"
    desk.snapshot(LAST, "n0", "n1")
    assert outcome(desk) is None, "it is written"
    desk.stores()
    assert (outcome(desk), desk.state.storage.durable) == ("finished", Durable(LAST, TIER.url))
    assert [r["step"] for r in desk.records("saved")] == [LAST]


def test_every_tier_gets_it():
    desk = done(saving=Saving(tiers=(TIER, DurableTier(FAR))))
    desk.snapshot(LAST, "n0", "n1")
    desk.stores(tier=FAR)
    assert outcome(desk) is None
    desk.stores()
    assert outcome(desk) == "finished"
    assert {(r["url"], r["step"]) for r in desk.records("saved")} == {(TIER.url, LAST), (FAR, LAST)}


def test_it_waits_for_an_older_one_that_is_being_written():
    desk = running(2, saving=Saving(tiers=(DurableTier(TIER.url, "1"),)))
    desk.snapshot(7, "n0", "n1")
    desk.commit(LAST)
    for worker in desk.members():
        desk.says(worker, m.Done(committed=LAST, params_xxh3="bits", loss=0.5, held=True))
    desk.snapshot(LAST, "n0", "n1")
    assert [x.step for x in desk.state.storage.storing] == [7]
    desk.stores()
    assert [x.step for x in desk.state.storage.storing] == [LAST]
    desk.stores()
    for worker in desk.members():
        desk.exits(worker, 0)
    assert (outcome(desk), desk.state.storage.durable) == ("finished", Durable(LAST, TIER.url))


def test_a_tier_that_does_not_take_it_is_said_and_the_job_ends():
    desk = done()
    desk.snapshot(LAST, "n0", "n1")
    desk.stores(reason="the disk is full")
    assert outcome(desk) == "finished"
    assert desk.records("tier-failed")[0]["step"] == LAST
    assert desk.state.storage.durable is None


def test_the_other_holder_writes_it_when_a_node_is_lost():
    desk = done()
    desk.snapshot(LAST, "n0", "n1")
    writer = desk.sent(m.StoreShard)[-1][0]
    desk.lose(writer)
    assert outcome(desk) is None
    assert desk.sent(m.StoreShard)[-1][0] != writer
    desk.stores()
    assert (outcome(desk), desk.state.storage.durable) == ("finished", Durable(LAST, TIER.url))


def test_a_node_that_is_to_leave_soon_has_all_of_its_time_for_it():
    """Less than it would need to end a step."""
    desk = done(1)
    desk.do(e.NodeSays("n0", m.Leaving("SIGTERM", 1.0)))
    assert outcome(desk) is None, "it is summed up"
    desk.snapshot(LAST, "n0")
    assert outcome(desk) is None, "it is written"
    assert not desk.did(e.ReleaseNode)
    desk.stores()
    assert (outcome(desk), desk.state.storage.durable) == ("finished", Durable(LAST, TIER.url))


def test_nobody_is_waited_for_who_is_lost_or_has_no_room():
    desk = done()
    desk.lose("n0")
    assert outcome(desk) is None
    desk.refuses("n1", copy_of(LAST))
    assert outcome(desk) == "finished"


def test_a_coordinator_that_is_lost_meanwhile_goes_on_with_it():
    desk = done()
    copy = copy_of(LAST)
    desk.crash()
    desk.back(held={"n0": (copy,), "n1": (copy,)})
    assert outcome(desk) is None
    desk.crash()
    desk.back()
    desk.stores()
    assert (outcome(desk), desk.state.storage.durable) == ("finished", Durable(LAST, TIER.url))


def test_asked_to_stop_it_has_the_usual_time_for_it():
    desk = done()
    desk.snapshot(LAST, "n0", "n1")
    desk.do(e.StopRequested("interrupted"))
    assert outcome(desk) is None
    desk.wait(desk.core.timing.stop_s + 1)
    assert outcome(desk) == "finished"
    assert desk.state.storage.durable is None


def test_without_a_durable_tier_nothing_is_waited_for():
    desk = running(2, saving=Saving(tiers=()))
    desk.commit(LAST)
    for worker in desk.members():
        desk.says(worker, m.Done(committed=LAST, params_xxh3="bits", loss=0.5))
        desk.exits(worker, 0)
    assert outcome(desk) == "finished"


def test_how_far_it_is_is_known():
    desk = done()
    copy = desk.snapshot(LAST, "n0", "n1")
    node, order = desk.sent(m.StoreShard)[-1]
    desk.do(e.NodeSays(node, m.StoreProgress(TIER.url, copy.key, 300, 1000)))
    assert desk.state.storage.storing[0].written == {0: (300, 1000)}
    other = next(n for n in ("n0", "n1") if n != node)
    desk.do(e.NodeSays(other, m.StoreProgress(TIER.url, order.key, 900, 1000)))
    assert desk.state.storage.storing[0].written == {0: (300, 1000)}
