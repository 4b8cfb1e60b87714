"""The input of the core (events) and its output (actions)."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.coordinator.kernel.history import RecordKind, Remembered
from holdfast.protocol.causes import Cause, ConnectionClosed
from holdfast.protocol.engine_orders import (
    Capacity,
    EngineTraits,
    JobGoing,
    MarkNode,
    NodeAvailable,
    NodeGoing,
    NodeOutOfMemory,
    NodeTaken,
    NodeUnavailable,
    OrderDone,
    ProvideNode,
    RebootNode,
    ReleaseNode,
)
from holdfast.protocol.health import Remedy
from holdfast.protocol.job import Durable
from holdfast.protocol.ledger import LedgerEvent
from holdfast.protocol.messages import FromWorker, Hello, NodeMessage, ToAgent
from holdfast.protocol.notices import NoticeCause


class NodeJoined(msgspec.Struct, frozen=True):
    """An agent connected, for the first time or again."""

    hello: Hello
    past: tuple[Remembered, ...] = ()
    """What is known of the machine and its devices, oldest first."""


# The session says which agent is meant. An old connection may be reported closed after a new agent of the
# same node has joined; without the session the news about the old one would take out the new one.
class NodeLost(msgspec.Struct, frozen=True):
    """An agent's connection closed, or its engine says that it is dead."""

    node: str
    session: str
    """Of the agent that it was: a newer one of the same node goes on."""
    cause: Cause = ConnectionClosed()


class NodeSays(msgspec.Struct, frozen=True):
    """A message of an agent itself."""

    node: str
    message: NodeMessage


# In a large job nearly all events would be reports, and each frame has one of every worker. So what any event costs, such as
# queueing it and finding its node, is paid once for a frame.
class WorkersSay(msgspec.Struct, frozen=True):
    """Reports of a node's workers that came together, in the order in which its agent had them."""

    node: str
    reports: tuple[FromWorker, ...]
    waited_s: float = 0.0
    """For how long they waited here. It adds to the age of each."""


class StopRequested(msgspec.Struct, frozen=True):
    """A person or the cluster asks the job to stop, keeping its state."""

    reason: str
    cause: NoticeCause | None = None
    """None counts as `stop`."""


class ResizeRequested(msgspec.Struct, frozen=True):
    """A person wants the job to train on so many nodes, within its bounds."""

    nodes: int
    reason: str


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    """A fault is being injected now: lets the incident that follows know when it really began."""

    fault: str
    """As it was written, with its options."""
    kind: str
    """The fault's name alone."""
    node: str | None = None
    """None: it names no node."""
    worker: str | None = None
    """None: it hits no worker in particular."""
    step: int | None = None
    """Steps that the worker has committed, by its own word; None: it was not asked."""


class Recovered(msgspec.Struct, frozen=True):
    """A new coordinator process took over from a snapshot of the state."""

    last_s: float
    """When the old one was last heard of, on the core's clock."""
    handed_over: bool = False
    """The old one was asked to hand over, and did: nothing was lost."""


class DurableFound(msgspec.Struct, frozen=True):
    """What the durable tiers have, as a job starts."""

    durable: Durable | None
    """The newest complete checkpoint; None: there is none."""
    older: tuple[Durable, ...] = ()
    """Those to take if it proves to be damaged, newest first."""
    passed_over: tuple[str, ...] = ()
    """Why others will not do, for people."""


# The service measures this, because the core has no clock. Without it a coordinator that was stopped for five
# seconds would wake up, find every node silent for longer than the detection time, and end a healthy job.
class Overslept(msgspec.Struct, frozen=True):
    """The coordinator's process could not process messages for this long. What agents sent meanwhile is still to be read."""

    away_s: float


class Starved(msgspec.Struct, frozen=True):
    """An agent on the coordinator's machine waited this long for a processor. That part of its silence says nothing about the
    agent."""

    node: str
    waited_s: float


class MachineCleared(msgspec.Struct, frozen=True):
    """A person says that a machine is well."""

    machine: str
    """Its lasting identity; its node's name where it has none."""
    rule: str = ""
    """The one that was wrong about it; empty: whatever was said of it is over."""
    remember: bool = False
    """The history of machines has no record of this word yet."""


class NodeOrdered(msgspec.Struct, frozen=True):
    """A person wants a machine rebooted or replaced: it leaves the job between two steps, as for any remedy that can wait."""

    node: str
    remedy: Remedy
    """`REBOOT` or `REPLACE`."""
    reason: str


# Nothing is in it: what is due is found by comparing times of the state with `now`. So a Tick too many, or
# one that comes late, does no harm.
class Tick(msgspec.Struct, frozen=True):
    """Time passed: a deadline may be due."""


Event = (
    NodeJoined
    | NodeLost
    | NodeSays
    | WorkersSay
    | NodeAvailable
    | NodeUnavailable
    | NodeGoing
    | NodeTaken
    | NodeOutOfMemory
    | OrderDone
    | JobGoing
    | EngineTraits
    | Capacity
    | StopRequested
    | ResizeRequested
    | Injected
    | Recovered
    | DurableFound
    | Overslept
    | Starved
    | MachineCleared
    | NodeOrdered
    | Tick
)


class Send(msgspec.Struct, frozen=True):
    """Tell an agent."""

    node: str
    message: ToAgent


class Record(msgspec.Struct, frozen=True):
    """Write into the ledger of events."""

    event: LedgerEvent

    @property
    def kind(self) -> str:
        """The event's name in the ledger."""
        return self.event.kind

    @property
    def fields(self) -> dict[str, Any]:
        """The event's fields, also those that hold a default; `incidents` where there are some."""
        fields = msgspec.structs.asdict(self.event)
        return fields if self.event.incidents else {k: v for k, v in fields.items() if k != "incidents"}


class Remember(msgspec.Struct, frozen=True, kw_only=True):
    """Keep this in the history of a machine. Fields as in `history.Remembered`."""

    machine: str
    """Its lasting identity, else its node's name."""
    kind: RecordKind
    node: str
    rule: str = ""
    device: str = ""
    text: str = ""
    remedy: str = ""
    incident: int = 0
    """The number of the incident that it is about; 0: of none. An injected fault says nothing about a machine, so whoever keeps
    histories leaves it out."""


class End(msgspec.Struct, frozen=True):
    """The job is over."""

    outcome: str


Action = Send | Record | ProvideNode | ReleaseNode | MarkNode | RebootNode | Remember | End
