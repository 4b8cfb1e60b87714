"""A snapshot that few nodes hold never retires one that all hold, and "not now" is not "never"."""

from __future__ import annotations

import pytest
from desk import TIER, Desk, running

from holdfast.coordinator.kernel import events as e
from holdfast.protocol import messages as m
from holdfast.protocol.job_options import SnapshotOptions
from holdfast.protocol.snapshots import Copy, Lack, Saving


def sharded(step: int = 6) -> Desk:
    """Two nodes with a shard each, and a snapshot of which each holds both."""
    desk = running(2, shape=(2, 1), saving=Saving(SnapshotOptions("1", 1), 0, (TIER,)))
    begins(desk, step)
    copies_come(desk, step)
    assert desk.complete_snapshots() == [step]
    assert told(desk) == m.SnapshotComplete(step)
    return desk


def begins(desk: Desk, step: int) -> None:
    """Each node's own worker saves its shard; each is asked for a copy of the other's."""
    for shard_index in (0, 1):
        desk.holds(f"n{shard_index}", desk.shard(step, shard_index))


def copies_come(desk: Desk, step: int) -> None:
    for shard_index in (0, 1):
        desk.holds(f"n{1 - shard_index}", desk.shard(step, shard_index))


def refuses(desk: Desk, node: str, copy: Copy, lack: Lack | None) -> None:
    desk.do(e.NodeSays(node, m.SnapshotRejected(copy.key, "so it is", lack)))


def copies_fail(desk: Desk, step: int, lack: Lack | None = None) -> None:
    for shard_index in (0, 1):
        refuses(desk, f"n{1 - shard_index}", desk.shard(step, shard_index), lack)


def told(desk: Desk) -> m.SnapshotComplete:
    """What agents know now: all the same."""
    last = dict(desk.sent(m.SnapshotComplete))
    assert len(set(last.values())) == 1
    return last["n0"]


def asked(desk: Desk, newest: bool = False) -> list[tuple[str, int]]:
    return [(node, x.copy.key.step) for node, x in desk.sent(m.Replicate, newest)]


def remembered(desk: Desk) -> list[int]:
    return [x.step for x in desk.state.storage.snapshots]


def goes_on_from(desk: Desk, lost: str) -> int:
    """A node is lost with a shard of the live state; another takes its place. Returns the step that training goes on from."""
    desk.lose(lost)
    desk.node("n2")
    for worker in [w.name for w in desk.core.alive_workers()]:
        if worker.startswith("n2"):
            desk.ready(worker)
        elif worker in desk.members():
            desk.parks(worker, desk.state.membership.committed)
    for worker in [w.name for w in desk.core.alive_workers() if w.ready is None]:
        desk.ready(worker)
    assert desk.state.membership.number == 2
    return desk.state.membership.generation.start


def test_a_node_without_a_slot_now_is_asked_again_when_it_has_one():
    desk = sharded()
    begins(desk, 8)
    begins(desk, 10)
    copies_fail(desk, 10, Lack.SLOT)
    assert desk.complete_snapshots() == [6]  # those of 8 are on their way, and make room when they have come
    before = len(asked(desk))
    copies_come(desk, 8)
    assert asked(desk)[before:] == [("n1", 10), ("n0", 10)]
    assert told(desk) == m.SnapshotComplete(8)
    copies_come(desk, 10)
    assert desk.complete_snapshots()[-1] == 10
    assert told(desk) == m.SnapshotComplete(10)


def test_it_is_asked_again_too_when_what_was_on_its_way_failed():
    desk = sharded()
    begins(desk, 8)
    begins(desk, 10)
    copies_fail(desk, 10, Lack.SLOT)
    refuses(desk, "n1", desk.shard(8, 0), None)
    assert asked(desk, newest=True) == [("n1", 10)]
    refuses(desk, "n0", desk.shard(8, 1), None)
    assert ("n0", 10) in asked(desk, newest=True)
    copies_come(desk, 10)
    assert told(desk) == m.SnapshotComplete(10)


