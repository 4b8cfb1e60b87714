"""What the coordinator keeps, agents' memory holds: a snapshot that more nodes hold than the newest whole one."""

from __future__ import annotations

import asyncio

import pytest
from blobs_on_tiers import blob_of
from desk import TIER, running
from snapshots_in_memory import BUDGET, fill, flip, is_right, key_of, new_folder, save, slot_files, steps_of
from test_keeper import Node, nodes, run

from holdfast.checkpoint import memory
from holdfast.checkpoint.memory import SlotPool
from holdfast.coordinator.kernel import events as e
from holdfast.errors import MemoryShort, SlotsTaken
from holdfast.protocol import messages as m
from holdfast.protocol.job_options import SnapshotOptions
from holdfast.protocol.snapshots import Lack, Saving

BLOB = 100_000
SLOT_BYTES = memory._head_at(BLOB)


@pytest.fixture
def folder():
    folder = new_folder()
    yield folder
    memory.remove_memory(folder)


def held(step, folder, budget=BUDGET):
    """Step 10, which more nodes hold, and a newer whole one."""
    pool = SlotPool(folder, budget)
    save(pool, key_of(10))
    pool.snapshot_complete(10)
    save(pool, key_of(step))
    pool.snapshot_complete(step, kept=10)
    return pool


def test_what_is_kept_has_a_slot_beside_the_two_that_are_used_in_turn(folder):
    pool = held(20, folder)
    for step in (30, 40, 50):
        save(pool, key_of(step))
        assert steps_of(pool) == [10, step - 10, step]
        with pytest.raises(SlotsTaken):
            pool.begin(key_of(step + 5), BLOB)
        pool.snapshot_complete(step, kept=10)
    assert slot_files(folder) == 3
    assert all(is_right(s) for s in pool.held())
    pool.snapshot_complete(50)
    save(pool, key_of(60))
    save(pool, key_of(60, rank=1))
    assert {50, 60} <= set(steps_of(pool))
    assert slot_files(folder) == 3  # those of 10 and 40 were used again


def test_an_older_word_releases_nothing(folder):
    pool = held(20, folder)
    pool.snapshot_complete(10)
    save(pool, key_of(30))
    assert steps_of(pool) == [10, 20, 30]


def test_where_it_does_not_fit_that_is_said_and_nothing_is_overwritten(folder):
    pool = held(20, folder, budget=2 * SLOT_BYTES + BLOB // 2)
    with pytest.raises(MemoryShort, match="does not fit"):
        pool.begin(key_of(30), BLOB)
    assert steps_of(pool) == [10, 20]
    pool.snapshot_complete(20)
    fill(pool, key_of(30))
    assert steps_of(pool) == [20]


def test_an_agent_that_adopted_it_keeps_it_when_it_is_told(folder):
    held(20, folder)
    pool = SlotPool(folder, BUDGET)
    pool.snapshot_complete(20, kept=10)
    save(pool, key_of(30))
    assert steps_of(pool) == [10, 20, 30]


@pytest.mark.parametrize(("kept", "lack"), [(None, Lack.SLOT), (10, Lack.MEMORY)])
def test_an_agent_says_what_it_lacks(kept, lack):
    """With memory for two: both are still needed, or there would be a slot, but not for one more."""

    async def scenario():
        node = Node(budget=2 * SLOT_BYTES + BLOB // 2)
        try:
            for step in (10, 20):
                await node.held(key_of(step))
            node.keeper.pool.snapshot_complete(10 if kept is None else 20, kept)
            assert (await node.begin(key_of(30))).path is None
            assert node.last(m.SnapshotRejected).lack is lack
            assert steps_of(node.keeper.pool) == [10, 20]
        finally:
            await node.close()

    run(scenario())


class Cluster:
    """The core, and two agents' real memories that do what it says."""

    def __init__(self, a, b):
        self.desk = running(2, shape=(2, 1), saving=Saving(SnapshotOptions("1", 1), 0, (TIER,)))
        self.nodes = {"n0": a, "n1": b}
        self.heard = {"n0": 0, "n1": 0}
        self.done = len(self.desk.actions)
        self.fails = False

    async def saves(self, step, fails=False):
        """Each node's worker saves its shard. fails: before it is copied its bytes go bad."""
        self.fails = fails
        for rank, node in enumerate(self.nodes.values()):
            await node.fill(key_of(step, rank, 1, 2))
            if fails:
                with node.keeper.pool.reading(key_of(step, rank, 1, 2)) as slot:
                    flip(slot, 70_000)
        await self.settles()

    async def settles(self):
        while self.tell_core() or self.done < len(self.desk.actions):
            actions, self.done = self.desk.actions[self.done :], len(self.desk.actions)
            for action in actions:
                if isinstance(action, e.Send) and action.node in self.nodes:
                    await self.obeys(self.nodes[action.node].keeper, action.message)

    def tell_core(self):
        news = False
        for name, node in self.nodes.items():
            for message in node.said[self.heard[name] :]:
                news = True
                self.heard[name] += 1
                self.desk.do(e.NodeSays(name, message))
        return news

    async def obeys(self, keeper, order):
        match order:
            case m.Replicate(copy, holders):
                there = tuple(self.nodes[h.node].holder for h in holders)
                await keeper.replicate(m.Replicate(copy, there))
            case m.SnapshotComplete(step, kept):
                keeper.pool.snapshot_complete(step, kept)
            case m.ForgetSnapshots(step, until):
                keeper.pool.forget(step, until)

    def both_hold(self, step):
        """Both shards, bit by bit."""
        there = [[s for s in n.keeper.pool.held() if s.key.step == step] for n in self.nodes.values()]
        for slots in there:
            for slot in slots:
                with slot.blob as blob:
                    assert bytes(blob) == blob_of(step, slot.key.rank, BLOB)
        return [sorted(s.key.rank for s in slots) for slots in there] == [[0, 1], [0, 1]]


def test_real_memories_keep_what_the_core_keeps_until_a_newer_one_has_all_its_copies():
    async def scenario():
        async with nodes("n0", "n1") as (a, b):
            cluster = Cluster(a, b)
            await cluster.saves(6)
            assert cluster.both_hold(6)
            for step in (8, 10, 12):
                await cluster.saves(step, fails=True)
                newest = cluster.desk.state.storage.snapshots[-1]
                assert (newest.step, newest.complete) == (step, True)
                assert cluster.both_hold(6)
            await cluster.saves(14)
            assert cluster.both_hold(14)
            assert cluster.desk.sent(m.SnapshotComplete)[-1][1] == m.SnapshotComplete(14)
            for step in (16, 18):
                await cluster.saves(step)
                assert cluster.both_hold(step)
                assert cluster.desk.complete_snapshots()[-1] == step
            for node in (a, b):
                await asyncio.to_thread(node.keeper._copying.shutdown)
                assert slot_files(node.folder) <= 6

    run(scenario())
