"""`holdfast data`: builds token files from text, shows and verifies them, and says whether every sample came once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import AsJson, JobName, Output, ledger, width_of, write_as
from holdfast.cli.options import command
from holdfast.tools.corpora.options import BuildOptions

if TYPE_CHECKING:
    from rich.progress import Progress

    from holdfast.data.files import TokenFile
    from holdfast.data.samples import SampleReport
    from holdfast.protocol.verified import SamplesChecked
    from holdfast.tools.corpora.build import Description


app = typer.Typer(
    no_args_is_help=True,
    help="Builds, shows and verifies token files, and shows which samples a job trained on.",
)
FIRST_TOKENS = 16
Dataset = Annotated[
    Path, typer.Argument(help="Path of the token files without .bin and .idx, or one file.", metavar="PREFIX")
]
RawDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="Type of the tokens in a file without a header, for example uint16.",
    ),
]
MOST = "1GB"
EXIT_NOT_ONCE = 1
TOLD = 5
"""Epochs that a sentence names."""


@app.command("samples")
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


def _judged(seen: SampleReport, utc: str, places: tuple[str, ...]) -> SamplesChecked:
    from holdfast.protocol import units
    from holdfast.protocol.job_report import EpochSeen
    from holdfast.protocol.verified import EPOCHS_KEPT, SamplesChecked

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


@app.command("build")
@command
def build(
    options: BuildOptions,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            metavar="N",
            help="Number of processes to use.",
            show_default="one for each processor",
        ),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Turns text, JSON lines and Parquet into token files that training maps into memory.

    A build that was interrupted or killed continues when the same command is run again. The result is the same to the
    byte. While it runs, finished parts are kept in PREFIX.build, which takes as much space as the result.
    """
    import msgspec

    from holdfast.protocol.units import count, plural
    from holdfast.tools.corpora import build as builder

    with _Bar() as bar:
        try:
            built = builder.build(options, workers or len(os.sched_getaffinity(0)), bar.show)
        except KeyboardInterrupt:
            # 130 is what a shell reports for a program that SIGINT ended; finished parts stay for the next build.
            bar.close()
            sys.stderr.write("holdfast: interrupted; run the same command again to continue\n")
            raise typer.Exit(130) from None
    if write_as(msgspec.to_builtins(built), as_json, output):
        return
    files = " and ".join(f"{options.prefix}{suffix}" for suffix in built.sums)
    sys.stdout.write(
        f"{plural(built.documents, 'document')}, {count(built.tokens)} tokens of {built.dtype}: {files}\n"
    )
    if built.skipped:
        sys.stdout.write(f"skipped {plural(built.skipped, 'line')} that could not be read\n")


@app.command("show")
def show(prefix: Dataset, dtype: RawDtype = None, as_json: AsJson = False, output: Output = None) -> None:
    """Shows the size of a data set, what it was built from, and its first tokens."""
    from holdfast.protocol import units
    from holdfast.tools.corpora.build import describe

    with _usage_errors():
        from holdfast.data.files import TokenFile

        file = TokenFile(prefix, dtype)
    built = describe(file.path.with_suffix(""))
    facts: dict[str, Any] = file.identity()
    first = facts["first"] = file.tokens[:FIRST_TOKENS].tolist()
    if write_as(facts | {"build": _described(built)}, as_json, output):
        return
    lines = [
        ("file", facts["path"]),
        ("documents", "not known" if facts["documents"] is None else units.count(facts["documents"])),
        ("tokens", f"{units.count(facts['tokens'])} of {facts['dtype']}, {units.size(facts['bytes'])}"),
        ("fingerprint", facts["probes"] + facts["edges"]),
        ("begins", " ".join(map(str, first)) + (" ..." if len(file.tokens) > len(first) else "")),
    ]
    if built is not None:
        eod = f", documents end with {built.eod}" if built.eod is not None else ""
        lines += [
            ("tokenizer", f"{built.tokenizer}, {units.count(built.vocabulary)} tokens{eod}"),
            ("built from", f"{units.plural(len(built.inputs), 'file')}: {_named(built)}"),
        ]
        if built.skipped:
            lines.append(("skipped", units.plural(built.skipped, "line")))
    for name, value in lines:
        sys.stdout.write(f"{name:<12} {value}\n")


