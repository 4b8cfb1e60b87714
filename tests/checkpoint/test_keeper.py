"""An agent's snapshot memory at work: every wish is answered, and no answer is wrong about what is there."""

import asyncio
import errno
import os
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from blobs_on_tiers import blob_of
from snapshots_in_memory import BUDGET, flip, index_of, key_of, new_folder, slot_files, steps_of

from holdfast.agent import snapshots
from holdfast.agent.snapshots import SnapshotKeeper
from holdfast.checkpoint import snapshot_server
from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import digest, parts_of, seal, sums_of
from holdfast.checkpoint.memory import UNSEALED, map_slot, remove_memory
from holdfast.checkpoint.replicate import WINDOW_BYTES
from holdfast.errors import TierError
from holdfast.protocol import messages as m
from holdfast.protocol.snapshots import Copy, DurableTier, Holder, Part

TOKEN = "the-token"
LARGE = 3 * WINDOW_BYTES + 77


class Node:
    """A keeper, and what it told the coordinator."""

    def __init__(self, name="a", folder=None, budget=BUDGET):
        self.said, self.name, self.folder = [], name, folder or new_folder()
        self.keeper = SnapshotKeeper(self.folder, budget, "127.0.0.1", TOKEN, self.said.append)
        self.holder = Holder(name, "127.0.0.1", self.keeper.port, self.keeper.server)

    def last(self, kind):
        assert isinstance(self.said[-1], kind), self.said
        return self.said[-1]

    async def begin(self, key, nbytes=100_000, worker="w0"):
        return await self.keeper.slot_wanted(worker, m.SlotWanted(key, nbytes))

    async def fill(self, key, nbytes=100_000, worker="w0", index=None):
        """As a worker does it."""
        given = await self.begin(key, nbytes, worker)
        assert given.path is not None, given.reason
        with map_slot(Path(given.path), nbytes) as memory:
            memory[4096 : 4096 + nbytes] = blob_of(key.step, key.rank, nbytes)
        index = msgspec.msgpack.encode(index or index_of(key.step, nbytes))
        await self.keeper.slot_filled(worker, m.SlotFilled(key, index, 0.25))
        return self.said[-1]

    async def held(self, key, nbytes=100_000, worker="w0"):
        """A snapshot that counts; returns its copy."""
        await self.fill(key, nbytes, worker)
        return self.last(m.SnapshotStored).copy

    async def close(self):
        await self.keeper.close()
        assert not self.folder.parents[1].exists()


@asynccontextmanager
async def nodes(*names):
    there = [Node(name) for name in names]
    try:
        yield there
    finally:
        for node in there:
            await node.close()


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 60))


# ---------------------------------------------------------------- the node's own workers


def test_a_copy_that_is_complete_counts_and_its_digests_are_right():
    async def scenario():
        async with nodes("a") as (a,):
            key = key_of(10, rank=3, world=8)
            await a.fill(key)
            held = a.last(m.SnapshotStored)
            sums = sums_of(memoryview(blob_of(10, 3)))
            slot = a.keeper.pool.held()[0]
            assert held.copy == Copy(key, parts_of(10, 3, seal(index_of(10, 100_000), sums)))
            assert [held.copy.shard.head.xxh3, held.stall_s] == [digest(slot.head), 0.25]
            assert held.took_s > 0
            assert a.keeper.copies() == (held.copy,)
            assert len(a.said) == 1

    run(scenario())


def test_the_slot_for_the_next_snapshot_is_brought_in_meanwhile():
    async def scenario():
        async with nodes("a", "b") as (a, b):
            copy = await a.held(key_of(10))
            await b.keeper.replicate(m.Replicate(copy, (a.holder,)))
            for node in (a, b):
                await asyncio.to_thread(node.keeper._copying.shutdown)
                assert [len(node.keeper.pool._slots), len(node.keeper.copies())] == [2, 1]

    run(scenario())


def test_the_first_snapshot_finds_the_memory_that_was_expected():
    async def scenario():
        async with nodes("a") as (a,):
            a.keeper.expect(m.SnapshotExpected(3, 100_000))
            a.keeper.expect(m.SnapshotExpected(3, 100_000))  # a worker that was started again says it again
            await asyncio.to_thread(a.keeper._copying.shutdown)
            there = set(a.folder.glob("*.slot"))
            assert [len(there), a.keeper.copies(), a.said] == [2, (), []]
            given = await a.keeper.slot_wanted("w0", m.SlotWanted(key_of(10, rank=3, world=8), 100_000))
            assert Path(given.path) in there

    run(scenario())


