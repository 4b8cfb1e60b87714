"""Snapshot memory: slots in shared memory that a node's agent owns and its workers copy into.

A slot is a plain file in a folder of a memory file system, so it outlives the worker that filled it and the agent
too: a new agent adopts what it finds. (Python's `multiprocessing.shared_memory` would be unlinked when an attached
worker is killed.) The agent allocates a slot's pages before a worker sees it, because filling cold pages takes ten
times as long as the copy.

    [header, 4096 bytes][blob, to the next 4096][head]

The header says what the slot holds. `WRITING` while a worker copies; `SEALED` when the copy is complete and its
checksums are known: only then does the slot count. Slots are used in turn, and never one that the newest complete
snapshot lives in, or an older one that more nodes hold.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import shutil
import stat
import struct
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from holdfast.checkpoint.layout import CHUNK_BYTES, Head, Sealed, damaged, decode_head, seal, sums_of
from holdfast.errors import ChecksumError, MemoryShort, SlotsTaken, StateError, TierError
from holdfast.protocol.machine.processes import rooms
from holdfast.protocol.snapshots import Key, Part
from holdfast.tensors.index import StateIndex

PAGE = 4096
_HEADER = struct.Struct(
    "<8sIIqqiiQQ16sQ"
)  # magic, version, state, step, generation, rank, world, blob, head, digest, run
_MAGIC = b"holdfast"
_VERSION = 2
SLOTS_PER_SHARD = 2
BUFFER_BYTES = 128 * CHUNK_BYTES
MAKE_ATTEMPTS = 100
RESERVE_BYTES = 64 << 20
"""Left free in the memory file system, whatever the budget says."""


WORKERS_PART = 16
"""One of so many parts of the machine's memory, and of each limit of a container, stays free too, for what workers take
later."""


class SlotState(enum.IntEnum):
    """What a slot holds."""

    FREE = 0
    WRITING = 1
    SEALED = 2


_NOTHING = Key(0, 0, 0, 1)
UNSEALED = Sealed(b"", b"", b"", 0)


@dataclass(kw_only=True)
class PooledSlot:
    """One slot, as the pool that owns it sees it."""

    path: Path
    capacity: int
    """Bytes that its blob may have."""
    memory: mmap.mmap | None = None
    """Mapped once, because a new mapping's page faults cost more than a copy. None until its pages are there."""
    state: SlotState = SlotState.FREE
    key: Key = _NOTHING
    blob_bytes: int = 0
    sealed: Sealed = UNSEALED
    """What goes with the blob; empty unless it is sealed."""
    users: int = 0
    """Readers. It must not be changed while there is one."""
    run: int = 0
    """Which start of the job filled it."""
    adopted: bool = False
    """An earlier agent filled it."""
    unused: bool = False
    """Brought in ahead for the first snapshots of its rank, and not filled yet."""

    @property
    def head(self) -> bytes:
        """The file of that name."""
        return self.sealed.head

    @property
    def sums(self) -> bytes:
        """Of the blob's chunks."""
        return self.sealed.sums

    @property
    def blob(self) -> memoryview:
        """The blob's bytes, writable."""
        if self.memory is None:
            return memoryview(b"")
        return memoryview(self.memory)[PAGE : PAGE + self.blob_bytes]

    def buffers(self) -> Iterator[memoryview]:
        """The blob, buffer by buffer, each verified: memory that went bad is not to replace a checkpoint that is good.

        Raises:
            ChecksumError: it is not as it was summed up.
        """
        with self.blob as blob:
            for low in range(0, len(blob), BUFFER_BYTES):
                with blob[low : low + BUFFER_BYTES] as buffer:
                    bad = next(damaged(buffer, low, self.sums), None)
                    if bad is not None:
                        raise ChecksumError(
                            f"the snapshot of step {self.key.step}, rank {self.key.rank} changed in memory: "
                            f"bytes {bad[0]} to {bad[1]}"
                        )
                    yield buffer


