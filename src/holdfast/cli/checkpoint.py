"""`holdfast checkpoint`: lists, shows, verifies and removes checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import WIDE, AsJson, Format, JobName, Output, width_of, write_as

if TYPE_CHECKING:
    from holdfast.checkpoint.archive import Archive
    from holdfast.protocol.verified import Verified
    from holdfast.tensors.index import SmallTensor, TensorSpec

app = typer.Typer(no_args_is_help=True, help="Lists, shows, verifies, removes and converts checkpoints.")
PLACE_WIDTH = 40
Place = Annotated[
    str | None,
    typer.Argument(
        metavar="[PLACE]",
        help="Folder or URL that contains checkpoints, or a single checkpoint. By default all tiers of the job.",
    ),
]


@app.command("ls")
def ls(place: Place = None, job: JobName = None, as_json: AsJson = False, output: Output = None) -> None:
    """Lists the checkpoints, oldest first, and when each was read back last (`verify`)."""
    from holdfast.errors import StateError
    from holdfast.observe.tables import print_table
    from holdfast.protocol import units

    rows: list[dict[str, Any]] = []
    found = find(place, job)
    known = _read_back(_savers({archive.tier.url for archive, _ in found}, place, job))
    for archive, step in found:
        row: dict[str, Any] = {"step": step, "bytes": None, "world": None, "saved_at": None}
        row["place"] = archive.where(step)
        try:
            manifest = archive.manifest(step)
            # A state that is small lies in the shards' heads.
            nbytes = manifest.nbytes or sum(s.head.nbytes for s in manifest.shards)
            row |= {"bytes": nbytes, "world": manifest.world, "saved_at": manifest.saved_at}
        except StateError as error:
            row["trouble"] = str(error)
        # A step that was saved again since is another checkpoint.
        note = known.get((archive.tier.url, step))
        if note is not None and note.saved_at != row["saved_at"]:
            note = None
        row |= {"whole": note and note.whole, "verified_utc": note and note.utc}
        rows.append(row)
    if write_as(rows, as_json, output):
        return
    wide = output is Format.WIDE
    width = WIDE if wide else PLACE_WIDTH
    cells = [
        (
            units.count(r["step"]),
            units.size(r["bytes"]),
            units.count(r["world"]),
            (r["saved_at"] or units.UNKNOWN)[:19],
            _verified_words(r),
            units.clip_path(r["place"], width),
        )
        for r in rows
    ]
    print_table(
        sys.stdout,
        ("step", "size", "ranks", "saved (UTC)", "read back (UTC)", "place"),
        cells,
        right=3,
        **({"width": WIDE} if wide else {}),
    )
    for r in rows:
        if "trouble" in r:
            _note(f"step {r['step']} is not complete: {r['trouble']}")


def _verified_words(row: dict[str, Any]) -> str:
    from holdfast.protocol import units

    if row["whole"] is None:
        return units.UNKNOWN
    return f"{'' if row['whole'] else 'DAMAGED '}{row['verified_utc'][:16]}"


@app.command("show")
def show(place: Place = None, job: JobName = None, as_json: AsJson = False, output: Output = None) -> None:
    """Shows every tensor of one checkpoint. Of several checkpoints, shows the newest."""
    import msgspec

    from holdfast.observe.tables import WIDTH, print_table
    from holdfast.protocol import units
    from holdfast.tensors.index import SmallTensor, small_tensors

    archive, step = _newest(find(place, job))
    manifest = archive.manifest(step)
    heads = [archive.head(shard) for shard in manifest.shards]
    shards = [{"rank": rank, "index": msgspec.to_builtins(h.index)} for rank, h in enumerate(heads)]
    if write_as({"manifest": msgspec.to_builtins(manifest), "shards": shards}, as_json, output):
        return
    there: list[list[TensorSpec | SmallTensor]] = [[*h.index.tensors, *small_tensors(h.index)] for h in heads]
    count = units.plural(sum(map(len, there)), "tensor")
    # Ranks may share what is not small.
    small_bytes = sum(t.nbytes for tensors in there for t in tensors if isinstance(t, SmallTensor))
    size = units.size(manifest.nbytes + small_bytes)
    ranks = units.plural(manifest.world, "rank")
    sys.stdout.write(f"step {step}: {count} of {ranks}, {size} in {archive.where(step)}\n")
    cells = [
        (str(rank), t.path, t.dtype, "x".join(map(str, t.shape)), _piece(t), units.size(t.nbytes))
        for rank, tensors in enumerate(there)
        for t in tensors
    ]
    names = ("rank", "tensor", "dtype", "shape", "piece of", "size")
    print_table(sys.stdout, names, cells, right=1, width=width_of(output, WIDTH))


def _piece(spec: TensorSpec | SmallTensor) -> str:
    if not spec.global_shape:
        return ""
    return "x".join(map(str, spec.global_shape)) + " at " + ",".join(map(str, spec.start))


@app.command("verify")
def verify(place: Place = None, job: JobName = None, as_json: AsJson = False, output: Output = None) -> None:
    """Reads every byte of every checkpoint. The exit code is 1 if one of them is not complete."""
    from holdfast.errors import StateError, TierError

    results: list[dict[str, Any]] = []
    unreadable: list[str] = []
    found = find(place, job, unreadable)
    savers = _savers({archive.tier.url for archive, _ in found}, place, job)
    for archive, step in found:
        result: dict[str, Any] = {"step": step, "place": archive.where(step)}
        try:
            result |= {"whole": True, "bytes": _verify(archive, step)}
        except StateError as error:
            result |= {"whole": False, "why": str(error)}
        # A tier that does not answer says nothing about its checkpoints, so nothing is kept of that.
        except TierError as error:
            results.append(result | {"whole": False, "why": str(error)})
            continue
        _keep(savers, archive, step, result)
        results.append(result)
    if not write_as(results, as_json, output):
        several = len({archive.tier.url for archive, _ in found}) > 1
        for r in results:
            where = f" in {r['place']}" if several else ""
            how = "complete" if r["whole"] else f"NOT COMPLETE: {r['why']}"
            sys.stdout.write(f"step {r['step']}{where}: {how}\n")
        if len(results) > 1:
            sys.stdout.write(_newest_complete(results))
    # A tier that cannot be read may hold the only good copy, so its checkpoints are not known to be complete.
    if unreadable or not all(r["whole"] for r in results):
        raise typer.Exit(1)


def _savers(urls: set[str], place: str | None, job: str | None) -> dict[str, list[Path]]:
    """Of each tier the jobs here that save there: in their folders is kept when a checkpoint was read back."""
    from holdfast.engines import jobs
    from holdfast.errors import UsageError

    found: dict[str, list[Path]] = {url: [] for url in urls}
    for folder in [jobs.existing(job)] if place is None else jobs.folders():
        try:
            saves_to = {tier.url for tier in jobs.read_spec(folder).saving.tiers}
        except UsageError:
            continue  # a job that cannot be read hides no other
        for url in urls & saves_to:
            found[url].append(folder)
    return found


def _read_back(savers: dict[str, list[Path]]) -> dict[tuple[str, int], Verified]:
    from holdfast.protocol.verified import verified

    known: dict[tuple[str, int], Verified] = {}
    for folder in {folder for folders in savers.values() for folder in folders}:
        for key, note in verified(folder).items():
            if key not in known or note.utc > known[key].utc:
                known[key] = note
    return known


def _keep(savers: dict[str, list[Path]], archive: Archive, step: int, result: dict[str, Any]) -> None:
    """Keeps what was found, for `holdfast checkpoint ls` and the page."""
    from datetime import UTC, datetime

    from holdfast.errors import StateError, TierError
    from holdfast.protocol.verified import Verified, note_verified

    try:
        saved_at = archive.manifest(step).saved_at
    except (StateError, TierError):
        saved_at = None
    found = Verified(
        utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
        url=archive.tier.url,
        step=step,
        saved_at=saved_at,
        whole=result["whole"],
        why=result.get("why", ""),
    )
    for folder in savers[archive.tier.url]:
        try:
            note_verified(folder, found)
        # The answer is what was asked for, and it is there. That it is not kept is worth a line.
        except OSError as error:
            _note(f"the result for step {step} could not be recorded in {folder}: {error.strerror}")


def _newest_complete(results: list[dict[str, Any]]) -> str:
    # `whole` is a key of the JSON output, which scripts read: the key stays, people read "complete".
    complete = [r for r in results if r["whole"]]
    if not complete:
        return "none of these checkpoints is complete\n"
    step = complete[-1]["step"]
    return f"the newest complete checkpoint: {next(r['place'] for r in complete if r['step'] == step)}\n"


@app.command("prune")
def prune(
    place: Place = None,
    job: JobName = None,
    keep: Annotated[
        int, typer.Option("--keep", min=1, metavar="N", help="How many of the newest checkpoints to keep.")
    ] = 2,
    keep_every: Annotated[
        int,
        typer.Option(
            "--keep-every",
            min=0,
            metavar="STEPS",
            help="Also keep every checkpoint whose step is a multiple of this number; 0 keeps no others.",
        ),
    ] = 0,
    verified: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="First read the newest checkpoint, and remove nothing if it is not complete.",
        ),
    ] = True,
) -> None:
    """Removes checkpoints that need not be kept. The newest is always kept, and if it is not complete nothing is removed."""
    from holdfast.checkpoint.policy import Retention
    from holdfast.errors import UsageError
    from holdfast.protocol.units import plural

    # One rule for both, this command and the running job: what the one keeps the other must not remove.
    retention = Retention(keep, keep_every)
    for archive, only in _archives(place, job):
        if only is not None:
            raise UsageError(f"{place} is a single checkpoint: pass the folder that contains it")
        # Only if something would go: reading a checkpoint of terabytes for nothing takes hours.
        if verified and retention.superfluous(archive.steps()):
            _check_newest(archive, _savers({archive.tier.url}, place, job))
        gone = archive.prune(retention, unfinished=True)
        steps = f": {', '.join(map(str, gone))}" if gone else ""
        sys.stdout.write(f"{archive.tier.url}: {plural(len(gone), 'checkpoint')} removed{steps}\n")


@app.command("free")
def free(job: JobName = None) -> None:
    """Frees the snapshot memory that a killed job left for its next start. Its checkpoints are kept."""
    from holdfast.engines import jobs
    from holdfast.protocol.units import size

    folder = jobs.existing(job)
    nbytes = jobs.free_memory(folder.name)
    sys.stdout.write(f"{size(nbytes)} of snapshot memory freed\n")


def _verify(archive: Archive, step: int) -> int:
    """Reads every byte, with progress; returns how many. Raises StateError."""
    from holdfast.observe.transfer_progress import ByteCount

    manifest = archive.manifest(step)
    with ByteCount(sys.stderr, f"step {step}", manifest.nbytes) as progress:
        archive.verify_all(manifest, progress.add)
    return manifest.nbytes


def _check_newest(archive: Archive, savers: dict[str, list[Path]]) -> None:
    """Raises StateError if the newest checkpoint is not complete."""
    # Retention keeps the newest and removes older ones. If the newest is damaged, an older one may be the only copy of the
    # state that can be loaded, and removing it would lose the run.
    from holdfast.errors import StateError

    step = archive.steps()[-1]
    try:
        _verify(archive, step)
        _keep(savers, archive, step, {"whole": True})
    except StateError as error:
        _keep(savers, archive, step, {"whole": False, "why": str(error)})
        raise StateError(
            f"the newest checkpoint is not complete: {error}. Nothing was removed from {archive.tier.url}: remove "
            f"{archive.where(step)} first, or pass --no-verify"
        ) from error


def job_archives(folder: Path) -> list[Archive]:
    """Every durable tier of a job, from its specification."""
    from holdfast.checkpoint.archive import Archive
    from holdfast.engines.jobs import read_spec

    return [Archive(tier.url) for tier in read_spec(folder).saving.tiers]


def _archives(place: str | None, job: str | None) -> list[tuple[Archive, int | None]]:
    """The tiers to look at, each with a step if only that checkpoint is asked for."""
    from holdfast.checkpoint.archive import Archive
    from holdfast.checkpoint.layout import step_of
    from holdfast.engines import jobs
    from holdfast.errors import UsageError

    if place is None:
        return [(archive, None) for archive in job_archives(jobs.existing(job))]
    # By text and not by `Path`, which would make `s3:/bucket` of `s3://bucket`.
    parent, _, name = place.rstrip("/").rpartition("/")
    step = step_of(name)
    if "://" not in place and not Path(place).is_dir():
        raise UsageError(
            f"the folder {place} does not exist: pass a folder or URL that contains checkpoints, or pass --job instead"
        )
    if step is not None:
        return [(Archive(parent or "."), step)]
    return [(Archive(place), None)]


def find(
    place: str | None, job: str | None, unreadable: list[str] | None = None
) -> list[tuple[Archive, int]]:
    """The checkpoints that are asked for, at least one: oldest first, and of one step the job's first tier first.

    Args:
        unreadable: gets the reasons of tiers that cannot be read. They are skipped with a note as long as another tier can
            be read.

    Raises:
        UsageError: there is none.
        TierError: there is none in the tiers that can be read.
    """
    from holdfast.checkpoint.layout import MANIFEST
    from holdfast.errors import TierError, UsageError

    tiers = _archives(place, job)
    reasons = [] if unreadable is None else unreadable
    found: list[tuple[Archive, int]] = []
    for archive, only in tiers:
        try:
            found += [(archive, s) for s in archive.steps() if only in (None, s)]
        except TierError as error:
            # With one tier there is nothing to skip to, and "there is no checkpoint" would be wrong: nobody
            # could look.
            if len(tiers) == 1:
                raise
            reasons.append(str(error))
            _note(f"skipped a checkpoint: {error}")
    if not found and reasons:
        raise TierError("; ".join(reasons))
    if not found:
        there = ", ".join(a.tier.url for a, _ in tiers)
        what = (
            f"the job has not saved a checkpoint yet in {there}"
            if place is None
            else f"{place} does not contain a checkpoint"
        )
        raise UsageError(f"{what}; a checkpoint is a folder named step-N that contains a file {MANIFEST}")
    # Sorting is stable, so within a step the tiers keep the order of the job: the first is the one that a start loads from.
    return sorted(found, key=lambda x: x[1])


def _newest(found: list[tuple[Archive, int]]) -> tuple[Archive, int]:
    """The newest checkpoint, in the first tier that has it."""
    return next((archive, step) for archive, step in found if step == found[-1][1])


def _note(text: str) -> None:
    sys.stderr.write(f"holdfast: {text}\n")
