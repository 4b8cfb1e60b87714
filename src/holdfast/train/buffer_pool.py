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
        # The tensor keeps the view, and views of the tensor keep it too. So the block comes back when the
        # last of them is gone, whoever holds it. Not at exit: then the pool itself may be gone.
        weakref.finalize(view, self._give_back, block).atexit = False
        return torch.frombuffer(view, dtype=dtype)  # which keeps the view

    def _block(self, nbytes: int) -> mmap.mmap:
        with self._lock:
            # At most twice as large: a small request must not hold a large block that the next layer needs.
            fit = [block for block in self._free if nbytes <= len(block) <= 2 * nbytes]
            if fit:
                block = min(fit, key=len)
                self._free.remove(block)
                return block
        return mmap.mmap(-1, nbytes)

    def _give_back(self, block: mmap.mmap) -> None:
        with self._lock:
            self._free.append(block)
            # The oldest go first. A model's layers ask for the same few sizes in turn, so what is old is of a
            # size that nobody asks for any more.
            del self._free[:-KEPT_BLOCKS]