class SlotPool:
    """All slots of one node. Thread-safe; methods that copy or sum block for as long as that takes.

    Attributes:
        skipped: snapshots that found no slot.
    """

    def __init__(self, folder: Path, budget_bytes: int, run: int = 0) -> None:
        """Takes the folder over, with every sealed slot in it whose head can be read.

        Args:
            run: a number (64 bits) of this start of the job, the same on every node. Generations count from 1 in
                every run, so without it shards that two runs took at the same step could pass for one snapshot.

        Raises:
            TierError: the folder cannot be made, or belongs to somebody else.
        """
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.skipped = 0
        self._run = run
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._slots: list[PooledSlot] = []
        self._coming: list[PooledSlot] = []
        self._complete_step = -1
        self._kept_step: int | None = None
        own_folder(folder)
        self._adopt()

    # ------------------------------------------------------------ writing

    def begin(self, key: Key, blob_bytes: int) -> PooledSlot:
        """A slot to copy a shard into. It is WRITING until `seal` or `drop`.

        Raises:
            SlotsTaken: the snapshots before are still on their way; this one is to be skipped.
            MemoryShort: it does not fit.
            TierError: the memory is gone.
        """
        with self._lock:
            try:
                # Chosen and marked WRITING under one lock, brought in without it. Two workers that ask at
                # once must not get the same slot, and bringing pages in takes half a second for a GiB, in
                # which nobody else may have to wait.
                slot = self._ready_slot(key, blob_bytes) or self._planned(key, blob_bytes)
            except OSError as error:
                raise TierError(
                    f"the folder {self.folder} of the snapshot memory cannot be used: {error.strerror}"
                ) from error
            slot.state, slot.key, slot.blob_bytes = SlotState.WRITING, key, blob_bytes
            slot.run, slot.adopted, slot.unused = self._run, False, False
            # From here until `received` the slot counts for nothing. A worker that dies in the middle of its
            # copy leaves a slot that is WRITING, which no reader and no later agent will take for a snapshot.
            slot.sealed = UNSEALED
        if slot.memory is None:
            try:
                self._bring_in(slot)
            except TierError:
                with self._lock:
                    # It was counted in the budget when it was planned. Left in the list, memory that was
                    # never brought in would be missing for good.
                    self._slots.remove(slot)
                    self.skipped += 1
                raise
        _write_header(slot)
        return slot

    def prepare(self, rank: int, blob_bytes: int, ended: Callable[[], bool]) -> None:
        """Brings the memory of a shard's slots in before they are wanted, unless that takes it from another snapshot
        or from the machine.

        Args:
            ended: asked now and then; when it says so, what was begun is given back.
        """

        def has_to_end() -> bool:
            # The workers take memory meanwhile, more than was foreseen when this began. It is theirs.
            return ended() or free_bytes(self.folder) < RESERVE_BYTES

        while (slot := self._expected(rank, blob_bytes)) is not None:
            there = False
            try:
                self._bring_in(slot, has_to_end)
                there = True
            except TierError:
                return  # whoever needs the memory will say so
            finally:
                with self._arrived:
                    self._coming.remove(slot)
                    there = there and self._arrive(slot, ended())
                    # Also after a failure: whoever waits for this slot then brings in one of its own.
                    self._arrived.notify_all()
            if not there:
                return

    def _expected(self, rank: int, blob_bytes: int) -> PooledSlot | None:
        """The next slot to bring in for a shard; None when it has enough, or there is no room."""
        need = _head_at(blob_bytes)
        with self._lock:
            # Only memory that nobody uses: preparing is a favour to the first snapshot, and must not evict a
            # snapshot that somebody may restore. What comes for other shards is not in the budget yet, so two
            # at once could be promised the same memory.
            taken = sum(_head_at(slot.capacity) for slot in self._coming)
            if self._has_slots(rank, blob_bytes) or self._room() - taken < need:
                return None
            path = self.folder / f"{uuid.uuid4().hex}.slot"
            slot = PooledSlot(path=path, capacity=blob_bytes, key=Key(0, 0, rank, 1), unused=True)
            self._coming.append(slot)
            return slot

    def _arrive(self, slot: PooledSlot, ended: bool) -> bool:
        """A slot was brought in. Returns whether it counts: there is still use and room for it."""
        # Looked at again, because the lock was not held while pages came in. A slot that is not in the list is
        # not in the budget.
        short = self.budget_bytes - self.nbytes < _head_at(slot.capacity)
        if ended or short or self._has_slots(slot.key.rank, slot.capacity):
            slot.path.unlink(missing_ok=True)
            return False
        _write_header(slot)
        self._slots.append(slot)
        return True

    def _has_slots(self, rank: int, blob_bytes: int) -> bool:
        there = [s for s in self._slots if s.key.rank == rank and s.capacity >= blob_bytes]
        return len(there) >= SLOTS_PER_SHARD

    def seal(self, slot: PooledSlot, index: StateIndex) -> None:
        """The copy is complete: sums it up and lets it count. The slot is still to be dropped when this raises.

        Raises:
            StateError: the index is not of this blob.
            TierError: memory is short, or gone.
        """
        # Worker and agent agree on sizes by messages. If they disagree, checksums would be right for the
        # wrong bytes, and the mistake would show only at a restore.
        if index.nbytes != slot.blob_bytes or index.step != slot.key.step:
            raise StateError(
                f"the index is of step {index.step}, {index.nbytes} bytes; its slot is for another step or size"
            )
        with slot.blob as blob:
            sums = sums_of(blob)
        self.received(slot, seal(index, sums))

    def received(self, slot: PooledSlot, sealed: Sealed) -> None:
        """The blob is complete and verified: it counts from now on."""
        with self._lock:
            # A rollback or an eviction may have taken the slot back while its checksums were computed.
            # Sealing it now would revive a snapshot that the coordinator has forgotten.
            if slot.state is not SlotState.WRITING:
                raise StateError("the slot was freed in the meantime")
            try:
                with slot.path.open("r+b") as file:
                    file.seek(_head_at(slot.blob_bytes))
                    file.write(sealed.head)
            except OSError as error:
                raise TierError(f"no memory for a snapshot's head: {error.strerror}") from error
            # The head is in the file before the header says SEALED. An agent that is killed in between leaves
            # a slot that the next one gives back; the other order would leave a sealed slot with the head of
            # an earlier snapshot, which only the digest in the header would uncover.
            slot.sealed = sealed
            slot.state = SlotState.SEALED
            _write_header(slot)

    def drop(self, slot: PooledSlot) -> None:
        """What the slot holds does not count any more."""
        with self._lock:
            slot.state = SlotState.FREE
            slot.sealed = UNSEALED
            _write_header(slot)

    # ------------------------------------------------------------ what is held

    def held(self) -> list[PooledSlot]:
        """Sealed slots, oldest step first."""
        with self._lock:
            return sorted((s for s in self._slots if s.state is SlotState.SEALED), key=lambda s: s.key)

    def writing(self) -> list[PooledSlot]:
        """Slots that a copy goes on in."""
        with self._lock:
            return [s for s in self._slots if s.state is SlotState.WRITING]

    @contextmanager
    def reading(self, key: Key) -> Iterator[PooledSlot]:
        """Keeps a sealed slot as it is while it is read.

        Raises:
            StateError: it is not held here (any more).
        """
        with self._lock:
            # Found and counted under one lock: between the two, the slot could be chosen for the next
            # snapshot, and the reader would send a mixture of two steps, each chunk of which fails its
            # checksum.
            slot = next((s for s in self._slots if s.state is SlotState.SEALED and s.key == key), None)
            if slot is None:
                raise StateError(f"no snapshot of step {key.step}, rank {key.rank} is held here")
            slot.users += 1
        try:
            yield slot
        finally:
            with self._lock:
                slot.users -= 1

    def snapshot_complete(self, step: int, kept: int | None = None) -> None:
        """The snapshot of this step is complete: older ones are not needed any more, but for that of step `kept`."""
        with self._lock:
            # Reports may arrive out of order. Going back would make the newest complete snapshot dispensable.
            if step >= self._complete_step:
                self._complete_step, self._kept_step = step, kept

    def forget(self, above_step: int, until: int | None = None) -> None:
        """Training goes on from `above_step`: what was saved of later steps never happened. until: what was saved of later
        ones up to this will not become complete."""
        with self._lock:
            if until is None:
                # After a rollback, steps will be taken again and may come out with other bytes. Shards of the
                # old and the new attempt at a step must never be combined, so the old ones are dropped, on
                # every node, before training goes on.
                self._complete_step = min(self._complete_step, above_step)
            for slot in self._slots:
                later = slot.key.step > above_step and (until is None or slot.key.step <= until)
                if slot.state is SlotState.SEALED and later:
                    self.drop(slot)

    @property
    def nbytes(self) -> int:
        """Shared memory that the slots take."""
        with self._lock:
            return sum(s.capacity for s in self._slots)

    def leave(self) -> None:
        """Leaves what is held to the next agent here, and gives the rest back."""
        with self._lock:
            for slot in [s for s in self._slots if s.state is not SlotState.SEALED]:
                self._give_back(slot)
            if not self._slots:
                # An empty folder would be found by the next run and counted as memory that a node left
                # behind.
                remove_memory(self.folder)
            self._slots.clear()

    def close(self) -> None:
        """Gives all memory back."""
        with self._lock:
            self._slots.clear()
            remove_memory(self.folder)

    # ------------------------------------------------------------ slots

    def _ready_slot(self, key: Key, blob_bytes: int) -> PooledSlot | None:
        """A slot whose pages are there. One that is being brought in for this shard is waited for: to bring in another one
        beside it would take both twice as long."""
        while (slot := self._free_slot(key, blob_bytes)) is None and any(
            coming.key.rank == key.rank and _fits(coming, blob_bytes) for coming in self._coming
        ):
            self._arrived.wait()
        return slot

    def _free_slot(self, key: Key, blob_bytes: int) -> PooledSlot | None:
        """The smallest free slot that fits; else one whose snapshot is not needed any more."""
        # A slot with readers is never reused: a peer may be copying it, or a worker may have mapped its file.
        # That is the only promise that readers get, and the reason why they need no lock.
        fitting = [s for s in self._slots if s.capacity >= blob_bytes and not s.users]
        # One that was brought in for another rank's first snapshots is left to it: a copy of a neighbour's shard
        # would take it, and that rank's training would wait for new pages. `_make_room` gives it back if needed.
        free = [
            s
            for s in fitting
            if s.state is SlotState.FREE
            and _fits(s, blob_bytes)
            and not (s.unused and s.key.rank != key.rank)
        ]
        if free:
            return min(free, key=lambda s: s.capacity)
        return next((s for s in fitting if self._dispensable(s, key)), None)

    def _dispensable(self, slot: PooledSlot, key: Key, short: bool = False) -> bool:
        """A newer one is complete, or it is of a generation that broke before it became complete. Of an adopted one nobody
        may have said yet that it is complete: it goes only when memory is short."""
        if slot.state is not SlotState.SEALED:
            return False
        # The newest snapshot that every rank has is what a failure at this moment goes back to. It stays,
        # whatever the shortage, until a newer one is complete on all nodes.
        if slot.key.step in (self._complete_step, self._kept_step):
            return False
        # Three reasons to give a sealed slot up: a newer snapshot is complete; its generation broke before it
        # became complete, so its missing shards will never be taken; or the same rank takes the same step, or
        # an earlier one, again.
        older = slot.key.step < self._complete_step
        told = short or not slot.adopted
        stale = slot.key.step > self._complete_step and told and slot.key.generation < key.generation
        again = slot.key.step >= key.step and slot.key.rank == key.rank
        return older or stale or again

    def _planned(self, key: Key, blob_bytes: int) -> PooledSlot:
        """A new slot, counted from now on; its memory is still to be brought in."""
        shard = [s for s in self._slots if s.key.rank == key.rank and not s.users]
        for slot in [
            s for s in shard if s.state is SlotState.FREE or self._dispensable(s, key)
        ]:  # too small: the state has grown
            self._give_back(slot)
        # Two slots for each shard: one holds the newest complete snapshot, the other receives the next one.
        # When both are needed the new snapshot is skipped. Waiting instead would stall training at the speed
        # of the slowest durable tier.
        mine = [s for s in shard if s.state is not SlotState.FREE and not self._dispensable(s, key, True)]
        # What is kept beside the newest complete one has a slot of its own, if memory allows: else no other could be begun.
        if (
            sum(s.key.step != self._kept_step or s.state is SlotState.WRITING for s in mine)
            >= SLOTS_PER_SHARD
        ):
            self.skipped += 1
            raise SlotsTaken(
                f"the snapshots of steps {sorted(s.key.step for s in mine)} are still being copied to other tiers"
            )
        self._make_room(_head_at(blob_bytes), key)
        path = self.folder / f"{uuid.uuid4().hex}.slot"  # an adopted one may be of a process with our number
        slot = PooledSlot(
            path=path, capacity=blob_bytes, state=SlotState.WRITING, key=key, blob_bytes=blob_bytes
        )
        self._slots.append(slot)
        return slot

    def _bring_in(self, slot: PooledSlot, ended: Callable[[], bool] = lambda: False) -> None:
        """Makes a planned slot's file, all its pages present. Takes half a second for a GiB: not under the lock."""
        need = _head_at(slot.capacity)
        try:
            with slot.path.open("x+b") as file:
                slot.memory = bring_in(file.fileno(), need, slot.capacity, ended)
        except OSError as error:
            slot.path.unlink(missing_ok=True)
            raise MemoryShort(
                f"no memory for a snapshot of {-(-need >> 20)} MiB: {error.strerror}"
            ) from error

    def _make_room(self, need: int, key: Key) -> None:
        """Within the budget and what the memory file system has left."""
        # The oldest step first, and only until there is room: what is given back cannot be had again.
        for slot in sorted(self._slots, key=lambda s: s.key):
            if self._room() >= need:
                return
            if not slot.users and (slot.state is SlotState.FREE or self._dispensable(slot, key, True)):
                self._give_back(slot)
        if self._room() < need:
            self.skipped += 1
            raise MemoryShort(
                f"a snapshot of {-(-need >> 20)} MiB does not fit: the slots take {self.nbytes >> 20} of "
                f"{self.budget_bytes >> 20} MiB, and {free_bytes(self.folder) >> 20} MiB of memory are free"
            )

    def _give_back(self, slot: PooledSlot) -> None:
        self._slots.remove(slot)
        slot.path.unlink(missing_ok=True)

    def _room(self) -> int:
        return min(self.budget_bytes - self.nbytes, free_bytes(self.folder) - RESERVE_BYTES)

    # ------------------------------------------------------------ adoption

    def _adopt(self) -> None:
        """Takes over what an agent before left here. A slot that is not sealed, or not readable, is given back. What was
        saved in this very start of the job still goes with what the other nodes hold."""
        for path in sorted(self.folder.glob("*.slot")):
            slot = _read_slot(path, self._run)
            # Removed at once. A slot of an agent that was killed while a worker copied can never become
            # complete, and memory of slots that nobody counts would escape the budget.
            if slot is None:
                path.unlink(missing_ok=True)
            else:
                self._slots.append(slot)


