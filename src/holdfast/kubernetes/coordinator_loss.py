"""Whether the coordinator is lost although its pod is there. Pure.

That the operator cannot reach it proves nothing: the cut may be on the operator's side, and the job may train on. So somebody else
has to say the same: the kubelet of its machine, which is silent, or most of the nodes, which have lost it.
"""

from __future__ import annotations

from holdfast.kubernetes.observed import Observed, PodSeen
from holdfast.protocol.network.endpoint import Hearing

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


def look_again_s(seen: Observed) -> float | None:
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
    patience_s = max(MISSED_S, 2 * seen.job.spec.timing.detection_milliseconds / 1000)
    if coordinator.restarts != heard_restarts(seen, coordinator):
        patience_s = max(patience_s, START_S)
    # Nodes beside it are lost together with its machine. Their silence would count for a coordinator that is gone.
    beside = {pod.name for pod in seen.pods if pod.machine == coordinator.machine}
    asked = [one for name, one in seen.hearings.items() if one is not None or name not in beside]
    left_s = sorted(x for one in asked if (x := _left_s(one, seen, coordinator, patience_s)) is not None)
    # Of two halves of a cut cluster at most one has more than half of the nodes.
    most = len(asked) // 2 + 1
    return left_s[most - 1] if len(left_s) >= most else None


def _is_unheard(seen: Observed, coordinator: PodSeen) -> bool:
    """This operator asks it in vain, and no node has joined. So it serves nobody, and its end costs nothing."""
    nodes = [pod for pod in seen.pods if not pod.coordinator and pod.run == coordinator.run]
    tries = any(pod.phase == "Failed" or (pod.phase == "Running" and pod.waits is None) for pod in nodes)
    limit_s = UNHEARD_S if tries else LAST_WORD_S
    return not any(pod.ready for pod in nodes) and seen.silent_s >= limit_s


def _left_s(one: Hearing | None, seen: Observed, coordinator: PodSeen, patience_s: float) -> float | None:
    """After how long this node has missed it for long enough; None: it does not miss it, as far as is known."""
    if one is None or one.missing_s is None:
        return None
    if one.term == coordinator.number:
        return max(0.0, patience_s - one.missing_s)
    # It never met this term, and may miss the one before. A coordinator that has just begun to start would be followed by
    # another one at once, and that one by the next.
    return max(0.0, max(patience_s, START_S) - min(one.missing_s, seen.silent_s))
