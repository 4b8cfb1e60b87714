"""What is remembered of faults: one incident each, and injected ones that none has claimed."""

from __future__ import annotations

import msgspec

from holdfast.coordinator.kernel.health_state import Evidence
from holdfast.protocol.causes import Cause
from holdfast.protocol.health import Remedy, Severity


class Incident(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One fault, from its first sign to the first commit at full strength.

    world: members of the generation that it struck, so what full strength means for it. rule: of the finding that
    explains it; firm: one is enough; severity, asked: the worst of all findings. quiet: training was not disturbed.
    evidence: what was seen, oldest first; heard_s: when last. due_s: when it will be decided. does: what is done; verdict:
    that in words. where: of a hang, where all ranks stood. raised: the first sign was an error of a worker at level 0.
    """

    id: int
    cause: Cause
    node: str | None
    ranks: list[int]
    at_step: int | None
    fault_at_s: float | None
    detected_at_s: float
    generation: int
    world: int = 1
    fault: str | None = None
    injected: bool = False
    workers: list[str] = []
    rung: str | None = None
    decided_at_s: float | None = None
    replaced_at_s: float | None = None
    joined_at_s: float | None = None
    join_s: float | None = None
    restore_s: float | None = None
    first_commit_at_s: float | None = None
    full_at_s: float | None = None
    lost_steps: int | None = None
    needs_newcomer: bool = False
    rule: str = ""
    device: str = ""
    source: str = ""
    firm: bool = False
    severity: Severity = Severity.INFO
    asked: Remedy = Remedy.WATCH
    quiet: bool = False
    heard_s: float = 0.0
    due_s: float | None = None
    does: Remedy | None = None
    verdict: str = ""
    evidence: list[Evidence] = []
    where: str = ""
    raised: bool = False
    earlier_stalls: int = 0
    earlier_stall_s: float = 0.0

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
    kind: str
    at_s: float
    node: str | None = None
    worker: str | None = None
