"""Optimizer steps at level 0 and 1, over all starts of a job: how many there were, and how many were done again.

Each start counts its own (torch's optimizer hook). Where it went on from only the script knows, and it numbers its steps
as it likes: `holdfast.checkpoint` says at which count the state of a number was given, and at which one was loaded. What
follows from that is known, everything else is not.
"""

from __future__ import annotations

from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.membership import wall_time
from holdfast.protocol import ledger

NOTHING = -1
"""Stands for the state of a script that found nothing to load."""

KEPT = 16
"""Of states that were given, so many of the newest are remembered beside those that may still be loaded."""


def starts(state: CoreState) -> None:
    """Resets the count of this start's steps to zero: all workers start (again), from wherever the script resumes."""
    counted = state.membership.counted
    counted.left_at = state.step
    counted.before = state.membership.committed
    counted.earlier += counted.before
    if state.membership.number > 1:
        counted.known = counted.known and counted.base is not None  # the start before went on from somewhere
        counted.base = None


def began_anew(context: Context, generation: int) -> None:
    """Records that the script's optimizer had no state before its first step. Reported once: a script that never resumes is not
    warned again."""
    membership = context.state.membership
    counted = membership.counted
    tells = counted.gives or counted.loaded_first is not None  # by `holdfast.checkpoint`
    if (
        membership.counts_steps
        or generation != membership.number
        or tells
        or counted.asked
        or not counted.before
    ):
        return
    counted.asked = True
    context.record(ledger.BeganAnew(generation=generation, steps=counted.before))


def exited(state: CoreState, worker: str, steps: int) -> None:
    """Takes the steps from the exit of a worker of this start, since its last reports may have been held back."""
    if (
        not state.membership.counts_steps
        and state.membership.generation is not None
        and state.membership.generation.rank_of(worker) is not None
    ):
        state.membership.committed = max(state.membership.committed, steps)


def gave(state: CoreState, generation: int, step: int, steps: int) -> None:
    """Records that rank 0 saved the state that its script calls `step`, after so many optimizer steps of this start."""
    counted = state.membership.counted
    if state.membership.counts_steps or generation != state.membership.number:
        return
    state.membership.committed = max(state.membership.committed, steps)
    if counted.base is None:
        return
    counted.given.pop(step, None)  # the newest is last
    counted.given[step] = counted.base + steps
    counted.gives = True
    there = {NOTHING, *(x.step for x in state.storage.snapshots), *(x.step for x in state.storage.storing)}
    there.update(x.step for x in (state.storage.durable, *state.storage.older) if x is not None)
    newest = list(counted.given)[-KEPT:]
    counted.given = {s: at for s, at in counted.given.items() if s in there or s in newest}


def loaded(context: Context, generation: int, step: int | None, steps: int) -> None:
    """Rank 0's script goes on from the state of `step`; None: it found nothing to load."""
    s, counted = context.state, context.state.membership.counted
    if s.membership.counts_steps or generation != s.membership.number:
        return
    name = NOTHING if step is None else step
    if s.membership.number == 1 and not steps and not counted.gives:
        counted.given = {name: 0}  # what this job begins with, be it of a run before
        counted.loaded_first = name
        return
    s.membership.committed = max(s.membership.committed, steps)
    before = counted.base + steps if counted.base is not None else counted.left_at
    if counted.base is None and steps:
        before = None  # what it did before it loaded began nobody knows where
    after = counted.given.get(name)
    if step is None and not counted.gives:
        after = None  # it saves with something else, and so loads with that
    if before is None or after is None:
        counted.base, counted.known = None, False
        return
    lost = max(0, before - after)
    counted.lost += lost
    wall_time.went_back(s, after)
    counted.base = after - steps
    for incident in incidents.open_ones(s):
        if incident.generation < s.membership.number and incident.first_commit_at_s is None:
            incident.lost_steps = max(incident.lost_steps or 0, lost)


def began_with(state: CoreState) -> int | None:
    """The step number of the script that its first start resumed from; None: it has not reported one."""
    counted = state.membership.counted
    # It found nothing and saves with something else: then it may have loaded with that.
    return None if counted.loaded_first == NOTHING and not counted.gives else counted.loaded_first
