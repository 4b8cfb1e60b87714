"""Checksums of a blob, chunk by chunk: made quickly, checked for any range of whole chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from holdfast.checkpoint.layout import CHUNK_BYTES

SUM_BYTES = 8


def sums_of(blob: memoryview) -> bytes:
    """xxh3_64 of every chunk of a blob, one after the other."""
    # One call for each chunk, without an intermediate object. This function runs over every byte of every
    # snapshot, and an attribute look-up per 32 KiB shows in the profile.
    digest = xxhash.xxh3_64_digest
    return b"".join(digest(blob[low : low + CHUNK_BYTES]) for low in range(0, len(blob), CHUNK_BYTES))


def sums_of_buffers(buffers: Iterable[memoryview]) -> bytes:
    """The same for a blob that comes in buffers of any size."""
    sums = []
    # The sums must not depend on how the bytes were cut on the way: buffers end at tensors, chunks at
    # multiples of CHUNK_BYTES. So a chunk's hash is continued across buffers.
    chunk, room = xxhash.xxh3_64(), CHUNK_BYTES
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            part = buffer[at : at + room]
            chunk.update(part)
            at, room = at + len(part), room - len(part)
            if not room:
                sums.append(chunk.digest())
                chunk, room = xxhash.xxh3_64(), CHUNK_BYTES
    if room < CHUNK_BYTES:
        sums.append(chunk.digest())
    return b"".join(sums)


def damaged(data: memoryview, low: int, sums: bytes) -> Iterator[tuple[int, int]]:
    """The byte ranges of `data`, which begins at byte `low` of the blob (a chunk's begin), that are not as summed."""
    first = low // CHUNK_BYTES * SUM_BYTES
    actual = sums_of(data)
    # The common case is one comparison of the joined sums. Only damaged data pays for the loop that finds
    # which chunks differ. A short slice of `sums` compares unequal, so bytes without a checksum count as
    # damaged.
    if actual == sums[first : first + len(actual)]:
        return
    for begin in range(0, len(data), CHUNK_BYTES):
        at = begin // CHUNK_BYTES * SUM_BYTES
        if actual[at : at + SUM_BYTES] != sums[first + at : first + at + SUM_BYTES]:
            yield low + begin, low + min(begin + CHUNK_BYTES, len(data))


def whole_chunks(low: int, high: int, nbytes: int) -> tuple[int, int]:
    """The smallest range of whole chunks around [low, high) of a blob of `nbytes`."""
    # Bytes can be verified only in complete chunks, so a reader of a slice reads up to two chunks more than
    # it was asked for.
    return low // CHUNK_BYTES * CHUNK_BYTES, min(nbytes, -(-high // CHUNK_BYTES) * CHUNK_BYTES)
