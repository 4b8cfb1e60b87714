"""Where the wall time goes, and how fast the job gets on.

Every second since the job's start is in exactly one class.

There is one open stretch of time. Whoever changes what the job does ends it here, and the next one begins at the same
moment, so the classes add up to the wall time whatever happens. What is learned later only moves seconds from one class to
another: at which moment a fault struck, which steps a restart rolled back, and for how long the script had a worker between
two steps.
"""

from __future__ import annotations

from bisect import bisect_right

from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.state import CoreState, JobPhase, TimeAccount, TimeMark, Worker, WorkerPhase
from holdfast.coordinator.membership import queries
from holdfast.protocol import messages as m
from holdfast.protocol.phases import TimeClass

LEAST_S = 60.0
MOST_S = 3600.0
"""The rate is that of the newer half of the time since the first step, but of no less and no more than this."""
POINTS = 32
"""So many points of the past lie in what the rate is counted over."""


def pace_stepped(state: CoreState, at_s: float) -> None:
    """Counts a step that was committed, or at levels 0 and 1 made."""
    points, here = state.membership.pace, _position(state)
    if not points:
        points.append((at_s, here))
        return
    at_s = max(at_s, points[-1][0])  # words of two workers may arrive in any order
    # The first point and the newest are exact; between two others there is a stretch of the window.
    if len(points) > 2 and at_s - points[-2][0] < _window_s(points, at_s) / POINTS:
        points[-1] = at_s, here
    else:
        points.append((at_s, here))
    # A job that has ended is counted from its first point on, which therefore stays.
    del points[1 : _begin(points, at_s)]


def pace_went_back(state: CoreState) -> None:
    """Takes back the progress of steps beyond the one at which the job resumes."""
    here = _position(state)
    state.membership.pace = [(at_s, min(step, here)) for at_s, step in state.membership.pace]


# ---------------------------------------------------------------- pace
# How fast the job gets on, by wall time, and when it will be done: the one place where both are counted.
#
# What counts is where the job stands, and when. So whatever takes time between two commits (the script's evaluation, a slow
# loader, a recovery, steps that are done again) makes the rate lower, as it makes the job longer.


def steps_per_s(state: CoreState, now: float) -> float | None:
    """Steps that stayed, per second of wall time: of the newer half of the time since the job's first step, of the last hour at
    most; of an ended job, from its first step to its last. None: fewer than two steps are known, or none of them stayed."""
    points = state.membership.pace
    ended = state.membership.phase is JobPhase.ENDED
    if len(points) < 2:
        return None
    begun_s, first = points[0 if ended else _begin(points, now)]
    last_s, last = points[-1]
    if last <= first or last_s <= begun_s:
        return None
    # The step that is under way is late only when it takes longer than the others did.
    late_s = 0.0 if ended else max(0.0, now - last_s - (last_s - begun_s) / (last - first))
    return (last - first) / (last_s - begun_s + late_s)


def _position(state: CoreState) -> int:
    """Steps that stayed, as far as is known; where only the script knows where it went on, steps that were made."""
    membership, counted = state.membership, state.membership.counted
    if membership.counts_steps:
        return membership.committed
    return counted.earlier + membership.committed - counted.lost


def _window_s(points: list[tuple[float, int]], now: float) -> float:
    return min(MOST_S, max(LEAST_S, (now - points[0][0]) / 2))


def _begin(points: list[tuple[float, int]], now: float) -> int:
    """The newest point that is as old as the window, else the first."""
    return max(0, bisect_right(points, now - _window_s(points, now), key=lambda point: point[0]) - 1)


KEPT = 64
"""Positions whose seconds are remembered, see `TimeAccount.told`."""

WINDOW_S = 3600.0
"""What the sliding goodput looks back on."""
MARK_EVERY_S = 300.0
"""Between two marks. Inside of it the window's start is taken as if each class had come evenly."""

