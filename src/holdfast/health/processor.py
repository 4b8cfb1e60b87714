"""Processors, memory, processes, the clock and the boot: what /proc and the EDAC part of /sys report about the host."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from holdfast.health.files import attempt, keyed, listing, names, number, quiet, text, unknown
from holdfast.health.samples import Reading
from holdfast.health.sources import MachineRoot

PRESSURE_S = 15.0
PROCESSES_S = 60.0
MEMORY_S = 15.0
CLOCK_S = 60.0
BLOCKED_REPORTED = 8
_TAINTS = {"machine_check": 4, "oops": 7, "soft_lockup": 14}
"""Bits of /proc/sys/kernel/tainted (Documentation/admin-guide/tainted-kernels.rst): problems that the kernel has seen
since its boot. Readable even where its log is not."""
# Offsets within struct timex on 64-bit Linux (linux/timex.h): `maxerror` at 24, `status` at 40, 208 bytes in
# all.
_STA_UNSYNC = 0x40
_TIMEX_STATUS, _TIMEX_MAXERROR, _TIMEX_BYTES = 40, 24, 208


class Pressure:
    """The share of time in which tasks waited for processor, memory or disk (PSI), and the kernel's taints."""

    name = "proc"
    every_s = PRESSURE_S

    def __init__(self, machine: MachineRoot) -> None:
        self._root = machine.root

    def read(self) -> Iterator[Reading]:
        """`cpu.stalled_percent` and the like: some task waits for the processor, or all tasks wait for memory or disk."""
        # `full` does not exist for the processor on the whole machine: somebody always runs. For memory and
        # disk `some` is everyday life under load, and only `full` means that no work is done.
        for kind, line in (("cpu", "some"), ("memory", "full"), ("io", "full")):
            path = self._root / "proc/pressure" / kind
            yield from attempt("proc", f"{kind}.stalled_percent", partial(_pressure, path, line))
        if (tainted := quiet(self._root / "proc/sys/kernel/tainted")).isdigit():
            for what, bit in _TAINTS.items():
                yield Reading(source="proc", name=f"kernel.saw_{what}", value=float(int(tainted) >> bit & 1))

    def close(self) -> None:
        """Nothing is open."""


def _pressure(path: Path, line: str) -> float | None:
    """The average over the last minute."""
    if (content := text(path)) is None:
        return None
    # avg10 jumps with every page-in and avg300 is still low when a job has been stuck for minutes; so avg60.
    fields = next(row for row in content.splitlines() if row.startswith(line)).split()
    return float(fields[2].removeprefix("avg60="))


