"""Common start of the processes that Slurm runs: the launcher in the batch script, and the program on every node."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from holdfast import logs
from holdfast.engines.jobs import check_own
from holdfast.engines.slurm.commands import SlurmCommands, SlurmError
from holdfast.errors import HoldfastError, UsageError
from holdfast.protocol.job import JobSpec
from holdfast.protocol.wire.stored import decode_file

_log = logging.getLogger(__name__)


_specs = msgspec.json.Decoder(JobSpec)


def enter(module: str, run: Callable[[JobSpec, Path], Coroutine[None, None, int]], log_file: str = "") -> int:
    """Runs a part of the job whose folder is in `--job-dir`; returns the exit code.

    Args:
        module: its name for `python -m`.
        run: the part.
        log_file: in the folder's `logs`; empty: the log goes to stderr, which Slurm writes to a file for the node.
    """
    parser = argparse.ArgumentParser(prog=module)
    parser.add_argument("--job-dir", type=Path, required=True)
    job_dir: Path = parser.parse_args().job_dir
    # Before any file is created, because logs and the state of the job must be readable only for its user.
    os.umask(0o077)
    try:
        check_own(job_dir)
    except UsageError as error:
        sys.exit(f"[holdfast] {error}")
    spec = decode_file(_specs.decode, job_dir / "spec.json")
    close_log = logs.configure(
        spec.log,
        # The launcher's messages may be about any node, so they do not have its own as a field.
        {"job": spec.name, "node": "" if log_file else os.environ.get("SLURMD_NODENAME", "")},
        file=job_dir / "logs" / log_file if log_file else None,
        # Without other loggers: asyncio's warnings before a new start puts the old logs away would be put away with them.
        others=not log_file,
    )
    try:
        return asyncio.run(run(spec, job_dir))
    except HoldfastError as error:
        _log.error("%s", error)
        return 1
    finally:
        close_log()


class ThisNode(msgspec.Struct, frozen=True):
    """The node on which this process runs."""

    node: str
    """Its name in Slurm."""
    host: str
    """Its IPv4 address, by which the other nodes reach it."""
    allocation: str
    """Id of the Slurm job that it belongs to: the training job's own, or a follow-up."""
    restarts: int
    """How often Slurm has requeued that job."""


async def find_this_node(slurm: SlurmCommands) -> ThisNode:
    """The node of this process, from the variables that Slurm has set.

    Raises:
        SlurmError: it was not started by Slurm.
    """
    node, allocation = os.environ.get("SLURMD_NODENAME"), os.environ.get("SLURM_JOB_ID")
    if node is None or allocation is None:
        raise SlurmError("this program is started only by Slurm, through `holdfast run --engine slurm`")
    nodes = await slurm.nodes([node])
    address = nodes[node].address if node in nodes else node
    return ThisNode(node, ip_of(address), allocation, int(os.environ.get("SLURM_RESTART_COUNT", "0")))


def ip_of(address: str) -> str:
    """The IPv4 address for Slurm's NodeAddr, which may be a name. Raises SlurmError if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise SlurmError(f"the node's address {address!r} cannot be resolved: {error}") from error
    return str(found[0][4][0])
