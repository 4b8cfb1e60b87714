"""`holdfast plan`: what failures, sizes and remedies cost. One subcommand for each question."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast.cli import calibrate, memory_plan, placement, plan_run, simulate
from holdfast.cli.common import AsJson, Output, width_of, write_as

SHOWN = 3

app = typer.Typer(
    help="Estimates, before the run, what failures will cost and which settings reduce that cost.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)

app.command("run")(plan_run.run)
app.command("simulate")(simulate.simulate)
app.command("calibrate")(calibrate.calibrate)
app.command("validate")(calibrate.validate)
app.command("placement")(placement.placement)
app.command("memory")(memory_plan.memory)

GlobalBatch = Annotated[
    int | None,
    typer.Option(
        "--global-batch", metavar="SAMPLES", help="Samples in one step, over all workers.", show_default=False
    ),
]
MicroBatch = Annotated[
    int | None,
    typer.Option("--micro-batch", metavar="SAMPLES", help="Samples in one forward pass.", show_default=False),
]
Nodes = Annotated[str, typer.Option("--nnodes", metavar="N|MIN:MAX", help="Number of nodes, or MIN:MAX.")]
PerNode = Annotated[int, typer.Option("--nproc-per-node", metavar="N", help="Workers on each node.")]


@app.callback()
def plan(
    context: typer.Context,
    global_batch: GlobalBatch = None,
    micro_batch: MicroBatch = None,
    nnodes: Nodes = "1:8",
    nproc_per_node: PerNode = 1,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Estimates what failures cost and what to do about them. With --global-batch and no subcommand: as `plan division`."""
    if context.invoked_subcommand is not None:
        return
    if global_batch is None and micro_batch is None:
        sys.stdout.write(context.get_help() + "\n")
        return
    division(global_batch, micro_batch, nnodes, nproc_per_node, as_json, output)


@app.command("division")
def division(
    global_batch: GlobalBatch = None,
    micro_batch: MicroBatch = None,
    nnodes: Nodes = "1:8",
    nproc_per_node: PerNode = 1,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Shows for each size of the job how much of it is idle, and micro-batch sizes that leave less idle."""
    from holdfast.cli.spec import parse_nnodes
    from holdfast.errors import UsageError
    from holdfast.formulas import divide, suggest
    from holdfast.observe.tables import WIDTH, print_table
    from holdfast.protocol import units

    low, high = parse_nnodes(nnodes)
    if global_batch is None or micro_batch is None:
        raise UsageError("--global-batch and --micro-batch are both needed, for example 256 and 4")
    if micro_batch < 1 or global_batch < 1 or global_batch % micro_batch:
        raise UsageError(
            f"--global-batch {global_batch} is not a multiple of --micro-batch {micro_batch}; for example 256 and 4"
        )
    if nproc_per_node < 1:
        raise UsageError(f"--nproc-per-node must be at least 1 (got {nproc_per_node})")
    count = global_batch // micro_batch
    # Every size between MIN and MAX and not the two alone: a job that lost a node trains at one of those
    # between, and may be idle there by a half.
    worlds = [n * nproc_per_node for n in range(low, high + 1)]
    if count < worlds[0]:
        raise UsageError(
            f"{count} micro-batches are too few for {worlds[0]} workers; use a smaller --micro-batch or a larger "
            "--global-batch"
        )
    found, better = divide(count, worlds), suggest(global_batch, micro_batch, worlds)[:SHOWN]
    if write_as({"sizes": found, "better": better}, as_json, output):
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
    print_table(
        sys.stdout,
        ("nodes", "workers", "micro-batches each", "idle"),
        rows,
        right=4,
        width=width_of(output, WIDTH),
    )
    if len(found) < len(worlds):
        sys.stdout.write(f"more than {count} workers cannot share {count} micro-batches\n")
    for suggestion in better:
        sys.stdout.write(
            f"--micro-batch {suggestion.micro_batch} leaves at most {units.share(suggestion.worst)} idle\n"
        )


@app.command("tables")
def tables(as_json: AsJson = False, output: Output = None) -> None:
    """Computes every cell of the published tables again, and marks cells that do not follow from the formulas."""
    import msgspec

    from holdfast.observe.tables import WIDTH, print_table
    from holdfast.tools.plan.tables import compare

    cells = compare(published())
    if write_as([msgspec.to_builtins(c) | {"equal": c.equal} for c in cells], as_json, output):
        return
    last = ""
    for cell in cells:
        if cell.table != last:
            sys.stdout.write(
                ("\n" if last else "") + f"table {cell.table}\n"
                if cell.table[0].isdigit()
                else f"{cell.table}\n"
            )
            last = cell.table
            rows = [
                (
                    c.row,
                    c.column,
                    f"{c.published:,}",
                    f"{c.computed:,}",
                    f"{c.exact:,.2f}" if c.exact >= 1 else f"{c.exact:.4f}",
                    ("" if c.equal else "≠ ") + c.note,
                )
                for c in cells
                if c.table == last
            ]
            heads = ("", "", "published", "computed", "exact", "")
            print_table(sys.stdout, heads, rows, width=width_of(output, WIDTH))
    odd = sum(not c.equal for c in cells)
    sys.stdout.write(
        f"\n{len(cells) - odd} of {len(cells)} cells follow from the formulas, {odd} (≠) do not\n"
    )


def published() -> dict[str, object]:
    """Published figures, with their sources."""
    from importlib.resources import files

    import msgspec

    text = files("holdfast.tools.plan").joinpath("published.json").read_bytes()
    found: dict[str, object] = msgspec.json.decode(text)
    return found
