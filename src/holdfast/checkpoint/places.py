"""Where a rank keeps its shard: with the node's agent, or, without a job, in memory of its own."""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.found import Found, find_in_archive, find_in_memory
from holdfast.checkpoint.layout import Index, encode_head
from holdfast.checkpoint.memory import Slot, SlotMaps, SlotPool, default_budget, remove_memory
from holdfast.checkpoint.policy import Retention, parse_cadence
from holdfast.checkpoint.rows import WINDOW_BYTES
from holdfast.checkpoint.sums import sums_of
from holdfast.errors import HoldfastError, StateError, TierError
from holdfast.protocol import messages as m
from holdfast.protocol.snapshots import DurableTier, Key, Shard

SLOT_WAIT_S = 60.0
"""The first slot of a large shard takes its time: the agent brings its pages in."""

ASK_S = 30.0
Copy = Callable[[memoryview], None]


class Place(Protocol):
    """A rank's place. rank, world: of those that save together."""

    rank: int
    world: int

    def put(self, index: Index, copy: Copy) -> bool:
        """Calls `copy` with the row to fill, and keeps what it is filled with. False: skipped, and said why."""

    def candidates(self, passed_over: Callable[[str], None]) -> Iterator[Found]:
        """Whole checkpoints, the newest first, of one step the nearest first."""

    def flush(self) -> None:
        """Waits until what was put is where it is to be."""


def say(text: str) -> None:
    """To whoever reads the script's output."""
    sys.stderr.write(f"[holdfast] {text}\n")


def in_archives(urls: list[str], passed_over: Callable[[str], None]) -> Iterator[Found]:
    """The checkpoints of durable tiers, the newest first."""
    there: list[tuple[int, int, Archive]] = []
    for order, url in enumerate(urls):
        try:
            archive = Archive(url)
            there += [(step, -order, archive) for step in archive.steps()]
        except HoldfastError as error:
            passed_over(f"{url}: {error}")
    for step, _, archive in sorted(there, key=lambda x: x[:2], reverse=True):
        try:
            yield find_in_archive(archive, step, passed_over)
        except (StateError, TierError) as error:
            passed_over(str(error))


class _Link(Protocol):
    """What is needed of `holdfast.train.link.Link`."""

    start: m.Start
    token: str

    def send(self, message: m.WorkerMessage) -> None: ...
    def wait_slot(self, key: Key, timeout_s: float) -> m.SlotGiven | None: ...
    def wait_found(self, request: int, timeout_s: float) -> m.SnapshotFound | None: ...


class AgentPlace:
    """Under `holdfast run`: the agent keeps the shard, sends it to its buddies and to the durable tiers."""

    def __init__(self, link: _Link) -> None:
        env = link.start.env
        self.rank, self.world = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
        self._generation = int(env.get("HOLDFAST_GENERATION", "0"))
        self._tiers = msgspec.json.decode(env.get("HOLDFAST_TIERS", "[]"), type=list[str])
        self._link = link
        self._requests = itertools.count(1)
        self._maps = SlotMaps()
        self._skipping = False

    def put(self, index: Index, copy: Copy) -> bool:
        """Copies into a slot of the agent's."""
        key = Key(index.step, self._generation, self.rank, self.world)
        self._link.send(m.SlotWanted(key, index.nbytes))
        began_s = time.perf_counter()
        given = self._link.wait_slot(key, SLOT_WAIT_S)
        if given is None or given.path is None:
            reason = given.reason if given else f"the agent gave no memory within {SLOT_WAIT_S:g} s"
            if not self._skipping:
                say(f"rank {self.rank}: no snapshot of step {index.step}: {reason}")
            self._skipping = True
            return False
        self._skipping = False
        done: bytes | None = None
        try:
            with self._maps.row(given.path, index.nbytes) as row:
                copy(row)
            done = msgspec.msgpack.encode(index)
        finally:
            self._link.send(m.SlotFilled(key, done, time.perf_counter() - began_s))
        return True

    def candidates(self, passed_over: Callable[[str], None]) -> Iterator[Found]:
        """First what the coordinator knows to be in memory, then the durable tiers."""
        request = next(self._requests)
        self._link.send(m.SnapshotSought(request))
        found = self._link.wait_found(request, ASK_S)
        if found is None:
            passed_over(f"the coordinator did not say within {ASK_S:g} s what is in memory")
        if found is not None and found.copies:
            try:
                yield find_in_memory(found.copies, self._link.token, passed_over)
            except StateError as error:
                passed_over(str(error))
        yield from in_archives(self._tiers, passed_over)

    def flush(self) -> None:
        """The agent does the rest, whatever becomes of this process."""


