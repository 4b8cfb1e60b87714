"""What a job waits for before it may have pods: quota of a Kueue queue, or machines. What it asks for, and what it may have. Pure.

Its quota is in several Workloads: one for the coordinator, the spares and the nodes that cannot be missed, and one for each
further node. Kueue admits and takes back each by itself, so a job loses one node or grows by one without a restart.

Rules that hold for every plan:
- A pod is made only for a node whose Workload is admitted, and names it.
- Quota is given back when the pods that used it are gone, and not before: until then others would be let in beside them.
- While nothing is known of the Workloads, a job that runs goes on. It is never ended because a watch was cut.
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
"""Begins the reason with which such a run is stopped."""
MOST_ASKED = 64
"""Workloads that one plan makes."""


def why_held(seen: Observed, job: HoldfastJob) -> str | None:
    """Why the job may have no pods now; None: it may."""
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
    """Whether a run was stopped because its quota was taken back, and goes on when it is admitted again."""
    stopped = termination_message.outcome == "stopped"
    return stopped and bool(job.queue) and termination_message.cause == NoticeCause.PREEMPTION


def base_of(seen: Observed) -> WorkloadSeen | None:
    """The Workload without which nothing runs."""
    return next((one for one in (seen.workloads or {}).values() if one.number is None), None)


def further(seen: Observed) -> list[WorkloadSeen]:
    """Those of further nodes, by number."""
    all_ = (seen.workloads or {}).values()
    return sorted((one for one in all_ if one.number is not None), key=lambda one: one.number or 0)


def nodes_of_base(job: HoldfastJob) -> int:
    """Spares are in it: a loss that a spare makes good needs no new admission."""
    return job.spec.fewest + job.spec.spares


# ------------------------------------------------------------ what is asked of Kueue


def ask(seen: Observed, job: HoldfastJob) -> Iterator[QueueAction]:
    """Of a job without pods: one Workload that is to be admitted."""
    if seen.workloads is None:
        return
    base = base_of(seen)
    # The others with it. They are admitted in any order, and a node alone is of no use.
    yield from (_delete(one) for one in further(seen) if not one.deleting)
    if base is None:
        yield MakeWorkload(None, nodes_of_base(job))
    elif base.deleting:
        return
    elif base.finished or not _is_for(base, job):
        # Its size, queue and topology cannot be changed while it holds quota, so another one takes its place.
        yield _delete(base)
    elif base.reserved and not base.grants and (base.evicted is not None or not base.active):
        yield ReleaseQuota(base.name)


def _is_for(base: WorkloadSeen, job: HoldfastJob) -> bool:
    same = base.queue == job.queue and base.topology == job.spec.scheduling.queue_topology
    return same and base.nodes == nodes_of_base(job)


def ask_on(seen: Observed, job: HoldfastJob, wanted: int, here: list[PodSeen]) -> Iterator[QueueAction]:
    """Of a job that runs: Workloads for further nodes, and what Kueue is to know of all.

    Args:
        wanted: nodes altogether.
        here: those that count: neither lost nor leaving.
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
    """The job has become smaller. What its nodes still use is kept until the coordinator has let them go."""
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
    """Said once and never taken back: a node that is lost is the job's own affair, and no reason to evict all others."""
    if seen.said is None:
        return
    alive = seen.said.alive
    joined = {pod.workload for pod in seen.pods if pod.name in alive}
    if base.grants and not base.ready and seen.said.phase == "running":
        yield TellReady(base.name)
    yield from (TellReady(one.name) for one in more if one.grants and not one.ready and one.name in joined)


def end(seen: Observed, succeeded: bool) -> Iterator[QueueAction]:
    """Of a job that is over: its quota is free at once, the object may stay for years."""
    yield from (_delete(one) for one in further(seen) if not one.deleting)
    base = base_of(seen)
    if base is not None and not base.finished and not base.deleting:
        yield FinishWorkload(base.name, succeeded)


def give_up(seen: Observed) -> Iterator[QueueAction]:
    """Of a job that a person has suspended."""
    yield from (_delete(one) for one in (seen.workloads or {}).values() if not one.deleting)


