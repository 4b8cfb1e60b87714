"""Memory that is needed for a moment in every step, and used again in the next one: the system has to clear new memory page
by page."""

from __future__ import annotations

import mmap
import threading
import weakref

import torch

SMALL_BYTES = 1 << 20
"""Less than that comes from the allocator, which keeps it."""

KEPT_BLOCKS = 8


class BufferPool:
    """Blocks of memory that go back to it when the last tensor in them is gone. Safe from any thread."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor on the CPU, of whatever was there."""
        nbytes = count * dtype.itemsize
        if nbytes < SMALL_BYTES:
            return torch.empty(count, dtype=dtype)
        block = self._block(nbytes)
        view = memoryview(block)[:nbytes]
        weakref.finalize(view, self._give_back, block).atexit = False
        return torch.frombuffer(view, dtype=dtype)  # which keeps the view

    def _block(self, nbytes: int) -> mmap.mmap:
        with self._lock:
            fit = [block for block in self._free if nbytes <= len(block) <= 2 * nbytes]
            if fit:
                block = min(fit, key=len)
                self._free.remove(block)
                return block
        return mmap.mmap(-1, nbytes)

    def _give_back(self, block: mmap.mmap) -> None:
        with self._lock:
            self._free.append(block)
            del self._free[:-KEPT_BLOCKS]
