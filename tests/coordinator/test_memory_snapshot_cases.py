"""Snapshots and checkpoints, one situation after the other: who is asked for what, and where training goes on from."""

import msgspec
import pytest
from desk import TIER, Desk, copy_of, running

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import CoreState, JobPhase, WorkerPhase
from holdfast.coordinator.storage import memory_snapshots, queries
from holdfast.protocol import messages as m
from holdfast.protocol.job import Durable
from holdfast.protocol.job_options import SnapshotOptions
from holdfast.protocol.snapshots import DurableTier, Saving

EVERY_WHOLE = DurableTier("checkpoint", "1")


def asked(desk: Desk, newest: bool = False) -> list[tuple[str, int]]:
    """Who was asked for a copy of which step."""
    return [(node, order.copy.key.step) for node, order in desk.sent(m.Replicate, newest)]


def lose_all_workers(desk: Desk) -> None:
    """Every process dies; the machines, and what their agents hold, stay."""
    for worker in desk.workers():
        desk.exits(worker, -9)


def start_again(desk: Desk) -> list[m.JoinGeneration]:
    """Workers are ready again; returns what the members are told."""
    for worker in desk.workers(WorkerPhase.STARTING):
        desk.ready(worker)
    return [desk.told(w, m.JoinGeneration)[-1] for w in desk.members()]


def at_level_0(nodes: int = 3, **spec: object) -> Desk:
    """Unmodified scripts run; each saves a shard of its own."""
    desk = Desk(nodes, **spec)
    for i in range(nodes):
        desk.node(f"n{i}")
    for worker in desk.workers():
        desk.do(e.NodeSays(worker.partition(".")[0], m.Started(worker, 1, "log")))
    assert desk.state.membership.phase is JobPhase.RUNNING
    return desk


# ---------------------------------------------------------------- whole


def test_two_members_that_save_the_same_need_nothing_sent():
    desk = running(3)
    assert [desk.told(w, m.JoinGeneration)[0].saves for w in desk.members()] == [True, True, False]
    desk.snapshot(6, "n0")
    assert desk.complete_snapshots() == []
    desk.snapshot(6, "n1")
    assert desk.complete_snapshots() == [6]
    assert {node for node, said in desk.sent(m.SnapshotComplete) if said.step == 6} == {"n0", "n1", "n2"}
    assert not asked(desk)
    assert desk.records("snapshot")[0] | {"took_s": 0.0} == {
        "step": 6,
        "generation": 1,
        "world": 1,
        "nbytes": 1000,
        "nodes": 2,
        "took_s": 0.0,
    }


def test_a_spare_keeps_the_copy_of_a_job_of_one():
    desk = running(1, spares=1)
    copy = desk.snapshot(6, "n0")
    assert desk.complete_snapshots() == []
    node, order = desk.sent(m.Replicate)[0]
    assert (node, order.copy, [h.node for h in order.holders]) == ("n1", copy, ["n0"])
    desk.holds("n1", copy)
    assert desk.complete_snapshots() == [6]


def test_nobody_is_asked_twice():
    desk = running(1, spares=2)
    copy = desk.snapshot(6, "n0")
    desk.holds("n0", copy)
    desk.node("n3")
    assert len(asked(desk)) == 1


def test_replicas_that_differ_are_copies_of_each_other():
    """Each is a whole state; they differ in buffers that are nobody else's business."""
    desk = running(2, min_nodes=2, spares=1)
    desk.snapshot(6, "n0", bits="a")
    desk.snapshot(6, "n1", bits="b")
    assert desk.complete_snapshots() == [6]
    assert not asked(desk)
    lose_all_workers(desk)
    forms = start_again(desk)
    own = {form.generation.members[form.rank].node: form.copy.shard.blob.xxh3 for form in forms}
    assert (own["n0"], own["n1"]) == ("a", "b")


def test_a_saver_that_cannot_keep_it_is_replaced_by_another_node():
    desk = running(3)
    copy = desk.snapshot(6, "n0")
    desk.refuses("n1", copy)
    assert asked(desk) == [("n2", 6)]
    desk.holds("n2", copy)
    assert desk.complete_snapshots() == [6]


