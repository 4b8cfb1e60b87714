"""What scripts are told before their node or the job goes away, one situation after the other."""

import pytest
from desk import Desk, running
from test_memory_snapshot_cases import at_level_0

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.context import StopJob
from holdfast.coordinator.kernel.history import RecordKind
from holdfast.coordinator.kernel.state import JobPhase, Timer
from holdfast.coordinator.service.job_view import build_report, build_status
from holdfast.coordinator.service.tally import StepSummary
from holdfast.protocol import messages as m
from holdfast.protocol.causes import CauseKind, NodeReclaimed
from holdfast.protocol.notices import Going, Notice, NoticeCause


def newest(desk: Desk, node: str) -> tuple[Notice, ...] | None:
    """What a node was told last; None: nothing."""
    told = [said.notices for name, said in desk.sent(m.Notify) if name == node]
    return told[-1] if told else None


def only(desk: Desk, node: str) -> Notice:
    [told] = newest(desk, node) or ()
    return told


# ---------------------------------------------------------------- a node


def test_a_node_that_is_drained_hears_of_it_and_no_other_does():
    desk = running(3)
    desk.do(e.NodeGoing("n1", "maintenance", 60.0))
    expected = Notice(
        number=1, going=Going.NODE, cause=NoticeCause.DRAIN, reason="maintenance", deadline_s=60.0
    )
    assert desk.sent(m.Notify) == [("n1", m.Notify((expected,)))]


def test_without_haste_no_deadline_is_known():
    desk = running(3)
    desk.do(e.NodeGoing("n1", "maintenance"))
    assert only(desk, "n1").deadline_s is None


def test_a_deadline_that_comes_nearer_is_another_notice():
    desk = running(2, min_nodes=2)
    desk.do(e.NodeGoing("n1", "maintenance"))
    desk.do(e.NodeSays("n1", m.Leaving("SIGTERM", 30.0)))
    told = only(desk, "n1")
    assert (told.number, told.cause, told.deadline_s) == (2, NoticeCause.PREEMPTION, 30.0)


@pytest.mark.parametrize("within_s", [29.0, 31.0, 600.0, None])
def test_what_says_nothing_new_is_not_told_again(within_s):
    desk = running(2, min_nodes=2)
    desk.do(e.NodeGoing("n1", "spot interruption", 30.0))
    desk.do(e.NodeGoing("n1", "spot interruption", within_s))
    assert len(desk.sent(m.Notify)) == 1


def test_an_engine_may_say_why():
    desk = running(3)
    desk.do(e.NodeGoing("n1", "spot interruption", 120.0, NoticeCause.PREEMPTION))
    assert only(desk, "n1").cause is NoticeCause.PREEMPTION


def test_a_smaller_job_warns_those_that_go_and_a_larger_one_takes_it_back():
    desk = running(3)
    desk.do(e.ResizeRequested(2, "night"))
    assert [n for n, _ in desk.sent(m.Notify)] == ["n2"]
    assert only(desk, "n2").cause is NoticeCause.RESIZE
    desk.do(e.ResizeRequested(3, "morning"))
    assert newest(desk, "n2") == ()
    assert desk.records("node-stays") == [{"node": "n2"}]


def test_less_capacity_is_a_preemption_with_its_deadline():
    desk = running(3)
    desk.do(e.Capacity(2, "preempted by job 17", 30.0))
    told = only(desk, "n2")
    assert (told.going, told.cause, told.deadline_s) == (Going.NODE, NoticeCause.PREEMPTION, 30.0)


# ---------------------------------------------------------------- the job


def test_a_stop_is_told_to_all_nodes_also_to_those_of_spares():
    desk = running(2, spares=1)
    desk.do(e.StopRequested("holdfast stop"))
    assert sorted(n for n, _ in desk.sent(m.Notify)) == ["n0", "n1", "n2"]
    told = only(desk, "n0")
    assert (told.going, told.cause, told.reason) == (Going.JOB, NoticeCause.STOP, "holdfast stop")
    assert told.deadline_s == desk.core.timing.stop_s
    assert desk.state.deadlines.at(Timer.STOP) == desk.now + desk.core.timing.stop_s


def test_a_stop_is_told_before_the_generation_is_to_end():
    """So a worker knows when it comes to the commit that is its last."""
    desk = running(2)
    orders = [
        a.message for a in desk.do(e.StopRequested("ctrl-c")) if isinstance(a, e.Send) and a.node == "n0"
    ]
    kinds = [type(o.message if isinstance(o, m.Relay) else o) for o in orders]
    assert kinds == [m.Notify, m.EndAtCommit]


