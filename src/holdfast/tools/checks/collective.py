"""An all-reduce over the whole group: gloo, and NCCL where every node has a GPU."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from holdfast.health.checks.check import CannotCheck, Task
from holdfast.protocol.health import CheckResult, Condition

PATIENCE_S = 60.0
SMALL_BYTES = 16 << 20
LARGE_BYTES = 1 << 30


def check_all_reduce(task: Task) -> Iterator[CheckResult]:
    """Measures bus bandwidth as nccl-tests defines it: 2 (n - 1) / n of the bytes over the time. One process on each
    node, with its first GPU. The sum must be exact."""
    try:
        import torch

        dist: Any = importlib.import_module("torch.distributed")  # its types leave TCPStore out
    except ImportError:
        raise CannotCheck("needs torch, which is not installed here") from None
    names = [p.node for p in task.peers]
    rank, world = names.index(task.node), len(names)
    cuda = torch.cuda.is_available()
    store = dist.TCPStore(
        task.peers[0].host,
        task.peers[0].port,
        world,
        rank == 0,
        timedelta(seconds=PATIENCE_S),
        use_libuv=False,
    )
    # All nodes must use the same backend, so a single node without a GPU rules out NCCL.
    store.set(f"cuda-{rank}", str(int(cuda)))
    with_gpus = all(store.get(f"cuda-{other}") == b"1" for other in range(world))
    backend = "nccl" if with_gpus and dist.is_nccl_available() else "gloo"
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE_S)
    )
    try:
        nbytes = LARGE_BYTES if backend == "nccl" else SMALL_BYTES
        yield reduce_and_judge(dist, device, rank, world, nbytes, task.seconds, f"{backend}, {world} nodes")
    finally:
        dist.destroy_process_group()


def reduce_and_judge(
    dist: Any, device: Any, rank: int, world: int, nbytes: int, seconds: float, how: str
) -> CheckResult:
    """The best of several rounds; every node makes as many rounds as rank 0 decides."""
    import torch

    values = torch.empty(nbytes // 4, dtype=torch.float32, device=device)
    wanted = world * (world + 1) / 2
    # Exact in float32: the sums are of small integers, so any difference is a fault and not rounding.
    best_s, began_s, rounds = float("inf"), time.monotonic(), 0
    go_on = torch.ones(1, device=device)
    while float(go_on) > 0:
        values.fill_(float(rank + 1))
        dist.all_reduce(go_on.zero_())  # all begin together
        start_s = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
        rounds += 1
        if not bool((values == wanted).all()):
            return CheckResult(
                name="all-reduce",
                condition=Condition.FAULTY,
                detail=f"a sum over {world} nodes is wrong; {how}",
            )
        # Only rank 0 looks at the clock. If every node decided for itself, one would stop a round early and
        # the others would wait for it until the timeout.
        go_on.fill_(1.0 if rank == 0 and (rounds < 3 or time.monotonic() - began_s < seconds) else 0.0)
        dist.all_reduce(go_on)
    rate = 2 * (world - 1) / world * nbytes / best_s / 1e9
    detail = f"{how}, {nbytes >> 20} MiB, best of {rounds}"
    return CheckResult(
        name="all-reduce", condition=Condition.HEALTHY, detail=detail, value=round(rate, 3), unit="GB/s"
    )
