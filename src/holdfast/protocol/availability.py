"""What an engine tells a job about capacity: the whole interface by which Slurm, Kubernetes, a spot market or a person
makes it grow and shrink. Posted as JSON to the coordinator's `/engine`, with the job's token:

    {"type": "node-going", "node": "node3", "within_s": 120, "reason": "spot interruption"}
    {"type": "node-taken", "node": "node3", "reason": "Slurm gave it to another job"}
    {"type": "node-out-of-memory", "node": "node3", "limit_bytes": 8589934592, "age_s": 2.5}
    {"type": "capacity", "nodes": 2, "within_s": 30, "reason": "preempted by job 17, priority 100"}
    {"type": "capacity", "nodes": null, "reason": "job 17 has ended"}
    {"type": "order-done", "order_id": 7}
    {"type": "job-going", "within_s": 240, "reason": "the time limit", "cause": "time-limit"}
    {"type": "engine-traits", "watches_boots": true, "keeps_nodes": false, "nodes_are_machines": true}

`cause` is one of `NoticeCause`, for the scripts: see `holdfast.notice`.
"""

from __future__ import annotations

import msgspec

from holdfast.protocol.notices import NoticeCause


class NodeAvailable(msgspec.Struct, frozen=True, tag="node-available"):
    """There are nodes to be had again: what the job lacks is asked for now."""


class NodeUnavailable(msgspec.Struct, frozen=True, tag="node-unavailable"):
    """The engine cannot provide a node that was asked for."""

    reason: str


# A notice and no order: the core decides at which step the node leaves, and uses the time that it is given.
class NodeGoing(msgspec.Struct, frozen=True, tag="node-going"):
    """A node is to leave: it is given up at a step's edge, for another where there is one."""

    node: str
    reason: str
    within_s: float | None = None
    """How long it has; None: no haste, it may wait for its replacement."""
    cause: NoticeCause | None = None
    """None counts as `drain`."""


class NodeTaken(msgspec.Struct, frozen=True, tag="node-taken"):
    """A node does not belong to the job any more. If it lives on unreached, it is turned away when it comes back."""

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
    """The job will be ended. Nothing is decided by it: the scripts hear of it."""

    reason: str
    within_s: float | None
    """In how many seconds; None: it will not be ended after all."""
    cause: NoticeCause = NoticeCause.STOP


class EngineTraits(msgspec.Struct, frozen=True, tag="engine-traits"):
    """How the engine differs from others, where that changes what is decided. It says so to every coordinator that starts."""

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
