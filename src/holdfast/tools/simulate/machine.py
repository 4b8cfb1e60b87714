"""One machine of a simulated cluster."""

from __future__ import annotations

import math

from holdfast.tools.simulate.arrivals import FailureStream
from holdfast.tools.simulate.scenario import FailureClass

BEGIN_S = 1000.0
"""The start of the virtual clock, in seconds: the core takes 0 for a clock that was never read."""

REST = "all-others"
"""The node that represents all others. Its name sorts before theirs, so that it is a member and not a spare."""

HOP_S = 0.01
"""How long a message from an agent takes, in seconds."""

SIGKILL = -9


# Not a user's error. The trial is run again with more names, and gives the same result as with a name for
# every machine.
class FewNames(Exception):
    """Something happens to a machine without a name of its own: there are too few names for this trial."""


class SimulatedMachine:
    """One machine, and the worker on it. place: its position; weight: the number of machines that it represents.
    failures: those that the core counts against it, kept here while it has no name."""

    __slots__ = ("fails_s", "failure", "failures", "hung_s", "name", "number", "place", "ready", "sessions", "slow", "source", "up", "weight", "worker")  # fmt: skip

    def __init__(self, number: int, place: int, source: FailureStream | None, weight: int = 1) -> None:
        self.number = number
        self.place = place
        self.name = REST if source is None else f"n{number:05d}"  # empty: one of those that REST represents
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
