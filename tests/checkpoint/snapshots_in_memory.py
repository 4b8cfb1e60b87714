"""Snapshots for tests: blobs of known bytes in slots, and a pool in memory that a test may damage."""

from __future__ import annotations

import uuid
from pathlib import Path

from blobs_on_tiers import blob_of

from holdfast.checkpoint.layout import parts_of
from holdfast.checkpoint.memory import PAGE, PooledSlot, SlotPool
from holdfast.protocol.snapshots import Copy, Key, Part
from holdfast.tensors.index import StateIndex, TensorSpec

BUDGET = 128 << 20
SHM = Path("/dev/shm")


def new_folder() -> Path:
    """Where snapshot memory usually is, and three folders deep as an agent's is."""
    return SHM / f"holdfast-test-{uuid.uuid4().hex}" / "job" / "node"


def key_of(step: int, rank: int = 0, generation: int = 1, world: int = 1) -> Key:
    return Key(step, generation, rank, world)


def index_of(step: int, nbytes: int) -> StateIndex:
    half = nbytes // 2
    tensors = (
        TensorSpec(path="model.a", dtype="uint8", shape=(half,), offset=0, nbytes=half),
        TensorSpec(path="model.b", dtype="uint8", shape=(nbytes - half,), offset=half, nbytes=nbytes - half),
    )
    return StateIndex(step, {}, tensors, nbytes)


def fill(pool: SlotPool, key: Key, nbytes: int = 100_000) -> PooledSlot:
    """A slot that a worker has copied into."""
    slot = pool.begin(key, nbytes)
    with slot.blob as blob:
        blob[:] = blob_of(key.step, key.rank, nbytes)
    return slot


def save(pool: SlotPool, key: Key, nbytes: int = 100_000) -> PooledSlot:
    """A snapshot that counts."""
    slot = fill(pool, key, nbytes)
    pool.seal(slot, index_of(key.step, nbytes))
    return slot


def copy_of(slot: PooledSlot) -> Copy:
    key = slot.key
    return Copy(key, parts_of(key.step, key.rank, slot.sealed))


def part_of(slot: PooledSlot) -> Part:
    return copy_of(slot).shard.head


def is_right(slot: PooledSlot, nbytes: int = 100_000) -> bool:
    """Whether its bytes are those of its key."""
    with slot.blob as blob:
        return bytes(blob) == blob_of(slot.key.step, slot.key.rank, nbytes)


def flip(slot: PooledSlot, at: int) -> None:
    """Damage: one bit of the blob."""
    with slot.blob as blob:
        blob[at] ^= 1


def flip_file(path: Path, at: int) -> None:
    """Damage: one bit of a slot's file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


BLOB_AT = PAGE


def steps_of(pool: SlotPool) -> list[int]:
    return [s.key.step for s in pool.held()]


def slot_files(folder: Path) -> int:
    return len(list(folder.glob("*.slot")))
