"""Decides which of a job's pods are lost although they exist, and which exist although they look lost. Pure.

A coordinator that the operator cannot reach may still serve the job, a node whose agent ended may come back with everything it
had in memory, and a pod that the watch does not show may be training. A wrong decision costs the job a restart, or its only
copies of a state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from holdfast.kubernetes import names
from holdfast.kubernetes.objects.pod import PodSeen
from holdfast.kubernetes.objects.resource import WORKER, HoldfastJob
from holdfast.kubernetes.objects.status import ConditionType
from holdfast.kubernetes.policy import queues
from holdfast.kubernetes.policy.plan import Action, FindPod, LabelPod, Observed
from holdfast.protocol.engine_orders import ReleaseNode
from holdfast.protocol.network.endpoint import Hearing

# ------------------------------------------------------------ a coordinator
# If only the operator cannot reach it, that proves nothing: the network cut may be on the operator's side while the job trains.
# So a second source has to confirm it: the kubelet of its machine is silent as well, or most of the nodes have lost the
# coordinator.

VOTERS = 31
"""Number of nodes that are asked at a time, so that a job of thousands is not asked as a whole. Odd, so that there is no tie."""
MISSED_S = 4.0
"""Seconds for which nodes must have missed it, at least: a process that dies is restarted in its container within 1 or 2 s."""
START_S = 30.0
"""The same for a coordinator that may only just be starting, in its container or in a new pod."""
UNHEARD_S = 60.0
"""Seconds for which a coordinator may be reached by nobody at all. Nodes may be busy with checks for a while before they join."""
LAST_WORD_S = 300.0
"""The same if no node runs: the job may be over, and the coordinator about to report it."""


def why_lost(seen: Observed) -> str | None:
    """Why the coordinator counts as lost, for people; None: it is not lost, or that is not known."""
    pod = newest_of(seen.pods, seen.status.term)
    if seen.said is not None or pod is None or pod.ended:
        return None
    # Applies even if it never started: the scheduler binds pods to a dead machine until Kubernetes calls that not ready.
    machine = seen.machines.get(pod.machine or "")
    if machine is not None and not machine.ready:
        return "its machine does not answer"
    if not _runs(pod):
        # Starting it is up to the kubelet. Whatever prevents that here would prevent it on another machine as well.
        return None
    if _vote_s(seen, pod) == 0:
        return "most nodes have lost it"
    if _is_unheard(seen, pod):
        return "nobody has reached it"
    return None


def loss_look_again_s(seen: Observed) -> float | None:
    """Seconds until most nodes may have missed the coordinator for long enough; None: they have already, or most do not miss
    it."""
    pod = newest_of(seen.pods, seen.status.term)
    if seen.said is not None or pod is None or pod.ended or not _runs(pod):
        return None
    return _vote_s(seen, pod) or None


def newest_of(pods: tuple[PodSeen, ...], term: int | None) -> PodSeen | None:
    """The coordinator's pod of this term."""
    return next((pod for pod in pods if pod.coordinator and pod.number == term), None)


def voters(pods: tuple[PodSeen, ...], run: int | None) -> list[PodSeen]:
    """The nodes of this run that can be asked whether they have a connection to the coordinator."""
    nodes = (pod for pod in pods if not pod.coordinator and pod.run == run and pod.stays)
    return [pod for pod in nodes if pod.ready and pod.address is not None]


def heard_restarts(seen: Observed, coordinator: PodSeen) -> int | None:
    """How often the coordinator's container had been restarted when it last answered; None: it never answered.

    Read from the status, because the operator that received the answer may be lost together with the coordinator, on the same
    machine.
    """
    recorded = seen.status.coordinator
    return recorded.restarts if recorded is not None and recorded.pod == coordinator.name else None


def _runs(coordinator: PodSeen) -> bool:
    return coordinator.phase == "Running" and coordinator.stays and coordinator.waits is None


def _vote_s(seen: Observed, coordinator: PodSeen) -> float | None:
    """Seconds until more than half of the nodes that were asked will have missed the coordinator for long enough, if nothing
    changes; 0: they have; None: most of them do not miss it."""
    if seen.job is None:
        return None
    patience_s = max(MISSED_S, 2 * seen.job.spec.timing.detection_s)
    if coordinator.restarts != heard_restarts(seen, coordinator):
        patience_s = max(patience_s, START_S)
    # Nodes on its own machine are lost together with it. If their silence counted as an answer, it would count in favour of
    # a coordinator that is gone.
    beside = {pod.name for pod in seen.pods if pod.machine == coordinator.machine}
    asked = [one for name, one in seen.hearings.items() if one is not None or name not in beside]
    left_s = sorted(x for one in asked if (x := _vote_left_s(one, seen, coordinator, patience_s)) is not None)
    # If the cluster is cut in two, at most one side has more than half of the nodes.
    most = len(asked) // 2 + 1
    return left_s[most - 1] if len(left_s) >= most else None


