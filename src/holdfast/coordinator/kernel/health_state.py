"""What the core remembers of the nodes' health: plain values, a part of `state.CoreState`. All lists are bounded."""

from __future__ import annotations

import msgspec

from holdfast.protocol.health import Remedy, Severity

KEPT_EVIDENCE = 8
KEPT_SIGHTINGS = 64
KEPT_ACTS = 64
KEPT_MACHINES = 128
KEPT_ASKS = 16
KEPT_RULES = 256
TEXT_CHARS = 120


class Evidence(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One thing that was seen of an incident. count: how often. rule: empty for what happened to the job itself."""

    rule: str
    source: str
    text: str
    at_s: float
    count: int = 1


class Sighting(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A rule that matched lately: for what happens to workers next, and for the same on other nodes. grave: it explains
    the end of a worker. step, generation: what the job was at, for telling the script's faults from the machine's."""

    rule: str
    node: str
    machine: str
    at_s: float
    text: str = ""
    worker: str = ""
    grave: bool = False
    step: int = 0
    generation: int = 0


class Act(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One remedy that was begun. machine: the node's lasting identity. earlier: by another job, before this one.

    request, until_s: of an order that an agent has yet to answer. sent: it has the order.
    """

    at_s: float
    machine: str
    node: str
    rule: str
    remedy: Remedy
    incident: int = 0
    device: str = ""
    done_s: float | None = None
    error: str | None = None
    request: int = 0
    until_s: float | None = None
    sent: bool = False
    earlier: bool = False

    @property
    def done(self) -> bool:
        """It is over, well or not."""
        return self.done_s is not None


class Ask(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Something that a person is to look at."""

    at_s: float
    node: str
    rule: str
    text: str
    incident: int = 0


class Checking(msgspec.Struct, omit_defaults=True):
    """A node that may not be used before its deep checks say so."""

    request: int
    until_s: float
    why: str


class HealthTotals(msgspec.Struct, omit_defaults=True):
    """Since the job's start. findings: by rule. acts: by remedy. withheld: by what spoke against acting."""

    findings: dict[str, int] = {}
    acts: dict[str, int] = {}
    withheld: dict[str, int] = {}


class Slow(msgspec.Struct, kw_only=True):
    """A worker that computes longer than its peers, so that all wait for it.

    ratio: its time over theirs. part: of a step in which it needs most more. excess_s: more per step. share: of a step's
    time for which the others wait. world: how many they are, with it. pair: it has only one peer. lost_s: of training
    time so far. until_step: since when it is as fast as they are, or gone. asked_s: what was
    lost when its replacement was asked for last.
    """

    worker: str
    node: str
    rank: int | None
    ratio: float
    since_step: int
    found_step: int
    part: str
    excess_s: float
    share: float
    world: int
    pair: bool = False
    lost_s: float = 0.0
    until_step: int | None = None
    asked_s: float = 0.0


class Health(msgspec.Struct, omit_defaults=True, kw_only=True):
    """reports: rule to the machines that it matched on within the last minute, and when. quarantine: machine to the
    reason why it is not used. quarantine_rules: to the rule, if that is the reason. reported_at_s: what people were told, and when.
    requests: counts the orders to agents. undecided: incidents that are decided later. turned_away: nodes that were
    refused as they came, and why."""

    sightings: list[Sighting] = []
    reports: dict[str, dict[str, float]] = {}
    acts: list[Act] = []
    quarantine: dict[str, str] = {}
    quarantine_rules: dict[str, str] = {}
    reported_at_s: dict[str, float] = {}
    asks: list[Ask] = []
    undecided: list[int] = []
    requests: int = 0
    refusals: int = 0
    turned_away: dict[str, str] = {}
    totals: HealthTotals = msgspec.field(default_factory=HealthTotals)
    slow: list[Slow] = []
    brought: dict[str, list[int]] = {}
    """Node to the steps of which its own part was not finite."""


SEVERITIES = tuple(Severity)
REMEDIES = tuple(Remedy)


def graver(a: Severity, b: Severity) -> bool:
    """a is worse than b."""
    return SEVERITIES.index(a) > SEVERITIES.index(b)


def stronger(a: Remedy, b: Remedy) -> bool:
    """a is a higher rung than b."""
    return REMEDIES.index(a) > REMEDIES.index(b)


def count(table: dict[str, int], key: str) -> None:
    """One more of a kind; of more kinds than are kept apart the rest is `other`."""
    known = key if key in table or len(table) < KEPT_RULES else "other"
    table[known] = table.get(known, 0) + 1
