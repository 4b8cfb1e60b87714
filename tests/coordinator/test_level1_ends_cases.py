"""The end of a job whose script saves (levels 0 and 1): its newest complete state goes into every tier before the agents."""

import pytest
from desk import TIER, Desk, copy_of
from test_memory_snapshot_cases import at_level_0

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase
from holdfast.coordinator.service.job_view import build_report
from holdfast.coordinator.service.tally import StepSummary
from holdfast.protocol import messages as m
from holdfast.protocol.engine_orders import Capacity, EngineTraits
from holdfast.protocol.job import Durable
from holdfast.protocol.job_options import SnapshotOptions
from holdfast.protocol.job_report import InMemory, SnapshotCounts
from holdfast.protocol.snapshots import DurableTier, Lack, Saving

FAR = "s3://bucket/run"
BOTH = Saving(tiers=(DurableTier(TIER.url, "0"), DurableTier(FAR, "0")))


def gave(desk: Desk, step: int, *ranks: int) -> None:
    """The ranks' states of a step are in their nodes' memory."""
    for rank in ranks:
        desk.holds(f"n{rank}", copy_of(step, desk.state.membership.number, rank, 2, "a"))


def saved_twice(**spec: object) -> Desk:
    """Both ranks gave step 5, rank 0 step 9 as well."""
    desk = at_level_0(2, saving=BOTH, **spec)
    gave(desk, 5, 0, 1)
    gave(desk, 9, 0)
    return desk


def end_workers(desk: Desk, code: int = -15) -> None:
    for worker in desk.workers():
        desk.exits(worker, code)


def ended(desk: Desk) -> str | None:
    return desk.state.membership.outcome if desk.state.membership.phase is JobPhase.ENDED else None


