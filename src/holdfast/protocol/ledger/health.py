"""Findings about nodes' health, and what was done about them."""

from __future__ import annotations

from holdfast.protocol.health import Condition, Remedy, Severity, remedy_text
from holdfast.protocol.ledger.base import LedgerEvent
from holdfast.protocol.units import plural, seconds


# The fields after `incident` are copied, not nested: entries of a ledger are flat, so that SQL and jq can
# read them.
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

    def sentence(self) -> str:
        about = f"{self.node} {self.subject}".strip()
        trial = " (on trial)" if self.dry_run else ""
        return f"{about}: {self.rule}{trial}: {self.evidence}"


# `would` beside `does`: a limit that kept a sick machine in the job must be visible to whoever wonders why.
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

    def sentence(self) -> str:
        number = f"incident {self.incident}: " if self.incident else ""
        again = "" if self.again_s is None else f" (reconsidered in {seconds(self.again_s)})"
        return f"{number}{self.node}: {remedy_text(self.does)}: {self.reason}{again}"


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

    def sentence(self) -> str:
        seen = f"{self.nodes} of {plural(self.of, 'node')} report {self.rule} within {seconds(self.within_s)}"
        return f"{seen}: the cause is probably the network or the script, so nothing is replaced"


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

    def sentence(self) -> str:
        window = f"{self.nodes} of {plural(self.of, 'node')} acted on within {seconds(self.within_s)}"
        return f"{window}, which is the limit: no action on {self.node} for now"


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

    def sentence(self) -> str:
        return f"please inspect {self.node}: {self.text}"


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

    def sentence(self) -> str:
        device = f" of {self.device}" if self.device else ""
        return f"{self.node}: starting {self.remedy}{device}"


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

    def sentence(self) -> str:
        if self.error:
            return f"{self.node}: {self.remedy} failed: {self.error}"
        return f"{self.node}: {self.remedy} done after {seconds(self.took_s)}"


class Rebooting(LedgerEvent, frozen=True, kw_only=True):
    """A node that has left is rebooted."""

    node: str
    """The node's name."""
    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"rebooting {self.node}: {self.reason}"


class Rebooted(LedgerEvent, frozen=True, kw_only=True):
    """A rebooted machine joined again."""

    node: str
    """The node's name."""
    took_s: float
    """Seconds since the reboot was ordered."""

    def sentence(self) -> str:
        return f"{self.node} is back, {seconds(self.took_s)} after its reboot was ordered"


class Readmitted(LedgerEvent, frozen=True, kw_only=True):
    """A machine may be used again."""

    node: str
    """The node's name."""
    checks: list[str]
    """Checks that it passed; empty: a person cleared it."""
    was: str | None
    """Why it was not used."""

    def sentence(self) -> str:
        checks = self.checks
        how = f"passed {plural(len(checks), 'deep check')}" if checks else self.was or "cleared"
        return f"{self.node} may be used again: {how}"


class ChecksUnknown(LedgerEvent, frozen=True, kw_only=True):
    """A node joins though some checks gave no result."""

    node: str
    """The node's name."""
    checks: list[str]
    """The checks."""

    def sentence(self) -> str:
        return f"{self.node} joined, but these checks gave no result: {', '.join(self.checks)}"


class History(LedgerEvent, frozen=True, kw_only=True):
    """The histories of nodes cannot be used."""

    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"the history of machines cannot be used: {self.reason}"
