"""Replicas of several workers: who is built for which shard, and what of them is no replica's."""

import pytest
from desk import TIER, Desk, running

from holdfast.coordinator.health.comparison import SLOW_RANK
from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase, WorkerPhase
from holdfast.coordinator.membership.failures import _half
from holdfast.coordinator.membership.resize import check_resize
from holdfast.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.engine_orders import Capacity
from holdfast.protocol.job_options import SnapshotOptions
from holdfast.protocol.phases import BLOCK_STEPS, Spent
from holdfast.protocol.snapshots import Saving


def sharded(nodes: int = 4, spares: int = 0, copies: int = 0, **spec: object) -> Desk:
    return running(
        nodes, spares, shape=(2, 1), saving=Saving(SnapshotOptions("1", copies), 0, (TIER,)), **spec
    )


def rebuilt(desk: Desk) -> str:
    """A spare that was built for shard 0 is told to be built for shard 1."""
    (spare,) = desk.workers(WorkerPhase.READY)
    assert desk.known(spare).shard_index == 0
    desk.lose("n1")
    assert desk.told(spare, m.Rebuild) == [m.Rebuild(1)]
    return spare


def test_what_a_worker_said_before_it_was_told_to_be_rebuilt_is_out_of_date():
    desk = sharded(4, 1)
    spare = rebuilt(desk)
    desk.gets_ready(spare, (2, 1), shard_index=0)
    assert desk.known(spare).phase is WorkerPhase.ATTACHED
    desk.gets_ready(spare, (2, 1), shard_index=1)
    assert desk.known(spare).phase is WorkerPhase.READY


def test_an_agent_that_did_not_hear_of_it_is_told_again():
    desk = sharded(4, 1)
    spare = rebuilt(desk)
    before = m.Ready(digest="d0", host="n4", vote_port=1, data_port=2, shape=(2, 1), shard_index=0)
    desk.crash()
    desk.back("n4", n4={"ready": before})
    assert desk.told(spare, m.Rebuild, newest=True) == [m.Rebuild(1)]
    desk.back("n4", n4={"ready": None})
    assert desk.told(spare, m.Rebuild, newest=True) == []


def test_spares_of_one_shard_become_a_replica_where_no_other_workers_come():
    desk = Desk(4, max_restarts=0)
    for i in range(4):
        desk.node(f"n{i}")
    first = desk.workers()
    for worker in first[:2]:
        desk.started(worker)
    desk.gets_ready(first[0], (2, 1), shard_index=0)
    for worker in first[2:]:
        desk.started(worker)
    desk.gets_ready(first[2], (2, 1), shard_index=0)
    desk.lose("n1")
    desk.lose("n3")
    rebuilds = [x for w in (first[0], first[2]) for x in desk.told(w, m.Rebuild)]
    assert rebuilds in ([], [m.Rebuild(1)])


def test_a_size_that_makes_no_whole_replicas_is_rounded_down():
    desk = sharded(4)
    desk.do(e.ResizeRequested(3, "smaller"))
    assert desk.state.target == 2
    desk.do(e.ResizeRequested(4, "larger"))
    assert desk.state.target == 4
    with pytest.raises(UsageError, match="replicas of 2 workers need 2"):
        check_resize(desk.state, 1)


def test_the_nodes_that_stay_make_up_whole_replicas():
    """Those that failed before go first, but not where the others hold one shard twice and the other not at all."""
    desk = sharded(4)
    desk.state.membership.nodes["n1"].failures = 1
    desk.do(e.ResizeRequested(2, "smaller"))
    staying = [n.name for n in desk.core.alive_nodes() if n.leaving is None]
    assert {desk.known(desk.worker_on(n)).shard_index for n in staying} == {0, 1}
    assert "n1" not in staying
    assert all(desk.told(w, m.EndAtCommit) for w in desk.members())


def test_with_less_room_than_a_replica_needs_the_job_stops():
    desk = sharded(4)
    desk.do(Capacity(1, "preempted", None))
    assert (desk.state.membership.stop_reason or "").endswith("1 of at least 2 nodes are left")


def test_too_few_nodes_are_noticed_when_the_shape_is_known():
    desk = Desk(4)
    for i in range(4):
        desk.node(f"n{i}")
    first, *others = desk.workers()
    desk.started(first)
    desk.do(Capacity(1, "preempted", None))
    assert desk.state.membership.stop_reason is None
    staying = next(
        w for w in (first, *others) if desk.state.membership.nodes[desk.known(w).node].leaving is None
    )
    desk.says(staying, m.Attached())
    desk.gets_ready(staying, (2, 1))
    assert "1 of at least 2 nodes are left" in (desk.state.membership.stop_reason or "")


