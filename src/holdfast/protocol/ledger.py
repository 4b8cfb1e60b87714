"""The events of a job's ledger: one frozen struct for each kind.

The meaning of a kind and of its fields never changes: a kind gains a field with a default, or a new kind is added. So every
version can read what older ones wrote, and shows what newer ones wrote as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, get_args

import msgspec

from holdfast.errors import Damaged
from holdfast.protocol.causes import CauseKind
from holdfast.protocol.health import Condition, Remedy, Severity, remedy_text
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.units import level, plural, ranks, seconds, size
from holdfast.protocol.wire.decoding import decode, kebab

LINE_WIDTH = 77
"""Characters of 100 columns that are left after `[holdfast]` and the time, for the words of a sentence. Its paths come on top."""


class LedgerEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened to the job. Subclasses are frozen and take their fields by keyword.

    A field without a default is always written. One that a later version adds has a default, which older ledgers are read
    with; a default is not written.
    """

    incidents: list[int] = []
    """Numbers of the incidents that it belongs to or follows from, ascending. Events about one incident name it in a field of
    their own."""

    kind: ClassVar[str]
    """The name in the ledger, from the class: `NodeJoined` is `node-joined`."""

    ROUTINE: ClassVar[bool] = False
    """People need not read it as it happens; `holdfast events` shows it."""

    def sentence(self) -> str:
        """One sentence for a person who has not read the code; empty if it is of no interest to one."""
        # Loud, so that an event without a sentence fails its test. A default text would reach people
        # unnoticed.
        raise NotImplementedError(type(self).__name__)

    def paths(self) -> tuple[str, ...]:
        """Paths and URLs that the sentence may have. They are never shortened: a person copies them into the next command."""
        return ()

    # The kind is derived from the class, so the two cannot differ. Renaming a class therefore changes the
    # name on disk: such a class needs its old kind, and a test with a recorded ledger fails without.
    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = kebab(cls.__name__)


class Level(LedgerEvent, frozen=True, kw_only=True):
    """The script called `holdfast.start`: the job goes on at this level."""

    ROUTINE = True

    level: int
    """2."""

    def sentence(self) -> str:
        return f"the script called holdfast.start: the job continues at level {level(self.level)}"


class Waiting(LedgerEvent, frozen=True, kw_only=True):
    """There are too few workers to go on."""

    workers: int
    """Workers that are there."""
    target: int
    """Workers at full strength."""

    def sentence(self) -> str:
        return f"waiting for nodes: {self.workers} of {plural(self.target, 'worker')}"


class Started(LedgerEvent, frozen=True, kw_only=True):
    """At level 0: all workers were started together."""

    generation: int
    """Its number."""
    world: int
    """Workers in it."""
    workers: list[str]
    """Their names, by rank."""
    unnamed: bool = False
    """The ledger has let go of the names since."""

    def sentence(self) -> str:
        again = " again, from warm processes" if self.generation > 1 else ""
        return f"{plural(self.world, 'worker')} started{again}"


class Restart(LedgerEvent, frozen=True, kw_only=True):
    """At level 0: all workers are ended and started again."""

    generation: int
    """The one that ends."""
    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"restarting all workers: {self.reason}"


class BeganAnew(LedgerEvent, frozen=True, kw_only=True):
    """At level 0, once: after a restart the script's optimizer began without state."""

    generation: int
    """The start."""
    steps: int
    """Optimizer steps of the start before it."""

    def sentence(self) -> str:
        return (
            f"the optimizer began this start without state, and the start before made {plural(self.steps, 'step')}: does the "
            "script resume from its own checkpoint? If not, it computes them again and overwrites what it saved"
        )


_RESTORED_FROM = {"disk": "the checkpoint on disk", "memory": "a snapshot in memory"}


