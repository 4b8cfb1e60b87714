"""RDMA on this node: active ports with the expected rate and width, addresses, device files.

The expected values of a port are not recorded anywhere, so they are taken from its kind: most ports of the same card. A
port without a cable is no fault as long as no port of its kind has one on this node; nodes are compared by their number
of active ports.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.health.checks.check import Task, unknown
from holdfast.health.files import names, quiet
from holdfast.health.rdma import ACTIVE, port_state
from holdfast.protocol.health import CheckResult, Condition

ETHERNET = "Ethernet"
LINK_UP = "LinkUp"
_RATE = re.compile(r"([\d.]+) Gb/sec \((\d+)X")
_NO_GID = re.compile(r"[0:]*")
_IPV4 = re.compile(r"(0000:){5}ffff:")


class Gid(msgspec.Struct, frozen=True):
    """An address of a port."""

    index: int
    kind: str
    """`RoCE v2`, `IB/RoCE v1`."""
    address: str


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """One port of one device, as the kernel has it."""

    device: str
    number: int
    model: str
    driver: str
    """`efa`, `mlx5_core`, ..."""
    link_layer: str
    state: str
    physical: str
    rate_gbps: float
    """0: not known."""
    width: int
    """Lanes; 0: not known."""
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        """Its name for people."""
        return f"{self.device} port {self.number}"

    @property
    def active(self) -> bool:
        """Whether data can pass."""
        return self.state == ACTIVE

    @property
    def kind(self) -> tuple[str, str, int]:
        """Ports of one kind are used in the same way."""
        return self.model, self.link_layer, self.number


def check_rdma(task: Task, root: Path = Path("/")) -> Iterator[CheckResult]:
    """Checks every port. Gives no result if the kernel has no RDMA device."""
    ports = read_ports(root)
    yield from judge_ports(ports)
    if (root / "dev/infiniband").is_dir():  # a container without any device file does not use RDMA
        for device in dict.fromkeys(p.device for p in ports):
            yield from _device_file(device, root)


def read_ports(root: Path = Path("/")) -> list[Port]:
    """All ports of all devices, by name."""
    folder = root / "sys/class/infiniband"
    return [
        _port(folder / device, device, int(number))
        for device in names(folder)
        for number in names(folder / device / "ports")
        if number.isdigit()
    ]


def judge_ports(ports: Sequence[Port]) -> Iterator[CheckResult]:
    """A result for the state, the rate and the addresses of every port, and one for the number of active ports."""
    for port in ports:
        # Ports of one card model and number are cabled alike in a server. A management port is of another
        # kind and is not compared with the rails.
        kin = [p for p in ports if p.kind == port.kind]
        if not port.active:
            yield _inactive(port, kin, any(p.active for p in ports))
            continue
        yield CheckResult(name="rdma-port", condition=Condition.HEALTHY, subject=port.name, model=port.model)
        yield _rate(port, [p for p in kin if p.active])
        yield _addresses(port)
    if ports:
        active = sum(p.active for p in ports)
        models = ", ".join(sorted({p.model for p in ports}))
        yield CheckResult(
            name="rdma-ports",
            condition=Condition.HEALTHY,
            detail="active",
            value=active,
            unit="ports",
            model=models,
        )


def _inactive(port: Port, kin: Sequence[Port], any_active: bool) -> CheckResult:
    active = sum(p.active for p in kin)
    state = f"{port.state or 'no state'}, {port.physical or 'link unknown'}"
    # The cable works and the subnet manager did not configure the port: certainly a fault, but often one of
    # the fabric.
    if port.physical == LINK_UP:
        condition, why = Condition.FAULTY, "the link is up and was not made active (subnet manager?)"
    # Most of its kind are connected, so this one should be.
    elif 2 * active > len(kin):
        condition, why = Condition.FAULTY, f"{active} of {len(kin)} of its kind are active"
    elif active:
        condition, why = Condition.UNKNOWN, f"{active} of {len(kin)} of its kind are active"
    elif any_active:
        condition, why = Condition.HEALTHY, "not in use: no port of its kind has a link here"
    else:
        condition, why = Condition.UNKNOWN, "no port is active here: no cable, or a fault"
    return CheckResult(
        name="rdma-port", condition=condition, detail=f"{state}: {why}", subject=port.name, model=port.model
    )


def _rate(port: Port, kin: Sequence[Port]) -> CheckResult:
    if not port.rate_gbps:
        return msgspec.structs.replace(unknown("rdma-rate", "the kernel reports no rate"), subject=port.name)
    usual, ports = Counter(p.rate_gbps for p in kin).most_common(1)[0]
    # Only against a majority of its kind. Of two ports with different rates, nothing tells which one is
    # right, and a false fault would cost a node.
    slow = port.rate_gbps < usual and 2 * ports > len(kin)
    narrow = port.width == 1 and port.link_layer != ETHERNET  # Ethernet's 25 Gb/s are called 1X
    detail = f"{port.width}X" if port.width else ""
    if slow:
        detail += f"; {ports} of {len(kin)} of its kind have {usual:g} Gb/s"
    elif narrow:
        detail += ": one lane of a cable that has four"
    condition = Condition.FAULTY if slow or narrow else Condition.HEALTHY
    return CheckResult(
        name="rdma-rate",
        condition=condition,
        detail=detail,
        value=port.rate_gbps,
        unit="Gb/s",
        subject=port.name,
        model=port.model,
    )


def _addresses(port: Port) -> CheckResult:
    """A port without addresses cannot be reached."""
    condition = Condition.HEALTHY if port.gids else Condition.FAULTY
    detail = "" if port.gids else "an active port without an address (GID)"
    return CheckResult(
        name="rdma-gids",
        condition=condition,
        detail=detail,
        value=len(port.gids),
        unit="GIDs",
        subject=port.name,
    )


def gid_index(port: Port) -> int | None:
    """The address by which a RoCE port is used: version 2 and of an IPv4 address, if there is one. None: InfiniBand,
    which needs none, or a port without addresses."""
    if port.link_layer != ETHERNET:
        return None
    # RoCE v2 is routed and what NCCL uses; among its addresses the IPv4 one does not change when the link-
    # local one does.
    ranked = sorted(port.gids, key=lambda g: ("v2" not in g.kind, _IPV4.match(g.address) is None, g.index))
    return ranked[0].index if ranked else None


def _device_file(device: str, root: Path) -> Iterator[CheckResult]:
    """The device file that programs open, if this user may."""
    classes = root / "sys/class/infiniband_verbs"
    files = [name for name in names(classes) if quiet(classes / name / "ibdev") == device]
    for name in files:
        path = root / "dev/infiniband" / name
        if not path.exists():
            why = f"there is no {path}"
        elif not os.access(path, os.R_OK | os.W_OK):
            why = f"{path} may not be opened by this user"
        else:
            yield CheckResult(name="rdma-device", condition=Condition.HEALTHY, subject=device)
            continue
        yield msgspec.structs.replace(unknown("rdma-device", why), subject=device)
    if not files:
        why = "the kernel offers it to no program (no uverbs device)"
        yield CheckResult(name="rdma-device", condition=Condition.FAULTY, detail=why, subject=device)


def _port(folder: Path, device: str, number: int) -> Port:
    port = folder / "ports" / str(number)
    driver = (folder / "device/driver").resolve().name
    model = " ".join(filter(None, (quiet(folder / "hca_type"), quiet(folder / "board_id")))) or driver
    rate = _RATE.match(quiet(port / "rate"))
    return Port(
        device=device,
        number=number,
        model=model,
        driver=driver,
        link_layer=quiet(port / "link_layer"),
        state=port_state(folder, port) or _name_of(quiet(port / "state")),
        physical=_name_of(quiet(port / "phys_state")),
        rate_gbps=float(rate[1]) if rate else 0.0,
        width=int(rate[2]) if rate else 0,
        gids=tuple(_gids(port)),
    )


def _name_of(text: str) -> str:
    """The name in a text such as `4: ACTIVE`."""
    return text.partition(": ")[2]


def _gids(port: Path) -> Iterator[Gid]:
    for index in sorted(int(name) for name in names(port / "gids") if name.isdigit()):
        address = quiet(port / "gids" / str(index))
        if not _NO_GID.fullmatch(address):
            yield Gid(index, quiet(port / "gid_attrs/types" / str(index)), address)