def test_who_is_to_leave_gives_its_shard_to_the_one_in_its_place_and_goes():
    desk = sharded(2, 1)
    (spare,) = desk.workers(WorkerPhase.READY)
    desk.do(e.NodeGoing("n0", "drained", None))
    desk.gets_ready(spare, (2, 1), shard_index=0)
    leaver, other = desk.members()
    for worker in (leaver, other):
        assert desk.told(worker, m.EndAtCommit)
        desk.parks(worker, 6)
    assert desk.members() == [spare, other, leaver]
    assert desk.state.membership.generation is not None
    assert desk.state.membership.generation.members[2].replica == -1
    assert desk.told(spare, m.JoinGeneration)[-1].donors == (2,)
    desk.commit(7)
    for worker in desk.members():
        desk.parks(worker, 7)
    assert desk.members() == [spare, other]
    assert leaver in desk.killed()


def test_one_that_is_to_leave_does_not_count_for_who_is_built():
    desk = sharded(2, 1)
    (spare,) = desk.workers(WorkerPhase.READY)
    desk.do(e.NodeGoing("n1", "drained", None))
    assert desk.told(spare, m.Rebuild) == [m.Rebuild(1)]


def test_a_snapshot_of_which_nobody_brings_a_shard_is_given_up():
    desk = sharded(2)
    desk.holds("n0", desk.shard(6, 0))
    desk.refuses("n1", desk.shard(6, 1))
    assert desk.sent(m.ForgetSnapshots, newest=True) == [("n0", m.ForgetSnapshots(5, 6))]
    desk.holds("n0", desk.shard(7, 0))
    desk.holds("n1", desk.shard(7, 1))
    assert desk.complete_snapshots() == [7]
    desk.holds("n0", desk.shard(6, 0))
    assert desk.complete_snapshots() == [7]


def test_a_snapshot_that_the_other_holder_may_bring_is_waited_for():
    desk = sharded(4, copies=1)
    desk.holds("n0", desk.shard(6, 0))
    desk.refuses("n1", desk.shard(6, 1))
    assert desk.sent(m.ForgetSnapshots) == []
    desk.holds("n2", desk.shard(6, 0))
    desk.holds("n3", desk.shard(6, 1))
    assert [x.step for x in desk.state.storage.snapshots] == [6]


def test_when_nobody_differs_somebody_keeps_every_shard():
    desk = sharded(4)
    half = _half(desk.core.inside())
    assert sorted(w.shard_index for w in half) == [0, 1]
    alone = sharded(2)
    assert len(_half(alone.core.inside())) == 1


def test_who_computes_nothing_is_compared_with_nobody():
    desk = sharded(4)
    for block in range(40):
        for rank, worker in enumerate(desk.members()):
            own_s = 0.001 * (5 if rank == 3 else 1) if rank > 1 else 0.1
            spent = Spent(
                first=block * BLOCK_STEPS,
                micros=0 if rank > 1 else 4,
                data_s=0.0,
                forward_s=own_s,
                backward_s=0.0,
                wait_s=0.1,
                update_s=0.0,
                aside_s=0.0,
                loss=None,
            )
            desk.says(worker, m.Progress(generation=1, committed=6 + block, median_s=0.1, spent=(spent,)))
    assert desk.state.health.slow == []
    assert not any(SLOW_RANK in str(r) for r in desk.records("finding"))
    assert desk.state.membership.phase is JobPhase.RUNNING


def test_a_newcomer_that_fills_one_of_two_places_waits_for_the_other():
    desk = sharded(4)
    for node in ("n0", "n2"):
        desk.do(e.NodeGoing(node, "drained", None))
    desk.node("n4")
    desk.ready(desk.worker_on("n4"))
    assert desk.known(desk.worker_on("n4")).shard_index == 0
    desk.commit(7)
    desk.wait(5.0)
    assert desk.state.membership.replacing
    assert not any(desk.told(w, m.EndAtCommit) for w in desk.members())


def test_a_replica_that_once_halted_is_not_broken_by_a_later_change_in_order():
    """How far its workers had been belongs to the generation that broke."""
    desk = sharded(6)
    desk.lose("n5")
    first = desk.state.membership.number
    for worker in desk.members()[:4]:
        assert desk.told(worker, m.Break)[-1].halt
        desk.says(worker, m.Halted(first, {"columns": 3}))
    for worker in desk.members()[:4]:
        assert desk.told(worker, m.RunTo)[-1].leave
        desk.says(worker, m.Parked(generation=first, committed=6, agreement=1))
    desk.parks(desk.members()[4], 6)
    assert desk.state.membership.number == first + 1
    desk.commit(8)
    desk.do(e.ResizeRequested(2, "smaller"))
    for worker in desk.members():
        assert desk.told(worker, m.EndAtCommit)
        desk.says(worker, m.Parked(generation=first + 1, committed=9, agreement=0))
        assert not any(desk.told(w, m.Break, newest=True) for w in desk.members())
    assert desk.state.membership.number == first + 2
