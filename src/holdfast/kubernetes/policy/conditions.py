"""Derives a job's status from what the operator has observed, and the Events that report its changes. Pure.

Conditions are present from the first reconciliation on. A condition whose truth is not known is `Unknown`, never `False`. Its
transition time changes only with its status, not with its message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from holdfast.kubernetes import names
from holdfast.kubernetes.objects.pod import PodSeen, TerminationMessage
from holdfast.kubernetes.objects.resource import HoldfastJob
from holdfast.kubernetes.objects.status import (
    QUEUED,
    CoordinatorSeen,
    IncidentCounts,
    JobCondition,
    JobStatus,
    NodeCounts,
    SavedState,
    TrainingProgress,
    timestamp,
)
from holdfast.kubernetes.objects.status import ConditionType as Is
from holdfast.kubernetes.policy import queues
from holdfast.kubernetes.policy.losses import heard_restarts, why_lost
from holdfast.kubernetes.policy.plan import CoordinatorReport, Observed
from holdfast.protocol.engine_orders import ReleaseNode

MESSAGE_CHARS = 1000
LIVE_FIELDS = ("nodes", "run_policy")
"""Fields of the spec that may change while a run goes on."""


class JobEnd(msgspec.Struct, frozen=True):
    """How a job ended."""

    failed: str | None
    """The reason of the condition Failed; None: the job is complete."""
    message: str
    termination_message: TerminationMessage | None = None
    """The coordinator's; None: it ended without one."""


class _ConditionValue(msgspec.Struct, frozen=True):
    holds: bool | None
    """None: unknown."""
    reason: str
    message: str = ""


def status_of(
    seen: Observed,
    job: HoldfastJob | None,
    ended: JobEnd | None = None,
    stopping: str | None = None,
    suspended: bool = False,
    held: str | None = None,
) -> JobStatus:
    """The whole status.

    Args:
        job: the job as `reconcile.current` has it; None: the object cannot run.
        ended: how the job has ended; None: it has not.
        stopping: why its state is being saved or its pods are being deleted; None: neither is happening.
        suspended: whether nothing of it runs because a person suspended it.
        held: why it has to wait while nothing of it runs; None: it does not wait.
    """
    suspended = suspended or held is not None
    # Starts from the status that was written before: while a coordinator does not answer its last figures stay, and a
    # figure that is only unknown does not become 0.
    before = seen.status
    values = _condition_values(seen, job, ended, suspended)
    if held is not None:
        values[Is.SUSPENDED] = _ConditionValue(True, QUEUED, held)
    known = {one.type: one for one in before.conditions}
    conditions = tuple(_condition(known.get(type_), type_, value, seen) for type_, value in values.items())
    # The next run starts with the spec that the object has by then, so the bounds of this one do not apply to it.
    run = None if suspended or ended is not None else seen.accepted
    counts = _counts(seen, job) if ended is None or job is None else _no_counts(job)
    termination_message = None if ended is None else ended.termination_message
    state = "Queued" if held is not None else _state(seen, values, ended, stopping, suspended)
    report = seen.said
    coordinator = _newest_coordinator(seen)
    return msgspec.structs.replace(
        before,
        observed_generation=seen.generation,
        state=state,
        reason=_reason(values, ended, stopping or held),
        selector=None
        if job is None
        else f"{names.LABEL_JOB}={job.id.name},{names.LABEL_ROLE}={names.NODE_ROLE}",
        asked_nodes=seen.asked_nodes if seen.asked_nodes is not None else before.asked_nodes,
        asking_nodes=None if job is None or suspended else size_to_ask(seen, job),
        fewest=None if run is None else run.spec.fewest,
        most=None if run is None else run.spec.nodes,
        coordinator=None if coordinator is None or suspended else _coordinator_seen(seen, coordinator),
        completion_time=timestamp(seen.now_s) if ended is not None else before.completion_time,
        conditions=conditions,
        nodes=counts,
        progress=_progress(report, termination_message, before.progress),
        saved=_saved(report, ended, before.saved),
        incidents=before.incidents
        if report is None
        else IncidentCounts(total=report.incidents, open=report.open_incidents, last=report.last_incident),
    )


