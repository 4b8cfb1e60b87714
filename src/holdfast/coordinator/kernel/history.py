"""What the records of a machine mean for whether and when it is used. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from holdfast.protocol.health import Remedy

DAY_S = 86_400.0

LEMON_WINDOW_S = 30 * DAY_S
LEMON_INCIDENTS = 3
LEMON_JOBS = 2
"""A machine with so many incidents in so many jobs within the window is a lemon. What counts are signals of Meta's lemon
detection (arXiv 2410.21680: Xids, nodes that fail jobs, nodes that jobs exclude, repairs); the numbers are ours."""

DOUBTED = 2
"""So often called wrong on a machine, and a rule is on trial there; wrong so often on all, and it is shown as doubtful."""

KEPT_RECORDS = 64
"""Newest records of a machine that are looked at."""


class RecordKind(StrEnum):
    """The kinds of records about a machine."""

    INCIDENT = "incident"  # a rule found a fault on it
    LOST = "lost"  # it was lost while it was used
    ACTED = "acted"  # a remedy was begun
    QUARANTINED = "quarantined"
    READMITTED = "readmitted"  # it passed the deep checks
    CLEARED = "cleared"  # a person says that it is well
    FALSE_POSITIVE = "false-positive"  # a person says that the rule was wrong


class Remembered(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One record of a machine."""

    kind: RecordKind
    age_s: float
    """Wall time since it was written."""
    job: str = ""
    """Name of the job that wrote it; empty: no job did."""
    rule: str = ""
    """Empty: it is about no rule."""
    device: str = ""
    """Lasting identity of what it concerns; empty: the whole machine."""
    text: str = ""
    """For people."""
    remedy: str = ""
    """The one that was begun; else empty."""


class MachineStanding(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What follows from a machine's records."""

    quarantine: str = ""
    """Why it is not used; empty: it may be."""
    by_rule: str = ""
    """The rule that it is in quarantine for; empty: it is in none, or for something else."""
    lemon: str = ""
    """Why others are taken first; empty: it is no lemon."""
    trial: tuple[str, ...] = ()
    """Rules that are not believed on it, sorted."""
    acts: tuple[Remembered, ...] = ()
    """Remedies that count for the next one, oldest first."""
    incidents: int = 0
    """Incidents and losses that count, within `LEMON_WINDOW_S`."""
    jobs: int = 0
    """In how many jobs those were."""


def standing(records: Sequence[Remembered], devices: Sequence[str] = ()) -> MachineStanding:
    """records: of the machine and of its devices, oldest first. devices: what it has now; faults of devices that were
    taken out since are not its own any more."""
    quarantine = ""
    by_rule = ""
    wrong: dict[str, int] = {}
    counting: list[Remembered] = []
    for record in records:
        # A faulty GPU that was replaced took its record with it. Without this a repaired machine would stay a
        # lemon for a month.
        if record.device and devices and record.device not in devices:
            continue
        match record.kind:
            # A person's word is stronger than any count: whatever came before is forgotten, also what would
            # make a lemon.
            case RecordKind.CLEARED:
                quarantine, counting = "", []
            case RecordKind.FALSE_POSITIVE:
                wrong[record.rule] = wrong.get(record.rule, 0) + 1
                # Only this rule's records are wrong. A quarantine for something else stands, which is why the
                # rule is kept beside the reason.
                counting = [r for r in counting if r.rule != record.rule]
                quarantine = "" if by_rule == record.rule else quarantine
            case RecordKind.QUARANTINED:
                quarantine, by_rule = record.text or record.rule or "it was replaced", record.rule
            case RecordKind.READMITTED:
                quarantine = ""
            case _:
                counting.append(record)
    # Incidents and losses only: a remedy that was begun for one of them would count the same fault twice.
    faults = [
        r for r in counting if r.kind in (RecordKind.INCIDENT, RecordKind.LOST) and r.age_s <= LEMON_WINDOW_S
    ]
    jobs = {r.job for r in faults}
    lemon = ""
    # At least two jobs, because one broken script can crash a healthy machine many times in one job.
    if len(faults) >= LEMON_INCIDENTS and len(jobs) >= LEMON_JOBS:
        lemon = f"{len(faults)} incidents in {len(jobs)} jobs within {LEMON_WINDOW_S / DAY_S:g} days"
    return MachineStanding(
        quarantine=quarantine,
        by_rule=by_rule if quarantine else "",
        lemon=lemon,
        trial=tuple(sorted(rule for rule, times in wrong.items() if times >= DOUBTED)),
        acts=tuple(r for r in counting if r.kind is RecordKind.ACTED and r.remedy in set(Remedy)),
        incidents=len(faults),
        jobs=len(jobs),
    )