def memory_system() -> Path:
    """Where snapshot memory is: `$HOLDFAST_MEMORY`, by default `/dev/shm`."""
    return Path(os.environ.get("HOLDFAST_MEMORY") or "/dev/shm")


def memory_base() -> Path:
    """This user's folder of snapshot memory, `holdfast-UID`; made where it is missing.

    Everybody may write in /dev/shm. Where somebody else has made a folder of that name, ours has another one, with a
    random ending. The next start finds it by its owner: nobody can make a folder that belongs to another.
    """
    usual = memory_system() / f"holdfast-{os.getuid()}"
    try:
        # A folder is trusted for its owner and mode, never for its name: /dev/shm belongs to everybody, and
        # another user may have made `holdfast-UID` first. lstat, because a link of that name could lead
        # anywhere.
        there = [f for f in (usual, *sorted(usual.parent.glob(f"{usual.name}-*"))) if _is_own(f)]
        if there:
            return there[0]
        _make_folder(usual.parent)
        try:
            usual.mkdir(mode=0o700)
        except FileExistsError:
            if not _is_own(usual):  # or another process of ours was faster
                return Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=usual.parent))
    except OSError:
        pass  # whoever makes a folder in it says why there can be none
    return usual


def _is_own(folder: Path) -> bool:
    """A folder, and no link to one, that nobody else can look into or write to."""
    try:
        kind = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(kind.st_mode) and kind.st_uid == os.getuid() and not kind.st_mode & 0o077


