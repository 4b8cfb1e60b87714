"""A replica says how large its snapshots will be before it takes the first one."""

from types import SimpleNamespace

import pytest

from holdfast.protocol import messages as m
from holdfast.train.snapshots import StateSnapshots


def joined(every="10", saves=True, shard=(0, 1)):
    """Snapshots of a worker that is in a generation, and what they say to the agent."""
    said = []
    link = SimpleNamespace(
        start=SimpleNamespace(env={"HOLDFAST_SNAPSHOT_EVERY": every}), send=said.append, record=None
    )
    snapshots = StateSnapshots(link, SimpleNamespace())
    join(snapshots, saves, shard)
    return snapshots, said


def join(snapshots, saves=True, shard=(0, 1)):
    member = m.Member(
        rank=0, worker="w", node="n", slot=0, host="", vote_port=0, data_port=0, shard_index=shard[0]
    )
    generation = m.Generation(number=1, members=(member,), shape=(shard[1], 1))
    snapshots.join(m.JoinGeneration(generation=generation, rank=0, saves=saves, mtbf_s=3600.0))


def test_the_size_is_told_once_the_optimizer_has_its_moments():
    snapshots, said = joined()
    snapshots.expect(0, lambda: 100)
    assert said == []
    for step in (1, 2, 3):
        snapshots.expect(step, lambda: 300)
    assert said == [m.SnapshotExpected(0, 300)]
    join(snapshots)  # after a fault
    snapshots.expect(3, lambda: 300)
    assert len(said) == 1


def test_a_worker_that_holds_another_shard_tells_its_size():
    snapshots, said = joined(shard=(0, 2))
    snapshots.expect(1, lambda: 300)
    join(snapshots, shard=(1, 2))
    snapshots.expect(1, lambda: 200)
    assert said == [m.SnapshotExpected(0, 300), m.SnapshotExpected(1, 200)]


@pytest.mark.parametrize(("every", "saves"), [("0", True), ("10", False)])
def test_who_takes_no_snapshots_measures_nothing(every, saves):
    snapshots, said = joined(every, saves)
    snapshots.expect(5, lambda: pytest.fail("the state was measured"))
    assert said == []


def test_who_begins_to_save_in_a_later_generation_tells_it_then():
    snapshots, said = joined(saves=False)
    snapshots.expect(5, lambda: pytest.fail("the state was measured"))
    join(snapshots, saves=True)
    snapshots.expect(5, lambda: 300)
    assert said == [m.SnapshotExpected(0, 300)]