@pytest.mark.parametrize("expected", [40_000, 4_000_000])
def test_a_size_that_was_wrong_costs_nothing(monkeypatch, expected):
    async def scenario():
        async with nodes("a") as (a,):
            pool, there = a.keeper.pool, threading.Event()
            prepare = pool.prepare
            monkeypatch.setattr(pool, "prepare", lambda *args: (prepare(*args), there.set()))
            a.keeper.expect(m.SnapshotExpected(0, expected))
            assert await asyncio.to_thread(there.wait, 30)
            assert {slot.capacity for slot in pool._slots} == {expected}
            await a.held(key_of(10))
            await asyncio.to_thread(a.keeper._copying.shutdown)
            assert {slot.capacity for slot in pool._slots} == {100_000}

    run(scenario())


def test_memory_of_a_size_that_is_known_better_is_not_brought_in_further(monkeypatch):
    async def scenario():
        async with nodes("a") as (a,):
            asked = []
            monkeypatch.setattr(a.keeper.pool, "prepare", lambda rank, nbytes, ended: asked.append(ended))
            a.keeper.expect(m.SnapshotExpected(0, 40_000))
            a.keeper.expect(m.SnapshotExpected(1, 40_000))
            await a.begin(key_of(10))
            await asyncio.to_thread(a.keeper._copying.shutdown)
            assert [ended() for ended in asked] == [True, False, False]

    run(scenario())


def test_a_worker_that_ends_in_between_leaves_a_free_slot():
    async def scenario():
        async with nodes("a") as (a,):
            given = await a.begin(key_of(10))
            a.keeper.gone("w0")
            assert a.last(m.SnapshotRejected).key == key_of(10)
            a.keeper.gone("w0")  # said once
            await a.keeper.slot_filled("w0", m.SlotFilled(key_of(10), b"", 0.0))
            assert [len(a.said), a.keeper.copies(), a.keeper.pool.writing()] == [1, (), []]
            again = await a.begin(key_of(20), worker="w1")
            assert again.path == given.path

    run(scenario())


def test_a_worker_that_ends_before_it_has_its_slot():
    async def scenario():
        async with nodes("a") as (a,):
            wish = asyncio.create_task(a.begin(key_of(10)))
            await asyncio.sleep(0)
            a.keeper.gone("w0")
            given = await wish
            assert [given.path, given.reason] == [None, "taken back"]
            assert a.last(m.SnapshotRejected).key == key_of(10)
            assert a.keeper.pool.writing() == []

    run(scenario())


def test_a_worker_that_wants_another_slot_gave_up_the_first():
    async def scenario():
        async with nodes("a") as (a,):
            await a.begin(key_of(10))
            await a.fill(key_of(20))
            assert [type(x) for x in a.said] == [m.SnapshotRejected, m.SnapshotStored]
            await a.keeper.slot_filled("w0", m.SlotFilled(key_of(10), b"", 0.0))  # too late
            assert [len(a.said), steps_of(a.keeper.pool)] == [2, [20]]

    run(scenario())


@pytest.mark.parametrize("given", [None, b"", b"\xc1", b"\x93\x01\x02", "step", "nbytes"])
def test_a_copy_whose_index_does_not_fit_does_not_count(given):
    async def scenario():
        async with nodes("a") as (a,):
            await a.begin(key_of(10))
            index = {
                "step": msgspec.msgpack.encode(index_of(11, 100_000)),
                "nbytes": msgspec.msgpack.encode(index_of(10, 5)),
            }.get(given, given)
            await a.keeper.slot_filled("w0", m.SlotFilled(key_of(10), index, 0.0))
            assert a.last(m.SnapshotRejected).key == key_of(10)
            assert [a.keeper.copies(), a.keeper.pool.writing()] == [(), []]
            await a.held(key_of(20))

    run(scenario())


def test_no_memory_is_said_to_both_sides():
    async def scenario():
        a = Node(budget=1 << 20)
        given = await a.begin(key_of(10), 5 << 20)
        assert [given.path, given.reason] == [None, a.last(m.SnapshotRejected).reason]
        assert "does not fit" in given.reason
        await a.close()

    run(scenario())


# ---------------------------------------------------------------- other nodes


