"""Who sits near whom: pure.

Places form a tree, from the outermost names in, and below the innermost stands the node itself. Two workers are the
nearer the more of the tree they share. Every function here first uses up what is nearest and then what is further
out. In a tree that is best at every level at once, because what is matched within a place can never be missing further
out: of `a` seats and `b` workers within a place, the smaller number is matched there in any case.

Nothing is decided here for a job of which no place is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

import msgspec

from holdfast.protocol.place import NodePlace

Path = tuple[str, ...]
"""A place, and in it the node. Nodes whose place is not known have a place of their own."""

S = TypeVar("S", bound=Hashable)


class Standing(msgspec.Struct, frozen=True):
    """Where workers stand, and which of the newcomers are to be taken first."""

    paths: Mapping[str, Path]
    """Of survivors, newcomers and the members of the generation before."""
    tiers: Mapping[str, tuple[bool, int]]
    """Of newcomers: the lower, the better their node. Nearness decides only among those of one tier."""


def path(place: NodePlace, node: str) -> Path:
    """Where a worker of this node stands."""
    # The first name tells both kinds apart: a node may be called what a zone is called.
    return ("", *place, node) if place else ("node", node)


def in_order(workers: Sequence[str], paths: Mapping[str, Path]) -> list[str]:
    """Workers of each place behind each other, of every level. Places and workers keep their order otherwise.

    So neighbours in a ring cross the border of a place as rarely as can be: with k places of a level, k times.
    """
    # By first appearance and not by name: rank 0, which logs and saves for all, stays with its worker for as
    # long as that is there.
    first: dict[Path, int] = {}
    keys: dict[str, list[int]] = {}
    for worker in workers:
        at = paths[worker]
        keys[worker] = [first.setdefault(at[:n], len(first)) for n in range(1, len(at) + 1)]
    return sorted(workers, key=keys.__getitem__)


def pick(
    standing: Standing, newcomers: Sequence[str], count: int, seats: Iterable[Path], beside: Iterable[Path]
) -> list[str]:
    """So many of the newcomers: the better tiers first, and of a tier those that stand nearest to the seats that are free.
    With no such seat left, those that make the job stand in few places.

    Args:
        newcomers: in the order of their tiers.
        beside: where those stand that are in the job anyway.
    """
    chosen: list[str] = []
    left, used = dict(enumerate(seats)), list(beside)
    for _, group in groupby(newcomers, standing.tiers.__getitem__):
        tier = list(group)
        found = match(left, tier, standing.paths)
        # A tier that fits is taken as it is. Nearness chooses only within the one that has too many: a node that failed
        # before is no better for standing near.
        if len(chosen) + len(tier) > count:
            near = list(found.values())
            others = fewest_places([w for w in tier if w not in set(near)], standing.paths, used)
            tier = [*near, *others][: count - len(chosen)]
        chosen += tier
        if len(chosen) == count:
            break
        used += (standing.paths[w] for w in tier)
        left = {s: at for s, at in left.items() if s not in found}
    return chosen


def fewest_places(workers: Sequence[str], paths: Mapping[str, Path], beside: Iterable[Path]) -> list[str]:
    """In the order in which to take them, so that few places are used: first those where some stand already, then the
    largest. beside: where those stand that are there anyway."""
    used = {at[:n] for at in beside for n in range(1, len(at) + 1)}
    sizes = Counter(paths[w][:n] for w in workers for n in range(1, len(paths[w]) + 1))
    first: dict[Path, int] = {}
    keys: dict[str, list[tuple[bool, int, int]]] = {}
    for worker in workers:
        at = paths[worker]
        prefixes = [at[:n] for n in range(1, len(at) + 1)]
        keys[worker] = [(p not in used, -sizes[p], first.setdefault(p, len(first))) for p in prefixes]
    return sorted(workers, key=keys.__getitem__)


def match(seats: Mapping[S, Path], workers: Sequence[str], paths: Mapping[str, Path]) -> dict[S, str]:
    """A worker for each seat, as far as there are such, the nearest first. Among equals the order decides."""
    found: dict[S, str] = {}
    left, waiting = dict(seats), list(workers)
    for depth in range(_deepest([*seats.values(), *(paths[w] for w in workers)]), -1, -1):
        if not left or not waiting:
            break
        standing: dict[Path, list[str]] = {}
        # Reversed, because the last is popped: of those that stand equally near the first in order gets the seat. At
        # depth 0 all share the empty place, so no seat stays free while a worker is left.
        for worker in reversed(waiting):
            if len(paths[worker]) >= depth:
                standing.setdefault(paths[worker][:depth], []).append(worker)
        for seat, at in list(left.items()):
            near = standing.get(at[:depth]) if len(at) >= depth else None
            if near:
                found[seat] = near.pop()
                del left[seat]
        taken = set(found.values())
        waiting = [w for w in waiting if w not in taken]
    return found


def rows(columns: Sequence[Sequence[str]], paths: Mapping[str, Path], most: int) -> list[tuple[str, ...]]:
    """Rows of one worker from each column, each in as small a place as can be; at most so many."""
    formed: list[tuple[str, ...]] = []
    left = [list(column) for column in columns]
    for depth in range(_deepest([paths[w] for column in columns for w in column]), -1, -1):
        most_here = min(most - len(formed), *map(len, left))
        if most_here <= 0:
            break
        standing: dict[Path, list[list[str]]] = {}
        for q, column in enumerate(left):
            for worker in column:
                if len(paths[worker]) >= depth:
                    standing.setdefault(paths[worker][:depth], [[] for _ in columns])[q].append(worker)
        for place in standing.values():
            # A row needs one of every column. What a column has more of here than the shortest goes on to the next larger
            # place, where it may complete a row with what was left elsewhere.
            formed += zip(*place, strict=False)
        del formed[most:]
        taken = {w for row in formed for w in row}
        left = [[w for w in column if w not in taken] for column in left]
    return formed


def middle(paths: Sequence[Path]) -> Path:
    """Where most of them stand, of each level; the first of equals."""
    at: Path = ()
    while True:
        inside = Counter(p[: len(at) + 1] for p in paths if p[: len(at)] == at and len(p) > len(at))
        if not inside:
            return at
        at = max(inside, key=inside.__getitem__)


def _deepest(paths: Sequence[Path]) -> int:
    return max(map(len, paths), default=0)