# `workers` is in the order of ranks, because ranks decide the order of the reduction. With this entry a curve
# can be replayed bit by bit.
class Formed(LedgerEvent, frozen=True, kw_only=True):
    """A generation was formed."""

    generation: int
    """Its number."""
    start: int
    """Committed steps that it goes on from."""
    world: int
    """Workers that compute."""
    workers: list[str]
    """Their names, by rank."""
    unnamed: bool = False
    """The ledger has let go of the names since."""
    restore: list[str]
    """Those that get the state from others."""
    applied: bool
    """The step in flight was committed first."""
    source: str
    """Where the state comes from: `live`, `memory`, `disk` or `fresh`."""
    groups_connected_in: list[int] | None = None
    """Of each replica, the generation in which its process groups were connected; None: one worker each."""

    def sentence(self) -> str:
        line = f"generation {self.generation}: {plural(self.world, 'worker')} from step {self.start}"
        if self.applied:
            line += ", the step in flight was committed"
        # A list of names only while it is short; a generation of a thousand workers gets a count.
        restored = self.restore or []
        if self.source in ("disk", "memory"):
            return f"{line}, state from {_RESTORED_FROM[self.source]}"
        if restored:
            names = ", ".join(restored) if len(restored) <= 2 else plural(len(restored), "worker")
            return f"{line}, {names} restored from peers"
        return line


class Broke(LedgerEvent, frozen=True, kw_only=True):
    """A generation broke."""

    generation: int
    """Its number."""
    reason: str
    """The cause, in words."""
    step: int
    """Committed steps."""

    def sentence(self) -> str:
        return f"generation {self.generation} broke at step {self.step}: {self.reason}"


class Yield(LedgerEvent, frozen=True, kw_only=True):
    """A generation ends at its next commit, as planned."""

    generation: int
    """Its number."""
    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"generation {self.generation} ends at its next commit: {self.reason}"


class Resize(LedgerEvent, frozen=True, kw_only=True):
    """A person changed how many nodes the job wants."""

    nodes: int
    """Nodes that are wanted now."""
    before: int | None
    """Nodes that were wanted before."""
    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"from {self.before} to {plural(self.nodes, 'node')}: {self.reason}"


class FewMicroBatches(LedgerEvent, frozen=True, kw_only=True):
    """The global batch has fewer micro-batches than the job may have workers: the others are spares."""

    micro_batches: int
    """In a global batch."""
    workers: int
    """Workers that train, at most."""
    wanted: int
    """Workers of as many nodes as the job wants."""

    def sentence(self) -> str:
        there = "1 micro-batch" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches"
        return (
            f"{self.workers} of {plural(self.wanted, 'worker')} train, the others are spares: a global batch has "
            f"only {there}"
        )


class Capacity(LedgerEvent, frozen=True, kw_only=True):
    """The engine changed how many nodes the job may have."""

    nodes: int | None
    """At most; None: no limit."""
    before: int | None
    """The limit before."""
    reason: str
    """As the engine gave it."""
    within_s: float | None
    """How long the job has to shrink, in seconds; None: no limit."""

    def sentence(self) -> str:
        if self.nodes == 0:
            within = "" if self.within_s is None else f" within {seconds(self.within_s)}"
            return f"the engine takes all nodes back{within}: {self.reason}"
        limit = "any number of nodes" if self.nodes is None else f"at most {plural(self.nodes, 'node')}"
        return f"the engine now allows {limit}: {self.reason}"


# Written at the first commit after the change, when its cost is known; the change itself began at `t_s`.
class Changed(LedgerEvent, frozen=True, kw_only=True):
    """A planned change of the membership is complete."""

    id: int
    """Its number."""
    reason: str
    """Why."""
    t_s: float
    """When the last member left, in seconds since the job's start."""
    at_step: int
    """Committed steps then."""
    from_world: int
    """Workers before."""
    to_world: int
    """Workers after."""
    newcomers: int
    """Workers that came with it."""
    join_s: float | None
    """The longest that a member needed to connect."""
    restore_s: float | None
    """The longest that a member needed to get the state."""
    stall_s: float | None
    """For how long training stood, less a median step."""

    def sentence(self) -> str:
        return f"{self.from_world} \u2192 {plural(self.to_world, 'worker')} at step {self.at_step}: stall {seconds(self.stall_s)}"


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
    """Many nodes match one rule at once, so the fault is not theirs."""

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
    """No further nodes are repaired for now, because too many were lately."""

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
    """The fields that four events of an incident share with the report. Durations are in seconds. If an incident stopped
    training more than once, they describe the last time."""

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
    workers: list[str] = []
    """Names of those workers, of 64 at most. No name is used twice, so what the ledger tells of them belongs to it."""
    generation: int = 0
    """Number of the generation that it struck; 0: there was none."""
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


