"""Submits a job to Slurm and follows it. The job does not depend on this process, and continues if it dies."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import msgspec

from holdfast.engines import jobs
from holdfast.engines.client import JobClient
from holdfast.engines.jobs import Allocation, JobFolder
from holdfast.engines.shown import TolerantView, View
from holdfast.engines.slurm import parse
from holdfast.engines.slurm.commands import SlurmCommands, SlurmError, check_installed
from holdfast.engines.slurm.script import job_script
from holdfast.errors import Damaged, HoldfastError, UsageError
from holdfast.observe.log_sources import LogSources
from holdfast.observe.log_tail import Tail
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_report import JobReport
from holdfast.protocol.job_view import JobView
from holdfast.protocol.network.endpoint import read_endpoint

LOOK_S = 1.0
"""Polling interval in seconds, since Slurm has no event for the start of a job."""


def check_options(spec: JobSpec) -> None:
    """Raises UsageError for options that cannot work."""
    options = spec.slurm
    for given in options.sbatch_args:
        _check_sbatch_arg(given)
    if not options.time_limit:
        return
    try:
        limit_s = parse.parse_limit(options.time_limit)
    except ValueError:
        raise UsageError(
            "--time must be in Slurm's notation: minutes, hours:minutes:seconds or days-hours (got "
            f"{options.time_limit!r}), for example 30, 4:00:00 or 2-0"
        ) from None
    # Twice, so that at least half of the time is for training: a job that saves as soon as it has started would be queued,
    # started and saved without end.
    if limit_s is not None and limit_s < 2 * options.warn_s:
        raise UsageError(
            f"--time {options.time_limit}: {limit_s:g} s is too short, because the job stops {options.warn_s} s "
            f"before its limit to save its state; use at least {-(-2 * options.warn_s // 60)} minutes, or a smaller "
            "--stop-before"
        )


_WORKERS = "Slurm starts one agent on each node, which starts the workers: use --nproc-per-node instead"
_LOGS = "the output of the job is in its folder; `holdfast logs` shows it"
_NOT_FOR_SBATCH = {
    "array": (
        "a",
        "all jobs of the array would use the same folder; start each run separately with its own --job",
    ),
    "nodes": ("N", "use --nnodes and --spares instead"),
    "ntasks": ("n", _WORKERS),
    "ntasks-per-node": ("", _WORKERS),
    "job-name": ("J", "write --job"),
    "time": ("t", "use --time instead, from which the job also knows when to save its state"),
    "chdir": ("D", "start the command in that folder"),
    "output": ("o", _LOGS),
    "error": ("e", _LOGS),
    "requeue": ("", "write --requeue"),
    "no-requeue": ("", "remove --requeue"),
    "no-kill": ("k", "the submitted script already contains it, because the job survives the loss of a node"),
    "signal": ("", "write --stop-before"),
    "wrap": ("", "the script is the one that was given to `holdfast run`"),
    "test-only": (
        "",
        "`holdfast run --dry-run` prints the script, which can be passed to `sbatch --test-only`",
    ),
    "wait": ("W", "`holdfast run` waits for the job's end"),
}
"""Options of sbatch that contradict the submitted script or make several jobs of it, with their short form and what to do
instead."""


def _check_sbatch_arg(given: str) -> None:
    name = given.partition("=")[0].split(" ", 1)[0]
    # sbatch accepts unambiguous prefixes of names (`--arr`), and values directly after a letter (`-a0-3`).
    begun = [long for long in _NOT_FOR_SBATCH if len(name) > len("--n") and f"--{long}".startswith(name)]
    for long, (short, instead) in _NOT_FOR_SBATCH.items():
        is_short = bool(short) and not name.startswith("--") and name.startswith(f"-{short}")
        if name == f"--{long}" or begun == [long] or is_short:
            raise UsageError(f"--sbatch-arg {given!r}: {instead}")


class Submitter:
    """Submits one job; `follow` then shows it until it is over."""

    def __init__(self, spec: JobSpec, folder: JobFolder, view: View) -> None:
        self._spec, self._folder, self._view = spec, folder, view
        self._slurm = SlurmCommands()
        self._id = ""
        self._interrupts = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def script(self) -> str:
        """The batch script that is submitted."""
        return job_script(self._spec, self._folder.path, jobs.home().absolute())

    async def submit(self) -> str:
        """Submits the job; returns the id of the Slurm job.

        Raises:
            UsageError: Slurm is not installed, or would never run the job. Nothing was changed.
        """
        check_installed()
        check_options(self._spec)
        path = self._folder.path
        known = jobs.read_allocation(path)
        try:
            # By Slurm's state and not by the file, because a job that was cancelled in the queue could not record its end there.
            there = await self._slurm.job(known.id) if known is not None else None
            if there is not None and there.state not in ("COMPLETING", "COMPLETED", "CANCELLED", "FAILED"):
                raise UsageError(
                    f"a job named {self._spec.name!r} is in Slurm's queue (job {there.id}, {there.state.lower()}): "
                    f"see `holdfast status --job {self._spec.name}`, or choose another name with --job"
                )
            # Everything that can be refused is checked before the old ledger is put away.
            await self._slurm.try_submit(self.script, path)
            await self._check_limit()
            self._folder.put_away()
            (path / "spec.json").write_bytes(msgspec.json.format(msgspec.json.encode(self._spec)))
            self._id = await self._slurm.submit(self.script, path)
        except SlurmError as error:
            raise UsageError(f"Slurm refused the job: {error}") from None
        jobs.write_allocation(path, Allocation(engine="slurm", id=self._id))
        return self._id

    async def _check_limit(self) -> None:
        """Raises UsageError if the job's time is more than its partition's limit: Slurm accepts such jobs but never starts
        them."""
        options = self._spec.slurm
        asked_s = parse.parse_limit(options.time_limit)
        if asked_s is None or not options.partition:
            return
        output = await self._slurm.run(
            "sinfo", "--noheader", f"--partition={options.partition}", "--format=%l"
        )
        limit_s = parse.parse_limit(output.split()[0]) if output.split() else None
        if limit_s is not None and asked_s > limit_s:
            raise UsageError(
                f"--time {options.time_limit}: the partition {options.partition!r} allows at most {limit_s / 60:g} "
                "minutes"
            )

    async def follow(self) -> JobReport:
        """Shows the job until it is over; returns its report. Ctrl-C once stops it in order, twice at once.

        Raises:
            HoldfastError: it ended without a report.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        while True:
            await self._begun()
            async with JobClient(self._folder.path) as client:
                # Either may be first. The coordinator reports the end of the job; Slurm also knows of an end that the coordinator
                # did not survive.
                watching = asyncio.create_task(self._watch(client))
                over = asyncio.create_task(self._over())
                done, left = await asyncio.wait((watching, over), return_when=asyncio.FIRST_COMPLETED)
                if watching in done:
                    again = await over
                else:
                    again = over.result()
                for task in left:
                    task.cancel()
            if not again:
                return self._report()
            self._view.note("the job waits in Slurm's queue again")
            await self._ask("update", f"jobid={self._id}", "starttime=now")  # two minutes later by default

    async def _begun(self) -> None:
        """Waits for the job's coordinator, and shows what Slurm waits for."""
        shown = ""
        while read_endpoint(self._folder.path) is None:
            job = await self._job()
            if job is None or job.state not in parse.LIVING:
                raise HoldfastError(self._why_gone())
            # Slurm holds a requeued job whose batch script was killed. Here that means a lost node and not a faulty script.
            if job.reason == parse.HELD_AGAIN:
                await self._ask("release", self._id)
            now = f"the Slurm job {self._id} is {job.state.lower()}" + (
                f" ({job.reason})" if job.state == "PENDING" and job.reason != "None" else ""
            )
            if now != shown:
                shown = now
                hint = f"; it may never begin: `scancel {self._id}`" if job.reason in parse.HOPELESS else ""
                self._view.note(now + hint)
            await asyncio.sleep(LOOK_S)

    async def _ask(self, *argv: str) -> None:
        try:
            await self._slurm.run("scontrol", *argv)
        except SlurmError as error:
            self._view.note(str(error))

    async def _watch(self, client: JobClient) -> None:
        async for announcement in client.watch():
            if announcement.kind == "event":
                self._view.event(announcement.value)
            elif announcement.kind == "status":
                self._view.status(announcement.value)
            elif announcement.kind == "log":
                self._view.note(announcement.value["text"])

    async def _over(self) -> bool:
        """Waits until Slurm has ended the job; True: it is queued again."""
        while True:
            job = await self._job()
            known = jobs.read_allocation(self._folder.path)
            # The job's own record is enough: Slurm may take minutes to end the last step, while the report exists already.
            if known is not None and known.over and (job is None or job.state == "COMPLETING"):
                return False
            if job is None or job.state not in parse.LIVING:
                return False
            if job.state in parse.WAITING and (self._folder.path / "report.json").exists():
                # Otherwise the wait for the next start would find the address of the last one.
                (self._folder.path / "coordinator.json").unlink(missing_ok=True)
                return True
            await asyncio.sleep(LOOK_S)

    async def _job(self) -> parse.JobLine | None:
        while True:
            try:
                return await self._slurm.job(self._id)
            except SlurmError as error:
                self._view.note(str(error))
                await asyncio.sleep(LOOK_S)

    def _interrupted(self) -> None:
        self._interrupts += 1
        self._spawn(self._stop(self._interrupts > 1))

    async def _stop(self, at_once: bool) -> None:
        # A job that still waits has no coordinator that could stop it.
        begun = read_endpoint(self._folder.path) is not None
        if begun and not at_once:
            self._view.note("stopping after this step; press Ctrl-C again to cancel the Slurm job at once")
            async with JobClient(self._folder.path) as client:
                try:
                    await client.post("/stop?reason=interrupted", repeat=True)
                except UsageError as error:
                    self._view.note(str(error))
            return
        self._view.note(f"cancelling the Slurm job {self._id}")
        try:
            await self._slurm.cancel(self._id)
        except SlurmError as error:
            self._view.note(str(error))

    def _report(self) -> JobReport:
        self._mark_over()
        try:
            return jobs.read_report(self._folder.path / "report.json")
        except (OSError, Damaged):
            if self._interrupts:
                return JobReport(
                    job=self._folder.path.name, incidents=[], outcome="killed", reason="stopped at once"
                )
            raise HoldfastError(self._why_gone()) from None

    def _mark_over(self) -> None:
        jobs.write_allocation(self._folder.path, Allocation(engine="slurm", id=self._id, over=True))

    def _why_gone(self) -> str:
        self._mark_over()
        return (
            f"the Slurm job {self._id} ended without a report: see {self._folder.path}/slurm-{self._id}.out "
            f"and `scontrol show job {self._id}`"
        )

    def _spawn(self, coroutine: object) -> None:
        assert asyncio.iscoroutine(coroutine)
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RankZero:
    """A view that also shows the output of rank 0, from its log in the shared folder."""

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
        # Inotify does not report writes by other machines to the shared folder. Statuses come often enough to check the log each
        # time.
        self._tail.look()

    def output(self, data: bytes) -> None:
        """See `View`."""
        self._view.output(data)

    def note(self, text: str) -> None:
        """See `View`."""
        self._view.note(text)

    def close(self) -> None:
        """Shows the rest of the output, and stops."""
        self._tail.close()


async def submit_and_follow(spec: JobSpec, folder: JobFolder, view: View) -> JobReport:
    """Submits a job and shows it until it is over; returns its report."""
    shown = RankZero(TolerantView(view))
    try:
        submitter = Submitter(spec, folder, shown)
        id = await submitter.submit()
        folder.close()  # the job is Slurm's now
        view.note(f"submitted Slurm job {id}, which continues if this command ends")
        return await submitter.follow()
    finally:
        shown.close()
