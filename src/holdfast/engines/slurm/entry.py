"""How Slurm's processes begin: the launcher in the batch script, and what runs on every node."""

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
        module: as `python -m` has it.
        log_file: within the folder's `logs`; empty: the log goes to stderr, which Slurm writes to a file of the node's.
    """
    parser = argparse.ArgumentParser(prog=module)
    parser.add_argument("--job-dir", type=Path, required=True)
    job_dir: Path = parser.parse_args().job_dir
    # Before any file is made: logs and the state of the job are for its user alone.
    os.umask(0o077)
    try:
        check_own(job_dir)
    except UsageError as error:
        sys.exit(f"[holdfast] {error}")
    spec = decode_file(_specs.decode, job_dir / "spec.json")
    close_log = logs.configure(
        spec.log,
        # The launcher's own lines are about any node, so its own is no field of theirs.
        {"job": spec.name, "node": "" if log_file else os.environ.get("SLURMD_NODENAME", "")},
        file=job_dir / "logs" / log_file if log_file else None,
        # What asyncio warns of before a new start puts the old logs away would be put away with them.
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
    """The node that this process runs on."""

    node: str
    """Its name in Slurm."""
    host: str
    """Its IPv4 address, which the other nodes reach."""
    allocation: str
    """The id of the Slurm job that it came with: the training job's own, or a follow-up's."""
    restarts: int
    """How often Slurm has requeued that job."""


async def find_this_node(slurm: SlurmCommands) -> ThisNode:
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
