"""`holdfast rm`: removes the folders of jobs that have ended."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated

import typer


def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Names of jobs as `holdfast ls` shows them.")
    ],
    checkpoints: Annotated[
        bool,
        typer.Option(
            "--checkpoints",
            help="Also remove jobs that have checkpoints in their folder, together with the checkpoints.",
        ),
    ] = False,
) -> None:
    """Removes ended jobs: ledger, logs, report, and snapshots in memory. Checkpoints elsewhere stay."""
    from holdfast.checkpoint.layout import MANIFEST
    from holdfast.engines import jobs
    from holdfast.engines.jobs import JobFolder
    from holdfast.errors import UsageError
    from holdfast.protocol import units

    # A name that is given twice is taken once: the second removal would find nothing, and fail.
    folders = [jobs.existing(name) for name in dict.fromkeys(names)]
    # All is looked at before anything is removed: a name that cannot be removed leaves the others as they are.
    for folder in folders:
        if jobs.is_running(folder):
            raise UsageError(
                f"the job {folder.name!r} is running: end it first with `holdfast stop --job {folder.name}`"
            )
        # Looked for by what makes a checkpoint, and not by the specification: that names the tiers of the newest start.
        inside = [path.parent for path in folder.rglob(MANIFEST)]
        if inside and not checkpoints:
            raise UsageError(
                f"the job {folder.name!r} has {units.plural(len(inside), 'checkpoint')} in its folder, for example "
                f"{max(inside)}: add --checkpoints to remove them, too"
            )
    for folder in folders:
        # Before the folder: whoever is killed in between still has a folder, and can run this again.
        nbytes = jobs.free_memory(folder.name)
        # Its lock is held meanwhile: whoever starts a job of this name now waits for no half of the old one.
        held = JobFolder(folder.name)
        try:
            shutil.rmtree(folder)
        finally:
            held.close()
        memory = f", and {units.size(nbytes)} of snapshots in memory" if nbytes else ""
        sys.stdout.write(f"removed the job {folder.name}{memory}\n")
