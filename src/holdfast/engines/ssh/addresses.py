"""Checks the given hosts, and chooses the addresses of the coordinator and of each host's agent from what sshd reports there."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import UsageError
from holdfast.protocol.job_options import SshOptions

# Must not begin with a dash: ssh would take such a host for an option, and options of ssh can run programs.
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")


def plan_ssh(given: SshOptions) -> SshOptions:
    """The options with the hosts as a list, one host per entry, and with absolute paths.

    Raises:
        UsageError: a host, file, address or variable is invalid.
    """
    hosts = tuple(h.strip() for text in given.hosts for h in text.split(",") if h.strip())
    for host in hosts:
        # Not a number: `--node 3` of a command means node3, as the local engine names nodes.
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


def _check_address(text: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise UsageError(
            f"--address must be a numeric address of this machine (got {text!r}), for example 10.0.0.7"
        ) from None


class Seen(NamedTuple):
    """The two addresses of an ssh connection as the host sees them; empty: unknown."""

    client: str
    server: str


def plain_address(text: str) -> str:
    """An address from SSH_CONNECTION, as IPv4 if it is a mapped one; empty: other machines cannot use it."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.is_loopback:
        return "127.0.0.1"
    # A link-local address (fe80::...) is valid only with a scope, which differs between machines.
    return "" if address.is_link_local else str(address.ipv4_mapped or address)


def is_loopback(address: str) -> bool:
    """Whether an address can be reached only from its own machine."""
    return ipaddress.ip_address(address).is_loopback


def choose_address(seen: Mapping[str, Seen], given: str, is_ours: Callable[[str], bool]) -> str:
    """The coordinator's address.

    Args:
        seen: the addresses that each host sees, by its name.
        given: `--address`; empty: chosen by what the hosts see.
        is_ours: whether this machine has an address.

    Raises:
        UsageError: the given address cannot be used, or none is known that all hosts reach.
    """
    away = {name: ends for name, ends in seen.items() if not is_loopback(ends.server)}
    if given:
        if away and is_loopback(given):
            raise UsageError(
                f"--address {given}: this address can be reached only from this machine, but {', '.join(away)} must "
                "reach it, too; specify an address of this machine in their network"
            )
        if not is_ours(given):
            raise UsageError(f"--address {given}: this machine does not have this address")
        return given
    if not away:
        return "127.0.0.1"
    # The one that most hosts see. A host that is this machine sees a loopback address, which is of no use for the others.
    counted = Counter(e.client for e in away.values() if e.client and not is_loopback(e.client))
    for address, _ in counted.most_common():
        if is_ours(address):
            return address
    name, ends = next(iter(away.items()))
    raise UsageError(
        f"{name} sees the connection from this machine come from {ends.client or 'an unknown address'}, which is not "
        "an address of this machine (perhaps that of a jump host); specify an address of this machine that the hosts "
        "can reach with --address"
    )


def why_apart(ends: Seen, coordinator: str) -> str | None:
    """Why the agent of this host and the other processes cannot reach each other; None: they can, as far as is known."""
    own = bind_address(ends, coordinator)
    if (":" in own) == (":" in coordinator):
        return None
    return (
        f"ssh reaches it at {own}, but the coordinator is at {coordinator}; add `AddressFamily "
        f"{'inet6' if ':' in coordinator else 'inet'}` to its entry in ~/.ssh/config, so that all use the same kind "
        "of address"
    )


def bind_address(ends: Seen, coordinator: str) -> str:
    """The address that the agent of a host binds. coordinator: the address from `choose_address`."""
    # A host that ssh reaches by loopback is this machine, whose agent the other hosts must reach as well.
    if is_loopback(ends.server) and not is_loopback(coordinator):
        return coordinator
    return ends.server
