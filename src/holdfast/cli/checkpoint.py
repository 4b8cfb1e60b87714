"""`holdfast checkpoint`: what is saved, what is in it, and whether every byte of it is as it was written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.common import AsJson, JobName

if TYPE_CHECKING:
    from holdfast.protocol.job import Durable

app = typer.Typer(no_args_is_help=True, help="What is saved: list it, look into it, verify it.")
Place = Annotated[
    Path | None, typer.Argument(help="A folder of checkpoints, or one checkpoint; without it the job's.")
]


@app.command("ls")
def ls(place: Place = None, job: JobName = None, as_json: AsJson = False) -> None:
    """Lists the checkpoints, oldest first."""
    from holdfast.checkpoint.disk import read_manifest
    from holdfast.errors import StateError
    from holdfast.observe.tables import print_table

    rows: list[dict[str, Any]] = []
    for durable in _find(place, job):
        row: dict[str, Any] = {"step": durable.step, "bytes": None, "tensors": None, "path": durable.path}
        try:
            manifest = read_manifest(Path(durable.path)).manifest
            row |= {"bytes": manifest.nbytes, "tensors": len(manifest.tensors)}
        except StateError as error:
            row["trouble"] = str(error)
        rows.append(row)
    if as_json:
        _print_json(rows)
        return
    from holdfast.observe import units

    cells = [
        (units.count(r["step"]), units.size(r["bytes"]), units.count(r["tensors"]), r["path"]) for r in rows
    ]
    print_table(sys.stdout, ("step", "size", "tensors", "path"), cells, right=3)


@app.command("show")
def show(place: Place = None, job: JobName = None, as_json: AsJson = False) -> None:
    """Shows every tensor of one checkpoint; of several the newest."""
    import msgspec

    from holdfast.checkpoint.disk import read_manifest
    from holdfast.observe import units
    from holdfast.observe.tables import print_table

    newest = _find(place, job)[-1]
    manifest = read_manifest(Path(newest.path)).manifest
    if as_json:
        _print_json(msgspec.to_builtins(manifest))
        return
    total = units.size(manifest.nbytes)
    sys.stdout.write(f"step {newest.step}: {len(manifest.tensors)} tensors, {total} in {newest.path}\n")
    cells = [(t.path, t.dtype, "x".join(map(str, t.shape)), units.size(t.nbytes)) for t in manifest.tensors]
    print_table(sys.stdout, ("tensor", "dtype", "shape", "size"), cells, right=0)


@app.command("verify")
def verify(place: Place = None, job: JobName = None, as_json: AsJson = False) -> None:
    """Reads every byte of every checkpoint. The exit code is 1 if one of them is not whole."""
    from holdfast.checkpoint import disk
    from holdfast.errors import ChecksumError, StateError
    from holdfast.observe.bytecount import ByteCount

    results: list[dict[str, Any]] = []
    for durable in _find(place, job):
        path = Path(durable.path)
        try:
            with ByteCount(sys.stderr, f"step {durable.step}") as progress:
                nbytes = disk.verify(path, progress.add).manifest.nbytes
            results.append({"step": durable.step, "path": str(path), "whole": True, "bytes": nbytes})
        except (StateError, ChecksumError) as error:
            results.append({"step": durable.step, "path": str(path), "whole": False, "why": str(error)})
    if as_json:
        _print_json(results)
    else:
        for r in results:
            sys.stdout.write(f"step {r['step']}: {'whole' if r['whole'] else 'NOT WHOLE: ' + r['why']}\n")
    if not all(r["whole"] for r in results):
        raise typer.Exit(1)


def _find(place: Path | None, job: str | None) -> list[Durable]:
    """The checkpoints that are meant, oldest first; at least one.

    Raises:
        UsageError: there is none.
    """
    from holdfast.checkpoint import disk
    from holdfast.engines import jobs
    from holdfast.errors import UsageError
    from holdfast.protocol.job import Durable

    folder = jobs.existing(job) / "checkpoint" if place is None else place
    if place is not None and not place.is_dir():
        raise UsageError(
            f"{place} is no folder: give a folder of checkpoints, or leave it out and give --job"
        )
    number = folder.name.removeprefix("step-")
    if (folder / disk.MANIFEST).is_file() and number.isdigit():
        return [Durable(int(number), str(folder))]
    found = disk.find(folder)
    if not found:
        what = (
            f"the job has saved nothing yet in {folder}" if place is None else f"no checkpoint is in {folder}"
        )
        raise UsageError(f"{what}; a checkpoint is a folder step-N with a {disk.MANIFEST}")
    return found


def _print_json(value: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")
