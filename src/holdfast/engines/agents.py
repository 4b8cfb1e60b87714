"""How an agent is started, whatever starts it."""

from __future__ import annotations

from pathlib import Path

from holdfast.protocol.place import NodePlace, shown


def agent_arguments(job_dir: Path, node: str, host: str, memory: Path, place: NodePlace = ()) -> list[str]:
    """The arguments of `python -m holdfast.agent` that are specific to a node.

    Args:
        job_dir: the job's folder on the node, with its specification and its token.
        host: the address that the agent binds.
        memory: its folder of snapshot memory.
        place: the node's place, if the engine knows it better than the job's specification.
    """
    # Without secrets, because a command line can be read by every user of the machine.
    return [
        f"--node={node}",
        f"--job-dir={job_dir}",
        f"--host={host}",
        f"--memory={memory}",
        *([f"--place={shown(place)}"] if place else []),
    ]
