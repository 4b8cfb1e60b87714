"""PCIe links of GPUs, network adapters and NVMe drives: errors, width and speed, and whether the device answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.health.files import listing, names, quiet, text, unknown
from holdfast.health.identity import gpu_uuids
from holdfast.health.samples import Reading
from holdfast.health.sources import MachineRoot

PCIE_S = 60.0
_KINDS = {
    "0x0300": "gpu",
    "0x0302": "gpu",
    "0x1200": "gpu",
    "0x0200": "nic",
    "0x0207": "nic",
    "0x0108": "nvme",
}
"""PCI base class and subclass (PCI Code and ID Assignment): VGA and 3D controllers, accelerators, Ethernet and
InfiniBand controllers, non-volatile memory."""
_COUNTERS = {"fatal": "TOTAL_ERR_FATAL", "nonfatal": "TOTAL_ERR_NONFATAL", "correctable": "TOTAL_ERR_COR"}
# A read to an address at which no device answers completes with all ones on PCIe; no vendor has this number.
_GONE = b"\xff\xff\xff\xff"


class _Device(msgspec.Struct, frozen=True, kw_only=True):
    folder: Path
    subject: str
    device: str
    width: int
    speed: float


class Pcie:
    """Reads the changing values of PCIe devices; the list of devices is only read again when one came or went."""

    name = "pcie"
    every_s = PCIE_S

    def __init__(self, machine: MachineRoot) -> None:
        self._root = machine.root
        self._folder = machine.root / "sys/bus/pci/devices"
        self._addresses: list[str] = []
        self._devices: dict[str, _Device] = {}

    def read(self) -> Iterator[Reading]:
        """`pcie.aer_fatal` and so on (since the driver's start), `pcie.link_width_share`, `pcie.link_speed_share`,
        `pcie.lost` (0 or 1)."""
        try:
            self._look()
        except OSError as error:
            yield unknown("pcie", "pcie.devices", error)
            return
        for address, device in self._devices.items():
            yield from self._read(address, device)

    def _look(self) -> None:
        """Updates the list of devices. A device that went away stays in it, so that it is reported as lost."""
        addresses = listing(self._folder)
        # Comparing one listing is all that a round costs as long as nothing was plugged or lost: classes and
        # limits are read once per device.
        if addresses == self._addresses:
            return
        self._addresses = addresses
        uuids = gpu_uuids(self._root)
        for address in addresses:
            folder = self._folder / address
            kind = _KINDS.get(quiet(folder / "class")[:6])
            # Virtual functions have neither a link nor a configuration space of their own.
            if kind is None or address in self._devices or os.path.lexists(folder / "physfn"):
                continue
            width, speed = _ceiling(folder)
            uuid = uuids.get(address, "")
            # In the form in which the driver's lines name a GPU: without the function.
            subject = f"gpu {address.partition('.')[0]}" if kind == "gpu" else f"{kind} {address}"
            self._devices[address] = _Device(
                folder=folder, subject=subject, device=uuid, width=width, speed=speed
            )

    def _read(self, address: str, at: _Device) -> Iterator[Reading]:
        def reading(name: str, value: float) -> Reading:
            return Reading(source="pcie", name=name, value=value, subject=at.subject, device=at.device)

        # Reading the configuration space of a device in D3cold resumes it, so that a look every minute would
        # never let it sleep.
        if quiet(at.folder / "power/runtime_status") == "suspended":
            return
        # The kernel removed it (hot unplug, or a surprise link down). It stays in `_devices` so that this is
        # reported at every round until the agent restarts.
        if address not in self._addresses:
            yield reading("pcie.lost", 1.0)
            return
        try:
            lost = _first_bytes(at.folder / "config") == _GONE
        except OSError as error:
            yield unknown("pcie", "pcie.lost", error, at.subject, at.device)
            return
        yield reading("pcie.lost", float(lost))
        # A device that does not answer has neither counters nor a link: sysfs would show stale or absurd
        # values.
        if lost:
            return
        for kind, total in _COUNTERS.items():
            name = f"pcie.aer_{kind}"
            try:
                # A device without Advanced Error Reporting has no such files, and gives no reading. The last
                # line has the total, in front of which the kinds are listed.
                if content := text(at.folder / f"aer_dev_{kind}"):
                    yield reading(name, float(content.rsplit(total, 1)[1]))
            except (OSError, IndexError, ValueError) as error:
                yield unknown("pcie", name, error, at.subject, at.device)
        width, speed = _link(at.folder, "current")
        # As shares of what the link can be: one rule then fits x4 drives and x16 cards, and a card in a
        # narrow slot has a share of one. GPUs lower the speed of an idle link to save power, so the rules ask
        # for both to hold for long.
        if width and at.width:
            yield reading("pcie.link_width_share", width / at.width)
        if speed and at.speed:
            yield reading("pcie.link_speed_share", speed / at.speed)

    def close(self) -> None:
        """Nothing is open."""


def _first_bytes(path: Path) -> bytes:
    """Vendor and device number; all ones if no device answers at this address."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4)
    finally:
        os.close(fd)


def _link(folder: Path, which: str) -> tuple[int, float]:
    """(lanes, GT/s) of a link; 0 for a figure that is missing (`Unknown`, or 255 lanes, of a link that is down)."""
    width, speed = quiet(folder / f"{which}_link_width"), quiet(folder / f"{which}_link_speed").split(" ")[0]
    lanes = int(width) if width.isdigit() and int(width) < 64 else 0
    try:
        return lanes, float(speed)
    except ValueError:
        return lanes, 0.0


def _ceiling(folder: Path) -> tuple[int, float]:
    """The most that the link can do: the lesser of the device's limit and that of the port above it. A wide card in a
    narrow slot is no fault."""
    device = _link(folder, "max")
    above = _link(folder.resolve().parent, "max")
    return min(device[0], above[0] or device[0]), min(device[1], above[1] or device[1])


def pcie_sources(machine: MachineRoot) -> list[Pcie]:
    """The source for PCIe devices, if there is a PCI bus."""
    return [Pcie(machine)] if names(machine.root / "sys/bus/pci/devices") else []


def has_nvidia_gpu(root: Path) -> bool:
    """Whether an NVIDIA GPU is on the PCI bus, with a driver or without."""
    folder = root / "sys/bus/pci/devices"
    return any(
        quiet(folder / address / "vendor") == "0x10de"
        and quiet(folder / address / "class").startswith("0x03")
        for address in names(folder)
    )