def test_at_level_0_the_deadline_is_when_processes_are_killed():
    desk = at_level_0(2)
    desk.do(e.StopRequested("ctrl-c"))
    grace_s = {k.grace_s for _, k in desk.sent(m.KillWorker)}
    assert grace_s == {only(desk, "n0").deadline_s}


def test_the_time_that_the_engine_leaves_counts_where_it_is_less():
    desk = running(2)
    desk.do(e.Capacity(0, "Slurm ends the whole allocation", 8.0))
    told = only(desk, "n1")
    assert (told.going, told.cause, told.deadline_s) == (Going.JOB, NoticeCause.PREEMPTION, 8.0)


def test_a_node_that_has_less_time_than_the_job_that_stops_hears_of_both():
    desk = running(2)
    desk.do(e.StopRequested("ctrl-c"))
    desk.do(e.NodeSays("n1", m.Leaving("SIGTERM", 3.0)))
    assert [(n.going, n.deadline_s) for n in newest(desk, "n1") or ()] == [
        (Going.NODE, 3.0),
        (Going.JOB, pytest.approx(desk.core.timing.stop_s, abs=0.1)),
    ]


def test_a_job_that_gives_up_says_so():
    desk = running(2)
    desk.core.request(StopJob("the restart budget is used up", "failed"))
    desk.do(e.Tick())
    assert only(desk, "n0").cause is NoticeCause.FAILURE


def test_a_time_limit_is_foretold_once_and_decides_nothing():
    desk = running(2)
    for left_s in (120.0, 117.0, 114.0):
        desk.do(e.JobGoing("the time limit", left_s, NoticeCause.TIME_LIMIT), 3.0)
    assert [n for n, _ in desk.sent(m.Notify)] == ["n0", "n1"]
    told = only(desk, "n0")
    assert (told.going, told.cause, told.deadline_s) == (Going.JOB, NoticeCause.TIME_LIMIT, 120.0)
    assert desk.records("job-going") == [{"reason": "the time limit", "within_s": 120.0}]
    assert desk.state.membership.stop_reason is None
    assert not desk.told("n0.0#1", m.EndAtCommit)


def test_a_job_that_gets_more_time_hears_of_it():
    desk = running(2)
    desk.do(e.JobGoing("the time limit", 120.0, NoticeCause.TIME_LIMIT))
    desk.do(e.JobGoing("more time", None, NoticeCause.TIME_LIMIT))
    desk.do(e.JobGoing("more time", None, NoticeCause.TIME_LIMIT))
    assert newest(desk, "n0") == ()
    assert desk.records("job-stays") == [{"reason": "more time"}]


def test_the_stop_itself_is_another_notice_and_the_last_word():
    desk = running(2)
    desk.do(e.JobGoing("the time limit", 120.0, NoticeCause.TIME_LIMIT))
    desk.do(e.StopRequested("the time limit", NoticeCause.TIME_LIMIT), 60.0)
    told = only(desk, "n0")
    assert (told.number, told.deadline_s) == (2, desk.core.timing.stop_s)
    desk.do(e.JobGoing("more time", None, NoticeCause.TIME_LIMIT))
    assert only(desk, "n0").number == 2


# ---------------------------------------------------------------- who comes later


def test_a_node_that_joins_hears_what_stands():
    desk = running(2)
    desk.do(e.JobGoing("the time limit", 120.0, NoticeCause.TIME_LIMIT))
    desk.node("n7")
    assert only(desk, "n7").going is Going.JOB


def test_where_nothing_stands_a_newcomer_costs_no_message():
    desk = running(2)
    desk.node("n7")
    assert not desk.sent(m.Notify)


def test_an_agent_that_comes_back_hears_what_stands_now():
    desk = running(2)
    desk.do(e.JobGoing("the time limit", 120.0, NoticeCause.TIME_LIMIT))
    desk.back("n0")
    again = only(desk, "n0")
    assert (again.number, again.deadline_s) == (1, pytest.approx(120.0, abs=0.1))
    desk.do(e.JobGoing("more time", None, NoticeCause.TIME_LIMIT))
    desk.back("n0")  # it may have missed that
    assert newest(desk, "n0") == ()


