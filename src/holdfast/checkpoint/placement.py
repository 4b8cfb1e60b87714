"""Who keeps whose snapshot: buddies, placed so that failures that come together spare a copy.

Nodes form disjoint groups; each keeps the snapshots of others of its group. Two failures strike the same of n/2
pairs less often than they strike neighbours in a ring: of 16 nodes with one buddy each, 93.3% of all double
failures leave a copy of everything, against 86.7% (see the tests). Groups run across the places in which nodes stand
(zones, blocks, racks), because what fails together stands together.

Pure functions of names and places: the coordinator calls them, the planner's simulator too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast.protocol.place import NodePlace, nearness

Domain = tuple[str, NodePlace]
"""What nodes are lost together with: a place, or the node itself where its place is not known."""


@dataclass(frozen=True)
class Placement:
    """Which nodes keep copies of each other's snapshots."""

    buddies: Mapping[str, tuple[str, ...]]
    """To each node, the nodes that keep a copy of its snapshots, in the order of preference."""
    groups: tuple[tuple[str, ...], ...]
    """The disjoint groups behind it."""
    short: tuple[str, ...]
    """Nodes with fewer buddies than asked for, because there are too few nodes."""
    close: tuple[str, ...]
    """Nodes with a copy in their own place, or two copies in one, of the outermost level at which that can be avoided:
    what that place takes with it may be both."""

    def survives(self, lost: Collection[str]) -> bool:
        """Whether a copy of every lost node's snapshots is left."""
        return all(any(b not in lost for b in self.buddies[node]) for node in lost if node in self.buddies)


def place(places: Mapping[str, NodePlace], copies: int, before: Sequence[Collection[str]] = ()) -> Placement:
    """Gives every node `copies` buddies.

    New groups are as far apart as can be, at every level at once: a place with no more nodes than there are groups has
    at most one node in each.

    Args:
        places: node to where it stands; empty: not known, and nothing is lost together with it.
        copies: how many other nodes keep each node's snapshots, 0 or more.
        before: the groups so far. Those that are complete stay as they are: only orphans and newcomers move, so that
            a change of membership does not send everybody's snapshots around.
    """
    if copies <= 0 or len(places) < 2:
        short = tuple(places) if copies > 0 else ()
        return Placement(dict.fromkeys(places, ()), tuple((n,) for n in places), short, ())
    # A group of `copies` + 1 nodes is the smallest in which everybody has enough buddies. Small groups are the point:
    # failures destroy data only if they strike all of one group.
    size = min(copies + 1, len(places))
    level = _level(places, max(1, len(places) // size))
    domains = {n: _domain(n, p, level) for n, p in places.items()}
    # A group that still works is left alone, even if a new deal would be better balanced: every move sends a
    # node's snapshots over the network at the moment when the job is repairing itself.
    kept = [list(g) for g in before if _stays(g, domains, size)]
    placed = {n for g in kept for n in g}
    rest = [n for n in places if n not in placed]
    groups = kept + _deal(rest, places, size)
    _join_small(groups, domains, size)
    buddies = {n: _buddies(n, group, places, copies) for group in groups for n in group}
    return Placement(
        {n: buddies[n] for n in places},
        tuple(tuple(g) for g in groups),
        tuple(n for n in places if len(buddies[n]) < copies),
        tuple(n for n in places if _shares_domain((n, *buddies[n]), domains)),
    )


def _level(places: Mapping[str, NodePlace], groups: int) -> int:
    """The outermost level of which no place has more nodes than there are groups, so that none needs to have two of one;
    else the innermost."""
    deepest = max(len(p) for p in places.values())
    for level in range(1, deepest):
        if max(Counter(p[:level] for p in places.values() if p).values()) <= groups:
            return level
    return deepest


def _domain(node: str, place: NodePlace, level: int) -> Domain:
    return ("place", place[:level]) if place else ("node", (node,))


def _shares_domain(nodes: Sequence[str], domains: Mapping[str, Domain]) -> bool:
    return len({domains[n] for n in nodes}) < len(nodes)


def _stays(group: Collection[str], domains: Mapping[str, Domain], size: int) -> bool:
    """Everyone is still there, no more and no fewer than a new group would have, and in different places."""
    return (
        # One more than a new group is allowed: a group that took in a lone newcomer would otherwise be dealt
        # anew at the next change, and its snapshots be sent around for nothing.
        size <= len(group) <= size + 1
        and all(n in domains for n in group)
        and not _shares_domain(list(group), domains)
    )


def _deal(nodes: Sequence[str], places: Mapping[str, NodePlace], size: int) -> list[list[str]]:
    """Sorted by place, the largest first, and dealt out like cards."""
    if not nodes:
        return []
    count = max(1, len(nodes) // size)
    sizes = Counter(places[n][:level] for n in nodes for level in range(1, len(places[n]) + 1))

    # Sorted by name at last, so that every caller gets the same groups from the same nodes: coordinator,
    # planner and a restarted coordinator must agree without words.
    def order(node: str) -> tuple[list[tuple[int, str, str]], str]:
        place = places[node]
        if not place:
            return [(-1, "node", node)], node
        return [(-sizes[place[: i + 1]], "place", name) for i, name in enumerate(place)], node

    # The nodes of a place, of whatever level, now follow each other. Those of a group are `count` apart, so a place
    # with no more nodes than that has none twice in a group: zones are kept apart, and within them racks.
    ordered = sorted(nodes, key=order)
    return [ordered[i::count] for i in range(count)]


def _join_small(groups: list[list[str]], domains: Mapping[str, Domain], size: int) -> None:
    """Nodes too few for a group of their own join the smallest groups that have none of their place."""
    for small in [g for g in groups if len(g) < size]:
        if len(groups) == 1:
            return
        groups.remove(small)
        for node in small:
            other = min(groups, key=lambda g: (domains[node] in {domains[n] for n in g}, len(g)))
            other.append(node)


def _buddies(
    node: str, group: Sequence[str], places: Mapping[str, NodePlace], copies: int
) -> tuple[str, ...]:
    """The next ones in the group, first those that are furthest from the copies so far."""
    at = group.index(node)
    others = [*group[at + 1 :], *group[:at]]
    chosen: list[str] = []
    while others and len(chosen) < copies:
        used = [places[n] for n in (node, *chosen)]
        # A second copy in the same rack is used only if no other rack is left: a rack loses its power as one.
        best = min(others, key=lambda n: max(nearness(places[n], p) for p in used))
        others.remove(best)
        chosen.append(best)
    return tuple(chosen)
