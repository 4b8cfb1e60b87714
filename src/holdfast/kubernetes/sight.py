"""Pods that the watch does not show, although they may be there. Pure.

Pods are watched by a label, and anybody can take a label away. The watch then says that the pod is gone, and an operator that
starts never hears of it. A node that trains must not count as lost for that. So a pod that nobody deleted is asked for by its
name, and it gets its labels back.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.kubernetes import names
from holdfast.kubernetes.actions import Action, FindPod, LabelPod
from holdfast.kubernetes.observed import Observed
from holdfast.kubernetes.resource import HoldfastJob
from holdfast.kubernetes.status import ConditionType

OVER = (ConditionType.SUSPENDED, ConditionType.COMPLETE, ConditionType.FAILED)
"""Nothing of the job runs."""


def look(seen: Observed, job: HoldfastJob | None) -> Iterator[Action]:
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
    alive = {name for name, node in seen.said.nodes.items() if node.alive}
    # An agent that somebody started by hand has another name, and no pod.
    mine = {name for name in alive if names.number_of(job.id.name, name) is not None}
    return frozenset(mine - {pod.name for pod in seen.pods} - seen.absent)


def unseen_coordinator(seen: Observed, job: HoldfastJob) -> str | None:
    """The newest one's name, where it may be there."""
    if not seen.status.run or any(seen.status.holds(type_) for type_ in OVER):
        return None
    name = names.coordinator_name(job.id.name, seen.status.term or 0)
    there = {pod.name for pod in seen.pods}
    return None if name in there | seen.granted | seen.absent else name
