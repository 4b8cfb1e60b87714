"""Planned changes of the membership, one situation after the other."""

import pytest
from desk import Desk, copy_of, running

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase, WorkerPhase
from holdfast.coordinator.membership.queries import GAIN_SHARE
from holdfast.coordinator.membership.resize import check_drain, check_resize, describe
from holdfast.coordinator.service.job_view import build_status
from holdfast.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.notices import NoticeCause

# ---------------------------------------------------------------- a resize


def shrink(desk: Desk, nodes: int) -> None:
    """A person wants fewer nodes, and the members finish the step in flight."""
    desk.do(e.ResizeRequested(nodes, "night"))
    park_all(desk)


def park_all(desk: Desk, committed: int | None = None) -> None:
    for worker in desk.members():
        if desk.known(worker).phase is WorkerPhase.MEMBER:
            desk.parks(worker, desk.state.membership.committed if committed is None else committed)


def left(desk: Desk) -> list[object]:
    return [r["node"] for r in desk.records("node-left")]


def test_a_smaller_job_lets_its_highest_ranks_go_at_a_commit():
    desk = running(4)
    desk.do(e.ResizeRequested(2, "night"))
    assert {w for w in desk.members() if desk.told(w, m.EndAtCommit, newest=True)} == set(desk.members())
    assert not desk.did(e.ReleaseNode)  # not before the step is done
    park_all(desk, 6)
    assert desk.members() == ["n0.0#1", "n1.0#2"]
    assert desk.state.membership.generation.start == 6
    assert not any(desk.told(w, m.JoinGeneration)[-1].restore for w in desk.members())
    assert desk.killed() == {"n2.0#3", "n3.0#4"}
    assert not left(desk)  # their memory may be needed until the new generation has committed
    desk.commit(7)
    assert sorted(left(desk)) == ["n2", "n3"]
    assert [desk.state.membership.restarts_used, desk.state.membership.replaced, desk.incidents()] == [
        0,
        0,
        [],
    ]


def test_a_larger_job_asks_for_nodes_beside_the_restart_budget():
    desk = running(4, max_restarts=0)
    shrink(desk, 2)
    desk.commit(7)
    desk.do(e.ResizeRequested(4, "morning"))
    assert len(desk.did(e.ProvideNode)) == 2
    desk.node("n8")
    desk.node("n9")
    for worker in desk.workers(WorkerPhase.STARTING):
        desk.ready(worker)
    park_all(desk, 9)
    assert [w.partition(".")[0] for w in desk.members()] == ["n0", "n1", "n8", "n9"]
    assert desk.told("n9.0#6", m.JoinGeneration)[-1].donors == (0, 1)


def test_newcomers_that_are_almost_ready_are_waited_for_and_join_together():
    desk = running(4)
    shrink(desk, 2)
    desk.commit(7)
    desk.do(e.ResizeRequested(4, "morning"))
    desk.node("n8")
    desk.node("n9")
    first, second = desk.workers(WorkerPhase.STARTING)
    desk.ready(first)
    desk.commit(8)
    assert not desk.told("n0.0#1", m.EndAtCommit)[1:]
    desk.ready(second)
    assert len(desk.told("n0.0#1", m.EndAtCommit)) == 2
    park_all(desk, 9)
    assert len(desk.members()) == 4


def test_a_newcomer_does_not_wait_long_for_others():
    desk = running(4)
    shrink(desk, 2)
    desk.commit(7)
    desk.do(e.ResizeRequested(4, "morning"))
    desk.node("n8")
    desk.node("n9")
    desk.ready(desk.workers(WorkerPhase.STARTING)[0])
    desk.wait(desk.core.timing.gather_s + 0.1)
    assert len(desk.told("n0.0#1", m.EndAtCommit)) == 2


