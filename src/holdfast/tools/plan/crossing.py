"""What a placement costs: the share of a job's collective bytes that leaves a zone, a block, a rack.

Collectives are taken as rings, in which every hop carries the same bytes: of a ring all-reduce of S bytes over n workers
each hop carries 2 (n - 1) / n * S. So the share of the bytes that crosses a border is the share of the hops that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

Path = tuple[str, ...]
"""Where a worker stands, from the outermost name to its node."""


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """One level of the topology. Shares are of the bytes of all such collectives."""

    level: int
    """From 1, the outermost, on."""
    places: int
    """How many the job stands in; nodes whose place is not known count as one each."""
    gradients: float
    """Of the sums over replicas, the share that leaves a place of this level."""
    gradients_unplaced: float
    """The same for ranks in the order of the hosts' names."""
    shards: float | None
    """Of the collectives within replicas; None: a replica is one worker."""
    shards_unplaced: float | None
    copies: float
    """Of the snapshots' copies, how many are in another place of this level."""


def crossing_share(rings: Iterable[Sequence[Path]], level: int) -> float:
    """The share of the hops between neighbours in rings that leave a place of this level; 0 where there is no hop."""
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
