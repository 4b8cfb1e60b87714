"""`holdfast checkpoint export` and `import`: converts checkpoints for other programs, and theirs for Holdfast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli import checkpoint
from holdfast.cli.common import JobName

if TYPE_CHECKING:
    from holdfast.checkpoint.archive import Archive
    from holdfast.tools.conversion.convert import Exported, Seen

app = checkpoint.app
"""All commands of `holdfast checkpoint`, these two among them."""
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
MOST_NAMED = 5


class ExportFormat(StrEnum):
    """What an export is."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


@app.command("export")
def export(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="[PLACE] OUT",
            help=(
                "PLACE: a folder or URL that contains checkpoints, or a single checkpoint; by default all tiers of "
                "the job. OUT: a new folder for safetensors, or a new file in the format of torch.save."
            ),
        ),
    ],
    job: JobName = None,
    kind: Annotated[
        ExportFormat | None,
        typer.Option(
            "--format",
            help=(
                f"Format of OUT. By default torch if OUT ends in {', '.join(TORCH_ENDINGS)}, else safetensors."
            ),
        ),
    ] = None,
    max_shard_size: Annotated[
        str,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Largest size of one safetensors file, for example 500M.",
        ),
    ] = "5G",
    only: Annotated[
        str,
        typer.Option(
            "--only",
            metavar="PREFIX",
            help="Export only tensors whose names begin with this prefix, for example model. (with the dot).",
        ),
    ] = "",
    strip: Annotated[
        bool,
        typer.Option(
            "--strip",
            help=(
                "Remove the prefix of --only from the names, so that other programs find the names that the module "
                "itself uses."
            ),
        ),
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            min=0,
            metavar="STEP",
            show_default="the newest",
            help="Step of the checkpoint to export. By default the newest complete one.",
        ),
    ] = None,
) -> None:
    """Writes a checkpoint for other programs: as safetensors, or as a file of torch.save.

    Shards are joined into complete tensors, and what all ranks saved alike is written once. Where rank N differs,
    its tensor is named rank-N.NAME. Values that are no tensors go into values.json next to the safetensors. A file
    of torch.save then has the state of every rank as rank-N.
    """
    from holdfast.errors import UsageError
    from holdfast.protocol.units import parse_size

    if len(places) > 2:
        raise UsageError(f"{len(places)} paths were given; pass either OUT, or PLACE and OUT")
    file_bytes = parse_size("--max-shard-size", max_shard_size)
    out = Path(places[-1])
    as_torch = kind is ExportFormat.TORCH or (kind is None and out.suffix in TORCH_ENDINGS)
    if strip and (as_torch or not only):
        raise UsageError(
            "--strip works only with --format safetensors and with --only, which gives the prefix to remove"
        )
    archives, chosen = _chosen(places[0] if len(places) == 2 else None, job, step)
    _need_torch()
    from holdfast.tools.conversion.convert import export_safetensors, export_torch

    def write(archive: Archive) -> Exported:
        with _progress() as seen:
            if as_torch:
                return export_torch(archive, chosen, out, only, seen)
            return export_safetensors(archive, chosen, out, only, file_bytes, seen, strip=strip)

    _tell(_first_whole(archives, write), chosen, out)


@app.command("import")
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            help="A safetensors file, a folder of them, or a file written by torch.save.", metavar="SOURCE"
        ),
    ],
    place: Annotated[
        str, typer.Argument(help="Folder or URL to which the checkpoint is written.", metavar="PLACE")
    ],
    step: Annotated[int, typer.Option("--step", min=0, help="Step of the new checkpoint.")],
) -> None:
    """Makes a checkpoint from safetensors or from a file of torch.save. No code in the file is executed."""
    _need_torch()
    from holdfast.checkpoint.archive import Archive
    from holdfast.protocol.units import plural, size
    from holdfast.tools.conversion.convert import import_checkpoint

    archive = Archive(place)
    with _progress() as seen:
        world, nbytes = import_checkpoint(source, archive, step, seen)
    sys.stdout.write(f"step {step}: {size(nbytes)} of {plural(world, 'rank')} in {archive.where(step)}\n")


def _chosen(place: str | None, job: str | None, step: int | None) -> tuple[list[Archive], int]:
    """The tiers that have the chosen checkpoint, in the job's order, and its step."""
    from holdfast.errors import UsageError

    found = checkpoint.find(place, job)
    steps = sorted({s for _, s in found})
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise UsageError(
            f"there is no checkpoint of step {step}; there are checkpoints of steps {', '.join(map(str, steps))}"
        )
    return [archive for archive, s in found if s == chosen], chosen


def _first_whole(archives: list[Archive], write: Callable[[Archive], Exported]) -> Exported:
    """Exports from the first tier whose copy is complete.

    Raises:
        StateError: no tier has a complete copy; the message has the reason of each.
    """
    from holdfast.errors import StateError

    reasons: list[str] = []
    # A damaged copy is a StateError, and another tier may have a good one. A target without room or
    # permission is another error: it would be the same with every copy, and each try may read terabytes.
    for archive in archives:
        try:
            return write(archive)
        except StateError as error:
            reasons.append(str(error))
    raise StateError(
        f"{'; '.join(reasons)}. Nothing was exported; `holdfast checkpoint verify` shows which checkpoints are "
        "complete, and --step chooses one of them"
    )


def _tell(exported: Exported, step: int, out: Path) -> None:
    from holdfast.protocol.units import plural, size

    sys.stdout.write(
        f"step {step}: {plural(exported.tensors, 'tensor')} of {size(exported.nbytes)} and "
        f"{plural(exported.values, 'value')}, {plural(len(exported.files), 'file')}: {out}\n"
    )
    if exported.of_ranks:
        more = len(exported.of_ranks) - MOST_NAMED
        named = ", ".join(exported.of_ranks[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        sys.stdout.write(f"the ranks have different values of {named}\n")


@contextmanager
def _progress() -> Iterator[Seen]:
    """Shows what is being done once it takes longer than two seconds."""
    from holdfast.observe.transfer_progress import ByteCount

    with ExitStack() as stack:
        # One line for each stage. The stack holds the current one, and clears it from the terminal when the
        # next begins.
        counts: dict[str, ByteCount] = {}

        def seen(what: str, nbytes: int, total: int | None) -> None:
            if what not in counts:
                stack.close()  # the line of what was done before
                counts[what] = stack.enter_context(ByteCount(sys.stderr, what, total))
            counts[what].add(nbytes)

        yield seen


def _need_torch() -> None:
    from holdfast.errors import UsageError

    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"this command needs PyTorch: pip install 'holdfast-train[train,export]' ({error})"
        ) from error
