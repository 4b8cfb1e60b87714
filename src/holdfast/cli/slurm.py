"""`holdfast run --engine slurm`: submits the job and follows it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from holdfast.cli.sources import LogSources
from holdfast.observe.log_tail import Tail

if TYPE_CHECKING:
    from holdfast.engines.jobs import JobFolder
    from holdfast.engines.shown import View
    from holdfast.protocol.job import JobSpec
    from holdfast.protocol.job_view import JobView


def print_script(spec: JobSpec) -> None:
    """`--dry-run`: what would be submitted."""
    from holdfast.engines import jobs
    from holdfast.engines.slurm.script import job_script
    from holdfast.engines.slurm.submit import check_options

    check_options(spec)
    sys.stdout.write(job_script(spec, jobs.job_dir(spec.name).absolute(), jobs.home().absolute()))


class RankZero:
    """A view that also shows what rank 0 prints, out of its log in the shared folder."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._sources = LogSources(rank=0)
        self._tail = Tail(lambda label, data: view.output(data))

    def event(self, entry: dict[str, Any]) -> None:
        """See `View`."""
        self._view.event(entry)
        self._sources.heard(entry["kind"], entry["fields"])
        for path, label in self._sources.chosen().items():
            self._tail.add(path, label, 0)

    def status(self, status: JobView) -> None:
        """See `View`."""
        self._view.status(status)
        # Inotify reports nothing of what workers on other machines write to the shared folder. A status comes
        # often enough to look instead.
        self._tail.look()

    def output(self, data: bytes) -> None:
        """See `View`."""
        self._view.output(data)

    def note(self, text: str) -> None:
        """See `View`."""
        self._view.note(text)

    def close(self) -> None:
        """Shows the rest."""
        self._tail.close()


async def submit_and_follow(spec: JobSpec, folder: JobFolder, view: View) -> dict[str, Any]:
    """Returns the job's report."""
    from holdfast.engines.slurm.submit import Submitter

    shown = RankZero(view)
    try:
        submitter = Submitter(spec, folder, shown)
        id = await submitter.submit()
        folder.close()  # the job is Slurm's now
        view.note(f"submitted Slurm job {id}, which continues if this command ends")
        return await submitter.follow()
    finally:
        shown.close()
