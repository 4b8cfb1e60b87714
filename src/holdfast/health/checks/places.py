"""Infers where nodes are in the network from what every pair of them measured: pure.

Switches cannot be seen. What can be seen is that some nodes answer each other sooner, or send each other more, than
they do with the others. Where that difference is clear these nodes form one place, and the same is applied within it.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.health.checks.pairs import LATENCY_FLOOR_S, Measured, Pair
from holdfast.protocol.place import MOST_LEVELS, NodePlace, common

LEAST_NODES, MOST_NODES = 3, 64
"""Two nodes are a single pair, with nothing to compare it with. The number of batches grows with the number of nodes."""

GAP = 2.0
"""The ratio of latencies, or of bandwidths, from which on two groups of nodes are two places; the same ratio by which a
pair is slow for `pairs`. Figures that vary by 30% up and down differ by a factor of at most 1.3 / 0.7 = 1.86, so they
never make a place, however few nodes there are."""

TWICE_UP_TO = 8
"""Up to this many nodes, every pair is measured twice: each place then rests on a handful of pairs, and two disturbed
measurements would create one."""

Group = list[str]


class Between(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured between the parts of a place, or between its nodes if it has no parts."""

    place: NodePlace
    """Empty: all nodes together."""
    nodes: tuple[str, ...]
    """All nodes of it."""
    pairs: int
    """Number of measured pairs whose innermost common place is this one."""
    latency_s: float | None
    """Median round-trip time; None: not measured."""
    bytes_per_s: float | None
    """Median bandwidth in the slower direction; None: not measured."""


