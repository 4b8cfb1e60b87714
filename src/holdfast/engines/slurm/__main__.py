"""`python -m holdfast.engines.slurm`: what the batch script runs on the first node of the allocation."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import msgspec

from holdfast.engines import jobs
from holdfast.engines.launcher import Deposed
from holdfast.engines.slurm.commands import Slurm
from holdfast.engines.slurm.launcher import SlurmLauncher
from holdfast.engines.slurm.place import find_place
from holdfast.errors import HoldfastError
from holdfast.observe.plain import PlainView
from holdfast.protocol.job import JobSpec


def main() -> int:
    """Runs the job to its end."""
    parser = argparse.ArgumentParser(prog="holdfast.engines.slurm")
    parser.add_argument("--job-dir", type=Path, required=True)
    given = parser.parse_args()
    os.umask(0o077)
    spec = msgspec.json.decode((given.job_dir / "spec.json").read_bytes(), type=JobSpec)
    try:
        return asyncio.run(_run(spec, given.job_dir))
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1


async def _run(spec: JobSpec, job_dir: Path) -> int:
    place = await find_place(Slurm())
    jobs.write_allocation(job_dir, jobs.Allocation("slurm", place.allocation))
    with PlainView(spec, job_dir) as view:
        launcher = SlurmLauncher(spec, job_dir, view, place)
        try:
            report = await launcher.run()
        except Deposed:
            # The job lives on elsewhere; this script's end would be taken for its end.
            view.note("another node has the coordinator now; this one keeps still")
            await asyncio.Event().wait()
        except HoldfastError:
            jobs.write_allocation(job_dir, jobs.Allocation("slurm", place.allocation, over=True))
            raise
    view.ended(report)
    await launcher.conclude(report)
    return 0 if report.get("outcome") in ("finished", "stopped") else 1


if __name__ == "__main__":
    sys.exit(main())