def begun(status: JobStatus, run: int, term: int, next_number: int, now_s: float) -> JobStatus:
    """The status of a job whose run begins now, without what applied to the run before.

    Args:
        run, term, next_number: the new run's counters.
    """
    conditions = tuple(
        msgspec.structs.replace(
            one,
            status="False",
            reason="Resumed",
            message="",
            last_transition_time=timestamp(now_s),
        )
        if one.type == Is.SUSPENDED and one.status == "True"
        else one
        for one in status.conditions
    )
    return msgspec.structs.replace(
        status,
        run=run,
        term=term,
        next_number=next_number,
        start_time=timestamp(now_s),
        progress=None,
        # The run before may have been resized; this one begins with the size in the object.
        nodes=None,
        asked_nodes=None,
        asking_nodes=None,
        fewest=None,
        most=None,
        conditions=conditions,
        # The number of tries is kept, because the pause grows with each.
        waiting=None if status.waiting is None else msgspec.structs.replace(status.waiting, until=None),
    )


# ------------------------------------------------------------ conditions


def _condition_values(
    seen: Observed, job: HoldfastJob | None, ended: JobEnd | None, suspended: bool
) -> dict[Is, _ConditionValue]:
    values = {Is.ACCEPTED: _accepted(seen)}
    if job is None:
        return values
    if job.queue:
        values[Is.QUOTA_RESERVED] = _quota_reserved(seen, job)
    pods = [pod for pod in seen.pods if not pod.coordinator and pod.stays]
    # False and not Unknown once the job is over or suspended, so that nobody waits for them to become True.
    quiet = "Suspended" if suspended else "Ended"
    if suspended or ended is not None:
        for type_ in (Is.SCHEDULED, Is.COORDINATOR_READY, Is.TRAINING, Is.FULL_STRENGTH, Is.SPARES_READY):
            values[type_] = _ConditionValue(False, quiet)
    else:
        values[Is.SCHEDULED] = _scheduled(seen, pods)
        values[Is.COORDINATOR_READY] = _coordinator_ready(seen)
        values[Is.TRAINING] = _training(seen)
        values[Is.FULL_STRENGTH] = _full_strength(seen, job)
        values[Is.SPARES_READY] = _spares_ready(seen, job)
    values[Is.STATE_SAVED] = _state_saved(seen) if ended is None else _state_left(seen, ended)
    asks = seen.said.asks if seen.said is not None else ()
    values[Is.ATTENTION_NEEDED] = _ConditionValue(
        bool(asks), "PersonAsked" if asks else "NothingAsked", "; ".join(asks)
    )
    values[Is.SUSPENDED] = _ConditionValue(suspended, "Suspended" if suspended else "NotSuspended")
    values[Is.COMPLETE], values[Is.FAILED] = (
        _ConditionValue(False, "NotFinished"),
        _ConditionValue(False, "NotFailed"),
    )
    if ended is not None and ended.failed is None:
        values[Is.COMPLETE] = _ConditionValue(True, "Finished", ended.message)
    elif ended is not None and ended.failed is not None:
        values[Is.FAILED] = _ConditionValue(True, ended.failed, ended.message)
    return values


def _accepted(seen: Observed) -> _ConditionValue:
    if seen.problems:
        problems = "; ".join(map(str, seen.problems))
        running = "; the run goes on as it was accepted" if seen.accepted is not None else ""
        return _ConditionValue(False, "InvalidSpec", problems + running)
    if seen.refused is not None:
        return _ConditionValue(False, "PodRejected", seen.refused)
    if changed := _changed(seen):
        return _ConditionValue(
            True, "SpecChanged", f"{changed} changed: it applies after spec.runPolicy.suspend and back"
        )
    if seen.refused_resize is not None:
        return _ConditionValue(False, "ResizeRefused", _refused_size(seen))
    return _ConditionValue(True, "Valid")


