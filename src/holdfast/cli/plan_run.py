"""`holdfast plan run`: ways to survive failures, side by side, and what the best one depends on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import AsJson, Output, width_of, write_as
from holdfast.cli.options import command
from holdfast.protocol.options import given
from holdfast.tools.plan.options import PlanOptions

if TYPE_CHECKING:
    from holdfast.protocol.job_report import JobReport
    from holdfast.tools.plan.candidates import Candidate
    from holdfast.tools.plan.inputs import Inputs


@command
def run(
    options: PlanOptions,
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="YAML file whose fields have the names of the options."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="The report.json of a job, from which --preset holdfast takes its times.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="DIR", help="Draw the plots into this folder. Needs matplotlib."),
    ] = None,
    svg: Annotated[bool, typer.Option("--svg", help="With --plot: SVG instead of PNG.")] = False,
    chart: Annotated[bool, typer.Option("--chart", help="Draw the plots in the terminal.")] = False,
    every: Annotated[
        bool,
        typer.Option("--all", help="Show all strategies that were compared, not only the best of each kind."),
    ] = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Compares ways to survive failures: wall time, cost, goodput, their spread, and what the result depends on."""
    from msgspec import to_builtins

    from holdfast.observe.tables import WIDTH
    from holdfast.tools.plan import candidates as c
    from holdfast.tools.plan.inputs import read

    # An option that was not given is None and left out, so a default never overrides the file; what was given
    # on the command line does.
    fields = (read_yaml(config) if config else {}) | given(options)
    inputs = read(fields, _report(report), as_flags=config is None)
    ways = c.candidates(inputs)
    best = next(w for w in ways if w.best)
    rows = c.sensitivity(inputs, best)
    losses = c.waterfall(inputs, best)
    commands = c.next_commands(inputs, best)
    told = {
        "inputs": to_builtins(inputs) | {"mtbf_s": inputs.mtbf_s},
        "candidates": [to_builtins(w) | {"name": w.name} for w in ways],
        "best": best.name,
        "sensitivity": rows,
        "waterfall": losses,
        "next": commands,
    }
    if not write_as(told, as_json, output):
        _print(inputs, ways, every, best, rows, losses, commands, width_of(output, WIDTH))
    if chart:
        _chart(inputs, best)
    if plot is not None:
        _draw(inputs, best, plot, "svg" if svg else "png")


def _chart(inputs: Inputs, best: Candidate) -> None:
    from holdfast.tools.plan import candidates
    from holdfast.tools.plots import print_curves

    by_size = candidates.goodput_by_size(inputs, best.spares, best.waits)
    print_curves(sys.stdout, "goodput against cluster size (doubling)", by_size, "nodes", percent=True)
    print_curves(sys.stdout, "cost against spares", candidates.cost_by_spares(inputs), "spares")
    by_interval = candidates.goodput_by_interval(inputs, best.recovery_s)
    print_curves(sys.stdout, "goodput against the interval (log)", by_interval, "s", percent=True)


