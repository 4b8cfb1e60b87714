"""Where a rank saves its shard: with the node's agent, or, without a job, in its own memory and durable tiers."""

from __future__ import annotations

import atexit
import fcntl
import itertools
import logging
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol

import msgspec

from holdfast.checkpoint.agent_link import AgentLink, AgentSlots
from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import seal, sums_of
from holdfast.checkpoint.located import Located, find_in_archive, find_in_memory
from holdfast.checkpoint.memory import (
    PooledSlot,
    SlotPool,
    default_budget,
    memory_base,
    own_folder,
    remove_memory,
)
from holdfast.checkpoint.policy import Cadence, Retention, parse_cadence
from holdfast.errors import HoldfastError, StateError, TierError
from holdfast.observe.transfer_progress import ByteCount, HowFar
from holdfast.protocol import messages as m
from holdfast.protocol.snapshots import DurableTier, Key, Shard, tiers_of
from holdfast.protocol.wire.decoding import decode
from holdfast.tensors.index import StateIndex

_log = logging.getLogger(__name__)
SLOT_WAIT_S = 60.0
"""The first slot of a large shard takes its time: the agent brings its pages in."""

ASK_S = 30.0
TURN_S = 5.0
"""For the first rank to say whether it keeps a state: it is at the same place of the script."""

TURNS_KEPT = 256
"""Of its answers: ranks of a process group are not so many saves apart."""

Copy = Callable[[memoryview], None]


class PassedOver(Enum):
    """Why a state that a script gave is not kept."""

    NOT_DUE = "not due"
    SKIPPED = "skipped"
    """Memory is short, or the ones before are still on their way."""


Fill = Callable[[Copy], bool | PassedOver]
"""Waits until there is room, calls its argument with the blob to fill, and keeps what that is filled with. False: it could not, and
said why."""

Count = Callable[[int], None]
"""Told of bytes as they are read, from several threads."""


class Backend(Protocol):
    """Where a rank saves and loads its shard."""

    rank: int
    """Among those that save together, from 0."""
    world: int
    """How many save together."""
    exchange: RankExchange
    """How they agree on what to load."""

    def begin(self, index: StateIndex, *, wanted: bool = False) -> Fill | PassedOver:
        """Asks for room, so that the state counts from now on. wanted: whatever is due, and as soon as there is room."""

    def keeps_newest(self, why: PassedOver) -> bool:
        """Whether a state that was passed over is to be kept after all where the script ends with it."""

    def candidates(self, on_skip: Callable[[str], None]) -> Iterator[Located]:
        """Complete checkpoints, the newest first. Of one step the nearest source first."""

    def loading(self, where: str, total_bytes: int) -> AbstractContextManager[Count]:
        """Counts the bytes that are read from `where`. Shows progress if it takes longer than two seconds."""

    def expect(self, nbytes: int) -> None:
        """This rank will save a shard of about `nbytes`: its memory can be brought in."""

    def loaded(self, step: int | None) -> None:
        """The script goes on from this state; None: it looked for the newest, and there is none."""

    def flush(self) -> None:
        """Waits until everything that was put is where it is to be."""

    def why_not(self, step: int) -> str:
        """After a flush: why a step that was put is not in a durable tier that was to have it; else empty."""


def progress(rank: int, where: str, total_bytes: int) -> ByteCount:
    """A load that takes longer than two seconds is shown by rank 0, for all."""
    return ByteCount(sys.stderr if rank == 0 else lambda text: None, f"loading {where}", total_bytes)


def in_archives(urls: list[str], on_skip: Callable[[str], None], ranks: RankExchange) -> Iterator[Located]:
    """The checkpoints of durable tiers, the newest first. Each of the ranks looks at its share of the shards."""
    there: list[tuple[int, int, Archive]] = []
    for order, url in enumerate(urls):
        try:
            archive = Archive(url)
            there += [(step, -order, archive) for step in archive.steps()]
        except HoldfastError as error:
            on_skip(f"{url}: {error}")
    # Newest first over all tiers, and of one step the tier that was named first: users list the nearest one
    # first. Each is opened lazily, so tiers behind the one that works are asked for nothing but a listing.
    for step, _, archive in sorted(there, key=lambda x: x[:2], reverse=True):
        try:
            yield find_in_archive(archive, step, on_skip, *ranks.share)
        except (StateError, TierError) as error:
            on_skip(str(error))


