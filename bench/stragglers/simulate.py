"""What the test for stragglers makes of made-up step times."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from bench.stragglers.noises import Noise, Times
from holdfast.health.stragglers import Stragglers
from holdfast.protocol.phases import BLOCK_STEPS

WINDOW_STEPS = 50
SETTLED = 100
"""The slowdown comes after so many steps."""


@dataclass(frozen=True)
class Quiet:
    """A run without a slow worker. windows: of WINDOW_STEPS steps, each of the whole job. false: with an alarm."""

    windows: int
    false: int


@dataclass(frozen=True)
class Slowed:
    """Runs in which one worker becomes slower. after: steps until it was named, per run that did so. wrong: runs in
    which another one was named."""

    runs: int
    after: list[int]
    wrong: int

    @property
    def in_time(self) -> float:
        return sum(a <= WINDOW_STEPS for a in self.after) / self.runs

    @property
    def median(self) -> float | None:
        return statistics.median(self.after) if self.after else None


def blocks(times: Times) -> Times:
    """Means of BLOCK_STEPS steps each without the longest, as workers send them."""
    steps, workers = times.shape
    whole = steps // BLOCK_STEPS
    ordered = np.sort(times[: whole * BLOCK_STEPS].reshape(whole, BLOCK_STEPS, workers), axis=1)
    return ordered[:, :-1].mean(axis=1)


def quiet(noise: Noise, workers: int, windows: int, seed: int) -> Quiet:
    """Counts windows with a false alarm."""
    rng = np.random.default_rng(seed)
    test = Stragglers()
    names = [str(i) for i in range(workers)]
    alarms = set()
    for at in range(0, windows, 100):  # in parts, for the memory
        part = min(100, windows - at)
        for number, row in enumerate(blocks(noise.make(rng, part * WINDOW_STEPS, workers)).tolist()):
            step = at * WINDOW_STEPS + number * BLOCK_STEPS
            changes = test.look(step, dict(zip(names, row, strict=True)))
            alarms |= {step // WINDOW_STEPS for change in changes if change.slow}
    return Quiet(windows, len(alarms))


def slowed(noise: Noise, workers: int, runs: int, seed: int, factor: float = 1.1) -> Slowed:
    """The last worker computes `factor` times as long after SETTLED steps."""
    rng = np.random.default_rng(seed)
    names = [str(i) for i in range(workers)]
    after, wrong = [], 0
    for _ in range(runs):
        times = noise.make(rng, SETTLED + 6 * WINDOW_STEPS, workers)
        times[SETTLED:, -1] *= factor
        test = Stragglers()
        for number, row in enumerate(blocks(times).tolist()):
            step = number * BLOCK_STEPS
            found = [c for c in test.look(step, dict(zip(names, row, strict=True))) if c.slow]
            wrong += any(c.worker != names[-1] for c in found)
            if any(c.worker == names[-1] for c in found):
                after.append(step + BLOCK_STEPS - SETTLED)
                break
    return Slowed(runs, after, wrong)
