"""One machine of a simulated cluster."""

from __future__ import annotations

import math

from holdfast.tools.simulate.arrivals import FailureStream
from holdfast.tools.simulate.scenario import FailureClass

BEGIN_S = 1000.0
"""The virtual clock's first second: the core takes 0 for a clock that was never read."""

REST = "all-others"
"""The node that stands for all others. Sorts before them, so that it is a member and no spare."""

HOP_S = 0.01
"""How long a word from an agent takes."""

SIGKILL = -9


# Not an error of the user's. The trial is run again with more names, and gives what it would have given with
# a name for every machine.
class FewNames(Exception):
    """Something happens to a machine that has no name of its own: there are too few for this trial."""


class SimulatedMachine:
    """One machine, and the worker on it. place: where it stands; weight: for how many it stands. failures: that the core
    counts against it, while it has no name."""

    __slots__ = ("fails_s", "failure", "failures", "hung_s", "name", "number", "place", "ready", "sessions", "slow", "source", "up", "weight", "worker")  # fmt: skip

    def __init__(self, number: int, place: int, source: FailureStream | None, weight: int = 1) -> None:
        self.number = number
        self.place = place
        self.name = REST if source is None else f"n{number:05d}"  # empty: one of those that REST stands for
        self.source = source
        self.weight = weight
        self.up = False
        self.sessions = 0
        self.worker: str | None = None
        self.ready = False
        self.hung_s: float | None = None
        self.slow = 1.0
        self.fails_s = math.inf
        self.failure: FailureClass | None = None
        self.failures = 0
