"""Lets two jobs on one machine take turns, a block of steps each.

On a shared machine only steps measured next to each other compare. Both jobs stay alive with all their
connections, and the harness raises a limit in a small shared file: a worker may begin step `s` when `s` is below
the limit. The limit only grows and every rank looks at the same step number, so ranks never disagree about
who may go on. A waiting worker writes the number of the step it waits for, so that the harness knows when
everybody, a checkpoint being written included, has come to rest.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

OPEN = 1 << 62
"""A limit that holds nobody."""
_SLOTS = 64
_NUMBER = struct.Struct("<q")
_POLL_S = 0.002


class _Numbers:
    """An array of 64-bit numbers in a shared file; slot 0 is the limit, slot 1 + rank a waiting worker."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SLOTS * _NUMBER.size)

    def __getitem__(self, slot: int) -> int:
        return _NUMBER.unpack_from(self._memory, slot * _NUMBER.size)[0]

    def __setitem__(self, slot: int, value: int) -> None:
        _NUMBER.pack_into(self._memory, slot * _NUMBER.size, value)


class Gate:
    """The worker's side."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._numbers = _Numbers(path)

    def wait(self, step: int, rank: int) -> float:
        """Wait until `step` may begin. Returns the seconds spent waiting.

        A plain sleep: a futex would need ctypes in every worker, and two milliseconds at the head of a block
        are outside what is measured.
        """
        if step < self._numbers[0]:
            return 0.0
        began = time.monotonic()
        self._numbers[1 + rank] = step
        while step >= self._numbers[0]:
            time.sleep(_POLL_S)
        return time.monotonic() - began


class GateKeeper:
    """The harness's side."""

    def __init__(self, path: Path, limit: int = OPEN) -> None:
        path.write_bytes(bytes(_SLOTS * _NUMBER.size))
        self._numbers = _Numbers(path)
        self.allow(limit)

    def allow(self, limit: int) -> None:
        """Let every step below `limit` begin."""
        self._numbers[0] = limit

    def waiting(self, step: int, ranks: int) -> bool:
        """Whether all ranks wait to begin `step`."""
        return all(self._numbers[1 + rank] == step for rank in range(ranks))
