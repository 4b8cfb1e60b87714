"""Which of a job's pods are lost although they are there, and which are there although they look lost. Pure.

A coordinator that the operator cannot reach may serve the job; a node whose agent ended may come back with all that it had in memory;
a pod that the watch does not show may train. A wrong answer costs the job a restart, or its only copies of a state.
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
# That the operator cannot reach it proves nothing: the cut may be on the operator's side, and the job may train on. So somebody else
# has to say the same: the kubelet of its machine, which is silent, or most of the nodes, which have lost it.

VOTERS = 31
"""Nodes that are asked at a time: a job of thousands must not be asked as a whole. An odd number has no tie."""
MISSED_S = 4.0
"""So long nodes must have missed it at least: a process that dies is started again in its container within a second or two."""
START_S = 30.0
"""The same for a coordinator that may only have begun to start, in its place or in a new pod."""
UNHEARD_S = 60.0
"""So long nobody at all may reach a coordinator. Nodes may be busy for a while with the checks before they join."""
LAST_WORD_S = 300.0
"""The same where no node runs: the job may be over, and the coordinator about to say so."""


def why_lost(seen: Observed) -> str | None:
    """For people. None: it is not lost, or nothing is known."""
    pod = newest_of(seen.pods, seen.status.term)
    if seen.said is not None or pod is None or pod.ended:
        return None
    # Also where it never started: until Kubernetes calls a machine not ready, its scheduler binds pods to it.
    machine = seen.machines.get(pod.machine or "")
    if machine is not None and not machine.ready:
        return "its machine does not answer"
    if not _runs(pod):
        # What does not run is the kubelet's to start. What keeps it from that would do so elsewhere, too.
        return None
    if _vote_s(seen, pod) == 0:
        return "most nodes have lost it"
    if _is_unheard(seen, pod):
        return "nobody has reached it"
    return None


def loss_look_again_s(seen: Observed) -> float | None:
    """After how long most nodes may have missed it for long enough. None: they have, or most do not miss it."""
    pod = newest_of(seen.pods, seen.status.term)
    if seen.said is not None or pod is None or pod.ended or not _runs(pod):
        return None
    return _vote_s(seen, pod) or None


def newest_of(pods: tuple[PodSeen, ...], term: int | None) -> PodSeen | None:
    """The coordinator's pod of this term."""
    return next((pod for pod in pods if pod.coordinator and pod.number == term), None)


def voters(pods: tuple[PodSeen, ...], run: int | None) -> list[PodSeen]:
    """The nodes of this run that can say whether they hear it."""
    nodes = (pod for pod in pods if not pod.coordinator and pod.run == run and pod.stays)
    return [pod for pod in nodes if pod.ready and pod.address is not None]


def heard_restarts(seen: Observed, coordinator: PodSeen) -> int | None:
    """How often its container had been started anew when it last answered; None: it never did. It is in the status, since the operator
    that heard it may be lost with it, on the same machine."""
    heard = seen.status.coordinator
    return heard.restarts if heard is not None and heard.pod == coordinator.name else None


def _runs(coordinator: PodSeen) -> bool:
    return coordinator.phase == "Running" and coordinator.stays and coordinator.waits is None


def _vote_s(seen: Observed, coordinator: PodSeen) -> float | None:
    """After how long more than half of the nodes that were asked have missed it for long enough, if nothing changes; 0: they have."""
    if seen.job is None:
        return None
    patience_s = max(MISSED_S, 2 * seen.job.spec.timing.detection_s)
    if coordinator.restarts != heard_restarts(seen, coordinator):
        patience_s = max(patience_s, START_S)
    # Nodes beside it are lost together with its machine. Their silence would count for a coordinator that is gone.
    beside = {pod.name for pod in seen.pods if pod.machine == coordinator.machine}
    asked = [one for name, one in seen.hearings.items() if one is not None or name not in beside]
    left_s = sorted(x for one in asked if (x := _vote_left_s(one, seen, coordinator, patience_s)) is not None)
    # Of two halves of a cut cluster at most one has more than half of the nodes.
    most = len(asked) // 2 + 1
    return left_s[most - 1] if len(left_s) >= most else None


def _is_unheard(seen: Observed, coordinator: PodSeen) -> bool:
    """This operator asks it in vain, and no node has joined. So it serves nobody, and its end costs nothing."""
    nodes = [pod for pod in seen.pods if not pod.coordinator and pod.run == coordinator.run]
    tries = any(pod.phase == "Failed" or (pod.phase == "Running" and pod.waits is None) for pod in nodes)
    limit_s = UNHEARD_S if tries else LAST_WORD_S
    return not any(pod.ready for pod in nodes) and seen.silent_s >= limit_s


