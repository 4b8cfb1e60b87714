"""How an agent is started, whatever starts it."""

from __future__ import annotations

from pathlib import Path

from holdfast.protocol.job import JobSpec
from holdfast.protocol.place import NodePlace, shown


def agent_arguments(
    spec: JobSpec, job_dir: Path, node: str, host: str, memory: Path, place: NodePlace = ()
) -> list[str]:
    """For `python -m holdfast.agent`. host: the address that it binds. memory: its folder of snapshot memory. place: where the node
    stands, as far as the engine knows."""
    # Values only, and no secret among them: a command line can be read by every user of the machine. The
    # agent reads the token from the job's folder.
    return [
        f"--node={node}",
        f"--job-dir={job_dir}",
        f"--slots={spec.nproc}",
        f"--host={host}",
        f"--preload={','.join(spec.preload)}",
        f"--detection={spec.timing.detection_s}",
        f"--stall-factor={spec.timing.stall_factor}",
        f"--memory={memory}",
        f"--memory-bytes={spec.saving.budget_bytes}",
        *([f"--place={shown(place)}"] if place else []),
        *([f"--log={spec.log}"] if spec.log else []),
    ]
