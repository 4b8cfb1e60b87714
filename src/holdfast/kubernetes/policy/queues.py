"""Decides what a job waits for before it may have pods: quota of a Kueue queue, or machines. Pure.

A job's quota is split into several Workloads: one for the coordinator, the spares and the minimum number of nodes (the base), and
one for each further node. Kueue admits and evicts each of them separately, so a job can lose or gain one node without a restart.

Rules that hold for every plan:
- A pod is created only for a node whose Workload is admitted, and names that Workload.
- Quota is given back only when the pods that used it are gone. Otherwise other jobs would be admitted beside them.
- While nothing is known of the Workloads, a running job continues. It is never ended because a watch was interrupted.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from holdfast.kubernetes.objects.kueue import WorkloadSeen
from holdfast.kubernetes.objects.pod import PodSeen, TerminationMessage
from holdfast.kubernetes.objects.resource import HoldfastJob
from holdfast.kubernetes.objects.status import JobStatus, WaitingForMachines, from_timestamp, timestamp
from holdfast.kubernetes.policy.plan import (
    DeleteWorkload,
    FinishWorkload,
    MakeWorkload,
    Observed,
    QueueAction,
    ReleaseQuota,
    TellReady,
)
from holdfast.protocol.notices import NoticeCause

TAKEN_BACK = "its quota is taken back"
"""First words of the reason for which such a run is stopped."""
MOST_ASKED = 64
"""Number of Workloads that one plan creates, at most."""


def why_held(seen: Observed, job: HoldfastJob) -> str | None:
    """Why the job may have no pods now; None: it may have some."""
    if not job.queue:
        return None
    base = base_of(seen)
    runs = bool(seen.pods)
    if seen.workloads is None:
        return None if runs else f"nothing is known of its Workloads: {seen.no_workloads or 'not listed yet'}"
    if base is not None and base.grants:
        return None
    if not runs:
        return f"it waits in the queue {job.queue!r}" + (f": {base.why_not}" if base and base.why_not else "")
    if base is None or base.deleting:
        return f"{TAKEN_BACK}: its Workload was deleted"
    return f"{TAKEN_BACK}: {base.why_not or 'it is not admitted any more'}"


def was_taken_back(termination_message: TerminationMessage, job: HoldfastJob) -> bool:
    """Whether a run was stopped because its quota was taken back, so that it continues once it is admitted again."""
    stopped = termination_message.outcome == "stopped"
    return stopped and bool(job.queue) and termination_message.cause == NoticeCause.PREEMPTION


def base_of(seen: Observed) -> WorkloadSeen | None:
    """The base Workload, without which nothing of the job may run; None: there is none."""
    return next((one for one in (seen.workloads or {}).values() if one.number is None), None)


def further(seen: Observed) -> list[WorkloadSeen]:
    """The Workloads of further nodes, sorted by number."""
    all_ = (seen.workloads or {}).values()
    return sorted((one for one in all_ if one.number is not None), key=lambda one: one.number or 0)


def nodes_of_base(job: HoldfastJob) -> int:
    """Number of nodes in the base Workload. It includes the spares, so that replacing a lost node by one needs no admission."""
    return job.spec.fewest + job.spec.spares


# ------------------------------------------------------------ requests to Kueue


def ask(seen: Observed, job: HoldfastJob) -> Iterator[QueueAction]:
    """Requests for a job without pods: its base Workload, which is to be admitted."""
    if seen.workloads is None:
        return
    base = base_of(seen)
    # Without the Workloads of further nodes: Kueue may admit them before the base, and such a node alone is of no use.
    yield from (_delete(one) for one in further(seen) if not one.deleting)
    if base is None:
        yield MakeWorkload(None, nodes_of_base(job))
    elif base.deleting:
        return
    elif base.finished or not _is_for(base, job):
        # Size, queue and topology of a Workload cannot be changed while it holds quota, so it is replaced.
        yield _delete(base)
    elif base.reserved and not base.grants and (base.evicted is not None or not base.active):
        yield ReleaseQuota(base.name)


def _is_for(base: WorkloadSeen, job: HoldfastJob) -> bool:
    same = base.queue == job.queue and base.topology == job.spec.scheduling.queue_topology
    return same and base.nodes == nodes_of_base(job)


def ask_on(seen: Observed, job: HoldfastJob, wanted: int, here: list[PodSeen]) -> Iterator[QueueAction]:
    """Requests for a running job: Workloads for further nodes, and updates of those that exist.

    Args:
        wanted: number of nodes in total, spares included.
        here: pods of the nodes that count, which are neither lost nor leaving.
    """
    base = base_of(seen)
    if seen.workloads is None or base is None:
        return
    more, needed = further(seen), max(0, wanted - base.nodes)
    taken = {one.number for one in more}
    free = (number for number in range(1, needed + len(taken) + 1) if number not in taken)
    for _ in range(min(MOST_ASKED, needed - len(more))):
        yield MakeWorkload(next(free), 1)
    yield from _too_many(more, len(more) - needed, base.nodes, here)
    for one in more:
        if one.reserved and not one.grants and not one.deleting and not _uses(seen, one):
            yield _delete(one) if one.finished else ReleaseQuota(one.name)
    yield from _ready(seen, base, more)


def _too_many(
    more: list[WorkloadSeen], count: int, of_base: int, here: list[PodSeen]
) -> Iterator[QueueAction]:
    """Deletes surplus Workloads of a job that has become smaller, but none whose quota nodes use until the coordinator has
    released them.

    Args:
        count: number of surplus Workloads.
        of_base: nodes of the base Workload.
    """
    used = Counter(pod.workload for pod in here)
    granted = of_base + sum(one.grants for one in more)
    for one in sorted(more, key=lambda one: (one.grants, used[one.name], -(one.number or 0)))[
        : max(0, count)
    ]:
        if one.grants and granted - 1 < len(here):
            return
        granted -= one.grants
        if not one.deleting:
            yield _delete(one)


def _uses(seen: Observed, one: WorkloadSeen) -> bool:
    """Whether a pod of this Workload may still run."""
    return any(pod.workload == one.name and not pod.ended for pod in seen.pods)


def _ready(seen: Observed, base: WorkloadSeen, more: list[WorkloadSeen]) -> Iterator[QueueAction]:
    """Reports the readiness of Workloads, once for each. It is never withdrawn: the job recovers from the loss of a node by
    itself, and Kueue must not evict the others because of it."""
    if seen.said is None:
        return
    alive = seen.said.alive
    joined = {pod.workload for pod in seen.pods if pod.name in alive}
    if base.grants and not base.ready and seen.said.phase == "running":
        yield TellReady(base.name)
    yield from (TellReady(one.name) for one in more if one.grants and not one.ready and one.name in joined)


def end(seen: Observed, succeeded: bool) -> Iterator[QueueAction]:
    """Requests for a job that is over. They free its quota at once, since its object may stay for years."""
    yield from (_delete(one) for one in further(seen) if not one.deleting)
    base = base_of(seen)
    if base is not None and not base.finished and not base.deleting:
        yield FinishWorkload(base.name, succeeded)


def give_up(seen: Observed) -> Iterator[QueueAction]:
    """Requests for a job that a person has suspended."""
    yield from (_delete(one) for one in (seen.workloads or {}).values() if not one.deleting)


def _delete(one: WorkloadSeen) -> DeleteWorkload:
    return DeleteWorkload(name=one.name, uid=one.uid)


# ------------------------------------------------------------ what Kueue has granted


class Granted(msgspec.Struct, frozen=True):
    """How many nodes the job may have, and which Workloads' quota the next ones use."""

    nodes: int
    free: tuple[str, ...]
    """Names of Workloads, one for each node that may be created; a name occurs once for each free place."""


