"""Snapshots of sharded replicas: what a node that was lost, and comes back with its memory, makes whole again."""

from desk import TIER, Desk, copy_of, running
from findings import ERROR, WIDE, finds, park_all

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase, WorkerPhase
from holdfast.coordinator.storage import memory_snapshots
from holdfast.protocol import messages as m
from holdfast.protocol.health import Remedy
from holdfast.protocol.job_options import SnapshotOptions
from holdfast.protocol.snapshots import Copy, Saving


def saved(nodes: int = 4, copies: int = 0, step: int = 6) -> Desk:
    """Replicas of two; every node holds its shard of one snapshot."""
    desk = running(nodes, shape=(2, 1), saving=Saving(SnapshotOptions("1", copies), 0, (TIER,)))
    desk.shards(step, *(f"n{i}" for i in range(nodes if copies else 2)))
    assert desk.complete_snapshots() == [step]
    return desk


def comes_back(desk: Desk, node: str, *copies: Copy) -> None:
    """A node that was given up: its workers were ended, its agent is a new one."""
    desk.node(node, session="2", copies=copies)


def remembered(desk: Desk) -> list[int]:
    return [x.step for x in desk.state.storage.snapshots]


def test_a_node_that_comes_back_with_its_shard_makes_the_snapshot_whole_again():
    desk = saved()
    shard = desk.shard(6, 1)
    desk.lose("n1")
    assert (desk.complete_snapshots(), remembered(desk)) == ([], [6])
    comes_back(desk, "n1", shard)
    assert desk.complete_snapshots() == [6]
    assert ("n1", m.SnapshotComplete(6)) in desk.sent(m.SnapshotComplete, newest=True)
    assert desk.records("snapshot-back") == [{"step": 6, "generation": 1}]
    assert desk.state.storage.totals.snapshots == len(desk.records("snapshot")) == 1


def test_plain_fsdp_goes_on_from_what_came_back():
    desk = saved(2)
    shard = desk.shard(6, 1)
    desk.lose("n1")
    park_all(desk)
    assert desk.state.membership.phase is JobPhase.GATHERING
    comes_back(desk, "n1", shard)
    for worker in desk.workers():
        if worker not in desk.members():
            desk.ready(worker)
    form = desk.told(desk.worker_on("n1"), m.JoinGeneration)[-1]
    assert (form.generation.start, form.copy) == (6, shard)


def test_one_that_comes_back_without_it_makes_nothing_whole():
    desk = saved()
    desk.lose("n1")
    comes_back(desk, "n1")
    assert (desk.complete_snapshots(), remembered(desk)) == ([], [6])


def test_all_of_it_may_come_back_one_node_after_the_other():
    desk = saved()
    shards = [desk.shard(6, p) for p in range(2)]
    desk.lose("n1")
    desk.lose("n0")
    assert remembered(desk) == []
    comes_back(desk, "n0", shards[0])
    assert desk.complete_snapshots() == []
    comes_back(desk, "n1", shards[1])
    assert desk.complete_snapshots() == [6]


def test_a_newer_whole_one_ends_the_waiting():
    desk = saved()
    desk.lose("n1")
    park_all(desk)
    assert desk.state.membership.number == 2
    desk.shards(8, "n2", "n3")
    assert (desk.complete_snapshots(), remembered(desk)) == ([8], [8])


def test_while_it_waits_nothing_of_it_is_copied_or_given_up():
    desk = saved(copies=1)
    desk.lose("n1")
    assert desk.complete_snapshots() == [6]  # n3 has the same shard
    asked = len(desk.sent(m.Replicate))
    desk.lose("n3")
    park_all(desk)
    assert (desk.complete_snapshots(), remembered(desk)) == ([], [6])
    assert len(desk.sent(m.Replicate)) == asked
    assert desk.sent(m.ForgetSnapshots) == []


def test_a_shard_that_went_bad_does_not_come_back():
    desk = saved()
    desk.do(e.NodeSays("n1", m.SnapshotCorrupt(desk.shard(6, 1).key, "bytes changed")))
    assert remembered(desk) == []


def test_a_coordinator_that_comes_back_still_waits():
    desk = saved()
    shard = desk.shard(6, 1)
    desk.lose("n1")
    desk.crash()
    desk.back()
    comes_back(desk, "n1", shard)
    assert desk.complete_snapshots() == [6]


def test_of_those_that_are_begun_what_was_whole_is_kept_longest_and_what_was_given_up_shortest():
    desk = saved()
    desk.lose("n1")
    park_all(desk)
    for step in range(7, 7 + 3 * memory_snapshots.KEPT_PARTIAL):
        desk.holds("n2", desk.shard(step, 0))
        if step % 2:
            desk.refuses("n3", desk.shard(step, 1))
    assert remembered(desk)[0] == 6
    assert len(remembered(desk)) <= memory_snapshots.KEPT_PARTIAL + 1
    assert sum(x.given_up for x in desk.state.storage.snapshots) <= 1


def test_a_snapshot_from_before_the_job_knows_its_shape_is_remembered_too():
    desk = Desk(2, saving=Saving(SnapshotOptions("1", 0), 0, (TIER,)))
    shards = [copy_of(6, -5, rank=p, world=2) for p in range(2)]  # of a run before
    for node, shard in zip(("n0", "n1"), shards, strict=True):
        desk.node(node, copies=(shard,))
    assert desk.complete_snapshots() == [6]
    desk.lose("n1")
    comes_back(desk, "n1", shards[1])
    assert desk.complete_snapshots() == [6]


