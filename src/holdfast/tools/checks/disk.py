"""The disk under a folder: data that was written must be read back from the device, not from the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import xxhash

from holdfast.health.checks.check import CannotCheck, Task
from holdfast.protocol.health import CheckResult, Condition

SHARE = 0.05
"""The share of the free space that is written."""

MOST_BYTES = 2 << 30
BLOCK_BYTES = 4 << 20
BROKEN = (errno.EIO, errno.EROFS, errno.EUCLEAN, errno.ENODEV, errno.ENXIO)
"""Errors that a broken disk or file system returns. EUCLEAN: the file system's structure is damaged."""


def check_disk(task: Task) -> Iterator[CheckResult]:
    """Writes for about the given time, reads everything back, and removes the file."""
    folder = task.path
    path = folder / f".check-{secrets.token_hex(8)}"
    try:
        left = os.statvfs(folder)
        # Only a share, so that the check itself never fills a disk on which another job writes its
        # checkpoints.
        blocks = min(int(left.f_bavail * left.f_frsize * SHARE), MOST_BYTES) // BLOCK_BYTES
        if blocks < 1:
            raise CannotCheck(f"{folder} has too little room to test it")
        yield from _write_and_read(path, blocks, task.seconds)
    except OSError as error:
        # Quotas, permissions and a full disk must be fixed by the user or the administrator; replacing the
        # node would not help.
        if error.errno not in BROKEN:
            raise CannotCheck(f"{folder}: {error.strerror}") from None
        yield CheckResult(
            name="disk", condition=Condition.FAULTY, detail=f"{folder}: {error.strerror}", subject=str(folder)
        )
    finally:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            pass  # the result already names the problem of the folder


def _write_and_read(path: Path, blocks: int, seconds: float) -> Iterator[CheckResult]:
    where = str(path.parent)
    # Random bytes, because drives and file systems compress or deduplicate: a block of zeros would measure
    # how well they do that.
    seed = secrets.token_bytes(BLOCK_BYTES // 2) * 2
    sums: list[int] = []
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:  # O_DIRECT wants whole pages
        fd, direct = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            began_s = time.monotonic()
            while len(sums) < blocks and (not sums or time.monotonic() - began_s < seconds):
                # Made from a seed instead of drawn anew: drawing random bytes is slower than a fast drive
                # writes.
                fill(buffer, seed, len(sums))
                sums.append(xxhash.xxh3_64_intdigest(buffer))
                _whole(os.write(fd, buffer))
            # Within the measured time: without it the figure would be the speed of the drive's or the file
            # system's memory.
            os.fsync(fd)
            wrote_s = time.monotonic() - began_s
        finally:
            os.close(fd)
        nbytes = len(sums) * BLOCK_BYTES
        how = f"{nbytes >> 20} MiB" + ("" if direct else ", through the page cache")
        yield CheckResult(
            name="disk-write",
            condition=Condition.HEALTHY,
            detail=how,
            value=round(nbytes / wrote_s / 1e6, 1),
            unit="MB/s",
            subject=where,
        )
        fd, direct = _open(path, os.O_RDONLY)
        try:
            if not direct:
                # Where O_DIRECT is refused, the pages at least are dropped, or the check would read its own
                # memory. It is a hint; the detail says that the cache was in between.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            began_s = time.monotonic()
            wrong = [n for n, wanted in enumerate(sums) if _read(fd, buffer) != wanted]
            read_s = time.monotonic() - began_s
        finally:
            os.close(fd)
    if wrong:
        detail = (
            f"{len(wrong)} of {len(sums)} blocks of 4 MiB came back changed, the first is number {wrong[0]}"
        )
        yield CheckResult(name="disk-read", condition=Condition.FAULTY, detail=detail, subject=where)
        return
    yield CheckResult(
        name="disk-read",
        condition=Condition.HEALTHY,
        detail=how,
        value=round(nbytes / read_s / 1e6, 1),
        unit="MB/s",
        subject=where,
    )


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """Opens the file bypassing the page cache, or through it if the file system requires that (tmpfs, some overlays)."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600), True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    # The first attempt may have created the file before it refused O_DIRECT, so an exclusive creation would
    # fail on our own file. Its name is random, so it is nobody else's.
    return os.open(path, (flags & ~os.O_EXCL) | os.O_CLOEXEC, 0o600), False


def fill(buffer: mmap.mmap, seed: bytes, number: int) -> None:
    """Fills the buffer with a block unlike any other: random bytes, rotated and numbered. So a block that comes back
    from another place is detected, and no device can compress it."""
    at = number * 4099 % (len(seed) // 2)
    buffer[: len(seed) - at] = seed[at:]
    buffer[len(seed) - at :] = seed[:at]
    buffer[:8] = number.to_bytes(8, "little")


def _whole(nbytes: int) -> None:
    if nbytes != BLOCK_BYTES:
        raise CannotCheck("the disk took part of a block only: it is full")


def _read(fd: int, buffer: mmap.mmap) -> int:
    """Checksum of the next block; that of a short block is different."""
    return xxhash.xxh3_64_intdigest(memoryview(buffer)[: os.readv(fd, [buffer])])
