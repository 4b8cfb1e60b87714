"""What the coordinator knows: plain values, so that a snapshot of them is the coordinator.

Times are seconds on the clock that drives the core (`now` of `Core.handle`); None means unknown.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from math import inf
from typing import Annotated

import msgspec

from holdfast.protocol.causes import Cause
from holdfast.protocol.engine_orders import EngineOrder, EngineTraits, ProvideNode
from holdfast.protocol.health import CLUSTER_NAME, Ask, Remedy, Severity
from holdfast.protocol.job import Durable, JobSpec
from holdfast.protocol.messages import Generation, Ready, Stop
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.phases import Groups, TimeClass
from holdfast.protocol.place import NodePlace
from holdfast.protocol.snapshots import Copy, Holder, Key, Shard

# ---------------------------------------------------------------- times and phases


# ---------------------------------------------------------------- times
# The type of each time says how it is moved after this process did not run for a while: `deadlines` moves all of them in one
# place. A test ensures that no field is a bare number of seconds.


class Moves(Enum):
    """How a time is moved after the coordinator did not process events for a while."""

    NEVER = "never"
    SINCE = "since"
    UNTIL = "until"


At = Annotated[float, Moves.NEVER]
"""When something happened, or will happen in any case, such as the end of an allocation. Never moved."""
Since = Annotated[float, Moves.SINCE]
"""From when on silence, or a lack of progress, counts. Moved by the time in which events were not processed, but never beyond
now: a node that has just sent something would otherwise be trusted into the future, and its loss found late by as much."""
Until = Annotated[float, Moves.UNTIL]
"""Until when an answer is awaited. Moved so that as much time is left as before."""
Span = float
"""A length of time."""


# ---------------------------------------------------------------- deadlines
# The one owner of deadlines: every timer of the core is set, cleared and asked here.
#
# There are two kinds. A timer of the job is set to a time (`Timers`, part of the state). One of a node or a worker follows
# from what is known of it, such as when it was last heard (`Watch`, found anew from the state by each process).


class Timer(StrEnum):
    """What a time is for."""

    LEAVE = "leave"
    """Members that have not left the broken generation by then are taken out."""
    STOP = "stop"
    """The job, which was asked to stop, has ended by then."""
    INSPECT = "inspect"
    """A hang is judged by what was answered by then."""
    WAIT = "wait"
    """A job with too few workers gives up then."""
    FORM = "form"
    """A smaller generation than was asked for is formed then."""
    FORM_AFTER = "form-after"
    """No generation is formed before, after several that committed nothing."""
    START_AFTER = "start-after"
    """No worker is started again before, after several that did not get ready."""
    SPARE_AFTER = "spare-after"
    """No spare is started before, while a fault is not got over; the first commit clears it."""
    ASK_AFTER = "ask-after"
    """The engine is asked for no node before."""

    @property
    def awaits(self) -> bool:
        """Whether somebody else has to do something by then. Other timers hold back what this coordinator does itself."""
        return self in (Timer.LEAVE, Timer.STOP, Timer.INSPECT, Timer.WAIT, Timer.FORM)


class Timers(msgspec.Struct):
    """The job's own timers. Written through these methods alone, by `membership`."""

    at_s: dict[Timer, At] = {}
    """When each is due, on the core's clock; one that is not set is absent."""

    def set(self, timer: Timer, at_s: float) -> None:
        """It is due at this time, whenever it was before."""
        self.at_s[timer] = at_s

    def clear(self, *timers: Timer) -> None:
        """They are due at no time."""
        for timer in timers:
            self.at_s.pop(timer, None)

    def at(self, timer: Timer) -> float | None:
        """When it is due; None: it is not set."""
        return self.at_s.get(timer)

    def is_set(self, timer: Timer) -> bool:
        """It has a time, be it over or not."""
        return timer in self.at_s

    def not_before(self, timer: Timer, at_s: float) -> None:
        """Moves it to this time if it is set to an earlier one."""
        if timer in self.at_s:
            self.at_s[timer] = max(self.at_s[timer], at_s)


class JobPhase(StrEnum):
    """What the job as a whole is doing."""

    GATHERING = "gathering"  # no generation: waiting for workers to form one
    RUNNING = "running"
    BREAKING = "breaking"  # a generation ended; its members are reporting
    STOPPING = "stopping"  # workers save and leave
    ENDED = "ended"


class NodePhase(StrEnum):
    """What a node can be used for."""

    IN_SERVICE = "in-service"  # workers run on it, or may
    HELD = "held"  # gets no workers: it is checked or repaired, or will be
    LEAVING = "leaving"  # leaves the job when its place is filled, or its time is over
    LOST = "lost"  # gone for good; if its agent comes back, then as a new node


class WorkerPhase(StrEnum):
    """What a worker is doing, as far as it was reported."""

    STARTING = "starting"
    ATTACHED = "attached"  # the script called holdfast.start
    READY = "ready"  # model built, waiting: a spare
    MEMBER = "member"  # in the running generation
    PARKED = "parked"  # out of a broken generation, holding its state
    DONE = "done"
    GONE = "gone"


ALIVE = frozenset(set(WorkerPhase) - {WorkerPhase.GONE})


# ---------------------------------------------------------------- what a job may spend on faults before it gives up, of `JobSpec.max_restarts`
# A limit for the life of a job would end every long one: 2,048 nodes at the rate of Llama 3.1's report have some 8 faults a
# day. What shows that mending is in vain is that it does not bring the job further. So restarts are counted in a row, and what
# takes nodes by the day, because a spare may be replaced again and again while the job trains.


DAY_S = 86_400.0

TRAINED_S = 3600.0
"""A start of a script that numbers its own steps has brought the job further when it trained for so long: whether its steps were new
ones is not known."""