def test_what_agents_could_not_keep_while_there_was_no_coordinator_pushes_out_nothing_that_is_held():
    desk = saved()
    held = {n: tuple(desk.shard(step, p) for step in (7, 8)) for p, n in enumerate(("n0", "n1"))}
    desk.crash()
    for p, name in enumerate(("n0", "n1")):
        desk.back(name, held=held)
        for step in range(9, 9 + 2 * memory_snapshots.KEPT_PARTIAL):
            desk.refuses(name, desk.shard(step, p))
    assert desk.complete_snapshots()[-1] == 8


# ---------------------------------------------------------------- nodes that leave as planned


def replaced(then: Remedy | None = None) -> Desk:
    """Plain FSDP: n1 is to leave, and the spare has taken its place; the newest snapshot is from before."""
    desk = running(
        2, spares=1, shape=(2, 1), saving=Saving(SnapshotOptions("100", 0), 0, (TIER,)), health=WIDE
    )
    desk.shards(6, "n0", "n1")
    if then is None:
        desk.do(e.NodeGoing("n1", "drained", None))
    else:
        finds(desk, "n1", severity=ERROR, remedy=then)
        desk.wait(3.0)
    (spare,) = [w for w in desk.workers() if w.startswith("n2")]
    desk.gets_ready(spare, (2, 1), shard_index=1)
    park_all(desk)
    assert [w.partition(".")[0] for w in desk.members()] == ["n0", "n2", "n1"]
    desk.commit(7)
    park_all(desk)
    assert [w.partition(".")[0] for w in desk.members()] == ["n0", "n2"]
    leaver = next(w for w in desk.killed() if w.startswith("n1"))
    desk.exits(leaver, -9)
    desk.commit(8)
    return desk


def test_a_node_that_is_drained_leaves_when_another_has_the_only_copy_of_its_part():
    desk = replaced()
    assert desk.state.membership.nodes["n1"].alive
    [(buddy, order)] = desk.sent(m.Replicate)
    assert buddy in ("n0", "n2")
    assert order.copy == desk.held("n1")[0]
    desk.holds(buddy, order.copy)
    assert not desk.state.membership.nodes["n1"].alive
    assert desk.complete_snapshots() == [6]


def test_nor_is_it_booted_before():
    desk = replaced(Remedy.REBOOT)
    assert desk.did(e.RebootNode) == []
    [(buddy, order)] = desk.sent(m.Replicate)
    desk.holds(buddy, order.copy)
    assert [x.node for x in desk.did(e.RebootNode)] == ["n1"]
    assert desk.complete_snapshots() == [6]


def test_a_part_that_nobody_can_keep_does_not_hold_it_up_for_ever():
    desk = replaced()
    for _ in range(2):
        name, order = desk.sent(m.Replicate)[-1]
        assert desk.state.membership.nodes["n1"].alive
        desk.refuses(name, order.copy)
    assert not desk.state.membership.nodes["n1"].alive


def test_a_newer_snapshot_makes_the_copy_superfluous():
    desk = replaced()
    desk.shards(9, "n0", "n2")
    assert not desk.state.membership.nodes["n1"].alive


def test_who_has_only_a_while_goes_with_it():
    desk = replaced()
    assert desk.state.membership.nodes["n1"].alive
    desk.do(e.NodeGoing("n1", "preempted", 0.1))
    assert not desk.state.membership.nodes["n1"].alive


def test_a_device_is_reset_with_the_memory_kept():
    desk = replaced(Remedy.RESET_DEVICE)
    assert [n for n, _ in desk.sent(m.Repair)] == ["n1"]
    assert desk.complete_snapshots() == [6]
    assert desk.sent(m.Replicate) == []


def test_while_only_a_part_of_the_state_lives_no_node_is_booted():
    """What is in its memory may be what all go on from."""
    desk = running(
        2, spares=1, shape=(2, 1), saving=Saving(SnapshotOptions("100", 0), 0, (TIER,)), health=WIDE
    )
    first, second = desk.members()
    desk.exits(second, -9)
    desk.parks(first, 5)
    finds(desk, "n2", severity=ERROR, remedy=Remedy.REBOOT)
    desk.wait(3.0)
    desk.exits(desk.killed().pop(), -9)
    assert desk.state.membership.nodes["n2"].health.then is Remedy.REBOOT
    assert desk.state.membership.phase is JobPhase.GATHERING
    assert desk.did(e.RebootNode) == []
    for worker in desk.workers(WorkerPhase.STARTING):
        desk.ready(worker)
    desk.commit(1)
    assert [x.node for x in desk.did(e.RebootNode)] == ["n2"]


def test_a_spare_that_becomes_what_is_missing_is_waited_for():
    desk = running(4, spares=1, shape=(2, 1), saving=Saving(SnapshotOptions("100", 0), 0, (TIER,)))
    desk.do(e.NodeGoing("n1", "drained", None))
    (spare,) = [w for w in desk.workers() if w.startswith("n4")]
    assert desk.told(spare, m.Rebuild) == [m.Rebuild(1)]
    desk.commit(7)
    desk.wait(2 * desk.core.timing.form_s)
    assert not any(desk.told(w, m.EndAtCommit) for w in desk.members())
    desk.gets_ready(spare, (2, 1), shard_index=1)
    assert all(desk.told(w, m.EndAtCommit) for w in desk.members())
