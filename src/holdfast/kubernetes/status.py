"""What the operator says of a job: written by it alone, read by people and programs. Unknown is absent, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast.protocol.wire.decoding import decode

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


class Progress(_Struct, frozen=True, kw_only=True):
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
    progress: Progress | None = None
    saved: SavedState | None = None
    incidents: IncidentCounts | None = None

    def condition(self, type_: ConditionType) -> JobCondition | None:
        """None: nothing was said of it yet."""
        return next((c for c in self.conditions if c.type == type_), None)

    def holds(self, type_: ConditionType) -> bool:
        """Whether it is known to hold."""
        found = self.condition(type_)
        return found is not None and found.status == "True"


def status_of(raw: Mapping[str, Any], error: type[Exception]) -> JobStatus:
    """That of an object as the API server has it. Raises `error`: it cannot be read."""
    read = partial(msgspec.convert, type=JobStatus)
    status: JobStatus = decode(read, raw.get("status", {}), "the status of the HoldfastJob", error=error)
    return status