def test_a_node_that_refused_is_not_asked():
    desk = running(1, spares=2)
    copy = desk.snapshot(6, "n0")
    first = asked(desk)[0][0]
    desk.refuses(first, copy)
    second = asked(desk)[1][0]
    desk.refuses(second, copy)
    assert {first, second} == {"n1", "n2"}
    assert desk.complete_snapshots() == [6]  # nobody is left to ask


def test_a_member_without_snapshot_memory_is_no_saver():
    """It would be waited for, and nothing would ever become whole."""
    desk = Desk(2)
    desk.node("n0")
    desk.node("n1", port=0)
    for worker in desk.workers():
        desk.ready(worker)
    assert [desk.told(w, m.JoinGeneration)[0].saves for w in desk.members()] == [True, False]
    desk.snapshot(6, "n0")
    assert desk.complete_snapshots() == [6]


def test_a_saver_that_has_gone_on_is_not_waited_for():
    """Its worker gave the copy up in silence; what it says of the next snapshot tells."""
    desk = running(3)
    desk.snapshot(6, "n0")
    desk.snapshot(7, "n1")
    assert [step for _, step in asked(desk)] == [6]


def test_a_saver_that_dies_before_its_copy_is_replaced_when_all_have_left():
    desk = running(3)
    desk.snapshot(6, "n0")
    desk.exits("n1.0#2", -9)
    desk.parks("n0.0#1", 6)
    assert not asked(desk)
    desk.parks("n2.0#3", 6)
    assert asked(desk)[0][1] == 6


def test_too_few_nodes_is_said_once():
    desk = running(1)
    desk.snapshot(6, "n0")
    desk.snapshot(7, "n0")
    assert desk.complete_snapshots() == [6, 7]
    assert desk.records("few-copies") == [{"nodes": 1, "wanted": 2}]
    desk.node("n1")
    copy = desk.snapshot(8, "n0")
    desk.holds("n1", copy)
    desk.lose("n1")
    desk.snapshot(9, "n0")
    assert len(desk.records("few-copies")) == 2


def test_no_copies_are_wanted():
    desk = running(3, saving=Saving(SnapshotOptions(copies=0)))
    assert [desk.told(w, m.JoinGeneration)[0].saves for w in desk.members()] == [True, False, False]
    desk.snapshot(6, "n0")
    assert desk.complete_snapshots() == [6]
    assert not desk.records("few-copies")


def test_two_copies_are_asked_for_one_by_one_missing():
    desk = running(1, spares=4, saving=Saving(SnapshotOptions(copies=2)))
    copy = desk.snapshot(6, "n0")
    assert len(asked(desk)) == 2
    other = next(f"n{i}" for i in range(1, 5) if (f"n{i}", 6) not in asked(desk))
    desk.holds(other, copy)  # nobody asked it, but it has it
    assert len(asked(desk)) == 2
    desk.holds(asked(desk)[0][0], copy)
    assert desk.complete_snapshots() == [6]


def test_skipped_is_said_once_until_one_is_whole_again():
    desk = running(2)
    for step in (6, 7, 8):
        desk.refuses("n0", copy_of(step))
        desk.refuses("n1", copy_of(step))
    assert [x["step"] for x in desk.records("snapshot-skipped")] == [6]
    assert desk.state.storage.skipped == 6
    desk.snapshot(9, "n0", "n1")
    assert desk.state.storage.skipped == 0
    desk.refuses("n0", copy_of(10))
    assert [x["step"] for x in desk.records("snapshot-skipped")] == [6, 10]


def test_a_latecomer_hears_that_a_newer_one_is_whole():
    desk = running(2)
    desk.snapshot(7, "n0", "n1")
    desk.holds("n0", copy_of(6))
    assert desk.sent(m.SnapshotComplete, newest=True) == [("n0", m.SnapshotComplete(7))]
    assert [x.step for x in desk.state.storage.snapshots] == [7]


def test_only_the_last_two_whole_ones_are_kept():
    desk = running(2)
    for step in range(6, 20):
        desk.snapshot(step, "n0", "n1")
    assert desk.complete_snapshots() == [18, 19]


def test_snapshots_that_never_become_whole_do_not_pile_up():
    """And those that nobody holds do not displace one that could be restored."""
    desk = running(2)
    desk.snapshot(6, "n0")
    for step in range(7, 60):
        desk.refuses("n0", copy_of(step))
    assert len(desk.state.storage.snapshots) <= 2 * memory_snapshots.KEPT_PARTIAL + 1
    assert desk.state.storage.snapshots[0].step == 6
    for step in range(60, 99):
        desk.holds("n0", copy_of(step))
    assert len(desk.state.storage.snapshots) <= 2 * memory_snapshots.KEPT_PARTIAL + 1