def remove_memory(folder: Path) -> None:
    """Gives a folder of slots back, and those of the folders above it that Holdfast made and that are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    for above in list(folder.parents)[:3]:
        try:
            above.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return
        if above.parent == memory_system():
            return


def hand_on(folder: Path, names: list[str]) -> None:
    """Gives the memory that the nodes of a run before have left to the nodes of the next one, which may have other
    names: those that joined late are not started again. Where there are more, the ones written last count."""
    left = sorted((d for d in folder.glob("*") if d.is_dir()), key=_written_s, reverse=True)
    # Which node of the next run reads which memory does not matter, since shards are found by their key. Only
    # the names must fit, and the newest memory must be among what is kept.
    kept, free = left[: len(names)], list(names)
    for old in left[len(names) :]:
        shutil.rmtree(old, ignore_errors=True)
    for old in kept:
        if old.name in free:
            free.remove(old.name)
    for old in kept:
        if old.name not in names:
            old.rename(folder / free.pop(0))


def _written_s(folder: Path) -> float:
    return max((slot.stat().st_mtime for slot in folder.iterdir()), default=0.0)


def free_bytes(folder: Path) -> int:
    """What the memory file system of a folder has left, and the machine, and the container. The file system is often as
    large as half of the memory, whatever the workers have taken: filling it would have the kernel kill one of them."""
    system = os.statvfs(folder)
    # statvfs only says how much the file system may still take. Its pages come from the same memory as the workers',
    # so what is really available is asked as well.
    spare = [room.free - room.total // WORKERS_PART for room in rooms()]
    # A memory file system that was mounted without a size has no blocks.
    if system.f_blocks or not spare:
        spare.append(system.f_bavail * system.f_frsize)
    return max(0, min(spare))


def default_budget(folder: Path, held_bytes: int = 0) -> int:
    """Half of what the memory file system has left now: the other half is the workers'.

    held_bytes: what lies there already and counts in the budget. It is no reason to take more of what is left: else the
    budget would grow with every restart of the process that keeps it.
    """
    return max(held_bytes, (free_bytes(folder) + held_bytes) // 2)


def _fits(slot: PooledSlot, blob_bytes: int) -> bool:
    """Whether a free slot is of a size for this blob."""
    # Not one more than twice as large: a small shard would hold the memory that a large one needs, and the
    # budget would not show why that one does not fit.
    return blob_bytes <= slot.capacity <= 2 * blob_bytes + PAGE


def _head_at(blob_bytes: int) -> int:
    return PAGE + -(-blob_bytes // PAGE) * PAGE


def own_folder(folder: Path) -> None:
    """Makes it, and those above it that are missing, for nobody else's eyes.

    Raises:
        TierError: it cannot be made, or others could read or exchange it.
    """
    try:
        _make_folder(folder)
        safe = _is_own(folder) and not _is_exchangeable(folder)
    except OSError as error:
        raise TierError(
            f"the snapshot memory in {folder} cannot be used: {error.strerror}; set HOLDFAST_MEMORY to another folder"
        ) from error
    if not safe:
        raise TierError(
            f"other users have access to {folder}: remove it, or set HOLDFAST_MEMORY to another folder"
        )


def _is_exchangeable(folder: Path) -> bool:
    """Whether others could put another in its place: it is in one that is theirs, or that all may write to. The sticky
    bit, as /dev/shm has it, forbids that. Looked at up to the first that is not this user's."""
    for kind in (p.stat() for p in folder.parents):
        theirs = kind.st_uid not in (os.getuid(), 0)
        if (theirs or kind.st_mode & 0o002) and not kind.st_mode & stat.S_ISVTX:
            return True
        if kind.st_uid != os.getuid():
            return False
    return False


