"""Nodes from Slurm: one job's allocation, follow-up allocations, and reports of bad nodes to Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.engines.base import Engine, KnownNodes
from holdfast.protocol.job_options import SlurmOptions

if TYPE_CHECKING:
    from holdfast.engines.jobs import JobFolder
    from holdfast.engines.shown import View
    from holdfast.protocol.job import JobSpec
    from holdfast.protocol.job_report import JobReport


class Slurm(Engine):
    """`--engine slurm`."""

    options = SlurmOptions
    title = "Slurm, with --engine slurm"
    submits = True

    def nodes(self, options: SlurmOptions) -> KnownNodes:
        """Which nodes the job gets is not known before it starts."""
        return KnownNodes(gpus=options.gpus_per_node)

    def plan(self, spec: JobSpec, options: SlurmOptions) -> JobSpec:
        """Adds the options for Slurm."""
        import msgspec

        return msgspec.structs.replace(spec, slurm=options)

    def preview(self, spec: JobSpec) -> str:
        """The batch script."""
        from holdfast.engines import jobs
        from holdfast.engines.slurm.script import job_script
        from holdfast.engines.slurm.submit import check_options

        check_options(spec)
        return job_script(spec, jobs.job_dir(spec.name).absolute(), jobs.home().absolute())

    async def launch(self, spec: JobSpec, folder: JobFolder, view: View, port: int) -> JobReport:
        """Submits the job and follows it; the coordinator is on one of its nodes."""
        from holdfast.engines.slurm.submit import submit_and_follow

        return await submit_and_follow(spec, folder, view)