@app.command("verify")
def verify(prefix: Dataset, dtype: RawDtype = None) -> None:
    """Reads all of a data set. The exit code is 1 if it is damaged."""
    from holdfast.observe.transfer_progress import ByteCount
    from holdfast.protocol.units import count

    with _usage_errors():
        from holdfast.data.files import TokenFile
        from holdfast.tools.corpora.build import verify as check

        file = TokenFile(prefix, dtype, in_order=True)
    with ByteCount(sys.stderr, str(prefix)) as progress:
        built = check(file, progress.add)
    how = "index, tokens and sums" if built is not None else _checked_without_sums(file)
    sys.stdout.write(f"{file.path}: complete, {count(len(file.tokens))} tokens (compared: {how})\n")


@app.command("verify-cache")
def verify_cache(
    folder: Annotated[Path, typer.Argument(help="The folder that was given to --data-cache.", metavar="DIR")],
) -> None:
    """Reads every file of a node's cache and removes damaged ones. The exit code is 1 if there were any."""
    from holdfast.data.cache import Cache
    from holdfast.errors import UsageError
    from holdfast.protocol.units import size

    if not (folder / "entries").is_dir():
        raise UsageError(f"{folder} is not a data cache: {folder / 'entries'} does not exist")
    troubles = 0
    for found in Cache(folder).verify():
        troubles += found.trouble is not None
        outcome = f"removed: {found.trouble}" if found.trouble else "complete"
        sys.stdout.write(f"{found.url}: {outcome}, {size(found.nbytes)}\n")
    if troubles:
        raise typer.Exit(1)


def _checked_without_sums(file: TokenFile) -> str:
    return "index, range of the tokens" if file.index is not None else "range of the tokens"


def _described(built: Description | None) -> object:
    import msgspec

    return None if built is None else msgspec.to_builtins(built)


def _named(built: Description) -> str:
    first = built.inputs[0].path
    return first if len(built.inputs) == 1 else f"{first} ... {built.inputs[-1].path}"


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turns errors of the data layer into messages of the command line."""
    # A library raises ValueError for a bad file, with a message that names it. On the command line that is bad input, which
    # exits with 2 and without a traceback.
    from holdfast.errors import UsageError

    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"this command needs numpy: pip install 'holdfast-train[train]' ({error})"
        ) from error
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


class _Bar:
    """The progress of a build, shown after two seconds: a bar in a terminal, lines elsewhere."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: Any = None
        self._what = ""
        self._shown_s = time.monotonic()

    def show(self, what: str, done: int, total: int) -> None:
        """Updates the progress: `done` of `total` bytes."""
        from holdfast.observe.transfer_progress import SILENT_S
        from holdfast.protocol.units import size

        now = time.monotonic()
        if not sys.stderr.isatty():
            if now - self._shown_s >= SILENT_S:
                self._shown_s = now
                share = done / total if total else 1.0
                sys.stderr.write(f"{what}: {size(done)} of {size(total)}, {share:.0%}\n")
            return
        # Nothing for the first two seconds: a build that is done by then prints its result alone, in a
        # terminal as in a log.
        if self._bar is None:
            if now - self._shown_s < SILENT_S:
                return
            self._bar = _rich_bar()
            self._bar.start()
        if what != self._what:
            self._what, self._task = what, self._bar.add_task(what, total=total)
        self._bar.update(self._task, completed=done)

    def close(self) -> None:
        """Removes the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _rich_bar() -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from holdfast.observe.tables import PrintableConsole

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=PrintableConsole(stderr=True),
        transient=True,
    )
