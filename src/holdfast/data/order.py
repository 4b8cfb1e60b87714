"""Determines the sample at each position of the training stream.

A job that can be resized or resumed anywhere needs an order that nobody has to store, replay or agree on.
Here it is a function: a permutation of the samples per epoch, keyed by (seed, epoch), evaluated at one
position in constant time and memory. The data state of a job is then its step number; the world size
is not an argument anywhere in this module.

Construction: the generalized Feistel cipher with cycle walking of J. Black and P. Rogaway, "Ciphers with
arbitrary finite domains" (CT-RSA 2002), after M. Luby and C. Rackoff, "How to construct pseudorandom
permutations from pseudorandom functions" (1988). A sample number x is the pair (x // b, x % b) with
a * b >= samples and a, b about sqrt(samples). Each round adds a keyed hash of one half to the other half,
which is invertible whatever the hash, so the rounds permute [0, a * b). A result outside [0, samples) is
put in again until it falls inside ("cycle walking"), which restricts the permutation to the samples. Since
a * b < samples + a, that takes 1 + 1 / sqrt(samples) passes on average. The hash is the output function of
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

It is made for statistics, not for secrecy: do not use it as a cipher.
"""

import operator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isqrt
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# Luby-Rackoff needs 4 rounds for large domains. Small ones need more before all permutations are equally
# likely: over 20,000 keys the chi-square per degree of freedom of the permutations of 6 elements is 54 with
# 4 rounds, 4.4 with 8, 1.7 with 10 and 1.2 with 12.
ROUNDS = 12

