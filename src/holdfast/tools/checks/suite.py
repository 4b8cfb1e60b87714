"""Runs deep checks one after the other: entry points of the group `holdfast.checks`, and those between nodes."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from holdfast import plugins
from holdfast.health.checks.check import CannotCheck, Check, CheckProgress, Task, attempt
from holdfast.protocol.health import CheckResult
from holdfast.tools.checks import collective, network, rdma_pair
from holdfast.tools.checks.floors import against_floor, read_floors

TOGETHER: dict[str, Check] = {
    "pair": network.check_pair,
    "rdma-pair": rdma_pair.check_rdma_pair,
    "all-reduce": collective.check_all_reduce,
}
"""Between nodes. The coordinator asks for each of these in rounds of its own, so they are no entry points."""


def run_checks(task: Task, say: Callable[[CheckProgress], None]) -> None:
    """Runs the checks that the task names, by default all of the node alone, judged by the floors."""
    floors = read_floors()
    for name in task.only or plugins.names(plugins.CHECKS):
        check = TOGETHER.get(name)
        # Checks between nodes take no turn: both ends must run at the same time, and two nodes of one machine
        # would wait for each other for ever.
        with nullcontext() if check is not None else turn():
            say(CheckProgress(running=name))
            for result in attempt(name, check or partial(_alone, name), task):
                say(CheckProgress(result=against_floor(result, floors)))
            say(CheckProgress())


def _alone(name: str, task: Task) -> Iterable[CheckResult]:
    """A check of the node alone. One that is not there, or cannot be imported, is a mistake of its own."""
    if (point := plugins.find(plugins.CHECKS, name)) is None:
        raise CannotCheck("there is no check of this name")
    found: Check = point.load()
    return found(task)


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
