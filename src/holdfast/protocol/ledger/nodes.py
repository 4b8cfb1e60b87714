"""Nodes that come, leave and are lost."""

from __future__ import annotations

from holdfast.protocol.causes import CauseKind
from holdfast.protocol.ledger.base import LedgerEvent
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.units import plural, seconds


class NodeJoined(LedgerEvent, frozen=True, kw_only=True):
    """An agent joined with a node."""

    node: str
    """Its name."""
    host: str
    """Its address."""
    slots: int
    """Workers that it can run."""
    place: str | None = None
    """Where it stands, as `protocol.node_place` writes it; None: not known."""

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
    """A node is there and not used now."""

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