# ---------------------------------------------------------------- level 0: every rank has a shard of its own


def test_shards_are_whole_when_every_rank_is_held_twice():
    desk = at_level_0()
    for rank in range(3):
        assert desk.complete_snapshots() == []
        desk.holds(f"n{rank}", copy_of(6, rank=rank, world=3, bits=f"r{rank}"))
    orders = desk.sent(m.Replicate)
    assert sorted(order.copy.key.rank for _, order in orders) == [0, 1, 2]
    for node, order in orders:
        assert desk.complete_snapshots() == []
        desk.holds(node, order.copy)
    assert desk.complete_snapshots() == [6]
    assert desk.records("snapshot")[0]["nbytes"] == 3000


def test_a_shard_is_copied_before_the_others_are_there():
    desk = at_level_0()
    desk.holds("n1", copy_of(6, rank=1, world=3))
    assert len(asked(desk)) == 1


def test_a_rank_that_brings_nothing_makes_room_for_the_next_snapshot():
    """Otherwise the others' slots would be taken for ever by one that never becomes whole."""
    desk = at_level_0()
    desk.holds("n0", copy_of(6, rank=0, world=3))
    desk.refuses("n2", copy_of(6, rank=2, world=3))
    assert ("n0", m.ForgetSnapshots(5)) in desk.sent(m.ForgetSnapshots, newest=True)
    desk.holds("n1", copy_of(6, rank=1, world=3))
    assert desk.sent(m.ForgetSnapshots, newest=True) == [("n1", m.ForgetSnapshots(5))]
    for rank in range(3):
        desk.holds(f"n{rank}", copy_of(7, rank=rank, world=3))
    for node, order in desk.sent(m.Replicate):
        desk.holds(node, order.copy)
    assert desk.complete_snapshots() == [7]


def test_a_whole_snapshot_that_lost_a_rank_is_none():
    """Its shards could not be stored, and later ones would be taken for older."""
    desk = at_level_0(saving=Saving(SnapshotOptions(copies=0), tiers=(EVERY_WHOLE,)))
    for rank in range(3):
        desk.holds(f"n{rank}", copy_of(9, rank=rank, world=3))
    assert desk.complete_snapshots() == [9]
    desk.lose("n2")
    assert desk.state.storage.snapshots == []
    assert queries.newest_complete(desk.core) is None


def test_ranks_with_equal_bytes_write_their_row_once():
    desk = at_level_0(saving=Saving(SnapshotOptions(copies=0), tiers=(EVERY_WHOLE,)))
    for rank, bits in enumerate(("same", "same", "other")):
        desk.holds(f"n{rank}", copy_of(6, rank=rank, world=3, bits=bits))
    orders = {order.key.rank: order.blob for _, order in desk.sent(m.StoreShard)}
    assert orders == {0: "", 1: "step-6/row-0", 2: ""}


# ---------------------------------------------------------------- nodes that are lost


def test_a_node_lost_before_it_is_whole_is_replaced():
    desk = running(3)
    copy = desk.snapshot(6, "n0")
    desk.lose("n1")
    for worker in ("n0.0#1", "n2.0#3"):
        desk.parks(worker, 6)
    assert asked(desk) == [("n2", 6)]
    desk.holds("n2", copy)
    assert desk.complete_snapshots() == [6]


def test_copies_of_a_whole_snapshot_are_brought_up_again():
    desk = running(2, spares=1)
    copy = desk.snapshot(6, "n0", "n1")
    desk.lose("n1")
    desk.parks("n0.0#1", 6)
    assert asked(desk) == [("n2", 6)]
    desk.holds("n2", copy)
    assert len(desk.records("snapshot")) == 1
    assert not asked(desk, newest=True)


def test_a_node_that_was_asked_and_is_lost_is_replaced():
    desk = running(1, spares=2)
    desk.snapshot(6, "n0")
    first = asked(desk)[0][0]
    desk.lose(first)
    assert [node for node, _ in asked(desk)] == [first, *({"n1", "n2"} - {first})]