class Turns:
    """Which of the states that a script gives are kept. Rank 0 decides, and the others follow."""

    def __init__(self, cadence: Cadence, ranks: RankExchange, world: int) -> None:
        """world: ranks that save. Without a process group each decides alone, and then they differ."""
        self._cadence, self._ranks = cadence, ranks
        self.agree = ranks.share[1] == world
        self._step = 0
        self._at_s = time.monotonic()
        self._asked: tuple[int, int] = (-1, 0)
        self._told: list[str] = []
        self._patience_s = TURN_S

    @property
    def decides(self) -> bool:
        """Whether this rank decides for itself: it is the first, or cannot reach any other."""
        return self._ranks.share[0] == 0

    @property
    def why_not(self) -> PassedOver:
        """Why the first rank does not keep a state that others ask about."""
        return PassedOver.NOT_DUE if self._cadence.seconds else PassedOver.SKIPPED

    def begins_at(self, step: int) -> None:
        """Notes the step from which the script resumes."""
        self._step, self._at_s = step, time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether one is due, or is to be asked for. A script that does not give every step may pass over the very one that
        the cadence names."""
        if step < self._step:
            self._step = 0  # it has gone back
        if self._cadence.steps:
            return step // self._cadence.steps > self._step // self._cadence.steps
        # Clocks differ between ranks, so of time the first is the judge.
        if self._cadence.seconds and self.decides:
            due = self._cadence.due(step, time.monotonic() - self._at_s)
            if not due:
                self.tell(step, False)
            return due
        return not self._cadence.never

    def tell(self, step: int, taken: bool) -> None:
        """Tells the other ranks whether this rank keeps a state."""
        self._note(step, taken)
        if self._ranks.share[1] == 1:
            return
        about = self._about(step)
        with suppress(TierError):  # they wait for a while, and keep it
            self._ranks.from_first(about, taken)
        # Old ones go, or a run of weeks would fill the store. Whoever is so far behind does not wait for them for long.
        self._told.append(about)
        if len(self._told) > TURNS_KEPT:
            self._ranks.forget(self._told.pop(0))

    def taken(self, step: int) -> bool:
        """Whether rank 0 keeps the state. If rank 0 gives no such state and so does not answer, this rank keeps it alone: when
        a job is stopped, other ranks may have kept their parts."""
        try:
            taken = bool(self._ranks.from_first(self._about(step), None, self._patience_s))
            self._patience_s = TURN_S
        except TierError:
            taken, self._patience_s = True, 0.1
        self._note(step, taken)
        return taken

    def _note(self, step: int, taken: bool) -> None:
        if taken:
            self._step, self._at_s = step, time.monotonic()

    def _about(self, step: int) -> str:
        """By the step and not by the number of the call: a rank that gave one more must not take the word on another."""
        self._asked = (step, self._asked[1] + 1 if self._asked[0] == step else 0)
        return f"{step}/{self._asked[1]}"


_requests = itertools.count(1)


class AgentBackend:
    """The backend under `holdfast run`: the agent keeps the shard, sends copies to other nodes and writes it to the durable
    tiers."""

    def __init__(self, link: AgentLink, store: Any = None) -> None:
        """store: a torch.distributed.Store of all ranks. Without one they cannot agree on what to load: each takes
        the newest that it can read."""
        env = link.start.env
        self.rank, self.world = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
        # Without a common store the ranks cannot agree, and each behaves as if it were alone. Waiting for
        # words that no other rank can send would hang the load.
        self.exchange = RankExchange("agent", self.rank, self.world if store is not None else 1, store)
        self.store = store
        self._node = env.get("HOLDFAST_NODE", "")
        self._generation = int(env.get("HOLDFAST_GENERATION", "0"))
        self._tiers = [tier.url for tier in tiers_of(env)]
        self._link = link
        self._slots = AgentSlots(link)
        self._turns = Turns(
            parse_cadence(env.get("HOLDFAST_SNAPSHOT_EVERY", "auto")),
            RankExchange("turns", self.rank, self.exchange.world, store),
            self.world,
        )
        self._skipping = False

    def begin(self, index: StateIndex, *, wanted: bool = False) -> Fill | PassedOver:
        """The agent ends this process only when the copy is complete: of the first rank's it knows before the script goes on."""
        key = Key(index.step, self._generation, self.rank, self.world)
        if not wanted and not self._turns.is_due(index.step):
            return PassedOver.NOT_DUE
        if wanted or self._turns.decides:
            self._slots.want(key, index.nbytes, wanted, self._turns.agree)
        return partial(self._fill, key, index, wanted, self._link.record.committed)

    def keeps_newest(self, why: PassedOver) -> bool:
        """The agent brings it to the durable tiers at the job's end."""
        return True

    def _slot(self, key: Key) -> str | None:
        """The path of the slot that was asked for."""
        given = self._slots.given(key, SLOT_WAIT_S)
        if given is not None and given.path is not None:
            self._skipping = False
            return given.path
        reason = given.reason if given else f"the agent did not provide memory within {SLOT_WAIT_S:g} s"
        # Said once for a series of skipped snapshots: a script that saves in every step would fill its
        # log with the same line.
        if not self._skipping and not (given is not None and given.paced):
            self._skipping = True
            _log.warning(f"rank {self.rank}: no snapshot of step {key.step}: {reason}")
        return None

    def _fill(self, key: Key, index: StateIndex, wanted: bool, steps: int, copy: Copy) -> bool | PassedOver:
        """steps: that this start had made when the script gave the state."""
        began_s = time.perf_counter()
        # One rank decides for all. Where each skipped by itself, hardly a snapshot would have the shards of all ranks.
        if wanted or self._turns.decides:
            path = self._slot(key)
            if not wanted:
                self._turns.tell(key.step, path is not None)
        elif self._turns.taken(key.step):
            self._slots.want(key, index.nbytes, True, self._turns.agree)
            path = self._slot(key)
        else:
            return self._turns.why_not
        if path is None:
            return PassedOver.SKIPPED
        if self.rank == 0:
            self._link.send(m.StateServed(self._generation, index.step, steps))

        def fill(blob: memoryview) -> bool:
            copy(blob)
            return True

        try:
            return self._slots.fill(key, index, path, fill, lambda: time.perf_counter() - began_s)
        except TierError as error:
            _log.warning(f"rank {self.rank}: no snapshot of step {index.step}: {error}")
            return False

    def candidates(self, on_skip: Callable[[str], None]) -> Iterator[Located]:
        """The snapshots in memory that the coordinator knows of, then the checkpoints in durable tiers."""
        # Numbered, because an answer to an earlier question, which timed out, may arrive while this one is
        # waited for.
        request = next(_requests)
        self._link.send(m.FindSnapshot(request))
        reply = self._link.wait_found(request, ASK_S)
        if reply is None:
            on_skip(f"the coordinator did not say within {ASK_S:g} s which snapshots are in memory")
        # Memory first: it is at least as new as any durable tier, and reading it does not depend on a store.
        # If it turns out not to be complete the durable tiers follow.
        if reply is not None and reply.copies:
            try:
                share = self.exchange.share
                yield find_in_memory(reply.copies, self._link.token, on_skip, self._node, *share)
            except StateError as error:
                on_skip(str(error))
        yield from in_archives(self._tiers, on_skip, self.exchange)

    @contextmanager
    def loading(self, where: str, total_bytes: int) -> Iterator[Count]:
        """In the script's output, and, for every rank, wherever the job is looked at."""
        far = HowFar(lambda nbytes, total: self._link.send(m.Restoring(self._generation, nbytes, total)))
        with progress(self.rank, where, total_bytes) as count:

            def seen(nbytes: int) -> None:
                count.add(nbytes)
                far.add(nbytes, total_bytes)

            try:
                yield seen
            finally:
                far.over(total_bytes)

    def expect(self, nbytes: int) -> None:
        """The agent brings it in while training goes on."""
        self._link.send(m.SnapshotExpected(self.rank, nbytes))

    def loaded(self, step: int | None) -> None:
        """The coordinator counts what is done again."""
        self._turns.begins_at(step or 0)
        if self.rank == 0:
            self._link.send(m.Loaded(self._generation, step, self._link.record.committed))

    def flush(self) -> None:
        """Returns at once: the agent does the rest, whatever happens to this process."""

    def why_not(self, step: int) -> str:
        """Always empty: the coordinator reports that, to whoever watches the job."""
        return ""


