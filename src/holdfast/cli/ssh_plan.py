"""Makes the part of a job's specification about hosts of the options of `holdfast run --engine ssh`."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.protocol.job_options import SshOptions

# No dash first: ssh would take such a host for an option, and options of ssh can run programs.
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")


def plan_ssh(given: SshOptions) -> SshOptions:
    """The options with one host in each place and absolute paths.

    Raises:
        UsageError: a host, file, address or variable that cannot be.
    """
    hosts = tuple(h.strip() for text in given.hosts for h in text.split(",") if h.strip())
    for host in hosts:
        # The numbers of nodes are the local engine's, and `--node 3` of a command means node3.
        if not _HOST.fullmatch(host) or host.rpartition("@")[2].isdecimal():
            raise UsageError(
                f"--hosts {host!r}: must be a name that ssh accepts, for example a,b or user@10.0.0.7; put ports, "
                "keys and jump hosts into ~/.ssh/config"
            )
    planned = dataclasses.replace(given, hosts=hosts)
    twice = sorted({name for name in planned.names if planned.names.count(name) > 1})
    if twice:
        raise UsageError(f"--hosts: {', '.join(twice)} is given twice; each host is one node")
    config = Path(given.config).expanduser().absolute() if given.config else None
    if config is not None and not config.is_file():
        raise UsageError(f"--ssh-config {given.config}: this file does not exist")
    if given.address:
        _check_address(given.address)
    for name in given.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(
                f"--env {name!r}: specify only the name of a variable, for example NCCL_DEBUG; its value is taken "
                "from this environment"
            )
    return dataclasses.replace(planned, config=str(config) if config else "")


def check_ssh(planned: SshOptions, nodes: int, spares: int, nproc: str) -> None:
    """Raises UsageError for wishes that cannot be."""
    if not planned.hosts:
        raise UsageError("--engine ssh needs the hosts, for example --hosts a,b,c")
    # Refused although the job could start smaller: the sizes are what the person asked for, and a missing
    # host is more often a typing error than a wish.
    if nodes + spares > len(planned.hosts):
        raise UsageError(
            f"--hosts has {len(planned.hosts)} hosts, but {nodes} nodes and {spares} spares need {nodes + spares}; "
            "add hosts, or use a smaller --nnodes or --spares"
        )
    if not nproc.isdecimal():
        raise UsageError(
            f"--nproc-per-node {nproc} counts the devices of this machine, but the nodes are the hosts; specify a "
            "number"
        )


def _check_address(text: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise UsageError(
            f"--address must be a numeric address of this machine (got {text!r}), for example 10.0.0.7"
        ) from None
