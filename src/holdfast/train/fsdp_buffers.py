"""FSDP2's own collectives, in memory that is used again.

FSDP2 takes new memory for what it gathers and scatters in every layer of every step, which on the CPU the kernel has to clear
each time. It lets one say where else such memory comes from (`FSDPModule.set_custom_all_gather`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from holdfast.train.buffer_pool import BufferPool


class _Pooled:
    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As FSDP2 asks for it."""
        # On a GPU torch's caching allocator already does this, and knows about streams, which this pool does
        # not.
        if device.type != "cpu":
            return torch.empty(*size, dtype=dtype, device=device)
        return self._pool.take(math.prod(map(int, size)), dtype).view(*size)


class PooledAllGather(_Pooled, DefaultAllGather):
    """What it gathers comes from the pool."""


class PooledReduceScatter(_Pooled, DefaultReduceScatter):
    """What it scatters comes from the pool."""


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Those of the module's parameters that are gathered and scattered together: none, one, or several where torch knows
    modules with parameters on several meshes."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def use_pool(module: FSDPModule, pool: BufferPool) -> None:
    """This module's collectives take their memory from here, unless the script has said where from."""
    groups = parameter_groups(module)
    if len(groups) != 1:
        return  # FSDP2 takes no such wish where a module has parameters on several meshes
    # The exact class: a script that has set its own keeps it.
    if type(groups[0]._all_gather_comm) is DefaultAllGather:
        module.set_custom_all_gather(PooledAllGather(pool))
    if type(groups[0]._reduce_scatter_comm) is DefaultReduceScatter:
        module.set_custom_reduce_scatter(PooledReduceScatter(pool))
