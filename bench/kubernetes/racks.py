"""Machines in zones, blocks and racks, some of them taken, and how well the nodes of a job stand there. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

from holdfast.protocol.place import NodePlace

ZONE, BLOCK, RACK = (
    "topology.kubernetes.io/zone",
    "topology.holdfast.dev/block",
    "topology.holdfast.dev/rack",
)
LEVELS = {"zone": ZONE, "block": BLOCK, "rack": RACK}
MACHINES_OF_A_RACK, RACKS_OF_A_BLOCK, BLOCKS_OF_A_ZONE = 64, 16, 2
MOST_TAKEN = 0.5
"""Of a rack's machines, by others."""


def place_of(number: int) -> NodePlace:
    """Where a machine stands. Each rack's name is another one: an affinity sees the label of one level alone."""
    rack = number // MACHINES_OF_A_RACK
    block = rack // RACKS_OF_A_BLOCK
    return (f"z{block // BLOCKS_OF_A_ZONE}", f"b{block}", f"r{rack}")


def taken(machines: int, seed: int) -> set[int]:
    """Machines that others have: of each rack another share, from none to half of it."""
    rng = random.Random(seed)
    shares = [rng.uniform(0, MOST_TAKEN) for _ in range(0, machines, MACHINES_OF_A_RACK)]
    return {number for number in range(machines) if rng.random() < shares[number // MACHINES_OF_A_RACK]}


def spans(places: Iterable[NodePlace]) -> list[int]:
    """In how many zones, blocks and racks they are."""
    there = list(places)
    return [len({place[: level + 1] for place in there}) for level in range(len(LEVELS))]


def fewest(free: Iterable[NodePlace], nodes: int) -> list[int]:
    """In how many zones, blocks and racks so many nodes could be, of each level alone. free: the places of the machines that
    are free."""
    there = list(free)
    if len(there) < nodes:
        raise ValueError(f"{nodes} nodes do not fit into {len(there)} machines")
    found = []
    for level in range(len(LEVELS)):
        left, count = nodes, 0
        for _, room in Counter(place[: level + 1] for place in there).most_common():
            if left <= 0:
                break
            left, count = left - room, count + 1
        found.append(count)
    return found


def crossings(ring: Sequence[NodePlace]) -> list[int]:
    """How often neighbours in the ring stand in different zones, blocks and racks."""
    return [
        sum(a[: level + 1] != b[: level + 1] for a, b in zip(ring, [*ring[1:], *ring[:1]], strict=True))
        for level in range(len(LEVELS))
    ]