def _refused_size(seen: Observed) -> str:
    """The refusal in terms of the object's fields: the coordinator's message names command-line options instead."""
    if seen.accepted is None or seen.job is None:
        return seen.refused_resize or ""
    low, high, asked = seen.accepted.spec.fewest, seen.accepted.spec.nodes, seen.job.spec.nodes
    if low <= asked <= high:
        return f"spec.nodes {asked}: {seen.refused_resize}"
    bounds = (
        f"{high} nodes and no spec.minNodes, so its size is fixed"
        if low == high
        else f"spec.minNodes {low} and spec.nodes {high}, so it can have {low} to {high} nodes"
    )
    return (
        f"spec.nodes {asked} is refused, and the run goes on: it was started with {bounds}; set spec.nodes back, or apply other "
        "bounds by spec.runPolicy.suspend and back"
    )


def _quota_reserved(seen: Observed, job: HoldfastJob) -> _ConditionValue:
    if seen.workloads is None:
        return _ConditionValue(None, "WorkloadsUnknown", seen.no_workloads)
    base, more = queues.base_of(seen), queues.further(seen)
    if base is None:
        return _ConditionValue(False, "NotAsked")
    message = f"{base.name} in the queue {base.queue}"
    if not base.grants:
        # Kueue's message says which quota is missing, or that the queue does not exist.
        reason = "Evicted" if base.evicted else "Pending" if base.active else "Inactive"
        return _ConditionValue(False, reason, f"{message}: {base.why_not or 'Kueue has not decided'}")
    if more:
        message += f", and {sum(one.grants for one in more)} of {len(more)} further nodes"
    waits = next((f"; {one.name}: {one.why_not}" for one in more if one.why_not and not one.grants), "")
    return _ConditionValue(True, "Admitted", message + waits)


def _changed(seen: Observed) -> str:
    if seen.accepted is None or seen.job is None:
        return ""
    # Compared field by field, with the names as the user wrote them. Pods are made from the accepted spec
    # alone, so a change has no effect before the next run, and the person who made it is told so.
    old, new = seen.accepted.spec, seen.job.spec
    fields = [name for name in old.__struct_fields__ if name not in LIVE_FIELDS]
    encoded = dict(zip(old.__struct_fields__, old.__struct_encode_fields__, strict=True))
    changed = [f"spec.{encoded[name]}" for name in fields if getattr(old, name) != getattr(new, name)]
    if seen.accepted.queue != seen.job.queue:
        changed.append(f"the label {names.LABEL_QUEUE}")
    return ", ".join(changed)


def _scheduled(seen: Observed, pods: Sequence[PodSeen]) -> _ConditionValue:
    unbound = sorted((pod for pod in pods if pod.machine is None), key=lambda pod: pod.number)
    waiting = sorted((pod for pod in pods if pod.waits and pod.machine), key=lambda pod: pod.number)
    if not pods:
        return _ConditionValue(False, "NoPods")
    bound = f"{len(pods) - len(unbound)} of {len(pods)} pods have a machine"
    for pod in unbound:
        if pod.unschedulable:
            message = f"{bound}; {pod.name}: {pod.waits}{_why_not_there(pod, pods)}"
            return _ConditionValue(False, "Unschedulable", message)
        if pod.waits:
            return _ConditionValue(False, "SchedulingGated", f"{bound}; {pod.name}: {pod.waits}")
    if unbound:
        return _ConditionValue(False, "Pending", bound)
    if waiting:
        return _ConditionValue(True, "ContainersWait", f"{waiting[0].name}: {waiting[0].waits}")
    return _ConditionValue(True, "AllBound")