def test_a_snapshot_goes_with_its_last_holder():
    desk = running(2)
    desk.snapshot(6, "n0", "n1")
    desk.lose("n0")
    desk.lose("n1")
    assert desk.state.storage.snapshots == []


# ---------------------------------------------------------------- where to go on from


def test_memory_before_an_older_checkpoint():
    desk = running(2, min_nodes=2)
    desk.do(e.DurableFound(Durable(3, "kept")))
    copy = desk.snapshot(6, "n0", "n1")
    desk.commit(8)
    lose_all_workers(desk)
    forms = start_again(desk)
    assert [(f.generation.start, f.restore, f.copy, f.durable) for f in forms] == [(6, True, copy, None)] * 2
    assert desk.state.membership.lost_steps == 2
    assert desk.records("formed")[-1]["source"] == "memory"


def test_a_newer_checkpoint_before_memory():
    desk = running(2, min_nodes=2)
    desk.snapshot(6, "n0", "n1")
    desk.do(e.DurableFound(Durable(7, "kept")))
    lose_all_workers(desk)
    forms = start_again(desk)
    assert [(f.generation.start, f.copy, f.holders) for f in forms] == [(7, None, ())] * 2
    assert forms[0].durable == Durable(7, "kept")
    assert desk.state.storage.snapshots[0].step == 6  # still of this history


def test_one_copy_is_enough_to_go_on_from():
    desk = running(2, min_nodes=2)
    desk.snapshot(6, "n0", "n1")
    desk.snapshot(7, "n1")
    lose_all_workers(desk)
    assert [f.generation.start for f in start_again(desk)] == [7, 7]


def test_live_state_before_anything_saved():
    desk = running(2, spares=1)
    desk.snapshot(6, "n0", "n1")
    desk.commit(8)
    desk.exits("n0.0#1", -9)
    desk.parks("n1.0#2", 8)
    form = desk.told("n2.0#3", m.JoinGeneration)[-1]
    assert (form.generation.start, form.copy, bool(form.donors)) == (8, None, True)


def test_its_own_memory_is_the_first_source():
    desk = running(3, min_nodes=3)
    desk.snapshot(6, "n0", "n1")
    lose_all_workers(desk)
    start_again(desk)
    assert [h.node for h in desk.holders("n0")] == ["n0", "n1"]
    assert [h.node for h in desk.holders("n1")] == ["n1", "n0"]
    assert {h.node for h in desk.holders("n2")} == {"n0", "n1"}


def test_a_script_is_told_what_there_is():
    desk = at_level_0(2, saving=Saving(SnapshotOptions(copies=0)))
    worker = desk.worker_on("n1")
    desk.says(worker, m.FindSnapshot(1))
    assert desk.told(worker, m.SnapshotFound) == [m.SnapshotFound(1)]
    copies = [copy_of(6, rank=rank, world=2) for rank in range(2)]
    for rank, copy in enumerate(copies):
        desk.holds(f"n{rank}", copy)
    desk.do(e.DurableFound(Durable(5, "kept")))
    desk.says(worker, m.FindSnapshot(2))
    found = desk.told(worker, m.SnapshotFound)[-1]
    assert [(copy, [h.node for h in holders]) for copy, holders in found.copies] == [
        (copies[0], ["n0"]),
        (copies[1], ["n1"]),
    ]
    assert found.durable == Durable(5, "kept")
    desk.do(e.DurableFound(Durable(7, "kept")))
    desk.says(worker, m.FindSnapshot(3))
    assert desk.told(worker, m.SnapshotFound)[-1] == m.SnapshotFound(3, (), Durable(7, "kept"))


def test_a_snapshot_that_nobody_can_read_is_given_up_for_an_older_one():
    """A node may have less than it once said: its slot was used again."""
    desk = running(2, min_nodes=2)
    desk.do(e.DurableFound(Durable(3, "kept")))
    desk.snapshot(6, "n0", "n1")
    lose_all_workers(desk)
    start_again(desk)
    for attempt in range(1, memory_snapshots.MAX_UNREAD + 1):
        assert desk.state.membership.generation.start == 6, attempt
        for worker in desk.members():
            desk.says(worker, m.CollectiveError(desk.state.membership.number, -1, "nobody has it whole"))
        for worker in desk.members():
            desk.parks(worker, None)
    assert desk.state.membership.generation.start == 3
    assert desk.records("snapshot-unreadable") == [{"step": 6, "generation": 1}]


