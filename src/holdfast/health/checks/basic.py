"""Basic checks of what a node needs before it joins. Together they take well below a second, so they do not delay its
start.

A faulty result keeps the node out of the job, so these checks report a fault only if nothing could run on the node.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from holdfast.health.capacity import cpu_model
from holdfast.health.checks.check import CannotCheck, Task, attempt
from holdfast.protocol.health import CheckResult, Condition
from holdfast.protocol.machine.processes import available_bytes
from holdfast.protocol.network.sockets import listening
from holdfast.protocol.units import size

MEMORY_FLOOR_BYTES = 256 << 20
"""An agent and the process that its workers are forked from take 150 to 230 MB."""

SHM_FLOOR_BYTES = 16 << 20
DISK_FLOOR_BYTES = 64 << 20
INODES_FLOOR = 1000
FILES_FLOOR = 256
CLOCK_OFF_S = 30.0
NVML_PATIENCE_S = 5.0

Inventory = Callable[[], list[str]]


class Needs(msgspec.Struct, frozen=True):
    """What the job needs of the node."""

    host: str
    slots: int
    """Number of workers on the node."""
    folder: Path
    """The job's folder."""
    memory: Path
    """The folder for its in-memory snapshots."""


def run_basic(needs: Needs) -> tuple[CheckResult, ...]:
    """Runs all basic checks, in order. Blocks; never raises."""
    checks: dict[str, Callable[[Task], Iterator[CheckResult]]] = {
        "memory": lambda _: check_memory(),
        "shm": lambda _: check_shm(needs.memory),
        "disk": lambda _: check_disk(needs.folder),
        "files": lambda _: check_files(needs.slots),
        "clock": lambda _: check_clock(needs.folder),
        "port": lambda _: check_port(needs.host),
        "cpus": lambda _: check_cpus(needs.slots),
        "gpus": lambda _: check_gpus(),
    }
    return tuple(r for name, check in checks.items() for r in attempt(name, check, Task()))


def check_memory() -> Iterator[CheckResult]:
    """Memory available to new processes."""
    free = available_bytes()
    if free is None:
        raise CannotCheck("/proc/meminfo cannot be read")
    yield _at_least("memory", free, MEMORY_FLOOR_BYTES, "B", "free memory")


def check_shm(memory: Path) -> Iterator[CheckResult]:
    """Free space where snapshots and shared tensors are kept."""
    # The folder itself is made later, by the first snapshot; its file system is known from the nearest folder
    # that exists.
    there = next(p for p in (memory, *memory.absolute().parents) if p.is_dir())
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        yield CheckResult(name="shm", condition=Condition.FAULTY, detail=f"{there} is read-only")
        return
    # Unknown, not faulty: the folder is another user's, or HOLDFAST_MEMORY names one that cannot be used.
    # Another node would have the same setting and the same user.
    if not os.access(there, os.W_OK):
        raise CannotCheck(
            f"{there} cannot be written by this user; set HOLDFAST_MEMORY to a folder that can be written"
        )
    yield _at_least("shm", _free(there), SHM_FLOOR_BYTES, "B", f"free in {there}")


def check_disk(folder: Path) -> Iterator[CheckResult]:
    """Checks that a file in the job's folder can be written and read back unchanged, and that there is free space."""
    probe = folder / f".check-{secrets.token_hex(8)}"
    content = secrets.token_bytes(4096)
    try:
        with probe.open("xb") as out:
            out.write(content)
            out.flush()
            # An error of the disk often appears only when the pages are written; without this the file would
            # be read back from memory.
            os.fsync(out.fileno())
        read = probe.read_bytes()
    except OSError as error:
        why = "is read-only" if error.errno == errno.EROFS else f"cannot be written: {error.strerror}"
        yield CheckResult(name="disk", condition=Condition.FAULTY, detail=f"{folder} {why}")
        return
    finally:
        _remove(probe)
    if read != content:
        yield CheckResult(
            name="disk",
            condition=Condition.FAULTY,
            detail=f"{folder}: a file read back differs from what was written",
        )
        return
    yield _at_least("disk", _free(folder), DISK_FLOOR_BYTES, "B", f"free in {folder}")
    left = os.statvfs(folder)
    # f_favail, not f_ffree: what is reserved for root is of no use to a job.
    if left.f_files:  # some file systems (btrfs) have no such number
        yield _at_least("disk-inodes", left.f_favail, INODES_FLOOR, "files", f"more may be made in {folder}")


def check_files(slots: int) -> Iterator[CheckResult]:
    """The limit on open files of a process: every worker connects to every other one."""
    # The soft limit, because workers inherit it as it is.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    floor = FILES_FLOOR + 8 * slots
    if soft == resource.RLIM_INFINITY:
        yield CheckResult(name="files", condition=Condition.HEALTHY, detail="no limit on open files")
    else:
        yield _at_least("files", soft, floor, "files", "may be open at once (ulimit -n)")


