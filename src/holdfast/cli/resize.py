"""`holdfast resize` and `holdfast drain`: gives a running job more or fewer nodes, or takes one out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from holdfast.cli.common import JobName

Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Reason to record in the ledger and the report.")
]


def resize(
    nodes: Annotated[
        int, typer.Argument(help="Number of nodes to train on, between MIN and MAX of the job's --nnodes.")
    ],
    job: JobName = None,
    reason: Reason = "holdfast resize",
) -> None:
    """Grows or shrinks a running job between two steps. No step is lost, and the global batch stays the same."""
    import asyncio

    from holdfast.engines import jobs

    folder = jobs.existing(job)
    query = urlencode({"nodes": nodes, "reason": reason})
    answer = asyncio.run(_post(folder, f"/resize?{query}"))
    limit = answer["capacity"]
    held = (
        f", the most that are available now (capacity {limit})" if limit is not None and limit < nodes else ""
    )
    sys.stdout.write(f"the job {folder.name} goes from {answer['before']} to {answer['nodes']} nodes{held}\n")


def drain(
    node: Annotated[str, typer.Argument(help="Name of the node as `holdfast status` shows it.")],
    job: JobName = None,
    within: Annotated[
        str | None,
        typer.Option(
            "--within",
            metavar="TIME",
            help=(
                "Latest time after which the node leaves, for example 2m. By default the node trains until a "
                "replacement is ready."
            ),
        ),
    ] = None,
    reason: Reason = "holdfast drain",
) -> None:
    """Takes a node out of a running job between two steps. A spare or a new node replaces it, if there is one."""
    import asyncio

    import msgspec

    from holdfast.engines import jobs
    from holdfast.protocol.engine_orders import NodeGoing
    from holdfast.protocol.units import parse_seconds

    within_s = None if within is None else parse_seconds("--within", within)
    folder = jobs.existing(job)
    going = NodeGoing(node, reason, within_s)
    asyncio.run(_post(folder, "/drain", msgspec.json.encode(going).decode()))
    sys.stdout.write(
        f"{node} will leave the job {folder.name}; `holdfast events --job {folder.name}` shows when it does\n"
    )


async def _post(folder: Path, path: str, body: str = "") -> Any:
    from holdfast.engines.reach import client_of

    async with client_of(folder) as client:
        return await client.post(path, body)
