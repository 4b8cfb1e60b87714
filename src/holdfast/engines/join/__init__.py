"""Nodes that somebody else starts: each runs `holdfast agent --join`, and the job waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.engines.base import Engine, KnownNodes
from holdfast.protocol.job_options import SshOptions

if TYPE_CHECKING:
    from holdfast.engines.jobs import JobFolder
    from holdfast.engines.shown import View
    from holdfast.protocol.job import JobSpec
    from holdfast.protocol.job_report import JobReport


class Join(Engine):
    """`--engine join`."""

    options = SshOptions
    heeds = ("--address",)

    def nodes(self, options: SshOptions) -> KnownNodes:
        """Nothing is known of the nodes, since any machine may join."""
        return KnownNodes(place="other machines")

    def plan(self, spec: JobSpec, options: SshOptions) -> JobSpec:
        """Adds the coordinator's address for the nodes."""
        import msgspec

        from holdfast.engines.ssh.addresses import plan_ssh

        return msgspec.structs.replace(spec, ssh=plan_ssh(options))

    async def launch(self, spec: JobSpec, folder: JobFolder, view: View, port: int) -> JobReport:
        """See `Engine.launch`."""
        from holdfast.engines.join.launcher import JoinLauncher

        return await JoinLauncher(spec, folder, view, port).run()