_SILENT = (TimeClass.LAUNCH, TimeClass.RESTART)
"""What an unmodified script does until it makes a step. One that never tells of any may have trained all the while."""

_PAUSABLE = {
    TimeClass.COMPUTED: TimeClass.COMPUTED,
    TimeClass.JOIN: TimeClass.FIRST_STEP,
    TimeClass.FIRST_STEP: TimeClass.FIRST_STEP,
}
"""What a pause of the script may come into, and what goes on after it."""


# ---------------------------------------------------------------- what happens


def begins(state: CoreState, now: float) -> None:
    """The job's first event."""
    state.membership.wall.doing, state.membership.wall.since_s = TimeClass.START, now


def stepped(state: CoreState, at_s: float, script_s: float = 0.0) -> None:
    """A step was committed, or at levels 0 and 1 made. script_s: as in `Progress`, of the worker that says so."""
    wall = state.membership.wall
    # A late word of a generation that has ended. What follows the end is counted already, and a step in the
    # middle of it would turn the rest of a recovery into training.
    if state.membership.phase not in (JobPhase.RUNNING, JobPhase.STOPPING):
        return
    # What a worker told of steps before this one, and what was more than these took, was told too late.
    wall.settled_s = wall.script_s
    wall.script_s = max(wall.script_s, script_s)
    _split_first_step(state, at_s)
    _close(state, at_s)
    wall.step_s, wall.open_s = wall.open_s, 0.0
    _settle_script(state)
    # Late words of steps before arrive while somebody is away.
    wall.doing = TimeClass.PAUSED if wall.away else TimeClass.COMPUTED
    wall.resumes = TimeClass.COMPUTED
    if state.step is not None:
        _note(wall, state.step)
    pace_stepped(state, at_s)


def scripted(state: CoreState, script_s: float) -> None:
    """Takes a member's report on the newest step after another member reported it. script_s: as in `Progress`."""
    wall = state.membership.wall
    if script_s > wall.script_s:
        wall.script_s = script_s
        moved_s = _settle_script(state)
        # The position was noted with these seconds: left in it, they would be rolled back as steps.
        if moved_s and wall.told[-1][0] == state.step:
            wall.told[-1] = (wall.told[-1][0], wall.told[-1][1] - moved_s)


def aside(state: CoreState, worker: Worker, at_s: float, on: bool) -> None:
    """A worker begins or ends work of the script's own between two steps. The others wait for it in the next."""
    wall = state.membership.wall
    if on and worker.phase is WorkerPhase.MEMBER:
        wall.away.add(worker.name)
    elif not on:
        wall.away.discard(worker.name)
    if wall.doing in _PAUSABLE and wall.away:
        wall.resumes = _PAUSABLE[wall.doing]
        _change(state, at_s, TimeClass.PAUSED)
    elif wall.doing is TimeClass.PAUSED and not wall.away:
        _change(state, at_s, wall.resumes)


def waited(state: CoreState, data_s: float, slow_s: float) -> None:
    """Counts time that members waited, in committed steps, for data and for slow workers."""
    _within(state.membership.wall, TimeClass.DATA_WAIT, data_s)
    _within(state.membership.wall, TimeClass.SLOW_RANKS, slow_s)


def broke(state: CoreState, now: float) -> None:
    """Training stands still from now on, because of a fault."""
    wall = state.membership.wall
    # Whoever is at work of the script's own leaves only after that: until then it is no fault that takes the time.
    workers = state.membership.workers
    wall.away = {name for name in wall.away if name in workers and workers[name].phase is WorkerPhase.MEMBER}
    _mark(state, now)  # while nothing waits to be divided
    if wall.doing is TimeClass.COMPUTED:
        wall.interrupted = (_since(state), now)
        wall.doing = TimeClass.INTERRUPTED
    wall.resumes = TimeClass.DECIDE
    _change(state, now, TimeClass.PAUSED if wall.away else TimeClass.DECIDE)