MAX_SAMPLES = 2**62
"""Each half is then at most 2**31, so that half + 63-bit hash stays within 64 bits."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2**64 / golden ratio, odd

# Below this many positions a Python loop beats the fixed cost of about 150 numpy calls.
_VECTOR_FROM = 32

Words = npt.NDArray[np.uint64]
# An int or a Words: the same source runs on both, so that they cannot disagree. It is Any because numpy's
# type stubs believe that uint64 arrays turn signed when a Python integer is added.
Word: TypeAlias = Any


@dataclass(frozen=True)
class SampleOrder:
    """An endless order over `samples` samples: epoch after epoch, each its own permutation.

    A pure function of (samples, seed, position). Positions count samples from the start of training, across
    epochs and across workers.

    Raises:
        ValueError: `samples` or `seed` is out of range.
    """

    samples: int
    """Number of samples in the data set, 1 to 2**62."""
    seed: int
    """Any integer from 0 to 2**64 - 1."""

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise ValueError(f"samples must be between 1 and 2**62 (got {self.samples})")
        if not 0 <= self.seed <= _MASK:
            raise ValueError(f"seed must be between 0 and 2**64 - 1 (got {self.seed})")

    def at(self, position: int) -> int:
        """The sample at one position.

        Args:
            position: samples seen since the start of training, 0 to 2**63 - 1.

        Returns:
            A sample number in [0, samples). Over positions [e * samples, (e + 1) * samples) of any epoch e,
            each sample comes exactly once.

        Raises:
            ValueError: the position is out of range.
        """
        position = operator.index(position)
        if not 0 <= position < 2**63:
            raise ValueError(f"position must be between 0 and 2**63 - 1 (got {position})")
        epoch, sample = divmod(position, self.samples)
        keys = _epoch_keys(self.seed, epoch)
        sample = _permute(sample, self._halves, keys)
        # Cycle walking: apply the permutation again until the result is a sample. It ends, because the walk
        # follows a cycle that contains the sample it started from.
        while sample >= self.samples:
            sample = _permute(sample, self._halves, keys)
        return int(sample)

    def at_many(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The samples at many positions: the same integers as `at`, position by position.

        Args:
            positions: integers from 0 to 2**63 - 1, any shape, in any order, from any epochs.

        Returns:
            Sample numbers, int64, in the shape of `positions`.

        Raises:
            TypeError: the positions are not integers.
            ValueError: a position is out of range.
        """
        asked = np.asarray(positions)
        if asked.size == 0:
            return np.zeros(asked.shape, dtype=np.int64)
        if asked.dtype.kind not in "iu":
            raise TypeError(f"positions must be integers (got dtype {asked.dtype})")
        if asked.size < _VECTOR_FROM:
            few = [self.at(position) for position in asked.ravel().tolist()]
            return np.array(few, dtype=np.int64).reshape(asked.shape)
        low, high = int(asked.min()), int(asked.max())
        if low < 0 or high >= 2**63:
            raise ValueError(f"positions span {low} to {high}; positions run from 0 to 2**63 - 1")
        flat = asked.ravel().astype(np.uint64)
        # Most calls lie within one epoch, and then the round keys are one small tuple. Only a call across a
        # seam pays for a key per position.
        if low // self.samples == high // self.samples:
            samples = self._one_epoch(flat, low // self.samples)
        else:
            samples = self._many_epochs(flat)
        return samples.astype(np.int64).reshape(asked.shape)

    def micro_batch_samples(
        self, step: int, micro: int, micro_batch: int, global_batch: int
    ) -> npt.NDArray[np.int64]:
        """The samples of one micro-batch: positions p = step * global_batch + micro * micro_batch + j.

        The result is the same in every process and for every world size. A global batch may straddle two
        epochs; nothing is dropped or repeated at the seam.

        Args:
            step: the optimizer step, from 0.
            micro: the number of the micro-batch within the step, 0 to `global_batch // micro_batch - 1`.
            micro_batch: samples per micro-batch.
            global_batch: samples per step, a multiple of `micro_batch`.

        Returns:
            Sample numbers, int64, shape [micro_batch].

        Raises:
            ValueError: a negative step, a micro-batch that the step does not have, or a global batch that is
                not a whole number of micro-batches.
        """
        if micro_batch < 1 or global_batch < 1 or global_batch % micro_batch:
            raise ValueError(
                f"global_batch {global_batch} is not a multiple of micro_batch {micro_batch}; "
                "choose sizes of at least 1 that divide evenly"
            )
        if step < 0:
            raise ValueError(f"step must be at least 0 (got {step})")
        if not 0 <= micro < global_batch // micro_batch:
            raise ValueError(
                f"micro-batch {micro} of step {step} does not exist: global_batch {global_batch} has "
                f"{global_batch // micro_batch} micro-batches of {micro_batch} samples, numbered from 0"
            )
        first = step * global_batch + micro * micro_batch
        if first + micro_batch > 2**63:
            raise ValueError(f"step {step} ends past position 2**63 - 1, where the order ends")
        return self.at_many(first + np.arange(micro_batch, dtype=np.int64))

    @cached_property
    def _halves(self) -> tuple[int, int]:
        """(a, b): the smallest near-square with a * b >= samples."""
        a = isqrt(self.samples - 1) + 1
        return a, -(-self.samples // a)

    def _one_epoch(self, positions: Words, epoch: int) -> Words:
        keys = _epoch_keys(self.seed, epoch)
        samples: Words = _permute(positions - np.uint64(epoch * self.samples), self._halves, keys)
        while (outside := np.flatnonzero(samples >= self.samples)).size:
            samples[outside] = _permute(samples[outside], self._halves, keys)
        return samples

    def _many_epochs(self, positions: Words) -> Words:
        epochs, offsets = np.divmod(positions, np.uint64(self.samples))
        samples: Words = _permute(offsets, self._halves, _round_keys(self.seed, epochs))
        while (outside := np.flatnonzero(samples >= self.samples)).size:
            keys = _round_keys(self.seed, epochs[outside])
            samples[outside] = _permute(samples[outside], self._halves, keys)
        return samples


def _permute(sample: Word, halves: tuple[int, int], keys: tuple[Word, ...]) -> Word:
    """One pass of the Feistel network: a permutation of [0, a * b)."""
    a, b = halves
    left, right = sample // b, sample % b
    for number in range(0, ROUNDS, 2):
        left = (left + (_mix(right ^ keys[number]) >> 1)) % a
        right = (right + (_mix(left ^ keys[number + 1]) >> 1)) % b
    # No table and no state: every worker of any world size evaluates the same function, so a resize needs no
    # agreement about who has seen which samples, and a checkpoint needs no position but the step.
    return left * b + right


def _round_keys(seed: int, epoch: Word) -> tuple[Word, ...]:
    """The key of each round: a SplitMix64 stream that starts at a hash of (seed, epoch)."""
    start = _mix((_mix((seed + _GOLDEN) & _MASK) + epoch) & _MASK)
    return tuple(_mix((start + (number * _GOLDEN & _MASK)) & _MASK) for number in range(1, ROUNDS + 1))


@lru_cache(maxsize=64)
def _epoch_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """`_round_keys` of one epoch, remembered: consecutive positions ask for the same ones."""
    return _round_keys(seed, epoch)


def _mix(word: Word) -> Word:
    """SplitMix64's output function: a bijection of 64-bit words in which every bit depends on every bit.

    The masks cut Python's integers to 64 bits; numpy's wrap by themselves and pass them unchanged.
    """
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