def granted(seen: Observed, job: HoldfastJob, here: Iterable[PodSeen]) -> Granted | None:
    """The nodes that Kueue's quota allows. here: pods of the nodes that count. None: there is no limit."""
    if not job.queue:
        return None
    there = list(here)
    if seen.workloads is None:
        # No node leaves, and new ones wait until the Workloads are known.
        return Granted(len(there), ())
    base, more = base_of(seen), further(seen)
    gives = [one for one in (base, *more) if one is not None and one.grants]
    nodes = sum(one.nodes for one in gives)
    used = Counter(pod.workload for pod in there)
    free = [one.name for one in gives for _ in range(one.nodes - used[one.name])]
    return Granted(nodes, tuple(free[: max(0, nodes - len(there))]))


def taken_back(seen: Observed, job: HoldfastJob) -> dict[str, str]:
    """Nodes whose quota Kueue takes back, each with the reason. The job continues without them."""
    if not job.queue:
        return {}
    return {
        pod.name: f"Kueue takes back the quota of {pod.workload}: {why}"
        for pod in seen.pods
        if (why := why_taken_back(seen, pod)) is not None
    }


def why_taken_back(seen: Observed, pod: PodSeen) -> str | None:
    """Why Kueue takes back the quota of this further node; None: it does not, or that is unknown."""
    own = (seen.workloads or {}).get(pod.workload)
    if pod.coordinator or own is None or own.number is None or own.grants:
        return None
    return own.why_not or "it is not admitted any more"


