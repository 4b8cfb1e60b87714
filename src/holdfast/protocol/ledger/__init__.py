"""The events of a job's ledger: one frozen struct for each kind.

A kind never changes its meaning, and its fields never change theirs: a kind gains a field with a default, or another kind
begins. So every version reads what older ones wrote, and shows what later ones wrote as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any, get_args

import msgspec

from holdfast.errors import Damaged
from holdfast.protocol.decoding import decode
from holdfast.protocol.ledger.base import LedgerEvent
from holdfast.protocol.ledger.generations import (
    BeganAnew,
    Broke,
    Capacity,
    Changed,
    FewMicroBatches,
    Formed,
    Level,
    Resize,
    Restart,
    Started,
    Waiting,
    Yield,
)
from holdfast.protocol.ledger.health import (
    Asked,
    BlastLimit,
    ChecksUnknown,
    Finding,
    History,
    Readmitted,
    Rebooted,
    Rebooting,
    Repaired,
    Repairing,
    Storm,
    Verdict,
)
from holdfast.protocol.ledger.incidents import (
    IncidentClosed,
    IncidentExplained,
    IncidentFacts,
    IncidentJoined,
    IncidentOpened,
    IncidentResumed,
    IncidentSettled,
)
from holdfast.protocol.ledger.job import (
    Ended,
    FaultInjected,
    FaultNotFired,
    HandedOver,
    JobGoing,
    JobStays,
    LedgerBack,
    LedgerFailed,
    StopRequested,
)
from holdfast.protocol.ledger.nodes import (
    Lemon,
    LemonLeaves,
    NodeHeld,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeLost,
    NodeRefused,
    NodeStays,
    NodeTaken,
    NodeTrainsOn,
    NodeUnavailable,
    OrderFailed,
)
from holdfast.protocol.ledger.storage import (
    CheckpointSkipped,
    CheckpointUnread,
    FewCopies,
    LastNotSaved,
    OnlyInMemory,
    Saved,
    SavingLast,
    Snapshot,
    SnapshotBack,
    SnapshotSkipped,
    SnapshotSpoiled,
    SnapshotUnreadable,
    TierFailed,
    TierSlow,
)
from holdfast.protocol.ledger.workers import (
    CollectiveError,
    Failed,
    Rebuild,
    Stalled,
    StallJudged,
    WorkerDone,
    WorkerEnded,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)

__all__ = [
    "EVENTS",
    "VERSION",
    "Asked",
    "BeganAnew",
    "BlastLimit",
    "Broke",
    "Capacity",
    "Changed",
    "CheckpointSkipped",
    "CheckpointUnread",
    "ChecksUnknown",
    "CollectiveError",
    "Ended",
    "Failed",
    "FaultInjected",
    "FaultNotFired",
    "FewCopies",
    "FewMicroBatches",
    "Finding",
    "Formed",
    "HandedOver",
    "History",
    "IncidentClosed",
    "IncidentExplained",
    "IncidentFacts",
    "IncidentJoined",
    "IncidentOpened",
    "IncidentResumed",
    "IncidentSettled",
    "JobGoing",
    "JobStays",
    "LastNotSaved",
    "LedgerBack",
    "LedgerEvent",
    "LedgerFailed",
    "Lemon",
    "LemonLeaves",
    "Level",
    "NodeHeld",
    "NodeJoined",
    "NodeLeaving",
    "NodeLeft",
    "NodeLost",
    "NodeRefused",
    "NodeStays",
    "NodeTaken",
    "NodeTrainsOn",
    "NodeUnavailable",
    "OnlyInMemory",
    "OrderFailed",
    "Readmitted",
    "Rebooted",
    "Rebooting",
    "Rebuild",
    "Repaired",
    "Repairing",
    "Resize",
    "Restart",
    "Saved",
    "SavingLast",
    "Snapshot",
    "SnapshotBack",
    "SnapshotSkipped",
    "SnapshotSpoiled",
    "SnapshotUnreadable",
    "StallJudged",
    "Stalled",
    "Started",
    "StopRequested",
    "Storm",
    "TierFailed",
    "TierSlow",
    "Verdict",
    "Waiting",
    "WorkerDone",
    "WorkerEnded",
    "WorkerExited",
    "WorkerReady",
    "WorkerStarted",
    "Yield",
    "read",
]

VERSION = 2
"""Of these structs, kept as SQLite's `user_version` of a ledger. It grows when a kind or a field is added or
renamed."""


def _kinds(event: type[LedgerEvent]) -> Iterator[type[LedgerEvent]]:
    """The kinds below a class: those that no other one is made of."""
    # Only leaves are kinds. A class that others build on, such as the facts of an incident, is never written
    # itself.
    for below in event.__subclasses__():
        yield from _kinds(below) if below.__subclasses__() else [below]


EVENTS: dict[str, type[LedgerEvent]] = {event.kind: event for event in _kinds(LedgerEvent)}
"""Every kind of event."""


def read(kind: str, fields: Mapping[str, Any]) -> LedgerEvent | None:
    """An event as this version knows it. A field that may be unknown is unknown where it is missing.

    Returns:
        None: a later version wrote it, or the fields are not those of the kind.
    """
    # A kind that a later version writes is no error. Whoever shows the ledger shows it as it was written.
    event = EVENTS.get(kind)
    if event is None:
        return None
    try:
        # Strict about types and lenient about what is missing: an older version did not know a field, so it
        # reads as None if it may be None. Everything else that does not fit is shown raw instead of wrongly.
        known: LedgerEvent = decode(partial(_known, event), fields, kind)
    except Damaged:
        return None
    return known


def _known(event: type[LedgerEvent], fields: Mapping[str, Any]) -> LedgerEvent:
    return msgspec.convert({**_unknown(event), **fields}, event)


@cache
def _unknown(event: type[LedgerEvent]) -> dict[str, None]:
    """The fields of an event that may be None and have no default."""
    fields = (f for f in msgspec.structs.fields(event) if f.required)
    return {f.name: None for f in fields if type(None) in get_args(f.type)}
