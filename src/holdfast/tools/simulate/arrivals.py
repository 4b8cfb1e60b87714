"""Draws the times and kinds of failures: for every machine from random numbers of its own, so that a trial is the same
however it is run."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from holdfast.tools.simulate.scenario import FailureClass, Scenario

HOUR_S = 3600.0
SINGLE = frozenset({"worker", "node", "hang", "slow"})


class FailureStream:
    """The failures of one machine, or of one group of machines, one after the other."""

    __slots__ = ("_classes", "_factor", "_rng")

    def __init__(self, seed: int, classes: tuple[FailureClass, ...], factor: float = 1.0) -> None:
        self._rng = random.Random(seed)
        self._classes = classes
        self._factor = factor

    def next(self, after_s: float) -> tuple[float, FailureClass | None]:
        """The next failure of a machine or group that works at `after_s`: its time, and its class."""
        first, which = math.inf, None
        # One draw per class and the earliest wins. Each draw happens whether or not it wins, so the stream
        # stays the same for every history.
        for kind in self._classes:
            mean_s = HOUR_S / (kind.rate * self._factor)
            drawn = self._rng.expovariate(1.0)
            if kind.shape != 1.0:
                # A Weibull time with the same mean: a shape below 1 gives failures that come early and in
                # clusters, as hardware's do.
                drawn = drawn ** (1 / kind.shape) / math.gamma(1 + 1 / kind.shape)
            if drawn * mean_s < first:
                first, which = drawn * mean_s, kind
        return after_s + first, which

    def burst(self, kind: FailureClass) -> list[float]:
        """The delays after which other machines of the rack follow a failure: mostly none, sometimes several;
        `kind.burst` on average."""
        if not kind.burst:
            return []
        # Geometric with mean `burst`: most failures come alone, a few take several others along.
        stays = 1 / (1 + kind.burst)
        delays = []
        while self._rng.random() > stays:
            delays.append(self._rng.expovariate(1 / max(kind.burst_s, 1e-9)))
        return delays

    def pick(self, number: int) -> int:
        """Picks one of `number`."""
        return self._rng.randrange(number)


class Arrivals:
    """All failures of one trial."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self._seed = seed
        live = tuple(c for c in scenario.classes if c.rate > 0)
        self._single = tuple(c for c in live if c.scope in SINGLE)
        self._group_classes = tuple(c for c in live if c.scope not in SINGLE)
        self.lemons = 0

    def machine(self, number: int) -> FailureStream:
        """The failures that strike one machine alone."""
        factor = 1.0
        if self.scenario.lemons:
            # From a generator of its own, so whether a machine is a lemon does not depend on how many were
            # made before it.
            lemon = random.Random(self._seed * 6_700_417 + number).random() < self.scenario.lemons
            factor = self.scenario.lemon_factor if lemon else 1.0
            self.lemons += lemon
        # Even numbers for machines and odd ones for groups: no two sources of a trial share a stream.
        return FailureStream(self._seed * 1_000_003 + 2 * number, self._single, factor)

    def groups(self) -> Iterator[tuple[FailureClass, range, FailureStream]]:
        """The failures that strike many machines at once: the class, the numbers of the places, and the stream of
        times."""
        total = self.scenario.nodes + self.scenario.spares
        for i, kind in enumerate(self._group_classes):
            size = total if kind.scope == "job" else min(kind.size, total)
            for first in range(0, total, size):
                seed = self._seed * 1_000_003 + 2 * (total + 1_000_000 * (i + 1) + first) + 1
                yield kind, range(first, min(first + size, total)), FailureStream(seed, (kind,), float(size))