def _why_not_there(pod: PodSeen, pods: Sequence[PodSeen]) -> str:
    """Why the machine that Kueue chose does not do: Kueue knows neither which machines a job avoids nor that its nodes must
    be on different ones. Empty: Kueue has chosen none."""
    if not pod.chosen:
        return ""
    chosen = f"; Kueue has chosen {pod.chosen}"
    if pod.chosen in pod.avoids:
        return f"{chosen}, which the job avoids"
    if others := [one.name for one in pods if one.name != pod.name and one.chosen == pod.chosen]:
        return (
            f"{chosen}, and for {others[0]} as well: ask for more than half of a machine for each node, or set "
            "spec.topology.onePerNode to false"
        )
    return chosen


def _coordinator_seen(seen: Observed, pod: PodSeen) -> CoordinatorSeen:
    answers = seen.said is not None and seen.said.term == pod.number
    restarts = pod.restarts if answers else heard_restarts(seen, pod)
    return CoordinatorSeen(pod=pod.name, address=pod.address, restarts=restarts)


def _coordinator_ready(seen: Observed) -> _ConditionValue:
    pod = _newest_coordinator(seen)
    if seen.said is not None:
        return _ConditionValue(True, "Answers", f"term {seen.said.term}")
    if (lost := why_lost(seen)) is not None:
        return _ConditionValue(False, "Lost", f"{lost}; another one takes over")
    if pod is None or not pod.stays:
        return _ConditionValue(False, "Starting" if pod is None else "TakingOver")
    if pod.phase == "Pending":
        if pod.waits:
            reason = "CannotStart" if pod.machine is not None else "Unschedulable"
            return _ConditionValue(False, reason, f"{pod.name}: {pod.waits}")
        return _ConditionValue(False, "Starting")
    # Unknown and not False: agents reach it by another network path than the operator, so it may well be working.
    return _ConditionValue(None, "Unreachable", f"{pod.name} does not answer the operator")


def _training(seen: Observed) -> _ConditionValue:
    if seen.said is None:
        return _ConditionValue(None, "Unreachable")
    match seen.said.phase:
        case "running":
            return _ConditionValue(True, "StepsAdvance" if seen.said.step else "Begun")
        case "breaking":
            return _ConditionValue(False, "Recovering")
        case "gathering":
            return _ConditionValue(False, "Recovering" if seen.said.step else "Starting")
        case _:
            return _ConditionValue(False, "Stopping")


def _full_strength(seen: Observed, job: HoldfastJob) -> _ConditionValue:
    if seen.said is None:
        return _ConditionValue(None, "Unreachable")
    training = _number(seen.said, trains=True)
    wanted = job.spec.nodes
    if seen.refused_resize is not None and seen.accepted is not None:
        wanted = seen.accepted.spec.nodes  # the size that is asked for is not the run's
    message = f"{training} of {wanted} nodes train"
    return _ConditionValue(training >= wanted, "AllNodesTrain" if training >= wanted else "Shrunk", message)


def _spares_ready(seen: Observed, job: HoldfastJob) -> _ConditionValue:
    if seen.said is None:
        return _ConditionValue(None, "Unreachable")
    there = _number(seen.said, trains=False)
    message = f"{there} of {job.spec.spares} spares"
    return _ConditionValue(
        there >= job.spec.spares, "AllThere" if there >= job.spec.spares else "SpareMissing", message
    )


def _state_saved(seen: Observed) -> _ConditionValue:
    if seen.said is None:
        return _ConditionValue(None, "Unreachable")
    where = seen.said.checkpoint or seen.said.snapshot
    return _ConditionValue(where is not None, "Saved" if where else "NothingYet", where or "")


def _state_left(seen: Observed, ended: JobEnd) -> _ConditionValue:
    """What is left of a job that is over: a durable checkpoint at most, since the snapshots were in its nodes' memory."""
    left = _saved(seen.said, ended, seen.status.saved)
    if left is not None and left.checkpoint is not None:
        return _ConditionValue(True, "Saved", left.checkpoint)
    return _ConditionValue(False, "NothingLeft", "no durable checkpoint")


