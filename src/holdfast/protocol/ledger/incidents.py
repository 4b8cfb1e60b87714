"""Incidents: faults, from the first sign to full strength."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.protocol.causes import CauseKind
from holdfast.protocol.ledger.base import LedgerEvent
from holdfast.protocol.units import plural, ranks, seconds

PHASES = ("detect_s", "decide_s", "replace_s", "join_s", "restore_s", "first_step_s")
"""An incident's phases in their order."""


def phases_text(incident: Mapping[str, Any], names: Sequence[str] = PHASES) -> str:
    """`detect 0.17 s, decide 26 ms, ...`: the phases that are known."""
    # By name from a mapping, not from the struct: reports and older ledgers lack some of these.
    known = [(name, incident.get(name)) for name in names]
    return ", ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {seconds(v)}" for name, v in known if v is not None
    )


def counted_as(fault: str | None, rule: str | None, kind: str | None) -> str:
    """The label under which an incident is counted: the name of its injected fault, else the kind of its cause."""
    # An injected fault counts by its own name, so that a test of fault tolerance does not show up as failing
    # hardware in the metrics that people alert on.
    if fault:
        return fault.partition(":")[0]
    return CauseKind.HEALTH.value if rule else kind or CauseKind.OTHER.value


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
    """From the fault to the next commit by anyone, without `paused_s`."""
    paused_s: float = 0.0
    """Between them, work of the script's own between two steps, such as an evaluation: it is no part of the stall, of `decide_s`
    and of `first_step_s`."""
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
    """The kind of the cause; None: not known."""
    rule: str | None
    """The health rule that explains it."""
    quiet: bool
    """Training was not disturbed."""
    verdict: str | None
    """What was decided about it, in words."""
    where: str | None
    """Of a hang: where all ranks stood."""
    stood_at_step: int | None = None
    """Of a hang at level 0 and 1: optimizer steps in that start of the culprit that has fewest; None: not known."""
    collective: str | None = None
    """Of a hang: what the culprits have not entered while others wait in it; None: not known."""
    place: str | None = None
    """The common place of nodes that were lost together; None: one node."""
    nodes: list[str] = []
    """Those nodes."""

    def _phases(self, *names: str) -> str:
        known = phases_text(msgspec.structs.asdict(self), names)
        return f" ({known})" if known else ""


FACTS = frozenset(f"incident-{what}" for what in ("opened", "resumed", "closed", "settled"))
"""Kinds of events that have all facts of an incident."""
ABOUT_INCIDENTS = FACTS | {"incident-explained"}


def add_facts(known: dict[str, Any], kind: str, fields: Mapping[str, Any]) -> None:
    """Adds what an event of `ABOUT_INCIDENTS` tells of an incident to what those before it told."""
    if kind in FACTS:
        # An explanation that was found knows more than the closing event, which repeats the first cause.
        known.update(fields, cause=known.get("explained") or fields.get("cause"))
        return
    known["explained"] = known["cause"] = fields["cause"]
    # An explanation that names no node must not take away the one that the first sign had.
    known.update({name: fields[name] for name in ("node", "ranks") if fields.get(name)})


class IncidentOpened(IncidentFacts, frozen=True, kw_only=True):
    """A fault was noticed."""

    def sentence(self) -> str:
        # Node, ranks and time to detection, as far as they are known; with none of them, at least the step,
        # so that a person can look it up in the log.
        where = [self.node] if self.node else []
        where += [f"rank {ranks(self.ranks)}"] if self.ranks else []
        where += [] if self.detect_s is None else [f"found after {seconds(self.detect_s)}"]
        if not where and self.at_step is not None:
            where = [f"step {self.at_step}"]
        return f"incident {self.id}: {''.join(f'{x}: ' for x in [', '.join(where)] if x)}{self.cause}"


class IncidentResumed(IncidentFacts, frozen=True, kw_only=True):
    """Training goes on after it."""

    def sentence(self) -> str:
        lost = self.lost_steps
        cost = f", {plural(lost, 'step')} lost" if lost else ""
        known = self._phases("detect_s", "decide_s")
        return f"incident {self.id}: training again after {seconds(self.stall_s)}{cost}{known}"


class IncidentClosed(IncidentFacts, frozen=True, kw_only=True):
    """The job is at full strength again."""

    def sentence(self) -> str:
        rung = f", {self.rung}" if self.rung else ""
        known = self._phases("replace_s", "restore_s")
        return f"incident {self.id}: full strength after {seconds(self.full_strength_s)}{rung}{known}"


class IncidentSettled(IncidentFacts, frozen=True, kw_only=True):
    """What was done about an incident that did not disturb training is done."""

    def sentence(self) -> str:
        took = self.full_strength_s
        after = "" if took is None else f" after {seconds(took)}"
        return f"incident {self.id}: settled{after}, training was not disturbed"


class IncidentJoined(LedgerEvent, frozen=True, kw_only=True):
    """Something else happened that belongs to a known incident."""

    id: int
    """The incident's number."""
    node: str | None
    """Where it happened."""
    cause: str
    """What happened, in words."""
    cause_kind: CauseKind | None = None
    """Its kind; None: not known."""

    def sentence(self) -> str:
        where = f"{self.node}: " if self.node else ""
        return f"incident {self.id}: also, {where}{self.cause}"


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
    """Its kind; None: not known."""
    was: str
    """What was taken for the cause before."""

    def sentence(self) -> str:
        return f"incident {self.id}: the cause is {self.cause}"
