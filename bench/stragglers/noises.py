"""Made-up step times: the noise that workers of one job show, and a slowdown of one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Rng = np.random.Generator


@dataclass(frozen=True)
class Noise:
    """`make(rng, steps, workers)`: seconds that each worker computes in each step, around 1."""

    name: str
    make: Callable[[Rng, int, int], Times]


def _even(rng: Rng, steps: int, workers: int) -> Times:
    return np.exp(rng.normal(0, 0.03, (steps, workers)))


def _heavy(rng: Rng, steps: int, workers: int) -> Times:
    return 1 + 0.03 * np.abs(rng.standard_t(2, (steps, workers)))


def _spikes(rng: Rng, steps: int, workers: int) -> Times:
    spikes = np.where(rng.random((steps, workers)) < 0.03, rng.uniform(1, 4, (steps, workers)), 0)
    return _even(rng, steps, workers) + spikes


def _common(rng: Rng, steps: int, workers: int) -> Times:
    """Everybody's step is longer or shorter together: sequence lengths, a shared file system."""
    return _even(rng, steps, workers) * np.exp(rng.normal(0, 0.3, (steps, 1)))


def _machine(rng: Rng, steps: int, workers: int) -> Times:
    """One machine for all, now and then half as fast."""
    slowed = np.repeat(rng.random(steps // 100 + 1) < 0.3, 100)[:steps, None]
    return _even(rng, steps, workers) * np.where(slowed, 2.0, 1.0)


def _neighbours(rng: Rng, steps: int, workers: int) -> Times:
    """What else runs on a node comes and goes: noise with a memory of ten steps."""
    drift = np.zeros((steps, workers))
    kicks = rng.normal(0, 0.02 * np.sqrt(1 - 0.9**2), (steps, workers))
    for step in range(1, steps):
        drift[step] = 0.9 * drift[step - 1] + kicks[step]
    return np.exp(drift) * np.exp(rng.normal(0, 0.02, (steps, workers)))


def _uneven(rng: Rng, steps: int, workers: int) -> Times:
    """Some are always a little slower, and one worker's times scatter more than the others'."""
    spread = np.full(workers, 0.02)
    spread[0] = 0.08
    return np.exp(rng.normal(0, 1, (steps, workers)) * spread) * np.exp(rng.uniform(-0.015, 0.015, workers))


NOISES = (
    Noise("even, 3%", _even),
    Noise("heavy tails (Student, 2 degrees)", _heavy),
    Noise("garbage collections, 3% of steps", _spikes),
    Noise("common to all, 30%", _common),
    Noise("one machine, now and then half as fast", _machine),
    Noise("busy neighbours, 2% for ten steps", _neighbours),
    Noise("uneven workers, one scatters by 8%", _uneven),
)
