"""Computes the cost of a placement: the share of a job's collective bytes that leaves a zone, a block, a rack.

Collectives are modelled as rings, in which every hop carries the same bytes: of a ring all-reduce of S bytes over n workers
each hop carries 2 (n - 1) / n * S. So the share of the bytes that crosses a border is the share of the hops that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

Path = tuple[str, ...]
"""The place of a worker, from the outermost name to its node."""


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """One level of the topology. Shares are of the bytes of all collectives of a kind."""

    level: int
    """Number of the level; 1 is the outermost."""
    places: int
    """Number of places in which the job has nodes; nodes whose place is not known count as one each."""
    gradients: float
    """For the sums over replicas, the share of bytes that leaves a place of this level."""
    gradients_unplaced: float
    """The same with ranks in the order of the hosts' names."""
    shards: float | None
    """The same for the collectives within replicas; None: a replica is one worker."""
    shards_unplaced: float | None
    copies: float
    """The share of the snapshots' copies that are in another place of this level than their original."""


def crossing_share(rings: Iterable[Sequence[Path]], level: int) -> float:
    """The share of the hops between neighbours in rings that leave a place of this level; 0 if there are no hops."""
    hops = crossed = 0
    for ring in rings:
        if len(ring) < 2:
            continue
        at = [path[:level] for path in ring]
        hops += len(at)
        crossed += sum(a != b for a, b in zip(at, [*at[1:], at[0]], strict=True))
    return crossed / hops if hops else 0.0


def replica_groups(replicas: Sequence[Sequence[Path]]) -> list[list[Path]]:
    """The workers that hold the same shard, in the order of their replicas: the rings of the gradients."""
    return [list(group) for group in zip(*replicas, strict=True)]
