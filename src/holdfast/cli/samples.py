"""`holdfast data samples`: whether every sample came once, from the record that the workers of a job made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common import AsJson, JobName, Output, ledger, width_of, write_as

if TYPE_CHECKING:
    from holdfast.data.samples import Checked
    from holdfast.protocol.verified import SamplesChecked

MOST = "1GB"
EXIT_NOT_ONCE = 1
TOLD = 5
"""Epochs that a sentence names."""


def samples(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            help=(
                "The record of samples of one job, as given to `run.steps(ledger=)`. By default the folder that the "
                "job's workers reported."
            ),
        ),
    ] = None,
    job: JobName = None,
    most: Annotated[
        str,
        typer.Option(
            "--most",
            metavar="SIZE",
            help="Refuse to read a record larger than this: reading takes about ten times its size in memory.",
        ),
    ] = MOST,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Checks that every sample came once in each epoch, also while the job trains. The page and `holdfast report` show the
    newest result.

    Exit code 1: a sample came twice or not at all, or the record does not tell.
    """
    from holdfast.observe.tables import WIDTH, print_table
    from holdfast.protocol import units
    from holdfast.protocol.units import parse_size
    from holdfast.protocol.verified import write_checked

    chosen = folders or [_recorded(job)]
    name, found = _check(chosen, parse_size("--most", most), job if folders else None)
    home = _folder_of(name)
    # Kept where the page and the report find it. A record that was brought from elsewhere has no job here.
    if home is not None:
        write_checked(home, found)
    if not write_as(found, as_json, output):
        sys.stdout.write(f"{'' if found.once is not False else 'NOT ONCE: '}{found.why}\n")
        if found.epochs:
            rows = [
                tuple(units.count(n) for n in (e.epoch, e.came, e.repeated, e.missing)) for e in found.epochs
            ]
            heads = ("epoch", "came", "more than once", "not at all")
            print_table(sys.stdout, heads, rows, right=4, width=width_of(output, WIDTH))
    if not found.once:
        raise typer.Exit(EXIT_NOT_ONCE)


def _check(folders: list[Path], most: int, job: str | None) -> tuple[str, SamplesChecked]:
    """Whose record it is ('': nobody's that can be read), and what it says."""
    from datetime import UTC, datetime

    from holdfast.data.samples import check, files_of
    from holdfast.errors import DataError, UsageError
    from holdfast.observe.transfer_progress import ByteCount
    from holdfast.protocol import units
    from holdfast.protocol.verified import SamplesChecked

    for folder in folders:
        if not folder.is_dir():
            raise UsageError(
                f"the folder {folder} does not exist on this machine: run this command on the machine that has it, "
                "or copy the folder and pass the copy"
            )
    nbytes = sum(path.stat().st_size for path in files_of(*folders))
    if nbytes > most:
        raise UsageError(
            f"the record has {units.size(nbytes)}, more than --most {units.size(most)}: it is read into memory, so "
            "use a larger --most on a machine that has enough memory"
        )
    utc = datetime.now(UTC).isoformat(timespec="milliseconds")
    places = tuple(str(folder.absolute()) for folder in folders)
    try:
        with ByteCount(sys.stderr, "samples", nbytes) as progress:
            seen = check(*folders, seen=progress.add)
    except DataError as error:
        # Nobody can say of which job a record is that cannot be read; the person has said it.
        return job or "", SamplesChecked(
            utc=utc, folders=places, once=None, why=f"the record cannot answer this: {error}"
        )
    if job is not None and seen.job != job:
        raise UsageError(f"{folders[0]} is the record of the job {seen.job!r}, not of {job!r}")
    return seen.job, _judged(seen, utc, places)


def _judged(seen: Checked, utc: str, places: tuple[str, ...]) -> SamplesChecked:
    from holdfast.protocol import units
    from holdfast.protocol.verified import EPOCHS_KEPT, EpochSeen, SamplesChecked

    repeated = {epoch: len(ids) for epoch, ids in seen.repeated().items()}
    last = max(seen.epochs, default=0)
    epochs = [
        EpochSeen(
            epoch=epoch,
            came=len(seen.epochs.get(epoch, ())),
            repeated=repeated.get(epoch, 0),
            missing=seen.missing(epoch),
        )
        for epoch in range(last + 1 if seen.epochs else 0)
    ]
    # Of the last epoch some samples are still to come, and nobody can say that one of them was lost.
    bad = [e for e in epochs if e.repeated or (e.missing and e.epoch < last)]
    done = f"{units.plural(seen.steps, 'step')} of {units.plural(seen.samples, 'sample')}"
    once: bool | None = not bad
    if not seen.steps:
        once, why = None, "no step was committed yet"
    elif seen.own_order:
        # A mixture repeats by its weights. What the check shows is that no micro-batch was lost or came twice.
        once = None
        why = (
            "the data set defines its own order, in which samples may repeat, so samples are not counted. Every "
            f"micro-batch of {units.plural(seen.steps, 'step')} was trained on once"
        )
    elif bad:
        told = [
            f"epoch {e.epoch}: {units.plural(e.repeated, 'sample')} trained on more than once, {units.count(e.missing)} "
            "not at all"
            for e in bad[:TOLD]
        ]
        more = f"; and {units.plural(len(bad) - TOLD, 'epoch')} more" if len(bad) > TOLD else ""
        why = f"{done}: {'; '.join(told)}{more}"
    else:
        rest = f"; {units.count(epochs[-1].came)} of epoch {last} so far" if epochs[-1].missing else ""
        whole = last + (0 if epochs[-1].missing else 1)
        why = f"{done}: each sample was trained on once in {units.plural(whole, 'complete epoch')}{rest}, none twice"
    kept = (
        [] if seen.own_order else sorted({*bad[:EPOCHS_KEPT], *epochs[-EPOCHS_KEPT:]}, key=lambda e: e.epoch)
    )
    return SamplesChecked(
        utc=utc,
        folders=places,
        once=once,
        why=why,
        steps=seen.steps,
        samples=seen.samples,
        epochs=tuple(kept),
    )


def _recorded(job: str | None) -> Path:
    """The folder that the job's workers named."""
    from holdfast.engines import jobs
    from holdfast.errors import UsageError

    folder = jobs.existing(job)
    with ledger(folder) as store:
        state = store.load()
    if state is None or not state.membership.samples:
        raise UsageError(
            f"the job {folder.name!r} has not reported a record of samples: specify the folder that was given to "
            "`run.steps(ledger=)`. If none was given, the job has no record, and neither do scripts that do not use "
            "`run.steps`"
        )
    return Path(state.membership.samples)


def _folder_of(name: str) -> Path | None:
    """The job's folder here; None: there is no such job."""
    from holdfast.engines import jobs
    from holdfast.errors import UsageError

    try:
        return jobs.existing(name) if name else None
    except UsageError:
        return None
