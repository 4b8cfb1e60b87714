"""Makes the part of a job's specification about where its nodes stand."""

from __future__ import annotations

import os
import re

from holdfast.engines.base import KnownNodes
from holdfast.engines.run_options import NodeOptions
from holdfast.engines.topology import read_topology
from holdfast.errors import UsageError
from holdfast.protocol.place import PLACE_VARIABLE, NodePlace, parse_place


def plan_places(given: NodeOptions, known: KnownNodes) -> dict[str, NodePlace]:
    """Node to its place, of the topology file.

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
    ours = {name: place for name, place in found.items() if re.fullmatch(known.names, name)}
    if not ours:
        raise UsageError(
            f"--topology {given.topology}: the file does not name any of this job's nodes, which are {known.examples}"
        )
    return ours
