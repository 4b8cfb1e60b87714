"""What the operator says of a job: written by it alone, read by people and programs. Unknown is absent, never 0.

A status is written as a JSON patch (RFC 6902) that is refused where what it was decided from has changed. A request with the object's
version would be refused as well where somebody else has changed a label. A script that does so fifty times a second would then have
nearly every status refused, since the version is old before the request is there.

The API server compares the *bytes* of a tested value with its own encoding of the object (seen on 1.37.2). Go writes `<`, `>`
and `&` as `\\u003c`, `\\u003e` and `\\u0026`, and other letters as they are; Python's encoder does neither. A test of a text
would fail for ever as soon as one of these is in it. So only numbers, names of types and moments are tested.
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
"""UTC, as Kubernetes writes it."""


class ConditionType(StrEnum):
    """What a program can wait for: `kubectl wait --for=condition=Training`."""

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
    """What all parts of the status are. Unknown fields are left: a later operator may have written them."""


QUEUED = "Queued"
"""Reason of Suspended: nobody has suspended the job; it waits for quota, or for machines."""


class JobCondition(_Struct, frozen=True, kw_only=True):
    """One thing that holds, does not, or is not known."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    last_transition_time: Moment
    observed_generation: int = 0


class NodeCounts(_Struct, frozen=True, kw_only=True):
    """How many pods are in which state."""

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
    """How far the training is, as its coordinator last said."""

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
    """Who decides."""

    pod: str | None = None
    address: str | None = None
    restarts: int | None = None
    """How often its container had been started anew when it last answered; null: it has not answered yet."""


class WaitingForMachines(_Struct, frozen=True, kw_only=True):
    """A start that has too few machines."""

    bound: int = 0
    """Nodes that have one."""
    since: Moment
    """It has so many since then."""
    first: Moment | None = None
    """When it was started the first time: from then on its deadline counts."""
    tries: int = 0
    """How often it has given its machines back."""
    until: Moment | None = None
    """It gave them back, and asks for none before."""


OPERATORS_OWN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
"""Of what one operator writes for the next one to read, and nobody else: the definition says no more of it."""


class JobStatus(_Struct, frozen=True, kw_only=True):
    """The whole of it."""

    observed_generation: int | None = None
    revision: int | None = None
    """Counts writes of the status; an operator's write is refused where another one has written since."""
    state: str | None = None
    """One word, for people; programs read conditions."""
    reason: str | None = None
    selector: str | None = None
    """Of the nodes' pods, for kubectl scale and budgets."""
    run: int | None = None
    """Counts starts of this object: 1, and one more after each suspend."""
    term: int | None = None
    """Of the coordinator."""
    next_number: int | None = None
    """No pod had this number or a higher one."""
    asked_nodes: int | None = None
    """What `spec.nodes` was when the coordinator was last asked for it."""
    asking_nodes: int | None = None
    """The size that the coordinator is being asked for; null once it has answered."""
    fewest: int | None = None
    """Nodes that the run may have at least, and `most`, as it was started; null: there is no run, and any size may be asked for."""
    most: int | None = None
    waiting: Annotated[WaitingForMachines, Meta(extra_json_schema=OPERATORS_OWN)] | None = None
    """Of a job that has not trained yet."""
    coordinator: CoordinatorSeen | None = None
    start_time: Moment | None = None
    """Of the newest run."""
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
        """None: nothing was said of it yet."""
        return next((c for c in self.conditions if c.type == type_), None)

    def holds(self, type_: ConditionType) -> bool:
        """Whether it is known to hold."""
        found = self.condition(type_)
        return found is not None and found.status == "True"

    @property
    def has_ended(self) -> bool:
        """For ever."""
        return self.holds(ConditionType.COMPLETE) or self.holds(ConditionType.FAILED)


def status_of(raw: Mapping[str, Any], error: type[Exception]) -> JobStatus:
    """That of an object as the API server has it. Raises `error`: it cannot be read."""
    read = partial(msgspec.convert, type=JobStatus)
    status: JobStatus = decode(read, raw.get("status", {}), "the status of the HoldfastJob", error=error)
    return status


# ------------------------------------------------------------ moments


def timestamp(utc_s: float) -> str:
    """`2026-11-22T09:00:11Z`."""
    return datetime.fromtimestamp(utc_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_timestamp(text: str | None) -> float | None:
    """Seconds since 1970; None: it is not known, or nobody can read it."""
    try:
        return decode(_utc_s, text, "a time") if text else None
    except Damaged:
        return None


def _utc_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# ------------------------------------------------------------ how it is written

OURS = frozenset(ConditionType)


def status_patch(raw: Object, status: JobStatus) -> list[Object]:
    """Of the object as it was seen: tests, and what changes of the status. Other people's conditions are not touched."""
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
    """The list has no keys in a JSON patch, so a place in it is tested to be the condition's that it was."""
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
    # From the back, and after everything else: each removal moves the places behind it.
    return changes + gone[::-1]


def decided_from(raw: Object) -> dict[str, Any]:
    """By its path, what has to be as it was: another job of the same name, a spec that was edited, a deletion, and another operator's
    status, whose numbers must not be given out twice."""
    metadata = raw["metadata"]
    found: dict[str, Any] = {
        f"/metadata/{key}": metadata[key] for key in ("uid", "generation") if key in metadata
    }
    # Each write of an operator's counts on. A status without the number was written by a version before it.
    if "revision" in (raw.get("status") or {}):
        return found | {"/status/revision": raw["status"]["revision"]}
    return found | {"/metadata/resourceVersion": metadata["resourceVersion"]}


def written(status: JobStatus) -> Object:
    """The status as the API server has it, without its revision, and without conditions that somebody else keeps on the object."""
    conditions = tuple(one for one in status.conditions if one.type in OURS)
    status = msgspec.structs.replace(status, conditions=conditions, revision=None)
    # Without parts of which nothing is known. The API server makes an empty part, whose fields were known before, to
    # `null`, and then refuses all of the status (seen on 1.37.2, in a second run).
    return {name: value for name, value in msgspec.to_builtins(status).items() if value != {}}
