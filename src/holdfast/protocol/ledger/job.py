"""The job as a whole, and its ledger."""

from __future__ import annotations

from holdfast.protocol.ledger.base import LedgerEvent
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.units import seconds


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
