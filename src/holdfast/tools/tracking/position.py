"""The position of a tracker in a job's ledger, and the parts that come next for it. Pure.

A ledger numbers its events and the commits that count. A commit that replaces another one gets a new number, so a
reader that has read up to a
number finds everything new after it, including steps to which the job went back.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from holdfast.coordinator.service.store import LedgerEntry, News, NewStep


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """How far a tracker has read. Stored next to its output, and replaced together with it."""

    ledger: str = ""
    """The ledger to which `seq` and `place` belong: each start of the job has a new one."""
    seq: int = 0
    """Number of the newest event."""
    place: int = 0
    """Number of the newest commit."""
    step: int | None = None
    """The highest step that the tracker has now; null: none."""
    made_in: int = 0
    """The newest generation from which it has a commit."""
    begins: bool = False
    """No steps of this ledger were read yet. Its first step may be below `step`, because a start resumes from a save."""

    def at_beginning_of(self, ledger: str) -> Position:
        """The position before the first entry of the ledger of a later start."""
        return Position(ledger=ledger, step=self.step, begins=True)


@dataclass(frozen=True)
class WentBack:
    """The steps from `step` on no longer count: the job computes them again."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The parts that a tracker is given at once, in the order of the ledger's time, and its position afterwards."""

    parts: tuple[NewStep | LedgerEntry | WentBack, ...]
    began_utc_s: float
    """The times of the parts count from this moment."""
    position: Position


def take_in(position: Position, news: News) -> Batch:
    """The batch that is new for a tracker at this position of this ledger."""
    highest, made_in, begins = position.step, position.made_in, position.begins
    steps: list[tuple[float, NewStep | WentBack]] = []
    for new in news.steps:
        step = new.row.step
        # A step below the highest is one of two cases. If a newer generation computed it, the job went back
        # to it. Otherwise its report was late. All reports before the newer generation's are older, so those
        # steps no longer count.
        if highest is not None and step <= highest and (new.made_in > made_in or begins):
            steps.append((new.row.t_s, WentBack(step)))
            highest = None
        highest, made_in = step if highest is None else max(highest, step), max(made_in, new.made_in)
        begins = False
        steps.append((new.row.t_s, new))
    events: list[tuple[float, LedgerEntry]] = [(entry.t_s, entry) for entry in news.events]
    # Stable, and both are in the order of their times already: no two steps and no two events change places.
    parts = sorted([*events, *steps], key=lambda timed: timed[0])
    return Batch(
        parts=tuple(part for _, part in parts),
        began_utc_s=news.began_utc_s,
        position=Position(
            ledger=news.ledger,
            seq=news.events[-1].seq if news.events else position.seq,
            place=news.steps[-1].place if news.steps else position.place,
            step=highest,
            made_in=made_in,
            begins=begins,
        ),
    )