def _vote_left_s(
    one: Hearing | None, seen: Observed, coordinator: PodSeen, patience_s: float
) -> float | None:
    """After how long this node has missed it for long enough; None: it does not miss it, as far as is known."""
    if one is None or one.missing_s is None:
        return None
    if one.term == coordinator.number:
        return max(0.0, patience_s - one.missing_s)
    # It never met this term, and may miss the one before. A coordinator that has just begun to start would be followed by
    # another one at once, and that one by the next.
    return max(0.0, max(patience_s, START_S) - min(one.missing_s, seen.silent_s))


# ------------------------------------------------------------ nodes whose agent ends again and again before it joins
# If agents of the job work elsewhere, the machine is at fault: another one is asked for, and the pod that crashes goes when its
# replacement has a machine. If no agent of the job works anywhere, the image or the script is at fault: no machine is blamed,
# and a job that has not trained ends.

RESTARTS_OF_A_MACHINE = 3
"""So often the kubelet starts an agent anew before another machine is asked for: about 30 seconds, by the kubelet's back-off."""
RESTARTS_OF_A_JOB = 5
"""So often before a job ends of which no agent works: about three minutes. A failure that passes, as of a network that is not
there yet, is over by then."""
NO_HOLDFAST = re.compile(
    """No module named '?holdfast|exec: ".*(executable file not found|no such file or directory)"""
)
"""What Python and container runtimes say of an image that lacks Holdfast, or Python. A mount that is missing is another matter."""


def crashing_nodes(seen: Observed) -> Mapping[str, str]:
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


# ------------------------------------------------------------ nodes whose agent has ended, and which the kubelet starts again in their pods
# A pod has what its agent kept in memory: snapshots, and a copy of the ledger. Another pod has neither, and it needs a machine. So
# a pod is kept for some seconds after its agent's end. Its node counts as there meanwhile, and no other one is made in its place.

RESTART_S = 20.0
"""So long until its container runs again. The kubelet starts it at once the first time in ten minutes, and sees its end after a second."""
RETURN_S = 60.0
"""So long until its agent has joined, where its container runs again or no node is left. In the latter case the pods have the only
copies of what was not written to a durable tier."""


def returning_nodes(seen: Observed) -> frozenset[str]:
    """Nodes that the coordinator gave up, and whose pods are kept for now."""
    orders = seen.said.orders if seen.said is not None else ()
    ended = [one.node for one in orders if isinstance(one, ReleaseNode) and one.may_return]
    if not ended:
        return frozenset()
    pods = {pod.name: pod for pod in seen.pods if not pod.coordinator}
    return frozenset(name for name in ended if name in pods and _left_s(seen, pods[name]) > 0)


def returns_look_again_s(seen: Observed) -> float | None:
    """After how long the first of them is given up; None: there is none."""
    names = returning_nodes(seen)
    return min((_left_s(seen, pod) for pod in seen.pods if pod.name in names), default=None)


def _left_s(seen: Observed, pod: PodSeen) -> float:
    machine = seen.machines.get(pod.machine or "")
    # On a machine that is cut off, or is to be emptied, nothing is started again.
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
    # Others wait for its quota, which is given back when the pod is gone.
    if queues.why_taken_back(seen, pod) is not None:
        return 0.0
    # It has ended before, and the kubelet takes its time: another machine is the faster one.
    if pod.backs_off:
        return 0.0
    return (RETURN_S if pod.restarts > restarts else RESTART_S) - for_s


# ------------------------------------------------------------ pods that the watch does not show
# Pods are watched by a label, and anybody can take a label away. The watch then says that the pod is gone, and an operator that
# starts never hears of it. A node that trains must not count as lost for that. So a pod that nobody deleted is asked for by its
# name, and it gets its labels back.

OVER = (ConditionType.SUSPENDED, ConditionType.COMPLETE, ConditionType.FAILED)
"""Nothing of the job runs."""


def missing_from_sight(seen: Observed, job: HoldfastJob | None) -> Iterator[Action]:
    """For pods that the watch does not show. They are seen again from then on."""
    unsure = {pod.name for pod in seen.pods if pod.unsure}
    unseen = unseen_nodes(seen, job) if job is not None else frozenset()
    yield from (FindPod(name) for name in sorted(unsure | unseen))
    for pod in seen.pods:
        if pod.mislabelled and not pod.unsure:
            yield LabelPod(name=pod.name, uid=pod.uid)


def unseen_nodes(seen: Observed, job: HoldfastJob) -> frozenset[str]:
    """Those that the coordinator has and the operator does not, unless the API server has said that they are not there."""
    if seen.said is None:
        return frozenset()
    # An agent that somebody started by hand has another name, and no pod.
    mine = {name for name in seen.said.alive if names.number_of(job.id.name, name) is not None}
    return frozenset(mine - {pod.name for pod in seen.pods} - seen.absent)


def unseen_coordinator(seen: Observed, job: HoldfastJob) -> str | None:
    """The newest one's name, where it may be there."""
    if not seen.status.run or any(seen.status.holds(type_) for type_ in OVER):
        return None
    name = names.coordinator_name(job.id.name, seen.status.term or 0)
    there = {pod.name for pod in seen.pods}
    return None if name in there | seen.granted | seen.absent else name
