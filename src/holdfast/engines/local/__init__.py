"""Nodes as processes of this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from holdfast.engines.base import Engine, KnownNodes
from holdfast.errors import UsageError
from holdfast.protocol.units import plural

if TYPE_CHECKING:
    from holdfast.engines.jobs import JobFolder
    from holdfast.engines.shown import View
    from holdfast.protocol.job import JobSpec
    from holdfast.protocol.job_report import JobReport


NODE_BYTES = 200 << 20
"""An agent with the process that its warm workers are forked from (measured: 150 to 230 MB with torch)."""

WORKER_BYTES = 150 << 20
"""A worker of a small model and the warm process behind it (measured: 130 to 210 MB); the model comes on top."""


def check_memory(nodes: int, nproc: int, available: int | None) -> None:
    """Raises UsageError if the processes alone would not fit into the available memory (in bytes; None: unknown, which
    passes)."""
    needed = nodes * (NODE_BYTES + nproc * WORKER_BYTES)
    if available is not None and available < needed:
        raise UsageError(
            f"{plural(nodes, 'node')} with {plural(nproc, 'worker')} each take about {needed >> 20} MiB of memory "
            f"before the model, but only {available >> 20} MiB are free: use a smaller --nnodes, --nproc-per-node or "
            "--spares, or end other programs"
        )


class Local(Engine):
    """`--engine local`."""

    def nodes(self, options: Any) -> KnownNodes:
        """What is known of the nodes: their number is not limited.

        Raises:
            UsageError: Slurm starts this command several times.
        """
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "")
        # `srun holdfast run` would start one job as often as there are tasks, each on its own machine.
        if "SLURM_PROCID" in os.environ and tasks.isdecimal() and int(tasks) > 1:
            raise UsageError(
                f"srun starts this command {tasks} times, and each would run a separate job on its own machine: use "
                "`holdfast run --engine slurm ...` without srun, which asks Slurm for the nodes, or `srun --ntasks 1` "
                "for one machine"
            )
        return KnownNodes(names=r"node\d+", examples="node0, node1 and so on")

    def plan(self, spec: JobSpec, options: Any) -> JobSpec:
        """Adds nothing, but checks the memory, since only this engine has all nodes on this machine.

        Raises:
            UsageError: this machine has too little of it.
        """
        from holdfast.protocol.machine.processes import available_bytes

        check_memory(spec.max_nodes + spec.spares, spec.nproc, available_bytes())
        return spec

    async def launch(self, spec: JobSpec, folder: JobFolder, view: View, port: int) -> JobReport:
        """See `Engine.launch`."""
        from holdfast.engines.local.launcher import LocalLauncher

        return await LocalLauncher(spec, folder, view, port).run()