def gathered(state: CoreState, now: float) -> None:
    """All workers have left the generation, or the start, that was ended."""
    _divide_interrupted(state)
    wall = state.membership.wall
    wall.away = set()
    if wall.doing is TimeClass.DECIDE or (
        wall.doing is TimeClass.PAUSED and wall.resumes is TimeClass.DECIDE
    ):
        _change(state, now, TimeClass.REPLACE)


def planned(state: CoreState, now: float) -> None:
    """A generation ends as planned. Seconds since its last step belong to the change."""
    wall = state.membership.wall
    wall.away = set()
    if wall.doing is TimeClass.COMPUTED:
        wall.doing = TimeClass.PLANNED
    _change(state, now, TimeClass.PLANNED)


def launched(state: CoreState, now: float) -> None:
    """All workers of an unmodified script start (again)."""
    wall = state.membership.wall
    _note_strength(state)
    if state.membership.number == 1:
        _change(state, now, TimeClass.LAUNCH)
    # The restart of a planned change is part of it, if its end can be seen.
    elif wall.doing is not TimeClass.PLANNED or not _counts(state):
        _change(state, now, TimeClass.RESTART)


def attached(state: CoreState) -> None:
    """The script that was started is one of level 2."""
    wall = state.membership.wall
    # In the marks as well: a window of the last hour is a difference of two of them, and a class that one has
    # under its old name would come out below zero.
    for spent_s in (wall.spent_s, *(mark.spent_s for mark in wall.marks)):
        silent_s = sum(spent_s.pop(kind, 0.0) for kind in _SILENT)
        spent_s[TimeClass.START] = spent_s.get(TimeClass.START, 0.0) + silent_s
    if wall.doing in _SILENT:
        wall.doing = TimeClass.START


def formed(state: CoreState, now: float) -> None:
    """A generation of level 2 begins."""
    wall = state.membership.wall
    wall.join_s, wall.restore_s = None, 0.0
    # Each member counts from here on.
    wall.script_s = wall.settled_s = wall.open_s = wall.step_s = 0.0
    wall.away = set()
    _note_strength(state)
    if wall.doing not in (TimeClass.START, TimeClass.PLANNED):
        _change(state, now, TimeClass.JOIN)


def joined(state: CoreState, message: m.Joined) -> None:
    """A member of the newest generation is connected, and has the state."""
    wall = state.membership.wall
    wall.join_s = max(wall.join_s or 0.0, message.join_s)
    wall.restore_s = max(wall.restore_s, message.restore_s or 0.0)


def went_back(state: CoreState, start: int) -> None:
    """Training goes on at `start`: the steps after it are done again."""
    pace_went_back(state)
    wall = state.membership.wall
    there_s, now_s = _seconds_at(wall, start), _stayed_s(wall)
    back_s = max(0.0, now_s - there_s)
    wall.rolled_back_s += back_s
    # Nobody knows in which of the steps it was: in all alike.
    wall.within_s = {kind: s * (1.0 - back_s / now_s) for kind, s in wall.within_s.items() if back_s < now_s}
    wall.told = [(step, s) for step, s in wall.told if step < start]
    wall.told.append((start, there_s))
    for mark in wall.marks:
        # A second belongs to the hour in which it was spent, also when it is rolled back an hour later. So what
        # stayed until a mark is never more than what stays now, and no class of a window is below zero.
        mark.rolled_back_s += max(0.0, _stayed_s(mark) - there_s)
        mark.within_s = {
            kind: s if kind is TimeClass.SNAPSHOT_STALL else min(s, wall.within_s.get(kind, 0.0))
            for kind, s in mark.within_s.items()
        }


def stops(state: CoreState, now: float) -> None:
    """The job ends from now on. At levels 0 and 1 it may still make steps."""
    _divide_interrupted(state)
    if state.membership.wall.doing is not TimeClass.COMPUTED:
        _change(state, now, TimeClass.SAVING)


