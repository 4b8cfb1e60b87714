"""Finds workers that are slower than their peers, by a sequential test on each worker's own computing time. Pure.

In a job whose workers wait for each other, every worker's step takes as long as the slowest one's. So what is compared
is the time that a worker computes, block of steps by block of steps, as the logarithm of its ratio to the median of its
peers in the same steps: anything that slows all of them at once cancels out. A worker is slow when the sum of the
log-likelihood ratios of "10% slower" against "as fast as the others" crosses a threshold (Page's CUSUM, Biometrika 41,
1954; Lorden's bound: one false alarm in exp(threshold) looks). The scale of the noise is estimated from the differences
between blocks a little apart, few of which a lasting slowdown affects, by a median, which spikes do not affect. No
block counts for more than a sixth of the evidence that is needed, so that neither a heavy tail nor a short busy time
decides.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

SLOWER = 1.1
"""The slowdown that the test is designed to find: a worker's time as a multiple of its peers'."""

FALSE_PER_LOOK = 1e-6
"""Allowed false alarms per block, over all workers together: 1 in 10,000 windows of 50 steps would be 1e-5, and noise
is never quite what the bound assumes."""

ENOUGH = 0.7
"""A worker is not called slow unless its median ratio has reached this share of the way to SLOWER."""

NOISE_BLOCKS = 24
"""Number of blocks from which the noise is estimated."""
KNOWN_AFTER = 6
"""Until that many blocks are known, the noise is taken to be at least `UNKNOWN_NOISE`."""
UNKNOWN_NOISE = 0.05
LEAST_NOISE = 0.01
SHOWN_BLOCKS = 12
"""The reported ratio is the median over this many blocks."""
OWN_AFTER = 3 * 4
"""Number of differences from which on a worker's own noise counts, if it is the larger one: more than twice as many as
a slowdown affects."""
PAIR = 4
"""With only two workers this multiple of the evidence is needed: the noise of one alone is enough to make them differ."""
LAG = 4
"""Noise may be correlated in time; blocks this far apart differ by all of it."""
SHARE = 1 / 6
"""The largest share of the needed evidence that a single block may contribute."""


@dataclass(kw_only=True)
class _Track:
    """The history of one worker."""

    score: float = 0.0
    """The score of the test, in nats."""
    since: int = 0
    """The first step of the present rise of the score."""
    rising: int = 0
    """Number of blocks of this rise so far."""
    slow: bool = False
    jumps: deque[float] = field(default_factory=lambda: deque(maxlen=NOISE_BLOCKS))
    """Differences between blocks that are LAG apart."""
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=SHOWN_BLOCKS))
    """Logarithms of the ratios of its time to its peers'."""
    firsts: deque[int] = field(default_factory=lambda: deque(maxlen=SHOWN_BLOCKS))
    """The first step of each of these blocks."""


@dataclass(frozen=True, kw_only=True)
class StragglerChange:
    """A worker became slow, or is no longer."""

    worker: str
    slow: bool
    ratio: float
    """Its time as a multiple of its peers'."""
    since: int
    """The first step of the slowdown."""
    compared: int
    """Number of other workers that it was compared with."""


