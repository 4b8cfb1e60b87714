"""Drives and arrays: the kernel's counters, and what NVMe drives report about themselves."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from holdfast.health.bounded_call import BoundedCaller, NoAnswerError
from holdfast.health.files import listing, names, number, quiet, text, unknown
from holdfast.health.samples import Reading
from holdfast.health.sources import MachineRoot

DISKS_S = 60.0
ANSWER_S = 5.0
# _IOWR('N', 0x41, struct nvme_passthru_cmd) of linux/nvme_ioctl.h; opcode and log page of the NVM Express
# base specification.
_NVME_ADMIN_COMMAND = 0xC0484E41
_GET_LOG_PAGE, _SMART_LOG, _ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
_LOG_BYTES = 512
_DRIVE = re.compile(r"sd[a-z]+|vd[a-z]+|xvd[a-z]+|nvme\d+n\d+")
"""Drives only, without loop devices, arrays and partitions: what an array transfers is what its drives transfer."""
_COMMAND = struct.Struct("=BBHIIIQQIIIIIIIIII")
"""struct nvme_passthru_cmd of linux/nvme_ioctl.h."""


class Smart(msgspec.Struct, frozen=True):
    """The fields of a drive's log (NVM Express, SMART / Health Information) that rules use."""

    critical_warning: int
    used_percent: int
    media_errors: int


class Disks:
    """Drives and arrays: errors, drives that went offline, arrays with a missing drive."""

    name = "disk"
    every_s = DISKS_S

    def __init__(self, machine: MachineRoot, smart: Callable[[str], Smart] | None = None) -> None:
        """smart: reads a drive's own log, given its device file; None: through the kernel, if this is a real machine."""
        self._sys = machine.root / "sys"
        self._smart = smart or (None if machine.stand_in else nvme_smart)
        self._callers: dict[str, BoundedCaller] = {}

    def read(self) -> Iterator[Reading]:
        """`disk.io_errors` (since the start), `disk.state`, `nvme.state`, `nvme.temperature_alarm`,
        `nvme.critical_warning` (a mask), `nvme.media_errors`, `nvme.used_percent`, `md.degraded`, `fs.errors` (ext4, over
        the life of the file system). For people: `disk.read_bytes` and `disk.written_bytes` (since the start)."""
        blocks = self._sys / "block"
        try:
            devices = listing(blocks)
        except OSError as error:
            yield unknown("disk", "disk.devices", error)
            return
        for name in devices:
            if name.startswith("md"):
                yield from number("disk", "md.degraded", blocks / name / "md/degraded", name)
            if _DRIVE.fullmatch(name):
                yield from _traffic(name, blocks / name / "stat")
            if name.startswith("sd"):
                device = blocks / name / "device"
                serial = _serial(device)
                # The file is in hexadecimal (`0x2`). Counted from when the disk was found, and from zero
                # again after it was removed and came back.
                yield from number("disk", "disk.io_errors", device / "ioerr_cnt", name, serial, base=16)
                yield from _text_reading("disk.state", device / "state", name, serial)
        drives = self._sys / "class/nvme"
        for name in names(drives):
            serial = _serial(drives / name)
            yield from _text_reading("nvme.state", drives / name / "state", name, serial)
            for sensor in (entry for entry in names(drives / name) if entry.startswith("hwmon")):
                # The drive's own limit, which differs with the model; a temperature in degrees would need a
                # table of models.
                alarm = drives / name / sensor / "temp1_alarm"
                yield from number("disk", "nvme.temperature_alarm", alarm, name, serial)
            if self._smart is not None:
                yield from self._own_log(self._smart, name, serial)
        systems = self._sys / "fs/ext4"
        for name in names(systems):
            yield from number("disk", "fs.errors", systems / name / "errors_count", name)

    def _own_log(self, smart: Callable[[str], Smart], name: str, serial: str) -> Iterator[Reading]:
        # A thread for each drive, because this source is meant to find controllers that hang, and the other
        # drives must still be read.
        caller = self._callers.setdefault(name, BoundedCaller(f"drive {name}", ANSWER_S))
        try:
            log = caller.call(lambda: smart(f"/dev/{name}"))
        # sysfs shows the machine's drives also to containers that were given none of the device files.
        except FileNotFoundError:
            return  # a container without the device
        except (NoAnswerError, OSError) as error:
            yield unknown("disk", "nvme.critical_warning", error, name, serial)
            return
        for field, value in (
            ("nvme.critical_warning", log.critical_warning),
            ("nvme.media_errors", log.media_errors),
            ("nvme.used_percent", log.used_percent),
        ):
            yield Reading(source="disk", name=field, value=float(value), subject=name, device=serial)

    def close(self) -> None:
        """Releases its threads."""
        for caller in self._callers.values():
            caller.close()
        self._callers.clear()


def _traffic(name: str, stat: Path) -> Iterator[Reading]:
    # Documentation/block/stat.rst: the third and the seventh number are sectors of 512 bytes, whatever the drive's own are.
    fields = quiet(stat).split()
    if len(fields) < 7 or not (fields[2].isdigit() and fields[6].isdigit()):
        return
    yield Reading(source="disk", name="disk.read_bytes", value=512.0 * int(fields[2]), subject=name)
    yield Reading(source="disk", name="disk.written_bytes", value=512.0 * int(fields[6]), subject=name)


def _serial(folder: Path) -> str:
    try:
        found = (text(folder / "serial") or text(folder / "wwid") or "").strip()
    except OSError:
        return ""
    # As in `identity.devices`: the node's history finds the drive under this name, whatever machine it is
    # moved to.
    return f"nvme:{found}" if found and folder.name.startswith("nvme") else found


def _text_reading(name: str, path: Path, subject: str, device: str) -> Iterator[Reading]:
    try:
        if content := text(path):
            yield Reading(source="disk", name=name, value=content, subject=subject, device=device)
    except OSError as error:
        yield unknown("disk", name, error, subject, device)


def nvme_smart(path: str) -> Smart:
    """Asks a drive for its log. Requires root (CAP_SYS_ADMIN). Raises OSError."""
    log = ctypes.create_string_buffer(_LOG_BYTES)
    # The number of 32-bit words less one, in the upper half of command word 10.
    dword10 = (_LOG_BYTES // 4 - 1) << 16 | _SMART_LOG
    address = ctypes.addressof(log)
    command = _COMMAND.pack(
        _GET_LOG_PAGE, 0, 0, _ALL_NAMESPACES, 0, 0, 0, address, 0, _LOG_BYTES, dword10, 0, 0, 0, 0, 0, 1000, 0
    )
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _NVME_ADMIN_COMMAND, command)
    finally:
        os.close(fd)
    return parse_smart(log.raw)


def parse_smart(log: bytes) -> Smart:
    """Reads the fields from the 512 bytes of a drive's log."""
    # Byte 0: warnings as bits; byte 5: estimate of the life that is used, may exceed 100; bytes 160 to 175: a
    # counter of 128 bits that never wraps in practice.
    return Smart(log[0], log[5], int.from_bytes(log[160:176], "little"))


def disk_sources(machine: MachineRoot) -> list[Disks]:
    """The source for disks. Every machine has one; the drives are looked up anew at each read."""
    return [Disks(machine)]
