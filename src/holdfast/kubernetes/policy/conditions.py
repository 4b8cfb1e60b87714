"""What is said of a job: the status, from what is known of it, and which changes of it people should hear of. Pure.

A condition is there from the first look on. What is not known is `Unknown`, and never `False`. The time of a transition is
that of its status, so a message that changes moves no clock.
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
"""What may change while a run goes on."""


class JobEnd(msgspec.Struct, frozen=True):
    """How a job ended."""

    failed: str | None
    """A reason for programs; None: it is complete."""
    message: str
    termination_message: TerminationMessage | None = None
    """Of its coordinator; None: it ended without one."""


class _Word(msgspec.Struct, frozen=True):
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
        job: what the run is; None: there is none that could run.
        ended: it is over from now on.
        stopping: why its state is being saved.
        suspended: nothing of it runs, as a person wants it.
        held: nothing of it runs: why it has to wait.
    """
    suspended = suspended or held is not None
    # Begun from what was written before: where a coordinator does not answer, its last figures stay, and
    # nothing becomes 0 that is only unknown.
    before = seen.status
    words = _words(seen, job, ended, suspended)
    if held is not None:
        words[Is.SUSPENDED] = _Word(True, QUEUED, held)
    known = {one.type: one for one in before.conditions}
    conditions = tuple(_condition(known.get(type_), type_, word, seen) for type_, word in words.items())
    # The next run is started with what the object says then.
    run = None if suspended or ended is not None else seen.accepted
    counts = _counts(seen, job) if ended is None or job is None else _no_counts(job)
    termination_message = None if ended is None else ended.termination_message
    state = "Queued" if held is not None else _state(seen, words, ended, stopping, suspended)
    said = seen.said
    coordinator = _newest_coordinator(seen)
    return msgspec.structs.replace(
        before,
        observed_generation=seen.generation,
        state=state,
        reason=_reason(words, ended, stopping or held),
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
        progress=_progress(said, termination_message, before.progress),
        saved=_saved(said, ended, before.saved),
        incidents=before.incidents
        if said is None
        else IncidentCounts(total=said.incidents, open=said.open_incidents, last=said.last_incident),
    )


def begun(status: JobStatus, run: int, term: int, next_number: int, now_s: float) -> JobStatus:
    """The status of a job whose run begins now: nothing that was said of the one before holds of it."""
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
        # The run before may have been resized: this one begins with what the object says.
        nodes=None,
        asked_nodes=None,
        asking_nodes=None,
        fewest=None,
        most=None,
        conditions=conditions,
        # The tries before it are remembered: each is longer than the one before.
        waiting=None if status.waiting is None else msgspec.structs.replace(status.waiting, until=None),
    )


# ------------------------------------------------------------ conditions


def _words(seen: Observed, job: HoldfastJob | None, ended: JobEnd | None, suspended: bool) -> dict[Is, _Word]:
    words = {Is.ACCEPTED: _accepted(seen)}
    if job is None:
        return words
    if job.queue:
        words[Is.QUOTA_RESERVED] = _quota_reserved(seen, job)
    pods = [pod for pod in seen.pods if not pod.coordinator and pod.stays]
    # What is over is known: these are False and not Unknown, so that nobody waits for them to become True.
    quiet = "Suspended" if suspended else "Ended"
    if suspended or ended is not None:
        for type_ in (Is.SCHEDULED, Is.COORDINATOR_READY, Is.TRAINING, Is.FULL_STRENGTH, Is.SPARES_READY):
            words[type_] = _Word(False, quiet)
    else:
        words[Is.SCHEDULED] = _scheduled(seen, pods)
        words[Is.COORDINATOR_READY] = _coordinator_ready(seen)
        words[Is.TRAINING] = _training(seen)
        words[Is.FULL_STRENGTH] = _full_strength(seen, job)
        words[Is.SPARES_READY] = _spares_ready(seen, job)
    words[Is.STATE_SAVED] = _state_saved(seen) if ended is None else _state_left(seen, ended)
    asks = seen.said.asks if seen.said is not None else ()
    words[Is.ATTENTION_NEEDED] = _Word(bool(asks), "PersonAsked" if asks else "NothingAsked", "; ".join(asks))
    words[Is.SUSPENDED] = _Word(suspended, "Suspended" if suspended else "NotSuspended")
    words[Is.COMPLETE], words[Is.FAILED] = _Word(False, "NotFinished"), _Word(False, "NotFailed")
    if ended is not None and ended.failed is None:
        words[Is.COMPLETE] = _Word(True, "Finished", ended.message)
    elif ended is not None and ended.failed is not None:
        words[Is.FAILED] = _Word(True, ended.failed, ended.message)
    return words