def test_joining_is_held_back_when_it_costs_too_much_of_the_time():
    desk = running(3)
    for count, name in enumerate(("n7", "n8")):
        node = desk.members()[-1].partition(".")[0]
        desk.lose(node)
        for worker in desk.members():
            if desk.known(worker).phase is WorkerPhase.MEMBER:
                desk.parks(worker, desk.state.membership.committed)
        desk.commit(desk.state.membership.committed + 1)
        desk.node(name)
        desk.ready(desk.worker_on(name))
        yields = len(desk.told("n0.0#1", m.EndAtCommit))
        assert yields == 1  # the second waits
        if count == 0:
            park_all(desk)
            desk.now += 0.6
            desk.commit(desk.state.membership.committed + 1)  # it took 0.6 s, of which a step has 0.1 s
    stall_s = desk.state.membership.changes[0].stall_s
    assert stall_s == pytest.approx(0.5, abs=0.1)
    third = GAIN_SHARE / 3  # of what one more beside two adds
    desk.wait(stall_s / third - 1.0)
    assert len(desk.told("n0.0#1", m.EndAtCommit)) == 1
    desk.wait(1.1)
    assert len(desk.told("n0.0#1", m.EndAtCommit)) == 2


def test_a_size_outside_the_bounds_is_refused_with_a_way_out():
    desk = running(4, min_nodes=2)
    for nodes in (0, 1, 5):
        with pytest.raises(UsageError, match="--nnodes 2:4"):
            check_resize(desk.state, nodes)
    check_resize(desk.state, 3)
    with pytest.raises(UsageError, match="a fixed size"):
        check_resize(running(3, wait_for_spare=True).state, 2)


def test_less_capacity_than_the_job_can_train_on_ends_it_with_its_state_saved():
    desk = running(3, min_nodes=2)
    desk.do(e.Capacity(1, "preempted by job 17", 30.0))
    park_all(desk, 6)
    assert desk.state.membership.phase is JobPhase.STOPPING
    assert "1 of at least 2 nodes are left" in str(desk.state.membership.stop_reason)
    saver = next(w for w in desk.workers() if desk.told(w, m.Stop))
    assert desk.told(saver, m.Stop)[0].save_to is not None


def test_capacity_that_comes_back_brings_the_wanted_size_back():
    desk = running(3)
    desk.do(e.Capacity(1, "preempted", 30.0))
    park_all(desk)
    desk.commit(7)
    assert len(desk.members()) == 1
    desk.do(e.Capacity(None, "job 17 has ended"))
    assert len(desk.did(e.ProvideNode)) == 2


# ---------------------------------------------------------------- a node that is to leave


def test_a_drained_member_is_replaced_by_the_spare_in_one_change():
    desk = running(3, spares=1)
    desk.do(e.NodeGoing("n1", "maintenance"))
    park_all(desk, 6)
    assert desk.members() == ["n0.0#1", "n3.0#4", "n2.0#3"]  # the rank of the one that leaves
    assert desk.told("n3.0#4", m.JoinGeneration)[0].donors == (0, 2)
    assert len(desk.did(e.ProvideNode)) == 1  # a new spare
    desk.commit(7)
    assert left(desk) == ["n1"]
    assert ("n1", m.Shutdown("maintenance")) in desk.sent(m.Shutdown)
    assert [desk.state.membership.restarts_used, desk.incidents()] == [0, []]
    told = describe(desk.state, desk.state.membership.changes[0])
    assert (told.from_world, told.to_world, told.newcomers) == (3, 3, 1)


def test_without_a_deadline_a_node_trains_on_until_its_replacement_is_ready():
    desk = running(3)
    desk.do(e.NodeGoing("n1", "maintenance"))
    assert len(desk.did(e.ProvideNode)) == 1
    desk.commit(6)
    assert not desk.told("n0.0#1", m.EndAtCommit)
    desk.node("n7")
    desk.ready(desk.worker_on("n7"))
    assert desk.told("n0.0#1", m.EndAtCommit)


def test_without_a_replacement_the_job_goes_on_smaller_after_a_while():
    desk = running(3)
    desk.do(e.NodeGoing("n1", "maintenance"))
    desk.wait(desk.core.timing.form_s + 1.0)
    assert desk.told("n0.0#1", m.EndAtCommit)
    park_all(desk)
    assert len(desk.members()) == 2


def test_a_deadline_is_kept_with_time_for_a_step():
    desk = running(3)
    desk.do(e.NodeGoing("n1", "spot interruption", 10.0))
    margin_s = desk.core.timing.detection_s + 3 * 0.1
    desk.wait(10.0 - margin_s - 0.5)
    assert not desk.told("n0.0#1", m.EndAtCommit)
    desk.wait(1.0)
    assert desk.told("n0.0#1", m.EndAtCommit)