def _make_folder(folder: Path) -> None:
    """Whoever ends at the same moment removes the folders above it that are empty: then they are made again."""
    for attempt in range(MAKE_ATTEMPTS):
        try:
            for made in (*reversed(folder.parents), folder):
                if not made.exists():
                    made.mkdir(mode=0o700, exist_ok=True)
            return
        # FileExistsError: the folder was there when it was to be made, and gone when `mkdir` looked whether it is one.
        except (FileNotFoundError, FileExistsError):
            if attempt == MAKE_ATTEMPTS - 1:
                raise


def _fields(slot: PooledSlot) -> bytes:
    key = slot.key
    checked = _HEADER.pack(
        _MAGIC, _VERSION, slot.state, key.step, key.generation, key.rank, key.world, slot.blob_bytes,
        len(slot.head), xxhash.xxh3_128_digest(slot.head), slot.run,
    )  # fmt: skip
    return checked + xxhash.xxh3_64_digest(checked)


def _write_header(slot: PooledSlot) -> None:
    fields = _fields(slot)
    assert slot.memory is not None
    # The header fits into one page and has a checksum of its own. A process that dies within this assignment
    # leaves a header that does not verify, and the slot is given back, never half believed.
    slot.memory[: len(fields)] = fields


def _adopted(generation: int, run: int) -> int:
    """The generation of a slot of another run: below those of any run, and another for every generation of every run."""
    return -1 - (xxhash.xxh3_64_intdigest(struct.pack("<qQ", generation, run)) >> 24)


