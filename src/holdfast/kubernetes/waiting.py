"""Machines that a job holds without being able to begin: how long, and when it asks for them anew. Pure.

Kubernetes' scheduler binds pods one by one. Two jobs that start at once can each hold half of the machines that both need,
and neither gives one back: both stand until somebody deletes one. So a job that has too few machines for a while gives all of
them back, and tries again later. The times are drawn from its uid, so two jobs do not do it at the same moment.

Where a scheduler binds all nodes of a PodGroup together, a job has too few only when it loses one while it begins.
"""

from __future__ import annotations

import zlib

import msgspec

from holdfast.kubernetes.observed import Observed
from holdfast.kubernetes.resource import HoldfastJob
from holdfast.kubernetes.status import JobStatus, WaitingForMachines
from holdfast.kubernetes.times import from_timestamp, timestamp

MOST_BACK_OFF_S = 600.0


def looked(seen: Observed, job: HoldfastJob, status: JobStatus) -> JobStatus:
    """The status with what is remembered of a start; `until` in it means that the pods are to be given back now."""
    scheduling = job.spec.scheduling
    is_asked = scheduling.give_back_seconds or scheduling.gang is not None
    if job.queue or not is_asked or has_trained(seen, status):
        return msgspec.structs.replace(status, waiting=None)
    bound = _bound(seen)
    before = status.waiting
    # Counted anew when one more comes: machines that an autoscaler adds one by one are waited for.
    if before is None or before.bound != bound:
        first = status.start_time if before is None else before.first
        tries = 0 if before is None else before.tries
        now = WaitingForMachines(bound=bound, since=timestamp(seen.now_s), tries=tries, first=first)
        return msgspec.structs.replace(status, waiting=now)
    if (left_s := left_of_patience_s(seen, job, status)) is None or left_s > 0:
        return status
    after_s = min(MOST_BACK_OFF_S, job.spec.scheduling.give_back_seconds * 2.0**before.tries)
    until_s = seen.now_s + after_s * (0.5 + _drawn(job, before.tries, "off"))
    given_back = msgspec.structs.replace(before, tries=before.tries + 1, until=timestamp(until_s))
    return msgspec.structs.replace(status, waiting=given_back)


def left_of_patience_s(seen: Observed, job: HoldfastJob, status: JobStatus) -> float | None:
    """How long it still waits with the machines that it has; None: it holds none in vain."""
    waiting = status.waiting
    nodes = [pod for pod in seen.pods if not pod.coordinator and pod.stays]
    # The scheduler has to have said so: pods of which it knows nothing yet will get their machines in a moment.
    gives_back = job.spec.scheduling.give_back_seconds > 0
    in_vain = gives_back and 0 < _bound(seen) < job.spec.fewest and any(pod.unschedulable for pod in nodes)
    since_s = from_timestamp(waiting.since) if waiting is not None else None
    if waiting is None or since_s is None or not in_vain:
        return None
    patience_s = job.spec.scheduling.give_back_seconds * (1 + _drawn(job, waiting.tries, "wait"))
    return since_s + patience_s - seen.now_s


def counts_from_s(seen: Observed, job: HoldfastJob) -> float | None:
    """From when on the job has to come to its first step; None: that time does not pass now."""
    known = seen.status.waiting
    # As with Kueue, time in a scheduler's queue does not count. It ends when the group is bound.
    if job.spec.scheduling.gang is not None:
        return None if known is None or known.bound < job.spec.fewest else from_timestamp(known.since)
    # With the tries that had too few machines.
    first = None if known is None else known.first
    return from_timestamp(first or seen.status.start_time)


def back_off_s(seen: Observed) -> float | None:
    """How long nothing is asked for; None: it may ask."""
    waiting = seen.status.waiting
    until_s = from_timestamp(waiting.until) if waiting is not None else None
    return None if until_s is None or until_s <= seen.now_s else until_s - seen.now_s


def why_back_off(seen: Observed, job: HoldfastJob) -> str:
    """For people."""
    waiting = seen.status.waiting
    assert waiting is not None
    return (
        f"{waiting.bound} of {job.spec.fewest} nodes had a machine, and gave them back so that another job can use them; "
        f"the next try is at {waiting.until}"
    )


def _bound(seen: Observed) -> int:
    return sum(not pod.coordinator and pod.stays and pod.machine is not None for pod in seen.pods)


def has_trained(seen: Observed, status: JobStatus) -> bool:
    """As the coordinator says now, or has said: one that does not answer has not undone it."""
    told = seen.said is not None and bool(seen.said.step)
    return told or (status.progress is not None and status.progress.step is not None)


def _drawn(job: HoldfastJob, tries: int, what: str) -> float:
    """Between 0 and 1, the same for every operator that looks."""
    return zlib.crc32(f"{job.id.uid}/{tries}/{what}".encode()) / 2**32