def test_a_copy_of_another_nodes_shard():
    async def scenario():
        async with nodes("a", "b", "c") as (a, b, c):
            copy = await a.held(key_of(10), LARGE)
            await b.keeper.replicate(m.Replicate(copy, (a.holder,)))
            assert b.last(m.SnapshotStored).copy == copy
            assert b.last(m.SnapshotStored).stall_s == 0
            flip(a.keeper.pool.held()[0], LARGE - 1)
            flip(a.keeper.pool.held()[0], 1)
            await c.keeper.replicate(m.Replicate(copy, (a.holder, b.holder)))
            assert c.last(m.SnapshotStored).copy == copy
            with c.keeper.pool.held()[0].blob as blob:
                assert bytes(blob) == blob_of(10, 0, LARGE)

    run(scenario())


def test_a_copy_that_cannot_be_had_is_said_and_takes_no_slot():
    async def scenario():
        async with nodes("a", "b") as (a, b):
            copy = await a.held(key_of(10))
            other = msgspec.structs.replace(copy.shard, head=Part("x", 5, "00" * 16))
            for order in (
                m.Replicate(Copy(key_of(11), copy.shard), (a.holder,)),
                m.Replicate(Copy(copy.key, other), (a.holder,)),
                m.Replicate(copy, ()),
            ):
                await b.keeper.replicate(order)
                assert b.last(m.SnapshotRejected).key == order.copy.key
            assert [b.keeper.copies(), b.keeper.pool.nbytes] == [(), 0]

    run(scenario())


def test_an_order_that_is_repeated_is_answered_without_a_transfer():
    async def scenario():
        async with nodes("a", "b") as (a, b):
            copy = await a.held(key_of(10))
            await b.keeper.replicate(m.Replicate(copy, (a.holder,)))
            await a.keeper.close()
            await b.keeper.replicate(m.Replicate(copy, (a.holder,)))
            assert [type(x) for x in b.said] == [m.SnapshotStored, m.SnapshotStored]
            assert len(b.keeper.copies()) == 1

    run(scenario())


def test_an_order_that_is_repeated_while_it_is_carried_out_is_answered_once():
    async def scenario():
        async with nodes("a", "b") as (a, b):
            copy = await a.held(key_of(10), LARGE)
            order = m.Replicate(copy, (a.holder,))
            await asyncio.gather(b.keeper.replicate(order), b.keeper.replicate(order))
            assert [[type(x) for x in b.said], len(b.keeper.copies())] == [[m.SnapshotStored], 1]

    run(scenario())


# ---------------------------------------------------------------- durable tiers


def tier_of(path, **options):
    return DurableTier(str(path), **options)


async def store(node, tmp_path, key, **options):
    await node.keeper.store(m.StoreShard(str(tmp_path), key, **options))
    return node.last(m.Stored)


async def store_complete(node, tmp_path, step, world=1, **options):
    """Stores and publishes what the node holds of a step."""
    shards = [(await store(node, tmp_path, key_of(step, r, world=world))).shard for r in range(world)]
    await node.keeper.publish(m.Publish(tier_of(tmp_path, **options), step, tuple(shards)))
    return node.last(m.Published)


def test_a_stored_and_published_checkpoint_verifies(tmp_path):
    async def scenario():
        async with nodes("a") as (a,):
            for rank in range(2):
                await a.held(key_of(10, rank, world=2), LARGE)
            assert (await store_complete(a, tmp_path, 10, 2)).error is None
            assert [x.took_s > 0 for x in a.said if isinstance(x, m.Stored)] == [True, True]
            manifest = Archive(str(tmp_path)).verify(10)
            assert manifest.shards == tuple(c.shard for c in a.keeper.copies())

    run(scenario())


def test_ranks_with_equal_bytes_share_a_blob(tmp_path):
    async def scenario():
        async with nodes("a", "b") as (a, b):
            same = index_of(10, 100_000)
            await a.held(key_of(10, 0, world=2))
            given = await b.begin(key_of(10, 1, world=2))
            with map_slot(Path(given.path), 100_000) as memory:
                memory[4096 : 4096 + 100_000] = blob_of(10, 0)
            filled = m.SlotFilled(key_of(10, 1, world=2), msgspec.msgpack.encode(same), 0.0)
            await b.keeper.slot_filled("w0", filled)
            first = (await store(a, tmp_path, key_of(10, 0, world=2))).shard
            second = (await store(b, tmp_path, key_of(10, 1, world=2), blob=first.blob.name)).shard
            assert [second.blob, second.rank] == [first.blob, 1]
            await a.keeper.publish(m.Publish(tier_of(tmp_path), 10, (first, second)))
            assert Archive(str(tmp_path)).verify(10).nbytes == 100_000
            assert len(list(tmp_path.rglob("rank-*.????????.safetensors"))) == 1

    run(scenario())


