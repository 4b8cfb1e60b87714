"""Makes the part of a job's specification about where its nodes stand."""

from __future__ import annotations

import os
import re

from holdfast.cli.run_options import NodeOptions
from holdfast.engines.topology import read_topology
from holdfast.errors import UsageError
from holdfast.protocol.place import PLACE_VARIABLE, NodePlace, parse_place

SHOWN = 8


def plan_places(given: NodeOptions, engine: str, hosts: tuple[str, ...]) -> dict[str, NodePlace]:
    """Node to its place, of the topology file. hosts: of the ssh engine.

    Raises:
        UsageError: the file or the variable cannot be read, or says nothing about this job's nodes.
    """
    try:
        parse_place(os.environ.get(PLACE_VARIABLE, ""))
    except ValueError as error:
        raise UsageError(f"{PLACE_VARIABLE}: {error}") from None
    if given.topology is None:
        return {}
    if given.racks:
        raise UsageError("--racks and --topology both give the locations of nodes; pass only one of them")
    found = read_topology(given.topology)
    # A file of the whole site may have thousands of hosts: the job's specification gets those that may be its own.
    ours = {name: place for name, place in found.items() if _may_be_ours(name, engine, hosts)}
    if not ours:
        names = "node0, node1 and so on" if engine == "local" else ", ".join(hosts[:SHOWN])
        raise UsageError(
            f"--topology {given.topology}: the file does not name any of this job's nodes, which are {names}"
        )
    return ours


def _may_be_ours(name: str, engine: str, hosts: tuple[str, ...]) -> bool:
    match engine:
        case "local":
            return re.fullmatch(r"node\d+", name) is not None
        case "ssh":
            return name in hosts
    return True