def _accepted(seen: Observed) -> _Word:
    if seen.problems:
        told = "; ".join(map(str, seen.problems))
        running = "; the run goes on as it was accepted" if seen.accepted is not None else ""
        return _Word(False, "InvalidSpec", told + running)
    if seen.refused is not None:
        return _Word(False, "PodRejected", seen.refused)
    if changed := _changed(seen):
        return _Word(
            True, "SpecChanged", f"{changed} changed: it applies after spec.runPolicy.suspend and back"
        )
    if seen.refused_resize is not None:
        return _Word(False, "ResizeRefused", _refused_size(seen))
    return _Word(True, "Valid")


def _refused_size(seen: Observed) -> str:
    """In the words of those who wrote the object: the coordinator's own are about options of the command line."""
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


def _quota_reserved(seen: Observed, job: HoldfastJob) -> _Word:
    if seen.workloads is None:
        return _Word(None, "WorkloadsUnknown", seen.no_workloads)
    base, more = queues.base_of(seen), queues.further(seen)
    if base is None:
        return _Word(False, "NotAsked")
    told = f"{base.name} in the queue {base.queue}"
    if not base.grants:
        # Kueue's own words: which quota is missing, or that there is no such queue.
        reason = "Evicted" if base.evicted else "Pending" if base.active else "Inactive"
        return _Word(False, reason, f"{told}: {base.why_not or 'Kueue has not decided'}")
    if more:
        told += f", and {sum(one.grants for one in more)} of {len(more)} further nodes"
    waits = next((f"; {one.name}: {one.why_not}" for one in more if one.why_not and not one.grants), "")
    return _Word(True, "Admitted", told + waits)


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


def _scheduled(seen: Observed, pods: Sequence[PodSeen]) -> _Word:
    unbound = sorted((pod for pod in pods if pod.machine is None), key=lambda pod: pod.number)
    waiting = sorted((pod for pod in pods if pod.waits and pod.machine), key=lambda pod: pod.number)
    if not pods:
        return _Word(False, "NoPods")
    bound = f"{len(pods) - len(unbound)} of {len(pods)} pods have a machine"
    for pod in unbound:
        if pod.unschedulable:
            told = f"{bound}; {pod.name}: {pod.waits}{_why_not_there(pod, pods)}"
            return _Word(False, "Unschedulable", told)
        if pod.waits:
            return _Word(False, "SchedulingGated", f"{bound}; {pod.name}: {pod.waits}")
    if unbound:
        return _Word(False, "Pending", bound)
    if waiting:
        return _Word(True, "ContainersWait", f"{waiting[0].name}: {waiting[0].waits}")
    return _Word(True, "AllBound")


def _why_not_there(pod: PodSeen, pods: Sequence[PodSeen]) -> str:
    """Kueue knows neither which machines a job avoids, nor that its nodes are to be apart."""
    if not pod.chosen:
        return ""
    told = f"; Kueue has chosen {pod.chosen}"
    if pod.chosen in pod.avoids:
        return f"{told}, which the job avoids"
    if others := [one.name for one in pods if one.name != pod.name and one.chosen == pod.chosen]:
        return (
            f"{told}, and for {others[0]} as well: ask for more than half of a machine for each node, or set "
            "spec.topology.onePerNode to false"
        )
    return told


