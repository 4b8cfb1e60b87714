"""Whose checksum of the state differs from that of the others who hold the same. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DifferingReplicas:
    """Replicas that do not hold the same."""

    workers: tuple[str, ...]
    """Those that are wrong or, if nobody can tell, all."""
    proven: bool
    """More than half of all agree on another value, at least two of them."""


def apart(sums: Mapping[str, int]) -> DifferingReplicas | None:
    """Of the workers that hold one shard, each with its checksum; None: they agree."""
    if len(set(sums.values())) < 2:
        return None
    value, times = Counter(sums.values()).most_common(1)[0]
    # Two that differ cannot tell which of them errs: it takes a third. Half against half is no proof, either.
    if times >= 2 and 2 * times > len(sums):
        return DifferingReplicas(
            tuple(sorted(name for name, own in sums.items() if own != value)), proven=True
        )
    return DifferingReplicas(tuple(sorted(sums)), proven=False)
