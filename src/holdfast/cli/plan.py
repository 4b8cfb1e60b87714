"""`holdfast plan`: what a global batch costs at every size of the job."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast.cli.common import AsJson, write_json

SHOWN = 3


def plan(
    global_batch: Annotated[int, typer.Option("--global-batch", help="Samples in a step, over all workers.")],
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Samples in a forward pass.")],
    nnodes: Annotated[str, typer.Option("--nnodes", help="Nodes, or MIN:MAX.")] = "1:8",
    nproc_per_node: Annotated[int, typer.Option("--nproc-per-node", help="Workers on each node.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Shows what each size of the job computes and how much of it is idle, and better micro-batch sizes."""
    import msgspec

    from holdfast.cli.spec import parse_nnodes
    from holdfast.errors import UsageError
    from holdfast.observe import units
    from holdfast.observe.tables import print_table
    from holdfast.plan.division import divide, suggest

    low, high = parse_nnodes(nnodes)
    if micro_batch < 1 or global_batch < 1 or global_batch % micro_batch:
        raise UsageError(
            f"--global-batch {global_batch} is not a multiple of --micro-batch {micro_batch}; for example 256 and 4"
        )
    if nproc_per_node < 1:
        raise UsageError(f"--nproc-per-node {nproc_per_node}: at least 1")
    count = global_batch // micro_batch
    worlds = [n * nproc_per_node for n in range(low, high + 1)]
    if count < worlds[0]:
        raise UsageError(
            f"{count} micro-batches are too few for {worlds[0]} workers; make --micro-batch smaller or "
            "--global-batch larger"
        )
    found, better = divide(count, worlds), suggest(global_batch, micro_batch, worlds)[:SHOWN]
    if as_json:
        write_json({"sizes": msgspec.to_builtins(found), "better": msgspec.to_builtins(better)})
        return
    rows = [
        (
            str(d.world // nproc_per_node),
            str(d.world),
            str(d.most) if d.most == d.least else f"{d.least} to {d.most}",
            units.share(d.idle),
        )
        for d in found
    ]
    print_table(sys.stdout, ("nodes", "workers", "micro-batches each", "idle"), rows, right=4)
    if len(found) < len(worlds):
        sys.stdout.write(f"more than {count} workers cannot share {count} micro-batches\n")
    for suggestion in better:
        sys.stdout.write(
            f"--micro-batch {suggestion.micro_batch} leaves at most {units.share(suggestion.worst)} idle\n"
        )
