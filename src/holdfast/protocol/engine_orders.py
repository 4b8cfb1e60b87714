"""What a job orders from its engine, with a number for each order. An order is open until the engine acknowledges it.

Open orders are part of the job's state, so none is lost while nobody listens: `GET /orders` lists them, and `/watch`
announces each new one. The engine carries an order out and posts its number to `/engine`:

    {"type": "order-done", "order_id": 7}
    {"type": "order-done", "order_id": 8, "error": "Slurm does not answer"}

An engine may get an order twice, when its acknowledgement was lost. So carrying it out twice must do no harm.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import ProtocolError
from holdfast.protocol.decoding import decode
from holdfast.protocol.notices import NoticeCause


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
