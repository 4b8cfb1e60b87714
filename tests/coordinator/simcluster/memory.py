"""The snapshot memory of a simulated node, and what its agent does with it: slots, copies from peers, tiers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.checkpoint.policy import Retention
from holdfast.protocol import messages as m
from holdfast.protocol.snapshots import Copy, Key, Lack, Part, Shard

if TYPE_CHECKING:
    from simcluster.agent import SimAgent
    from simcluster.worker import SimWorker

PORT = 7000
SLOTS_PER_SHARD = 2
LOOK_S = 0.2
TIGHT = 0.2
"""This share of the nodes has no memory for more than two snapshots of a shard."""


def copy_of(key: Key, bits: int) -> Copy:
    """What an agent says of a shard: equal bits have equal sums."""
    head = Part(f"step-{key.step}/rank-{key.rank}.head", 10, f"{bits:x}")
    row = Part(f"step-{key.step}/rank-{key.rank}.row", 1000, f"{bits:x}")
    return Copy(key, Shard(key.rank, head, row, 0))


@dataclass(eq=False)
class Slot:
    """A slot in use. bits: None while it is written. users: readers under whom it may not change."""

    key: Key
    bits: int | None = None
    users: int = 0


class SimMemory:
    """Dies with the machine. Follows the rules of `checkpoint.memory` for which slot may be used again."""

    def __init__(self, agent: SimAgent, there: bool) -> None:
        self.agent = agent
        self.cluster = agent.cluster
        self.there = there
        self.rng = agent.cluster.saving_rng
        self._slots: list[Slot] = []
        self._free = 0
        self._complete_step = -1
        self._kept_step: int | None = None
        self._tight = random.Random(f"tight {agent.cluster.plan.seed} {agent.name}").random() < TIGHT

    @property
    def port(self) -> int:
        """Where it is served; 0: this node has none."""
        return PORT if self.there else 0

    def copies(self) -> tuple[Copy, ...]:
        """What is held here."""
        return tuple(copy_of(s.key, s.bits) for s in self._slots if s.bits is not None)

    def read(self, copy: Copy) -> int | None:
        """The bits of a shard that is held here."""
        slot = self._find(copy.key)
        return slot.bits if slot is not None and copy_of(slot.key, slot.bits or 0) == copy else None

    def comes_back(self) -> None:
        """The agent is a new one: it has the memory still, or adopted it (as of this run, or of one before), or there is
        nothing left of it."""
        fate = self.rng.random()
        if fate < 0.5:
            return
        self._complete_step, self._kept_step = -1, None
        found = [s for s in self._slots if s.bits is not None] if fate < 0.8 else []
        if fate < 0.65:
            self._slots = found
            return
        self._slots = [
            Slot(msgspec.structs.replace(s.key, generation=min(s.key.generation, -s.key.generation)), s.bits)
            for s in found
        ]

    def snapshot_complete(self, step: int, kept: int | None) -> None:
        """Older snapshots are not needed, but for one."""
        if step >= self._complete_step:
            self._complete_step, self._kept_step = step, kept

    def forget(self, above_step: int, until: int | None = None) -> None:
        """Later ones never happened, or will not be whole."""
        if until is None:
            self._complete_step = min(self._complete_step, above_step)
        for slot in [s for s in self._slots if s.bits is not None and s.key.step > above_step]:
            if until is None or slot.key.step <= until:
                self._drop(slot)

    # ------------------------------------------------------------ a worker's copy

    def take(self, worker: SimWorker, key: Key, bits: int) -> None:
        """A worker copies its state here, beside its next step."""
        slot = self._begin(key)
        if slot is None:
            self.agent.send(
                m.SnapshotRejected(key, "the snapshots before are still being copied", self._lack)
            )
            return
        copy_s = self.rng.uniform(0.0, 1.0) * self.cluster.plan.copy_s
        self.cluster.clock.after(copy_s, self._copied, worker, slot, bits)

    def take_last(self, key: Key, bits: int) -> bool:
        """A worker copies its last state here, before it says that it is done."""
        slot = self._begin(key)
        if slot is None:
            self.agent.send(
                m.SnapshotRejected(key, "the snapshots before are still being copied", self._lack)
            )
            return False
        fails = self.rng.random() < self.cluster.plan.hold_fails
        ends = (self._refuse, slot, "its row went bad") if fails else (self._seal, slot, bits)
        self.cluster.clock.after(self.rng.uniform(0.0, 0.5), *ends)
        return True

    def _copied(self, worker: SimWorker, slot: Slot, bits: int) -> None:
        if worker.frozen and worker.alive:
            self.cluster.clock.after(LOOK_S, self._copied, worker, slot, bits)
        elif worker.alive and self.rng.random() >= self.cluster.plan.hold_fails:
            self.cluster.clock.after(self.rng.uniform(0.0, 0.02), self._seal, slot, bits)
        else:
            self._refuse(slot, "the worker ended before it had copied its state")

    def _seal(self, slot: Slot, bits: int) -> None:
        if slot in self._slots and self.agent.alive:
            slot.bits = bits
            self.agent.send(m.SnapshotStored(copy_of(slot.key, bits)))
            self.cluster.moment("held")

    def _refuse(self, slot: Slot, reason: str) -> None:
        if slot in self._slots:
            self._drop(slot)
            self.agent.send(m.SnapshotRejected(slot.key, reason))

    # ------------------------------------------------------------ orders

    def replicate(self, order: m.Replicate) -> None:
        """Keeps a copy of another node's shard."""
        slot = self._begin(order.copy.key)
        if slot is None:
            self.agent.send(m.SnapshotRejected(order.copy.key, "no slot", self._lack))
        else:
            pull_s = self.rng.uniform(0.2, 1.0) * self.cluster.plan.pull_s
            self.cluster.clock.after(pull_s, self._pulled, order, slot)

    def _pulled(self, order: m.Replicate, slot: Slot) -> None:
        bits = self.cluster.read_memory(self.agent, order.copy, order.holders)
        if bits is None or self.rng.random() < self.cluster.plan.hold_fails:
            self._refuse(slot, "no holder gave it whole")
        else:
            self._seal(slot, bits)

    def store(self, order: m.StoreShard) -> None:
        """Writes a shard to a durable tier."""
        slot = self._find(order.key)
        if slot is None:
            self.agent.send(
                m.Stored(tier=order.tier, key=order.key, shard=None, reason="it is not held here")
            )
            return
        slot.users += 1
        self._later(self._stored, order, slot)

    def _stored(self, order: m.StoreShard, slot: Slot) -> None:
        slot.users -= 1
        if not self.agent.alive:
            return
        assert slot.bits is not None
        if self._tier_fails():
            self.agent.send(
                m.Stored(tier=order.tier, key=order.key, shard=None, reason="the tier does not answer")
            )
            return
        shard = copy_of(order.key, slot.bits).shard
        self.cluster.files[(order.tier, shard.blob.name)] = slot.bits
        self.agent.send(m.Stored(tier=order.tier, key=order.key, shard=shard))

    def publish(self, order: m.Publish) -> None:
        """The checkpoint exists from now on."""
        self._later(self._published, order)

    def _published(self, order: m.Publish) -> None:
        if not self.agent.alive:
            return
        tier = order.tier
        if self._tier_fails():
            self.agent.send(m.Published(tier.url, order.step, "the tier does not answer"))
            return
        shards = sorted(order.shards, key=lambda x: x.rank)
        bits = tuple(self.cluster.files[(tier.url, x.blob.name)] for x in shards)
        torn = [f"{b:x}" for b in bits] != [x.blob.xxh3 for x in shards]
        self.cluster.durables[(tier.url, order.step)] = (order.step, None if torn else bits)
        self.cluster.moment("published")
        steps = [step for url, step in self.cluster.durables if url == tier.url]
        for step in Retention(tier.keep, tier.keep_every).superfluous(steps):
            del self.cluster.durables[(tier.url, step)]
        self.agent.send(m.Published(tier.url, order.step))

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        self.cluster.clock.after(self.rng.uniform(0.1, 1.0) * self.cluster.plan.store_s, call, *args)

    def _tier_fails(self) -> bool:
        return not self.cluster.faults.over and self.rng.random() < self.cluster.plan.tier_fails

    # ------------------------------------------------------------ slots

    def _find(self, key: Key) -> Slot | None:
        return next((s for s in self._slots if s.bits is not None and s.key == key), None)

    def _drop(self, slot: Slot) -> None:
        self._slots.remove(slot)
        self._free += 1

    def _begin(self, key: Key) -> Slot | None:
        self._lack: Lack | None = None
        if not self.there:
            return None
        old = next((s for s in self._slots if self._dispensable(s, key)), None)
        if self._free:
            self._free -= 1
        elif old is not None:
            self._slots.remove(old)
        else:
            mine = [s for s in self._slots if s.key.rank == key.rank]
            own = [s for s in mine if s.bits is None or s.key.step != self._kept_step]
            if len(own) >= SLOTS_PER_SHARD:
                self._lack = Lack.SLOT
            elif self._tight and len(mine) >= SLOTS_PER_SHARD:
                self._lack = Lack.MEMORY
            if self._lack is not None:
                return None
        self._slots.append(Slot(key))
        return self._slots[-1]

    def _dispensable(self, slot: Slot, key: Key) -> bool:
        if slot.bits is None or slot.users or slot.key.step in (self._complete_step, self._kept_step):
            return False
        older = slot.key.step < self._complete_step
        stale = slot.key.step > self._complete_step and slot.key.generation < key.generation
        again = slot.key.step >= key.step and slot.key.rank == key.rank
        return older or stale or again