def closes(state: CoreState, now: float) -> None:
    """Ends the last stretch of time: nothing more happens in the job."""
    _close(state, now)


# ---------------------------------------------------------------- what is known


def classes(state: CoreState, now: float) -> dict[TimeClass, float]:
    """Seconds of each class that has any; together they are the wall time. Where only the script knows which steps stayed
    there is COMPUTED, instead of PRODUCTIVE and RECOMPUTED."""
    return _named(state, _account(state, now))


def recent(state: CoreState, now: float) -> dict[TimeClass, float]:
    """The same of the last `WINDOW_S`, or since the job's start where that is later. Their sum is the window's length."""
    wall = state.membership.wall
    end = _account(state, now)
    points = [*wall.marks, _account(state, _since(state)), end]
    start_s = max(end.at_s - WINDOW_S, points[0].at_s)
    after = min(bisect_right(points, start_s, key=lambda point: point.at_s), len(points) - 1)
    before, later = points[max(0, after - 1)], points[after]
    # The window seldom begins at a mark. Between two marks the account is taken as if it had grown evenly, so
    # the sum of the classes is the window's length in any case.
    share = (start_s - before.at_s) / max(later.at_s - before.at_s, 1e-9)
    start = _minus(before, _minus(before, later), share)
    # A difference of sums leaves a rest of their rounding in classes that the window has none of.
    return {kind: s for kind, s in _named(state, _minus(end, start)).items() if s > 1e-9}


def _account(state: CoreState, now: float) -> TimeMark:
    """Everything until now, with the open stretch as if it ended."""
    wall = state.membership.wall
    at_s = max(now, _since(state))
    spent_s = dict(wall.spent_s)
    for kind, seconds in _open(state, at_s):
        if seconds:
            spent_s[kind] = spent_s.get(kind, 0.0) + seconds
    within_s = wall.within_s | {TimeClass.SNAPSHOT_STALL: state.storage.totals.stall_s}
    return TimeMark(at_s=at_s, spent_s=spent_s, rolled_back_s=wall.rolled_back_s, within_s=within_s)


def _minus(a: TimeMark, b: TimeMark, share: float = 1.0) -> TimeMark:
    """The one without a share of the other."""

    def less(x: dict[TimeClass, float], y: dict[TimeClass, float]) -> dict[TimeClass, float]:
        return {kind: x.get(kind, 0.0) - share * y.get(kind, 0.0) for kind in x.keys() | y.keys()}

    return TimeMark(
        at_s=a.at_s,
        spent_s=less(a.spent_s, b.spent_s),
        rolled_back_s=a.rolled_back_s - share * b.rolled_back_s,
        within_s=less(a.within_s, b.within_s),
    )


def _named(state: CoreState, account: TimeMark) -> dict[TimeClass, float]:
    found = dict(account.spent_s)
    if _counts(state):
        found[TimeClass.START] = found.get(TimeClass.START, 0.0) + found.pop(TimeClass.LAUNCH, 0.0)
    else:
        silent_s = sum(found.pop(kind, 0.0) for kind in _SILENT)
        found[TimeClass.UNEXPLAINED] = found.get(TimeClass.UNEXPLAINED, 0.0) + silent_s
    computed_s = found.pop(TimeClass.COMPUTED, None)
    if computed_s is not None:
        steps = TimeClass.PRODUCTIVE if is_divided(state) else TimeClass.COMPUTED
        if steps is TimeClass.PRODUCTIVE:
            found[TimeClass.RECOMPUTED] = min(account.rolled_back_s, computed_s)
        left_s = computed_s - found.get(TimeClass.RECOMPUTED, 0.0)
        for kind, seconds in account.within_s.items():
            # Never more than is left: these are told by workers and measured by their clocks, and rounding
            # must not take a second from a class that is not of steps.
            found[kind] = min(max(0.0, seconds), left_s)
            left_s -= found[kind]
        found[steps] = left_s
    return {kind: found[kind] for kind in TimeClass if found.get(kind)}