def test_where_nothing_will_make_room_it_is_whole_as_it_is_and_the_older_one_stays():
    desk = sharded()
    begins(desk, 8)
    copies_fail(desk, 8, Lack.SLOT)
    assert desk.complete_snapshots() == [6, 8]
    assert told(desk) == m.SnapshotComplete(8, kept=6)


def test_a_snapshot_with_fewer_copies_is_whole_and_the_one_with_all_is_kept():
    desk = sharded()
    for step in (8, 10, 12):
        begins(desk, step)
        copies_fail(desk, step)
        assert desk.state.storage.snapshots[-1].step == step
        assert desk.state.storage.snapshots[-1].complete
        assert told(desk) == m.SnapshotComplete(step, kept=6)
    assert 6 in remembered(desk)
    assert len(remembered(desk)) <= 3
    assert desk.records("few-copies")


def test_when_one_has_as_many_again_the_older_one_goes():
    desk = sharded()
    begins(desk, 8)
    copies_fail(desk, 8)
    begins(desk, 10)
    copies_come(desk, 10)
    assert told(desk) == m.SnapshotComplete(10)
    assert 6 not in remembered(desk)


def test_after_a_node_is_lost_training_goes_on_from_the_one_that_is_left_whole():
    desk = sharded()
    for step in (8, 10):
        begins(desk, step)
        copies_fail(desk, step)
    desk.commit(11)
    assert goes_on_from(desk, "n0") == 6


def test_the_newest_is_gone_on_from_while_it_is_there():
    desk = sharded()
    begins(desk, 8)
    copies_fail(desk, 8)
    desk.commit(9)
    for worker in list(desk.members()):
        desk.exits(worker, -9)
    for worker in desk.workers():
        desk.ready(worker)
    assert desk.state.membership.generation.start == 8


def test_an_older_one_with_no_more_copies_than_the_newest_is_not_kept():
    desk = sharded()
    desk.lose("n1")  # each shard of 6 has one holder now
    assert told(desk) == m.SnapshotComplete(6)
    desk.node("n2")
    assert ("n2", 6) in asked(desk, newest=True)


def test_for_want_of_memory_there_are_fewer_copies_and_nothing_older_is_kept():
    """What is kept would take the memory of all that come after it."""
    desk = sharded()
    begins(desk, 8)
    copies_fail(desk, 8, Lack.MEMORY)
    assert told(desk) == m.SnapshotComplete(8)


@pytest.mark.parametrize("own", [True, False])
def test_what_is_kept_gives_way_when_the_next_one_does_not_fit_beside_it(own):
    desk = sharded()
    begins(desk, 8)
    copies_fail(desk, 8)
    assert told(desk) == m.SnapshotComplete(8, kept=6)
    if own:
        refuses(desk, "n0", desk.shard(10, 0), Lack.MEMORY)
    else:
        begins(desk, 10)
        before = len(asked(desk))
        refuses(desk, "n1", desk.shard(10, 0), Lack.MEMORY)
        assert asked(desk)[before:] == [("n1", 10)]  # now it fits
    assert told(desk) == m.SnapshotComplete(8)
    begins(desk, 12)
    copies_come(desk, 12)
    assert told(desk) == m.SnapshotComplete(12)


def test_an_agent_that_comes_back_is_told_what_is_kept():
    desk = sharded()
    begins(desk, 8)
    copies_fail(desk, 8)
    desk.crash()
    desk.actions.clear()
    desk.back()
    assert told(desk) == m.SnapshotComplete(8, kept=6)


def test_a_saver_without_a_slot_now_gets_a_copy_from_the_other_later():
    """Replicas that hold the same: what one cannot save itself it may still hold."""
    desk = running(2, saving=Saving(SnapshotOptions("1", 1), 0, (TIER,)))
    copy = desk.snapshot(6, "n0", "n1")
    other = desk.snapshot(8, "n0")
    refuses(desk, "n1", other, Lack.SLOT)
    assert told(desk) == m.SnapshotComplete(8, kept=6)
    assert ("n1", 8) in asked(desk, newest=True)  # nothing is kept there but 6, which has a slot of its own
    desk.holds("n1", other)
    assert told(desk) == m.SnapshotComplete(8)
    assert copy.key.step == 6