def _is_unheard(seen: Observed, coordinator: PodSeen) -> bool:
    """Whether it has not answered this operator for long and no node has joined. Then it serves nobody, and ending it costs
    nothing."""
    nodes = [pod for pod in seen.pods if not pod.coordinator and pod.run == coordinator.run]
    tries = any(pod.phase == "Failed" or (pod.phase == "Running" and pod.waits is None) for pod in nodes)
    limit_s = UNHEARD_S if tries else LAST_WORD_S
    return not any(pod.ready for pod in nodes) and seen.silent_s >= limit_s


def _vote_left_s(
    one: Hearing | None, seen: Observed, coordinator: PodSeen, patience_s: float
) -> float | None:
    """Seconds until this node has missed the coordinator for long enough; None: it does not miss it, as far as is known."""
    if one is None or one.missing_s is None:
        return None
    if one.term == coordinator.number:
        return max(0.0, patience_s - one.missing_s)
    # This node has never been connected to this term's coordinator, and may be missing the one before. Counted in full, its
    # vote would replace a coordinator that is only just starting, and then the next one, and so on.
    return max(0.0, max(patience_s, START_S) - min(one.missing_s, seen.silent_s))


# ------------------------------------------------------------ nodes whose agent crashes repeatedly before it joins
# If agents of the job work elsewhere, the machine is at fault: a replacement is requested, and the crashing pod is deleted once
# that has a machine. If no agent of the job works anywhere, the image or the script is at fault: no machine is blamed, and a job
# that has not trained ends.

RESTARTS_OF_A_MACHINE = 3
"""Restarts of an agent by the kubelet before another machine is requested: about 30 s with the kubelet's back-off."""
RESTARTS_OF_A_JOB = 5
"""Restarts before a job ends of which no agent works: about three minutes, in which a temporary failure, such as a network that
is not up yet, will have passed."""
NO_HOLDFAST = re.compile(
    """No module named '?holdfast|exec: ".*(executable file not found|no such file or directory)"""
)
"""Messages of Python and of container runtimes for an image without Holdfast or without Python. They do not include missing
mounts."""


def crashing_nodes(seen: Observed) -> Mapping[str, str]:
    """Nodes to replace because their agents crash, each with how its container last ended."""
    crashing = {
        pod.name: pod.crash or ""
        for pod in seen.pods
        if not pod.coordinator and _crashes(seen, pod, RESTARTS_OF_A_MACHINE)
    }
    # If no agent works, another machine would not help, and the job would move through the whole cluster.
    works = any(not pod.coordinator and pod.stays and _works(seen, pod) for pod in seen.pods)
    return crashing if works else {}


def why_nothing_works(seen: Observed, job: HoldfastJob) -> tuple[str, str] | None:
    """Why a job that has not trained never will: a reason for programs and one for people; None: it may still start."""
    if seen.said is None:
        # While the coordinator crashes all nodes wait for it, and look healthy.
        for pod in seen.pods:
            if pod.coordinator and pod.stays and _crashes(seen, pod, RESTARTS_OF_A_JOB):
                return _why_it_crashes(job, pod)
    nodes = [pod for pod in seen.pods if not pod.coordinator and pod.stays and pod.machine is not None]
    if nodes and all(_crashes(seen, pod, RESTARTS_OF_A_JOB) for pod in nodes):
        return _why_it_crashes(job, nodes[0])
    return None


def _why_it_crashes(job: HoldfastJob, pod: PodSeen) -> tuple[str, str]:
    message = f"{pod.name} ended {pod.restarts + 1} times, the last time with {pod.crash}"
    if NO_HOLDFAST.search(pod.crash or ""):
        image = next(one["image"] for one in job.spec.template.spec["containers"] if one["name"] == WORKER)
        if pod.coordinator and job.spec.coordinator.image:
            image = job.spec.coordinator.image
        return "ImageWithoutHoldfast", f"{message}; put Holdfast and its Python into the image {image}"
    return "AgentsCrash", message


def _crashes(seen: Observed, pod: PodSeen, restarts: int) -> bool:
    return pod.stays and pod.crash is not None and pod.restarts >= restarts and not _works(seen, pod)