@dataclass(kw_only=True)
class _Job:
    """What the saving thread is to do."""

    number: int
    index: StateIndex
    tiers: list[DurableTier]
    slot: PooledSlot | None = None
    """The memory to save into; None: there is nothing to save."""
    why_not: str = ""
    """Why there is nothing to save; else empty."""


class StandaloneBackend:
    """Without a job: a memory of this process's own, which ends with it, and durable tiers.

    One thread brings what was copied to the tiers. With torch.distributed every rank writes its own shard and rank 0
    the manifest; they tell each other through the process group's store. Every rank answers for every checkpoint,
    also one that it could not keep: the others wait for it.
    """

    def __init__(
        self, tiers: tuple[DurableTier, ...], rank: int, world: int, store: Any = None, name: str = ""
    ) -> None:
        """store: a torch.distributed.Store of all ranks; needed when there are several. name: of this backend among
        those that share the store.

        Raises:
            TierError: no memory to copy into.
        """
        self.rank, self.world = rank, world
        self.exchange = RankExchange(f"backend/{name}", rank, world, store)
        # A second exchange for the saving thread. A store's client serves one call at a time, even a waiting
        # one: with a shared client the training thread could wait for the saving thread of another rank, and
        # that one for this rank's training thread.
        self._savers = RankExchange(f"savers/{name}", rank, world, store)
        self.store, self._tiers = store, tiers
        self._archives = {t.url: Archive(t.url) for t in tiers}
        self._last: dict[str, float] = {t.url: time.monotonic() for t in tiers}
        # A forked child inherits these fields but not the thread. Without the number its exit handler would
        # wait for a thread that does not exist.
        self._process = os.getpid()
        self._owned, folder = _own_memory()
        self._pool = SlotPool(folder, 0)
        self._pool.budget_bytes = default_budget(folder, self._pool.nbytes)
        self._todo: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._numbers = itertools.count(1)
        self._pending = 0
        self._failing: dict[str, tuple[int, str]] = {}
        self._thread = threading.Thread(target=self._work, name="holdfast-saver", daemon=True)
        self._thread.start()
        # The saving thread is a daemon, which the interpreter ends without mercy. These two handlers wait for
        # it first, so that what `save` accepted is in the durable tiers when the process ends normally.
        atexit.register(self.close)
        Finalize(None, self.close, exitpriority=10)  # processes of multiprocessing end without atexit

    def begin(self, index: StateIndex, *, wanted: bool = False) -> Fill | PassedOver:
        """Prepares the copy for the durable tiers that are due. With none due nothing is copied, because this memory ends with
        the process."""
        # Every rank takes a number for every call, and queues a job for every one that is due, even if its copy failed. The
        # saving threads exchange words about each number, and a rank that left one out would leave the others waiting.
        job = _Job(number=next(self._numbers), index=index, tiers=[])
        job.tiers = list(self._tiers) if wanted else self._due(job)
        return partial(self._fill, job) if job.tiers else PassedOver.NOT_DUE

    def keeps_newest(self, why: PassedOver) -> bool:
        """What is due is said by the tiers. Of several ranks none can save one more than the others, who wait for its part."""
        return why is PassedOver.SKIPPED and self.world == 1

    def _fill(self, job: _Job, copy: Copy) -> bool | PassedOver:
        """Durable tiers follow behind."""
        slot = None
        try:
            slot = self._pool.begin(Key(job.index.step, 1, self.rank, self.world), job.index.nbytes)
            with slot.blob as blob:
                copy(blob)
        except TierError as error:
            _log.warning(f"rank {self.rank}: no snapshot of step {job.index.step}: {error}")
            job.why_not = str(error)
            return PassedOver.SKIPPED
        except BaseException as error:
            if slot is not None:
                self._pool.drop(slot)
            job.why_not = f"copying the state failed: {error!r}"
            raise
        else:
            job.slot = slot
            return True
        finally:
            with self._lock:
                self._pending += 1
            self._todo.put(job)

    def _due(self, job: _Job) -> list[DurableTier]:
        """Steps are the same on all ranks; of time rank 0 is the judge, so that all save the same."""
        now = time.monotonic()
        due = []
        for tier in self._tiers:
            every = parse_cadence(tier.every)
            passed = every.steps == 1 or every.due(job.index.step, now - self._last[tier.url], AUTO_S)
            # Clocks differ between ranks. If each decided by its own, some would write their shard of a step
            # and the rest would not, and no manifest could ever name all of them. Steps need no such
            # agreement.
            if every.auto or every.seconds:
                passed = self.exchange.from_first(f"{job.number}/{tier.url}", passed)
            if passed:
                due.append(tier)
                self._last[tier.url] = now
        return due

    def candidates(self, on_skip: Callable[[str], None]) -> Iterator[Located]:
        """The checkpoints in durable tiers. Memory of earlier processes is gone."""
        self.flush()
        yield from in_archives([t.url for t in self._tiers], on_skip, self.exchange)

    @contextmanager
    def loading(self, where: str, total_bytes: int) -> Iterator[Count]:
        """Shows progress in the script's output."""
        with progress(self.rank, where, total_bytes) as count:
            yield count.add

    def expect(self, nbytes: int) -> None:
        """Nobody else could bring it in: it is this process's own."""

    def loaded(self, step: int | None) -> None:
        """Does nothing: without a job nobody counts steps."""

    def flush(self) -> None:
        """Waits until everything that was put is in the durable tiers."""
        with self._lock:
            self._lock.wait_for(lambda: self._pending == 0 or not self._thread.is_alive())

    def why_not(self, step: int) -> str:
        """After a flush: why a step that was put is not in a durable tier that was to have it; else empty."""
        return "; ".join(why for failed, why in self._failing.values() if failed == step)

    def close(self) -> None:
        """Flushes, ends the thread and gives the memory back. A forked child has neither."""
        atexit.unregister(self.close)
        if os.getpid() != self._process or not self._thread.is_alive():
            return
        self.flush()
        self._todo.put(None)
        self._thread.join()
        self._pool.close()
        os.close(self._owned)

    # ------------------------------------------------------------ the saving thread

    def _work(self) -> None:
        while (job := self._todo.get()) is not None:
            try:
                self._seal(job)
                for tier in job.tiers:
                    self._store_in(tier, job)
                self._pool.snapshot_complete(job.index.step)
            except Exception as error:  # noqa: BLE001 - without this thread nothing would be saved any more
                _log.warning(f"rank {self.rank}: step {job.index.step} was not saved: {error!r}")
            finally:
                with self._lock:
                    self._pending -= 1
                    self._lock.notify_all()

    def _seal(self, job: _Job) -> None:
        if job.slot is None:
            return
        try:
            with job.slot.blob as blob:
                sums = sums_of(blob)
            self._pool.received(job.slot, seal(job.index, sums))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for an answer
            self._pool.drop(job.slot)
            job.slot, job.why_not = None, str(error)
            if not job.tiers:
                _log.warning(f"rank {self.rank}: step {job.index.step}: {error}")

    def _store_in(self, tier: DurableTier, job: _Job) -> None:
        archive, step, about = self._archives[tier.url], job.index.step, f"{job.number}/{tier.url}"
        try:
            answers = self._savers.gather(f"{about}/shards", self._stored_shard(archive, job))
            # All shards first, then the manifest: `gather` returns only when every rank has reported that its
            # shard is durable or why it is not. So rank 0 never publishes a manifest of shards that are still
            # on their way.
            why_not = next((f"rank {r}: {x['error']}" for r, x in enumerate(answers) if "error" in x), "")
            if not why_not:
                done = self._commit(archive, tier, step, answers)
                why_not = self._savers.from_first(f"{about}/done", done)
        except TierError as error:
            why_not = str(error)
        if not why_not:
            self._failing.pop(tier.url, None)
            return
        if tier.url not in self._failing and (not self.rank or job.why_not):
            _log.warning(f"step {step} was not saved in {tier.url}: {why_not}")
        self._failing[tier.url] = (step, why_not)

    def _stored_shard(self, archive: Archive, job: _Job) -> dict[str, Any]:
        """This rank's part, as the tier has it; or why not."""
        slot = job.slot
        if slot is None:
            return {"error": job.why_not}
        try:
            # Holds the slot while the tier reads from it: a later save may begin before a slow tier is done,
            # and must not get this memory.
            with self._pool.reading(slot.key):
                shard = archive.save_shard(job.index.step, self.rank, slot.sealed, slot.buffers())
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for an answer
            return {"error": str(error)}
        return {"shard": msgspec.to_builtins(shard)}

    def _commit(self, archive: Archive, tier: DurableTier, step: int, answers: list[dict[str, Any]]) -> str:
        """On rank 0: from now on the checkpoint exists. Returns why not."""
        if self.rank:
            return ""
        try:
            archive.commit(step, decode(_shards, answers, "what the ranks answered", error=TierError))
        except HoldfastError as error:
            return str(error)
        try:
            # After the commit, never before it: with keep=1 the old checkpoint must not go until the new one
            # exists. A failure here is no failure of the save.
            archive.prune(Retention(tier.keep, tier.keep_every), spare=step)
        except HoldfastError as error:
            _log.warning(f"step {step} was saved, but older ones could not be removed: {error}")
        return ""