def _read_slot(path: Path, ours: int) -> PooledSlot | None:
    """A sealed slot of an earlier agent's; None when it holds nothing complete. ours: the run that goes on."""
    try:
        with path.open("rb") as file:
            fields = file.read(_HEADER.size + 8)
            checked, own = fields[: _HEADER.size], fields[_HEADER.size :]
            # Nothing of the header is used before its checksum is compared. The lengths in it decide how much
            # is read and where.
            if len(own) < 8 or xxhash.xxh3_64_digest(checked) != own:
                return None
            magic, version, state, step, generation, rank, world, blob_bytes, head_bytes, head_digest, run = (
                _HEADER.unpack(checked)
            )
            if (magic, version, state) != (_MAGIC, _VERSION, SlotState.SEALED):
                return None
            # The checksum is over what the agent wrote, and a seal says nothing about the file behind it: it
            # may have been cut short. What is to be read has to be there before memory is taken for it.
            if _head_at(blob_bytes) + head_bytes > os.fstat(file.fileno()).st_size:
                return None
            file.seek(_head_at(blob_bytes))
            data = file.read(head_bytes)
        part = Part(path.name, head_bytes, head_digest.hex())
        head: Head = decode_head(data, part, str(path))
    except (OSError, StateError, struct.error):
        return None
    if head.index.nbytes != blob_bytes:
        return None
    try:
        with path.open("r+b") as file:
            capacity = os.fstat(file.fileno()).st_size - PAGE
            memory = map_blob(file.fileno(), capacity)
    except (OSError, ValueError):
        return None
    # Generations count from 1 in every run. A slot of an earlier run gets a number below all of them, derived
    # from its run, so that shards which two runs took at the same step never look like parts of one snapshot.
    known = generation if run and run == ours else _adopted(generation, run)
    key = Key(step, known, rank, world)
    slot = PooledSlot(
        path=path,
        capacity=capacity,
        memory=memory,
        state=SlotState.SEALED,
        key=key,
        blob_bytes=blob_bytes,
        sealed=seal(head.index, head.sums, data),
        run=run,
        adopted=True,
    )
    with slot.blob as blob:
        # Every byte is read once before the slot is offered. The agent that wrote it is gone, perhaps with
        # the machine's memory at fault, and a peer or a restore would otherwise find the damage when it is
        # too late to choose another copy.
        return slot if sums_of(blob) == head.sums else None