def _saved(
    report: CoordinatorReport | None, ended: JobEnd | None, before: SavedState | None
) -> SavedState | None:
    if ended is not None:
        # The termination message first. An older coordinator's has no checkpoint, but a report may have named one before.
        sources = (ended.termination_message, report, before)
        return SavedState(
            checkpoint=next((one.checkpoint for one in sources if one and one.checkpoint), None)
        )
    return before if report is None else SavedState(snapshot=report.snapshot, checkpoint=report.checkpoint)


def _condition(old: JobCondition | None, type_: Is, value: _ConditionValue, seen: Observed) -> JobCondition:
    status = _STATUS[value.holds]
    # By the status alone: a message may change at every look, and if the transition time changed with it, no condition
    # would ever appear to have lasted.
    same = old is not None and old.status == status
    return JobCondition(
        type=type_.value,
        status=status,  # type: ignore[arg-type]  # one of the three
        reason=value.reason,
        message=value.message[:MESSAGE_CHARS],
        last_transition_time=old.last_transition_time if same and old is not None else timestamp(seen.now_s),
        observed_generation=seen.generation,
    )


_STATUS = {True: "True", False: "False", None: "Unknown"}


# ------------------------------------------------------------ figures and messages


def _counts(seen: Observed, job: HoldfastJob | None) -> NodeCounts | None:
    if job is None:
        return None
    # By the coordinator's orders and not by the pod's phase: a pod on a machine that was cut off stays Running for
    # minutes after the job has continued without it.
    lost = frozenset(
        one.node
        for one in (seen.said.orders if seen.said else ())
        if isinstance(one, ReleaseNode) and not one.planned
    )
    pods = [pod for pod in seen.pods if not pod.coordinator]
    present = [pod for pod in pods if pod.stays and pod.name not in lost]
    before = seen.status.nodes
    if seen.said is not None:
        wanted, training = seen.said.wanted, _number(seen.said, trains=True)
        spare: int | None = _number(seen.said, trains=False)
    else:
        wanted = before.wanted if before is not None and before.wanted is not None else job.spec.wanted
        training, spare = 0, None
    known = seen.said is not None
    return NodeCounts(
        summary=f"{training}/{job.spec.nodes} +{spare}" if known else f"?/{job.spec.nodes}",
        wanted=wanted,
        present=len(present),
        training=training if known else None,
        spare=spare,
        pending=sum(pod.phase == "Pending" for pod in present),
        leaving=sum(pod.deleting and pod.name not in lost for pod in pods),
        lost=sum(pod.name in lost for pod in pods),
    )


def _no_counts(job: HoldfastJob) -> NodeCounts:
    """The counts of a job that is over, all 0: its remaining pods do not train, and the status is not updated as they go."""
    return NodeCounts(
        summary=f"0/{job.spec.nodes}",
        wanted=job.spec.wanted,
        present=0,
        training=0,
        spare=0,
        pending=0,
        leaving=0,
        lost=0,
    )


def _number(report: CoordinatorReport, trains: bool) -> int:
    return sum(node.alive and not node.leaves and node.trains == trains for node in report.nodes.values())


def _progress(
    report: CoordinatorReport | None,
    termination_message: TerminationMessage | None,
    before: TrainingProgress | None,
) -> TrainingProgress | None:
    if termination_message is not None and termination_message.step is not None:
        # The last report may be some seconds older than the end, and further steps were committed in between.
        return msgspec.structs.replace(before or TrainingProgress(), step=termination_message.step)
    if report is None:
        return before
    step = report.step if report.step is not None else (before.step if before is not None else None)
    return TrainingProgress(
        step=step,
        loss=None if report.loss is None else f"{report.loss:.6g}",
        goodput=None if report.goodput is None else f"{report.goodput:.1%}",
        level=report.level,
    )


def _newest_coordinator(seen: Observed) -> PodSeen | None:
    return max((pod for pod in seen.pods if pod.coordinator), key=lambda pod: pod.number, default=None)