def tournament(nodes: Sequence[str]) -> list[list[Pair]]:
    """Pairs every node with every other one, once, in batches. No node is in two pairs of one batch, so a batch is
    measured at once.

    An even number N of nodes takes N - 1 batches, an odd one N, which is the fewest possible.
    """
    # The circle method of round-robin tournaments: the first entry stays, the others move on by one. With an
    # odd number of nodes, the node opposite the empty entry rests.
    circle: list[str | None] = [*nodes, None] if len(nodes) % 2 else [*nodes]
    half = len(circle) // 2
    batches: list[list[Pair]] = []
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        batches.append([(a, b) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [batch for batch in batches if batch]


def turns(nodes: Sequence[str]) -> int:
    """How often each pair is measured."""
    return 2 if len(nodes) <= TWICE_UP_TO else 1


def better(one: Measured, other: Measured) -> Measured:
    """Combines two measurements of a pair: a disturbance makes a measurement worse and never better, so the better
    figures count."""
    usable = [m for m in (one, other) if m.bytes_per_s and not m.damaged]
    if len(usable) < 2:
        return usable[0] if usable else other
    latencies = [m.latency_s for m in usable if m.latency_s]
    return Measured(max(m.bytes_per_s or 0.0 for m in usable), min(latencies, default=0.0))


def domains(measured: Mapping[Pair, Measured]) -> dict[str, NodePlace]:
    """The place of every node: `("d1", "d2")` is the second part of the first. All places are empty if no difference is
    clear. Left out are nodes without a measured pair, and nodes that no measured pairs connect with the largest group.

    The names count from 1 within each place, in the order of the nodes' names.
    """
    known = _known(measured)
    nodes = _largest(sorted({n for p in known for n in p}, key=_natural), known)
    own = set(nodes)
    placed = _placed(nodes, {p: m for p, m in known.items() if own.issuperset(p)}, ())
    return {node: placed[node] for node in nodes}


def between(places: Mapping[str, NodePlace], measured: Mapping[Pair, Measured]) -> list[Between]:
    """The figures of every place: first that of all nodes, and each place before its parts."""
    of: dict[NodePlace, list[Measured]] = defaultdict(list)
    for pair, m in _known(measured).items():
        if all(n in places for n in pair):
            of[common(places[n] for n in pair)].append(m)
    every = {(), *(place[:depth] for place in places.values() for depth in range(len(place) + 1))}
    order = sorted(every, key=lambda place: [_natural(name) for name in place])
    return [
        Between(
            place=place,
            nodes=tuple(n for n, at in places.items() if at[: len(place)] == place),
            pairs=len(of[place]),
            latency_s=_median(m.latency_s for m in of[place] if m.latency_s),
            bytes_per_s=_median(m.bytes_per_s for m in of[place] if m.bytes_per_s),
        )
        for place in order
    ]


def _median(values: Iterable[float]) -> float | None:
    there = list(values)
    return statistics.median(there) if there else None


def _known(measured: Mapping[Pair, Measured]) -> dict[Pair, Measured]:
    """The pairs with a usable measurement. A pair that failed says nothing about distance, so the other pairs decide
    about its nodes."""
    return {p: m for p, m in measured.items() if m.bytes_per_s and not m.damaged}


def _largest(nodes: Group, known: Iterable[Pair]) -> Group:
    """The largest set of nodes that are connected by measured pairs; of equally large ones the first."""
    at = {node: [node] for node in nodes}
    for a, b in known:
        if at[a] is not at[b]:
            at[a] += at[b]
            for node in at[b]:
                at[node] = at[a]
    # Between two sets without a single measured pair, nothing tells how far they are from each other.
    most: Group = max((at[n] for n in nodes), key=len, default=[])
    largest = set(most)
    return [n for n in nodes if n in largest]


def _placed(nodes: Group, known: Mapping[Pair, Measured], above: NodePlace) -> dict[str, NodePlace]:
    parts = _parts(nodes, known) if len(above) < MOST_LEVELS else None
    if parts is None:
        return dict.fromkeys(nodes, above)
    placed: dict[str, NodePlace] = {}
    for number, part in enumerate(parts, 1):
        own = set(part)
        within = {p: m for p, m in known.items() if own.issuperset(p)}
        placed |= _placed([n for n in nodes if n in own], within, (*above, f"d{number}"))
    return placed


def _parts(nodes: Group, known: Mapping[Pair, Measured]) -> list[Group] | None:
    """The outermost parts of a place, or None if it has none."""
    latency_s = {p: m.latency_s for p, m in known.items() if m.latency_s}
    slowness = {p: 1 / m.bytes_per_s for p, m in known.items() if m.bytes_per_s}
    by_latency = next(
        (
            parts
            for near_s, far_s, parts in _borders(nodes, latency_s)
            if far_s >= max(GAP * near_s, near_s + LATENCY_FLOOR_S)
        ),
        None,
    )
    # A node with a slow card is slow with every other node, as if it stood alone and far away. So bandwidth
    # makes parts only if two of them have several nodes each, which a slow card cannot produce.
    by_slowness = next(
        (
            parts
            for near, far, parts in _borders(nodes, slowness)
            if far >= GAP * near and sum(len(part) > 1 for part in parts) > 1
        ),
        None,
    )
    # The division into fewer parts is the outer one. What the other figure shows is found again within the
    # parts.
    return min((p for p in (by_latency, by_slowness) if p is not None), key=len, default=None)


class Border(NamedTuple):
    """A way to divide nodes into parts."""

    near: float
    """The largest distance within a part."""
    far: float
    """The smallest distance between two parts."""
    parts: list[Group]
    """In the order of their first nodes."""


def _borders(nodes: Group, distances: Mapping[Pair, float]) -> list[Border]:
    """Agglomerative clustering: the two parts with the smallest median distance are merged until one is left. Returns
    the division before each merge, that with the fewest parts first.

    Empty if measured pairs do not connect all nodes: this figure tells nothing then.
    """
    parts = {i: [node] for i, node in enumerate(nodes)}
    number = {node: i for i, node in enumerate(nodes)}
    apart: dict[tuple[int, int], list[float]] = defaultdict(list)
    for pair, distance in distances.items():
        one, other = sorted(number[n] for n in pair)
        apart[one, other].append(distance)
    # The lower of the two middle values: other load makes measurements too slow, and hardly anything makes
    # them too fast. With the mean of the two, one disturbed pair would put a node of three into a place of
    # its own.
    length = {key: statistics.median_low(values) for key, values in apart.items()}
    steps: list[tuple[float, list[Group]]] = []
    while length:
        one, other = min(length, key=lambda key: (length[key], key))
        steps.append((length[one, other], list(parts.values())))
        # The lower number stays, so that parts keep the order of their first nodes.
        parts[one] = parts[one] + parts.pop(other)
        for third in parts:
            gone = min(other, third), max(other, third)
            if third != one and gone in apart:
                kept = min(one, third), max(one, third)
                apart[kept] += apart.pop(gone)
                length[kept] = statistics.median_low(apart[kept])
                del length[gone]
        del apart[one, other], length[one, other]
    if len(parts) > 1:
        return []
    # Medians of larger parts may come out below those of smaller ones, so the largest before a step and the smallest
    # from it on are compared, and not its neighbours.
    heights = [height for height, _ in steps]
    return [Border(max(heights[:i]), min(heights[i:]), steps[i][1]) for i in range(len(steps) - 1, 0, -1)]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts `n2` before `n10`."""
    return [(int(x), "") if x.isdigit() else (-1, x) for x in re.split(r"(\d+)", name)]