class InARow(msgspec.Struct, omit_defaults=True):
    """Restarts since the job last made progress."""

    count: int = 0
    at_s: At | None = None
    """When the newest of them was counted."""
    generation: int = -1
    """The newest one then."""
    best: int = 0
    """So many steps had ever been committed then."""

    def enter(self, now: float, generation: int, started_s: float | None) -> None:
        """One more. started_s: of the worker that was lost; None: of all together."""
        # What is lost together was there before: one switch takes a hundred workers, and their ends come one by one.
        together = started_s is not None and self.at_s is not None and started_s < self.at_s
        if together and generation <= self.generation:
            return
        self.count, self.at_s, self.generation = self.count + 1, now, generation

    def since(self, committed: int) -> int:
        """How many count, once so many steps are committed."""
        return self.count if committed <= self.best else 0

    def further(self, committed: int) -> None:
        """So many steps are committed: with a new one among them, none counts any more."""
        self.count, self.best = self.since(committed), max(self.best, committed)


class Daily(msgspec.Struct, omit_defaults=True):
    """How much a count that only grows has grown within a day."""

    since_s: At | None = None
    base: int = 0

    @property
    def until_s(self) -> float:
        """When the day that runs is over."""
        return -inf if self.since_s is None else self.since_s + DAY_S

    def used(self, count: int, over: bool) -> int:
        """Of the day that runs. Negative: that much more than the limit is allowed. over: `until_s` has come."""
        return min(count, 0) if over else count - self.base

    def roll(self, count: int, now: float) -> None:
        """Before the count rises."""
        if now >= self.until_s:
            self.since_s, self.base = now, max(count, 0)


def by_the_day(max_restarts: int, nodes: int) -> int:
    """How many nodes may be taken or asked for in a day: as many as the job has may be lost at once. Zero allows none."""
    return max(max_restarts, nodes) if max_restarts else 0


# ---------------------------------------------------------------- orders to the engine that it has not acknowledged


KEPT_ORDERS = 5000
"""Open orders that are kept: more than a job of 4,096 nodes has at once, and few enough for a state that is written often."""


class OpenOrders(msgspec.Struct):
    """Written through these methods alone: by the kernel's context, and by `membership` for nodes that are there."""

    last_id: int = 0
    """Number of the newest order; 0: there was none."""
    open: dict[int, EngineOrder] = {}
    """By number, oldest first."""
    newest: dict[str, int] = {}
    """Numbers of the open orders by kind and node, of which there is one at most. Looked up and not searched: a thousand
    nodes may be lost at once."""

    def add(self, order: EngineOrder) -> EngineOrder:
        """Opens an order. Returns it with its number."""
        # The older order is dropped first: an engine that was away for long must not release a node twice, for
        # two reasons, with the node's return in between.
        if (node := _node_of(order)) is not None:
            self.withdraw(type(order), node)
        self.last_id += 1
        numbered = msgspec.structs.replace(order, order_id=self.last_id)
        self.open[self.last_id] = numbered
        if node is not None:
            self.newest[_key(type(order), node)] = self.last_id
        # An engine that acknowledges nothing must not make the state grow: it is written with every decision.
        if len(self.open) > KEPT_ORDERS:
            self.close(next(iter(self.open)))
        return numbered

    def close(self, order_id: int) -> EngineOrder | None:
        """The engine has carried it out, or cannot. None: it is not open, so this was heard before."""
        order = self.open.pop(order_id, None)
        if order is not None and (node := _node_of(order)) is not None:
            del self.newest[_key(type(order), node)]
        return order

    def withdraw(self, kind: type[EngineOrder], node: str | None = None) -> None:
        """Orders of this kind are not to be carried out any more. node: for which; None where the kind names none."""
        if node is not None:
            if (order_id := self.newest.get(_key(kind, node))) is not None:
                self.close(order_id)
            return
        for order_id in [i for i, order in self.open.items() if type(order) is kind]:
            del self.open[order_id]


def _key(kind: type[EngineOrder], node: str) -> str:
    return f"{kind.__name__} {node}"


def _node_of(order: EngineOrder) -> str | None:
    return None if isinstance(order, ProvideNode) else order.node


# ---------------------------------------------------------------- health


KEPT_EVIDENCE = 8
KEPT_SIGHTINGS = 64
KEPT_ACTS = 64
KEPT_MACHINES = 128
KEPT_ASKS = 16
KEPT_RULES = 256
TEXT_CHARS = 120