class Stragglers:
    """The test, for workers that do equal work. Its time and memory are linear in their number."""

    def __init__(self, slower: float = SLOWER, false_per_look: float = FALSE_PER_LOOK) -> None:
        self._shift = math.log(slower)
        self._false_per_look = false_per_look
        self._tracks: dict[str, _Track] = {}
        self._jumps: deque[float] = deque(maxlen=NOISE_BLOCKS)

    def ratio(self, worker: str) -> float | None:
        """The worker's recent time as a multiple of its peers'; None if it was never compared."""
        track = self._tracks.get(worker)
        return math.exp(statistics.median(track.ratios)) if track and track.ratios else None

    def keep(self, workers: Mapping[str, object]) -> None:
        """Forgets all other workers."""
        self._tracks = {name: track for name, track in self._tracks.items() if name in workers}

    def look(self, step: int, own_s: Mapping[str, float]) -> list[StragglerChange]:
        """Takes one block of steps that begins with `step`. own_s: each worker's own computing time, in seconds per
        step.

        Two workers can only be compared with each other: it is visible which one is slower, but more evidence is
        needed.
        """
        # Logarithms make a ratio a difference, twice as slow as far from zero as twice as fast, and the noise
        # of a block independent of how long its steps are.
        logs = {name: math.log(max(s, 1e-9)) for name, s in own_s.items()}
        if len(logs) < 2:
            return []
        pair = len(logs) == 2
        both, middle = sum(logs.values()), statistics.median(logs.values())
        # Of two workers the median of both lies halfway, and each would show only half of its slowdown; so
        # each is held against the other.
        against = {name: 2 * value - both if pair else value - middle for name, value in logs.items()}
        jumps = [self._note(name, value, step) for name, value in against.items()]
        known = [jump for jump in jumps if jump is not None]
        if known:
            # The median over the workers: one that is noisy by itself does not make all others harder to
            # judge; it has its own estimate (`_Track.jumps`).
            self._jumps.append(statistics.median(known))
        common = _noise(self._jumps)
        # Lorden's bound with Bonferroni's correction: every worker is a test of its own, and their false
        # alarms add up.
        need = math.log(len(logs) / self._false_per_look) * (PAIR if pair else 1)
        changes = (
            self._test(name, self._tracks[name], step, value, common, need, len(logs) - 1)
            for name, value in against.items()
        )
        return [change for change in changes if change is not None]

    def _note(self, name: str, value: float, step: int) -> float | None:
        track = self._tracks.setdefault(name, _Track(since=step))
        # Differences, not distances from a mean: a worker that has become slow has the same differences as
        # before, so its slowdown does not count as noise that excuses it.
        jump = abs(value - track.ratios[-LAG]) if len(track.ratios) >= LAG else None
        if jump is not None:
            track.jumps.append(jump)
        track.ratios.append(value)
        track.firsts.append(step)
        return jump

    def _test(
        self, name: str, track: _Track, step: int, value: float, common: float, need: float, others: int
    ) -> StragglerChange | None:
        # Below half of the shift the likelihood ratio is negative and the score would stay at zero: nothing
        # to compute. It makes the cost of a job of thousands nearly that of its medians.
        if track.score <= 0.0 and value <= self._shift / 2:
            return None  # the case for almost all workers, almost always
        noise = max(common, _noise(track.jumps)) if len(track.jumps) >= OWN_AFTER else common
        # The log-likelihood ratio of two Gaussians of equal scale, one at the shift and one at zero.
        gain = self._shift / noise**2 * (value - self._shift / 2)
        # At least six blocks are needed whatever one of them says: a garbage collection or a checkpoint can
        # make one block ten times as slow. The last factor keeps six such blocks from missing the threshold
        # by rounding.
        most = SHARE * need * (1 + 1e-9)
        if track.score <= 0.0:
            track.since, track.rising = step, 0
        track.rising += 1
        # Capped at the threshold, so that a worker which was slow for an hour and recovers is cleared as fast
        # as one that was slow for a minute.
        track.score = min(need, max(0.0, track.score + max(-most, min(most, gain))))
        if track.slow and track.score <= 0.0:
            track.slow = False
            return StragglerChange(
                worker=name, slow=False, ratio=math.exp(value), since=step, compared=others
            )
        if track.slow or track.score < need:
            return None
        # The score may rise on a few extreme blocks; the median of the rise must be slow as well, or nothing
        # is gained by a replacement.
        level = statistics.median(list(track.ratios)[-track.rising :])
        if level < ENOUGH * self._shift:
            return None
        track.slow = True
        since = _first_slow(track, level)
        return StragglerChange(worker=name, slow=True, ratio=math.exp(level), since=since, compared=others)


def _first_slow(track: _Track, level: float) -> int:
    """The most likely first step of a slowdown of this size (the logarithm of a ratio), within the rise.

    The score rises from the first block that is nearer to SLOWER than to its peers. A worker that became much slower has
    often had one such block of noise just before, which is nearer to its peers than to what it is now.
    """
    if track.rising > len(track.ratios):
        return track.since  # the rise began before all blocks that are kept
    since, most, likelier = track.since, 0.0, 0.0
    blocks = list(zip(track.firsts, track.ratios, strict=True))[-track.rising :]
    for first, value in reversed(blocks):
        # As in `_test`: of two Gaussians of equal scale, in units of level / noise².
        likelier += value - level / 2
        if likelier > most:
            since, most = first, likelier
    return since


def _noise(jumps: deque[float]) -> float:
    """The standard deviation of a block's ratio: 1.4826 times the median of Gaussian differences, over √2."""
    if not jumps:
        return UNKNOWN_NOISE
    # Never zero: simulated or idle workers can be equal to the microsecond, and a division by no noise would
    # make any difference certain.
    found = max(LEAST_NOISE, 1.4826 / math.sqrt(2) * sorted(jumps)[len(jumps) // 2])
    return found if len(jumps) >= KNOWN_AFTER else max(found, UNKNOWN_NOISE)
