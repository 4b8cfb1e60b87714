"""Network interfaces: cables without a signal, links that come and go, errors."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.health.files import attempt, listing, names, number, quiet, text, unknown
from holdfast.health.samples import Reading
from holdfast.health.sources import MachineRoot

NETWORK_S = 30.0
# linux/rtnetlink.h and linux/if.h: the group of link changes, the header of a message, where struct ifinfomsg
# has the index, and the administrator's flag.
_RTMGRP_LINK = 1
_NLMSG_HEADER = struct.Struct("=IHHII")
_IFI_INDEX_OFFSET = _NLMSG_HEADER.size + 4
_IFF_UP = 1
_RECEIVE_BYTES = 65_536


class Interfaces:
    """The interfaces with a device behind them, without the loopback, bridges and virtual pairs of containers.

    An interface that was taken down on purpose is left out. `fileno` is readable when the kernel reports a change of a
    link.
    """

    name = "net"
    every_s = NETWORK_S

    def __init__(self, machine: MachineRoot, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = machine.root / "sys/class/net"
        self._clock = clock
        self._news: socket.socket | None = None if machine.stand_in else _listen()
        self._indexes: set[int] = set()
        self._due_s = clock()

    def fileno(self) -> int:
        """Readable after a change of a link; -1 if changes are not reported (recorded input, no permission)."""
        return self._news.fileno() if self._news else -1

    def read(self) -> Iterator[Reading]:
        """`net.carrier` (0 or 1), `net.carrier_changes`, `net.rx_errors`, `net.tx_errors`, `net.tx_timeouts`; for
        people `net.rx_bytes` and `net.tx_bytes`. Nothing if it was called before it is due, for a change of a virtual
        interface (containers come and go)."""
        now = self._clock()
        # Every container that comes or goes changes a virtual link and wakes this source. Only changes of
        # interfaces with a device behind them are worth a reading; the others are read from the socket and
        # ignored.
        if self._news is not None and not (changed_links(self._news) & self._indexes) and now < self._due_s:
            return
        self._due_s = now + self.every_s - 1.0
        # Looked up anew each time: an interface that was removed and came back has another index.
        self._indexes.clear()
        try:
            interfaces = listing(self._folder)
        except OSError as error:
            yield unknown("net", "net.interfaces", error)
            return
        for name in interfaces:
            folder = self._folder / name
            # Virtual interfaces have no `device`. lexists: the link may point to a device that is just being
            # removed.
            if os.path.lexists(folder / "device"):
                if (index := quiet(folder / "ifindex")).isdigit():
                    self._indexes.add(int(index))
                yield from _interface(name, folder)

    def close(self) -> None:
        """Closes the socket."""
        if self._news is not None:
            self._news.close()
            self._news = None


def _interface(name: str, folder: Path) -> Iterator[Reading]:
    # An interface that was taken down on purpose has no carrier either; the kernel answers EINVAL for it.
    # Servers have ports that nobody uses.
    if not _is_up(quiet(folder / "flags")):
        return
    yield from number("net", "net.carrier", folder / "carrier", name)
    # Also shows what happens between two readings: a cable that loses its signal for a second has its carrier
    # again at every look, and only this counter tells.
    yield from number("net", "net.carrier_changes", folder / "carrier_changes", name)
    for counter in ("rx_errors", "tx_errors", "rx_bytes", "tx_bytes"):
        yield from number("net", f"net.{counter}", folder / "statistics" / counter, name)
    yield from attempt("net", "net.tx_timeouts", lambda: _tx_timeouts(folder / "queues"), name)


def _is_up(flags: str) -> bool:
    """Whether the interface is administratively up, whatever the cable's state."""
    try:
        return bool(int(flags, 16) & _IFF_UP)
    except ValueError:
        return False


def _tx_timeouts(queues: Path) -> float | None:
    counts = [text(queues / queue / "tx_timeout") for queue in names(queues) if queue.startswith("tx-")]
    return float(sum(int(count or 0) for count in counts)) if counts else None


def _listen() -> socket.socket | None:
    try:
        news = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        # The group of links requires no root. In a sandbox without netlink, the interfaces are only read once
        # per period.
        news.setblocking(False)
        news.bind((0, _RTMGRP_LINK))
    except OSError:
        return None  # it is still read once per period
    return news


def changed_links(news: socket.socket) -> set[int]:
    """Indexes of the interfaces whose links changed since the last call."""
    indexes: set[int] = set()
    while True:
        try:
            data = news.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return indexes
        except OSError:
            continue  # ENOBUFS: some messages were dropped; the next reading sees what they changed
        indexes |= parse_links(data)


def parse_links(data: bytes) -> set[int]:
    """Indexes in a datagram of netlink (struct nlmsghdr, then struct ifinfomsg)."""
    indexes: set[int] = set()
    at = 0
    while at + _NLMSG_HEADER.size <= len(data):
        length = _NLMSG_HEADER.unpack_from(data, at)[0]
        # A length below the header's would never advance; what follows in this datagram cannot be found.
        if length < _NLMSG_HEADER.size:
            break
        if at + _IFI_INDEX_OFFSET + 4 <= len(data):
            indexes.add(struct.unpack_from("=i", data, at + _IFI_INDEX_OFFSET)[0])
        # Messages of netlink are aligned to four bytes.
        at += (length + 3) & ~3
    return indexes


def network_sources(machine: MachineRoot) -> list[Interfaces]:
    """The source for network interfaces, if there are any."""
    return [Interfaces(machine)] if names(machine.root / "sys/class/net") else []