def test_a_slot_that_is_gone_cannot_be_stored(tmp_path):
    async def scenario():
        async with nodes("a") as (a,):
            said = await store(a, tmp_path, key_of(10))
            assert [said.shard, said.key, said.tier] == [None, key_of(10), str(tmp_path)]
            assert "no snapshot of step 10" in said.reason

    run(scenario())


class Gate:
    """Holds up a write to a disk tier in the middle, until it is opened."""

    def __init__(self, monkeypatch):
        self.inside, self.open = threading.Event(), threading.Event()
        real = os.write

        def write(fd, data):
            if len(data) > 10_000:
                self.inside.set()
                assert self.open.wait(30)
            return real(fd, data)

        monkeypatch.setattr(os, "write", write)

    async def wait(self):
        assert await asyncio.to_thread(self.inside.wait, 30)


def test_a_slot_that_is_stored_is_not_overwritten_by_later_snapshots(tmp_path, monkeypatch):
    async def scenario():
        gate = Gate(monkeypatch)
        async with nodes("a") as (a,):
            await a.held(key_of(10))
            a.keeper.pool.snapshot_complete(10)
            storing = asyncio.create_task(store(a, tmp_path, key_of(10)))
            await gate.wait()
            for step in (20, 30, 40):
                await a.held(key_of(step))
                a.keeper.pool.snapshot_complete(step)
            gate.open.set()
            shard = (await storing).shard
            await a.keeper.publish(m.Publish(tier_of(tmp_path), 10, (shard,)))
            assert Archive(str(tmp_path)).verify(10).step == 10

    run(scenario())


def test_a_slot_is_kept_from_the_order_on_and_not_from_when_a_thread_has_time(tmp_path):
    async def scenario():
        async with nodes("a") as (a,):
            await a.held(key_of(10))
            work = a.keeper.store(m.StoreShard(str(tmp_path), key_of(10)))
            a.keeper.pool.snapshot_complete(10)
            for step in (20, 30):
                await a.held(key_of(step))
                a.keeper.pool.snapshot_complete(step)
            await work
            assert a.last(m.Stored).shard is not None

    run(scenario())


def test_tiers_that_do_not_answer_hold_up_no_snapshot(tmp_path, monkeypatch):
    async def scenario():
        gate = Gate(monkeypatch)
        async with nodes("a", "b") as (a, b):
            copy = await a.held(key_of(10), LARGE)
            stores = [asyncio.create_task(store(a, tmp_path / str(i), key_of(10))) for i in range(6)]
            await gate.wait()
            await a.held(key_of(20))
            other = await b.held(key_of(10, rank=1))
            await a.keeper.replicate(m.Replicate(other, (b.holder,)))
            assert a.last(m.SnapshotStored).copy == other
            gate.open.set()
            await asyncio.gather(*stores)
            assert copy.key == key_of(10)

    run(scenario())


def test_memory_that_went_bad_is_not_stored(tmp_path):
    async def scenario():
        async with nodes("a") as (a,):
            await a.held(key_of(10), LARGE)
            flip(a.keeper.pool.held()[0], LARGE - 1)
            said = await store(a, tmp_path, key_of(10))
            assert said.shard is None
            assert "changed in memory" in said.reason
            assert not list(tmp_path.rglob("*.safetensors"))

    run(scenario())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("when", ["store", "publish"])
def test_a_tier_that_fails_is_said_and_takes_nothing_from_earlier_checkpoints(
    tmp_path, monkeypatch, when, number
):
    def refuse(fd, data):
        raise OSError(number, os.strerror(number))

    async def scenario():
        async with nodes("a") as (a,):
            await a.held(key_of(10))
            assert (await store_complete(a, tmp_path, 10, keep=1)).error is None
            await a.held(key_of(20))
            real = os.write
            if when == "store":
                monkeypatch.setattr(os, "write", refuse)
                assert (await store(a, tmp_path, key_of(20))).shard is None
            else:
                shard = (await store(a, tmp_path, key_of(20))).shard
                monkeypatch.setattr(os, "write", refuse)
                await a.keeper.publish(m.Publish(tier_of(tmp_path, keep=1), 20, (shard,)))
                assert a.last(m.Published).step == 20
                assert "disk tier" in a.last(m.Published).error
            monkeypatch.setattr(os, "write", real)
            archive = Archive(str(tmp_path))
            assert [archive.steps(), archive.verify(10).step] == [[10], 10]
            assert (await store_complete(a, tmp_path, 20, keep=1)).error is None
            assert archive.steps() == [20]

    run(scenario())