def is_divided(state: CoreState) -> bool:
    """Whether it is known which steps stayed and how long they took."""
    counted, wall = state.membership.counted, state.membership.wall
    if wall.since_s is None or wall.spent_s.get(TimeClass.UNEXPLAINED):
        return False
    if state.membership.counts_steps or not state.membership.number:
        return True
    return counted.known and counted.base is not None and _counts(state)


def _counts(state: CoreState) -> bool:
    """A step was made since the job's start."""
    return state.membership.counts_steps or bool(
        state.membership.counted.earlier + state.membership.committed
    )


# ---------------------------------------------------------------- stretches


def _since(state: CoreState) -> float:
    since_s = state.membership.wall.since_s
    return state.began_s if since_s is None else since_s


def _open(state: CoreState, until_s: float) -> list[tuple[TimeClass, float]]:
    """The open stretch, as it is divided if it ends now."""
    wall = state.membership.wall
    left_s = until_s - _since(state)
    # At levels 0 and 1 a script that was asked to end may still make steps; then this was one.
    ended = state.membership.phase is JobPhase.ENDED
    ended = ended or (state.membership.phase is JobPhase.STOPPING and state.membership.counts_steps)
    if wall.doing is TimeClass.COMPUTED and ended:
        return [(TimeClass.SAVING, left_s)]
    if wall.doing is not TimeClass.JOIN or wall.join_s is None:
        return [(wall.doing, left_s)]
    join_s = min(left_s, wall.join_s)
    restore_s = min(left_s - join_s, wall.restore_s)
    first_s = left_s - join_s - restore_s
    return [(TimeClass.JOIN, join_s), (TimeClass.RESTORE, restore_s), (TimeClass.FIRST_STEP, first_s)]


def _close(state: CoreState, at_s: float) -> None:
    """The open stretch ends, and another of the same class begins."""
    wall = state.membership.wall
    # Words wait in agents while there is no coordinator, and arrive in any order: no stretch has less than
    # no time.
    at_s = max(at_s, _since(state))
    _mark(state, at_s)
    for kind, seconds in _open(state, at_s):
        wall.spent_s[kind] = wall.spent_s.get(kind, 0.0) + seconds
        if kind is TimeClass.COMPUTED:
            wall.open_s += seconds
            _note_size(state, seconds)
        elif kind is TimeClass.PAUSED:
            incidents.paused(state, at_s - seconds, at_s)
    wall.since_s = at_s


def _settle_script(state: CoreState) -> float:
    """Moves what the script had of the newest step's time to its class; no more than there was of it. Returns the seconds."""
    wall = state.membership.wall
    moved_s = min(wall.script_s - wall.settled_s, wall.step_s)
    if moved_s <= 0.0:
        return 0.0
    wall.settled_s += moved_s
    wall.step_s -= moved_s
    wall.spent_s[TimeClass.COMPUTED] -= moved_s
    wall.spent_s[TimeClass.PAUSED] = wall.spent_s.get(TimeClass.PAUSED, 0.0) + moved_s
    _note_size(state, -moved_s)
    return moved_s


def _split_first_step(state: CoreState, at_s: float) -> None:
    """A generation's first step is committed, and before it the script had a worker for itself: after the step in flight had been
    committed in spite of the fault, for example."""
    wall = state.membership.wall
    if wall.doing not in (TimeClass.JOIN, TimeClass.FIRST_STEP):
        return
    pause_s = min(wall.script_s - wall.settled_s, dict(_open(state, at_s)).get(TimeClass.FIRST_STEP, 0.0))
    wall.settled_s = wall.script_s
    if pause_s <= 0.0:
        return
    _change(state, at_s - pause_s, TimeClass.PAUSED)


