"""`holdfast report`: what a job did, as tables and as a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import AsJson, JobName, Output, kept_state, ledger, width_of, write_as

if TYPE_CHECKING:
    from holdfast.protocol.job_report import AllStarts, JobReport


def report(
    job: JobName = None,
    as_json: AsJson = False,
    output: Output = None,
    as_csv: Annotated[
        bool,
        typer.Option(
            "--csv",
            help="Print the goodput as CSV, with one row for each class of time in each start of the job.",
        ),
    ] = False,
    curve: Annotated[
        Path | None,
        typer.Option(
            "--curve", metavar="FILE", help="Draw the loss curve with the incidents into this PNG file."
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Draw the tables into this SVG file.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help=(
                "Write the timeline of nodes, ranks, generations and incidents to this file, as JSON that "
                "ui.perfetto.dev opens."
            ),
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="NAME",
            help="With --curve: also draw the loss curve of this job, for comparison.",
        ),
    ] = None,
) -> None:
    """Prints the report of a job, finished or not."""
    import msgspec

    from holdfast.engines import jobs
    from holdfast.errors import UsageError
    from holdfast.protocol.verified import samples_shown

    if baseline is not None and curve is None:
        raise UsageError("--baseline needs --curve FILE.png, the picture into which it is drawn")
    if (as_json or output is not None) and as_csv:
        raise UsageError(
            "--csv cannot be combined with --json or -o, because each chooses the format of the output; pass one of "
            "them"
        )
    folder = jobs.existing(job)
    shown = report_of(folder)
    samples = samples_shown(folder, shown.samples_folder)
    shown = msgspec.structs.replace(shown, all_starts=_all_starts(folder), samples=samples)
    if as_csv:
        _write_csv([*_earlier(folder), (_number(folder), shown)])
    elif not write_as(shown, as_json, output):
        from holdfast.observe.tables import WIDTH, print_report

        print_report(shown, folder, sys.stdout, width_of(output, WIDTH))
    if picture is not None:
        from holdfast.observe.tables import draw_report

        draw_report(shown, folder, picture)
        sys.stderr.write(f"the tables are in {picture}\n")
    if trace is not None:
        _write_trace(folder, trace)
        sys.stderr.write(f"the trace is in {trace}: open it at https://ui.perfetto.dev\n")
    if curve is not None:
        from holdfast.observe.curve import draw_curve

        draw_curve(
            _points(folder), shown.incidents, curve, _points(jobs.existing(baseline)) if baseline else None
        )
        sys.stderr.write(f"the loss curve is in {curve}\n")


def report_of(folder: Path) -> JobReport:
    """As it was written at the job's end; until then, and for a job that was killed, from its ledger."""
    import msgspec

    from holdfast.coordinator.service.job_view import build_report
    from holdfast.engines import jobs
    from holdfast.errors import UsageError
    from holdfast.protocol.job_report import reports
    from holdfast.protocol.wire.stored import read_stored

    path, advice = folder / "report.json", "remove the file, and the report is computed from the ledger"
    try:
        # A start puts the report of the one before away (`JobFolder.put_away`), so a file that is here is
        # of the newest start, and its figures are final. Without that a resumed job would show how its
        # earlier start had ended.
        written = read_stored(path, reports, advice)
    except FileNotFoundError:
        pass
    else:
        # It is written at the end, which has an outcome. Nothing else is required in it that another program's file lacks.
        if written.outcome is None:
            raise UsageError(f"{path} is not the report of a job that has ended: {advice}")
        return written
    with ledger(folder) as store:
        state = kept_state(store, folder)
        told = store.incidents(state.forgotten)
        shown = build_report(state, store.summary(), state.began_s + store.last_t_s(), told)
    if shown.outcome is not None:
        return shown
    return msgspec.structs.replace(shown, outcome="running" if jobs.is_running(folder) else "killed")


def _number(folder: Path) -> int:
    """Of the newest `holdfast run` of this job, from 1. Those before were put away under their numbers."""
    from holdfast.engines import starts

    return max((n for n, _ in starts.put_away(folder)), default=0) + 1


def _all_starts(folder: Path) -> AllStarts | None:
    """The goodput over all `holdfast run` of this job; None: there was one."""
    from holdfast.engines import starts
    from holdfast.protocol.job_report import AllStarts

    if not (folder / "runs").exists():
        return None
    with ledger(folder) as store:
        together = starts.all_starts(folder, store)
    return None if together is None else AllStarts(**together)


def _earlier(folder: Path) -> list[tuple[int, JobReport]]:
    """Reports of the runs before, of which the newest few are kept."""
    from holdfast.engines import starts
    from holdfast.errors import UsageError

    found = []
    for number, path in starts.put_away(folder):
        try:
            found.append((number, report_of(path)))
        except UsageError as error:  # it was refused before it had a ledger, or a disk lost that
            sys.stderr.write(f"start {number} was left out: {error}\n")
    return found


def _write_csv(starts: list[tuple[int, JobReport]]) -> None:
    """A class whose time is not known has a row with empty figures."""
    import csv

    from holdfast.protocol.job_view import Goodput

    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(("start", "outcome", "class", "seconds", "share"))
    for number, report in starts:
        goodput = report.goodput or Goodput()
        for kind, seconds in goodput.classes.items():
            share = round(seconds / goodput.wall_s, 6) if goodput.wall_s else None
            out.writerow((number, report.outcome, kind, seconds, share))
        # As a row with empty figures and not left out: a spreadsheet that sums columns takes a missing row
        # for 0.
        for kind in goodput.unknown:
            if kind not in goodput.classes:
                out.writerow((number, report.outcome, kind, None, None))


def _write_trace(folder: Path, path: Path) -> None:
    import msgspec

    from holdfast.observe.traces import chrome_trace

    with ledger(folder) as store:
        entries = [msgspec.structs.asdict(entry) for entry in store.events()]
        steps = sorted((row.t_s, row.world) for row in store.steps())
    path.write_bytes(msgspec.json.encode(chrome_trace(folder.name, entries, steps)))


def _points(folder: Path) -> list[tuple[int, float, float]]:
    """(step, seconds since the job's start, loss). Of steps that the ledger let go: of so many in a row their mean."""
    with ledger(folder) as store:
        floor = store.dropped().floors[0]
        found: list[tuple[int, float, float]] = []
        if floor:
            early = store.series(0, floor - 1)
            columns = zip(early["step"], early["t_s"], early["loss"], strict=True)
            found = [(step, t_s, loss) for step, t_s, loss in columns if loss is not None]
        # Below the floor a row is of a step that was committed again after its row had gone. Its neighbours are in the
        # summary alone, which would be drawn beside it.
        rows = (row for row in store.steps() if row.step >= floor)
        return found + [(row.step, row.t_s, row.loss) for row in rows if row.loss is not None]
