"""The size that a job's object asks its coordinator for. Pure.

Who changed the size last has it: the object says something only when it has changed since the coordinator was asked the last
time. A `holdfast resize` in between stands.
"""

from __future__ import annotations

from holdfast.kubernetes.observed import Observed
from holdfast.kubernetes.resource import HoldfastJob


def asked_nodes(seen: Observed, job: HoldfastJob) -> int:
    """The size that the coordinator was asked for the last time, as far as is known."""
    accepted = seen.accepted.spec.nodes if seen.accepted is not None else job.spec.nodes
    told = (seen.asked_nodes, seen.status.asked_nodes)
    return next((nodes for nodes in told if nodes is not None), accepted)


def size_to_ask(seen: Observed, job: HoldfastJob) -> int | None:
    """What the coordinator is to be asked for; None: it was.

    It is written into the status first. An operator that is killed between the question and its record would leave another
    size with the coordinator than the next operator believes, and an object that is changed back would change nothing.
    """
    # Asked for, perhaps by an operator before this one, and nobody has written down that it was heard.
    unsure = seen.asked_nodes is None and seen.status.asking_nodes is not None
    return job.spec.nodes if unsure or job.spec.nodes != asked_nodes(seen, job) else None