def test_the_agent_says_itself_that_its_node_is_taken_away():
    desk = running(3, spares=1)
    desk.do(e.NodeSays("n1", m.Leaving("SIGTERM", 30.0)))
    assert desk.records("node-leaving")[0]["reason"] == "SIGTERM"
    assert desk.told("n0.0#1", m.EndAtCommit)


def test_below_the_minimum_nobody_leaves_before_its_time():
    desk = running(2, min_nodes=2)
    desk.do(e.NodeGoing("n1", "maintenance"))
    desk.wait(60.0)
    assert not desk.told("n0.0#1", m.EndAtCommit)
    desk.node("n7")
    desk.ready(desk.worker_on("n7"))
    park_all(desk)
    assert [w.partition(".")[0] for w in desk.members()] == ["n0", "n7"]


def test_the_only_member_gives_its_state_to_the_newcomer_before_it_leaves():
    desk = running(1, spares=1)
    desk.do(e.NodeGoing("n0", "maintenance"))
    park_all(desk, 6)
    assert desk.members() == ["n0.0#1", "n1.0#2"]
    assert desk.told("n1.0#2", m.JoinGeneration)[0].donors == (0,)
    desk.commit(7)
    park_all(desk, 8)
    assert desk.members() == ["n1.0#2"]
    desk.commit(9)
    assert left(desk) == ["n0"]


def test_a_survivor_that_alone_committed_stays_though_it_is_to_leave():
    desk = running(3)
    desk.do(e.NodeGoing("n0", "maintenance", 4.0))
    desk.lose("n2")
    desk.parks("n0.0#1", 7)
    desk.parks("n1.0#2", 6)
    assert "n0.0#1" in desk.members()
    assert desk.state.membership.generation.start == 7
    assert desk.told("n1.0#2", m.JoinGeneration)[-1].restore


def test_a_spare_leaves_at_once():
    desk = running(2, spares=1)
    desk.do(e.NodeGoing("n2", "maintenance"))
    assert left(desk) == ["n2"]
    assert not desk.told("n0.0#1", m.EndAtCommit)
    desk.lose("n1")
    shown = {n.node: n.left for n in build_status(desk.state, desk.now).nodes}
    assert shown == {"n0": False, "n1": False, "n2": True}  # people look for a node that is lost


def test_a_node_that_left_and_missed_it_is_told_again():
    desk = running(2, spares=1)
    desk.do(e.NodeGoing("n2", "maintenance"))
    desk.crash()
    desk.node("n2")
    assert ("n2", m.Shutdown("maintenance")) in desk.sent(m.Shutdown, newest=True)
    desk.node("n2", session="2")
    assert desk.state.membership.nodes["n2"].alive  # it was repaired, and is a new node


def test_a_node_that_is_not_there_or_leaves_already_cannot_be_drained():
    desk = running(2, min_nodes=2)
    with pytest.raises(UsageError, match="its nodes are n0, n1"):
        check_drain(desk.state, "n9")
    desk.do(e.NodeGoing("n1", "maintenance"))
    with pytest.raises(UsageError, match="already leaving: maintenance"):
        check_drain(desk.state, "n1")


def test_a_fault_during_a_planned_change_settles_the_step_as_ever():
    desk = running(4)
    desk.do(e.ResizeRequested(2, "night"))
    desk.lose("n0")
    for worker in ("n1.0#2", "n2.0#3", "n3.0#4"):
        desk.parks(worker, 5, prepared=True)
    assert desk.state.membership.generation.start == 6
    assert len(desk.members()) == 2
    assert desk.incidents()[0].open
    desk.commit(7)
    assert not desk.incidents()[0].open  # it has the size that it is to have


# ---------------------------------------------------------------- level 0


def test_at_level_0_a_resize_starts_all_again_without_a_charge():
    desk = Desk(3)
    for i in range(3):
        desk.node(f"n{i}")
    desk.do(e.ResizeRequested(2, "night"))
    assert len(desk.sent(m.KillWorker, newest=True)) == 3
    for worker in desk.workers():
        desk.exits(worker, -15)
    assert len(desk.members()) == 2
    assert desk.state.membership.restarts_used == 0
    assert len(left(desk)) == 1


