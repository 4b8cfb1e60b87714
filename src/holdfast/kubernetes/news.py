"""What of a change of the status people should hear of. Pure.

Decided from two statuses that were written one after the other, and not from what an operator remembers. So an operator that
takes over tells nothing a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from holdfast.kubernetes.status import QUEUED, JobCondition, JobStatus
from holdfast.kubernetes.status import ConditionType as Is


class News(msgspec.Struct, frozen=True):
    """An Event, without its time."""

    type: Literal["Normal", "Warning"]
    reason: str
    """CamelCase, for programs."""
    text: str


def news(before: JobStatus, after: JobStatus) -> Iterator[News]:
    """In the order in which they are to be read."""
    if after.run is not None and after.run != before.run:
        yield News("Normal", "Started", f"run {after.run} begins")
    for type_ in (Is.ACCEPTED, Is.QUOTA_RESERVED, Is.SCHEDULED, Is.COORDINATOR_READY, Is.ATTENTION_NEEDED):
        now, then = after.condition(type_), before.condition(type_)
        if now is not None and (then is None or (now.status, now.reason) != (then.status, then.reason)):
            yield from _of_condition(type_, now)
    yield from _of_incidents(before, after)
    if _took_size(before, after):
        yield News("Normal", "Resized", f"the run has taken spec.nodes {after.asked_nodes}")
    if after.state == "Stopping" and before.state != "Stopping":
        yield News("Normal", "Stopping", after.reason or "")
    if after.holds(Is.SUSPENDED) and not before.holds(Is.SUSPENDED):
        why = after.condition(Is.SUSPENDED)
        assert why is not None
        is_queued = why.reason == QUEUED
        yield News("Normal", QUEUED if is_queued else "Suspended", why.message or "no pod of the job is left")
    if after.holds(Is.COMPLETE) and not before.holds(Is.COMPLETE):
        yield News("Normal", "Finished", after.reason or "")
    if after.holds(Is.FAILED) and not before.holds(Is.FAILED):
        failed = after.condition(Is.FAILED)
        assert failed is not None
        # A person who stops a job knows it.
        yield News(
            "Normal" if failed.reason == "Stopped" else "Warning",
            failed.reason if failed.reason == "Stopped" else "Failed",
            failed.message if failed.reason == "Stopped" else f"{failed.reason}: {failed.message}",
        )


def _of_condition(type_: Is, now: JobCondition) -> Iterator[News]:
    match type_, now.status, now.reason:
        case Is.ACCEPTED, "False", _:
            yield News("Warning", now.reason, now.message)
        case Is.ACCEPTED, _, "SpecChanged":
            yield News("Normal", now.reason, now.message)
        case Is.QUOTA_RESERVED, _, "Admitted" | "Pending":
            yield News("Normal", now.reason, now.message)
        case Is.QUOTA_RESERVED, _, "Evicted" | "Inactive" | "WorkloadsUnknown":
            yield News("Warning", now.reason, now.message)
        case Is.SCHEDULED, _, "Unschedulable":
            yield News("Warning", now.reason, now.message)
        # The kubelet's words: an image that cannot be pulled, a Secret that is missing, a container that ends at once.
        case Is.SCHEDULED, _, "ContainersWait":
            yield News("Warning", "CannotStart", now.message)
        case Is.COORDINATOR_READY, "False", "CannotStart" | "Unschedulable":
            yield News("Warning", now.reason, now.message)
        case Is.COORDINATOR_READY, "False", "Lost":
            yield News("Warning", "CoordinatorLost", now.message)
        case Is.ATTENTION_NEEDED, "True", _:
            yield News("Warning", "AttentionNeeded", now.message)


def _of_incidents(before: JobStatus, after: JobStatus) -> Iterator[News]:
    then, now = before.incidents, after.incidents
    if now is None:
        return
    # Without a number that was known before, nothing tells how many of them are new. A run's counter begins at 0.
    known = then.total if then is not None and before.run == after.run else 0
    new = (now.total or 0) - (known or 0)
    if new > 0 and now.last is not None:
        yield News("Warning", "Incident", now.last if new == 1 else f"{new} incidents, the last: {now.last}")
    open_before = then.open if then is not None and then.open is not None else 0
    if now.open == 0 and (new > 0 or open_before > 0) and after.holds(Is.TRAINING):
        step = after.progress.step if after.progress is not None else None
        where = f", at step {step}" if step is not None else ""
        yield News("Normal", "Recovered", f"{now.last or 'no incident'} is over: full strength again{where}")


def _took_size(before: JobStatus, after: JobStatus) -> bool:
    asked = before.asking_nodes
    accepted = after.condition(Is.ACCEPTED)
    is_refused = accepted is not None and accepted.reason == "ResizeRefused"
    return asked is not None and after.asking_nodes is None and after.asked_nodes == asked and not is_refused