def check_clock(folder: Path) -> Iterator[CheckResult]:
    """Compares this machine's clock with that of the job folder's file system, which is the coordinator's or a file
    server's. Nothing tells which of the two is wrong, so a difference is never a fault of the node."""
    probe = folder / f".clock-{secrets.token_hex(8)}"
    try:
        before_s = time.time()
        probe.write_bytes(b"")
        stamped_s, after_s = probe.stat().st_mtime, time.time()
    except OSError as error:
        raise CannotCheck(f"{folder}: {error.strerror}") from None
    finally:
        _remove(probe)
    # The file was stamped between the two readings of this clock, so anything within them is no difference,
    # however slow the server was.
    off_s = max(before_s - stamped_s, stamped_s - after_s, 0.0)
    shown = round(off_s, 3) if off_s > 0.05 else 0.0  # file times are as coarse as the kernel's tick
    far = off_s > CLOCK_OFF_S
    detail = (
        f"this clock and that of {folder} differ by {off_s:.0f} s: one of them is wrong; set it (NTP)"
        if far
        else ""
    )
    condition = Condition.UNKNOWN if far else Condition.HEALTHY
    yield CheckResult(
        name="clock", condition=condition, detail=detail, value=shown, floor=CLOCK_OFF_S, unit="s", lower=True
    )


def check_port(host: str) -> Iterator[CheckResult]:
    """Checks that a port can be bound on the address that other nodes use, and that a connection to it succeeds."""
    try:
        # Connected to as well as bound: with a firewall on the loopback path or a wrong address, the bind
        # succeeds but no connection does.
        with listening(host) as server:
            port = server.getsockname()[1]
            with socket.create_connection((host, port), timeout=2):
                pass
    except OSError as error:
        what = "is not an address of this machine" if error.errno == errno.EADDRNOTAVAIL else str(error)
        yield CheckResult(
            name="port", condition=Condition.FAULTY, detail=f"no port can be served at {host}: {what}"
        )
        return
    yield CheckResult(name="port", condition=Condition.HEALTHY, detail=f"{host} can be reached")


def check_cpus(slots: int) -> Iterator[CheckResult]:
    """Processor cores for the workers. With fewer cores than workers the node is slow, but not faulty."""
    cores = len(os.sched_getaffinity(0))
    detail = f"{slots} workers share them" if cores < slots else ""
    yield CheckResult(
        name="cpus", condition=Condition.HEALTHY, detail=detail, value=cores, unit="cores", model=cpu_model()
    )


def check_gpus(dev: Path = Path("/dev"), inventory: Inventory | None = None) -> Iterator[CheckResult]:
    """Checks that every GPU that has a device file is listed by NVML. Gives no result on a machine without GPUs."""
    # The driver creates a file for every GPU that it finds when it loads; NVML no longer lists one that fell
    # off the bus.
    files = sorted(p.name for p in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name))
    if not files:
        return
    uuids = in_time(inventory or nvml_uuids, NVML_PATIENCE_S, "NVML")
    yield _at_least("gpus", len(uuids), len(files), "GPUs", "answer to NVML")


def nvml_uuids() -> list[str]:
    """UUIDs of the GPUs that NVML lists. Raises CannotCheck without the library or the driver."""
    try:
        pynvml = importlib.import_module("pynvml")  # has no types
    except ImportError:
        raise CannotCheck("nvidia-ml-py is not installed: pip install 'holdfast-train[gpu]'") from None
    found: list[str] = []
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                found.append(str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))))
            except pynvml.NVMLError:
                continue  # lost: it is not among those that answer
    except pynvml.NVMLError as error:
        raise CannotCheck(f"NVML: {error}") from None
    return found


def in_time(function: Inventory, patience_s: float, what: str) -> list[str]:
    """Returns what the function returns. If a driver hangs, the thread of the call is abandoned and not waited for at
    exit.

    Raises:
        CannotCheck: it takes longer than `patience_s`.
    """
    answer: list[list[str]] = []
    trouble: list[Exception] = []

    def ask() -> None:
        try:
            answer.append(function())
        except Exception as error:  # noqa: BLE001 handed to the thread that waits
            trouble.append(error)

    # One call in the life of an agent, so a plain thread does; sources that ask again and again use
    # `BoundedCaller`.
    thread = threading.Thread(target=ask, daemon=True, name="holdfast-check")
    thread.start()
    thread.join(patience_s)
    # Read before the answer is looked for: an error is an answer too, and more than `did not answer`.
    if trouble:
        raise trouble[0]
    if not answer:
        raise CannotCheck(f"{what} did not answer within {patience_s:g} s")
    return answer[0]


def _at_least(name: str, value: float, floor: float, unit: str, what: str) -> CheckResult:
    if value >= floor:
        return CheckResult(
            name=name, condition=Condition.HEALTHY, detail=what, value=value, floor=floor, unit=unit
        )
    has, needs = ((size(int(x)) if unit == "B" else f"{x:,.0f} {unit}") for x in (value, floor))
    return CheckResult(
        name=name,
        condition=Condition.FAULTY,
        detail=f"{has} {what}, but at least {needs} are needed",
        value=value,
        floor=floor,
        unit=unit,
    )


def _free(folder: Path) -> int:
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # already reported by the check that could not write it