def test_at_level_0_a_larger_job_waits_for_its_nodes_before_it_starts_again():
    desk = Desk(3)
    for i in range(3):
        desk.node(f"n{i}")
    desk.do(e.ResizeRequested(2, "night"))
    for worker in desk.workers():
        desk.exits(worker, -15)
    desk.do(e.ResizeRequested(3, "morning"))
    assert not desk.sent(m.KillWorker, newest=True)
    desk.node("n7")
    assert len(desk.sent(m.KillWorker, newest=True)) == 2


def test_a_fault_while_a_node_waits_to_leave_does_not_take_both():
    desk = running(4)
    desk.do(e.NodeGoing("n3", "maintenance"))
    desk.lose("n1")
    for worker in ("n0.0#1", "n2.0#3", "n3.0#4"):
        desk.parks(worker, 5)
    assert len(desk.members()) == 3  # its replacement is not there yet, so it trains on
    desk.commit(6)
    assert not left(desk)


def test_nodes_that_are_too_many_stay_until_somebody_trains():
    """The newest snapshot of the run before may be in their memory."""
    desk = Desk(3)
    desk.do(e.ResizeRequested(1, "night"))
    desk.node("n0", copies=(copy_of(10),))
    desk.ready(desk.worker_on("n0"))
    assert not desk.members()  # the others may have something newer
    desk.node("n1", copies=(copy_of(20),))
    desk.node("n2", copies=(copy_of(20),))
    assert desk.state.membership.generation.start == 20
    assert len(desk.members()) == 1
    assert not left(desk)
    desk.commit(21)
    assert len(left(desk)) == 2


def test_a_node_that_never_comes_is_not_waited_for_much_longer():
    desk = Desk(2)
    desk.do(e.ResizeRequested(1, "night"))
    desk.node("n0", copies=(copy_of(10),))
    desk.ready(desk.worker_on("n0"))
    desk.wait(desk.core.timing.form_s + 0.1)
    assert desk.state.membership.generation.start == 10


# ---------------------------------------------------------------- fewer micro-batches than workers


def test_workers_without_a_micro_batch_are_spares():
    desk = Desk(3, spares=0, min_nodes=1, nproc=2)
    for i in range(3):
        desk.node(f"n{i}", slots=2)
    for worker in desk.workers():
        desk.started(worker)
    for worker in desk.workers():
        desk.gets_ready(worker, (1, 1), micro_batches=3)
    assert desk.state.target == 3 == len(desk.members())
    assert [(r["micro_batches"], r["workers"], r["wanted"]) for r in desk.records("few-micro-batches")] == [
        (3, 3, 6)
    ]
    desk.commit(5)
    desk.exits(desk.members()[1], -9)
    park_all(desk, 5)
    assert len(desk.members()) == 3  # one that stood by
    desk.commit(6)
    desk.do(e.ResizeRequested(1, "night"))
    park_all(desk, 6)
    assert len(desk.members()) == 2 == desk.state.target


def test_a_replica_of_several_workers_counts_its_own_micro_batches():
    desk = running(4, shape=(2, 1), min_nodes=2)
    assert len(desk.members()) == desk.state.target == 4
    desk.node("n8")
    (late,) = desk.workers(WorkerPhase.STARTING)
    desk.started(late)
    desk.gets_ready(late, (2, 1), micro_batches=2)  # each of two shards computes one
    assert desk.state.target == 2


def test_the_engine_hears_why_a_node_left():
    """One that became too many may be used again when the job grows; one that was drained is its owner's. Words of either do
    not count."""
    causes = {}
    for name, event in (
        ("n3", e.ResizeRequested(3, "maintenance")),
        ("n0", e.NodeGoing("n0", "holdfast resize", None, NoticeCause.DRAIN)),
    ):
        desk = running(4, spares=int(name == "n0"))
        desk.do(event)
        park_all(desk, 6)
        desk.commit(7)
        causes |= {order.node: order.cause for order in desk.did(e.ReleaseNode)}
    assert causes == {"n0": NoticeCause.DRAIN, "n3": NoticeCause.RESIZE}
