"""Deadlines of nodes and workers, and how all times are moved after the coordinator did not process events for a while.

The deadline of a node or a worker follows from its state, such as when it was last heard of, so each process computes it anew.
A timer of the job is set to a time instead (`state.Timers`). When the core has to look again is recorded by the comparison
itself: see `Context.reached`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from holdfast.coordinator.kernel.state import CoreState, MembershipState, Moves, WorkerPhase
from holdfast.protocol.job_options import Timing


class Watched(StrEnum):
    """What a node or a worker is watched for."""

    SILENT = "silent"
    """A node whose agent is not heard."""
    VANISHED = "vanished"
    """A worker that its agent no longer has, and whose end nobody reports."""
    NOT_READY = "not-ready"
    """A worker that does not get ready."""


class Watch:
    """Deadlines of nodes and workers, each kind in a heap: where nothing is due, nobody is looked at.

    An entry may be too early, never too late: a sign of life, of which there are many a second, moves a node's deadline
    without touching its heap. What the state says decides when the entry comes to the top. So whoever makes a deadline
    earlier than it was has to call `watch`, or it is missed.
    """

    def __init__(self, membership: MembershipState, timing: Timing) -> None:
        self._membership, self._timing = membership, timing
        self._heaps: dict[Watched, list[tuple[float, str]]] = {}
        self._entries: dict[Watched, dict[str, float]] = {}
        self.asked: set[Watched] = set()
        """Kinds that the last look asked for: when the next of them is due is a time at which the core looks again."""
        self.look_again()

    def look_again(self) -> None:
        """Finds all deadlines from the state: at the start, and when many have moved at once."""
        self._heaps = {kind: [] for kind in Watched}
        self._entries = {kind: {} for kind in Watched}
        for name in self._membership.nodes:
            self.watch(Watched.SILENT, name)
        for name, worker in self._membership.workers.items():
            if worker.phase is not WorkerPhase.GONE:
                self.watch(Watched.VANISHED, name)
                # Also of a member: at level 0 all are, and if their script comes to level 2 they start again.
                self._enter(Watched.NOT_READY, name, worker.awaited_s + self._timing.start_s)

    def watch(self, kind: Watched, name: str) -> None:
        """A node or worker has a deadline now, or an earlier one than before."""
        at_s = self._deadline_s(kind, name)
        if at_s is not None:
            self._enter(kind, name, at_s)

    def next_s(self, *kinds: Watched) -> float | None:
        """The earliest deadline of these kinds; None: nobody of theirs is watched."""
        return min((top[0] for kind in kinds if (top := self._top(kind)) is not None), default=None)

    def due(self, kind: Watched, now: float) -> set[str]:
        """Names of those whose deadline has come."""
        self.asked.add(kind)
        names: set[str] = set()
        again = []
        while (top := self._top(kind)) is not None and now >= top[0]:
            names.add(top[1])
            again.append(heapq.heappop(self._heaps[kind]))
        # What is due stays so until its handler has changed the state: the entry goes back.
        for entry in again:
            heapq.heappush(self._heaps[kind], entry)
        return names

    def _enter(self, kind: Watched, name: str, at_s: float) -> None:
        # The newest entry of a name is the valid one. Older ones stay in the heap until they come to the top.
        # To look for them now would cost a pass over the heap for every node that is watched anew.
        self._entries[kind][name] = at_s
        heapq.heappush(self._heaps[kind], (at_s, name))

    def _top(self, kind: Watched) -> tuple[float, str] | None:
        """The first entry that is as the state says; those above it are dropped or moved on the way."""
        heap, entries = self._heaps[kind], self._entries[kind]
        while heap:
            at_s, name = heap[0]
            if entries.get(name) != at_s:
                heapq.heappop(heap)  # entered again since
                continue
            known_s = self._deadline_s(kind, name)
            # The state decides, not the heap: an entry that is earlier than the state says moves to where it
            # belongs. So signs of life cost nothing when they arrive, and one heap operation when the old
            # deadline would have come.
            if known_s == at_s:
                return heap[0]
            heapq.heappop(heap)
            del entries[name]
            if known_s is not None:
                self._enter(kind, name, known_s)
        return None

    def _deadline_s(self, kind: Watched, name: str) -> float | None:
        """What the state says. None: it is not there any more, or not to be watched for this."""
        if kind is Watched.SILENT:
            node = self._membership.nodes.get(name)
            return node.last_seen_s + self._timing.detection_s if node is not None and node.alive else None
        worker = self._membership.workers.get(name)
        if worker is None or worker.phase is WorkerPhase.GONE:
            return None
        if kind is Watched.VANISHED:
            return None if worker.vanished_s is None else worker.vanished_s + self._timing.detection_s
        starting = worker.phase in (WorkerPhase.STARTING, WorkerPhase.ATTACHED)
        return worker.awaited_s + self._timing.start_s if starting else None


# ---------------------------------------------------------------- times in which no events were processed
# One place moves all times of the state: which, and how, is said by their types (`state.Since`, `state.Until`), so a new one
# is moved as soon as it is there.


def move_times(state: CoreState, now: float, away_s: float, back_s: float | None = None) -> None:
    """Moves all times by the `away_s` seconds in which the coordinator did not process events. Silence in that time was not the
    others', and earlier decisions may have been sent that late. Whoever has to answer until a time has as much time left as
    before.

    back_s: for a coordinator that replaced another one, when every agent that is alive can have reconnected. Its predecessor may
    have processed events after its last entry, so times to answer are kept then, and are at least this.
    """

    def since(at_s: float) -> float:
        return min(now, at_s + away_s)

    def until(at_s: float) -> float:
        return at_s + away_s if back_s is None else max(at_s, back_s)

    _move(state, {Moves.SINCE: since, Moves.UNTIL: until})
    for timer, at_s in state.deadlines.at_s.items():
        if timer.awaits:
            state.deadlines.set(timer, until(at_s))


def _move(value: Any, moved: dict[Moves, Callable[[float], float]]) -> None:
    kind: Any = type(value)
    for name, how in _parts(kind):
        part = getattr(value, name)
        if part is None:
            continue
        if how is None:
            inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else [part]
            for one in inner:
                _move(one, moved)
        elif isinstance(part, dict):
            part.update({key: moved[how](at_s) for key, at_s in part.items()})
        else:
            setattr(value, name, moved[how](part))


@cache
def _parts(kind: type) -> tuple[tuple[str, Any], ...]:
    """Fields of a struct in which there is a time that moves, each with its `Moves`; None: it is in the structs there."""
    if not issubclass(kind, msgspec.Struct):
        return ()
    found = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for how in dict.fromkeys(_moves_in(hint)):
            found.append((name, how))
    return tuple(found)


def _moves_in(hint: Any) -> Iterator[Moves | None]:
    if get_origin(hint) is Annotated:
        yield from (x for x in get_args(hint)[1:] if isinstance(x, Moves) and x is not Moves.NEVER)
    elif get_origin(hint) in (Union, UnionType, list, dict):
        for one in get_args(hint):
            if one is not NoneType:
                yield from _moves_in(one)
    elif isinstance(hint, type) and _parts(hint):
        yield None
