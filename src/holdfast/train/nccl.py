"""NCCL in the place of gloo, where every worker of a group has a GPU of its own.

Written against ProcessGroupNCCL of PyTorch 2.13; what differs from gloo:

- A collective is only queued when its Work is waited for, so an abort shows later: an aborted kernel ends and leaves
  garbage. Whoever is about to count a step asks `GlooGroup.intact` once the device has come to its end.
- A communicator that is still being made cannot be aborted: torch holds its lock while it waits for it. So it is made, and
  used once, on a thread of its own, and TORCH_NCCL_NONBLOCKING_TIMEOUT ends the wait for a peer that never came.
- An abort waits for the communicator's own threads, and must come once: torch joins its watchdog in it. All aborts of a
  worker run side by side, since one that frees memory waits for kernels that only another one ends.
- Torch's watchdog would end the process when a peer is gone (TORCH_NCCL_ASYNC_ERROR_HANDLING) or when it takes an abort
  for a hang (TORCH_NCCL_ENABLE_MONITORING), and holds up every call for a minute while it writes down what it saw
  (TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC). Here the coordinator finds that out, so these are off, unless the environment says
  otherwise.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CHOICE = "HOLDFAST_GPU_GROUPS"
"""`gloo`: groups of workers on GPUs are gloo's in any case. `nccl`: they are NCCL's, also where workers share a GPU."""

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "120",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}

Store = Any
"""A torch.distributed.Store."""


def agreed(store: Store, rank: int, size: int, device: torch.device | None) -> bool:
    """Whether a group uses NCCL: every member has it, and a GPU that no other one has. All members say the same.

    Two workers on one GPU, as on a laptop or with several nodes of the local engine, cannot: NCCL refuses that, unless it
    takes them for two machines (`CHOICE`).
    """
    if device is None or device.type != "cuda":
        return False
    # The UUID and not the index: every container and every node counts its GPUs from 0.
    store.set(f"gpu-{rank}", _gpu(device))
    gpus = {bytes(store.get(f"gpu-{other}")) for other in range(size)}
    # All members read the same values, so they decide alike without another round. One that chose differently
    # would wait in another library's connect.
    return len(gpus) == size and b"" not in gpus


def _gpu(device: torch.device) -> bytes:
    """Which GPU of all in the world this is; nothing where NCCL cannot be used."""
    if not dist.is_nccl_available() or os.environ.get(CHOICE) == "gloo":
        return b""
    gpu = str(torch.cuda.get_device_properties(device).uuid).encode()
    if os.environ.get(CHOICE) == "nccl":
        # NCCL tells GPUs apart by the machine first. With a name of its own for every process it connects them through
        # sockets, as it does machines without a faster network. Read once, before the first communicator.
        machine = os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-{os.getpid()}")
        gpu += machine.encode()
    return gpu


def build(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    timeout: timedelta,
    made: Callable[[Any], None],
) -> Any:
    """A process group whose members are connected. made: given the group as soon as `abort` is of use to it.

    Raises:
        RuntimeError: torch cannot, or a peer never came.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    backend: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]
    options = backend.Options()
    options._timeout = timeout
    # A communicator that blocks cannot be aborted while it is being made. With this torch polls it, and
    # TORCH_NCCL_NONBLOCKING_TIMEOUT bounds the wait.
    options.config.blocking = 0
    group = backend(store, rank, size, options)
    # Before it connects: from here on `abort` has something to end, also when a peer never comes.
    made(group)
    group.eager_connect_single_device(device)
    # A stream of its own, so the first collective waits for no kernel of the model, and no kernel of the
    # model waits for a peer that may be lost.
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # what is made for the first collective is made here, and waited for
        group.allreduce([torch.zeros(1, device=device)]).wait()
    stream.synchronize()
    return group


def abort(group: Any) -> None:
    """Ends everything that is queued or being made, and gives the group back. Once for every group."""
    # Not awaited. An abort waits for the communicator's kernels, which may wait for a kernel that another
    # group's abort ends; one after the other they would deadlock.
    threading.Thread(target=group.abort, name="holdfast-nccl-abort", daemon=True).start()
