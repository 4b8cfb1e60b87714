"""Where the scripts of these tests compute: on the GPU where there is one, and alike each time."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import xxhash

GPU = torch.cuda.is_available()
TYPE = "cuda" if GPU else "cpu"

if GPU:
    torch.use_deterministic_algorithms(True)  # with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment
    # A framework's own process groups are NCCL's there, which takes no two workers for one GPU unless each says that it
    # is another machine.
    os.environ.setdefault("NCCL_HOSTID", f"worker-{os.getpid()}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of every bit of what was trained."""
    found = xxhash.xxh3_64()
    for tensor in tensors:
        found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def check(module: torch.nn.Module) -> None:
    """While it trains."""
    kinds = {parameter.device.type for parameter in module.parameters()}
    assert kinds == {TYPE}, f"the model is on {kinds}, and not on {TYPE}"
