"""From event logs to numbers: pure functions over commits and faults.

The definitions, the same for every system:

- **After the fault.** A commit counts as caused by the recovery when the killed worker cannot have taken part
  in its step: the membership has another name or size, or a process that is new commits the step too, or the
  step is at least two past the last one that the killed worker committed. A step that was already reduced when the kill struck, and that a
  survivor commits some milliseconds later, is therefore not the recovery.
- **Stall.** From the SIGKILL to the first commit after the fault, by anyone. Redone work counts here, in
  favour of systems that restart from a checkpoint.
- **Longest gap.** Between two commits, by anyone, from the SIGKILL to full strength: a stall when the newcomer joins
  counts like the first one.
- **New work.** From the SIGKILL to the first commit after the fault of a step that had not been committed
  before. The same as the stall unless steps were lost.
- **Full strength.** From the SIGKILL to the moment when the last of all target replicas has committed the
  first step whose update holds the gradients of all of them.
- **Bytes moved.** Of the state, fetched by anyone from a peer or a checkpoint between the SIGKILL and full strength.
  What a restarted worker reads again although it had it counts too; gradients and gathered parameters do not.
- **Lost steps.** Steps that had been committed before the fault and were computed again after it. The one step
  in flight, which nobody had committed, is not among them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bench.recovery.events import NOT_PARTICIPATING, Commit, StateBytes


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One SIGKILL, and the job as it was then."""

    t: float
    """Seconds of CLOCK_MONOTONIC just before the signal was sent."""
    pid: int
    rank: int
    step: int
    """The last step that the killed worker committed."""
    gen: str
    world: int
    """The membership of that step, and its size."""
    members: frozenset[int]
    """Every process that had committed a step before the kill."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What one fault cost. None: it had not happened when the log was read."""

    stall_s: float | None
    full_s: float | None
    new_work_s: float | None
    lost_steps: int
    longest_s: float | None = None
    """The longest time without a commit by anyone until full strength."""
    moved_bytes: int | None = None
    """Bytes of the state that workers fetched until then, from peers or from a checkpoint."""
    lost_bytes: int | None = None
    """Bytes of the state that the killed worker held."""

    @property
    def moved_ratio(self) -> float | None:
        """Bytes moved for every byte lost."""
        if self.moved_bytes is None or not self.lost_bytes:
            return None
        return self.moved_bytes / self.lost_bytes

    @property
    def complete(self) -> bool:
        """Whether the job is back at full strength and past the step it had."""
        return self.full_s is not None and self.new_work_s is not None


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of some repetitions."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """Median with minimum and maximum; None of nothing."""
    numbers = sorted(values)
    if not numbers:
        return None
    return Spread(statistics.median(numbers), numbers[0], numbers[-1], len(numbers))


def fault_of(commits: Sequence[Commit], pid: int, t: float) -> Fault:
    """The fault that a SIGKILL of `pid` at time `t` was, from a log read after the kill."""
    last = max((c for c in commits if c.pid == pid), key=lambda c: c.t)
    members = frozenset(c.pid for c in commits if c.t <= t)
    return Fault(
        t=t, pid=pid, rank=last.rank, step=last.step, gen=last.gen, world=last.world, members=members
    )


def after(commits: Sequence[Commit], fault: Fault) -> list[Commit]:
    """The commits of steps in which the killed worker cannot have taken part."""
    later = [c for c in commits if c.t > fault.t and c.pid != fault.pid]
    with_newcomer = {(c.gen, c.step) for c in later if c.pid not in fault.members}
    return [
        c
        for c in later
        if (c.gen, c.world) != (fault.gen, fault.world)
        or (c.gen, c.step) in with_newcomer
        or c.step >= fault.step + 2
    ]


def recovery(commits: Sequence[Commit], fault: Fault, replicas: int) -> Recovery:
    """What `fault` cost, as far as the log tells up to now."""
    later = after(commits, fault)
    late = set(later)
    had = max(c.step for c in commits if c not in late)
    full_at = first_full_step(later, replicas)
    return Recovery(
        stall_s=_since(fault, (c.t for c in later)),
        full_s=None if full_at is None else full_at - fault.t,
        new_work_s=_since(fault, (c.t for c in later if c.step > had)),
        lost_steps=len({c.step for c in later if c.step <= had}),
        longest_s=None if full_at is None else _longest_gap(fault, (c.t for c in later if c.t <= full_at)),
    )


def with_bytes(found: Recovery, fault: Fault, states: Iterable[StateBytes]) -> Recovery:
    """`found` with the bytes moved until full strength, as far as workers have said what they hold and fetch."""
    said = list(states)
    held = [s.count for s in said if s.pid == fault.pid and s.kind == "holds"]
    if not held or found.full_s is None:
        return found
    until = fault.t + found.full_s
    moved = sum(s.count for s in said if s.kind == "fetched" and fault.t < s.t <= until)
    return replace(found, moved_bytes=moved, lost_bytes=held[-1])


def _since(fault: Fault, times: Iterable[float]) -> float | None:
    first = min(times, default=None)
    return None if first is None else first - fault.t


def _longest_gap(fault: Fault, times: Iterable[float]) -> float:
    return max(b - a for a, b in pairwise([fault.t, *sorted(times)]))


def full_steps(commits: Iterable[Commit], replicas: int) -> dict[tuple[str, int], float]:
    """For every step at full strength, by membership and number: when the last replica had committed it."""
    seen: dict[tuple[str, int], dict[int, float]] = {}
    for c in commits:
        if c.world == replicas and c.rank != NOT_PARTICIPATING:
            seen.setdefault((c.gen, c.step), {}).setdefault(c.pid, c.t)
    return {key: max(times.values()) for key, times in seen.items() if len(times) >= replicas}


def first_full_step(commits: Iterable[Commit], replicas: int) -> float | None:
    """When the first step at full strength was committed by its last replica."""
    return min(full_steps(commits, replicas).values(), default=None)


def participants(commits: Sequence[Commit], replicas: int) -> dict[int, int]:
    """Rank to process of the newest step at full strength."""
    steps = full_steps(commits, replicas)
    newest = max(steps, key=lambda key: steps[key])
    return {c.rank: c.pid for c in commits if (c.gen, c.step) == newest and c.rank != NOT_PARTICIPATING}


def block_step_s(commits: Sequence[Commit], first: int, last: int) -> float:
    """Seconds per step over the steps `first` to `last - 1`, checkpoints written in between included.

    The slowest rank counts: with a checkpoint, that is the one which writes it.
    """
    took: dict[int, float] = {}
    for c in commits:
        if first <= c.step < last and c.rank != NOT_PARTICIPATING:
            took[c.pid] = took.get(c.pid, 0.0) + c.took_s
    return max(took.values()) / (last - first)


def typical_step_s(commits: Sequence[Commit], workers: int) -> list[float]:
    """The median duration of a step at full strength; nothing if there was none."""
    found = spread(c.took_s for c in commits if c.world == workers and c.rank != NOT_PARTICIPATING)
    return [found.median] if found else []


def checkpoint_interval(save_s: float, step_s: float, budget: float) -> int:
    """The shortest interval in steps at which saving costs at most the share `budget` of the time.

    Saving every `n` steps of `step_s` costs save_s / (n * step_s + save_s) of the time.
    """
    allowed = budget / (1.0 - budget) * step_s
    return max(1, -int(-save_s // allowed))
