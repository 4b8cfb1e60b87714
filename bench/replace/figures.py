"""What replacing nodes took, out of a job's report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Failed(Exception):
    """A node was not replaced. The message is for the user."""


@dataclass(frozen=True)
class Replaced:
    """One replacement, seconds. verdict_s: from the fault to the decision about its cause; full_s: from there to the
    first commit with as many workers as before; stall_s: from the fault to the next commit by anyone."""

    verdict_s: float
    full_s: float
    stall_s: float


@dataclass
class Beside:
    """What one kind of fault cost a system."""

    system: str
    kind: str
    stall_s: list[float] = field(default_factory=list)
    """From each fault to the next step by anyone."""
    steps_again: list[int] = field(default_factory=list)
    """Steps that were done and had to be done again."""
    not_back: int = 0
    """Faults after which nothing trained within the limit."""


def replaced(report: dict[str, Any], kind: str) -> list[Replaced]:
    """Every replacement after an injected fault of this kind that is at full strength again."""
    found = []
    for incident in report["incidents"]:
        fault = incident["fault"] or ""
        times = (incident["detect_s"], incident["full_strength_s"], incident["stall_s"])
        if fault.partition(":")[0] == kind and incident["injected"] and None not in times:
            detect_s, full_s, stall_s = times
            found.append(Replaced(detect_s, full_s - detect_s, stall_s))
    return found