def test_a_broken_connection_says_nothing_against_the_snapshot():
    desk = running(2, min_nodes=2)
    desk.snapshot(6, "n0", "n1")
    lose_all_workers(desk)
    start_again(desk)
    for _ in range(memory_snapshots.MAX_UNREAD + 1):
        for worker in desk.members():
            desk.says(worker, m.CollectiveError(desk.state.membership.number, 6, "connection reset"))
        for worker in desk.members():
            desk.parks(worker, None)
        desk.wait(3.0)
    assert desk.state.membership.generation.start == 6


# ---------------------------------------------------------------- a past that did not happen


def gone_back() -> Desk:
    """Generation 1 came to 9, and generation 2 went on from the checkpoint of step 3."""
    desk = running(2, min_nodes=2)
    desk.do(e.DurableFound(Durable(3, "kept")))
    desk.commit(9)
    lose_all_workers(desk)
    start_again(desk)
    assert (desk.state.membership.number, desk.state.membership.generation.start) == (2, 3)
    return desk


def test_going_back_forgets_what_was_saved_of_later_steps():
    desk = running(2, min_nodes=2)
    desk.snapshot(6, "n0", "n1")
    desk.do(e.DurableFound(Durable(7, "kept")))
    desk.state.storage.snapshots += [
        msgspec.structs.replace(desk.state.storage.snapshots[0], step=8, world=2, complete=False)
    ]
    lose_all_workers(desk)
    start_again(desk)
    assert [x.step for x in desk.state.storage.snapshots] == [6]
    told = [node for node, said in desk.sent(m.ForgetSnapshots) if said.above_step == 7]
    assert told == ["n0", "n1"]


def test_nodes_that_hold_nothing_forget_which_snapshot_was_whole():
    """Else they would take the snapshots of the new history for older ones, and write over them."""
    desk = running(2, spares=1)
    desk.snapshot(9, "n0", "n1")
    desk.lose("n0")
    desk.lose("n1")
    start_again(desk)
    assert desk.state.membership.generation.start == 0
    assert ("n2", m.ForgetSnapshots(0)) in desk.sent(m.ForgetSnapshots)


def test_a_late_word_of_the_other_past_is_not_believed():
    desk = gone_back()
    desk.snapshot(8, "n0", "n1", generation=1)
    assert desk.state.storage.snapshots == []
    desk.refuses("n0", copy_of(9, generation=1))
    assert desk.state.storage.snapshots == []
    desk.snapshot(2, "n0", generation=1)  # but this one happened
    assert [x.step for x in desk.state.storage.snapshots] == [2]


def test_an_agent_that_missed_it_forgets_when_it_is_back():
    desk = gone_back()
    desk.crash()
    desk.back(held={"n0": (copy_of(8, generation=1),), "n1": (copy_of(4, generation=2),)})
    assert [x.step for x in desk.state.storage.snapshots] == [4]
    told = desk.sent(m.ForgetSnapshots)[-1]
    assert told == ("n0", m.ForgetSnapshots(3))  # n1 has one of the generation after it


def test_what_a_new_agent_adopted_counts_only_if_it_happened_in_every_past():
    desk = gone_back()
    desk.node("n5", copies=(copy_of(8, generation=0), copy_of(3, generation=0)))
    assert [x.step for x in desk.state.storage.snapshots] == [3]


def test_what_is_left_of_an_earlier_run_is_not_ahead_of_this_one():
    desk = running(2)
    desk.node("n5", copies=(copy_of(400, generation=0),))
    assert desk.state.storage.snapshots == []


def test_a_job_goes_on_from_what_its_agents_adopted():
    desk = Desk(2)
    for i in range(2):
        desk.node(f"n{i}", copies=(copy_of(40, generation=0),))
    for worker in desk.workers():
        desk.ready(worker)
    form = desk.told(desk.members()[0], m.JoinGeneration)[0]
    assert (form.generation.start, form.copy) == (40, copy_of(40, generation=0))


def test_many_rewinds_are_few_to_remember():
    desk = running(1)
    for number in range(1, 3 * memory_snapshots.KEPT_REWINDS):
        desk.state.membership.number = number
        memory_snapshots.went_back(desk.core, number * 10)
    assert len(desk.state.storage.rewinds) == memory_snapshots.KEPT_REWINDS
    assert not memory_snapshots.happened(desk.core, copy_of(15, generation=1).key)
    assert memory_snapshots.happened(desk.core, copy_of(15, generation=desk.state.membership.number).key)
    memory_snapshots.went_back(desk.core, 5)
    assert [r.start for r in desk.state.storage.rewinds] == [5]


