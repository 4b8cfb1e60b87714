"""TCP between two ends of one machine."""

from __future__ import annotations

import socket
from contextlib import suppress

CONGESTION = getattr(socket, "TCP_CONGESTION", None)


def unpace(sock: socket.socket) -> None:
    """Where both ends are on this machine, leaves the pacing of packets out. Other connections stay as the system wants them.

    BBR, the default of many systems, sends no faster than its model of the network says; over loopback, where there is
    nothing to be modelled, it reached half of what Reno does, which every Linux has and lets everybody choose.
    """
    if CONGESTION is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # not connected, or a kernel without it: then as it is
        if sock.getpeername()[0] == sock.getsockname()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, CONGESTION, b"reno")