def _mark(state: CoreState, until_s: float) -> None:
    """Remembers the account as the open stretch begins, if the last mark is old, or the stretch is long."""
    wall = state.membership.wall
    since_s = _since(state)
    # What a fault ended is not divided yet: a mark would keep seconds that are moved to another class later.
    if wall.interrupted is not None:
        return
    if wall.marks:
        age_s = since_s - wall.marks[-1].at_s
        if age_s == 0.0 or (age_s < MARK_EVERY_S and until_s - since_s < MARK_EVERY_S):
            return
    wall.marks.append(_account(state, since_s))
    older = bisect_right(wall.marks, since_s - WINDOW_S, key=lambda mark: mark.at_s)
    del wall.marks[: max(0, older - 1)]


def _note_strength(state: CoreState) -> None:
    generation = state.membership.generation
    state.membership.wall.strength = 0 if generation is None else generation.strength


def _note_size(state: CoreState, computed_s: float) -> None:
    """Of steps with fewer workers than wanted, and with workers that have nothing to do, a share is not training."""
    # Kept, for a generation has to look for it among its members: every step would cost more in a larger job.
    strength = state.membership.wall.strength
    if not strength or not state.target:
        return
    here = min(1.0, strength / state.target)
    _within(state.membership.wall, TimeClass.FEWER_WORKERS, (1.0 - here) * computed_s)
    _within(
        state.membership.wall,
        TimeClass.IDLE_DIVISION,
        here * queries.idle(state, strength) * computed_s,
    )


def _within(wall: TimeAccount, kind: TimeClass, seconds: float) -> None:
    if seconds:
        wall.within_s[kind] = max(0.0, wall.within_s.get(kind, 0.0) + seconds)


def _change(state: CoreState, now: float, doing: TimeClass) -> None:
    _close(state, now)
    state.membership.wall.doing = doing


def _divide_interrupted(state: CoreState) -> None:
    """The time of a fault is often learned after its effect: only now is known how long it was not noticed."""
    wall = state.membership.wall
    if wall.interrupted is None:
        return
    (since_s, broke_s), wall.interrupted = wall.interrupted, None
    struck = [
        i.struck_s
        for i in incidents.open_ones(state)
        if i.generation == state.membership.number and i.first_commit_at_s is None
    ]
    # Within the stretch that the fault ended: what a fault's report says of the time before was training,
    # which other steps have proved.
    unseen_s = broke_s - max(since_s, min(broke_s, *struck)) if struck else 0.0
    wall.spent_s[TimeClass.INTERRUPTED] -= unseen_s
    wall.spent_s[TimeClass.DETECT] = wall.spent_s.get(TimeClass.DETECT, 0.0) + unseen_s


# ---------------------------------------------------------------- positions


def _stayed_s(wall: TimeAccount | TimeMark) -> float:
    """Seconds of the steps before the newest position."""
    return wall.spent_s.get(TimeClass.COMPUTED, 0.0) - wall.rolled_back_s


def _note(wall: TimeAccount, step: int) -> None:
    """So many seconds lead to this position."""
    if wall.told and step <= wall.told[-1][0]:
        return
    wall.told.append((step, _stayed_s(wall)))
    # What is gone back to is recent as a rule, or the very beginning, which stays.
    if len(wall.told) > KEPT:
        # Every other one of the older half goes. So their number is bounded in a run of any length, and
        # recent steps, to which a job goes back, are known most exactly.
        del wall.told[2 : KEPT // 2 : 2]


def _seconds_at(wall: TimeAccount, step: int) -> float:
    """Between two that are known, as if all steps took the same time. What lies before all of them was not computed in this
    job: a run before saved it."""
    after = bisect_right(wall.told, step, key=lambda told: told[0])
    if after == 0:
        return 0.0
    before_step, before_s = wall.told[after - 1]
    # Also what came after the word of the newest step, which is no work on a step that is done again.
    if after == len(wall.told):
        return _stayed_s(wall)
    next_step, next_s = wall.told[after]
    return before_s + (next_s - before_s) * (step - before_step) / (next_step - before_step)