STOPS = {
    "Ctrl-C, SIGTERM, holdfast stop, the time limit": e.StopRequested("interrupted"),
    "the engine takes all nodes": Capacity(0, "Slurm ends the whole allocation", 30.0),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_stopped_the_newest_whole_state_goes_into_every_tier(stop):
    desk = saved_twice()
    desk.do(stop)
    assert not desk.sent(m.StoreShard)
    end_workers(desk)
    assert ended(desk) is None
    assert [(r["step"], r["url"]) for r in desk.records("saving-last")] == [(5, TIER.url), (5, FAR)]
    desk.stores()
    assert ended(desk) is None
    desk.stores(tier=FAR)
    assert (ended(desk), desk.state.storage.durable) == ("stopped", Durable(5, FAR))
    assert {s.keeps for _, s in desk.sent(m.Shutdown)} == {False}


def test_ended_by_itself_too():
    desk = saved_twice()
    end_workers(desk, 0)
    desk.stores()
    desk.stores(tier=FAR)
    assert ended(desk) == "finished"


def test_without_restarts_a_failure_too():
    desk = saved_twice(max_restarts=0)
    desk.exits("n0.0#1", 1)
    desk.exits("n1.0#2", -15)
    desk.stores()
    desk.stores(tier=FAR)
    assert (ended(desk), desk.state.storage.durable.step) == ("failed", 5)


def test_a_shard_that_is_being_summed_up_is_waited_for():
    """The worker's end is heard before its agent can say that it holds the copy."""
    desk = at_level_0(2, saving=BOTH)
    gave(desk, 5, 0, 1)
    gave(desk, 9, 0)
    late = copy_of(9, 1, 1, 2, "a")
    desk.do(e.StopRequested("interrupted"))
    desk.exits("n0.0#1", -15)
    desk.do(e.NodeSays("n1", m.Exited(worker="n1.0#2", code=-15, summing=(late.key,))))
    assert not desk.records("saving-last")
    desk.holds("n1", late)
    assert [r["step"] for r in desk.records("saving-last")] == [9, 9]


@pytest.mark.parametrize("how", ["lost", "not held", "reconnects without"])
def test_one_that_never_comes_is_not_waited_for(how):
    desk = saved_twice()
    late = copy_of(9, 1, 1, 2, "a")
    desk.do(e.StopRequested("interrupted"))
    desk.exits("n0.0#1", -15)
    desk.do(e.NodeSays("n1", m.Exited(worker="n1.0#2", code=-15, summing=(late.key,))))
    if how == "lost":
        desk.holds("n0", copy_of(5, 1, 1, 2, "a"))
        desk.lose("n1")
    elif how == "not held":
        desk.refuses("n1", late)
    else:
        desk.crash()
        desk.back()
    assert {r["step"] for r in desk.records("saving-last")} == {5}


def test_a_stop_waits_for_as_long_as_something_comes_to_a_tier():
    desk = saved_twice()
    desk.do(e.StopRequested("interrupted"))
    end_workers(desk)
    desk.stores()
    node, order = next((n, o) for n, o in desk.sent(m.StoreShard) if o.tier == FAR)
    timing = desk.core.timing
    for nbytes in (100, 200):
        desk.wait(0.9 * timing.start_s)
        assert ended(desk) is None
        desk.do(e.NodeSays(node, m.StoreProgress(FAR, order.key, nbytes, 1000)))
    desk.wait(timing.start_s + 1)
    assert (ended(desk), desk.state.storage.durable.step) == ("stopped", 5)


def test_workers_that_do_not_end_are_killed_and_what_they_gave_is_saved():
    desk = saved_twice()
    desk.do(e.StopRequested("interrupted"))
    desk.wait(desk.core.timing.stop_s + 1)
    assert ended(desk) is None
    assert {k.worker for _, k in desk.sent(m.KillWorker) if not k.grace_s} == {"n0.0#1", "n1.0#2"}
    desk.stores()
    desk.stores(tier=FAR)
    assert ended(desk) == "stopped"


def test_a_node_that_is_to_leave_stays_until_its_part_is_saved():
    desk = saved_twice()
    desk.do(e.StopRequested("Slurm ends the job"))
    desk.do(e.NodeSays("n1", m.Leaving("SIGTERM", 5.0)))
    desk.exits("n1.0#2", -15)
    assert not desk.records("node-left")
    desk.exits("n0.0#1", -15)
    desk.stores()
    desk.stores(tier=FAR)
    assert (ended(desk), desk.state.storage.durable.step) == ("stopped", 5)


def refused(engine: EngineTraits | None = None) -> Desk:
    """No tier takes the last state."""
    desk = saved_twice()
    desk.do(engine or EngineTraits())
    desk.do(e.StopRequested("interrupted"))
    end_workers(desk)
    desk.stores("the disk is full")
    desk.stores("no answer", tier=FAR)
    assert ended(desk) == "stopped"
    return desk


def test_what_no_tier_takes_stays_in_memory_and_it_is_said():
    desk = refused()
    assert {s.keeps for _, s in desk.sent(m.Shutdown)} == {True}
    assert {r["url"] for r in desk.records("tier-failed")} == {TIER.url, FAR}
    assert desk.records("only-in-memory") == [{"step": 5, "kept": True, "saved": None}]
    report = build_report(desk.state, StepSummary(), desk.now)
    assert [report.in_memory, report.unsaved] == [InMemory(step=5), 5]


def test_where_nodes_are_others_after_the_job_it_is_said_that_it_is_lost():
    desk = refused(EngineTraits(keeps_nodes=False))
    assert {s.keeps for _, s in desk.sent(m.Shutdown)} == {False}
    assert desk.records("only-in-memory") == [{"step": 5, "kept": False, "saved": None}]
    assert build_report(desk.state, StepSummary(), desk.now).in_memory is None


def test_stopped_before_all_nodes_have_said_what_they_hold_the_memory_stays():
    """A run before was killed: what only the missing node has may be the newest state."""
    desk = Desk(2)
    desk.node("n0", copies=(copy_of(9, -3, 0, 2, "a"),))
    desk.do(e.StopRequested("interrupted"))
    assert {s.keeps for _, s in desk.sent(m.Shutdown)} == {True}


def test_a_whole_state_of_a_run_that_was_killed_is_saved_too():
    desk = Desk(2)
    for rank in (0, 1):
        desk.node(f"n{rank}", copies=(copy_of(9, -3, rank, 2, "a"),))
    desk.do(e.StopRequested("interrupted"))
    end_workers(desk)
    desk.stores()
    assert (ended(desk), desk.state.storage.durable) == ("stopped", Durable(9, TIER.url))


def test_a_last_state_that_no_rank_could_keep_is_said():
    desk = saved_twice()
    for rank in (0, 1):
        desk.refuses(f"n{rank}", copy_of(12, 1, rank, 2, "a"))
    end_workers(desk, 0)
    desk.stores()
    desk.stores(tier=FAR)
    assert ended(desk) == "finished"
    assert desk.records("last-not-saved") == [{"step": 12, "saved": 5}]
    assert build_report(desk.state, StepSummary(), desk.now).unsaved == 12


def test_a_last_state_that_is_in_a_tier_is_saved():
    desk = saved_twice()
    gave(desk, 9, 1)
    end_workers(desk, 0)
    desk.stores()
    desk.stores("no answer", tier=FAR)
    assert ended(desk) == "finished"
    assert build_report(desk.state, StepSummary(), desk.now).unsaved is None


def test_a_script_that_is_stopped_may_have_given_more_than_was_due():
    desk = saved_twice()
    desk.refuses("n0", copy_of(12, 1, 0, 2, "a"))
    desk.do(e.StopRequested("interrupted"))
    end_workers(desk)
    desk.stores()
    desk.stores(tier=FAR)
    assert ended(desk) == "stopped"
    assert build_report(desk.state, StepSummary(), desk.now).unsaved is None


def test_that_a_script_saves_faster_than_can_be_kept_is_said_once_and_counted():
    desk = at_level_0(2, saving=Saving(SnapshotOptions(copies=0)))
    for step in (3, 4, 5, 6):
        gave(desk, step, 0, 1)
        late = copy_of(step + 10, 1, 0, 2, "a").key
        desk.do(e.NodeSays("n0", m.SnapshotRejected(late, "still being copied", Lack.SLOT, paced=True)))
    assert [r["step"] for r in desk.records("snapshot-skipped")] == [13]
    assert build_report(desk.state, StepSummary(), desk.now).snapshots == SnapshotCounts(
        complete=4, skipped=4
    )


@pytest.mark.parametrize("quicker", [0, 1])
def test_a_last_state_that_was_skipped_at_first_is_complete_when_all_ranks_bring_it_after_all(quicker):
    desk = at_level_0(2, saving=Saving(SnapshotOptions(copies=0), tiers=BOTH.tiers))
    skips = m.SnapshotRejected(copy_of(9, 1, 0, 2, "a").key, "still being copied", Lack.SLOT, paced=True)
    if quicker:
        gave(desk, 9, 1)
    desk.do(e.NodeSays("n0", skips))
    gave(desk, 9, *({0, 1} - {quicker}), *({quicker} if not quicker else ()))
    end_workers(desk, 0)
    assert {r["step"] for r in desk.records("saving-last")} == {9}