def _coordinator_seen(seen: Observed, pod: PodSeen) -> CoordinatorSeen:
    answers = seen.said is not None and seen.said.term == pod.number
    restarts = pod.restarts if answers else heard_restarts(seen, pod)
    return CoordinatorSeen(pod=pod.name, address=pod.address, restarts=restarts)


def _coordinator_ready(seen: Observed) -> _Word:
    pod = _newest_coordinator(seen)
    if seen.said is not None:
        return _Word(True, "Answers", f"term {seen.said.term}")
    if (lost := why_lost(seen)) is not None:
        return _Word(False, "Lost", f"{lost}; another one takes over")
    if pod is None or not pod.stays:
        return _Word(False, "Starting" if pod is None else "TakingOver")
    if pod.phase == "Pending":
        if pod.waits:
            reason = "CannotStart" if pod.machine is not None else "Unschedulable"
            return _Word(False, reason, f"{pod.name}: {pod.waits}")
        return _Word(False, "Starting")
    # It may well decide: agents reach it by another way than the operator.
    return _Word(None, "Unreachable", f"{pod.name} does not answer the operator")


def _training(seen: Observed) -> _Word:
    if seen.said is None:
        return _Word(None, "Unreachable")
    match seen.said.phase:
        case "running":
            return _Word(True, "StepsAdvance" if seen.said.step else "Begun")
        case "breaking":
            return _Word(False, "Recovering")
        case "gathering":
            return _Word(False, "Recovering" if seen.said.step else "Starting")
        case _:
            return _Word(False, "Stopping")


def _full_strength(seen: Observed, job: HoldfastJob) -> _Word:
    if seen.said is None:
        return _Word(None, "Unreachable")
    training = _number(seen.said, trains=True)
    wanted = job.spec.nodes
    if seen.refused_resize is not None and seen.accepted is not None:
        wanted = seen.accepted.spec.nodes  # the size that is asked for is not the run's
    told = f"{training} of {wanted} nodes train"
    return _Word(training >= wanted, "AllNodesTrain" if training >= wanted else "Shrunk", told)


def _spares_ready(seen: Observed, job: HoldfastJob) -> _Word:
    if seen.said is None:
        return _Word(None, "Unreachable")
    there = _number(seen.said, trains=False)
    told = f"{there} of {job.spec.spares} spares"
    return _Word(there >= job.spec.spares, "AllThere" if there >= job.spec.spares else "SpareMissing", told)


def _state_saved(seen: Observed) -> _Word:
    if seen.said is None:
        return _Word(None, "Unreachable")
    where = seen.said.checkpoint or seen.said.snapshot
    return _Word(where is not None, "Saved" if where else "NothingYet", where or "")


def _state_left(seen: Observed, ended: JobEnd) -> _Word:
    """Of a job that is over. Its nodes' memory is gone with them: a durable checkpoint stays, and nothing else."""
    left = _saved(seen.said, ended, seen.status.saved)
    if left is not None and left.checkpoint is not None:
        return _Word(True, "Saved", left.checkpoint)
    return _Word(False, "NothingLeft", "no durable checkpoint")


def _saved(
    said: CoordinatorReport | None, ended: JobEnd | None, before: SavedState | None
) -> SavedState | None:
    if ended is not None:
        # Its last words first. An older coordinator says nothing there, and the operator may have heard it before.
        heard = (ended.termination_message, said, before)
        return SavedState(checkpoint=next((one.checkpoint for one in heard if one and one.checkpoint), None))
    return before if said is None else SavedState(snapshot=said.snapshot, checkpoint=said.checkpoint)


def _condition(old: JobCondition | None, type_: Is, word: _Word, seen: Observed) -> JobCondition:
    status = _STATUS[word.holds]
    # By the status alone: a message may change at every look, and a transition time that moved with it would
    # say that a job was never in one state for long.
    same = old is not None and old.status == status
    return JobCondition(
        type=type_.value,
        status=status,  # type: ignore[arg-type]  # one of the three
        reason=word.reason,
        message=word.message[:MESSAGE_CHARS],
        last_transition_time=old.last_transition_time if same and old is not None else timestamp(seen.now_s),
        observed_generation=seen.generation,
    )