def misplaced(seen: Observed) -> dict[str, str]:
    """Nodes on a machine that Kueue has since assigned to another Workload, whose pod waits for it; each with the reason.

    Their own Workload has another machine by now: Kueue's choice changed while their pod was being created, or a person deleted
    the Workload and it was created again.
    """
    waits = {
        pod.chosen: pod.workload
        for pod in seen.pods
        if pod.unschedulable and pod.stays and pod.machine is None
    }
    known, found = seen.workloads or {}, dict[str, str]()
    for pod in seen.pods:
        if pod.coordinator or not pod.stays or not pod.chosen or waits.get(pod.machine or "") is None:
            continue
        own, other = known.get(pod.workload), waits[pod.machine or ""]
        # Not if Kueue has assigned both to this machine: each would then make room for the other, without end.
        if other != pod.workload and own is not None and own.machines and pod.machine not in own.machines:
            found[pod.name] = f"Kueue has given {pod.machine} to {other}"
    return found


def crowded(seen: Observed, here: list[PodSeen]) -> list[PodSeen]:
    """Pods that wait for a machine of their Workload although other pods use all of its machines.

    Such a pod was created to replace a node that was to leave but stays. It would wait for ever, while another Workload may have
    a machine for it.
    """
    used = Counter(pod.workload for pod in here)
    found: list[PodSeen] = []
    for one in (seen.workloads or {}).values():
        waits = sorted(
            (pod for pod in here if pod.gated and pod.workload == one.name), key=lambda pod: -pod.number
        )
        found += waits[: max(0, used[one.name] - one.nodes)]
    return found


def beyond(seen: Observed, allowed: Granted | None, here: list[PodSeen]) -> dict[str, str]:
    """Nodes beyond what Kueue grants, each with the reason.

    Those whose Workload is gone come first, then the newest, so that the same nodes are told each time.
    """
    if allowed is None or seen.workloads is None or seen.said is None:
        return {}
    # If the coordinator wants fewer nodes, it chooses by itself which of them leave.
    count = min(len(here), seen.said.wanted) - allowed.nodes
    known = seen.workloads
    newest = sorted(here, key=lambda pod: (pod.workload in known, -pod.number))
    return {pod.name: "Kueue grants fewer nodes" for pod in newest[: max(0, count)]}


