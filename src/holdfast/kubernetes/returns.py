"""Nodes whose agent has ended, and which the kubelet starts again in their pods. Pure.

A pod has what its agent kept in memory: snapshots, and a copy of the ledger. Another pod has neither, and it needs a machine. So a
pod is kept for some seconds after its agent's end. Its node counts as there meanwhile, and no other one is made in its place.
"""

from __future__ import annotations

from holdfast.kubernetes import queues
from holdfast.kubernetes.observed import Observed, PodSeen
from holdfast.protocol.engine_orders import ReleaseNode

RESTART_S = 20.0
"""So long until its container runs again. The kubelet starts it at once the first time in ten minutes, and sees its end after a second."""
RETURN_S = 60.0
"""So long until its agent has joined, where its container runs again or no node is left. In the latter case the pods have the only
copies of what was not written to a durable tier."""


def returning(seen: Observed) -> frozenset[str]:
    """Nodes that the coordinator gave up, and whose pods are kept for now."""
    orders = seen.said.orders if seen.said is not None else ()
    ended = [one.node for one in orders if isinstance(one, ReleaseNode) and one.may_return]
    if not ended:
        return frozenset()
    pods = {pod.name: pod for pod in seen.pods if not pod.coordinator}
    return frozenset(name for name in ended if name in pods and _left_s(seen, pods[name]) > 0)


def look_again_s(seen: Observed) -> float | None:
    """After how long the first of them is given up; None: there is none."""
    names = returning(seen)
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