def test_a_checkpoint_exists_although_older_ones_cannot_be_removed(tmp_path, monkeypatch, caplog):
    def refuse(self, name):
        raise TierError("no permission")

    async def scenario():
        async with nodes("a") as (a,):
            for step in (10, 20):
                await a.held(key_of(step))
                monkeypatch.setattr("holdfast.checkpoint.tier.DiskTier.remove", refuse)
                assert (await store_complete(a, tmp_path, step, keep=1)).error is None

    run(scenario())
    text = "the step is saved, but older checkpoints could not be removed: no permission"
    assert [r.__dict__["step"] for r in caplog.records if r.getMessage() == text] == [20]


def test_shards_that_are_no_whole_checkpoint_are_not_published(tmp_path):
    async def scenario():
        async with nodes("a") as (a,):
            await a.held(key_of(10, 1, world=2))
            shard = (await store(a, tmp_path, key_of(10, 1, world=2))).shard
            await a.keeper.publish(m.Publish(tier_of(tmp_path), 10, (shard,)))
            assert "do not make a complete checkpoint" in a.last(m.Published).error
            assert Archive(str(tmp_path)).steps() == []

    run(scenario())


@pytest.mark.parametrize("url", ["ftp://there/x", "/proc/nowhere"])
def test_a_tier_that_cannot_be_is_said(url):
    async def scenario():
        async with nodes("a") as (a,):
            await a.held(key_of(10))
            said = await store(a, url, key_of(10))
            assert [said.shard, bool(said.reason)] == [None, True]
            await a.keeper.publish(m.Publish(DurableTier(url), 10, (parts_of(10, 0, UNSEALED),)))
            assert a.last(m.Published).error

    run(scenario())


def test_a_fault_that_nobody_foresaw_is_an_answer_too(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise LookupError("a bug")

    async def scenario():
        async with nodes("a", "b") as (a, b):
            copy = await a.held(key_of(10))
            monkeypatch.setattr("holdfast.agent.snapshots.replicate", broken)
            monkeypatch.setattr(Archive, "save_shard", broken)
            monkeypatch.setattr(Archive, "commit", broken)
            await b.keeper.replicate(m.Replicate(copy, (a.holder,)))
            assert "a bug" in b.last(m.SnapshotRejected).reason
            assert "a bug" in (await store(a, tmp_path, key_of(10))).reason
            await a.keeper.publish(m.Publish(tier_of(tmp_path), 10, (copy.shard,)))
            assert "a bug" in a.last(m.Published).error

    run(scenario())


# ---------------------------------------------------------------- ends


def test_close_ends_what_is_under_way_and_leaves_nothing(tmp_path, monkeypatch):
    async def scenario():
        a, b = Node("a"), Node("b")
        copy = await a.held(key_of(10), LARGE)
        gate = Gate(monkeypatch)
        stands, go = threading.Event(), threading.Event()

        def stand(connection, blob, start, stop):
            stands.set()
            assert go.wait(30)
            raise BrokenPipeError

        monkeypatch.setattr(snapshot_server, "_send", stand)
        other = await b.held(key_of(10, rank=1))
        tasks = [
            asyncio.create_task(b.keeper.replicate(m.Replicate(copy, (a.holder,)))),
            asyncio.create_task(store(b, tmp_path, other.key)),
        ]
        assert await asyncio.to_thread(stands.wait, 30)
        await gate.wait()
        gate.open.set()
        await b.close()
        assert slot_files(b.folder) == 0
        go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(x, m.SnapshotRejected) and x.key == copy.key for x in b.said)
        await a.close()

    run(scenario())


def test_close_does_not_wait_for_a_tier_that_does_not_answer(tmp_path, monkeypatch, caplog):
    async def scenario():
        monkeypatch.setattr(snapshots, "LEAVE_S", 0.01)
        node, gate = Node(), Gate(monkeypatch)
        await node.held(key_of(10))
        task = asyncio.create_task(store(node, tmp_path, key_of(10)))
        await gate.wait()
        await node.close()
        assert "a durable tier does not answer" in caplog.text
        assert not task.done()
        gate.open.set()
        await task

    run(scenario())


