"""What every process of a job does about its sockets: how many it may have, and TCP between two ends of one machine."""

from __future__ import annotations

import resource
import socket
from contextlib import suppress

CONGESTION = getattr(socket, "TCP_CONGESTION", None)

MOST_DESCRIPTORS = 1 << 20
"""Some systems allow a thousand times more, and there are programs that walk over all that they may have."""


def raise_descriptor_limit() -> None:
    """This process may open as much as an administrator allows it. Called when a coordinator, an agent or a worker begins.

    A worker has a connection to every other one, the coordinator to every node, and 1,024 descriptors, which is what many
    systems begin with, are fewer than that. The low limit protects programs that use select(), which cannot take a
    descriptor above 1,023. None of ours does. A program that the script starts inherits the limit but no descriptor, so it
    meets one of those only if it opens as many itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Containers may report a limit that they do not let anybody set. The job then runs with what it has.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listening(host: str, port: int = 0, backlog: int | None = None) -> socket.socket:
    """A socket that listens there. host: an address in numbers of either family, or a name of IPv4. port: 0 is one that is free.

    Raises:
        OSError: it cannot be had.
    """
    # Without being told, `create_server` takes every address for one of IPv4.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def host_and_port(host: str, port: int) -> str:
    """As it stands in an address on the web: one of IPv6 is in brackets, or its end would be taken for the port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unpace(sock: socket.socket) -> None:
    """Where both ends are on this machine, leaves the pacing of packets out. Other connections stay as the system wants them.

    BBR, the default of many systems, sends no faster than its model of the network says; over loopback, where there is
    nothing to be modelled, it reached half of what Reno does, which every Linux has and lets everybody choose.
    """
    if CONGESTION is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # not connected, or a kernel without this algorithm
        # Only where both ends have one address. Between machines the system's own choice knows more about the
        # network than we do.
        if sock.getpeername()[0] == sock.getsockname()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, CONGESTION, b"reno")


def shut(sock: socket.socket) -> None:
    """Ends a connection under whoever waits in it, in any thread: it goes on with an error.

    Not close(): that would not wake a thread that is inside recv or send, and its number could be another socket's by the
    time that the thread uses it again.
    """
    with suppress(OSError):  # not connected any more
        sock.shutdown(socket.SHUT_RDWR)