# ---------------------------------------------------------------- durable tiers


def test_a_checkpoint_is_shards_and_then_a_manifest():
    desk = running(2, saving=Saving(tiers=(EVERY_WHOLE,)))
    copy = desk.snapshot(6, "n0", "n1")
    node, order = desk.sent(m.StoreShard)[0]
    assert (node, order) == ("n0", m.StoreShard("checkpoint", copy.key))
    desk.do(e.NodeSays(node, m.Stored(tier="checkpoint", key=copy.key, shard=copy.shard)))
    assert desk.sent(m.Publish) == [("n0", m.Publish(EVERY_WHOLE, 6, (copy.shard,)))]
    assert desk.state.storage.durable is None
    desk.do(e.NodeSays("n0", m.Published("checkpoint", 6)))
    assert desk.state.storage.durable == Durable(6, "checkpoint")
    assert desk.records("saved")[0]["step"] == 6


def test_a_word_said_twice_changes_nothing():
    desk = running(2, saving=Saving(tiers=(EVERY_WHOLE,)))
    copy = desk.snapshot(6, "n0", "n1")
    for _ in range(2):
        desk.do(e.NodeSays("n0", m.Stored(tier="checkpoint", key=copy.key, shard=copy.shard)))
    for _ in range(2):
        desk.do(e.NodeSays("n0", m.Published("checkpoint", 6)))
    assert (len(desk.sent(m.Publish)), len(desk.records("saved"))) == (1, 1)


@pytest.mark.parametrize(
    ("every", "steps", "stored"),
    [
        ("4", (6, 7, 9, 11, 13), [6, 9, 13]),  # the first after every fourth step
        ("0", (6, 8, 12), []),
        ("2s", (6, 7, 8, 9, 10, 11), [8, 11]),
        ("auto", (6, 7, 8), []),  # a job that does not fail has time
    ],
)
def test_the_cadence_of_a_tier(every, steps, stored):
    desk = running(2, saving=Saving(tiers=(DurableTier("checkpoint", every),)))
    for step in steps:
        desk.wait(0.9)
        desk.snapshot(step, "n0", "n1")
        desk.stores()
    assert [x["step"] for x in desk.records("saved")] == stored


def test_auto_comes_in_time():
    desk = running(2, saving=Saving(tiers=(DurableTier("checkpoint", "auto"),)))
    for step in range(6, 40):
        desk.now += 10.0
        for node in desk.core.alive_nodes():
            node.last_seen_s = desk.now
        desk.snapshot(step, "n0", "n1")
        desk.stores()
    gaps = [x["step"] for x in desk.records("saved")]
    assert 2 <= len(gaps) <= 20


def test_a_failure_to_store_is_said_once_and_tried_again_with_a_later_one():
    desk = running(2, saving=Saving(tiers=(EVERY_WHOLE,)))
    for step in (6, 7):
        desk.snapshot(step, "n0", "n1")
        desk.stores(reason="the disk is full")
    assert desk.records("tier-failed") == [{"url": "checkpoint", "step": 6, "reason": "the disk is full"}]
    assert desk.state.storage.storing == []
    desk.snapshot(8, "n0", "n1")
    desk.stores()
    assert desk.state.storage.durable == Durable(8, "checkpoint")
    desk.snapshot(9, "n0", "n1")
    desk.stores(reason="the disk is full")
    assert len(desk.records("tier-failed")) == 2


def test_a_manifest_that_could_not_be_written_is_a_failure():
    desk = running(2, saving=Saving(tiers=(EVERY_WHOLE,)))
    desk.snapshot(6, "n0", "n1")
    desk.stores(publishes=False)
    desk.do(e.NodeSays("n0", m.Published("checkpoint", 6, "no space")))
    assert (desk.state.storage.durable, desk.state.storage.storing) == (None, [])
    assert desk.records("tier-failed")[0]["reason"] == "no space"


