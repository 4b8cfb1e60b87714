"""Where nodes stand, out of what every pair of them measured: pure.

Nobody can see a switch. What can be seen is that some nodes answer each other sooner, or send each other more, than they
do with the others. Where that difference is clear they stand together, and within them the same is asked again.
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
"""Two nodes are one pair, which can be compared with none. The number of batches grows with that of the nodes."""

GAP = 2.0
"""So many times the latency, or the bandwidth, makes two places of one: as a pair is slow for `pairs`. Figures that vary
by 30% up and down differ by 1.3 / 0.7 = 1.86 at most, so they make none, however few they are."""

TWICE_UP_TO = 8
"""So few nodes are measured twice: every place of theirs rests on a handful of pairs, and two that something disturbed would
make one."""

Group = list[str]


class Between(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured between the parts of a place; between its nodes, if it has no parts."""

    place: NodePlace
    """Empty: all nodes together."""
    nodes: tuple[str, ...]
    """All nodes of it."""
    pairs: int
    """Whose innermost common place it is, and that were measured."""
    latency_s: float | None
    """There and back, the median; None: not measured."""
    bytes_per_s: float | None
    """The slower direction, the median; None: not measured."""


def tournament(nodes: Sequence[str]) -> list[list[Pair]]:
    """Everyone with everyone, once. No node is in two pairs of one batch, so a batch is measured at once.

    An even number N of nodes takes N - 1 batches, an odd one N: that is as few as there can be.
    """
    # The circle of chess tournaments: the first seat stays, the others move on by one. Who sits opposite the empty seat
    # of an odd number rests.
    seats: list[str | None] = [*nodes, None] if len(nodes) % 2 else [*nodes]
    half = len(seats) // 2
    batches: list[list[Pair]] = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        batches.append([(a, b) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [batch for batch in batches if batch]


def turns(nodes: Sequence[str]) -> int:
    """How often the tournament is played."""
    return 2 if len(nodes) <= TWICE_UP_TO else 1


def better(one: Measured, other: Measured) -> Measured:
    """What two measurements of a pair say together. What disturbs one makes it worse and never better."""
    told = [m for m in (one, other) if m.bytes_per_s and not m.damaged]
    if len(told) < 2:
        return told[0] if told else other
    latencies = [m.latency_s for m in told if m.latency_s]
    return Measured(max(m.bytes_per_s or 0.0 for m in told), min(latencies, default=0.0))


def domains(measured: Mapping[Pair, Measured]) -> dict[str, NodePlace]:
    """Every node to its place: `("d1", "d2")` is the second part of the first. All places are empty where no difference
    is clear. A node without a pair that was measured is not in it, nor one of a few that the most did not reach.

    The names count from 1 within each place, in the order of the nodes' names.
    """
    known = _known(measured)
    nodes = _largest(sorted({n for p in known for n in p}, key=_natural), known)
    own = set(nodes)
    placed = _placed(nodes, {p: m for p, m in known.items() if own.issuperset(p)}, ())
    return {node: placed[node] for node in nodes}


def between(places: Mapping[str, NodePlace], measured: Mapping[Pair, Measured]) -> list[Between]:
    """The figures of every place, all nodes first, and each before its parts."""
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
    """Pairs that tell something. One that broke tells nothing about distance, so the others decide about its nodes."""
    return {p: m for p, m in measured.items() if m.bytes_per_s and not m.damaged}


def _largest(nodes: Group, known: Iterable[Pair]) -> Group:
    """The most nodes that hang together by pairs that were measured; of equals the first."""
    at = {node: [node] for node in nodes}
    for a, b in known:
        if at[a] is not at[b]:
            at[a] += at[b]
            for node in at[b]:
                at[node] = at[a]
    # Two crowds without a single way between them: nothing says how far they are from each other.
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
    # A node with a slow card is slow with everybody, as if it stood alone and far away. So by bandwidth there are parts
    # only where two of them have company: that a card cannot feign.
    by_slowness = next(
        (
            parts
            for near, far, parts in _borders(nodes, slowness)
            if far >= GAP * near and sum(len(part) > 1 for part in parts) > 1
        ),
        None,
    )
    # The fewer parts are the outer ones. What the other figure shows is found again within them.
    return min((p for p in (by_latency, by_slowness) if p is not None), key=len, default=None)


class Border(NamedTuple):
    """A way to divide nodes into parts."""

    near: float
    """The largest distance within a part."""
    far: float
    """The smallest distance between two of them."""
    parts: list[Group]
    """In the order of their first nodes."""


def _borders(nodes: Group, distances: Mapping[Pair, float]) -> list[Border]:
    """The nearest two parts are joined again and again, from single nodes to all together; the fewest parts first.

    Empty if some nodes are joined to the others by no pair: this figure tells nothing then.
    """
    parts = {i: [node] for i, node in enumerate(nodes)}
    number = {node: i for i, node in enumerate(nodes)}
    apart: dict[tuple[int, int], list[float]] = defaultdict(list)
    for pair, distance in distances.items():
        one, other = sorted(number[n] for n in pair)
        apart[one, other].append(distance)
    # The lower of the two in the middle: machines are measured too slow by what else they do, and hardly ever too fast.
    # With the mean of two, one pair that was disturbed would put a node of three into a place of its own.
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
    """`n2` before `n10`."""
    return [(int(x), "") if x.isdigit() else (-1, x) for x in re.split(r"(\d+)", name)]
