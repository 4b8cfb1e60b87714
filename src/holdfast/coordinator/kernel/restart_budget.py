"""What a job may spend on faults before it gives up, of `JobSpec.max_restarts`: pure.

A limit for the life of a job would end every long one: 2,048 nodes at the rate of Llama 3.1's report have some 8 faults a day. What
shows that mending is in vain is that it does not bring the job further. So restarts are counted in a row, and what takes nodes by
the day, because a spare may be replaced again and again while the job trains.
"""

from __future__ import annotations

from math import inf

import msgspec

DAY_S = 86_400.0

TRAINED_S = 3600.0
"""A start of a script that numbers its own steps has brought the job further when it trained for so long: whether its steps were new
ones is not known."""


class InARow(msgspec.Struct, omit_defaults=True):
    """Restarts since the job came further."""

    count: int = 0
    at_s: float | None = None
    """When the newest of them was counted."""
    generation: int = -1
    """The newest one then."""
    best: int = 0
    """So many steps had ever been committed then."""

    def enter(self, now: float, generation: int, started_s: float | None) -> None:
        """One more. started_s: of the worker that was lost; None: of all together."""
        # What is lost together was there before: one switch takes a hundred workers, and their ends come one by one.
        together = started_s is not None and self.at_s is not None and started_s < self.at_s
        if together and generation <= self.generation:
            return
        self.count, self.at_s, self.generation = self.count + 1, now, generation

    def since(self, committed: int) -> int:
        """How many count, once so many steps are committed."""
        return self.count if committed <= self.best else 0

    def further(self, committed: int) -> None:
        """So many steps are committed: with a new one among them, none counts any more."""
        self.count, self.best = self.since(committed), max(self.best, committed)


class Daily(msgspec.Struct, omit_defaults=True):
    """How much a count that only rises has risen in a day."""

    since_s: float | None = None
    base: int = 0

    @property
    def until_s(self) -> float:
        """When the day that runs is over."""
        return -inf if self.since_s is None else self.since_s + DAY_S

    def used(self, count: int, over: bool) -> int:
        """Of the day that runs. Negative: that much more than the limit is allowed. over: `until_s` has come."""
        return min(count, 0) if over else count - self.base

    def roll(self, count: int, now: float) -> None:
        """Before the count rises."""
        if now >= self.until_s:
            self.since_s, self.base = now, max(count, 0)


def by_the_day(max_restarts: int, nodes: int) -> int:
    """How many nodes may be taken or asked for in a day: as many as the job has may be lost at once. Zero allows none."""
    return max(max_restarts, nodes) if max_restarts else 0