BRING_IN_BYTES = 64 << 20


MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23


_libc = ctypes.CDLL(None)


def bring_in(file: int, nbytes: int, blob_bytes: int, ended: Callable[[], bool]) -> mmap.mmap:
    """Allocates the file's `nbytes` and maps header and blob, every page present from now on. Not with MAP_POPULATE:
    Python's mmap keeps the GIL during the call, and half a second for every GiB is as good as dead to an agent that
    must say that it lives.

    Args:
        ended: asked now and then; when it says so, the rest is left out.

    Raises:
        OSError: no memory.
    """
    for low in range(0, nbytes, BRING_IN_BYTES):
        if ended():
            raise InterruptedError(0, "it is no longer needed")
        # Allocated first, mapped later: without it a full memory file system would kill the process that
        # touches a page (SIGBUS) instead of raising ENOSPC here.
        os.posix_fallocate(file, low, min(BRING_IN_BYTES, nbytes - low))
    memory = mmap.mmap(file, PAGE + blob_bytes)
    _populate(memory, MADV_POPULATE_WRITE, ended)
    return memory


def map_blob(file: int, blob_bytes: int) -> mmap.mmap:
    """Header and blob of a file whose pages are there. To read a page in is enough to write to it, and takes a third of
    the time."""
    memory = mmap.mmap(file, PAGE + blob_bytes)
    _populate(memory, MADV_POPULATE_READ, lambda: False)
    return memory