def about_one_incident(event: LedgerEvent) -> bool:
    """Whether an event names its incident in a field of its own."""
    own = isinstance(event, IncidentFacts | IncidentJoined | IncidentExplained)
    return own or "incident" in event.__struct_fields__


FACTS = frozenset(f"incident-{what}" for what in ("opened", "resumed", "closed", "settled"))
"""Kinds of events that have all facts of an incident."""
ABOUT_INCIDENTS = FACTS | {"incident-explained"}
_DEFAULTED = frozenset(one.name for one in msgspec.structs.fields(IncidentFacts) if not one.required)


def add_incident(found: dict[int, dict[str, Any]], kind: str, fields: Mapping[str, Any]) -> None:
    """Adds an event of an incident, in the order of the ledger, to `found`, which has the fields of each incident by its
    number. All readers use this or `add_facts`, so their figures agree."""
    if kind in FACTS or (kind in ABOUT_INCIDENTS and fields["id"] in found):
        add_facts(found.setdefault(fields["id"], {}), kind, fields)


def add_facts(known: dict[str, Any], kind: str, fields: Mapping[str, Any]) -> None:
    """Merges the fields of an event of `ABOUT_INCIDENTS` into those that earlier events gave of the incident."""
    if kind in FACTS:
        # A field with its default is not written: what an event before said of it does not hold any more.
        for name in _DEFAULTED - fields.keys():
            known.pop(name, None)
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


class FaultInjected(LedgerEvent, frozen=True, kw_only=True):
    """A fault is injected."""

    fault: str
    """As it was asked for."""
    fault_kind: str
    """Its kind."""
    node: str | None
    """The node that it strikes."""
    worker: str | None
    """The worker that it strikes."""
    rank: int | None
    """That worker's rank."""
    step: int
    """Committed steps."""

    def sentence(self) -> str:
        who = self.worker or self.node or "the coordinator"
        rank = "" if self.rank is None else f" (rank {self.rank})"
        return f"injecting {self.fault} into {who}{rank} at step {self.step}"


# A test of fault tolerance whose fault never struck passes for the wrong reason. So it is said.
class FaultNotFired(LedgerEvent, frozen=True, kw_only=True):
    """A fault was armed, and what it waits for did not happen."""

    fault: str
    """As it was asked for."""

    def sentence(self) -> str:
        return f"the fault {self.fault} was never injected: its condition did not occur"


class StopRequested(LedgerEvent, frozen=True, kw_only=True):
    """The job ends at its next commit."""

    reason: str
    """Why."""
    outcome: str
    """`stopped` or `failed`."""

    def sentence(self) -> str:
        return f"{'giving up' if self.outcome == 'failed' else 'stopping'}: {self.reason}"


class HandedOver(LedgerEvent, frozen=True, kw_only=True):
    """A coordinator that was asked to go left the job to another one."""

    away_s: float
    """How long there was none."""

    def sentence(self) -> str:
        return f"another coordinator process took the job over after {seconds(self.away_s)}, as requested"


class JobGoing(LedgerEvent, frozen=True, kw_only=True):
    """The job will be ended; its scripts were told."""

    reason: str
    """Why."""
    within_s: float
    """In how many seconds."""

    def sentence(self) -> str:
        return f"the job will be ended within {seconds(self.within_s)}: {self.reason}"


class JobStays(LedgerEvent, frozen=True, kw_only=True):
    """The job was to be ended, and will not be."""

    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"the job continues and will no longer be ended: {self.reason}"