AUTO_S = 60.0
"""What `auto` means where nobody measures failures."""


def _shards(answers: list[dict[str, Any]]) -> list[Shard]:
    return [msgspec.convert(x["shard"], Shard) for x in answers]


def _own_memory() -> tuple[int, Path]:
    """A folder that is this process's for as long as it holds the lock on the file descriptor, which it keeps. Gives
    back what processes left that were killed. (Not told by their ids: memory may be shared by several containers.)

    Raises:
        TierError: there can be no memory here.
    """
    root = memory_base() / "alone"
    while True:
        folder = root / uuid.uuid4().hex
        own_folder(folder)
        try:
            lock = os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Another process that cleaned up removed the empty folder between its making and this call. A new
        # name, and again.
        except FileNotFoundError:
            continue
        except OSError as error:
            raise TierError(f"the snapshot memory in {folder} cannot be used: {error.strerror}") from error
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Having the lock is not enough: the file may have been removed by a process that took it for one of a
        # dead owner, in the moment before the lock. Then this lock protects a file without a name, and nobody
        # else would see it.
        if (folder / LOCK).exists():
            break
        os.close(lock)  # somebody who gives back what others left was here before the lock
    for other in root.glob(f"*/{LOCK}"):
        if other.parent != folder and _is_free(other):
            remove_memory(other.parent)
    return lock, folder


