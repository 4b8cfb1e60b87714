"""Who holds up scripts that do not know of Holdfast: how far each rank is, in optimizer steps and collectives. Pure.

Such a script says nothing of the phases of its steps. But its optimizer steps are counted, and torch remembers which
collective each rank entered last. All members of a group enter the same ones in the same order, so a rank that has
entered fewer is waited for by those that stand in the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.coordinator.membership.policy import Verdict, odd_stack
from holdfast.health import stacks as health_stacks
from holdfast.protocol.messages import WorkerView
from holdfast.protocol.phases import GroupReading


def find_culprits(
    views: Sequence[WorkerView],
    allowed_s: Mapping[str, float],
    stacks: Mapping[str, str],
    complete: bool = True,
    ranks: Mapping[str, int] | None = None,
) -> Verdict:
    """Who of the workers of a script at level 0 or 1 the others wait for.

    In this order: stopped processes; workers that have not entered a collective in which others wait, and wait for
    nobody themselves; a worker that does not answer while all others wait in a collective of all ranks; the fewest
    optimizer steps; the ones whose stacks differ from those of most. Arguments as of `policy.find_culprits`.
    """
    verdict = _judge(views, allowed_s, stacks, complete, len(ranks or {}))
    # 0 is not known: a rank in its first step, or a script without torch's optimizers.
    steps = [v.page.committed for v in views if v.worker in verdict.workers and v.page.committed]
    return msgspec.structs.replace(verdict, stood_at_step=min(steps, default=None))


def _judge(
    views: Sequence[WorkerView],
    allowed_s: Mapping[str, float],
    stacks: Mapping[str, str],
    complete: bool,
    world: int,
) -> Verdict:
    # Of a stopped process no collective is known. It may have been stopped inside of the one in which the others wait.
    stopped = tuple(v.worker for v in views if v.process in ("T", "t", "X", "Z"))
    if stopped:
        return Verdict(workers=stopped, reason="its process is stopped")
    # Everything below compares. The one that was not seen may be the one that all wait for, and one that still
    # moves will soon be where the others are.
    if not complete:
        return Verdict(workers=(), reason="not every worker reported its position")
    if any(v.idle_s < allowed_s[v.worker] for v in views):
        return Verdict(workers=(), reason="some workers still do optimizer steps")
    waiting = _waiting(views, stacks)
    return (
        _behind_in_collectives(views, waiting)
        or _without_answer(views, waiting, world)
        or _behind_in_steps(views, waiting)
        or odd_stack(views, stacks)
    )


def _waiting(views: Sequence[WorkerView], stacks: Mapping[str, str]) -> frozenset[str]:
    """Workers that wait for others: by what torch says, or by where their main thread stands. (Messages between two ranks
    are in no record of gloo's.)"""
    groups = health_stacks.cluster({v.worker: stacks.get(v.worker, "") for v in views})
    by_stack = {w for g in groups if g.waits for w in g.workers}
    return frozenset(by_stack | {v.worker for v in views if any(g.waits for g in v.groups or ())})


@dataclass
class _Group:
    """What all of its members that answered say of one process group."""

    readings: dict[str, GroupReading] = field(default_factory=dict)
    """By worker."""

    @property
    def furthest(self) -> GroupReading | None:
        """Of those that wait in it, the one that is furthest. None: nobody waits there."""
        # Whoever is further without waiting proves nothing: a broadcast is complete for its source long before all
        # have entered it.
        return max((r for r in self.readings.values() if r.waits), key=lambda r: r.entered, default=None)


def _named(at: GroupReading) -> str:
    return f"{at.operation or 'collective'} {at.entered} of {at.label}"


def _groups(views: Sequence[WorkerView]) -> list[_Group]:
    """In an order that does not depend on who answered first."""
    found: dict[str, _Group] = {}
    for view in views:
        for reading in view.groups or ():
            found.setdefault(reading.group, _Group()).readings[view.worker] = reading
    return [found[name] for name in sorted(found)]


def _behind_in_collectives(views: Sequence[WorkerView], waiting: frozenset[str]) -> Verdict | None:
    """A chain of waiting ends at somebody who waits for nobody. Where it does not end, because ranks wait for each other in
    different groups, nobody is to be told from the others by this."""
    behind: dict[str, str] = {}
    for group in _groups(views):
        at = group.furthest
        if at is None:
            continue
        for worker, reading in group.readings.items():
            # Who waits elsewhere is held up itself, and is no cause. Named here, it would be replaced, and
            # the job would hang again at the one for which it waits.
            if reading.entered < at.entered and worker not in waiting:
                behind.setdefault(worker, _named(at))
    if not behind:
        return None
    workers = tuple(v.worker for v in views if v.worker in behind)
    collective = behind[workers[0]]
    return Verdict(
        workers=workers, reason=f"has not entered {collective}, in which others wait", collective=collective
    )


def _without_answer(views: Sequence[WorkerView], waiting: frozenset[str], world: int) -> Verdict | None:
    """One does not say where it is: it may hold its interpreter, which a thread that waits in a collective does not. If all
    others stand in the same collective of all ranks, that is what it has not entered."""
    silent = tuple(v.worker for v in views if v.groups is None)
    # Two that are silent cannot be told apart: the one may be held up by the other, and a healthy worker
    # would be ended.
    if len(silent) != 1 or silent[0] in waiting:
        return None
    for group in _groups(views):
        at = group.furthest
        if at is None or at.size != world or len(group.readings) != world - 1:
            continue
        if all(r.waits and r.entered == at.entered for r in group.readings.values()):
            reason = f"did not report its position, while all others wait in {_named(at)}"
            return Verdict(workers=silent, reason=reason, collective=_named(at))
    return None


def _behind_in_steps(views: Sequence[WorkerView], waiting: frozenset[str]) -> Verdict | None:
    """Ranks that train together make their optimizer steps together."""
    # A rank without any has no optimizer of torch's, or none that steps: it is not behind.
    steps = {v.worker: v.page.committed for v in views if v.page.committed}
    if not steps or min(steps.values()) == max(steps.values()):
        return None
    least, most = min(steps.values()), max(steps.values())
    behind = tuple(w for w, count in steps.items() if count == least and w not in waiting)
    if not behind:
        return None
    return Verdict(workers=behind, reason=f"did {least} optimizer steps, others {most}")