def test_a_node_lost_while_storing_leaves_it_to_the_next_snapshot():
    desk = running(2, spares=1, saving=Saving(tiers=(EVERY_WHOLE,)))
    desk.snapshot(6, "n0", "n1")
    desk.lose("n0")
    assert desk.state.storage.storing == []
    assert not desk.records("tier-failed")
    copy = desk.snapshot(7, "n1")
    desk.parks("n1.0#2", 7)
    desk.holds("n2", copy)
    desk.stores()
    assert desk.state.storage.durable == Durable(7, "checkpoint")


def test_one_checkpoint_at_a_time_goes_to_a_tier():
    desk = running(2, saving=Saving(tiers=(EVERY_WHOLE,)))
    desk.snapshot(6, "n0", "n1")
    desk.snapshot(7, "n0", "n1")
    assert [order.key.step for _, order in desk.sent(m.StoreShard)] == [6]


def test_two_tiers_are_each_on_their_own():
    tiers = (EVERY_WHOLE, DurableTier("archive", "5"))
    desk = running(2, saving=Saving(tiers=tiers))
    desk.snapshot(4, "n0", "n1")
    desk.stores(tier="checkpoint")
    desk.snapshot(5, "n0", "n1")
    desk.stores(reason="offline", tier="checkpoint")
    desk.stores(tier="archive")
    assert [(x["step"], x["url"]) for x in desk.records("saved")] == [(4, "checkpoint"), (5, "archive")]
    assert desk.state.storage.failing_tiers == ["checkpoint"]
    assert desk.state.storage.durable == Durable(5, "archive")


def test_going_back_stops_storing():
    """What is under way is waited for, so that nothing of it is taken for the same step of the new history."""
    desk = running(2, saving=Saving(tiers=(EVERY_WHOLE,)))
    old = desk.snapshot(6, "n0", "n1")
    desk.lose("n1")  # with it, and with n0's worker and memory, all is gone
    desk.exits("n0.0#1", -9)
    desk.state.storage.snapshots = []
    start_again(desk)
    assert desk.state.membership.generation.start == 0
    desk.snapshot(5, "n0")
    assert [order.key.step for _, order in desk.sent(m.StoreShard)] == [6]
    desk.do(e.NodeSays("n0", m.Stored(tier="checkpoint", key=old.key, shard=old.shard)))
    assert not desk.sent(m.Publish)
    new = desk.snapshot(6, "n0", bits="b")
    assert desk.sent(m.StoreShard)[-1] == ("n0", m.StoreShard("checkpoint", new.key))


def test_a_manifest_of_the_other_past_is_not_where_training_goes_on():
    desk = running(2, min_nodes=2, saving=Saving(tiers=(EVERY_WHOLE,)))
    desk.snapshot(6, "n0", "n1")
    desk.stores(publishes=False)
    desk.exits("n0.0#1", -9)
    desk.exits("n1.0#2", -9)
    desk.state.storage.snapshots = []
    start_again(desk)
    desk.do(e.NodeSays("n0", m.Published("checkpoint", 6)))
    assert (desk.state.storage.durable, desk.state.storage.storing) == (None, [])


def test_nothing_is_stored_once_the_job_is_to_stop():
    desk = running(2, saving=Saving(tiers=(EVERY_WHOLE,)))
    desk.do(e.StopRequested("enough"))
    desk.snapshot(6, "n0", "n1")
    assert not desk.sent(m.StoreShard)


def test_a_job_without_tiers_stops_all_at_once():
    desk = running(2, saving=Saving())
    desk.do(e.StopRequested("enough"))
    for worker in desk.members():
        desk.parks(worker, 6)
    assert [desk.told(w, m.Stop) for w in desk.members()] == [[m.Stop()], [m.Stop()]]


def test_a_state_that_a_tier_has_is_not_written_again_at_the_end():
    desk = running(2, saving=Saving(tiers=(EVERY_WHOLE,)))
    desk.snapshot(6, "n0", "n1")
    desk.stores()
    desk.do(e.StopRequested("enough"))
    for worker in desk.members():
        desk.parks(worker, 6)
    assert [desk.told(w, m.Stop)[0].save_to for w in desk.members()] == [None, None]


def test_a_failed_save_at_the_end_is_said():
    desk = running(1)
    desk.do(e.StopRequested("enough"))
    desk.parks("n0.0#1", 6)
    assert desk.told("n0.0#1", m.Stop)[0].save_to == TIER
    desk.says("n0.0#1", m.Saved(6, "checkpoint", "no space"))
    assert desk.state.storage.durable is None
    assert desk.records("tier-failed")[0]["reason"] == "no space"


