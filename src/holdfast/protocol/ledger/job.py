"""The job as a whole, and its ledger."""

from __future__ import annotations

from holdfast.protocol.ledger.base import LedgerEvent


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


class FaultNotFired(LedgerEvent, frozen=True, kw_only=True):
    """A fault was armed, and what it waits for did not happen."""

    fault: str
    """As it was asked for."""


class StopRequested(LedgerEvent, frozen=True, kw_only=True):
    """The job ends at its next commit."""

    reason: str
    """Why."""
    outcome: str
    """`stopped` or `failed`."""


class Ended(LedgerEvent, frozen=True, kw_only=True):
    """The job is over."""

    outcome: str | None
    """`finished`, `stopped` or `failed`."""
    reason: str | None
    """Why it was stopped."""
    step: int | None
    """Committed steps; None: not known."""


class LedgerFailed(LedgerEvent, frozen=True, kw_only=True):
    """The ledger cannot be written; training goes on."""

    reason: str
    """Why."""


class LedgerBack(LedgerEvent, frozen=True, kw_only=True):
    """The ledger can be written again."""

    failed_s: float
    """For so many seconds it could not."""