class Processes:
    """Processes that hang in the kernel, zombies, and how much of the limits on processes and open files is used."""

    name = "proc"
    every_s = PROCESSES_S

    def __init__(self, machine: MachineRoot, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = machine.root, clock
        self._blocked: dict[tuple[str, str], float] = {}
        self._reported: set[str] = set()

    def read(self) -> Iterator[Reading]:
        """`process.blocked_s` of the processes that were in state D at every look since they were first seen in it (the
        longest ones), and 0 once for one that is not any more. Shares are of the limit."""
        now = self._clock()
        blocked: dict[tuple[str, str], float] = {}
        hung: dict[str, float] = {}
        zombies = 0
        proc = self._root / "proc"
        prefix = f"{proc}/"
        try:
            pids = listing(proc)
        except OSError as error:
            yield unknown("proc", "process.zombies", error)
            return
        for pid in pids:
            if not pid.isdigit():
                continue
            stat = quiet(f"{prefix}{pid}/stat")
            # The name in parentheses may hold blanks and parentheses itself, so the line is cut at the last
            # one.
            command, _, rest = stat.rpartition(")")
            if rest[1:2] == "Z":
                zombies += 1
            # State D at one look is normal input and output. Only what was in it at every look since is
            # counted, so a process that reads a lot of data, in and out of D, is not hung.
            elif rest[1:2] == "D":
                key = pid, "".join(rest.split()[19:20])  # ids are reused: with the time of its start
                since = blocked[key] = self._blocked.get(key, now)
                if since < now:
                    hung[f"process {command.partition('(')[2]} (pid {pid})"] = now - since
        self._blocked = blocked
        longest = sorted(hung, key=hung.__getitem__, reverse=True)[:BLOCKED_REPORTED]
        # Processes that were reported and are not blocked any more are read as 0 once, which ends their
        # finding.
        for subject in (*longest, *(self._reported - set(longest))):
            yield Reading(
                source="proc", name="process.blocked_s", value=hung.get(subject, 0.0), subject=subject
            )
        self._reported = set(longest)
        yield Reading(source="proc", name="process.zombies", value=float(zombies))
        yield from attempt("proc", "process.used_share", lambda: _processes_share(proc))
        yield from attempt("proc", "file.used_share", lambda: _files_share(proc))

    def close(self) -> None:
        """Nothing is open."""


def _processes_share(proc: Path) -> float | None:
    loads, highest = text(proc / "loadavg"), text(proc / "sys/kernel/pid_max")
    return int(loads.split()[3].split("/")[1]) / int(highest) if loads and highest else None


def _files_share(proc: Path) -> float | None:
    # `used free limit`; the kernel keeps the second at 0 since 2.6.
    if not (handles := text(proc / "sys/fs/file-nr")):
        return None
    used, _, limit = handles.split()
    return int(used) / int(limit)


class MemorySource:
    """Free memory, processes killed for lack of it, and memory errors that the controllers corrected or could not
    correct."""

    name = "proc"
    every_s = MEMORY_S

    def __init__(self, machine: MachineRoot) -> None:
        self._root = machine.root
        self._controllers = [n for n in names(self._edac) if n.startswith("mc") and n[2:].isdigit()]

    @property
    def _edac(self) -> Path:
        return self._root / "sys/devices/system/edac/mc"

    def read(self) -> Iterator[Reading]:
        """`memory.available_share`, `memory.oom_kills` (since the boot), `edac.ce_count` and `edac.ue_count`."""
        try:
            # MemAvailable, not MemFree: the page cache of a node that reads training data always fills what
            # is free.
            table = keyed(text(self._root / "proc/meminfo") or "", ":")
        except OSError as error:
            yield unknown("proc", "memory.available_share", error)
            return
        if table:
            yield from attempt("proc", "memory.available_share", lambda: _available(table))
        # Pages that the kernel took out of use after an uncorrectable memory error: visible also if the
        # machine has no EDAC driver.
        if "HardwareCorrupted" in table:
            yield from attempt(
                "proc", "memory.corrupted_bytes", lambda: 1024.0 * _kib(table, "HardwareCorrupted")
            )
        yield from attempt("proc", "memory.oom_kills", lambda: _oom_kills(self._root / "proc/vmstat"))
        for controller in self._controllers:
            for kind in ("ce_count", "ue_count"):
                # EDAC's counters begin again when its driver is loaded or somebody writes reset_counters;
                # `Thresholds` treats a fall of a counter as such a reset.
                path = self._edac / controller / kind
                yield from number("edac", f"edac.{kind}", path, f"memory controller {controller[2:]}")

    def close(self) -> None:
        """Nothing is open."""


def _kib(table: dict[str, str], key: str) -> int:
    return int(table[key].split()[0])


def _available(table: dict[str, str]) -> float:
    return _kib(table, "MemAvailable") / _kib(table, "MemTotal")


def _oom_kills(path: Path) -> float | None:
    content = text(path) or ""
    # Searched rather than parsed: vmstat has some 200 lines and is read every 15 s. The blank excludes other
    # names with the same beginning.
    at = content.find("\noom_kill ")
    return float(content[at + 10 :].split(maxsplit=1)[0]) if at >= 0 else None


class Clock:
    """Whether the clock is synchronized, and which boot this is."""

    name = "proc"
    every_s = CLOCK_S

    def __init__(self, machine: MachineRoot, adjtimex: Callable[[], tuple[int, int]] | None = None) -> None:
        self._root = machine.root
        self._adjtimex = adjtimex or (None if machine.stand_in else kernel_clock)

    def read(self) -> Iterator[Reading]:
        """`clock.unsynchronized` (0 or 1), `boot.id`, `boot.uptime_s`."""
        if self._adjtimex is not None:
            try:
                # The kernel sets STA_UNSYNC when nobody disciplined the clock for long enough that its
                # estimated error passed the limit. Asking the kernel needs no knowledge of chrony, ntpd or
                # timesyncd.
                status, max_error_us = self._adjtimex()
                yield Reading(
                    source="proc", name="clock.unsynchronized", value=float(bool(status & _STA_UNSYNC))
                )
                yield Reading(source="proc", name="clock.max_error_s", value=max_error_us / 1e6)
            except OSError as error:
                yield unknown("proc", "clock.unsynchronized", error)
        # A new id under the same name means that the machine has rebooted, and all counters since the boot
        # are new.
        if boot := quiet(self._root / "proc/sys/kernel/random/boot_id"):
            yield Reading(source="proc", name="boot.id", value=boot)
        yield from attempt("proc", "boot.uptime_s", lambda: _uptime_s(self._root / "proc/uptime"))

    def close(self) -> None:
        """Nothing is open."""


def _uptime_s(path: Path) -> float | None:
    content = text(path)
    return None if content is None else float(content.split()[0])


def kernel_clock() -> tuple[int, int]:
    """(status, largest error in microseconds) of adjtimex(2), which changes nothing with modes = 0. On 64 bits."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(timex) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "adjtimex")
    return (
        int.from_bytes(timex.raw[_TIMEX_STATUS : _TIMEX_STATUS + 4], "little"),
        int.from_bytes(timex.raw[_TIMEX_MAXERROR : _TIMEX_MAXERROR + 8], "little"),
    )


def processor_sources(machine: MachineRoot) -> list[Pressure | Processes | MemorySource | Clock]:
    """The sources that every machine has."""
    return [Pressure(machine), Processes(machine), MemorySource(machine), Clock(machine)]
