"""From blocks of step times to a paired difference: pure functions.

A round is three blocks, one after the other in the same processes: plain, Holdfast, plain again. The difference of
a round is Holdfast's median step minus the mean of the two plain ones, so that a slow drift of the machine cancels.
The difference of the two plain blocks is what the same code differs from itself: the noise of the method.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PLAIN_BEFORE, PROTECTED, PLAIN_AFTER = "plain-before", "holdfast", "plain-after"


@dataclass(frozen=True, kw_only=True)
class Block:
    """The steps of one block on one rank."""

    kind: str
    round: int
    rank: int
    wall_s: list[float]
    cpu_s: list[float]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run: medians over its rounds, in seconds per step."""

    plain_s: float
    protected_s: float
    extra_s: float
    """Median of the paired differences."""
    extra_low_s: float
    extra_high_s: float
    """Quartiles of the paired differences."""
    noise_s: float
    """Median size of the difference between the two plain blocks of a round."""
    extra_cpu_s: float
    """Median of the paired differences of the process's CPU time, all its threads together."""
    rounds: int

    @property
    def extra_share(self) -> float:
        return self.extra_s / self.plain_s


def parse(lines: Iterable[str]) -> list[Block]:
    """Blocks from the lines that the workers wrote."""
    return [Block(**json.loads(line)) for line in lines]


def compare(blocks: Sequence[Block]) -> Comparison:
    """The comparison of one run. Raises ValueError when no round is whole."""
    wall, cpu = _per_round(blocks, "wall_s"), _per_round(blocks, "cpu_s")
    if not wall:
        raise ValueError("no round has all of its blocks")
    extra = [protected - (before + after) / 2 for before, protected, after in wall]
    quartiles = statistics.quantiles(extra, n=4) if len(extra) > 1 else [extra[0]] * 3
    return Comparison(
        plain_s=statistics.median((before + after) / 2 for before, _, after in wall),
        protected_s=statistics.median(protected for _, protected, _ in wall),
        extra_s=statistics.median(extra),
        extra_low_s=quartiles[0],
        extra_high_s=quartiles[2],
        noise_s=statistics.median(abs(after - before) for before, _, after in wall),
        extra_cpu_s=statistics.median(protected - (before + after) / 2 for before, protected, after in cpu),
        rounds=len(wall),
    )


def _per_round(blocks: Sequence[Block], what: str) -> list[tuple[float, float, float]]:
    """For every whole round the median step of its three blocks, each the mean over the ranks."""
    ranks = {block.rank for block in blocks}
    medians: dict[tuple[int, str], list[float]] = {}
    for block in blocks:
        medians.setdefault((block.round, block.kind), []).append(statistics.median(getattr(block, what)))
    means = {key: statistics.fmean(found) for key, found in medians.items() if len(found) == len(ranks)}
    rounds = sorted({block.round for block in blocks})
    whole = [[means.get((n, kind)) for kind in (PLAIN_BEFORE, PROTECTED, PLAIN_AFTER)] for n in rounds]
    return [(row[0], row[1], row[2]) for row in whole if None not in row]  # type: ignore[misc]