_STATUS = {True: "True", False: "False", None: "Unknown"}


# ------------------------------------------------------------ figures and words


def _counts(seen: Observed, job: HoldfastJob | None) -> NodeCounts | None:
    if job is None:
        return None
    # The coordinator's word, and not the pod's phase: a pod of a machine that was cut off stays Running for
    # minutes after the job has gone on without it.
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
    """Of a job that is over. What is left of its pods trains no more, and nobody counts it afterwards."""
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


def _number(said: CoordinatorReport, trains: bool) -> int:
    return sum(node.alive and not node.leaves and node.trains == trains for node in said.nodes.values())


def _progress(
    said: CoordinatorReport | None,
    termination_message: TerminationMessage | None,
    before: TrainingProgress | None,
) -> TrainingProgress | None:
    if termination_message is not None and termination_message.step is not None:
        # The operator has heard of a step some seconds before the end, and the last one was committed then.
        return msgspec.structs.replace(before or TrainingProgress(), step=termination_message.step)
    if said is None:
        return before
    step = said.step if said.step is not None else (before.step if before is not None else None)
    return TrainingProgress(
        step=step,
        loss=None if said.loss is None else f"{said.loss:.6g}",
        goodput=None if said.goodput is None else f"{said.goodput:.1%}",
        level=said.level,
    )


def _newest_coordinator(seen: Observed) -> PodSeen | None:
    return max((pod for pod in seen.pods if pod.coordinator), key=lambda pod: pod.number, default=None)


def _state(
    seen: Observed, words: dict[Is, _Word], ended: JobEnd | None, stopping: str | None, suspended: bool
) -> str:
    if ended is not None:
        return "Failed" if ended.failed else "Succeeded"
    if suspended:
        return "Suspended"
    if stopping is not None:
        return "Stopping"
    if Is.TRAINING not in words:
        return "Rejected"
    if words[Is.TRAINING].holds:
        full = words[Is.FULL_STRENGTH].holds and words[Is.SPARES_READY].holds
        return "Running" if full else "Degraded"
    # A job that trained and whose coordinator is not reached may well train on. It is Unknown: Starting would
    # tell a program that nothing was done yet.
    if words[Is.TRAINING].holds is None:
        trained = seen.status.progress is not None and seen.status.progress.step is not None
        return "Unknown" if trained else "Starting" if seen.status.run else "Pending"
    return words[Is.TRAINING].reason


def _reason(words: dict[Is, _Word], ended: JobEnd | None, stopping: str | None) -> str:
    """The first thing that is not as it should be."""
    if ended is not None:
        return ended.message[:MESSAGE_CHARS]
    if stopping is not None:
        return stopping
    # Each of these needs the one before it, so the first that does not hold is the cause of the others.
    for type_ in (
        Is.ACCEPTED,
        Is.QUOTA_RESERVED,
        Is.SCHEDULED,
        Is.COORDINATOR_READY,
        Is.TRAINING,
        Is.FULL_STRENGTH,
    ):
        word = words.get(type_)
        if word is not None and not word.holds:
            return (f"{word.reason}: {word.message}" if word.message else word.reason)[:MESSAGE_CHARS]
    return ""


# ------------------------------------------------------------ the size that the object asks its coordinator for
# Who changed the size last has it: the object says something only when it has changed since the coordinator was asked the last
# time. A `holdfast resize` in between stands.


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


# ------------------------------------------------------------ news: what people should hear of
# Decided from two statuses that were written one after the other, and not from what an operator remembers. So an operator that
# takes over tells nothing a second time.


class JobNews(msgspec.Struct, frozen=True):
    """An Event, without its time."""

    type: Literal["Normal", "Warning"]
    reason: str
    """CamelCase, for programs."""
    text: str


def news(before: JobStatus, after: JobStatus) -> Iterator[JobNews]:
    """In the order in which they are to be read."""
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
        # A person who stops a job knows it.
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
        # The kubelet's words: an image that cannot be pulled, a Secret that is missing, a container that ends at once.
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
    # Without a number that was known before, nothing tells how many of them are new. A run's counter begins at 0.
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
