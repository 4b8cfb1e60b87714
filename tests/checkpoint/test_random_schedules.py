"""Random schedules over memory and a durable tier: what was reported saved and was not lost everywhere is loaded bit by
bit, and nothing that was damaged is ever returned."""

import os
import random
import signal
import subprocess
import sys

import pytest
from blobs_on_tiers import blob_of
from snapshots_in_memory import (
    BUDGET,
    copy_of,
    flip_file,
    index_of,
    key_of,
    new_folder,
    part_of,
)

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.located import find_in_archive, find_in_memory
from holdfast.checkpoint.memory import PAGE, SlotPool, remove_memory
from holdfast.checkpoint.replicate import Pull, replicate
from holdfast.checkpoint.snapshot_server import SnapshotServer
from holdfast.checkpoint.tier import DiskTier
from holdfast.errors import HoldfastError, TierError
from holdfast.protocol.snapshots import Holder

NBYTES = 70_000
TOKEN = "t"
SCHEDULES = 40
LENGTH = 40


class Node:
    """A pool and its server; `good`: to the steps whose slot here nobody damaged, its file."""

    def __init__(self, name):
        self.name, self.folder, self.good = name, new_folder(), {}
        self.open()

    def open(self):
        self.pool = SlotPool(self.folder, BUDGET)
        self.server = SnapshotServer(self.pool, "127.0.0.1", TOKEN)
        self.holder = Holder(self.name, "127.0.0.1", self.server.port, self.server.name)

    def slot(self, step):
        return next((s for s in self.pool.held() if s.key.step == step), None)

    def note(self):
        """Slots that were used again hold what they held no longer."""
        there = {s.key.step: s.path for s in self.pool.held()}
        self.good = {step: path for step, path in self.good.items() if there.get(step) == path}

    def end(self):
        self.server.close()
        remove_memory(self.folder)


