"""Finds the replicas whose checksum of the state differs from that of the others. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DifferingReplicas:
    """Replicas whose state differs although it should be equal."""

    workers: tuple[str, ...]
    """The replicas that are wrong, or all if nothing tells which."""
    proven: bool
    """More than half of all replicas, and at least two, agree on another value."""


def apart(sums: Mapping[str, int]) -> DifferingReplicas | None:
    """Compares the checksums of the workers that hold the same shard. sums: worker to checksum. None: they agree."""
    if len(set(sums.values())) < 2:
        return None
    value, times = Counter(sums.values()).most_common(1)[0]
    # Of two that differ, nothing tells which one is wrong; that takes a third. An even split proves nothing,
    # either.
    if times >= 2 and 2 * times > len(sums):
        return DifferingReplicas(
            tuple(sorted(name for name, own in sums.items() if own != value)), proven=True
        )
    return DifferingReplicas(tuple(sorted(sums)), proven=False)