# ---------------------------------------------------------------- the coordinator dies


def test_the_state_survives_as_it_is():
    tiers = (EVERY_WHOLE, DurableTier("archive", "1"))
    desk = running(2, spares=1, saving=Saving(tiers=tiers))
    desk.snapshot(6, "n0", "n1")
    desk.stores(publishes=False, tier="archive")
    desk.holds("n0", copy_of(7))
    desk.refuses("n1", copy_of(7))
    memory_snapshots.went_back(desk.core, 50)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(desk.state), type=CoreState)
    assert state == desk.state
    assert any(-1 in x.waiting for x in state.storage.storing)


def test_what_agents_hold_is_known_after_a_restart():
    desk = running(2)
    desk.crash()
    held = (copy_of(6),)
    desk.back(held={"n0": held, "n1": held})
    assert desk.complete_snapshots() == [6]


def test_what_agents_no_longer_hold_is_known_after_a_restart():
    desk = running(2, spares=1)
    desk.snapshot(6, "n0", "n1")
    desk.crash()
    desk.back(held={"n0": (copy_of(6),), "n1": (), "n2": ()})
    assert desk.state.storage.snapshots[0].shards[0].nodes == ["n0"]


def test_a_lost_order_to_copy_is_given_again():
    desk = running(1, spares=1)
    copy = desk.snapshot(6, "n0")
    assert asked(desk) == [("n1", 6)]
    desk.crash()
    desk.back("n0")
    desk.back("n1")
    assert asked(desk) == [("n1", 6), ("n1", 6)]
    desk.holds("n1", copy)
    assert desk.complete_snapshots() == [6]


def test_a_lost_order_to_store_is_given_again():
    """Else the tier would wait for it for ever."""
    desk = running(2, saving=Saving(tiers=(EVERY_WHOLE,)))
    copy = desk.snapshot(6, "n0", "n1")
    desk.crash()
    desk.back()
    assert desk.sent(m.StoreShard)[1:] == [("n0", m.StoreShard("checkpoint", copy.key))]
    desk.do(e.NodeSays("n0", m.Stored(tier="checkpoint", key=copy.key, shard=copy.shard)))
    desk.crash()
    desk.back()
    assert len(desk.sent(m.Publish)) == 2
    desk.do(e.NodeSays("n0", m.Published("checkpoint", 6)))
    assert desk.state.storage.durable == Durable(6, "checkpoint")


def test_an_agent_hears_again_which_snapshot_is_whole():
    desk = running(2)
    desk.snapshot(6, "n0", "n1")
    desk.crash()
    desk.back("n1")
    assert ("n1", m.SnapshotComplete(6)) in desk.sent(m.SnapshotComplete, newest=True)


# ---------------------------------------------------------------- racks


def test_the_copy_goes_to_another_rack():
    desk = running(1, spares=2, places=(("a",), ("a",), ("b",)))
    desk.snapshot(6, "n0")
    assert asked(desk) == [("n2", 6)]


def test_when_the_buddy_cannot_another_rack_is_still_the_first_choice():
    desk = running(1, spares=4, places=(("a",), ("a",), ("b",), ("a",), ("b",)))
    copy = desk.snapshot(6, "n0")
    first = asked(desk)[0][0]
    desk.refuses(first, copy)
    assert {node for node, _ in asked(desk)} == {"n2", "n4"}


def test_those_who_save_stand_in_different_racks():
    desk = running(3, places=(("a",), ("a",), ("b",)))
    assert [desk.told(w, m.JoinGeneration)[0].saves for w in desk.members()] == [True, False, True]


def test_a_refusal_that_comes_before_anybody_holds_the_last_state_is_not_waited_for():
    desk = running(2)
    for worker in desk.members():
        desk.says(worker, m.Done(committed=6, params_xxh3="p0", loss=0.1, held=True))
    desk.refuses("n0", copy_of(6), "its row went bad")
    for worker in list(desk.workers()):
        desk.exits(worker, 0)
    assert desk.state.membership.phase is not JobPhase.ENDED  # n1 has not said whether it holds it
    desk.holds("n1", copy_of(6))
    desk.stores()
    assert desk.state.membership.phase is JobPhase.ENDED
    assert desk.state.storage.durable.step == 6