def _works(seen: Observed, pod: PodSeen) -> bool:
    """Whether it is ready, or alive according to the coordinator: the status of a pod whose kubelet is cut off is out of date."""
    known = seen.said.nodes.get(pod.name) if seen.said is not None else None
    return pod.ready or (known is not None and known.alive)


# ------------------------------------------------------------ nodes whose agent has ended and may be restarted in its pod
# A pod still has what its agent kept in memory: snapshots, and a copy of the ledger. A new pod would have neither, and needs a
# machine first. So a pod is kept for some seconds after its agent's end. Meanwhile its node counts as present, and no other one
# is created in its place.

RESTART_S = 20.0
"""Seconds to wait for its container to run again. The kubelet notices the end after a second and restarts the container at once
if that has not happened in the last ten minutes."""
RETURN_S = 60.0
"""Seconds to wait for its agent to join if its container runs again, or if no node is left. In the latter case the pods have the
only copies of what was not written to a durable tier."""


def returning_nodes(seen: Observed) -> frozenset[str]:
    """Nodes that the coordinator gave up but whose pods are kept for now, because their agents may come back."""
    orders = seen.said.orders if seen.said is not None else ()
    ended = [one.node for one in orders if isinstance(one, ReleaseNode) and one.may_return]
    if not ended:
        return frozenset()
    pods = {pod.name: pod for pod in seen.pods if not pod.coordinator}
    return frozenset(name for name in ended if name in pods and _left_s(seen, pods[name]) > 0)


def returns_look_again_s(seen: Observed) -> float | None:
    """Seconds until the first of the `returning_nodes` is given up; None: there is none."""
    names = returning_nodes(seen)
    return min((_left_s(seen, pod) for pod in seen.pods if pod.name in names), default=None)


def _left_s(seen: Observed, pod: PodSeen) -> float:
    machine = seen.machines.get(pod.machine or "")
    # On a machine that is cut off or to be emptied no container is restarted.
    if (
        seen.said is None
        or not pod.stays
        or machine is None
        or not machine.ready
        or machine.why_left is not None
    ):
        return 0.0
    released = seen.released.get(pod.name)
    for_s, restarts = (0.0, pod.restarts) if released is None else (released.for_s, released.restarts)
    if not any(node.alive for node in seen.said.nodes.values()):
        return RETURN_S - for_s
    # Other jobs wait for its quota, which is given back only when the pod is gone.
    if queues.why_taken_back(seen, pod) is not None:
        return 0.0
    # The container has ended before and the kubelet now waits before it restarts it: another machine is faster.
    if pod.backs_off:
        return 0.0
    return (RETURN_S if pod.restarts > restarts else RESTART_S) - for_s


# ------------------------------------------------------------ pods that the watch does not show
# Pods are watched by a label, and anybody can remove a label. The watch then reports the pod as gone, and an operator that starts
# afterwards is not told of it at all. A node that trains must not count as lost because of that. So a pod that was not deleted is
# looked up by its name, and its labels are restored.

OVER = (ConditionType.SUSPENDED, ConditionType.COMPLETE, ConditionType.FAILED)
"""Conditions with which nothing of the job runs."""


def missing_from_sight(seen: Observed, job: HoldfastJob | None) -> Iterator[Action]:
    """Actions that find pods which the watch does not show, and restore the labels by which it shows them."""
    unsure = {pod.name for pod in seen.pods if pod.unsure}
    unseen = unseen_nodes(seen, job) if job is not None else frozenset()
    yield from (FindPod(name) for name in sorted(unsure | unseen))
    for pod in seen.pods:
        if pod.mislabelled and not pod.unsure:
            yield LabelPod(name=pod.name, uid=pod.uid)


def unseen_nodes(seen: Observed, job: HoldfastJob) -> frozenset[str]:
    """Nodes that the coordinator has but the operator does not see, except those that do not exist according to the API
    server."""
    if seen.said is None:
        return frozenset()
    # An agent that was started by hand has another kind of name, and no pod.
    mine = {name for name in seen.said.alive if names.number_of(job.id.name, name) is not None}
    return frozenset(mine - {pod.name for pod in seen.pods} - seen.absent)


def unseen_coordinator(seen: Observed, job: HoldfastJob) -> str | None:
    """The name of the newest coordinator's pod, if the operator does not see it but it may exist; None: otherwise."""
    if not seen.status.run or any(seen.status.holds(type_) for type_ in OVER):
        return None
    name = names.coordinator_name(job.id.name, seen.status.term or 0)
    there = {pod.name for pod in seen.pods}
    return None if name in there | seen.granted | seen.absent else name