def test_what_an_agent_left_that_was_killed_is_adopted_and_told(tmp_path):
    async def scenario():
        first = Node("a")
        copies = [await first.held(key_of(10, rank, generation=4, world=2), LARGE) for rank in (0, 1)]
        await first.begin(key_of(20))
        second = Node("a", first.folder)  # the first is dropped without a close
        adopted = second.keeper.copies()
        assert [(c.key.step, c.key.rank, c.key.world) for c in adopted] == [(10, 0, 2), (10, 1, 2)]
        assert adopted == tuple(copies)  # of the same run: they still go with what other nodes hold
        third = Node("b")
        await third.keeper.replicate(m.Replicate(adopted[0], (second.holder,)))
        assert third.last(m.SnapshotStored).copy == adopted[0]
        shards = []
        for c in adopted:
            await second.keeper.store(m.StoreShard(str(tmp_path), c.key))
            shards.append(second.last(m.Stored).shard)
        await second.keeper.publish(m.Publish(tier_of(tmp_path), 10, tuple(shards)))
        assert Archive(str(tmp_path)).verify(10).world == 2
        await second.close()
        await third.close()
        first.keeper._server.close()

    run(scenario())


def test_half_of_what_is_free_and_what_was_adopted_is_the_default_budget():
    async def scenario():
        first = Node("a")
        await first.held(key_of(10), LARGE)
        second = Node("a", first.folder, budget=0)
        assert second.keeper.pool.budget_bytes > LARGE
        await second.held(key_of(20))
        first.keeper._server.close()
        await second.close()

    run(scenario())


def test_a_folder_that_is_open_to_others_is_no_memory():
    folder = new_folder()
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    with pytest.raises(TierError, match="other users have access"):
        Node("a", folder)
    remove_memory(folder)


# ---------------------------------------------------------------- what lies there


def test_what_went_bad_in_memory_is_found_said_and_can_be_copied_anew():
    async def scenario():
        async with nodes("a", "b") as (a, b):
            copy = await a.held(key_of(10))
            other = await a.held(key_of(20))
            await b.keeper.replicate(m.Replicate(copy, (a.holder,)))
            await a.keeper.look_through()
            assert len(a.said) == 2
            slot = next(s for s in a.keeper.pool.held() if s.key == copy.key)
            flip(slot, 70_000)
            await a.keeper.look_through()
            spoiled = a.last(m.SnapshotCorrupt)
            assert [spoiled.key, spoiled.reason] == [copy.key, "bytes 65536 to 98304 changed in memory"]
            assert a.keeper.copies() == (other,)
            await a.keeper.replicate(m.Replicate(copy, (b.holder,)))
            assert a.last(m.SnapshotStored).copy == copy
            await a.keeper.look_through()
            assert isinstance(a.said[-1], m.SnapshotStored)

    run(scenario())


def test_nothing_is_looked_through_while_there_is_work():
    async def scenario():
        async with nodes("a") as (a,):
            copy = await a.held(key_of(10))
            flip(next(s for s in a.keeper.pool.held() if s.key == copy.key), 0)
            await a.begin(key_of(20))
            await a.keeper.look_through()
            a.last(m.SnapshotStored)
            a.keeper.gone("w0")
            await a.keeper.look_through()
            assert a.last(m.SnapshotCorrupt).key == copy.key

    run(scenario())


@pytest.mark.parametrize("frees", ["complete", "forget"])
def test_a_worker_that_waits_has_its_slot_when_the_snapshots_before_need_theirs_no_more(monkeypatch, frees):
    async def scenario():
        async with nodes("a") as (a,):
            for step in (10, 20):
                await a.held(key_of(step))
            refused = await a.keeper.slot_wanted("w0", m.SlotWanted(key_of(30), 100_000, paced=True))
            said = a.last(m.SnapshotRejected)
            assert [refused.path, refused.paced, said.lack, said.paced] == [None, True, "slot", True]
            begin, tried = a.keeper.pool.begin, threading.Event()

            def refuses(*args):
                try:
                    return begin(*args)
                finally:
                    tried.set()

            monkeypatch.setattr(a.keeper.pool, "begin", refuses)
            wish = m.SlotWanted(key_of(30), 100_000, waits=True)
            waits = asyncio.create_task(a.keeper.slot_wanted("w0", wish))
            assert await asyncio.to_thread(tried.wait, 30)
            if frees == "complete":
                a.keeper.complete(20, None)
            else:
                a.keeper.forget(10, None)
            assert (await waits).path is not None

    run(scenario())
