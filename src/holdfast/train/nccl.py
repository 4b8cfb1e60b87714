"""NCCL in the place of gloo, where every worker has a GPU of its own.

Written against ProcessGroupNCCL of PyTorch 2.13; what differs from gloo:

- A collective is only queued when its Work is waited for, so an abort shows later: an aborted kernel ends and leaves
  garbage. Whoever is about to count a step asks `Wires.intact` once the device has come to its end.
- An abort may wait for the communicator's own threads, and a communicator that is still being made has nobody to abort
  it but non-blocking initialization. Both are done off the main thread.
- Torch's watchdog would end the process when a peer is gone (TORCH_NCCL_ASYNC_ERROR_HANDLING) or when it takes an abort
  for a hang (TORCH_NCCL_ENABLE_MONITORING). Here the coordinator finds that out, so both are off, unless the environment
  says otherwise.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

QUIET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def usable(device: torch.device | None) -> bool:
    """Whether groups of workers that compute on this device use NCCL: it takes one GPU per worker."""
    if device is None or device.type != "cuda" or not dist.is_nccl_available():
        return False
    return torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def build(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """A process group whose communicator is being made: the first collective waits for it, and `abort` ends that."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    backend: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]
    options = backend.Options()
    options._timeout = timeout
    options.config.blocking = 0
    group = backend(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


def abort(group: Any) -> None:
    """Ends everything that is queued or being made."""
    threading.Thread(target=group.abort, name="holdfast-nccl-abort", daemon=True).start()
