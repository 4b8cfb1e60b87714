"""`holdfast agent`: a node of a job whose nodes are started by somebody else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def agent(
    address: Annotated[
        str,
        typer.Option(
            "--join", metavar="HOST:PORT", help="URL of the job's coordinator, as `holdfast run` prints it."
        ),
    ],
    token_file: Annotated[
        Path,
        typer.Option(
            "--token-file",
            metavar="FILE",
            envvar="HOLDFAST_TOKEN_FILE",
            help="File with a copy of the job's token. Only you may have permission to read it.",
        ),
    ],
    node: Annotated[
        str,
        typer.Option(
            "--node", metavar="NAME", help="Name of this node.", show_default="the machine's host name"
        ),
    ] = "",
    place: Annotated[
        str,
        typer.Option(
            "--place",
            metavar="ZONE/RACK",
            help="Location of this node, for example zone-a/rack7.",
            show_default="as the job's --topology says, or else the value of HOLDFAST_NODE_PLACE",
        ),
    ] = "",
    wait: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", min=0.0, help="How long to wait for the coordinator to answer."
        ),
    ] = 300.0,
    shared_machine: Annotated[
        bool, typer.Option("--shared-machine", help="Other nodes of the job run on this machine, too.")
    ] = False,
) -> None:
    """Joins a job as one of its nodes, and runs until the job is over or does not need it any more.

    For jobs of `holdfast run --engine join`. Exit code 0: it has left in order.
    """
    import socket

    from holdfast.engines import jobs
    from holdfast.engines.join.node import Joining, join
    from holdfast.errors import UsageError
    from holdfast.protocol.place import parse_place

    name = jobs.check_name(node or socket.gethostname().partition(".")[0], "--node")
    if name.isdecimal():
        raise UsageError(
            f"--node {name!r}: a node's name must not be a number alone; use for example node{name}"
        )
    try:
        stands = parse_place(place)
    except ValueError as error:
        raise UsageError(f"--place {place!r}: {error}") from None
    wishes = Joining(
        address=address,
        token_file=token_file,
        node=name,
        place=stands,
        wait_s=wait,
        shared_machine=shared_machine,
    )

    def note(text: str) -> None:
        sys.stderr.write(f"[holdfast] {text}\n")

    join(wishes, note)