def _draw(inputs: Inputs, best: Candidate, folder: Path, kind: str) -> None:
    from holdfast.tools.plan import candidates
    from holdfast.tools.plots import draw_curves, draw_waterfall

    by_size = candidates.goodput_by_size(inputs, best.spares, best.waits)
    draw_curves(
        folder / f"goodput-by-size.{kind}",
        "goodput against cluster size",
        by_size,
        "nodes",
        "goodput",
        log=True,
        percent=True,
    )
    unit = "cost" if inputs.price else "GPU-days"
    draw_curves(
        folder / f"cost-by-spares.{kind}",
        "cost against spares",
        candidates.cost_by_spares(inputs),
        "spares",
        unit,
    )
    draw_curves(
        folder / f"interval.{kind}",
        "goodput against the time between saves",
        candidates.goodput_by_interval(inputs, best.recovery_s),
        "seconds",
        "goodput",
        log=True,
        percent=True,
    )
    parts = [(x.part, x.seconds / 86400) for x in candidates.waterfall(inputs, best)]
    draw_waterfall(folder / f"waterfall.{kind}", f"where the time goes: {best.name}", parts, "days")
    sys.stderr.write(f"the plots are in {folder}\n")


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping of fields. Raises UsageError where it is none."""
    import msgspec

    from holdfast.errors import UsageError
    from holdfast.protocol.wire.stored import decode_file

    try:
        found: Any = decode_file(msgspec.yaml.decode, path, f"{path} is not valid YAML", error=UsageError)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ImportError:
        raise UsageError("PyYAML is needed to read YAML: pip install pyyaml") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: fields are missing; for example\nnodes: 256\ngpu_hours: 10M\nrate: 0.016%")
    return {str(k): v for k, v in found.items()}


def _report(path: Path | None) -> JobReport | None:
    if path is None:
        return None
    from holdfast.engines.jobs import read_report
    from holdfast.errors import UsageError

    try:
        return read_report(path, f"--report {path} is not the report of a job", UsageError)
    except OSError as error:
        raise UsageError(f"--report {path} cannot be read: {error.strerror}") from error


def _print(
    inputs: Inputs,
    ways: list[Candidate],
    every: bool,
    best: Candidate,
    rows: Any,
    losses: Any,
    commands: Any,
    width: int,
) -> None:
    from holdfast.observe.tables import print_table
    from holdfast.protocol import units

    out = sys.stdout
    out.write(
        f"{inputs.nodes} nodes x {inputs.gpus_per_node} GPUs, {days(inputs.work_s)} without failures; one failure every "
        f"{units.seconds(inputs.mtbf_s)} ({100 * inputs.rate:.4g}% per node-hour)\n"
        f"times: {inputs.times.source}\n\n"
    )
    from holdfast.tools.plan.candidates import shortlist

    price = f", for {units.amount(best.cost)}" if inputs.price else ""
    out.write(
        f"recommended: {best.name}\nOf the {len(ways)} strategies compared, it takes the fewest GPU-hours, spares "
        f"included: {days(best.wall_s)}, of which {units.share(best.goodput)} is training{price}.\n\n"
    )
    shown = ways if every else shortlist(inputs, ways)
    heads = ["", "way", "spares", "then", "days", "10%", "50%", "90%", "goodput", "save every"]
    heads += ["cost"] if inputs.price else []
    print_table(out, heads, [_cells(way, bool(inputs.price)) for way in shown], width=width)
    if not every:
        out.write(f"the best of each strategy; --all shows all {len(ways)}\n")
    # Said and not left out in silence: three dashes in the table could also mean that the run does not
    # finish.
    if not best.percentiles_s:
        out.write("percentiles need numpy: pip install 'holdfast-train[plan]'\n")
    out.write(f"\n► {best.name}: where its {days(best.wall_s)} go\n")
    shares = [(x.part, days(x.seconds, ""), x.seconds / best.wall_s) for x in losses]
    bars = [(part, spent, units.share(share), "█" * round(50 * share)) for part, spent, share in shares]
    print_table(out, ("", "days", "share", ""), bars, width=width)
    out.write("\nif the failure rate is different\n")
    others = [
        (
            f"x {r.factor:g}",
            units.share(r.chosen_goodput),
            "the same" if r.best == best.name else r.best,
            units.share(r.best_goodput),
        )
        for r in rows
    ]
    print_table(out, ("rate", "goodput of ►", "best then", "its goodput"), others, width=width)
    out.write("\nnext\n" + "".join(f"  {command}\n" for command in commands))


def _cells(way: Candidate, priced: bool) -> list[str]:
    """One way's row of the table."""
    from holdfast.protocol import units
    from holdfast.tools.plan.candidates import FINISHES

    row = [
        "►" if way.best else "",
        way.strategy,
        str(way.spares),
        "wait" if way.waits else "smaller",
        days(way.wall_s, "") if way.goodput >= FINISHES else "never",
        *([days(s, "") for s in way.percentiles_s] or ["–"] * 3),
        units.share(way.goodput),
        units.seconds(way.interval_s),
    ]
    return row + ([units.amount(way.cost)] if priced else [])


def days(seconds: float, unit: str = " days") -> str:
    """`54.2 days`."""
    return f"{seconds / 86400:.1f}{unit}" if seconds < 1e12 else "never"
