"""`python -m holdfast.engines.slurm`: the launcher, which the batch script runs on the first node of the allocation."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from holdfast.engines import jobs
from holdfast.engines.coordinator_supervisor import LauncherSuperseded
from holdfast.engines.slurm.commands import SlurmCommands
from holdfast.engines.slurm.entry import enter, find_this_node
from holdfast.engines.slurm.launcher import SlurmLauncher
from holdfast.errors import HoldfastError
from holdfast.observe.live import PlainView
from holdfast.protocol.job import JobSpec


async def _run(spec: JobSpec, job_dir: Path) -> int:
    """Runs the job to its end."""
    here = await find_this_node(SlurmCommands())
    jobs.write_allocation(job_dir, jobs.Allocation(engine="slurm", id=here.allocation))
    with PlainView(spec, job_dir) as view:
        launcher = SlurmLauncher(spec, job_dir, view, here)
        try:
            report = await launcher.run()
        except LauncherSuperseded:
            # The job continues elsewhere, but Slurm would take the end of this script for the job's.
            view.note("another node runs the coordinator now; this one only waits")
            await asyncio.Event().wait()
        except HoldfastError:
            jobs.write_allocation(job_dir, jobs.Allocation(engine="slurm", id=here.allocation, over=True))
            raise
    view.ended(report)
    await launcher.conclude(report)
    # It determines the job's state in Slurm: jobs that depend on it by `afterok` start only if it finished.
    return jobs.exit_code(report)


if __name__ == "__main__":
    sys.exit(enter("holdfast.engines.slurm", _run, "launcher.log"))
