"""Memory: its speed, and whether data is read back as it was written."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.health.capacity import cpu_model
from holdfast.health.checks.check import CannotCheck, Task
from holdfast.protocol.health import CheckResult, Condition
from holdfast.protocol.machine.processes import available_bytes

SHARE = 0.1
"""The share of free memory that is tested, so that a job that trains at the same time is not disturbed."""

MOST_BYTES = 8 << 30
COPY_BYTES = 256 << 20
CHUNK_BYTES = 64 << 20
LEAST_CHUNKS = 4
WORD_BYTES = 8
PATTERNS = {
    "zeros": 0,
    "ones": -1,
    "0x55": 0x5555555555555555,
    "0xAA": 0x5555555555555555 * 2 - (1 << 64),
    "0x0F": 0x0F0F0F0F0F0F0F0F,
    "0xF0": 0x70F0F0F0F0F0F0F0 - (1 << 63),
}
"""Test patterns as signed 64-bit words. After them each word's own number is written, which detects mixed-up addresses."""

ADDRESS = "address"


def check_memory(task: Task) -> Iterator[CheckResult]:
    """Copy bandwidth on all cores, then patterns over a share of the free memory."""
    try:
        import torch
    except ImportError:
        raise CannotCheck("needs torch, which is not installed here") from None
    free = available_bytes()
    if free is None:
        raise CannotCheck("/proc/meminfo cannot be read, so it is not known how much may be used")
    # One core alone does not saturate the memory of a server.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    nbytes = min(COPY_BYTES, int(free * SHARE) // 2)
    if nbytes < 1 << 20:
        raise CannotCheck(f"only {free >> 20} MiB are free")
    gigabytes, times = copy_rate(torch.device("cpu"), nbytes, task.seconds / 2)
    yield CheckResult(
        name="memory-copy",
        condition=Condition.HEALTHY,
        detail=f"read and written, best of {times}, {nbytes >> 20} MiB each",
        value=round(gigabytes, 2),
        unit="GB/s",
        model=cpu_model(),
    )
    yield check_patterns(
        "memory-patterns", torch.device("cpu"), min(int(free * SHARE), MOST_BYTES), task.seconds
    )


def copy_rate(
    device: Any, nbytes: int, seconds: float, sync: Callable[[], object] = lambda: None
) -> tuple[float, int]:
    """GB/s of copying one buffer into another, counting bytes read and bytes written, and the number of copies. The
    best time counts: slower ones are due to other load on the machine."""
    import torch

    source = torch.ones(nbytes // WORD_BYTES, dtype=torch.int64, device=device)
    target = torch.zeros_like(source)
    # Once before the clock runs: the first touch of a page maps it, which takes longer than copying it.
    target.copy_(source)
    sync()
    best_s, times, until_s = math.inf, 0, time.monotonic() + seconds
    while times < 3 or time.monotonic() < until_s:
        began_s = time.perf_counter()
        target.copy_(source)
        sync()
        best_s = min(best_s, time.perf_counter() - began_s)
        times += 1
    return 2 * source.numel() * WORD_BYTES / best_s / 1e9, times


def check_patterns(
    name: str,
    device: Any,
    nbytes: int,
    seconds: float,
    damage: Callable[[Any], None] = lambda words: None,
) -> CheckResult:
    """Writes each pattern over all of `nbytes`, then reads everything. If that would take longer than `seconds` in
    total, a smaller part is tested: as much as could be written in an eighth of the time. damage: for tests; called
    between writing and reading."""
    import torch

    words = torch.empty(max(1, nbytes // WORD_BYTES), dtype=torch.int64, device=device)
    chunk = CHUNK_BYTES // WORD_BYTES
    until_s = time.monotonic() + seconds / 8
    tested = len(words)
    for pattern in (*PATTERNS, ADDRESS):
        for start in range(0, tested, chunk):
            # Writing is timed only with the first pattern; from then on the same part is tested for all of
            # them. A pattern that covers less would compare words that it never wrote.
            if start >= LEAST_CHUNKS * chunk and tested == len(words) and time.monotonic() > until_s:
                tested = start
                break
            _write(words[start : min(start + chunk, tested)], pattern, start)
        until_s = math.inf
        # Everything is written before any of it is read: a word that is read back at once comes from a cache
        # and not from memory.
        damage(words)
        for start in range(0, tested, chunk):
            part = words[start : min(start + chunk, tested)]
            if (where := _first_wrong(part, pattern, start)) is not None:
                # Shown as unsigned: torch has signed words, and a minus sign would hide which bits differ.
                found = int(part[where - start]) & (1 << 64) - 1
                wanted = (PATTERNS.get(pattern, where)) & (1 << 64) - 1
                return CheckResult(
                    name=name,
                    condition=Condition.FAULTY,
                    detail=f"pattern {pattern}: word {where} of {tested} was {wanted:016x}, came back {found:016x} "
                    f"({(found ^ wanted).bit_count()} bits differ)",
                    value=tested * WORD_BYTES,
                    unit="B",
                )
    return CheckResult(
        name=name,
        condition=Condition.HEALTHY,
        detail=f"{len(PATTERNS) + 1} patterns came back as written",
        value=tested * WORD_BYTES,
        unit="B",
    )


def _write(part: Any, pattern: str, start: int) -> None:
    import torch

    if pattern == ADDRESS:
        torch.arange(start, start + len(part), out=part)
    else:
        part.fill_(PATTERNS[pattern])


def _first_wrong(part: Any, pattern: str, start: int) -> int | None:
    """Number of the first word that differs; None when none does."""
    import torch

    wanted = (
        torch.arange(start, start + len(part), device=part.device)
        if pattern == ADDRESS
        else PATTERNS[pattern]
    )
    wrong = part != wanted
    if not bool(wrong.any()):
        return None
    return start + int(wrong.to(torch.uint8).argmax())
