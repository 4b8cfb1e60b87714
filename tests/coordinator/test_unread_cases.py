"""Checkpoints that prove to be damaged when they are loaded: which one is taken instead, and when there is none."""

from desk import TIER, Desk, running

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase, WorkerPhase
from holdfast.coordinator.membership.generations import MAX_ATTEMPTS
from holdfast.coordinator.service.job_view import build_report
from holdfast.coordinator.service.tally import StepSummary
from holdfast.coordinator.storage import durable_checkpoints
from holdfast.protocol import causes
from holdfast.protocol import messages as m
from holdfast.protocol.job import Durable

NEW, FAR, OLD = Durable(9, "near"), Durable(9, "far"), Durable(5, "near")


def started(*checkpoints: Durable, passed_over: tuple[str, ...] = (), nodes: int = 2) -> Desk:
    """A job that found checkpoints, its first generation formed."""
    desk = Desk(nodes, min_nodes=nodes)
    newest = checkpoints[0] if checkpoints else None
    desk.do(e.DurableFound(newest, checkpoints[1:], passed_over))
    for i in range(nodes):
        desk.node(f"n{i}")
    for worker in desk.workers():
        desk.ready(worker)
    return desk


def cannot_load(desk: Desk, lost: bool, detail: str = "bytes 0 to 9 do not match their checksums") -> None:
    """Every member says so; then all park without a state."""
    for worker in desk.members():
        desk.says(worker, m.CollectiveError(desk.state.membership.number, -1, detail, lost))
    for worker in desk.members():
        if desk.known(worker).phase is WorkerPhase.MEMBER:
            desk.parks(worker, None)


def newest_form(desk: Desk) -> m.JoinGeneration:
    return desk.told(desk.members()[0], m.JoinGeneration)[-1]


def test_a_damaged_one_is_not_tried_again():
    desk = started(NEW, FAR, OLD)
    assert newest_form(desk).durable == NEW
    cannot_load(desk, lost=True)
    assert newest_form(desk).durable == FAR, "of the same step, in another tier"
    cannot_load(desk, lost=True)
    assert (newest_form(desk).durable, newest_form(desk).generation.start) == (OLD, 5)
    said = desk.records("checkpoint-unread")
    assert [(r["url"], r["step"], r["instead"]) for r in said] == [
        ("near", 9, "far/step-9"),
        ("far", 9, "near/step-5"),
    ]


def test_as_many_damaged_ones_as_there_are_are_passed_over_and_the_incidents_name_them():
    """However many: each attempt gives one up, so it is none that leads nowhere."""
    many = [Durable(step, "near") for step in range(100, 100 - MAX_ATTEMPTS, -1)]
    desk = started(*many, OLD)
    for _ in many:
        cannot_load(desk, lost=True)
    assert desk.state.membership.phase is JobPhase.RUNNING
    assert newest_form(desk).durable == OLD
    assert [str(i.cause) for i in desk.state.incidents][:1] == [
        "near/step-100 could not be read: bytes 0 to 9 do not match their checksums"
    ]
    assert not [i for i in desk.state.incidents if i.cause == causes.CollectiveFailed()]


def test_one_in_a_tier_that_does_not_answer_is_tried_again():
    desk = started(NEW, OLD)
    for _ in range(durable_checkpoints.MAX_TRIES - 1):
        cannot_load(desk, lost=False)
        assert newest_form(desk).durable == NEW
    cannot_load(desk, lost=False)
    assert newest_form(desk).durable == OLD


def test_memory_is_taken_where_it_is_newer_than_the_next_one():
    desk = running(2, min_nodes=2)
    copy = desk.snapshot(6, "n0", "n1")
    desk.do(e.DurableFound(NEW, (OLD,)))
    for worker in desk.workers():
        desk.exits(worker, -9)
    for worker in desk.workers(WorkerPhase.STARTING):
        desk.ready(worker)
    assert newest_form(desk).durable == NEW
    cannot_load(desk, lost=True)
    assert (newest_form(desk).copy, newest_form(desk).durable) == (copy, None)
    assert desk.records("checkpoint-unread")[0]["instead"] == "step 6 in memory"


