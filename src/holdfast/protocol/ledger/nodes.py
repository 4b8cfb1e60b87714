"""Nodes that come, leave and are lost."""

from __future__ import annotations

from holdfast.protocol.causes import CauseKind
from holdfast.protocol.ledger.base import LedgerEvent


class NodeJoined(LedgerEvent, frozen=True, kw_only=True):
    """An agent joined with a node."""

    node: str
    """Its name."""
    host: str
    """Its address."""
    slots: int
    """Workers that it can run."""


class NodeLost(LedgerEvent, frozen=True, kw_only=True):
    """A node is gone, or is treated so."""

    node: str
    """Its name."""
    cause: str
    """Why, in words."""
    cause_kind: CauseKind | None = None
    """The kind of the cause; None: an older version wrote it."""


class NodeRefused(LedgerEvent, frozen=True, kw_only=True):
    """A node may not join, or may not be used any more."""

    node: str
    """Its name."""
    reason: str
    """Why."""


class NodeUnavailable(LedgerEvent, frozen=True, kw_only=True):
    """The engine cannot provide a node."""

    reason: str
    """As the engine gave it."""


class NodeLeaving(LedgerEvent, frozen=True, kw_only=True):
    """A node is to leave."""

    node: str
    """Its name."""
    reason: str
    """Why."""
    within_s: float | None
    """How long it has, in seconds; None: no limit."""


class NodeStays(LedgerEvent, frozen=True, kw_only=True):
    """A node that was to leave stays."""

    node: str
    """Its name."""


class NodeTrainsOn(LedgerEvent, frozen=True, kw_only=True):
    """A node that is to leave trains until there is another."""

    node: str
    """Its name."""
    reason: str | None
    """Why it is to leave."""


class NodeLeft(LedgerEvent, frozen=True, kw_only=True):
    """A node has left as planned."""

    node: str
    """Its name."""
    reason: str
    """Why it left."""


class NodeTaken(LedgerEvent, frozen=True, kw_only=True):
    """The engine says that a node does not belong to the job any more."""

    node: str
    """Its name."""
    reason: str
    """As the engine gave it."""


class NodeHeld(LedgerEvent, frozen=True, kw_only=True):
    """A node is there and not used now."""

    node: str
    """Its name."""
    reason: str
    """Until when, and why."""


class Lemon(LedgerEvent, frozen=True, kw_only=True):
    """A node's history says to use it only if there is no other."""

    node: str
    """Its name."""
    reason: str
    """What its history has."""


class LemonLeaves(LedgerEvent, frozen=True, kw_only=True):
    """A node with such a history leaves, because there is another."""

    node: str
    """Its name."""
    reason: str
    """What its history has."""
    instead: str
    """The node that takes its place."""
