"""`holdfast plan memory`: whether a model fits, before a node is asked for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import AsJson, Output, width_of, write_as

if TYPE_CHECKING:
    from holdfast.tools.plan.memory import Sizes


def memory(
    parameters: Annotated[
        str,
        typer.Option(
            "--parameters", metavar="N", help="Number of parameters of the model, for example 8.03B."
        ),
    ],
    layers: Annotated[
        int, typer.Option("--layers", metavar="N", help="Number of blocks (layers) of the model.")
    ],
    hidden: Annotated[
        int, typer.Option("--hidden", metavar="N", help="Width of the model: channels of each token.")
    ],
    vocabulary: Annotated[int, typer.Option("--vocabulary", metavar="N", help="Size of the vocabulary.")],
    seq_len: Annotated[int, typer.Option("--seq-len", metavar="TOKENS", help="Tokens in a sample.")],
    micro_batch: Annotated[
        int, typer.Option("--micro-batch", metavar="SAMPLES", help="Samples in one forward pass.")
    ] = 1,
    trained: Annotated[
        str | None,
        typer.Option(
            "--trained",
            metavar="N",
            help="Number of parameters that are trained, for example with LoRA. By default all.",
            show_default=False,
        ),
    ] = None,
    block: Annotated[
        str | None,
        typer.Option(
            "--block",
            metavar="N",
            help=(
                "Parameters of a block that a worker gathers, for models whose experts are not gathered. By default "
                "all of a block."
            ),
            show_default=False,
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            "--shard", metavar="N,...", help="Workers in a replica: one number, or several to compare."
        ),
    ] = "1,2,4,8,16",
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", metavar="N", help="Workers on each node.")
    ] = 8,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Adds up the memory that a model takes of each device, and its snapshots of each node."""
    import msgspec

    from holdfast.tools.plan import quantities
    from holdfast.tools.plan.memory import Sizes
    from holdfast.tools.plan.memory import memory as add_up

    total = quantities.amount("--parameters", parameters, "8.03B")
    of_these = total if trained is None else quantities.amount("--trained", trained, "13.6M")
    sizes = Sizes(
        parameters=total,
        trained=of_these,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        seq_len=seq_len,
        micro_batch=micro_batch,
        block=None if block is None else quantities.amount("--block", block, "160M"),
    )
    degrees = _degrees(shard)
    _refuse(sizes, nproc_per_node)
    found = [add_up(sizes, degree, nproc_per_node) for degree in degrees]
    if write_as([msgspec.to_builtins(one) | {"device": one.device} for one in found], as_json, output):
        return
    from holdfast.observe.tables import WIDTH, print_table
    from holdfast.tools.plan.memory import HELD_SNAPSHOTS

    rows = [(str(one.shard), *map(_gb, (one.state, one.compute, one.device, one.snapshot))) for one in found]
    head = ("shard", "state", "while it computes", "each device", "a snapshot, each node")
    print_table(sys.stdout, head, rows, right=5, width=width_of(output, WIDTH))
    sys.stdout.write(f"these are calculated, not measured; up to {HELD_SNAPSHOTS} snapshots are held\n")


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _degrees(text: str) -> list[int]:
    from holdfast.errors import UsageError

    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(
            f"--shard must be one or several numbers of workers (got {text!r}), for example 8 or 4,8,16"
        )
    return sorted({int(word) for word in words})


def _refuse(sizes: Sizes, nproc_per_node: int) -> None:
    from holdfast.errors import UsageError

    if sizes.trained > sizes.parameters:
        raise UsageError("--trained must not be larger than --parameters, the number of all parameters")
    counts = {
        "--layers": sizes.layers,
        "--hidden": sizes.hidden,
        "--vocabulary": sizes.vocabulary,
        "--seq-len": sizes.seq_len,
        "--micro-batch": sizes.micro_batch,
        "--nproc-per-node": nproc_per_node,
    }
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"{name} must be at least 1 (got {count})")
