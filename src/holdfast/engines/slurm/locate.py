"""Where a process of the job finds itself: which node of which allocation, and at which address."""

from __future__ import annotations

import os
import socket

import msgspec

from holdfast.engines.slurm.commands import Slurm, SlurmError


class ThisNode(msgspec.Struct, frozen=True):
    """The node that this process runs on."""

    node: str
    """Its name in Slurm."""
    host: str
    """Its IPv4 address, which the other nodes reach."""
    allocation: str
    """The id of the Slurm job that it came with: the training job's own, or a follow-up's."""
    restarts: int
    """How often Slurm has requeued that job."""


async def find_this_node(slurm: Slurm) -> ThisNode:
    """Of this process, from what Slurm told it.

    Raises:
        SlurmError: it was not started by Slurm.
    """
    node, allocation = os.environ.get("SLURMD_NODENAME"), os.environ.get("SLURM_JOB_ID")
    if node is None or allocation is None:
        raise SlurmError("this program is started only by Slurm, through `holdfast run --engine slurm`")
    told = await slurm.nodes([node])
    address = told[node].address if node in told else node
    return ThisNode(node, ip_of(address), allocation, int(os.environ.get("SLURM_RESTART_COUNT", "0")))


def ip_of(address: str) -> str:
    """Of Slurm's NodeAddr, which may be a name."""
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise SlurmError(f"the node's address {address!r} cannot be resolved: {error}") from error
    return str(found[0][4][0])
