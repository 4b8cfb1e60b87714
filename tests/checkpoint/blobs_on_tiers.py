"""Checkpoints for tests: blobs of known bytes, saved as ranks save them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.checkpoint.archive import Archive
from holdfast.checkpoint.layout import Manifest, Sealed, Shard, seal, sums_of
from holdfast.checkpoint.tier import Tier
from holdfast.errors import StateError
from holdfast.tensors.index import StateIndex, TensorSpec


def blob_of(step: int, rank: int, nbytes: int = 100_000) -> bytes:
    """Bytes that differ from step to step and rank to rank, and from chunk to chunk."""
    block = b"".join((step * 1009 + rank * 31 + i).to_bytes(4, "little") for i in range(257))
    return (block * (nbytes // len(block) + 1))[:nbytes]


def sealed(step: int, data: bytes) -> Sealed:
    """With a head that names two tensors, and the checksums in it."""
    half = len(data) // 2
    tensors = (
        TensorSpec(path="model.a", dtype="uint8", shape=(half,), offset=0, nbytes=half),
        TensorSpec(
            path="model.b", dtype="uint8", shape=(len(data) - half,), offset=half, nbytes=len(data) - half
        ),
    )
    return seal(StateIndex(step, {}, tensors, len(data)), sums_of(memoryview(data)))


def in_buffers(data: bytes, nbytes: int = 30_001) -> Iterator[memoryview]:
    """As a saver may do it: the same memory again for every piece."""
    scratch = bytearray(nbytes)
    for low in range(0, len(data), nbytes):
        piece = data[low : low + nbytes]
        scratch[: len(piece)] = piece
        yield memoryview(scratch)[: len(piece)]


def save_rank(archive: Archive, step: int, rank: int, nbytes: int = 100_000) -> Shard:
    """One rank's part."""
    data = blob_of(step, rank, nbytes)
    return archive.save_shard(step, rank, sealed(step, data), in_buffers(data))


def save(archive: Archive, step: int, world: int = 2, nbytes: int = 100_000) -> Manifest:
    """A whole checkpoint."""
    return archive.commit(step, [save_rank(archive, step, rank, nbytes) for rank in range(world)])


def loaded(archive: Archive, step: int) -> list[bytes]:
    """The blobs of a checkpoint, read as a loader reads them."""
    shards = archive.manifest(step).shards
    blobs = [archive.blob(s, archive.head(s)) for s in shards]
    return [bytes(blob.fetch(0, blob.nbytes)) for blob in blobs]


def newest_complete(archive: Archive, on_skip: Callable[[str], None] = lambda why: None) -> int | None:
    """The newest step of which every byte is as it was saved."""
    for step in reversed(archive.steps()):
        try:
            return archive.verify(step).step
        except StateError as error:
            on_skip(str(error))
    return None


def replaced(tier: Tier, name: str, data: bytes) -> None:
    """Damage: other bytes under a name."""
    tier.write(name, [memoryview(data)], len(data))


def flip(tier: Tier, name: str, at: int) -> None:
    """Damage: one bit; of a blob, behind its header."""
    data = bytearray(tier.read(name))
    data[at + blob_at(data) if ".head." not in name and name.endswith(".safetensors") else at] ^= 1
    replaced(tier, name, bytes(data))


def blob_at(data: bytes | bytearray) -> int:
    """Where in a file of safetensors the tensors begin."""
    return 8 + int.from_bytes(data[:8], "little")