def test_without_another_one_the_job_stops_and_begins_nothing_anew():
    desk = started(NEW)
    cannot_load(desk, lost=True)
    for worker in desk.workers():
        desk.exits(worker, -9)
    assert (desk.state.membership.phase, desk.state.membership.outcome) == (JobPhase.ENDED, "failed")
    assert desk.state.membership.stop_reason is not None
    assert "near/step-9: bytes 0 to 9 do not match their checksums" in desk.state.membership.stop_reason
    assert desk.state.membership.number == 1, "no generation began from nothing"


def test_the_report_says_why_an_older_one_was_taken():
    desk = started(OLD, passed_over=("step-9/manifest.json was changed",))
    assert build_report(desk.state, StepSummary(), desk.now).unread == ["step-9/manifest.json was changed"]


def test_checkpoints_of_which_none_is_whole_stop_the_job_before_it_trains():
    desk = started(passed_over=("step-9/manifest.json was changed",))
    for worker in desk.workers():
        desk.exits(worker, -9)
    assert (desk.state.membership.outcome, desk.state.membership.number) == ("failed", 0)
    assert desk.state.membership.stop_reason is not None
    assert "step-9/manifest.json was changed" in desk.state.membership.stop_reason


def test_memory_makes_up_for_checkpoints_of_which_none_is_whole():
    desk = Desk(2, min_nodes=2)
    desk.do(e.DurableFound(None, (), ("step-9/manifest.json was changed",)))
    copy = running(2).snapshot(6)
    for i in range(2):
        desk.node(f"n{i}", copies=(copy,))
    for worker in desk.workers():
        desk.ready(worker)
    assert newest_form(desk).copy == copy


def test_what_a_tier_keeps_no_longer_is_not_remembered():
    desk = running(2)
    for step in (6, 7, 8, 9):
        durable_checkpoints.there(desk.core, Durable(step, TIER.url))
        durable_checkpoints.there(desk.core, Durable(step, "elsewhere"))
    assert desk.state.storage.durable == Durable(9, "elsewhere")
    kept = {
        d.url: [x.step for x in desk.state.storage.older if x.url == d.url] for d in desk.state.storage.older
    }
    assert kept == {TIER.url: [9, 8], "elsewhere": [8, 7, 6]}


def test_a_failed_collective_of_a_step_says_nothing_of_the_checkpoint():
    desk = started(NEW, OLD)
    for worker in desk.members():
        desk.says(worker, m.Joined(1, 0.1, 0.2))
    desk.commit(10)
    desk.says(desk.members()[0], m.CollectiveError(1, 10, "Connection closed by peer"))
    assert desk.state.storage.durable == NEW


# ---------------------------------------------------------------- in memory


def test_a_copy_that_went_bad_is_made_anew():
    desk = running(2)
    copy = desk.snapshot(6, "n0", "n1")
    desk.do(e.NodeSays("n0", m.SnapshotCorrupt(copy.key, "bytes 0 to 9 changed in memory")))
    assert [(n, o.copy, [h.node for h in o.holders]) for n, o in desk.sent(m.Replicate)] == [
        ("n0", copy, ["n1"])
    ]
    assert desk.complete_snapshots() == [6]
    desk.holds("n0", copy)
    desk.do(e.NodeSays("n1", m.SnapshotCorrupt(copy.key, "again")))
    assert desk.sent(m.Replicate)[-1][0] == "n1"


def test_a_snapshot_goes_with_its_last_good_copy():
    desk = running(2)
    copy = desk.snapshot(6, "n0", "n1")
    for node in ("n0", "n1"):
        desk.do(e.NodeSays(node, m.SnapshotCorrupt(copy.key, "bytes 0 to 9 changed in memory")))
    assert desk.state.storage.snapshots == []
    assert len(desk.records("snapshot-spoiled")) == 2
