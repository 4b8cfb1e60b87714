"""Checksums of a row of bytes, chunk by chunk: found quickly, checked for any range of whole chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from holdfast.checkpoint.layout import CHUNK_BYTES

SUM_BYTES = 8


def sums_of(row: memoryview) -> bytes:
    """xxh3_64 of every chunk of a row, one after the other."""
    digest = xxhash.xxh3_64_digest
    return b"".join(digest(row[low : low + CHUNK_BYTES]) for low in range(0, len(row), CHUNK_BYTES))


def sums_of_pieces(pieces: Iterable[memoryview]) -> bytes:
    """The same for a row that comes in pieces of any size."""
    sums = []
    chunk, room = xxhash.xxh3_64(), CHUNK_BYTES
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + room]
            chunk.update(part)
            at, room = at + len(part), room - len(part)
            if not room:
                sums.append(chunk.digest())
                chunk, room = xxhash.xxh3_64(), CHUNK_BYTES
    if room < CHUNK_BYTES:
        sums.append(chunk.digest())
    return b"".join(sums)


def damaged(data: memoryview, low: int, sums: bytes) -> Iterator[tuple[int, int]]:
    """The byte ranges of `data`, which begins at byte `low` of the row (a chunk's begin), that are not as summed."""
    first = low // CHUNK_BYTES * SUM_BYTES
    found = sums_of(data)
    if found == sums[first : first + len(found)]:
        return
    for begin in range(0, len(data), CHUNK_BYTES):
        at = begin // CHUNK_BYTES * SUM_BYTES
        if found[at : at + SUM_BYTES] != sums[first + at : first + at + SUM_BYTES]:
            yield low + begin, low + min(begin + CHUNK_BYTES, len(data))


def whole_chunks(low: int, high: int, nbytes: int) -> tuple[int, int]:
    """The smallest range of whole chunks around [low, high) of a row of `nbytes`."""
    return low // CHUNK_BYTES * CHUNK_BYTES, min(nbytes, -(-high // CHUNK_BYTES) * CHUNK_BYTES)
