"""What the core remembers of the nodes' health: plain values, a part of `state.CoreState`. All lists are bounded."""

from __future__ import annotations

import msgspec

from holdfast.coordinator.kernel.restart_budget import Daily
from holdfast.protocol.engine_orders import EngineTraits
from holdfast.protocol.health import Remedy, Severity

KEPT_EVIDENCE = 8
KEPT_SIGHTINGS = 64
KEPT_ACTS = 64
KEPT_MACHINES = 128
KEPT_ASKS = 16
KEPT_RULES = 256
TEXT_CHARS = 120


class Evidence(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One thing that was seen of an incident."""

    rule: str
    """Empty for what happened to the job itself."""
    source: str
    """Where the rule saw it; `job` for what happened to the job itself."""
    text: str
    at_s: float
    """When it was first seen, on the core's clock."""
    count: int = 1
    """How often."""


class Sighting(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A rule that matched lately: for what happens to workers next, and for the same on other nodes."""

    rule: str
    node: str
    machine: str
    """The node's lasting identity."""
    at_s: float
    """On the core's clock."""
    text: str = ""
    worker: str = ""
    """Empty: it names none."""
    grave: bool = False
    """It explains the end of any worker of the node."""
    step: int = 0
    """Committed steps at that time, for telling the script's faults from the machine's."""
    generation: int = 0
    """The number of the newest one at that time, for the same."""


class Act(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One remedy that was begun."""

    at_s: float
    """When, on the core's clock; before the job's start where another job began it."""
    machine: str
    """The node's lasting identity."""
    node: str
    rule: str
    remedy: Remedy
    incident: int = 0
    """Number of the incident that it is for; 0: for none of this job."""
    device: str = ""
    """Empty: the whole node, or not known."""
    done_s: float | None = None
    """When it was over; None: it is under way."""
    error: str | None = None
    """Why it did not work; None: nothing says that it did not."""
    request: int = 0
    """Number of the order that an agent has yet to answer, or has answered; 0: no order is needed."""
    until_s: float | None = None
    """When the order is to be sent, or answered once it is sent, at the latest; None: nobody waits for it."""
    sent: bool = False
    """The agent has the order."""
    earlier: bool = False
    """By another job, before this one."""

    @property
    def done(self) -> bool:
        """It is over, well or not."""
        return self.done_s is not None


class Ask(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Something that a person is to look at."""

    at_s: float
    """On the core's clock."""
    node: str
    rule: str
    text: str
    incident: int = 0
    """Its number; 0: it is about none."""


class Checking(msgspec.Struct, omit_defaults=True):
    """A node that may not be used before its deep checks say so."""

    request: int
    """Number of the RunChecks."""
    until_s: float
    """On the core's clock; a node without an answer by then is turned away."""
    why: str
    """For people."""


class HealthTotals(msgspec.Struct, omit_defaults=True):
    """What health did, counted since the job's start."""

    findings: dict[str, int] = {}
    """By rule."""
    acts: dict[str, int] = {}
    """By remedy."""
    withheld: dict[str, int] = {}
    """By what spoke against acting, in one word."""


class Slow(msgspec.Struct, kw_only=True):
    """A worker that computes longer than its peers, so that all wait for it."""

    worker: str
    node: str
    rank: int | None
    """When it was found; None: it was no member any more."""
    ratio: float
    """Its time over theirs."""
    since_step: int
    """The step since which it is slow."""
    found_step: int
    """Committed steps when that was found."""
    part: str
    """Of a step, in which it needs most more; for people."""
    excess_s: float
    """How much longer than its peers it computes in a step."""
    share: float
    """Of a step's time, for which the others wait."""
    world: int
    """How many they are, with it."""
    pair: bool = False
    """It has only one peer, so which of the two is at fault is not certain."""
    lost_s: float = 0.0
    """Training time that it has cost so far."""
    until_step: int | None = None
    """The step since which it is as fast as they are again, or gone; None: it is slow."""
    asked_s: float = 0.0
    """`lost_s` when its replacement was asked for last; 0: it was not."""


class Health(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What health knows of machines, and what it did about them. Written by `health`."""

    sightings: list[Sighting] = []
    """Newest last."""
    reports: dict[str, dict[str, float]] = {}
    """Rule to the machines that it matched on within the last minute, and when."""
    acts: list[Act] = []
    """Newest last; those of earlier jobs on a machine come as it joins."""
    quarantine: dict[str, str] = {}
    """Machine to the reason why it is not used."""
    quarantine_rules: dict[str, str] = {}
    """Machine to the rule that it is in quarantine for, if a rule is the reason."""
    reported_at_s: dict[str, float] = {}
    """What people were told, and when last: it is not said again at once."""
    asks: list[Ask] = []
    """Newest last."""
    undecided: list[int] = []
    """Numbers of incidents that are decided later."""
    requests: int = 0
    """Orders to agents so far: numbers them."""
    refusals: int = 0
    """Nodes that were refused as they came."""
    alike: dict[str, set[str]] = {}
    """Names of checks to the nodes that were refused for them, while the job never had a node."""
    turned_away: dict[str, str] = {}
    """Node to why it was refused as it came, while it has not been admitted."""
    totals: HealthTotals = msgspec.field(default_factory=HealthTotals)
    repaired_daily: Daily = msgspec.field(default_factory=Daily)
    """Of the remedies, those that took a node out of the job."""
    slow: list[Slow] = []
    """Oldest first, those that are no longer slow among them."""
    engine: EngineTraits = EngineTraits()
    """As the engine said last."""
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
