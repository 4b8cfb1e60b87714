"""Memory for FSDP2's collectives on the CPU, used again in every step.

FSDP2 takes new memory for what it gathers and scatters in every layer of every step, and on the CPU the system has to clear
it page by page: with 100 million parameters on 2 shards a sixth of the processor time. It lets one say where else such memory
comes from (`FSDPModule.set_custom_all_gather`).
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

SMALL_BYTES = 1 << 20
"""Less than that comes from the allocator, which keeps it."""

KEPT_BLOCKS = 8


class Scratch:
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


class _Kept:
    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As FSDP2 asks for it."""
        if device.type != "cpu":
            return torch.empty(*size, dtype=dtype, device=device)
        return self._scratch.take(math.prod(map(int, size)), dtype).view(*size)


class KeptGather(_Kept, AllGather):
    """FSDP2's own all-gather, in kept memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """As FSDP2 calls it."""
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class KeptScatter(_Kept, ReduceScatter):
    """FSDP2's own reduce-scatter, in kept memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """As FSDP2 calls it."""
        return dist.reduce_scatter_single(
            output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
        )


def keep(module: FSDPModule, scratch: Scratch) -> None:
    """This module's collectives take their memory from here, unless the script has said where from."""
    groups = module._get_fsdp_state()._fsdp_param_groups
    if len(groups) != 1:
        return  # FSDP2 takes no such wish where a module has parameters on several meshes
    if type(groups[0]._all_gather_comm).__name__ == "DefaultAllGather":
        module.set_custom_all_gather(KeptGather(scratch))
    if type(groups[0]._reduce_scatter_comm).__name__ == "DefaultReduceScatter":
        module.set_custom_reduce_scatter(KeptScatter(scratch))