def _state(
    seen: Observed,
    values: dict[Is, _ConditionValue],
    ended: JobEnd | None,
    stopping: str | None,
    suspended: bool,
) -> str:
    if ended is not None:
        return "Failed" if ended.failed else "Succeeded"
    if suspended:
        return "Suspended"
    if stopping is not None:
        return "Stopping"
    if Is.TRAINING not in values:
        return "Rejected"
    if values[Is.TRAINING].holds:
        full = values[Is.FULL_STRENGTH].holds and values[Is.SPARES_READY].holds
        return "Running" if full else "Degraded"
    # A job that has trained and whose coordinator cannot be reached may still be training, so it is Unknown: Starting
    # would tell a program that nothing has been done yet.
    if values[Is.TRAINING].holds is None:
        trained = seen.status.progress is not None and seen.status.progress.step is not None
        return "Unknown" if trained else "Starting" if seen.status.run else "Pending"
    return values[Is.TRAINING].reason


def _reason(values: dict[Is, _ConditionValue], ended: JobEnd | None, stopping: str | None) -> str:
    """The end, the reason to stop, or else the first condition that does not hold; empty: all hold."""
    if ended is not None:
        return ended.message[:MESSAGE_CHARS]
    if stopping is not None:
        return stopping
    # Each of these conditions needs the one before it, so the first that does not hold explains the others.
    for type_ in (
        Is.ACCEPTED,
        Is.QUOTA_RESERVED,
        Is.SCHEDULED,
        Is.COORDINATOR_READY,
        Is.TRAINING,
        Is.FULL_STRENGTH,
    ):
        value = values.get(type_)
        if value is not None and not value.holds:
            return (f"{value.reason}: {value.message}" if value.message else value.reason)[:MESSAGE_CHARS]
    return ""


# ------------------------------------------------------------ the size that the object asks its coordinator for
# The last change of the size wins. The object's size is sent only when it differs from the one that was sent last, so a
# `holdfast resize` in between stays in effect.


def asked_nodes(seen: Observed, job: HoldfastJob) -> int:
    """The size that was last requested from the coordinator, as far as is known; else that of the run's start."""
    accepted = seen.accepted.spec.nodes if seen.accepted is not None else job.spec.nodes
    recorded = (seen.asked_nodes, seen.status.asked_nodes)
    return next((nodes for nodes in recorded if nodes is not None), accepted)


def size_to_ask(seen: Observed, job: HoldfastJob) -> int | None:
    """The size to request from the coordinator; None: it has been requested already.

    The status records it before the request is sent. If an operator were killed between a request and its record, the next one
    would assume another size than the coordinator has, and changing the object back would have no effect.
    """
    # Recorded, perhaps by an operator before this one, without a record that the request was answered.
    unsure = seen.asked_nodes is None and seen.status.asking_nodes is not None
    return job.spec.nodes if unsure or job.spec.nodes != asked_nodes(seen, job) else None


# ------------------------------------------------------------ news: changes that people should learn of
# Decided from two statuses that were written one after the other, and not from an operator's memory. So an operator that takes
# over reports nothing twice.


class JobNews(msgspec.Struct, frozen=True):
    """A Kubernetes Event, without its time."""

    type: Literal["Normal", "Warning"]
    reason: str
    """CamelCase, for programs."""
    text: str


