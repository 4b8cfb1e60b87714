"""Findings about nodes' health, and what was done about them."""

from __future__ import annotations

from holdfast.protocol.health import Condition, Remedy, Severity
from holdfast.protocol.ledger.base import LedgerEvent


class Finding(LedgerEvent, frozen=True, kw_only=True):
    """A health rule matched, or could not be told. The fields after `incident` are those of `protocol.health.Finding`."""

    node: str
    """The node's name."""
    incident: int | None
    """The incident that it belongs to."""
    rule: str
    """The rule's name."""
    severity: Severity
    """How bad it is for the job."""
    remedy: Remedy
    """What the rule asks for."""
    source: str
    """What it was read from."""
    condition: Condition
    """What is known of the subject."""
    subject: str
    """What it is about, as people call it; empty: the node."""
    device: str
    """The subject's lasting identity, if it has one."""
    worker: str
    """The worker that it concerns, if it is one."""
    evidence: str
    """What matched."""
    count: int
    """Occurrences within the rule's window."""
    shared: bool
    """Many nodes have this fault at once."""
    dry_run: bool
    """The rule is on trial."""
    age_s: float
    """Seconds since it happened."""
    firm: bool
    """It need not be seen twice."""


class Verdict(LedgerEvent, frozen=True, kw_only=True):
    """What was decided about a finding."""

    incident: int | None
    """The incident; None: the rule is on trial."""
    node: str
    """The node's name."""
    rule: str
    """The rule's name."""
    asked: Remedy
    """What the rule asks for."""
    does: Remedy
    """What is done."""
    would: Remedy
    """What would be done if nothing spoke against it."""
    against: str
    """What spoke against it; empty: nothing."""
    reason: str
    """Why, in words."""
    weighed: list[str]
    """What was looked at, in words."""
    again_s: float | None = None
    """In so many seconds it is decided again."""


class Storm(LedgerEvent, frozen=True, kw_only=True):
    """Many nodes match one rule at once: it is none of theirs."""

    rule: str
    """The rule's name."""
    nodes: int
    """Nodes that match."""
    of: int
    """Nodes of the job."""
    within_s: float
    """Within so many seconds."""


class BlastLimit(LedgerEvent, frozen=True, kw_only=True):
    """So many nodes were acted on that others are left alone."""

    node: str
    """A node that is left alone."""
    nodes: int
    """Nodes that were acted on."""
    of: int
    """Nodes of the job."""
    limit: int
    """At most so many."""
    within_s: float
    """Within so many seconds."""


class Asked(LedgerEvent, frozen=True, kw_only=True):
    """A person is to look at something."""

    node: str
    """The node's name."""
    rule: str
    """The rule's name."""
    text: str
    """What to look at."""
    incident: int | None
    """The incident that it belongs to."""


class Repairing(LedgerEvent, frozen=True, kw_only=True):
    """A node's agent is told to repair something."""

    node: str
    """The node's name."""
    remedy: Remedy
    """What it does."""
    device: str
    """The device; empty: the node."""
    incident: int
    """The incident."""


class Repaired(LedgerEvent, frozen=True, kw_only=True):
    """The agent did what it was told, or could not."""

    node: str
    """The node's name."""
    remedy: Remedy
    """What it did."""
    error: str | None
    """Why it could not."""
    incident: int
    """The incident."""
    took_s: float
    """Seconds since it was decided."""


class Rebooting(LedgerEvent, frozen=True, kw_only=True):
    """A node that has left is rebooted."""

    node: str
    """The node's name."""
    reason: str
    """Why."""


class Rebooted(LedgerEvent, frozen=True, kw_only=True):
    """A rebooted machine joined again."""

    node: str
    """The node's name."""
    took_s: float
    """Seconds since the reboot was ordered."""


class Readmitted(LedgerEvent, frozen=True, kw_only=True):
    """A machine may be used again."""

    node: str
    """The node's name."""
    checks: list[str]
    """Checks that it passed; empty: a person cleared it."""
    was: str | None
    """Why it was not used."""


class ChecksUnknown(LedgerEvent, frozen=True, kw_only=True):
    """A node joins though some checks gave no result."""

    node: str
    """The node's name."""
    checks: list[str]
    """The checks."""


class History(LedgerEvent, frozen=True, kw_only=True):
    """The histories of nodes cannot be used."""

    reason: str
    """Why."""
