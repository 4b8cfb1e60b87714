"""`holdfast plan calibrate` and `validate`: learns from past runs, and compares the planner with what is known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import AsJson, Output, width_of, write_as

if TYPE_CHECKING:
    from holdfast.tools.plan.calibration import Calibration, PastRun


def calibrate(
    runs: Annotated[
        list[str],
        typer.Argument(
            help=(
                "Reports (JSON), ledgers (job.sqlite), job folders, or names of jobs. Of a job, all starts whose "
                "ledgers were kept are used."
            )
        ),
    ],
    per_node: Annotated[
        int,
        typer.Option(
            "--nproc-per-node", metavar="N", help="Workers on each node, for reports that do not record it."
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the fields as YAML, for plan run and plan simulate."
        ),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Estimates failure rates with confidence intervals, phase times, and what the wall time went into, from past runs."""
    import msgspec

    from holdfast.observe.tables import WIDTH
    from holdfast.protocol import units
    from holdfast.tools.plan.calibration import calibrate, fields, why_no_rate

    found = calibrate([one for r in runs for one in _read(r, per_node)])
    made = fields(found)
    lines = [f"{k}: {v}\n" for k, v in made.items()]
    if why := why_no_rate(found):
        lines.insert(0, f"# rate is left out: {why}; set your own, for example rate: 0.016%\n")
    if out is not None:
        out.write_text("".join(lines))
    if write_as(msgspec.to_builtins(found) | {"fields": made}, as_json, output):
        return
    stdout = sys.stdout
    stdout.write(f"{units.plural(found.runs, 'run')}, {found.node_hours:,.1f} node-hours\n\n")
    width = width_of(output, WIDTH)
    _print_rates(found, width)
    _print_times(found, width)
    _print_spent(found, width)
    stdout.write("\nfields for plan run\n" + "".join(f"  {line}" for line in lines))


def _print_rates(found: Calibration, width: int) -> None:
    from holdfast.observe.tables import print_table
    from holdfast.protocol import units
    from holdfast.tools.plan.calibration import FEW

    rows = [
        (
            r.kind,
            str(r.failures),
            f"{100 * r.rate:.4f}%",
            f"{100 * r.low:.4f}% to {100 * r.high:.4f}%",
            "few" if r.few else "",
        )
        for r in found.rates
    ]
    print_table(sys.stdout, ("failures", "seen", "per node-hour", "95% confidence", ""), rows, width=width)
    # Beside the rate, since nobody reads an interval who was given a number: with two failures the true rate
    # may be a third or three times as much.
    if found.rates[-1].few:
        sys.stdout.write(f"fewer than {FEW} failures were seen: the rate may be anywhere in that range\n")
    if found.injected:
        sys.stdout.write(
            f"{units.plural(found.injected, 'injected fault')} used for the times only, not for the rate\n"
        )


def _print_times(found: Calibration, width: int) -> None:
    from holdfast.observe.tables import print_table
    from holdfast.protocol import units

    if not found.times:
        return
    phases = [
        (
            t.phase.removesuffix("_s").replace("_", " "),
            str(t.count),
            units.seconds(t.median_s),
            units.seconds(t.p90_s),
        )
        for t in found.times
    ]
    sys.stdout.write("\n")
    print_table(sys.stdout, ("phase", "seen", "median", "90%"), phases, width=width)


def _print_spent(found: Calibration, width: int) -> None:
    from holdfast.observe.tables import print_table
    from holdfast.protocol import units

    if not found.spent_s:
        return
    wall_s = sum(found.spent_s.values())
    spent = [
        (kind.replace("_", " "), units.seconds(seconds), units.share(seconds / wall_s))
        for kind, seconds in found.spent_s.items()
    ]
    sys.stdout.write("\n")
    print_table(sys.stdout, ("wall time", "time", "share"), spent, width=width)
    sys.stdout.write(f"goodput {units.share(found.goodput)}\n")


def _read(name: str, per_node: int) -> list[PastRun]:
    from holdfast.engines import jobs, starts
    from holdfast.errors import UsageError
    from holdfast.tools.plan.calibration import PastRun

    path = Path(name)
    # A coordinator that took over on another machine has a ledger of its own, job-2.sqlite.
    if path.is_file() and not path.match("job*.sqlite"):
        what = f"{path} is not the report of a job (JSON), nor a ledger named job.sqlite"
        return [PastRun(jobs.read_report(path, what, UsageError), per_node)]
    # A name of a job last. A folder of the same name in the working folder is what a person who typed a
    # path means.
    folder = path.parent if path.is_file() else path if path.is_dir() else jobs.existing(name)
    # A ledger is of one start. A folder or a name means the job, with all starts that are kept.
    earlier = [] if path.is_file() else [kept for _, kept in starts.put_away(folder)]
    return [run for kept in earlier if (run := _earlier(kept, per_node)) is not None] + [
        _run(folder, per_node)
    ]


def _run(folder: Path, per_node: int) -> PastRun:
    from holdfast.cli.common import ledger
    from holdfast.cli.report import report_of
    from holdfast.tools.plan.calibration import PastRun

    with ledger(folder) as store:
        state = store.load()
    return PastRun(report_of(folder), state.spec.nproc if state else per_node)


def _earlier(folder: Path, per_node: int) -> PastRun | None:
    """A start that was put away; None: it was refused before it had a ledger, or that cannot be read."""
    from holdfast.errors import UsageError

    try:
        return _run(folder, per_node)
    except UsageError as error:
        sys.stderr.write(f"start {folder.name} was left out: {error}\n")
        return None


def validate(as_json: AsJson = False, output: Output = None) -> None:
    """Compares formulas, simulation, core and published numbers, and marks numbers that cannot be reproduced."""
    from holdfast.observe.tables import WIDTH, print_table
    from holdfast.tools.simulate.validation import validate

    checks = validate()
    wrong = sum(c.reproduced is False for c in checks)
    if write_as(checks, as_json, output):
        # The exit code is the same whoever reads the answer.
        raise typer.Exit(1 if wrong else 0)

    def shown(value: float, unit: str) -> str:
        if unit == "%":
            return f"{100 * value:.2f}%"
        return f"{value:.4f}%" if unit == "% rate" else f"{value:.2f} {unit}"

    marks = {True: "✓", False: "≠", None: "?"}
    rows = [
        (
            marks[c.reproduced],
            shown(c.expected, c.unit),
            shown(c.ours, c.unit),
            c.name + (f" ({c.note})" if c.note else ""),
        )
        for c in checks
    ]
    print_table(sys.stdout, ("", "expected", "ours", "what"), rows, width=width_of(output, WIDTH))
    open_ = sum(c.reproduced is None for c in checks)
    sys.stdout.write(
        f"\n{len(checks) - open_ - wrong} of {len(checks)} agree, {wrong} (≠) do not; {open_} (?) published numbers "
        "cannot be reproduced\n"
    )
    if wrong:
        raise typer.Exit(1)
