"""What `holdfast check` asks of the coordinator of a running job: the command's options are the request.

`holdfast --help` imports this module, so it must not need msgspec. It has no `from __future__ import annotations` because
the command line evaluates its annotations (see `protocol/options.py`).
"""

from dataclasses import dataclass
from typing import Annotated

from holdfast.protocol.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Which nodes are checked, and how."""

    nodes: Annotated[
        tuple[str, ...],
        Argument(
            metavar="NODE", help="Names of nodes of the job to check. By default all nodes that do not train."
        ),
    ] = ()
    """Nodes by name; empty: those that do not train."""
    deep: Annotated[
        bool,
        Option(
            help="Also test processor, memory, disk, network and GPUs, each of which takes about ten seconds."
        ),
    ] = False
    disturb: Annotated[
        bool, Option(help="Run deep checks also on nodes that train. This slows the training down.")
    ] = False
    seconds: Annotated[
        float,
        Option(
            metavar="SECONDS",
            least=0,
            most=3600,
            example="10",
            help="Approximate duration of each deep check, in seconds.",
            default="2",
        ),
    ] = 0.0
    """About how long each deep check lasts; 0: as long as it does by default."""
    every_pair: bool = False
    """Instead of checks every pair of the nodes is measured. The command says it with `--write-topology`, whose file is no
    affair of the coordinator's."""