class Evidence(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One observation about an incident."""

    rule: str
    """Empty for what happened to the job itself."""
    source: str
    """Where the rule saw it; `job` for what happened to the job itself."""
    text: str
    at_s: At
    """When it was first seen, on the core's clock."""
    count: int = 1
    """How often."""


class Sighting(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A rule that matched lately: for what happens to workers next, and for the same on other nodes."""

    rule: str
    node: str
    machine: str
    """The node's lasting identity."""
    at_s: At
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

    at_s: At
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
    done_s: At | None = None
    """When it was over; None: it is under way."""
    error: str | None = None
    """Why it did not work; None: nothing says that it did not."""
    request: int = 0
    """Number of the order that an agent has yet to answer, or has answered; 0: no order is needed."""
    until_s: Until | None = None
    """When the order is to be sent, or answered once it is sent, at the latest; None: nobody waits for it."""
    sent: bool = False
    """The agent has the order."""
    earlier: bool = False
    """By another job, before this one."""

    @property
    def done(self) -> bool:
        """It is over, well or not."""
        return self.done_s is not None


class Checking(msgspec.Struct, omit_defaults=True):
    """A node that may not be used before its deep checks say so."""

    request: int
    """Number of the RunChecks."""
    until_s: Until
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
    """A worker that computes longer than its peers, so that all others wait for it."""

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
    excess_s: Span
    """How much longer than its peers it computes in a step."""
    share: float
    """Of a step's time, for which the others wait."""
    world: int
    """How many they are, with it."""
    pair: bool = False
    """It has only one peer, so which of the two is at fault is not certain."""
    lost_s: Span = 0.0
    """Training time that it has cost so far."""
    until_step: int | None = None
    """The step since which it is as fast as they are again, or gone; None: it is slow."""
    asked_s: Span = 0.0
    """`lost_s` when its replacement was asked for last; 0: it was not."""


class Health(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Findings about machines, and the remedies. Written by `health`."""

    sightings: list[Sighting] = []
    """Newest last."""
    reports: dict[str, dict[str, At]] = {}
    """Rule to the machines that it matched on within the last minute, and when."""
    acts: list[Act] = []
    """Newest last; those of earlier jobs on a machine come as it joins."""
    quarantine: dict[str, str] = {}
    """Machine to the reason why it is not used."""
    quarantine_rules: dict[str, str] = {}
    """Machine to the rule that it is in quarantine for, if a rule is the reason."""
    reported_at_s: dict[str, At] = {}
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
    """Whether a is worse than b."""
    return SEVERITIES.index(a) > SEVERITIES.index(b)


def stronger(a: Remedy, b: Remedy) -> bool:
    """Whether a is a stronger remedy than b."""
    return REMEDIES.index(a) > REMEDIES.index(b)


def count(table: dict[str, int], key: str) -> None:
    """One more of a kind; of more kinds than are kept apart the rest is `other`."""
    known = key if key in table or len(table) < KEPT_RULES else "other"
    table[known] = table.get(known, 0) + 1


# ---------------------------------------------------------------- incidents, and injected faults that none has claimed


class Incident(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One fault, from its first sign to the first commit at full strength."""

    id: int
    """Counts from 1 on."""
    cause: Cause
    node: str | None
    """None: nobody says which one."""
    ranks: list[int]
    """Ascending, in the generation that it struck."""
    at_step: int | None
    """Committed steps when it struck last."""
    fault_at_s: At | None
    """When the fault was; None: only its first sign is known."""
    detected_at_s: At
    """When its first sign came."""
    generation: int
    """The number of the generation that it struck."""
    world: int = 1
    """Workers that computed in that generation, so what full strength means for it."""
    kind: str | None = None
    """The fault's kind where the opener knows it (`nan`, `kill-coordinator`); None: its cause says what it is."""
    injected: str | None = None
    """The injected fault as it was written; None: nobody injected it. For the record alone: what is decided is what would be
    decided for a fault that nobody injected."""
    injected_at_s: At | None = None
    """When it was injected; None: it was not, or what struck last was not."""
    workers: list[str] = []
    """Those that it took, or made fail."""
    rung: str | None = None
    """How the job went on from it, in words; None: not decided yet."""
    decided_at_s: At | None = None
    """When a generation without the fault was formed; None: not yet."""
    replaced_at_s: At | None = None
    """When a newcomer was ready in the place of what was lost; None: not yet, or none is needed."""
    joined_at_s: At | None = None
    """When the last member so far was connected; None: none was yet."""
    join_s: Span | None = None
    """The longest that a member needed to connect; None: not known."""
    restore_s: Span | None = None
    """The longest that a member needed to get the state; None: none had to."""
    first_commit_at_s: At | None = None
    """When training went on; None: it stands still."""
    full_at_s: At | None = None
    """When it was closed, at full strength; None: it is open."""
    lost_steps: int | None = None
    """Steps that it made the job do again; None: not known."""
    needs_newcomer: bool = False
    """A worker is missing because of it."""
    rule: str = ""
    """Of the finding that explains it; empty: none does."""
    device: str = ""
    """Which one the finding is about; empty: the whole node, or not known."""
    source: str = ""
    """Where the finding was seen; empty: there is none."""
    firm: bool = False
    """One finding of this rule is enough."""
    severity: Severity = Severity.INFO
    """The worst of all findings."""
    asked: Remedy = Remedy.WATCH
    """The remedy that the worst finding asks for."""
    quiet: bool = False
    """Training was not disturbed."""
    heard_s: At = 0.0
    """When its newest evidence came; 0 without any."""
    due_s: Until | None = None
    """When it will be decided; None: it has been, or nothing is to be decided."""
    does: Remedy | None = None
    """What is done about it; None: nothing was decided."""
    verdict: str = ""
    """That in words, for people."""
    evidence: list[Evidence] = []
    """What was seen, oldest first; at most `KEPT_EVIDENCE`."""
    where: str = ""
    """Of a hang, where all ranks stood; else empty."""
    raised: bool = False
    """The first sign was an error of a worker at level 0."""
    lost_nodes: list[str] = []
    """Nodes whose loss this is, in the order in which they were lost; empty: it is not the loss of a node, or nobody
    knows where the node stood."""
    lost_at_s: Since | None = None
    """When the last of them was lost; None: it is not the loss of a node."""
    place: NodePlace = ()
    """The innermost place that all of them are in."""
    earlier_stalls: int = 0
    """Stalls of training before the newest one."""
    earlier_stall_s: Span = 0.0
    """How long they lasted together."""
    paused_s: Span = 0.0
    """Of the newest stall, in which the script did work of its own between two steps."""
    paused_first_s: Span = 0.0
    """Of that, before it was decided how the job goes on."""

    @property
    def struck_s(self) -> float:
        """As `began_s`, and of an injected fault when it was injected. For the record alone."""
        return self.began_s if self.injected_at_s is None else self.injected_at_s

    @property
    def began_s(self) -> float:
        """The fault if its time is known, else its first sign."""
        return self.detected_at_s if self.fault_at_s is None else self.fault_at_s

    @property
    def open(self) -> bool:
        """Not yet back at full strength."""
        return self.full_at_s is None


class Injection(msgspec.Struct, kw_only=True):
    """An injected fault that no incident has claimed yet."""

    fault: str
    """As it was written, with its options."""
    kind: str
    """The fault's name alone."""
    at_s: At
    node: str | None = None
    """None: it names no node."""
    worker: str | None = None
    """None: it hits no worker in particular."""


# ---------------------------------------------------------------- membership: nodes, workers and generations


SIZES_KEPT = 512
"""Changes of the world's size that a report can tell of."""


class StandingNotice(msgspec.Struct, frozen=True):
    """A notice that scripts were given and that was not withdrawn."""

    number: int
    """Counts the job's notices from 1 on."""
    cause: NoticeCause
    reason: str
    """For people."""
    until_s: At | None
    """When what it is about goes away, at the latest; None: nobody said."""


class NodeMemory(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A node's snapshot memory. Written by `storage`."""

    port: int = 0
    """Where its agent serves snapshot memory to other nodes; 0: nowhere."""
    server: str = ""
    """The name that whoever listens at that port must prove."""
    refused_steps: dict[int, int] = {}
    """Per shard (the rank of its key) the newest step of which it could not keep that shard."""


class NodeHealth(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The checks and remedies of a node. Written by `health`."""

    then: Remedy | None = None
    """The remedy that is begun once nothing of the job runs on it; None: none."""
    checking: Checking | None = None
    """Its deep checks are under way, or still to be begun; None: neither."""
    boots_until_s: Until | None = None
    """When it should be back from a reboot, at the latest; None: none was ordered."""
    boots_for: int = 0
    """Number of the incident for which that reboot was ordered; 0: for none."""
    trial: tuple[str, ...] = ()
    """Rules that are not believed on this machine: their findings are only recorded."""
    unknown: dict[str, Since] = {}
    """Rule to since when it could not be told whether it matches."""


class Node(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One machine: an agent process, known by its session."""

    name: str
    session: str
    """New for every agent process: another one under this name is a node that starts anew."""
    host: str
    slots: int
    """How many workers it has room for."""
    last_seen_s: Since
    """When its agent was last heard of."""
    phase: NodePhase = NodePhase.IN_SERVICE
    ports: tuple[int, ...] = ()
    """On which the masters of starts at level 0 may listen, if this is the job's first node."""
    failures: int = 0
    """Failures of its workers so far, under this name; of two nodes, the one with fewer is taken first."""
    used: list[int] = []
    """Slots that had a worker already."""
    failed_starts: int = 0
    """Start attempts in a row in which a worker died before it was ready."""
    start_failed_at_s: At = 0.0
    """When the last of them was counted: a worker that was started before belongs to that attempt."""
    fenced: bool = False
    """It was told that the job went on without it."""
    refused: str | None = None
    """Why it may not come back; None: it may."""
    place: NodePlace = ()
    """Where it stands; empty: not known."""
    leaving: str | None = None
    """Why it is to leave; None: it stays."""
    left: bool = False
    """It is gone as planned: nothing of the job was on it any more."""
    leaves_since_s: At = 0.0
    """When that was decided."""
    leaves_until_s: At | None = None
    """When it goes away at the latest; None: no limit is known."""
    excess: bool = False
    """It is to leave only because the job is to be smaller: it is kept if the job grows again meanwhile."""
    identity: str = ""
    """What lasts of the machine, whatever its name is; empty: nothing is known."""
    devices: tuple[str, ...] = ()
    """Lasting identities of its devices."""
    held: str | None = None
    """Why it has no workers for now; None: it may have some."""
    lemon: str = ""
    """Why others are taken first: it failed in several jobs. Empty: it did not."""
    memory: NodeMemory = msgspec.field(default_factory=NodeMemory)
    health: NodeHealth = msgspec.field(default_factory=NodeHealth)
    notice: StandingNotice | None = None
    """What its scripts were told of its leaving; None: nothing that still stands."""

    @property
    def alive(self) -> bool:
        """It is not lost."""
        return self.phase is not NodePhase.LOST

    @property
    def machine(self) -> str:
        """What its history within this job is kept under."""
        return self.identity or self.name

    @property
    def lasting(self) -> str:
        """What its history is kept under for other jobs; empty: it cannot be told again."""
        return "" if self.identity.startswith(CLUSTER_NAME) else self.identity


class Worker(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One training process."""

    name: str
    """`node.slot#incarnation`, never used twice."""
    node: str
    slot: int
    started_s: At
    awaited_s: Since
    """Since when it could have got ready: from its start on, or since it was told to build itself again."""
    phase: WorkerPhase = WorkerPhase.STARTING
    ready: Ready | None = None
    """What it said when it was ready last; None: it has not been, or is being built again."""
    ready_at_s: At = 0.0
    committed: int | None = None
    """Committed steps that its state has; None: no usable state, or it has not said."""
    prepared: bool = False
    """As it parked, it held the complete reduced gradient of step `committed`."""
    median_s: Span | None = None
    """Its median time of a step; None: not known."""
    log: str = ""
    """Path on its node; empty: it is not known to have been started."""
    told_to_end: bool = False
    """It was ordered to leave or was killed, so its end is no fault."""
    exited: bool = False
    """Its end was handled: agents may report it again."""
    joined_generation: int = 0
    """The newest generation that it is connected to; 0: none."""
    aside: bool = False
    """It does work of the script's own between two steps."""
    left: bool = False
    """It ended with exit code 0 while the job trained, without having been told to: at level 0 and 1 it may be done."""
    script_ended: bool = False
    """By the end of its script, and not by `os._exit`."""
    groups: Groups | None = None
    """How far it then was in its collectives; None: not known."""
    vanished_s: Since | None = None
    """Since when its agent no longer has it, while how it ended is not known yet; None: its agent has it."""
    digest: str | None = None
    """xxh3 of the parameters after its last step; None: it has not done all steps."""
    state_digest: str | None = None
    """xxh3 of all that is to be the same in every replica after its last step; None: not said."""
    covered: tuple[str, ...] = ()
    """Names of the protected objects that this is over."""
    left_out: tuple[str, ...] = ()
    """Paths of buffers that it is not over."""
    loss: float | None = None
    """The last one that it told of; None: none yet."""
    restored: tuple[int, int] | None = None
    """Bytes of the state that it has, and of how many; None while that is not known."""
    shard_index: int = 0
    """Which shard of the state it holds, or is built for; 0 where a replica is one worker."""
    agreement: int = -1
    """As in Parked."""
    counts_until: int | None = None
    """At this step the job went on without it, at level 2: what it tells of this step and later ones happened in no training that
    counts. None: all counts."""
    rebuilds: int | None = None
    """The shard for which it was told to be built again. Until it is, what it said before is out of date.
    None: it was not told."""


class Assignment(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What one member is to do in the newest generation: its JoinGeneration without the generation. The fields are described
    there.

    The generation is kept once, in the state: a copy in each assignment would let the state grow with the square of the
    number of workers."""

    rank: int
    apply: bool = False
    restore: bool = False
    serve: bool = False
    fetches: bool = False
    """It fetches its state from the sources of its shard, see `MembershipState.state_sources`."""
    copy: Copy | None = None
    """The shard in snapshot memory that it fetches; None: none is there to fetch."""
    holders: tuple[Holder, ...] = ()
    durable: Durable | None = None
    """The checkpoint that it reads; None: none."""
    saves: bool = False
    mtbf_s: Span = 0.0
    shards: tuple[tuple[Copy, tuple[Holder, ...]], ...] = ()


class PlannedChange(msgspec.Struct, kw_only=True):
    """One planned change of the membership, from the last commit before it to the first one after."""

    id: int
    reason: str
    at_step: int
    """Committed steps when it was made."""
    before: int
    """World size before it."""
    after: int
    """World size after it."""
    left_at_s: At
    """When the last commit before it was."""
    formed_at_s: At
    """When the generation after it was formed."""
    generation: int
    """The number of the generation after it."""
    for_incidents: list[int] = []
    """Numbers of the incidents for which nodes left with it."""
    newcomers: int = 0
    """Workers that came with it."""
    join_s: Span | None = None
    """The longest that a member needed to connect; None: none has."""
    restore_s: Span | None = None
    """The longest that a member needed to get the state; None: none had to."""
    stall_s: Span | None = None
    """Between the two commits, less the time of a usual step; None: the second has not come."""


class ChangeTotals(msgspec.Struct, omit_defaults=True):
    """Planned changes since the job's start, and for how long they stalled training."""

    count: int = 0
    stall_s: Span = 0.0


class Failure(msgspec.Struct, kw_only=True):
    """One failure of user code or of a worker process, for telling the script's faults from the machine's."""

    step: int | None
    """Committed steps before the one that failed; None: it was outside of a step."""
    signature: str
    """Equal for two failures at the same place of the script, whatever numbers their messages have."""
    worker: str
    node: str
    generation: int
    also_on: tuple[str, ...] = ()
    """Other nodes whose workers had raised the same in this attempt; known at level 0 only."""
    lasted_s: Span = 0.0
    """For how long its process had run; known at level 0 only."""


class RootCause(msgspec.Struct, kw_only=True):
    """Why a job or a worker failed: the cause, the first rank that failed, its node, the last lines of its log. Printed last."""

    cause: Cause
    rank: int | None = None
    """The first that failed; None: nobody in particular."""
    node: str | None = None
    """None: no node in particular."""
    step: int | None = None
    """Committed steps at that time; None: not known."""
    traceback: str = ""
    """Of the worker; empty: it left none."""
    tail: list[str] = []
    """The last lines of the log."""
    log: str = ""
    """Path on the node; empty: not known."""


class Counted(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Optimizer steps at level 0 and 1; positions are committed steps since the job's start."""

    earlier: int = 0
    """Steps of the starts before this one, those that were done again included."""
    before: int = 0
    """Of those, the steps of the last one."""
    asked: bool = False
    """It was said that the script does not seem to resume."""
    base: int | None = 0
    """The position that this start's count begins at; None: not known (yet)."""
    left_at: int | None = 0
    """The position at which the start before ended; None: not known."""
    given: dict[int, int] = {}
    """The script's own number of a state that it gave, to its position."""
    gives: bool = False
    """It has given one."""
    lost: int = 0
    """Steps that were done again, as far as is known."""
    known: bool = True
    """No others were."""
    loaded_first: int | None = None
    """Of which state the first start went on, by the script's own number, as `step_accounting` has it; None: not known."""


class TimeMark(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What the account held at one moment. What is learned later moves seconds in it as in the account itself."""

    at_s: At
    """When, on the coordinator's clock."""
    spent_s: dict[TimeClass, Span] = {}
    rolled_back_s: Span = 0.0
    within_s: dict[TimeClass, Span] = {}
    """Snapshots' stalls included."""


class TimeAccount(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Where the job's wall time went, each second in one class. The newest stretch is open: its class is `doing`. Written by
    `wall_time`."""

    spent_s: dict[TimeClass, Span] = {}
    """Seconds of each class, without the open stretch."""
    doing: TimeClass = TimeClass.UNEXPLAINED
    since_s: At | None = None
    """When the open stretch began; None: the job has not begun."""
    interrupted: tuple[At, At] | None = None
    """Begin and end of the newest stretch that a fault ended, until it is divided at the time of the fault."""
    join_s: Span | None = None
    """The longest that a member of the newest generation needed to connect; None: none has."""
    restore_s: Span = 0.0
    """The longest that one needed to get the state."""
    rolled_back_s: Span = 0.0
    """Seconds of steps that had to be done again."""
    strength: int = 0
    """Workers that compute in the newest generation; 0: there was none."""
    within_s: dict[TimeClass, Span] = {}
    """Of the steps that stayed, the seconds that were lost in them, by class."""
    away: set[str] = set()
    """Workers that do work of the script's own between two steps."""
    resumes: TimeClass = TimeClass.COMPUTED
    """While `doing` is PAUSED: what goes on after it."""
    script_s: Span = 0.0
    """In the newest generation, the most that a member has told of `Progress.script_s`."""
    settled_s: Span = 0.0
    """How much of that is in its class, or cannot be any more."""
    open_s: Span = 0.0
    """COMPUTED since the newest step."""
    step_s: Span = 0.0
    """COMPUTED that led to the newest step: what late words of it may still move to PAUSED."""
    told: list[tuple[int, Span]] = msgspec.field(default_factory=lambda: [(0, 0.0)])
    """Of some positions (committed steps), rising, the seconds of the steps before it that stayed; thinner the older they are."""
    marks: list[TimeMark] = []
    """Every few minutes of the last hour, and one from before, oldest first: what a sliding goodput is counted from."""


class Halting(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How far the workers of one replica agree on where they leave a broken step."""

    begun: dict[str, int] = {}
    """By group, the most calls that any of them has begun: where all are to stand."""
    stands: dict[str, int] = {}
    """Of each worker that has answered, the number of the agreement at which it stands; -1: it does not."""
    first: dict[str, int] = {}
    """What the first one that answered had begun."""
    alike: bool = True
    """All first answers were the same, so nobody has to go on."""
    agreement: int = 0
    """Number of the newest RunTo; 0: none yet."""
    left: bool = False
    """It told all to leave."""


class MembershipState(msgspec.Struct, kw_only=True):
    """Nodes, workers and generations, and how the job goes on. Written by `membership`; phases by `transitions` alone."""

    phase: JobPhase = JobPhase.GATHERING
    level: int | None = None
    """2 once a script called `holdfast.start`; None while no worker has."""
    nodes: dict[str, Node] = {}
    """By name, in the order in which they joined; those that are gone are kept for a while."""
    workers: dict[str, Worker] = {}
    """By name, oldest first; those that are gone are kept for a while."""
    incarnations: int = 0
    """Workers that were ever started: makes their names unique."""
    number: int = 0
    """Of the newest generation; 0: there was none."""
    generation: Generation | None = None
    """The newest; None: there was none at this level."""
    assignments: dict[str, Assignment] = {}
    """Of the newest generation's members, by the name of the worker."""
    state_sources: tuple[tuple[int, ...], ...] = ()
    """For each shard index, the ranks from which newcomers fetch the shard."""
    yielding: bool = False
    """The newest generation ends at its next commit."""
    committed: int = 0
    """Steps; at level 0 and 1 those of this start."""
    generation_committed: int = 0
    """Steps that the newest generation was seen to have committed; its start while it has committed none."""
    counted: Counted = msgspec.field(default_factory=Counted)
    wall: TimeAccount = msgspec.field(default_factory=TimeAccount)
    pace: list[tuple[At, int]] = []
    """When the job stood at which position, oldest first: what its rate is counted from. Written by `wall_time`."""
    lost_steps: int = 0
    """Steps that were committed and had to be done again, at level 2."""
    last_step: int | None = None
    """Where the job stops, once that is decided; 0: its state is not complete there."""
    keeps_memory: bool = False
    """The job ended, and the nodes' memory has a state that no durable tier has."""
    unsaved: int | None = None
    """The job ended with the state of this step, and no durable tier has it."""
    failures: list[Failure] = []
    root_causes: dict[str, RootCause] = {}
    """By worker."""
    root_cause: RootCause | None = None
    """What is printed last."""
    restarts_used: int = 0
    """Workers that were started again, or at level 0 starts of all."""
    in_a_row: InARow = msgspec.field(default_factory=InARow)
    """Of those, against `JobSpec.max_restarts`."""
    replacing: int = 0
    """Nodes that the engine was asked for and that have not come."""
    replaced: int = 0
    """Nodes that the engine was ever asked for."""
    asked_daily: Daily = msgspec.field(default_factory=Daily)
    """Of those, the ones in the place of others that failed."""
    nodes_joined: int = 0
    """Nodes that ever came."""
    asked_at_s: Since = 0.0
    """When the engine was last asked for a node."""
    bad_starts: int = 0
    """Start attempts of the job in a row in which a worker died before it was ready."""
    bad_start_at_s: At = 0.0
    master_uses: int = 0
    """Starts at level 0: each uses another of the first node's ports."""
    stop_reason: str | None = None
    """Why the job was asked to end, or gave up, in words; None: it was not."""
    stop_cause: NoticeCause | None = None
    """The same for programs; None: it was not stopped."""
    notice: StandingNotice | None = None
    """What all scripts were told of the end of the job."""
    notices: int = 0
    """Notices that were ever given: numbers them."""
    outcome: str | None = None
    """"finished", "stopped" or "failed"; None: that is not decided."""
    history: list[tuple[Span, int]] = []
    """World sizes, and when they began, in seconds since the job's start: the newest, and of a long past every so many."""
    formed_s: Since = 0.0
    """Since when members of the newest generation could have made a step."""
    broke_cause: Cause | None = None
    """Why the newest generation broke, until an incident explains it."""
    broke_at_s: At = 0.0
    told_to_leave_s: Since = 0.0
    """As `broke_at_s`, but moved by time in which no events were processed: since when its members could have left."""
    fruitless: int = 0
    """Generations in a row that broke without a commit and without anyone to blame."""
    stops: dict[str, Stop] = {}
    """Who was told to leave, and how."""
    waiting: bool = False
    """The ledger says that the job waits for workers."""
    asked_nodes: int | None = None
    """What a person wants."""
    capacity_nodes: int | None = None
    """What the engine allows."""
    unpaid: int = 0
    """Nodes that may be asked for beside the restart budget."""
    grows: bool = False
    """At level 0: all start again when there are nodes for a larger size that was asked for."""
    changes: list[PlannedChange] = []
    changed: ChangeTotals = msgspec.field(default_factory=ChangeTotals)
    change_reason: str | None = None
    """Why the generation that ends now does, as planned."""
    grew_at_s: At = 0.0
    """When newcomers came last."""
    join_cost_s: Span = 0.0
    """For how long that stalled training."""
    micro_batches: int | None = None
    """In a global batch, once a worker has said so."""
    until: int | None = None
    """Committed steps after which the job is done, once a worker has said so. For people alone: the script decides."""
    samples: str | None = None
    """Folder in which workers record their samples, as the newest one named it. For people alone."""
    shape: tuple[int, int] = (1, 1)
    """Of a replica: shard degree and tensor degree, once a worker has said so."""
    halting: dict[int, Halting] = {}
    """Replicas that leave a broken step together."""
    inspect_request: int = 0
    """Number of the newest Inspect."""
    look_again_s: At = 0.0
    """At level 0: a stall is not looked at before."""
    stall_rounds: int = 0
    """Hangs in a row that were met by another attempt."""
    figures: dict[str, tuple[int, float]] = {}
    """What the script logs: name to step and value."""

    def resized(self, t_s: float, world: int) -> None:
        """A generation of so many workers begins."""
        self.history.append((t_s, world))
        # The state is written with each decision, and a report tells how the size went, not each of a thousand changes.
        if len(self.history) > SIZES_KEPT:
            del self.history[1 : SIZES_KEPT // 2 : 2]

    @property
    def counts_steps(self) -> bool:
        """Workers commit their steps through Holdfast, so `committed` counts from the job's start. At level 0 and 1 only the
        script knows where a start went on from: see `step_accounting`."""
        return self.level == 2

    @property
    def most_workers(self) -> int | None:
        """So many workers have a micro-batch of each global batch; None: not known, or level 0 or 1."""
        # A replica computes as many at a time as its shard degree.
        return max(1, self.micro_batches // self.shape[0]) * self.shard_count if self.micro_batches else None

    @property
    def shard_count(self) -> int:
        """Workers of a replica."""
        return self.shape[0] * self.shape[1]


# ---------------------------------------------------------------- storage: snapshots and checkpoints


class HeldShard(msgspec.Struct):
    """One shard of a snapshot, and the nodes that hold it."""

    copy: Copy
    nodes: list[str] = []
    """Those that hold it."""
    asked: list[str] = []
    """Those that were asked to hold it too, and have not answered."""


class MemorySnapshot(msgspec.Struct, kw_only=True):
    """The state at one step, as workers copied it into memory. Replicas whose bytes differ (in buffers) give several shards of
    one rank."""

    step: int
    generation: int
    """Of the workers that took it."""
    world: int
    """How many shards a complete one has, numbered by the `rank` of their keys."""
    began_s: At
    """When its first shard was heard of."""
    shards: list[HeldShard] = []
    """Those that some node holds, or was asked to."""
    refused: list[tuple[str, int]] = []
    """Nodes that could not keep a shard of it, and the shard's rank. They are not asked again."""
    busy: list[tuple[str, int]] = []
    """Nodes that had no slot for a shard at that moment, and its rank. They are asked again when one is
    free."""
    passed: list[tuple[str, int]] = []
    """Nodes whose own worker could not leave its shard there, and its rank: that worker will not bring it any
    more."""
    no_room: bool = False
    """A copy is missing because memory is short."""
    lost: list[int] = []
    """Ranks of shards that went with the nodes that held them, which may come back."""
    complete: bool = False
    """Every shard came to be held by as many nodes as the job asks for, or as could be had, and none was lost
    since."""
    given_up: bool = False
    """A shard is missing, and nobody will bring it."""
    unread: int = 0
    """Generations in a row that could not be restored from it."""
    complete_s: At | None = None
    """When it was complete for the first time; None: it never was."""
    stall_s: Span = 0.0
    """For how long it held up the worker that it held up longest."""


class Rewind(msgspec.Struct):
    """A generation that started from a saved state: steps of earlier generations after that state are void."""

    number: int
    """The generation's."""
    start: int
    """The committed steps that it went on from."""


class Storing(msgspec.Struct, kw_only=True):
    """A checkpoint that is being written to a durable tier, or the last one that was."""

    tier: str
    """Its URL."""
    step: int
    """Of the snapshot; of an attempt that failed, the step of the last checkpoint that came there (0:
    none)."""
    began_s: At
    """When it was begun; of an attempt that failed, when it failed."""
    generation: int = 0
    """Of the workers that took the snapshot."""
    world: int = 1
    """How many shards it has."""
    took_s: Span | None = None
    """From its begin until its manifest was written; None: that is not written."""
    waiting: dict[int, str] = {}
    """Rank to the node that writes its shard; -1 to the node that writes the manifest."""
    shared_blobs: dict[int, str] = {}
    """Rank to the name of the blob of another rank with equal bytes."""
    shards: list[Shard] = []
    """Those that are written."""
    void: bool = False
    """Training went back behind it. It is only waited for, so that nothing of it is taken for a later
    one's."""
    written: dict[int, tuple[int, int]] = {}
    """Rank to the bytes of its shard that are there, and of how many, where that is known."""
    moved_s: Since = 0.0
    """When something of it last came there."""
    slow: bool = False
    """People were told that nothing comes there."""
    skipped: int = 0
    """Checkpoints that were due meanwhile."""
    seen_step: int = 0
    """Step of the newest of those; its own without any."""
    seen_s: At = 0.0
    """When that was due; when this one began without any."""
    last: bool = False
    """Nobody has steps to do any more, so a tier that does not take it is not tried again."""


class TierTotals(msgspec.Struct, kw_only=True):
    """Counts of what was written to a durable tier since the job's start."""

    checkpoints: int = 0
    nbytes: int = 0
    """Each blob once, however many ranks share it."""
    took_s: Span = 0.0
    """All checkpoints together, from the begin of each until its manifest was written."""
    failures: int = 0
    """Checkpoints that it did not take."""
    skipped: int = 0
    """Checkpoints that were due while an older one was on its way."""


class SavingTotals(msgspec.Struct, kw_only=True):
    """Counts of what was saved since the job's start."""

    snapshots: int = 0
    """Those that were complete."""
    nbytes: int = 0
    """Theirs, without copies on other nodes."""
    took_s: Span = 0.0
    """From the first worker's copy until each snapshot was complete, all together."""
    stall_s: Span = 0.0
    """For which training stood still."""
    copies: int = 0
    """Shards that came into the memory of nodes that did not save them."""
    copied_bytes: int = 0
    """Theirs."""
    skipped: int = 0
    """Shards that a node could not keep."""
    unread: int = 0
    """Snapshots and checkpoints that proved to be unreadable."""
    tiers: dict[str, TierTotals] = {}
    """By URL."""


class Summing(msgspec.Struct, kw_only=True):
    """A shard that is complete on a node whose worker has ended: SnapshotStored or SnapshotRejected follows."""

    node: str
    key: Key
    since_s: Since


class StorageState(msgspec.Struct, kw_only=True):
    """Snapshots in memory and checkpoints in durable tiers. Written by `storage`."""

    durable: Durable | None = None
    """The newest checkpoint in any tier."""
    older: list[Durable] = []
    """What to go on from if `durable` proves to be damaged, newest first."""
    durable_tries: int = 0
    """Generations in a row that could not be restored from it."""
    unread: list[str] = []
    """Why checkpoints that are there will not do."""
    last_from: list[tuple[str, int]] = []
    """Nodes that were given the state after the last step, and the shards of it."""
    summing: list[Summing] = []
    last_failed: list[str] = []
    """Tiers that did not take the last state."""
    snapshots: list[MemorySnapshot] = []
    told_complete: tuple[int, int | None] | None = None
    """What agents were told last of complete snapshots: the newest, and an older one that is kept beside it."""
    rewinds: list[Rewind] = []
    """Oldest first, their starts rising."""
    buddy_groups: list[list[str]] = []
    """Nodes that keep copies for each other: kept, so that a new node moves as few of them as possible."""
    short_of_copies: bool = False
    """The newest complete snapshot has fewer copies than were asked for, and the ledger says so."""
    skipped: int = 0
    """Shards that no node could keep since the last complete snapshot."""
    given: tuple[int, int] = (0, 0)
    """Generation and step of the newest state that a script gave by itself, whatever became of it."""
    storing: list[Storing] = []
    stored: dict[str, Storing] = {}
    """Tier to the last checkpoint that came there, or was tried."""
    doubtful: dict[str, Storing] = {}
    """Tier to the manifest that could not be written, as far as is known."""
    failing_tiers: list[str] = []
    """Tiers that did not take the newest checkpoint, and the ledger says so."""
    totals: SavingTotals = msgspec.field(default_factory=SavingTotals)


# ---------------------------------------------------------------- all of it


class CoreState(msgspec.Struct, kw_only=True):
    """Everything that the core remembers. Its size is linear in the number of workers.

    Each part is written by the folder that it is named after, and read by all."""

    spec: JobSpec
    """Never changes."""
    membership: MembershipState = msgspec.field(default_factory=MembershipState)
    storage: StorageState = msgspec.field(default_factory=StorageState)
    health: Health = msgspec.field(default_factory=Health)
    deadlines: Timers = msgspec.field(default_factory=Timers)
    orders: OpenOrders = msgspec.field(default_factory=OpenOrders)
    """What the engine was ordered to do and has not acknowledged."""
    began_s: At = 0.0
    """When the first event came. Written by the machine."""
    incidents: list[Incident] = []
    """The newest of the job, in the order of their numbers. Written by `kernel.incidents`, as are the next three."""
    closed: int = 0
    """So many of the job's oldest incidents are closed."""
    forgotten: int = 0
    """So many of the job's oldest are not in `incidents` any more. What a report tells of them is in the ledger."""
    forgotten_kinds: dict[str, int] = {}
    """Of these, how many of each kind."""
    injections: list[Injection] = []
    """Injected faults that no incident has claimed yet, oldest first."""

    @property
    def step(self) -> int | None:
        """Committed steps of the state that training is at. At level 0 and 1 since the job's start; None: not known."""
        if self.membership.counts_steps:
            return self.membership.committed
        return (
            None
            if self.membership.counted.base is None
            else self.membership.counted.base + self.membership.committed
        )

    @property
    def wanted_nodes(self) -> int:
        """Nodes to train on: as asked for, and no more than there may be."""
        asked = self.spec.max_nodes if self.membership.asked_nodes is None else self.membership.asked_nodes
        return (
            asked
            if self.membership.capacity_nodes is None
            else max(0, min(asked, self.membership.capacity_nodes))
        )

    @property
    def target(self) -> int:
        """Workers at full strength: as many as make whole replicas, and no more than have a micro-batch each."""
        workers = self.wanted_nodes * self.spec.nproc
        most = self.membership.most_workers
        if most is not None:
            workers = min(workers, most)
        return workers - workers % self.membership.shard_count

    @property
    def minimum(self) -> int:
        """Fewest workers to train with."""
        return self.target if self.spec.wait_for_spare else self.spec.min_nodes * self.spec.nproc

    @property
    def needed(self) -> int:
        """So many workers that compute make up the smallest job: whole replicas."""
        return -(-max(1, self.minimum) // self.membership.shard_count) * self.membership.shard_count

    @property
    def least_nodes(self) -> int:
        """Nodes that hold the smallest job."""
        return -(-self.needed // self.spec.nproc)