def _populate(memory: mmap.mmap, advice: int, ended: Callable[[], bool]) -> None:
    # The address is taken through ctypes because mmap.madvise holds the GIL during the call. The steps of 64
    # MiB keep each call short, so that `ended` is asked often.
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for low in range(0, len(memory), BRING_IN_BYTES):
        size = min(BRING_IN_BYTES, len(memory) - low)
        if ended() or _libc.madvise(ctypes.c_void_p(begin + low), ctypes.c_size_t(size), advice):
            return  # a kernel before 5.14: the pages come in with the first copy


def map_slot(path: Path, blob_bytes: int) -> mmap.mmap:
    """A slot in the worker's address space: the blob begins at byte PAGE.

    Raises:
        TierError: the slot is gone.
    """
    try:
        with path.open("r+b") as file:
            return map_blob(file.fileno(), blob_bytes)
    except (OSError, ValueError) as error:
        raise TierError(f"the file {path} of the snapshot memory cannot be opened: {error}") from error


class MappingObserver(Protocol):
    """Is told of the slots that this process maps, and before it unmaps them: for an accelerator's driver."""

    def mapped(self, memory: mmap.mmap) -> None: ...
    def unmapped(self, memory: mmap.mmap) -> None: ...


class SlotMaps:
    """The agent's slots in this process's address space. A slot stays mapped: its pages are present then."""

    def __init__(self, observer: MappingObserver | None = None) -> None:
        """observer: told of every mapping."""
        self._maps: dict[str, mmap.mmap] = {}
        self._observer = observer

    def blob(self, path: str, nbytes: int) -> memoryview:
        """The blob of a slot. Raises TierError when the slot is gone."""
        memory = self._maps.get(path)
        # A slot's path is new whenever its file is, so a known path with enough bytes is the same memory.
        # Mapping it again would cost the page faults that the pool has paid for already.
        if memory is None or len(memory) < PAGE + nbytes:
            self.forget(path)
            memory = self._maps[path] = map_slot(Path(path), nbytes)
            if self._observer is not None:
                self._observer.mapped(memory)
        # A mapping keeps the memory of a removed file. Without this a worker would hold what the agent
        # believes to have given back, and the machine would run out of memory within its budget.
        for old in [p for p in self._maps if p != path and not Path(p).exists()]:
            self.forget(old)
        return memoryview(memory)[PAGE : PAGE + nbytes]

    def forget(self, path: str) -> None:
        """Nobody copies into this slot any more."""
        memory = self._maps.pop(path, None)
        if memory is not None and self._observer is not None:
            self._observer.unmapped(memory)
