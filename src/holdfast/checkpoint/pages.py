"""The pages of a slot: brought in before anybody waits for them, and mapped into a process once."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from holdfast.errors import TierError

PAGE = 4096
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


class Watcher(Protocol):
    """Whoever has to know of the slots that this process maps: an accelerator's driver."""

    def mapped(self, memory: mmap.mmap) -> None: ...
    def unmapped(self, memory: mmap.mmap) -> None: ...


class SlotMaps:
    """The agent's slots in this process's address space. A slot stays mapped: its pages are present then."""

    def __init__(self, watcher: Watcher | None = None) -> None:
        """watcher: told of every mapping."""
        self._maps: dict[str, mmap.mmap] = {}
        self._watcher = watcher

    def blob(self, path: str, nbytes: int) -> memoryview:
        """The blob of a slot. Raises TierError when the slot is gone."""
        memory = self._maps.get(path)
        # A slot's path is new whenever its file is, so a known path with enough bytes is the same memory.
        # Mapping it again would cost the page faults that the pool has paid for already.
        if memory is None or len(memory) < PAGE + nbytes:
            self.forget(path)
            memory = self._maps[path] = map_slot(Path(path), nbytes)
            if self._watcher is not None:
                self._watcher.mapped(memory)
        # A mapping keeps the memory of a removed file. Without this a worker would hold what the agent
        # believes to have given back, and the machine would run out of memory within its budget.
        for old in [p for p in self._maps if p != path and not Path(p).exists()]:
            self.forget(old)
        return memoryview(memory)[PAGE : PAGE + nbytes]

    def forget(self, path: str) -> None:
        """Nobody copies into this slot any more."""
        memory = self._maps.pop(path, None)
        if memory is not None and self._watcher is not None:
            self._watcher.unmapped(memory)