# ------------------------------------------------------------ without a queue: jobs that hold too few machines to start
# Kubernetes' scheduler binds pods one by one. Two jobs that start at the same time can each hold half of the machines that both
# need, and neither would give any back, until somebody deletes one of the jobs. So a job that has had too few machines for a
# while gives all of them back and tries again later. The times are drawn from its uid, so that two jobs do not do so
# simultaneously.
#
# If a scheduler binds all nodes of a PodGroup together, a job has too few only if it loses one while it starts.

MOST_BACK_OFF_S = 600.0


def waiting_status(seen: Observed, job: HoldfastJob, status: JobStatus) -> JobStatus:
    """The status with an updated `waiting`: how many machines the starting job holds, and since when. If `until` is set in it,
    the job is to give its machines back now."""
    scheduling = job.spec.scheduling
    is_asked = scheduling.give_back_seconds or scheduling.gang is not None
    if job.queue or not is_asked or has_trained(seen, status):
        return msgspec.structs.replace(status, waiting=None)
    bound = _bound(seen)
    before = status.waiting
    # The time starts again with each change, so that a job waits for an autoscaler that adds machines one by one.
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
    """Seconds for which the job still keeps the machines that it has; None: they are none, or enough, or it never gives them
    back."""
    waiting = status.waiting
    nodes = [pod for pod in seen.pods if not pod.coordinator and pod.stays]
    # Only if the scheduler has reported a pod as unschedulable: pods that it has not looked at may get machines at once.
    gives_back = job.spec.scheduling.give_back_seconds > 0
    in_vain = gives_back and 0 < _bound(seen) < job.spec.fewest and any(pod.unschedulable for pod in nodes)
    since_s = from_timestamp(waiting.since) if waiting is not None else None
    if waiting is None or since_s is None or not in_vain:
        return None
    patience_s = job.spec.scheduling.give_back_seconds * (1 + _drawn(job, waiting.tries, "wait"))
    return since_s + patience_s - seen.now_s


def counts_from_s(seen: Observed, job: HoldfastJob) -> float | None:
    """When the time within which the job must complete its first step began, in UTC; None: that time does not run now."""
    known = seen.status.waiting
    # Time in a scheduler's queue does not count, just as with Kueue. It ends when the group is bound.
    if job.spec.scheduling.gang is not None:
        return None if known is None or known.bound < job.spec.fewest else from_timestamp(known.since)
    # Includes earlier tries that had too few machines.
    first = None if known is None else known.first
    return from_timestamp(first or seen.status.start_time)


def back_off_s(seen: Observed) -> float | None:
    """Seconds for which the job must not ask for machines; None: it may ask."""
    waiting = seen.status.waiting
    until_s = from_timestamp(waiting.until) if waiting is not None else None
    return None if until_s is None or until_s <= seen.now_s else until_s - seen.now_s


def why_back_off(seen: Observed, job: HoldfastJob) -> str:
    """Why the job asks for no machines, for people. Only while `back_off_s` is not None."""
    waiting = seen.status.waiting
    assert waiting is not None
    return (
        f"{waiting.bound} of {job.spec.fewest} nodes had a machine, and gave them back so that another job can use them; "
        f"the next try is at {waiting.until}"
    )


def _bound(seen: Observed) -> int:
    return sum(not pod.coordinator and pod.stays and pod.machine is not None for pod in seen.pods)


def has_trained(seen: Observed, status: JobStatus) -> bool:
    """Whether the job has completed a step, by the coordinator's report or, if it does not answer, by an earlier one in the
    status."""
    trains = seen.said is not None and bool(seen.said.step)
    return trains or (status.progress is not None and status.progress.step is not None)


def _drawn(job: HoldfastJob, tries: int, what: str) -> float:
    """A number from 0 to 1 that is the same for every operator."""
    return zlib.crc32(f"{job.id.uid}/{tries}/{what}".encode()) / 2**32