class LonePlace:
    """Without a job: a memory of this process's own, which ends with it, and durable tiers.

    One thread brings what was copied to the tiers. With torch.distributed every rank writes its own shard and rank 0
    the manifest; they tell each other through the process group's store.
    """

    def __init__(self, tiers: tuple[DurableTier, ...], rank: int, world: int, store: Any = None) -> None:
        """store: a torch.distributed.Store of all ranks; needed when there are several.

        Raises:
            TierError: no memory to copy into.
        """
        self.rank, self.world = rank, world
        self._tiers, self._store = tiers, store
        self._archives = {t.url: Archive(t.url) for t in tiers}
        self._last: dict[str, float] = {t.url: time.monotonic() for t in tiers}
        root = Path(os.environ.get("HOLDFAST_MEMORY") or "/dev/shm") / f"holdfast-{os.getuid()}" / "alone"
        _sweep(root)
        folder = root / f"{os.getpid()}-{id(self):x}"
        self._pool = SlotPool(folder, 0)
        self._pool.budget_bytes = default_budget(folder)
        self._newest: tuple[Slot, Index] | None = None
        self._todo: queue.SimpleQueue[tuple[Slot, Index, list[DurableTier]] | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._pending = 0
        self._failing: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="holdfast-saver", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, index: Index, copy: Copy) -> bool:
        """Copies into a slot of this process's; durable tiers whose time has come follow behind."""
        key = Key(index.step, 1, self.rank, self.world)
        try:
            slot = self._pool.begin(key, index.nbytes)
        except TierError as error:
            say(f"rank {self.rank}: no snapshot of step {index.step}: {error}")
            return False
        try:
            with slot.row as row:
                copy(row)
        except BaseException:
            self._pool.drop(slot)
            raise
        due = self._due(index.step)
        with self._lock:
            self._pending += 1
        self._todo.put((slot, index, due))
        return True

    def _due(self, step: int) -> list[DurableTier]:
        """Rank 0 decides, so that all ranks save the same."""
        now = time.monotonic()
        due = [t for t in self._tiers if parse_cadence(t.every).due(step, now - self._last[t.url], AUTO_S)]
        if self.world > 1:
            if self.rank == 0:
                self._store.set(f"holdfast/due/{step}", msgspec.json.encode([t.url for t in due]))
            else:
                urls = msgspec.json.decode(self._store.get(f"holdfast/due/{step}"))
                due = [t for t in self._tiers if t.url in urls]
        for tier in due:
            self._last[tier.url] = now
        return due

    def candidates(self, passed_over: Callable[[str], None]) -> Iterator[Found]:
        """What is in the durable tiers: the memory of a process that ended is gone."""
        self.flush()
        yield from in_archives([t.url for t in self._tiers], passed_over)

    def flush(self) -> None:
        """Waits until what was put is in the durable tiers."""
        with self._lock:
            self._lock.wait_for(lambda: self._pending == 0 or not self._thread.is_alive())

    def close(self) -> None:
        """Flushes, ends the thread and gives the memory back."""
        atexit.unregister(self.close)
        self.flush()
        self._todo.put(None)
        self._thread.join()
        self._pool.close()

    # ------------------------------------------------------------ the saving thread

    def _work(self) -> None:
        while (job := self._todo.get()) is not None:
            slot, index, tiers = job
            try:
                with slot.row as row:
                    sums = sums_of(row)
                self._pool.received(slot, encode_head(index, sums), sums)
                for tier in tiers:
                    self._store_in(tier, slot, index)
                self._pool.whole(index.step)
            except HoldfastError as error:
                say(f"rank {self.rank}: step {index.step}: {error}")
            finally:
                with self._lock:
                    self._pending -= 1
                    self._lock.notify_all()

    def _store_in(self, tier: DurableTier, slot: Slot, index: Index) -> None:
        archive, step = self._archives[tier.url], index.step
        answer: dict[str, Any]
        try:
            with self._pool.reading(slot.key), slot.row as row:
                pieces = (row[low : low + WINDOW_BYTES] for low in range(0, len(row), WINDOW_BYTES))
                shard = archive.save_shard(step, self.rank, slot.head, slot.sums, pieces, slot.row_bytes)
            answer = {"shard": shard}
        except HoldfastError as error:
            answer = {"error": str(error)}
        try:
            shards = self._all_shards(tier, step, answer)
            if shards:
                archive.commit(step, shards)
                archive.prune(Retention(tier.keep, tier.keep_every))
            self._failing.discard(tier.url)
        except HoldfastError as error:
            if tier.url not in self._failing:
                say(f"step {step} was not saved in {tier.url}: {error}")
            self._failing.add(tier.url)

    def _all_shards(self, tier: DurableTier, step: int, answer: dict[str, Any]) -> list[Shard]:
        """On rank 0 what every rank wrote; elsewhere nothing. Raises TierError when one of them could not."""
        answers = [answer]
        if self.world > 1:
            name = f"holdfast/shard/{tier.url}/{step}"
            self._store.set(f"{name}/{self.rank}", msgspec.msgpack.encode(answer))
            if self.rank:
                return []
            answers = [msgspec.msgpack.decode(self._store.get(f"{name}/{r}")) for r in range(self.world)]
        elif "error" not in answer:
            return [answer["shard"]]
        for rank, said in enumerate(answers):
            if "error" in said:
                raise TierError(f"rank {rank}: {said['error']}")
        return [msgspec.convert(said["shard"], Shard) for said in answers]


AUTO_S = 60.0
"""What `auto` means where nobody measures failures."""


def _sweep(root: Path) -> None:
    """Gives back what processes left that were killed."""
    for folder in root.glob("*-*"):
        pid = folder.name.partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove_memory(folder)
