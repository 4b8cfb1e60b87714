"""The status of a job's object: written by the operator alone, read by people and programs. Unknown is absent, never 0.

A status is written as a JSON patch (RFC 6902) that is refused if what it was decided from has changed. A request with the
object's version would also be refused if somebody else has changed a label. A script that does so fifty times a second would then
have nearly every status refused, because the version is out of date before the request arrives.

The API server compares the *bytes* of a tested value with its own encoding of the object (seen on 1.37.2). Go writes `<`, `>`
and `&` as `\\u003c`, `\\u003e` and `\\u0026`, and other letters as they are; Python's encoder does neither. A test of a text
with one of these would always fail. So only numbers, names of types and timestamps are tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.errors import Damaged
from holdfast.protocol.wire.decoding import decode

Object = dict[str, Any]
Moment = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
"""A UTC timestamp in Kubernetes' format."""


class ConditionType(StrEnum):
    """Conditions that programs can wait for: `kubectl wait --for=condition=Training`."""

    ACCEPTED = "Accepted"
    QUOTA_RESERVED = "QuotaReserved"
    SCHEDULED = "Scheduled"
    COORDINATOR_READY = "CoordinatorReady"
    TRAINING = "Training"
    FULL_STRENGTH = "FullStrength"
    SPARES_READY = "SparesReady"
    STATE_SAVED = "StateSaved"
    ATTENTION_NEEDED = "AttentionNeeded"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class _Struct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of all parts of the status. Unknown fields are accepted, since a later version of the operator may have written
    them."""


QUEUED = "Queued"
"""Reason of the condition Suspended if the job waits for quota or machines and was not suspended by a person."""


class JobCondition(_Struct, frozen=True, kw_only=True):
    """A condition, which holds, does not hold, or is unknown."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    last_transition_time: Moment
    observed_generation: int = 0


class NodeCounts(_Struct, frozen=True, kw_only=True):
    """Number of nodes in each state."""

    summary: str = ""
    """Training/wanted +spares, for people."""
    wanted: int | None = None
    present: int | None = None
    training: int | None = None
    spare: int | None = None
    pending: int | None = None
    leaving: int | None = None
    lost: int | None = None


class TrainingProgress(_Struct, frozen=True, kw_only=True):
    """Progress of the training, from the coordinator's last report."""

    step: int | None = None
    loss: str | None = None
    """A string: floats in objects are discouraged by the API conventions."""
    goodput: str | None = None
    level: int | None = None


class SavedState(_Struct, frozen=True, kw_only=True):
    """The newest complete state."""

    snapshot: str | None = None
    checkpoint: str | None = None


class IncidentCounts(_Struct, frozen=True, kw_only=True):
    """Faults so far."""

    total: int | None = None
    open: int | None = None
    last: str | None = None


class CoordinatorSeen(_Struct, frozen=True, kw_only=True):
    """The current coordinator."""

    pod: str | None = None
    address: str | None = None
    restarts: int | None = None
    """How often its container had been restarted when it last answered; null: it has not answered yet."""


class WaitingForMachines(_Struct, frozen=True, kw_only=True):
    """A start that has too few machines."""

    bound: int = 0
    """Number of nodes that have a machine."""
    since: Moment
    """When `bound` last changed."""
    first: Moment | None = None
    """Time of the first try, from which the startup deadline counts."""
    tries: int = 0
    """How often the job has given its machines back."""
    until: Moment | None = None
    """After it has given them back: when it may ask for machines again."""


OPERATORS_OWN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
"""Schema of a field that only operators read, so that the CRD need not describe it any further."""