class World:
    """Two nodes and a tier, and what must be true of them."""

    def __init__(self, folder, rng):
        self.rng, self.archive = rng, Archive(DiskTier(folder))
        self.nodes = [Node("a"), Node("b")]
        self.step = 0
        self.complete_step = -1
        self.stored = set()
        self.damaged = set()

    def save(self):
        node = self.rng.choice(self.nodes)
        key = key_of(self.step + 1)
        try:
            slot = node.pool.begin(key, NBYTES)
        except TierError:
            return
        self.step += 1
        with slot.blob as blob:
            blob[:] = blob_of(self.step, 0, NBYTES)
        node.note()
        if self.rng.random() < 0.2:
            node.pool.drop(slot)  # the worker ended before it was complete
            return
        if self.rng.random() < 0.1:
            return  # the agent will end before it is complete
        node.pool.seal(slot, index_of(self.step, NBYTES))
        node.good[self.step] = slot.path

    def copy(self):
        source, target = self.rng.sample(self.nodes, 2)
        slots = source.pool.held()
        if not slots:
            return
        slot = self.rng.choice(slots)
        if target.slot(slot.key.step) is not None:
            return
        pull = Pull(key=slot.key, holders=[source.holder], token=TOKEN)
        try:
            new = replicate(target.pool, pull, part_of(slot))
        except HoldfastError:
            target.note()
            return
        with new.blob as blob:
            assert bytes(blob) == blob_of(slot.key.step, 0, NBYTES)
        target.note()
        target.good[slot.key.step] = new.path
        self.complete_step = max(self.complete_step, slot.key.step)
        for node in self.nodes:
            node.pool.snapshot_complete(self.complete_step)

    def store(self):
        node = self.rng.choice(self.nodes)
        slots = node.pool.held()
        if not slots:
            return
        slot = self.rng.choice(slots)
        step = slot.key.step
        with node.pool.reading(slot.key):
            try:
                shard = self.archive.save_shard(step, 0, slot.sealed, slot.buffers())
            except HoldfastError:
                return
            if self.rng.random() < 0.8:
                self.archive.commit(step, [shard])
                if step not in self.damaged:
                    self.stored.add(step)

    def flip(self):
        node = self.rng.choice(self.nodes)
        slots = node.pool.held()
        if slots:
            slot = self.rng.choice(slots)
            flip_file(slot.path, PAGE + self.rng.randrange(NBYTES))
            node.good.pop(slot.key.step, None)

    def damage_tier(self):
        files = sorted(self.archive.tier.folder.rglob("rank-*"))
        if not files:
            return
        path = self.rng.choice(files)
        step = int(path.parent.name.removeprefix("step-"))
        size = path.stat().st_size
        if size and self.rng.random() < 0.5:
            flip_file(path, self.rng.randrange(size))
        else:
            os.truncate(path, size // 2)
        self.stored.discard(step)
        self.damaged.add(step)

    def restart(self):
        """The agent is killed; its memory stays, perhaps with a file cut short or a header that was torn."""
        node = self.rng.choice(self.nodes)
        node.server.close()
        files = sorted(node.folder.glob("*.slot"))
        if files and self.rng.random() < 0.5:
            path = self.rng.choice(files)
            if self.rng.random() < 0.5:
                os.truncate(path, self.rng.randrange(PAGE + NBYTES))
            else:
                flip_file(path, self.rng.randrange(80))
            node.good = {s: p for s, p in node.good.items() if p != path}
        node.open()
        node.pool.snapshot_complete(self.complete_step)
        held = {s.key.step: s for s in node.pool.held()}
        for step, path in node.good.items():
            assert held[step].path == path, f"step {step} was lost"
        for step, slot in held.items():
            with slot.blob as blob:
                assert bytes(blob) == blob_of(step, 0, NBYTES)
        node.note()

    def lose(self):
        """The node goes with its memory."""
        if self.rng.random() < 0.3:
            node = self.rng.choice(self.nodes)
            node.end()
            node.good = {}
            node.open()
            node.pool.snapshot_complete(self.complete_step)

    def check(self):
        """Every step, from memory and from the tier."""
        for step in range(1, self.step + 1):
            holders = [(n, n.slot(step)) for n in self.nodes]
            holders = [(n, s) for n, s in holders if s is not None]
            for node, slot in holders:
                got = self.read(
                    lambda s=slot, n=node: find_in_memory([(copy_of(s), (n.holder,))], TOKEN), step
                )
                assert got or step not in node.good, f"step {step} of {node.name} cannot be read"
            got = self.read(lambda step=step: find_in_archive(self.archive, step), step)
            assert got or step not in self.stored, f"step {step} cannot be read from the tier"

    def read(self, find, step):
        try:
            found = find()
            blob = found.open_blob(0)
            try:
                data = bytes(blob.fetch(0, NBYTES))
            finally:
                blob.close()
        except HoldfastError:
            return False
        assert found.step == step
        assert data == blob_of(step, 0, NBYTES), f"step {step} came damaged"
        return True


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_what_was_saved_is_loaded_and_nothing_damaged_is(tmp_path, seed):
    run(tmp_path, seed)


@pytest.mark.nightly
def test_many_more_schedules(tmp_path):
    for number in range(1500):
        run(tmp_path / str(number), random.randrange(1 << 40))


def run(folder, seed):
    print("seed", seed)  # shown when it fails
    rng = random.Random(seed)
    world = World(folder, rng)
    acts = [World.save] * 6 + [World.copy] * 4 + [World.store] * 3 + [World.restart] * 2
    acts += [World.flip, World.damage_tier, World.lose]
    try:
        for _ in range(LENGTH):
            rng.choice(acts)(world)
        world.check()
    finally:
        for node in world.nodes:
            node.end()


CHILD = """
import sys, itertools
from pathlib import Path
from snapshots_in_memory import BUDGET, key_of, save
from holdfast.checkpoint.memory import SlotPool
pool = SlotPool(Path(sys.argv[1]), BUDGET)
for step in itertools.count(1):
    save(pool, key_of(step), 70_000)
    pool.snapshot_complete(step)
    print(step, flush=True)
"""


def test_an_owner_that_is_killed_at_any_moment_leaves_what_it_reported(tmp_path):
    """Killed while it saves without a pause: after a report of a random number of steps, wherever it is then."""
    rng = random.Random(7)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(12):
        folder = new_folder()
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True, env=env
        )
        for _ in range(rng.randrange(1, 400)):
            reported = int(child.stdout.readline())
        child.kill()
        rest = child.communicate()[0].split("\n")[:-1]
        assert child.returncode == -signal.SIGKILL
        reported = int(rest[-1]) if rest else reported
        pool = SlotPool(folder, BUDGET)
        held = {s.key.step: s for s in pool.held()}
        assert max(held) >= reported
        for step, slot in held.items():
            assert bytes(slot.blob) == blob_of(step, 0, NBYTES)
        pool.close()
