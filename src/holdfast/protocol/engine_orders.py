"""What an engine and a job tell each other: the whole interface by which Slurm, Kubernetes, a spot market or a person makes a
job grow and shrink.

The engine posts what it knows about capacity as JSON to the coordinator's `/engine`, with the job's token:

    {"type": "node-going", "node": "node3", "within_s": 120, "reason": "spot interruption"}
    {"type": "node-taken", "node": "node3", "reason": "Slurm gave it to another job"}
    {"type": "node-out-of-memory", "node": "node3", "limit_bytes": 8589934592, "age_s": 2.5}
    {"type": "capacity", "nodes": 2, "within_s": 30, "reason": "preempted by job 17, priority 100"}
    {"type": "capacity", "nodes": null, "reason": "job 17 has ended"}
    {"type": "job-going", "within_s": 240, "reason": "the time limit", "cause": "time-limit"}
    {"type": "engine-traits", "watches_boots": true, "keeps_nodes": false, "nodes_are_machines": true}

`cause` is one of `NoticeCause`, for the scripts: see `holdfast.notice`.

The job's orders have a number each, and an order is open until the engine acknowledges it. Open orders are part of the job's
state, so none is lost while nobody listens: `GET /orders` lists them, and `/watch` announces each new one. The engine carries an
order out and posts its number to `/engine`:

    {"type": "order-done", "order_id": 7}
    {"type": "order-done", "order_id": 8, "error": "Slurm does not answer"}

An engine may get an order twice, when its acknowledgement was lost. So carrying it out twice must do no harm.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import ProtocolError
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.wire.decoding import decode


class ProvideNode(msgspec.Struct, frozen=True, tag="provide-node"):
    """Provide one more node."""

    reason: str
    order_id: int = 0
    """Rises within a job, over all of its coordinators."""


class ReleaseNode(msgspec.Struct, frozen=True, kw_only=True, tag="release-node"):
    """The job went on without this node: make sure that nothing of it runs on."""

    node: str
    reason: str
    planned: bool = False
    """It was to leave, and was not lost."""
    cause: NoticeCause | None = None
    """Why it was to leave; None: it was lost, or nobody was told why."""
    may_return: bool = False
    """Its agent ended on a machine that answers. An engine that starts agents again where they were may wait for this one first:
    when it is back, the order is withdrawn."""
    order_id: int = 0
    """See `ProvideNode`."""


class MarkNode(msgspec.Struct, frozen=True, tag="mark-node"):
    """A node is bad: give it to nobody (Slurm: drain; Kubernetes: a taint)."""

    node: str
    reason: str
    order_id: int = 0
    """See `ProvideNode`."""


class RebootNode(msgspec.Struct, frozen=True, tag="reboot-node"):
    """Boot a node that the job has released; it comes back as a new one."""

    node: str
    reason: str
    order_id: int = 0
    """See `ProvideNode`."""


EngineOrder = ProvideNode | ReleaseNode | MarkNode | RebootNode


class EngineOrders(msgspec.Struct, frozen=True):
    """What `GET /orders` answers."""

    nodes: int
    """Nodes that the job wants altogether, spares included."""
    orders: tuple[EngineOrder, ...]
    """Open ones, oldest first."""


def kind_of(order: EngineOrder) -> str:
    """By which it is announced, for example `provide-node`."""
    return str(type(order).__struct_config__.tag)


def as_announced(order: EngineOrder) -> dict[str, Any]:
    """What is announced beside the kind."""
    return msgspec.structs.asdict(order)


def of_announcement(kind: str, value: dict[str, Any]) -> EngineOrder | None:
    """The order that was announced; None: the announcement is of something else. Raises ProtocolError where it cannot be read."""
    if kind not in _KINDS:
        return None
    order: EngineOrder = decode(
        lambda given: msgspec.convert({**given, "type": kind}, type=EngineOrder),
        value,
        "an order of the coordinator cannot be read",
        error=ProtocolError,
    )
    return order


_KINDS = frozenset(
    str(kind.__struct_config__.tag) for kind in (ProvideNode, ReleaseNode, MarkNode, RebootNode)
)


# ---------------------------------------------------------------- availability


class NodeAvailable(msgspec.Struct, frozen=True, tag="node-available"):
    """The engine has nodes again. The job requests at once what it lacks."""


class NodeUnavailable(msgspec.Struct, frozen=True, tag="node-unavailable"):
    """The engine cannot provide a node that was asked for."""

    reason: str


# A notice and no order: the core decides at which step the node leaves, and uses the time that it is given.
class NodeGoing(msgspec.Struct, frozen=True, tag="node-going"):
    """A node is about to leave. It is given up between two steps, for another one if there is one."""

    node: str
    reason: str
    within_s: float | None = None
    """How long it has; None: no haste, it may wait for its replacement."""
    cause: NoticeCause | None = None
    """None counts as `drain`."""


class NodeTaken(msgspec.Struct, frozen=True, tag="node-taken"):
    """A node does not belong to the job any more. If it is alive but was not reachable, it is refused when it comes back."""

    node: str
    reason: str


# The node's own agent cannot tell: where the kernel ends a whole container, it is among those that were killed.
class NodeOutOfMemory(msgspec.Struct, frozen=True, tag="node-out-of-memory"):
    """The kernel killed all processes of a node, because its container had used its memory. That names the cause of an
    incident, and nothing else is decided by it."""

    node: str
    limit_bytes: int | None = None
    """Of its container; None: the engine does not know it."""
    age_s: float = 0.0
    """How long ago it was."""


class OrderDone(msgspec.Struct, frozen=True, tag="order-done"):
    """The engine has carried out an order, or cannot. See `protocol.engine_orders`."""

    order_id: int
    error: str | None = None
    """Why it could not; None: it is done."""


# A limit, never a wish: it can only take away from what the job wants, and None gives back everything at
# once.
class Capacity(msgspec.Struct, frozen=True, tag="capacity"):
    """The job may train on this many nodes at most, whatever it wants."""

    nodes: int | None
    """None lifts the limit."""
    reason: str
    within_s: float | None = None
    """How long it has to shrink; None: no haste."""
    cause: NoticeCause | None = None
    """None counts as `preemption`."""


# Only told: the end itself comes as a capacity of 0 or as a request to stop, which may also never come.
class JobGoing(msgspec.Struct, frozen=True, tag="job-going"):
    """The job will be ended. Nothing is decided on it: the scripts get a notice."""

    reason: str
    within_s: float | None
    """In how many seconds; None: it will not be ended after all."""
    cause: NoticeCause = NoticeCause.STOP


class EngineTraits(msgspec.Struct, frozen=True, tag="engine-traits"):
    """How the engine differs from others, as far as decisions depend on it. The engine sends it to every coordinator that
    starts."""

    watches_boots: bool = False
    """What becomes of a node that it was ordered to boot is its own affair: it may give it to others, so the job does not
    wait for it."""
    keeps_nodes: bool = True
    """After the job its nodes are still this user's, so what is in their memory can be gone on from. Slurm gives them to
    others."""
    nodes_are_machines: bool = False
    """A node is a machine, and not a process of one that many share. So a node that was lost counts in the history of its
    machine."""


Availability = (
    NodeAvailable
    | NodeUnavailable
    | NodeGoing
    | NodeTaken
    | NodeOutOfMemory
    | OrderDone
    | Capacity
    | JobGoing
    | EngineTraits
)
