"""Machines without a scheduler: agents on hosts that the user reaches by ssh."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast.engines.base import Engine, KnownNodes
from holdfast.errors import UsageError
from holdfast.protocol.job_options import SshOptions

if TYPE_CHECKING:
    from holdfast.engines.jobs import JobFolder
    from holdfast.engines.shown import View
    from holdfast.protocol.job import JobSpec
    from holdfast.protocol.job_report import JobReport

_SHOWN = 8


class Ssh(Engine):
    """`--engine ssh`."""

    options = SshOptions
    title = "Hosts, with --engine ssh; --address also with join"

    def nodes(self, options: SshOptions) -> KnownNodes:
        """The hosts from the options.

        Raises:
            UsageError: none is given, or an option is invalid.
        """
        from holdfast.engines.ssh.addresses import plan_ssh

        names = plan_ssh(options).names
        if not names:
            raise UsageError("--engine ssh needs the hosts, for example --hosts a,b,c")
        return KnownNodes(
            count=len(names),
            place="the hosts",
            names="|".join(map(re.escape, names)),
            examples=", ".join(names[:_SHOWN]),
        )

    def plan(self, spec: JobSpec, options: SshOptions) -> JobSpec:
        """Adds the options with the checked list of hosts.

        Raises:
            UsageError: there are fewer hosts than nodes.
        """
        import msgspec

        from holdfast.engines.ssh.addresses import plan_ssh

        ssh, nodes = plan_ssh(options), spec.max_nodes + spec.spares
        # Refused although the job could start with fewer nodes: the user asked for these sizes, and a missing host is more likely
        # a typing error.
        if nodes > len(ssh.hosts):
            raise UsageError(
                f"--hosts has {len(ssh.hosts)} hosts, but {spec.max_nodes} nodes and {spec.spares} spares need {nodes}; "
                "add hosts, or use a smaller --nnodes or --spares"
            )
        return msgspec.structs.replace(spec, ssh=ssh)

    async def launch(self, spec: JobSpec, folder: JobFolder, view: View, port: int) -> JobReport:
        """See `Engine.launch`."""
        from holdfast.engines.ssh.launcher import SshLauncher

        return await SshLauncher(spec, folder, view, port).run()
