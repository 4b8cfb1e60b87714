"""The launcher within an allocation. It runs beside the coordinator, on the first node or on one that took over."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec

from holdfast.engines import jobs
from holdfast.engines.base import NodeProvider
from holdfast.engines.client import Announcement
from holdfast.engines.jobs import Allocation, JobFolder
from holdfast.engines.launcher import Launcher
from holdfast.engines.shown import View
from holdfast.engines.slurm.commands import SlurmError
from holdfast.engines.slurm.engine import KNOWN, TIME_LIMIT, SlurmProvider
from holdfast.engines.slurm.entry import ThisNode
from holdfast.engines.slurm.parse import JobLine
from holdfast.errors import Damaged
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_report import JobReport
from holdfast.protocol.leadership import claim_term, newest_term
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.wire.stored import decode_file

ROSTER = "roster.json"
WANTING = frozenset({NoticeCause.TIME_LIMIT, NoticeCause.PREEMPTION, NoticeCause.NODES})
"""Causes of the end of a job that should continue as soon as it gets time and nodes again."""
SCRIPT_GONE = frozenset({"JobLaunchFailure", "NonZeroExitCode"})
"""Slurm's reasons for the end of a job whose batch script was killed; a cancelled job has no reason."""


class SlurmLauncher(Launcher):
    """The launcher of one term in one allocation. term: the one that was claimed for a takeover; 0: a new start."""

    def __init__(self, spec: JobSpec, job_dir: Path, view: View, here: ThisNode, term: int = 0) -> None:
        super().__init__(spec, job_dir, view)
        self.host, self._here, self.term = here.host, here, term
        self.fresh = term == 0
        self._slurm_engine = SlurmProvider(spec, job_dir, self.allocation, self.note, self.post)

    @property
    def allocation(self) -> str:
        """The id of the training job's own allocation."""
        known = jobs.read_allocation(self.job_dir)
        return known.id if known else self._here.allocation

    async def open(self) -> NodeProvider:
        """Prepares the job's folder for a new start. For a takeover everything is there already."""
        loop = asyncio.get_running_loop()
        if self.fresh:
            # Even the first launcher claims a term: Slurm may requeue the script while processes of its last start still run on a
            # node that was cut off.
            self.term = newest_term(self.job_dir) + 1
            # The claim is a file that can be created only once, so that only one of two launchers continues.
            if not claim_term(self.job_dir, self.term, self._here.node):
                raise SlurmError(f"another launcher runs the job in {self.job_dir}")
            folder = JobFolder(self.spec.name, here=False)
            resume = await asyncio.to_thread(folder.prepare, self.spec, self.view.note)
            folder.identify()
            (self.job_dir / KNOWN).unlink(missing_ok=True)
            self.note_resume(resume)
            loop.add_signal_handler(signal.SIGTERM, self.on_sigterm)
            # Slurm sends it before the time limit (`--signal`), early enough to save the state.
            loop.add_signal_handler(signal.SIGUSR1, self.stop, TIME_LIMIT, NoticeCause.TIME_LIMIT)
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        return self._slurm_engine

    async def staff(self) -> None:
        """Starts the agents, unless they are running already."""
        await self._slurm_engine.start(self.fresh, self._here.node)

    def on_announcement(self, announcement: Announcement) -> None:
        """See `Launcher.on_announcement`."""
        if announcement.kind == "event":
            self._slurm_engine.on_event(announcement.value["kind"], announcement.value["fields"])
            # Only the launcher of the newest term writes the roster. One that is cut off considers all nodes lost and would write
            # an empty roster, with which any single node could take over.
            changed = announcement.value["kind"] in ("node-joined", "node-lost", "node-left")
            if changed and newest_term(self.job_dir) == self.term:
                write_roster(self.job_dir, self._slurm_engine.alive)
        super().on_announcement(announcement)

    async def abandon(self) -> None:
        """See `Launcher.abandon`."""
        await super().abandon()
        await self._slurm_engine.abandon()

    def on_sigterm(self) -> None:
        """Slurm ends the job's processes. Its signal reaches the coordinator as well, which takes it as a request to hand over,
        so the next coordinator is told of the stop from here."""
        self.stop("Slurm ends the job", NoticeCause.PREEMPTION)

    # ------------------------------------------------------------ the end

    async def run(self) -> JobReport:
        """See `Launcher.run`. `queued_again` in the report means that the job will continue by itself, unless Slurm decides
        otherwise."""
        report = await super().run()
        again = self.spec.slurm.requeue and wants_requeue(report)
        return msgspec.structs.replace(report, queued_again=again)

    async def conclude(self, report: JobReport) -> None:
        """Ends the allocation, or queues it again if the job should continue, unless Slurm has decided already."""
        id, slurm = self.allocation, self._slurm_engine.slurm
        again = report.queued_again
        try:
            job = await slurm.job(id)
            # If the job is in another state, Slurm has decided already: the job was cancelled by a person, or requeued by a
            # preemption. A second requeue would start it twice.
            again = again and job is not None and (job.state == "RUNNING" or self._lost_its_script(job))
            if again:
                self.note(f"the job is queued again, to continue from its state: {report.reason}")
                await slurm.run("scontrol", "requeue", id)
                return
            jobs.write_allocation(self.job_dir, Allocation(engine="slurm", id=id, over=True))
            if not self.fresh:  # the batch script, whose end would end the job, is lost
                await slurm.cancel(id)
        except SlurmError as error:
            self.note(str(error))
            jobs.write_allocation(self.job_dir, Allocation(engine="slurm", id=id, over=True))

    def _lost_its_script(self, job: JobLine) -> bool:
        """Whether Slurm is ending the job because its batch script is gone: the script's host was cut off, and came back."""
        return not self.fresh and job.state == "COMPLETING" and job.reason in SCRIPT_GONE


def wants_requeue(report: JobReport) -> bool:
    """Whether the job ended for lack of time or nodes, and not because it finished, failed or was stopped. Decided by the
    report's `cause`, and not by its `reason`, which is text."""
    return report.outcome in ("stopped", "failed") and report.cause in WANTING


def write_roster(job_dir: Path, nodes: set[str]) -> None:
    """Writes which nodes are in the job: more than half of them must miss the coordinator before one of them replaces it."""
    work = job_dir / f".{ROSTER}.{os.uname().nodename}.{os.getpid()}"
    work.write_bytes(msgspec.json.encode(sorted(nodes)))
    work.replace(job_dir / ROSTER)


_rosters = msgspec.json.Decoder(list[str])


def read_roster(job_dir: Path) -> list[str]:
    """Reads the roster, see `write_roster`; empty: not known."""
    try:
        return decode_file(_rosters.decode, job_dir / ROSTER)
    except (OSError, Damaged):
        return []