def test_a_coordinator_that_takes_over_knows_what_was_told():
    desk = running(2, min_nodes=2)
    desk.do(e.NodeGoing("n1", "spot interruption", 60.0))
    desk.crash(away_s=20.0)
    desk.back()
    told = only(desk, "n1")
    assert (told.number, told.deadline_s) == (1, pytest.approx(40.0, abs=0.1))
    desk.do(e.StopRequested("ctrl-c"))
    assert [n.number for n in newest(desk, "n1") or ()] == [1, 2]
    assert [n.number for n in newest(desk, "n0") or ()] == [2]


# ---------------------------------------------------------------- the same for programs


def ends_by(desk, event):
    desk.do(event)
    return desk.state.membership.stop_cause


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (e.StopRequested("the time limit: too few workers"), NoticeCause.STOP),
        (e.StopRequested("any words", NoticeCause.TIME_LIMIT), NoticeCause.TIME_LIMIT),
        (e.Capacity(0, "any words", 30.0, NoticeCause.TIME_LIMIT), NoticeCause.TIME_LIMIT),
        (e.Capacity(0, "any words", 8.0), NoticeCause.PREEMPTION),
    ],
)
def test_the_end_of_a_job_has_its_cause_as_a_value_whatever_the_words_are(event, cause):
    desk = running(2)
    assert ends_by(desk, event) is cause
    # The first one counts.
    assert ends_by(desk, e.StopRequested("ctrl-c", NoticeCause.HEALTH)) is cause
    for worker in desk.members():
        desk.parks(worker, 5)
    for worker in desk.workers():
        desk.exits(worker, 0)
    assert desk.state.membership.phase is JobPhase.ENDED
    assert build_report(desk.state, StepSummary(), desk.now).cause == cause
    assert [ended["cause"] for ended in desk.records("ended")] == [cause]


def test_a_job_that_gives_up_for_want_of_nodes_says_so():
    desk = running(2, min_nodes=2)
    desk.lose("n1")
    desk.parks("n0.0#1", 5)
    desk.wait(desk.core.timing.wait_s + 1)
    desk.wait(desk.core.timing.wait_s)
    assert (desk.state.membership.outcome, desk.state.membership.stop_cause) == ("failed", NoticeCause.NODES)
    given_up = running(2)
    given_up.core.request(StopJob("too few workers for 300 s", "failed"))
    assert given_up.state.membership.stop_cause is NoticeCause.FAILURE


# ---------------------------------------------------------------- a node that goes as it was said


def went(desk):
    """Kinds of the entries that say that a node is gone."""
    return [a.kind for a in desk.did(e.Record) if a.kind in ("node-lost", "node-left")]


def test_a_node_that_goes_before_the_job_lets_it_go_has_left_if_it_was_announced():
    desk = running(3)
    desk.do(e.NodeSays("n1", m.Leaving("SIGTERM", 3.0)))
    desk.lose("n1")
    assert went(desk) == ["node-left"]
    (row,) = [row for row in build_status(desk.state, desk.now).nodes if row.node == "n1"]
    assert row.left
    # Its worker was in a step, and that step is not free. The machine is not to blame.
    assert [(i.cause, i.cause.kind) for i in desk.state.incidents] == [
        (NodeReclaimed("SIGTERM"), CauseKind.RECLAIMED)
    ]
    assert not [r for r in desk.did(e.Remember) if r.kind is RecordKind.LOST]
    (release,) = desk.did(e.ReleaseNode)
    assert release.planned


def test_a_node_that_was_to_wait_for_another_and_breaks_is_lost():
    desk = running(3)
    desk.do(e.NodeGoing("n1", "maintenance"))
    desk.lose("n1")
    assert went(desk) == ["node-lost"]


def test_machines_of_one_place_that_are_taken_back_together_are_no_lost_place():
    desk = running(3)
    for name in ("n1", "n2"):
        desk.state.membership.nodes[name].place = ("rack",)
        desk.do(e.NodeSays(name, m.Leaving("SIGTERM", 3.0)))
    for name in ("n1", "n2"):
        desk.lose(name)
    assert went(desk) == ["node-left"] * 2
    assert {type(i.cause) for i in desk.state.incidents} == {NodeReclaimed}


def test_an_agent_that_ends_when_the_job_is_being_stopped_is_not_lost():
    desk = running(2)
    desk.do(e.StopRequested("the time limit of the Slurm job", NoticeCause.TIME_LIMIT))
    for worker in desk.members():
        desk.parks(worker, 5)
    first = desk.workers()[0]
    desk.exits(first, 0)
    desk.lose(desk.known(first).node)
    assert went(desk) == ["node-left"]
    # One that still holds the state is another matter.
    desk.lose(desk.known(desk.workers()[0]).node)
    assert went(desk) == ["node-left", "node-lost"]
