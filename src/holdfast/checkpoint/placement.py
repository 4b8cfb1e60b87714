"""Who keeps whose snapshot: buddies, placed so that failures that come together spare a copy.

Nodes form disjoint groups; each keeps the snapshots of others of its group. Two failures strike the same of n/2
pairs less often than they strike neighbours in a ring: of 16 nodes with one buddy each, 93.3% of all double
failures leave a copy of everything, against 86.7% (see the tests). Groups run across racks, because what fails
together stands together.

Pure functions of names and labels: the coordinator calls them, the planner's simulator too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Which nodes keep copies of each other's snapshots."""

    buddies: Mapping[str, tuple[str, ...]]
    """To each node, the nodes that keep a copy of its snapshots, in the order of preference."""
    groups: tuple[tuple[str, ...], ...]
    """The disjoint groups behind it."""
    short: tuple[str, ...]
    """Nodes with fewer buddies than asked for, because there are too few nodes."""
    same_rack: tuple[str, ...]
    """Nodes with a copy in their own rack, or two copies in one: a rack may take both."""

    def survives(self, lost: Collection[str]) -> bool:
        """Whether a copy of every lost node's snapshots is left."""
        return all(any(b not in lost for b in self.buddies[node]) for node in lost if node in self.buddies)


def place(racks: Mapping[str, str | None], copies: int, before: Sequence[Collection[str]] = ()) -> Placement:
    """Gives every node `copies` buddies.

    Args:
        racks: node to its rack; None: a rack of its own.
        copies: how many other nodes keep each node's snapshots, 0 or more.
        before: the groups so far. Those that are whole stay as they are: only orphans and newcomers move, so that
            a change of membership does not send everybody's snapshots around.
    """
    if copies <= 0 or len(racks) < 2:
        short = tuple(racks) if copies > 0 else ()
        return Placement(dict.fromkeys(racks, ()), tuple((n,) for n in racks), short, ())
    # A group of `copies` + 1 nodes is the smallest in which everybody has enough buddies. Small groups are the point:
    # failures destroy data only if they strike all of one group.
    size = min(copies + 1, len(racks))
    # A group that still works is left alone, even if a new deal would be better balanced: every move sends a
    # node's snapshots over the network at the moment when the job is repairing itself.
    kept = [list(g) for g in before if _stays(g, racks, size)]
    placed = {n for g in kept for n in g}
    rest = [n for n in racks if n not in placed]
    groups = kept + _deal(rest, racks, size)
    _join_small(groups, racks, size)
    buddies = {n: _buddies(n, group, racks, copies) for group in groups for n in group}
    return Placement(
        {n: buddies[n] for n in racks},
        tuple(tuple(g) for g in groups),
        tuple(n for n in racks if len(buddies[n]) < copies),
        tuple(n for n in racks if _shares_rack((n, *buddies[n]), racks)),
    )


def _rack(node: str, racks: Mapping[str, str | None]) -> tuple[str, str]:
    rack = racks[node]
    return ("node", node) if rack is None else ("rack", rack)


def _shares_rack(nodes: Sequence[str], racks: Mapping[str, str | None]) -> bool:
    return len({_rack(n, racks) for n in nodes}) < len(nodes)


def _stays(group: Collection[str], racks: Mapping[str, str | None], size: int) -> bool:
    """Everyone is still there, no more and no fewer than a new group would have, and in different racks."""
    return (
        size <= len(group) <= size + 1
        and all(n in racks for n in group)
        and not _shares_rack(list(group), racks)
    )


def _deal(nodes: Sequence[str], racks: Mapping[str, str | None], size: int) -> list[list[str]]:
    """Sorted by rack, the largest first, and dealt out like cards: nodes of one rack come into different groups
    whenever there are as many groups as nodes in it."""
    if not nodes:
        return []
    count = max(1, len(nodes) // size)
    sizes = Counter(_rack(n, racks) for n in nodes)
    # Sorted by name at last, so that every caller gets the same groups from the same nodes: coordinator,
    # planner and a restarted coordinator must agree without words.
    order = sorted(nodes, key=lambda n: (-sizes[_rack(n, racks)], _rack(n, racks), n))
    return [order[i::count] for i in range(count)]


def _join_small(groups: list[list[str]], racks: Mapping[str, str | None], size: int) -> None:
    """Nodes too few for a group of their own join the smallest groups that have none of their rack."""
    for small in [g for g in groups if len(g) < size]:
        if len(groups) == 1:
            return
        groups.remove(small)
        for node in small:
            other = min(groups, key=lambda g: (_rack(node, racks) in {_rack(n, racks) for n in g}, len(g)))
            other.append(node)


def _buddies(
    node: str, group: Sequence[str], racks: Mapping[str, str | None], copies: int
) -> tuple[str, ...]:
    """The next ones in the group, first those whose rack holds no copy yet."""
    at = group.index(node)
    others = [*group[at + 1 :], *group[:at]]
    chosen: list[str] = []
    while others and len(chosen) < copies:
        used = {_rack(n, racks) for n in (node, *chosen)}
        # A second copy in the same rack is used only if no other rack is left: a rack loses its power as one.
        best = next((n for n in others if _rack(n, racks) not in used), others[0])
        others.remove(best)
        chosen.append(best)
    return tuple(chosen)