def _delete(one: WorkloadSeen) -> DeleteWorkload:
    return DeleteWorkload(name=one.name, uid=one.uid)


# ------------------------------------------------------------ what it may have


class Granted(msgspec.Struct, frozen=True):
    """How many nodes may be there, and whose quota the next ones use."""

    nodes: int
    free: tuple[str, ...]
    """Names of Workloads, one for each node that may be made."""


def granted(seen: Observed, job: HoldfastJob, here: Iterable[PodSeen]) -> Granted | None:
    """None: no limit."""
    if not job.queue:
        return None
    there = list(here)
    if seen.workloads is None:
        return Granted(
            len(there), ()
        )  # nobody leaves, and new nodes wait until it is known where they may be
    base, more = base_of(seen), further(seen)
    gives = [one for one in (base, *more) if one is not None and one.grants]
    nodes = sum(one.nodes for one in gives)
    used = Counter(pod.workload for pod in there)
    free = [one.name for one in gives for _ in range(one.nodes - used[one.name])]
    return Granted(nodes, tuple(free[: max(0, nodes - len(there))]))


def taken_back(seen: Observed, job: HoldfastJob) -> dict[str, str]:
    """Nodes whose quota Kueue wants back, and why. Their job goes on without them."""
    if not job.queue:
        return {}
    return {
        pod.name: f"Kueue takes back the quota of {pod.workload}: {why}"
        for pod in seen.pods
        if (why := why_taken_back(seen, pod)) is not None
    }


def why_taken_back(seen: Observed, pod: PodSeen) -> str | None:
    """Why Kueue wants the quota of this further node back; None: it does not, or that is unknown."""
    own = (seen.workloads or {}).get(pod.workload)
    if pod.coordinator or own is None or own.number is None or own.grants:
        return None
    return own.why_not or "it is not admitted any more"


def misplaced(seen: Observed) -> dict[str, str]:
    """Nodes that have a machine which Kueue has since given to another Workload, whose pod waits for it, and why. Their own Workload
    has another machine: its choice changed while their pod was on its way, or a person has deleted it and it was asked for anew."""
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
        # Where Kueue has both on one machine, each would make room for the other again and again.
        if other != pod.workload and own is not None and own.machines and pod.machine not in own.machines:
            found[pod.name] = f"Kueue has given {pod.machine} to {other}"
    return found


def crowded(seen: Observed, here: list[PodSeen]) -> list[PodSeen]:
    """Those that wait for a machine of their Workload while others have all of its machines. Made to replace a node that was to
    leave and stays, such a pod would wait for ever, and another Workload may have room for it."""
    used = Counter(pod.workload for pod in here)
    found: list[PodSeen] = []
    for one in (seen.workloads or {}).values():
        waits = sorted(
            (pod for pod in here if pod.gated and pod.workload == one.name), key=lambda pod: -pod.number
        )
        found += waits[: max(0, used[one.name] - one.nodes)]
    return found


def beyond(seen: Observed, allowed: Granted | None, here: list[PodSeen]) -> dict[str, str]:
    """Nodes beyond what is granted: their Workload is not there any more. The newest, so that those which are told do not change."""
    if allowed is None or seen.workloads is None or seen.said is None:
        return {}
    # Where the coordinator wants fewer it chooses by itself who leaves.
    count = min(len(here), seen.said.wanted) - allowed.nodes
    known = seen.workloads
    newest = sorted(here, key=lambda pod: (pod.workload in known, -pod.number))
    return {pod.name: "Kueue grants fewer nodes" for pod in newest[: max(0, count)]}


# ------------------------------------------------------------ without a queue: machines that a job holds without being able to begin
# Kubernetes' scheduler binds pods one by one. Two jobs that start at once can each hold half of the machines that both need,
# and neither gives one back: both stand until somebody deletes one. So a job that has too few machines for a while gives all of
# them back, and tries again later. The times are drawn from its uid, so two jobs do not do it at the same moment.
#
# Where a scheduler binds all nodes of a PodGroup together, a job has too few only when it loses one while it begins.

MOST_BACK_OFF_S = 600.0


def waiting_status(seen: Observed, job: HoldfastJob, status: JobStatus) -> JobStatus:
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
