"""Seeds that depend on what is computed, and never on the process that computes it: (seed, step, micro-batch)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_MASK = (1 << 64) - 1
_LOADING = 0x6C6F6164  # separates a sample's augmentation from the dropout of the forward pass


def micro_seed(seed: int, step: int, micro: int) -> int:
    """Seed of the randomness inside a micro-batch, independent of rank and world size (splitmix64 steps)."""
    word = seed & _MASK
    for part in (step, micro):
        # Step and micro are mixed in one after the other, each through the complete mixer. Adding them first
        # would give (1, 2) and (2, 1) the same seed.
        word = (word + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        word ^= word >> 31
    return word >> 1


def loading_seed(seed: int, step: int, micro: int) -> int:
    """Seed of the random numbers that the dataset draws while it makes a micro-batch."""
    return micro_seed(seed ^ _LOADING, step, micro)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restores the global generators of Python, numpy and torch's CPU at the end, whatever was drawn or seeded inside."""
    python, array, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(torchs)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the global generators of Python, numpy and torch; 7 µs together on a CPU.

    torch.manual_seed would do the same for every back end, and format the caller's stack for those that are not
    there: half a millisecond in every micro-batch.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
