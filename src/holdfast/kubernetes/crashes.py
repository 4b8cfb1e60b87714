"""Nodes whose agent ends again and again before it joins. Pure.

If agents of the job work elsewhere, the machine is at fault: another one is asked for, and the pod that crashes goes when its
replacement has a machine. If no agent of the job works anywhere, the image or the script is at fault: no machine is blamed,
and a job that has not trained ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from holdfast.kubernetes.observed import Observed, PodSeen
from holdfast.kubernetes.resource import WORKER, HoldfastJob

RESTARTS_OF_A_MACHINE = 3
"""So often the kubelet starts an agent anew before another machine is asked for: about 30 seconds, by the kubelet's back-off."""
RESTARTS_OF_A_JOB = 5
"""So often before a job ends of which no agent works: about three minutes. A failure that passes, as of a network that is not
there yet, is over by then."""
NO_HOLDFAST = re.compile(
    """No module named '?holdfast|exec: ".*(executable file not found|no such file or directory)"""
)
"""What Python and container runtimes say of an image that lacks Holdfast, or Python. A mount that is missing is another matter."""


def on_bad_machines(seen: Observed) -> Mapping[str, str]:
    """Nodes that are to be replaced, and how each ended the last time."""
    crashing = {
        pod.name: pod.crash or ""
        for pod in seen.pods
        if not pod.coordinator and _crashes(seen, pod, RESTARTS_OF_A_MACHINE)
    }
    # Where none works the next machine would be as bad as this one, and the job would wander over the whole cluster.
    works = any(not pod.coordinator and pod.stays and _works(seen, pod) for pod in seen.pods)
    return crashing if works else {}


def why_nothing_works(seen: Observed, job: HoldfastJob) -> tuple[str, str] | None:
    """Of a job that has not trained: a reason for programs and one for people. None: it may still come to work."""
    if seen.said is None:
        # All nodes wait for it, and look healthy.
        for pod in seen.pods:
            if pod.coordinator and pod.stays and _crashes(seen, pod, RESTARTS_OF_A_JOB):
                return _told(job, pod)
    nodes = [pod for pod in seen.pods if not pod.coordinator and pod.stays and pod.machine is not None]
    if nodes and all(_crashes(seen, pod, RESTARTS_OF_A_JOB) for pod in nodes):
        return _told(job, nodes[0])
    return None


def _told(job: HoldfastJob, pod: PodSeen) -> tuple[str, str]:
    words = f"{pod.name} ended {pod.restarts + 1} times, the last time with {pod.crash}"
    if NO_HOLDFAST.search(pod.crash or ""):
        image = next(one["image"] for one in job.spec.template.spec["containers"] if one["name"] == WORKER)
        if pod.coordinator and job.spec.coordinator.image:
            image = job.spec.coordinator.image
        return "ImageWithoutHoldfast", f"{words}; put Holdfast and its Python into the image {image}"
    return "AgentsCrash", words


def _crashes(seen: Observed, pod: PodSeen, restarts: int) -> bool:
    return pod.stays and pod.crash is not None and pod.restarts >= restarts and not _works(seen, pod)


def _works(seen: Observed, pod: PodSeen) -> bool:
    """It is ready, or the coordinator has it. A kubelet that is cut off says nothing of a pod that trains."""
    known = seen.said.nodes.get(pod.name) if seen.said is not None else None
    return pod.ready or (known is not None and known.alive)