LOCK = "owner.lock"


def _is_free(lock: Path) -> bool:
    try:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# Made once, and not by whoever reads first: msgspec 0.22 crashes where two threads are the first to decode a type.
_lists = msgspec.msgpack.Decoder(list[bytes])
_values = msgspec.msgpack.Decoder()


class RankExchange:
    """Exchanges values between all ranks, each under a name of its own. Blocks until they have arrived.

    A store's client serves one call at a time, even one that waits. So each thread needs a `RankExchange` of its own, or two
    threads of two ranks could wait for each other for ever.
    """

    def __init__(self, name: str, rank: int, world: int, store: Any = None) -> None:
        """store: a torch.distributed.Store of all ranks; needed when there are several. `name` is the same on all."""
        self.rank, self.world = rank, world
        if world > 1:
            # A connection of its own: see the class. The store that the process group uses must never be
            # blocked by a rank that waits here.
            self._store = store.clone()
            # Every rank adds 1, so the ranks of one session see `world` consecutive numbers, and the division
            # gives all of them the same one. A later session in the same store gets other keys, and cannot
            # read answers of this one.
            session = (self._store.add(f"holdfast/{name}", 1) - 1) // world
            self._name = f"holdfast/{name}/{session}"

    @property
    def share(self) -> tuple[int, int]:
        """This rank, and how many there are that tell each other; a rank that hears no other one is alone."""
        return (self.rank, self.world) if self.world > 1 else (0, 1)

    def gather(self, about: str, value: Any) -> list[Any]:
        """What every rank says, in the order of the ranks. Plain values.

        Raises:
            TierError: a rank did not say it within the store's time-out.
        """
        if self.world == 1:
            return [value]
        mine = msgspec.msgpack.encode(value)
        name = f"{self._name}/{about}"
        try:
            if self.rank:
                self._store.set(f"{name}/{self.rank}", mine)
                # Rank 0 collects and publishes one list, so every rank decides on the same bytes. If each
                # collected by itself, one could time out where another did not, and they would go different
                # ways.
                together = self._store.get(f"{name}/all")
            else:
                others = [f"{name}/{rank}" for rank in range(1, self.world)]
                together = msgspec.msgpack.encode([mine, *(self._store.get(n) for n in others)])
                self._answer(f"{name}/all", together)
                for other in others:
                    # Keys are deleted by their reader, or a run that saves for weeks would fill the store.
                    # The answer stays: how many have read it is not known.
                    self._store.delete_key(other)
        except RuntimeError as error:
            raise TierError(
                f"rank {self.rank}: the other ranks did not answer: {_first_line(error)}"
            ) from error
        what = f"{self._name}/{about}: the data that the ranks exchanged is damaged"
        parts: list[bytes] = decode(_lists.decode, together, what, error=TierError)
        return [decode(_values.decode, part, what, error=TierError) for part in parts]

    def from_first(self, about: str, value: Any, patience_s: float | None = None) -> Any:
        """What rank 0 says; the values of the others do not matter.

        Args:
            patience_s: for rank 0 to say it; None: the store's time-out.

        Raises:
            TierError: it did not say it in time.
        """
        if self.world == 1:
            return value
        name = f"{self._name}/{about}"
        try:
            if self.rank:
                if patience_s is not None:
                    self._store.wait([name], timedelta(seconds=patience_s))
                return decode(
                    _values.decode,
                    self._store.get(name),
                    f"{name}: the data from rank 0 is damaged",
                    error=TierError,
                )
            self._answer(name, msgspec.msgpack.encode(value))
        except RuntimeError as error:
            raise TierError(f"rank {self.rank}: rank 0 did not answer: {_first_line(error)}") from error
        return value

    def forget(self, about: str) -> None:
        """What was said about it goes. Who asks for it later waits as for what was never said."""
        with suppress(RuntimeError):  # the store is gone, and all that was in it
            self._store.delete_key(f"{self._name}/{about}")

    def _answer(self, name: str, data: bytes) -> None:
        """Rank 0 may hold the store, and end as soon as this returns: the others must be able to have it by then."""
        self._store.set(name, data)
        self._store.get(name)


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [""])[0]