def news(before: JobStatus, after: JobStatus) -> Iterator[JobNews]:
    """Events for what changed between two statuses, in the order in which they should be read."""
    if after.run is not None and after.run != before.run:
        yield JobNews("Normal", "Started", f"run {after.run} begins")
    for type_ in (Is.ACCEPTED, Is.QUOTA_RESERVED, Is.SCHEDULED, Is.COORDINATOR_READY, Is.ATTENTION_NEEDED):
        now, then = after.condition(type_), before.condition(type_)
        if now is not None and (then is None or (now.status, now.reason) != (then.status, then.reason)):
            yield from _of_condition(type_, now)
    yield from _of_incidents(before, after)
    if _took_size(before, after):
        yield JobNews("Normal", "Resized", f"the run has taken spec.nodes {after.asked_nodes}")
    if after.state == "Stopping" and before.state != "Stopping":
        yield JobNews("Normal", "Stopping", after.reason or "")
    if after.holds(Is.SUSPENDED) and not before.holds(Is.SUSPENDED):
        why = after.condition(Is.SUSPENDED)
        assert why is not None
        is_queued = why.reason == QUEUED
        yield JobNews(
            "Normal", QUEUED if is_queued else "Suspended", why.message or "no pod of the job is left"
        )
    if after.holds(Is.COMPLETE) and not before.holds(Is.COMPLETE):
        yield JobNews("Normal", "Finished", after.reason or "")
    if after.holds(Is.FAILED) and not before.holds(Is.FAILED):
        failed = after.condition(Is.FAILED)
        assert failed is not None
        # No warning for a job that a person has stopped.
        yield JobNews(
            "Normal" if failed.reason == "Stopped" else "Warning",
            failed.reason if failed.reason == "Stopped" else "Failed",
            failed.message if failed.reason == "Stopped" else f"{failed.reason}: {failed.message}",
        )


def _of_condition(type_: Is, now: JobCondition) -> Iterator[JobNews]:
    match type_, now.status, now.reason:
        case Is.ACCEPTED, "False", _:
            yield JobNews("Warning", now.reason, now.message)
        case Is.ACCEPTED, _, "SpecChanged":
            yield JobNews("Normal", now.reason, now.message)
        case Is.QUOTA_RESERVED, _, "Admitted" | "Pending":
            yield JobNews("Normal", now.reason, now.message)
        case Is.QUOTA_RESERVED, _, "Evicted" | "Inactive" | "WorkloadsUnknown":
            yield JobNews("Warning", now.reason, now.message)
        case Is.SCHEDULED, _, "Unschedulable":
            yield JobNews("Warning", now.reason, now.message)
        # The kubelet's message: an image that cannot be pulled, a missing Secret, or a container that ends at once.
        case Is.SCHEDULED, _, "ContainersWait":
            yield JobNews("Warning", "CannotStart", now.message)
        case Is.COORDINATOR_READY, "False", "CannotStart" | "Unschedulable":
            yield JobNews("Warning", now.reason, now.message)
        case Is.COORDINATOR_READY, "False", "Lost":
            yield JobNews("Warning", "CoordinatorLost", now.message)
        case Is.ATTENTION_NEEDED, "True", _:
            yield JobNews("Warning", "AttentionNeeded", now.message)


def _of_incidents(before: JobStatus, after: JobStatus) -> Iterator[JobNews]:
    then, now = before.incidents, after.incidents
    if now is None:
        return
    # Incidents are counted per run from 0, so the previous total counts only if it is of the same run.
    known = then.total if then is not None and before.run == after.run else 0
    new = (now.total or 0) - (known or 0)
    if new > 0 and now.last is not None:
        yield JobNews(
            "Warning", "Incident", now.last if new == 1 else f"{new} incidents, the last: {now.last}"
        )
    open_before = then.open if then is not None and then.open is not None else 0
    if now.open == 0 and (new > 0 or open_before > 0) and after.holds(Is.TRAINING):
        step = after.progress.step if after.progress is not None else None
        where = f", at step {step}" if step is not None else ""
        yield JobNews(
            "Normal", "Recovered", f"{now.last or 'no incident'} is over: full strength again{where}"
        )


def _took_size(before: JobStatus, after: JobStatus) -> bool:
    asked = before.asking_nodes
    accepted = after.condition(Is.ACCEPTED)
    is_refused = accepted is not None and accepted.reason == "ResizeRefused"
    return asked is not None and after.asking_nodes is None and after.asked_nodes == asked and not is_refused
