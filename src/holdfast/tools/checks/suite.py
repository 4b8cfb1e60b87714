"""Runs deep checks one after the other: entry points of the group `holdfast.checks`, and those between nodes.

Results are judged by floors, minimum figures for each model of device, each with its public reference (floors.toml)."""

from __future__ import annotations

import fcntl
import functools
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import resources
from pathlib import Path

import msgspec

from holdfast import plugins
from holdfast.errors import UsageError
from holdfast.health.checks.check import CannotCheck, Check, CheckProgress, Task, attempt
from holdfast.protocol.health import CheckResult, Condition
from holdfast.protocol.wire.decoding import decode
from holdfast.tools.checks import collective, network, rdma_pair


class Floor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The minimum that a check must measure; the maximum if smaller is better."""

    check: str
    value: float
    """In the check's unit."""
    reference: str
    """The source in which the figure was published."""
    model: str = ""
    """Part of the device's name; the longest match counts."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    floor: tuple[Floor, ...] = ()


@functools.cache
def read_floors(path: Path | None = None) -> tuple[Floor, ...]:
    """The floors of a file, by default Holdfast's own.

    Raises:
        UsageError: the file cannot be read.
    """
    name = path or resources.files("holdfast.tools.checks") / "floors.toml"
    try:
        data = name.read_bytes()
    except OSError as error:
        raise UsageError(f"the floors in {name} cannot be read: {error}") from error
    return decode(_read, data, f"the floors in {name} cannot be read", error=UsageError)


def _read(data: bytes) -> tuple[Floor, ...]:
    return msgspec.convert(tomllib.loads(data.decode()), _File).floor


def floor_of(result: CheckResult, floors: Sequence[Floor]) -> Floor | None:
    """The floor that best fits the result."""
    model = result.model.lower()
    # Vendors put more into the name from driver to driver (`NVIDIA H100 80GB HBM3`), so a floor names a part
    # of it, and the most exact part wins over a whole series.
    fit = [f for f in floors if f.check == result.name and f.model.lower() in model]
    return max(fit, key=lambda f: len(f.model), default=None)


def against_floor(result: CheckResult, floors: Sequence[Floor]) -> CheckResult:
    """The result with its floor added; a healthy one that misses it becomes faulty."""
    floor = floor_of(result, floors)
    # A check that has a floor of its own (a fixed demand, as free memory) keeps it.
    if floor is None or result.value is None or result.floor is not None:
        return result
    missed = result.value > floor.value if result.lower else result.value < floor.value
    result = msgspec.structs.replace(result, floor=floor.value)
    # The floor never improves a result: what is faulty or unknown for another reason stays so.
    if not missed or result.condition is not Condition.HEALTHY:
        return result
    than = "above" if result.lower else "below"
    why = f"{than} what it must be ({floor.reference})"
    return msgspec.structs.replace(
        result, condition=Condition.FAULTY, detail="; ".join(filter(None, (why, result.detail)))
    )


TOGETHER: dict[str, Check] = {
    "pair": network.check_pair,
    "rdma-pair": rdma_pair.check_rdma_pair,
    "all-reduce": collective.check_all_reduce,
}
"""Checks between nodes. The coordinator asks for each of these in rounds of its own, so they are not entry points."""


def run_checks(task: Task, say: Callable[[CheckProgress], None]) -> None:
    """Runs the checks that the task names, by default all that concern the node alone, and judges them by the floors."""
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
    """Runs a check of the node alone. If it does not exist or cannot be imported, its result is unknown."""
    if (point := plugins.find(plugins.CHECKS, name)) is None:
        raise CannotCheck("there is no check of this name")
    found: Check = point.load()
    return found(task)


@contextmanager
def turn() -> Iterator[None]:
    """Waits for this node's turn: nodes that share a machine are checked one after the other, because they would
    disturb each other's measurements."""
    path = Path(tempfile.gettempdir()) / f"holdfast-checks-{os.getuid()}.lock"
    # In the shared temporary folder, so that all nodes of the machine find it. O_NOFOLLOW and the user's
    # number in the name, because anybody may create a link there. The kernel releases the lock with the
    # process.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
