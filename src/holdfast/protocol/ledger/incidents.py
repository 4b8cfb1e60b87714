"""Incidents: faults, from the first sign to full strength."""

from __future__ import annotations

from holdfast.protocol.causes import CauseKind
from holdfast.protocol.ledger.base import LedgerEvent


class IncidentFacts(LedgerEvent, frozen=True, kw_only=True):
    """What is known of an incident: the fields of four events, and of the report. Durations are in seconds. Of an incident
    that stopped training more than once, they are those of the last time."""

    id: int
    """Its number."""
    fault: str | None
    """The injected fault; also that of a known kind (`nan`, `kill-coordinator`)."""
    injected: bool
    """It was injected."""
    node: str | None
    """The node at fault."""
    ranks: list[int]
    """Ranks of the workers that it struck."""
    at_step: int | None
    """Committed steps then."""
    t_s: float | None
    """When it began, since the job's start."""
    detect_s: float | None
    """From the fault to its first sign."""
    decide_s: float | None
    """From the first sign to the decision."""
    replace_s: float | None
    """From the first sign until a newcomer was there."""
    join_s: float | None
    """The longest that a member needed to connect."""
    restore_s: float | None
    """The longest that a member needed to get the state."""
    first_step_s: float | None
    """From connecting to the first commit."""
    stall_s: float | None
    """From the fault to the next commit by anyone."""
    earlier_stalls: int
    """How often it stopped training before."""
    earlier_stall_s: float
    """For how long in all."""
    full_strength_s: float | None
    """From the fault to full strength."""
    lost_steps: int | None
    """Committed steps to be computed again."""
    rung: str | None
    """How it was repaired."""
    cause: str
    """In words."""
    cause_kind: CauseKind | None = None
    """The kind of the cause; None: an older version wrote it."""
    rule: str | None
    """The health rule that explains it."""
    quiet: bool
    """Training was not disturbed."""
    verdict: str | None
    """What was decided about it, in words."""
    where: str | None
    """Of a hang: where all ranks stood."""


class IncidentOpened(IncidentFacts, frozen=True, kw_only=True):
    """A fault was noticed."""


class IncidentResumed(IncidentFacts, frozen=True, kw_only=True):
    """Training goes on after it."""


class IncidentClosed(IncidentFacts, frozen=True, kw_only=True):
    """The job is at full strength again."""


class IncidentSettled(IncidentFacts, frozen=True, kw_only=True):
    """What was done about an incident that did not disturb training is done."""


class IncidentJoined(LedgerEvent, frozen=True, kw_only=True):
    """Something else happened that belongs to a known incident."""

    id: int
    """The incident's number."""
    node: str | None
    """Where it happened."""
    cause: str
    """What happened, in words."""
    cause_kind: CauseKind | None = None
    """Its kind; None: an older version wrote it."""


class IncidentExplained(LedgerEvent, frozen=True, kw_only=True):
    """The cause of an incident became known later."""

    id: int
    """The incident's number."""
    node: str | None
    """The node at fault."""
    ranks: list[int] | None = None
    """Its ranks, if they are others than before."""
    cause: str
    """The cause, in words."""
    cause_kind: CauseKind | None = None
    """Its kind; None: an older version wrote it."""
    was: str
    """What was taken for the cause before."""
