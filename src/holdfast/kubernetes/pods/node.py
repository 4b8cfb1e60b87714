"""`python -m holdfast.kubernetes.pods.node`: the program of a node's pod. It prepares the job's folder and becomes the agent."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from holdfast.engines import jobs
from holdfast.engines.agents import agent_arguments
from holdfast.engines.folders import find_environment_problems
from holdfast.errors import HoldfastError, UsageError
from holdfast.kubernetes.names import AGENT_PORT, CONFIG_FOLDER, COORDINATOR_VARIABLE, GRACE_VARIABLE
from holdfast.kubernetes.pods.pod import PodPlace, read_place, read_pod
from holdfast.protocol.machine.processes import python_module


def main() -> str:
    """Becomes the agent. Returns only if the job cannot run in this pod, with the reason: Kubernetes puts a failed container's
    last lines into the pod's status."""
    parser = argparse.ArgumentParser(prog="holdfast.kubernetes.pods.node")
    parser.add_argument(
        "--config", type=Path, default=Path(CONFIG_FOLDER), help="has the token and spec.json"
    )
    given = parser.parse_args()
    # The kernel drops a SIGTERM that the first process of a container has no handler for. The pod of a node that is no longer
    # needed would stay for its whole grace period.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        become_agent(read_pod(config=given.config), given.config)
    except HoldfastError as error:
        return f"[holdfast] {error}"


def become_agent(pod: PodPlace, config: Path) -> NoReturn:
    """Replaces this process by the agent, which so receives the kubelet's signals and determines the exit code.

    Raises:
        UsageError: the job cannot run here.
    """
    coordinator = os.environ.get(COORDINATOR_VARIABLE)
    if not coordinator:
        raise UsageError(
            f"{COORDINATOR_VARIABLE} is not set: this program runs only in the pods of a HoldfastJob"
        )
    spec = pod.spec
    if Path(spec.cwd).is_dir():
        os.chdir(spec.cwd)
    problems = find_environment_problems(
        script=spec.script, module=spec.module, cwd=spec.cwd, preload=spec.preload, digest=""
    )
    # Checked before the agent starts, so that an image without the script fails at once, with the reason in the pod's status.
    # Otherwise the agent would join, and each of its workers would end for a reason that the coordinator cannot know.
    if problems:
        raise UsageError(f"the job {spec.name!r} cannot run in this image: {'; '.join(problems)}")
    pod.prepare()
    memory = jobs.memory_of(pod.folder) / pod.name
    arguments = [
        *agent_arguments(pod.folder, pod.name, pod.host, memory, read_place(config)),
        f"--coordinator={coordinator}",
        f"--grace={os.environ.get(GRACE_VARIABLE, '30')}",
        f"--ready-port={AGENT_PORT}",
        # The coordinator's image may still be being pulled on another machine, and after an outage of the API server the
        # cluster's DNS may take more than a minute to have a new job's name. An agent that gave up would be restarted and wait
        # again.
        "--coordinator-is-late",
    ]
    # Even for one worker: pods share a machine, and torch counts all of its cores instead of those of the pod's limit.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    command = python_module("holdfast.agent", *arguments)
    # Unlike a handler, a blocked signal mask survives exec. The agent unblocks the signal once it can handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