class Ended(LedgerEvent, frozen=True, kw_only=True):
    """The job is over."""

    outcome: str | None
    """`finished`, `stopped` or `failed`."""
    reason: str | None
    """Why it was stopped."""
    step: int | None
    """Committed steps; None: not known."""
    cause: NoticeCause | None = None
    """Why it was stopped, for programs; None: it was not."""

    def sentence(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        step = "" if self.step is None else f" at step {self.step}"
        return f"{self.outcome}{step}{reason}"


class LedgerFailed(LedgerEvent, frozen=True, kw_only=True):
    """The ledger cannot be written; training goes on."""

    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"the ledger cannot be written, training continues: {self.reason}"


class LedgerBack(LedgerEvent, frozen=True, kw_only=True):
    """The ledger can be written again."""

    failed_s: float
    """For so many seconds it could not."""

    def sentence(self) -> str:
        return f"the ledger can be written again, after {self.failed_s:.0f} s"


class NodeJoined(LedgerEvent, frozen=True, kw_only=True):
    """An agent joined with a node."""

    node: str
    """Its name."""
    host: str
    """Its address."""
    slots: int
    """Workers that it can run."""
    place: str | None = None
    """Where it stands, as `protocol.place` writes it; None: not known."""

    def sentence(self) -> str:
        where = f" in {self.place}" if self.place else ""
        return f"{self.node} joined with {plural(self.slots, 'slot')}{where}"


class NodeLost(LedgerEvent, frozen=True, kw_only=True):
    """A node is gone, or is treated so."""

    node: str
    """Its name."""
    cause: str
    """Why, in words."""
    cause_kind: CauseKind | None = None
    """The kind of the cause; None: not known."""

    def sentence(self) -> str:
        return f"{self.node} is lost: {self.cause}"


class NodeRefused(LedgerEvent, frozen=True, kw_only=True):
    """A node may not join, or may not be used any more."""

    node: str
    """Its name."""
    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"{self.node} was refused: {self.reason}"


class NodeUnavailable(LedgerEvent, frozen=True, kw_only=True):
    """The engine cannot provide a node."""

    reason: str
    """As the engine gave it."""

    def sentence(self) -> str:
        return f"no further node is available: {self.reason}"


class OrderFailed(LedgerEvent, frozen=True, kw_only=True):
    """The engine could not carry out an order."""

    order: str
    """Its kind: provide-node, release-node, mark-node or reboot-node."""
    node: str | None
    """For which node; None: the order names none."""
    error: str
    """As the engine gave it."""

    def sentence(self) -> str:
        which = self.order if self.node is None else f"{self.order} of {self.node}"
        return f"the engine could not carry out {which}: {self.error}"


class NodeLeaving(LedgerEvent, frozen=True, kw_only=True):
    """A node is to leave."""

    node: str
    """Its name."""
    reason: str
    """Why."""
    within_s: float | None
    """How long it has, in seconds; None: no limit."""
    cause: NoticeCause | None = None
    """Why, for programs; None: not known."""

    def sentence(self) -> str:
        time = "" if self.within_s is None else f" within {seconds(self.within_s)}"
        return f"{self.node} will leave{time}: {self.reason}"


class NodeStays(LedgerEvent, frozen=True, kw_only=True):
    """A node that was to leave stays."""

    node: str
    """Its name."""

    def sentence(self) -> str:
        return f"{self.node} stays and will no longer leave"


class NodeTrainsOn(LedgerEvent, frozen=True, kw_only=True):
    """A node that is to leave trains until there is another."""

    node: str
    """Its name."""
    reason: str | None
    """Why it is to leave."""

    def sentence(self) -> str:
        return f"{self.node} keeps training until a replacement is available: {self.reason}"


class NodeLeft(LedgerEvent, frozen=True, kw_only=True):
    """A node has left as planned."""

    node: str
    """Its name."""
    reason: str
    """Why it left."""

    def sentence(self) -> str:
        return f"{self.node} has left: {self.reason}"


# Different from NodeLost: nothing failed, and the machine must not come back by itself, because it belongs to
# somebody else.
class NodeTaken(LedgerEvent, frozen=True, kw_only=True):
    """The engine says that a node does not belong to the job any more."""

    node: str
    """Its name."""
    reason: str
    """As the engine gave it."""

    def sentence(self) -> str:
        return f"{self.node} no longer belongs to the job: {self.reason}"


class NodeHeld(LedgerEvent, frozen=True, kw_only=True):
    """A node is present but not used for now."""

    node: str
    """Its name."""
    reason: str
    """Until when, and why."""

    def sentence(self) -> str:
        return f"{self.node} is not used for now: {self.reason}"


class Lemon(LedgerEvent, frozen=True, kw_only=True):
    """A node's history says to use it only if there is no other."""

    node: str
    """Its name."""
    reason: str
    """What its history has."""

    def sentence(self) -> str:
        return f"{self.node} is used only as a last resort: {self.reason}"


class LemonLeaves(LedgerEvent, frozen=True, kw_only=True):
    """A node with such a history leaves, because there is another."""

    node: str
    """Its name."""
    reason: str
    """What its history has."""
    instead: str
    """The node that takes its place."""

    def sentence(self) -> str:
        return f"{self.node} leaves at the next commit and {self.instead} replaces it: {self.reason}"


class Snapshot(LedgerEvent, frozen=True, kw_only=True):
    """A snapshot is complete in the nodes' memory."""

    ROUTINE = True

    step: int
    """Committed steps that it holds."""
    generation: int
    """The generation that took it."""
    world: int
    """Shards of it."""
    nbytes: int
    """Its size."""
    nodes: int
    """Every shard is in the memory of so many nodes."""
    took_s: float
    """Seconds from the first copy."""

    def sentence(self) -> str:
        took = f"{size(self.nbytes)} after {seconds(self.took_s)}"
        return f"snapshot of step {self.step}: in the memory of {plural(self.nodes, 'node')}, {took}"


class SnapshotSkipped(LedgerEvent, frozen=True, kw_only=True):
    """A node could not keep a shard."""

    node: str
    """The node's name."""
    step: int
    """The snapshot's step."""
    rank: int
    """The shard."""
    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"no snapshot of step {self.step} on {self.node}: {self.reason}"


class SnapshotSpoiled(LedgerEvent, frozen=True, kw_only=True):
    """A copy of a shard was damaged in memory."""

    node: str
    """The node's name."""
    step: int
    """The snapshot's step."""
    rank: int
    """The shard."""
    reason: str
    """What is wrong."""

    def sentence(self) -> str:
        return f"the copy of step {self.step}, rank {self.rank} on {self.node} is corrupt: {self.reason}"


class SnapshotUnreadable(LedgerEvent, frozen=True, kw_only=True):
    """A snapshot could not be restored from any node."""

    step: int
    """Its step."""
    generation: int
    """The generation that took it."""

    def sentence(self) -> str:
        return f"the snapshot of step {self.step} cannot be read from any node: using an older one"


class SnapshotBack(LedgerEvent, frozen=True, kw_only=True):
    """A snapshot is complete again, because a node came back."""

    step: int
    """Its step."""
    generation: int
    """The generation that took it."""

    def sentence(self) -> str:
        return f"snapshot of step {self.step}: complete again, because a node came back with its shard"


class FewCopies(LedgerEvent, frozen=True, kw_only=True):
    """There are fewer nodes than copies are wanted."""

    nodes: int
    """Nodes that hold every shard."""
    wanted: int
    """Nodes that should."""

    def sentence(self) -> str:
        return f"snapshots are in the memory of {plural(self.nodes, 'node')}, not {self.wanted}: the job has no more nodes"


class Saved(LedgerEvent, frozen=True, kw_only=True):
    """A checkpoint is complete in a durable tier."""

    step: int
    """Its step."""
    url: str
    """The tier, or the checkpoint."""
    took_s: float | None = None
    """Seconds since it began; None: a worker wrote it itself."""
    skipped: int | None = None
    """Checkpoints that were skipped meanwhile."""
    worker: str | None = None
    """The worker that wrote it, if one did."""

    def sentence(self) -> str:
        more = f" ({plural(self.skipped, 'checkpoint')} skipped meanwhile)" if self.skipped else ""
        return f"step {self.step} is saved in {self.url}{more}"

    def paths(self) -> tuple[str, ...]:
        return (self.url,)


# Written for the first one that is skipped. The event of the checkpoint that they waited for says how many
# there were.
class CheckpointSkipped(LedgerEvent, frozen=True, kw_only=True):
    """A checkpoint was due while an older one was on its way."""

    step: int
    """Its step."""
    url: str
    """The tier."""
    older: int
    """The step of the one that is on its way."""

    def sentence(self) -> str:
        return f"step {self.step} is not saved: step {self.older} is still being written to {self.url}"

    def paths(self) -> tuple[str, ...]:
        return (self.url,)


class CheckpointUnread(LedgerEvent, frozen=True, kw_only=True):
    """A checkpoint cannot be loaded."""

    step: int
    """Its step."""
    url: str
    """Where it is."""
    reason: str
    """Why."""
    instead: str | None
    """What is loaded instead; None: nothing."""

    def sentence(self) -> str:
        then = f"using {self.instead}" if self.instead else "and there is no older one"
        return f"step {self.step} cannot be loaded, {then}: {self.reason}"

    def paths(self) -> tuple[str, ...]:
        return (self.url, self.instead or "")


# Not an error: training goes on, and the checkpoint may still come. It is the first sign of a tier that will
# fail.
class TierSlow(LedgerEvent, frozen=True, kw_only=True):
    """A checkpoint has made no progress in a tier for a long time."""

    step: int
    """Its step."""
    url: str
    """The tier."""
    silent_s: float
    """For so many seconds."""
    nbytes: int | None
    """Bytes that have arrived."""
    total_bytes: int | None
    """Bytes of the checkpoint."""

    def sentence(self) -> str:
        far = "" if self.nbytes is None else f" ({size(self.nbytes)} of {size(self.total_bytes)})"
        return f"no data of step {self.step} has reached {self.url} for {seconds(self.silent_s)}{far}"

    def paths(self) -> tuple[str, ...]:
        return (self.url,)


class TierFailed(LedgerEvent, frozen=True, kw_only=True):
    """A tier did not take a checkpoint."""

    url: str
    """The tier."""
    step: int | None
    """The checkpoint's step."""
    reason: str
    """Why."""

    def sentence(self) -> str:
        return f"step {self.step} was not saved: {self.reason}"

    def paths(self) -> tuple[str, ...]:
        return (self.url,)


class SavingLast(LedgerEvent, frozen=True, kw_only=True):
    """The job ends, and its last state goes to a tier."""

    step: int
    """Its step."""
    url: str
    """The tier."""
    there: int | None
    """The newest step that the tier has."""

    def sentence(self) -> str:
        there = "" if self.there is None else f" (it has step {self.there})"
        return f"saving the last state, step {self.step}, to {self.url}{there}"

    def paths(self) -> tuple[str, ...]:
        return (self.url,)


# The last thing that a person has to know about a job that ended without a tier: whether its result still
# exists, and where.
class OnlyInMemory(LedgerEvent, frozen=True, kw_only=True):
    """The job ends, and no tier has its last state."""

    step: int | None
    """Its step."""
    kept: bool
    """The nodes' memory outlives the job."""
    saved: int | None
    """The newest step in a tier."""

    def sentence(self) -> str:
        if self.kept:
            return f"step {self.step} is only in memory and stays there for the next start of this job"
        saved = "no step is saved" if self.saved is None else f"the newest saved step is {self.saved}"
        return f"step {self.step} was only in memory, which is freed when the job ends: {saved}"


class LastNotSaved(LedgerEvent, frozen=True, kw_only=True):
    """The job ends, and neither a tier nor memory has the newest state that its script gave."""

    step: int
    """Its step."""
    saved: int | None
    """The newest step in a tier."""

    def sentence(self) -> str:
        saved = "no step is saved" if self.saved is None else f"the newest saved step is {self.saved}"
        return f"the last state that the script passed to save, of step {self.step}, was not saved: {saved}"


ORDINARY_ENDS = frozenset({0, -9, -15})
"""Exit codes of workers that finished or were ended on purpose. If nobody meant it, an incident reports it."""

_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {_SIGNALS.get(-code, f'signal {-code}')}"


class WorkerStarted(LedgerEvent, frozen=True, kw_only=True):
    """An agent started a worker's process."""

    ROUTINE = True

    worker: str
    """Its name."""
    node: str
    """Where it runs."""
    pid: int
    """Its process id there."""
    log: str
    """Path of its output."""

    def sentence(self) -> str:
        return f"{self.worker} started on {self.node} (pid {self.pid})"


class WorkerReady(LedgerEvent, frozen=True, kw_only=True):
    """A worker can be a member of a generation."""

    worker: str
    """Its name."""
    node: str
    """Where it runs."""

    def sentence(self) -> str:
        return f"{self.worker} is ready"


class WorkerDone(LedgerEvent, frozen=True, kw_only=True):
    """A worker made all steps."""

    ROUTINE = True

    worker: str
    """Its name."""
    step: int
    """Committed steps that it holds."""
    params_xxh3: str
    """Digest of its parameters."""

    def sentence(self) -> str:
        return f"{self.worker} completed all {self.step} steps, parameters {self.params_xxh3}"


class WorkerExited(LedgerEvent, frozen=True, kw_only=True):
    """A worker's process ended."""

    worker: str
    """Its name."""
    node: str
    """Where it ran."""
    code: int
    """Its exit code; -N: signal N ended it."""
    log: str
    """Path of its output."""

    def sentence(self) -> str:
        # A normal end of a job with a thousand workers would otherwise be a thousand lines.
        if self.code in ORDINARY_ENDS:
            return ""
        log = f"; log {self.log}" if self.log else ""
        return f"{self.worker} {_exit_text(self.code)}{log}"

    def paths(self) -> tuple[str, ...]:
        return (self.log,)


# Members that are taken out have an incident; this is for the others, of which nobody would hear.
class WorkerEnded(LedgerEvent, frozen=True, kw_only=True):
    """Workers that were no members are ended by the coordinator."""

    workers: list[str]
    """Their names."""
    cause: str
    """Why, in words."""
    cause_kind: CauseKind | None = None
    """The kind of the cause; None: not known."""

    def sentence(self) -> str:
        return f"{', '.join(self.workers)} ended by the coordinator: {self.cause}"


class Failed(LedgerEvent, frozen=True, kw_only=True):
    """The script raised in a worker."""

    worker: str
    """Its name."""
    rank: int | None
    """Its rank; None: it was no member."""
    node: str
    """Where it runs."""
    step: int | None
    """The step; None: before the first one."""
    cause: str
    """The error, in words."""
    cause_kind: CauseKind | None = None
    """The kind of the cause; None: not known."""

    def sentence(self) -> str:
        step = "before the first step" if self.step is None else f"at step {self.step}"
        who = self.worker if self.rank is None else f"rank {self.rank}"
        return f"{who} on {self.node} failed {step}: {self.cause}"


class Stalled(LedgerEvent, frozen=True, kw_only=True):
    """A worker stands still, so all are looked at."""

    worker: str
    """Its name."""
    node: str
    """Where it runs."""
    step: int | None
    """Committed steps of the job."""
    inspection: int = 0
    """Its number: what is found by it has the same."""

    def sentence(self) -> str:
        step = "" if self.step is None else f" at step {self.step}"
        return f"{self.worker} makes no progress{step}: inspecting the stacks of every rank"


class StallJudged(LedgerEvent, frozen=True, kw_only=True):
    """Which worker holds the others up."""

    workers: list[str]
    """Culprits; empty: none was found."""
    inspection: int = 0
    """Number of the inspection by which they were."""
    reason: str
    """How they were found."""
    where: str
    """Where all ranks stood."""
    stood_at_step: int | None = None
    """At level 0 and 1, optimizer steps in this start of the culprit that has fewest; None: not known."""
    collective: str | None = None
    """What the culprits have not entered while others wait in it; None: not known."""
    evidence: list[str] = []
    """Who stood where and who waited for whom, a line each; empty: nothing was known."""

    def sentence(self) -> str:
        where = f"; {self.where}" if self.where else ""
        if not self.workers:
            return f"no rank was found at fault: {self.reason}{where}"
        return f"held up by {', '.join(self.workers)}: {self.reason}{where}"


class Rebuild(LedgerEvent, frozen=True, kw_only=True):
    """A spare worker is built for another shard."""

    worker: str
    """Its name."""
    shard_index: int
    """The shard that it is built for now."""
    before: int
    """The shard that it was built for."""

    def sentence(self) -> str:
        return (
            f"{self.worker} becomes shard {self.shard_index}, which is missing (it was shard {self.before})"
        )


class CollectiveError(LedgerEvent, frozen=True, kw_only=True):
    """A collective raised in a worker."""

    ROUTINE = True

    worker: str
    """Its name."""
    step: int
    """The step; -1: it could not be restored."""
    detail: str
    """The error's text."""

    def sentence(self) -> str:
        where = "while it restored the state" if self.step < 0 else f"at step {self.step}"
        return f"a collective failed in {self.worker} {where}: {self.detail}"


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