class JobStatus(_Struct, frozen=True, kw_only=True):
    """The status of a HoldfastJob."""

    observed_generation: int | None = None
    revision: int | None = None
    """Number of writes of the status; an operator's write is refused if another one has written since."""
    state: str | None = None
    """One word, for people; programs read conditions."""
    reason: str | None = None
    selector: str | None = None
    """Label selector of the nodes' pods, for kubectl scale and disruption budgets."""
    run: int | None = None
    """Number of the run: 1 for the first, and one more after each suspension."""
    term: int | None = None
    """The coordinator's term."""
    next_number: int | None = None
    """The next node's number: no pod has had this number or a higher one."""
    asked_nodes: int | None = None
    """`spec.nodes` when the coordinator was last asked for it."""
    asking_nodes: int | None = None
    """The size that is being requested from the coordinator; null once it has answered."""
    fewest: int | None = None
    """Bounds of the run's size, with `most`, from when it was started; null: there is no run, and any size may be requested."""
    most: int | None = None
    waiting: Annotated[WaitingForMachines, Meta(extra_json_schema=OPERATORS_OWN)] | None = None
    """State of a start; null once the job has trained."""
    coordinator: CoordinatorSeen | None = None
    start_time: Moment | None = None
    """Start of the newest run."""
    completion_time: Moment | None = None
    conditions: Annotated[
        tuple[JobCondition, ...],
        Meta(
            extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = ()
    nodes: NodeCounts | None = None
    progress: TrainingProgress | None = None
    saved: SavedState | None = None
    incidents: IncidentCounts | None = None

    def condition(self, type_: ConditionType) -> JobCondition | None:
        """The condition of a type; None: it is not there yet."""
        return next((c for c in self.conditions if c.type == type_), None)

    def holds(self, type_: ConditionType) -> bool:
        """Whether a condition is True."""
        found = self.condition(type_)
        return found is not None and found.status == "True"

    @property
    def has_ended(self) -> bool:
        """Whether the job is complete or has failed, which is final."""
        return self.holds(ConditionType.COMPLETE) or self.holds(ConditionType.FAILED)


def status_of(raw: Mapping[str, Any], error: type[Exception]) -> JobStatus:
    """The status of an object from the API server. Raises `error` if it cannot be read."""
    read = partial(msgspec.convert, type=JobStatus)
    status: JobStatus = decode(read, raw.get("status", {}), "the status of the HoldfastJob", error=error)
    return status


# ------------------------------------------------------------ timestamps


def timestamp(utc_s: float) -> str:
    """A time as Kubernetes writes it, for example `2026-11-22T09:00:11Z`."""
    return datetime.fromtimestamp(utc_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_timestamp(text: str | None) -> float | None:
    """Seconds since 1970; None: there is no timestamp, or it cannot be read."""
    try:
        return decode(_utc_s, text, "a time") if text else None
    except Damaged:
        return None


def _utc_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# ------------------------------------------------------------ writing a status

OURS = frozenset(ConditionType)


def status_patch(raw: Object, status: JobStatus) -> list[Object]:
    """The JSON patch that writes a status: tests of what it was decided from, and the changes. Foreign conditions are kept.

    Args:
        raw: the object as it was observed.
    """
    after = written(status) | {"revision": (raw.get("status") or {}).get("revision", 0) + 1}
    patch: list[Object] = [
        {"op": "test", "path": path, "value": value} for path, value in decided_from(raw).items()
    ]
    before: Object = raw.get("status") or {}
    if not before:
        return [*patch, {"op": "add", "path": "/status", "value": after}]
    conditions = after.pop("conditions", [])
    patch += [
        {"op": "remove", "path": f"/status/{name}"}
        for name in before
        if name not in after | {"conditions": ()}
    ]
    patch += [
        {"op": "add", "path": f"/status/{name}", "value": value}
        for name, value in after.items()
        if name not in before or before[name] != value
    ]
    return patch + _conditions_patch(before.get("conditions"), conditions)


def _conditions_patch(before: list[Object] | None, after: list[Object]) -> list[Object]:
    """Changes of the list of conditions. A JSON patch addresses entries by position, so each position is tested for its type
    first."""
    if before is None:
        return [{"op": "add", "path": "/status/conditions", "value": after}] if after else []
    wanted = {one["type"]: one for one in after}
    changes: list[Object] = []
    gone: list[Object] = []
    for at, one in enumerate(before):
        if (type_ := one["type"]) not in OURS or wanted.get(type_) == one:
            continue
        place = f"/status/conditions/{at}"
        changes.append({"op": "test", "path": f"{place}/type", "value": type_})
        if type_ in wanted:
            changes.append({"op": "replace", "path": place, "value": wanted[type_]})
        else:
            gone.append({"op": "remove", "path": place})
    known = {one["type"] for one in before}
    changes += [
        {"op": "add", "path": "/status/conditions/-", "value": one}
        for one in after
        if one["type"] not in known
    ]
    # Removals come last and from the back, because each shifts the positions behind it.
    return changes + gone[::-1]


def decided_from(raw: Object) -> dict[str, Any]:
    """The values, by path, that must not have changed when a status is written.

    They differ if there is another job of the same name by now, if the spec was edited or the job is being deleted, or if another
    operator has written a status, whose numbers must not be used again.
    """
    metadata = raw["metadata"]
    found: dict[str, Any] = {
        f"/metadata/{key}": metadata[key] for key in ("uid", "generation") if key in metadata
    }
    # Each write of a status increments the revision. A status without one was written by an earlier version.
    if "revision" in (raw.get("status") or {}):
        return found | {"/status/revision": raw["status"]["revision"]}
    return found | {"/metadata/resourceVersion": metadata["resourceVersion"]}


def written(status: JobStatus) -> Object:
    """The status in the API server's form, without its revision and without foreign conditions."""
    conditions = tuple(one for one in status.conditions if one.type in OURS)
    status = msgspec.structs.replace(status, conditions=conditions, revision=None)
    # Without parts that are empty. The API server turns an empty part that had fields before into `null`, and then refuses the
    # whole status (seen on 1.37.2, in a second run).
    return {name: value for name, value in msgspec.to_builtins(status).items() if value != {}}
