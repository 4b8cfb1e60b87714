"""InfiniBand, RoCE and EFA: the state of every port, its counters, and the character devices that programs open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.health.files import listing, names, number, quiet, text, unknown
from holdfast.health.samples import Reading
from holdfast.health.sources import MachineRoot

RDMA_S = 15.0
ACTIVE = "ACTIVE"
_COUNTERS = (
    "link_downed",
    "link_error_recovery",
    "symbol_error",
    "excessive_buffer_overrun_errors",
    "local_link_integrity_errors",
    "port_rcv_errors",
    "port_xmit_discards",
)
_HW_COUNTERS = (
    "local_ack_timeout_err",
    "no_completion_cmds",
    "out_of_sequence",
    "packet_seq_err",
    "rdma_read_wr_err",
    "rdma_write_wr_err",
    "req_transport_retries_exceeded",
    "retrans_pkts",
    "retrans_timeout_events",
    "rnr_nak_retry_err",
    "roce_slow_restart",
    "rx_drops",
    "unresponsive_remote_events",
)
"""The counters, of the many that drivers have, for which a threshold has been published (docs/health/rules.md)."""


class Rdma:
    """Every port of every RDMA device."""

    name = "rdma"
    every_s = RDMA_S

    def __init__(self, machine: MachineRoot) -> None:
        self._class = machine.root / "sys/class"
        self._folder = self._class / "infiniband"
        self._guids: dict[str, str] = {}

    def read(self) -> Iterator[Reading]:
        """`rdma.state`, `rdma.rate_gbps`, `rdma.COUNTER`, `rdma.lost` (a device that was there),
        `rdma.char_devices_missing`."""
        try:
            devices = listing(self._folder)
        except OSError as error:
            yield unknown("rdma", "rdma.devices", error)
            return
        for name in devices:
            # Remembered for as long as the agent runs: a device that disappeared is reported with the
            # identity that it had.
            if name not in self._guids:
                self._guids[name] = f"guid:{quiet(self._folder / name / 'node_guid')}"
            for port in names(self._folder / name / "ports"):
                yield from self._port(name, port)
        for name, device in self._guids.items():
            yield Reading(
                source="rdma", name="rdma.lost", value=float(name not in devices), subject=name, device=device
            )
        yield from self._char_devices(devices)

    def _port(self, name: str, port: str) -> Iterator[Reading]:
        folder = self._folder / name / "ports" / port
        subject, device = f"{name} port {port}", self._guids[name]
        if (state := port_state(self._folder / name, folder)) is not None:
            yield Reading(source="rdma", name="rdma.state", value=state, subject=subject, device=device)
            # The rate of a port that is down is its lowest one, which would look like a fault of its own.
            if state == ACTIVE and (rate := _rate(folder)):
                yield Reading(
                    source="rdma", name="rdma.rate_gbps", value=rate, subject=subject, device=device
                )
        for kind, wanted in (("counters", _COUNTERS), ("hw_counters", _HW_COUNTERS)):
            there = set(names(folder / kind))
            # Only those that this driver has. Counters begin again when the port is reset; `Thresholds`
            # treats a fall as a reset.
            for counter in wanted:
                if counter in there:
                    yield from number("rdma", f"rdma.{counter}", folder / kind / counter, subject, device)

    def _char_devices(self, devices: list[str]) -> Iterator[Reading]:
        folder = self._class / "infiniband_verbs"
        entries = names(folder)
        if not entries:
            return
        try:
            # A device without its uverbs file is there for the kernel and out of reach for every program.
            having = {text(folder / entry / "ibdev") for entry in entries if entry.startswith("uverbs")}
        except OSError as error:
            yield unknown("rdma", "rdma.char_devices_missing", error)
            return
        for name in devices:
            missing = float(name not in having)
            yield Reading(
                source="rdma",
                name="rdma.char_devices_missing",
                value=missing,
                subject=name,
                device=self._guids[name],
            )

    def close(self) -> None:
        """Nothing is open."""


def port_state(device: Path, port: Path) -> str | None:
    """State of a port, from its folder: `ACTIVE`, `DOWN`, `INIT`, ... EFA's driver reports every port as active, so the
    state of the network interface of the same device is used; None if it has no interface."""
    # A port state that is always ACTIVE would hide a lost link of EFA, so the network interface of the same
    # device answers instead.
    if (device / "device/driver").resolve().name == "efa":
        interfaces = device / "device/net"
        states = [quiet(interfaces / interface / "operstate") for interface in names(interfaces)]
        return None if not states else ACTIVE if "up" in states else states[0].upper()
    return quiet(port / "state").partition(": ")[2] or None  # `4: ACTIVE`


def _rate(folder: Path) -> float:
    """The rate of a line such as `400 Gb/sec (4X NDR)`."""
    try:
        return float(quiet(folder / "rate").split(" ")[0])
    except ValueError:
        return 0.0


def rdma_sources(machine: MachineRoot) -> list[Rdma]:
    """The source for RDMA devices, if the kernel has RDMA."""
    return [Rdma(machine)] if (machine.root / "sys/class/infiniband").is_dir() else []
