"""Which deep checks there are, and running them one after the other."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from holdfast.health.checks.check import Check, CheckProgress, Task, attempt
from holdfast.tools.checks import collective, cpu, dcgm, disk, gpu, memory, network, nvlink, rdma, rdma_pair
from holdfast.tools.checks.floors import against_floor, read_floors

ALONE: dict[str, Check] = {
    "cpu": cpu.check_cpu,
    "memory": memory.check_memory,
    "disk": disk.check_disk,
    "loopback": network.check_loopback,
    "gpu": gpu.check_gpus,
    "nvlink": nvlink.check_nvlink,
    "rdma": rdma.check_rdma,
    "dcgm": dcgm.check_dcgm,
}
"""Of the node alone."""

TOGETHER: dict[str, Check] = {
    "pair": network.check_pair,
    "rdma-pair": rdma_pair.check_rdma_pair,
    "all-reduce": collective.check_all_reduce,
}
"""Between nodes: only when asked for."""


def run_checks(task: Task, say: Callable[[CheckProgress], None]) -> None:
    """Runs the checks that the task names, by default all of the node alone, judged by the floors."""
    floors = read_floors()
    for name, check in chosen(task.only).items():
        # Checks between nodes take no turn: both ends must run at the same time, and two nodes of one machine
        # would wait for each other for ever.
        with turn() if name in ALONE else nullcontext():
            say(CheckProgress(running=name))
            for result in attempt(name, check, task):
                say(CheckProgress(result=against_floor(result, floors)))
            say(CheckProgress())


def chosen(only: tuple[str, ...]) -> dict[str, Check]:
    """The checks of these names; empty: all of the node alone."""
    every = ALONE | TOGETHER
    return {name: every[name] for name in only} if only else ALONE


@contextmanager
def turn() -> Iterator[None]:
    """Nodes that share a machine are checked in turn: they would measure each other."""
    path = Path(tempfile.gettempdir()) / f"holdfast-checks-{os.getuid()}.lock"
    # In the shared temporary folder, so that all nodes of the machine find it. O_NOFOLLOW and the user's
    # number in the name: anybody may put a link there. The kernel releases the lock with the process.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
