"""Who holds which shard in which replica, and who is near to whom: pure.

A replica of several workers has one worker for every shard of the state. The workers that hold the same shard are a
*replica group*. Survivors keep their shard, because they have its state, but not always their replica: two replicas that lost
different shards become one. A survivor whose replica lacks workers stays beside the complete replicas: it computes
nothing, but it makes every update, so its shard stays current and only what was lost is fetched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

import msgspec

from holdfast.protocol.messages import Generation
from holdfast.protocol.place import NodePlace

Path = tuple[str, ...]
"""A place, and in it the node. Nodes whose place is not known have a place of their own."""

S = TypeVar("S", bound=Hashable)


# ---------------------------------------------------------------- locality
# Places form a tree, from the outermost names in, and below the innermost stands the node itself. Two workers are the
# nearer the more of the tree they share. Every function here first uses up what is nearest and then what is further out. In
# a tree that is best at every level at once, because what is matched within a place can never be missing further out: of
# `a` vacancies and `b` workers within a place, the smaller number is matched there in any case.
#
# Nothing is decided here for a job of which no place is known.


class WorkerPlaces(msgspec.Struct, frozen=True):
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
    standing: WorkerPlaces,
    newcomers: Sequence[str],
    count: int,
    vacant: Iterable[Path],
    beside: Iterable[Path],
) -> list[str]:
    """`count` of the newcomers: the better tiers first, and of a tier those that stand nearest to a vacancy. With no
    vacancy left, those that make the job stand in few places.

    Args:
        newcomers: in the order of their tiers.
        beside: where those stand that are in the job anyway.
    """
    chosen: list[str] = []
    left, used = dict(enumerate(vacant)), list(beside)
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


def match(vacant: Mapping[S, Path], workers: Sequence[str], paths: Mapping[str, Path]) -> dict[S, str]:
    """A worker for each vacancy, as far as there are such, the nearest first. Among equals the order decides."""
    found: dict[S, str] = {}
    left, waiting = dict(vacant), list(workers)
    for depth in range(_deepest([*vacant.values(), *(paths[w] for w in workers)]), -1, -1):
        if not left or not waiting:
            break
        standing: dict[Path, list[str]] = {}
        # Reversed, because the last is popped: of those that stand equally near the first in order gets the vacancy. At
        # depth 0 all share the empty place, so no vacancy is left while a worker is left.
        for worker in reversed(waiting):
            if len(paths[worker]) >= depth:
                standing.setdefault(paths[worker][:depth], []).append(worker)
        for vacancy, at in list(left.items()):
            near = standing.get(at[:depth]) if len(at) >= depth else None
            if near:
                found[vacancy] = near.pop()
                del left[vacancy]
        taken = set(found.values())
        waiting = [w for w in waiting if w not in taken]
    return found


def rows(groups: Sequence[Sequence[str]], paths: Mapping[str, Path], most: int) -> list[tuple[str, ...]]:
    """Rows of one worker from each group, each in as small a place as can be; at most `most`."""
    formed: list[tuple[str, ...]] = []
    left = [list(group) for group in groups]
    for depth in range(_deepest([paths[w] for group in groups for w in group]), -1, -1):
        most_here = min(most - len(formed), *map(len, left))
        if most_here <= 0:
            break
        standing: dict[Path, list[list[str]]] = {}
        for q, group in enumerate(left):
            for worker in group:
                if len(paths[worker]) >= depth:
                    standing.setdefault(paths[worker][:depth], [[] for _ in groups])[q].append(worker)
        for place in standing.values():
            # A row needs one of every group. What a group has more of here than the shortest goes on to the next larger
            # place, where it may complete a row with what was left elsewhere.
            formed += zip(*place, strict=False)
        del formed[most:]
        taken = {w for row in formed for w in row}
        left = [[w for w in group if w not in taken] for group in left]
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


class RankAssignment(msgspec.Struct, frozen=True):
    """Complete replicas, each in the order of the shards; and the survivors beside them, with their shards."""

    replicas: tuple[tuple[str, ...], ...] = ()
    beside: tuple[tuple[str, int], ...] = ()

    @property
    def workers(self) -> tuple[str, ...]:
        """In the order of their ranks."""
        return (*(w for replica in self.replicas for w in replica), *(w for w, _ in self.beside))


def assign(
    previous: Generation | None,
    survivors: Mapping[str, int],
    newcomers: Mapping[str, int],
    shard_count: int,
    most: int,
    standing: WorkerPlaces | None = None,
) -> RankAssignment:
    """As many complete replicas as can be, at most `most`.

    At an unchanged number of replicas each keeps its number, so that the order of every reduction stays what it was.
    Otherwise replicas that stand close together get numbers that follow each other. A replica that is filled up gets
    workers that stand near its others, and a new one stands in as small a place as can be.

    Args:
        previous: the generation before, for who was in which replica.
        survivors, newcomers: workers and their shards, those to be taken first in front.
        shard_count: workers of a replica.
        standing: where they stand; None: of no node that is known.
    """
    # A worker can only take the place of its own shard: the state that it holds is of that shard, and to hold
    # another one it would have to fetch it all. So the scarcest shard decides how many replicas are complete,
    # and everything below only chooses which ones.
    groups, fresh = _by_shard(survivors, shard_count), _by_shard(newcomers, shard_count)
    count = min(most, *(len(groups[q]) + len(fresh[q]) for q in range(shard_count)))
    old: dict[int, dict[int, str]] = {}
    for member in previous.members if previous else ():
        if member.worker in survivors and member.replica >= 0:
            old.setdefault(member.replica, {})[member.shard_index] = member.worker
    # The replicas that lost least are kept, since one whose workers all survive keeps its process groups and
    # connects to nobody. Ties go to the lower number, so that every coordinator decides alike.
    fullest = sorted(old, key=lambda r: (-len(old[r]), r))[:count]
    unchanged = previous is not None and count == previous.replicas
    replicas: list[dict[int, str]] = [{} for _ in range(count)]
    # Equal count and no number beyond it: replicas keep their numbers. Each is one summand of the gradient,
    # so one that moved would change the order of the sum and the last bits of the loss.
    if unchanged and all(r < count for r in fullest):
        for number in fullest:
            replicas[number] = dict(old[number])
    else:
        # Otherwise the numbers close up, in their old order. The order changes, but the number of summands has
        # changed as well, so the bits could not have stayed.
        for new_number, number in enumerate(sorted(fullest)):
            replicas[new_number] = dict(old[number])
    placed = {w for replica in replicas for w in replica.values()}
    if standing is not None:
        _fill(replicas, [[w for w in c if w not in placed] for c in groups], fresh, standing)
        if not unchanged:
            replicas = _in_order(replicas, standing)
        placed = {w for replica in replicas for w in replica.values()}
    for q in range(shard_count if standing is None else 0):
        # Survivors before newcomers in every group: they have the state, and a newcomer that is placed has
        # to be restored before the step can begin.
        waiting = iter([w for w in (*groups[q], *fresh[q]) if w not in placed])
        for replica in replicas:
            if q not in replica:
                replica[q] = next(waiting)
                placed.add(replica[q])
    # They compute nothing, because their replica lacks a shard, yet they are not sent home: each makes every
    # update, so its shard stays current. When one newcomer completes the replica, only that one shard is fetched,
    # not the state of all its workers.
    beside = tuple((w, p) for w, p in survivors.items() if w not in placed)
    return RankAssignment(
        tuple(tuple(replica[q] for q in range(shard_count)) for replica in replicas), beside
    )


def _by_shard(shards: Mapping[str, int], shard_count: int) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(shard_count)]
    for worker, shard_index in shards.items():
        if shard_index < shard_count:
            found[shard_index].append(worker)
    return found


def _fill(
    replicas: list[dict[int, str]],
    waiting: Sequence[Sequence[str]],
    fresh: Sequence[Sequence[str]],
    standing: WorkerPlaces,
) -> None:
    """Gives every replica the workers that it lacks. waiting, fresh: of each shard, survivors without a place, and
    newcomers."""
    paths = standing.paths
    begun = {r: middle([paths[w] for w in row.values()]) for r, row in enumerate(replicas) if row}
    empty = [r for r, row in enumerate(replicas) if not row]
    left: list[list[str]] = []
    for q, survivors in enumerate(waiting):
        vacant = {r: at for r, at in begun.items() if q not in replicas[r]}
        missing = len(vacant) + len(empty)
        # Survivors before newcomers, however far they stand: they have the state, and a newcomer that is placed
        # has to be restored before the step can begin.
        pool = [
            *survivors,
            *pick(standing, fresh[q], max(0, missing - len(survivors)), vacant.values(), begun.values()),
        ]
        for r, worker in match(vacant, pool, paths).items():
            replicas[r][q] = worker
        taken = {row[q] for row in replicas if q in row}
        left.append([w for w in pool if w not in taken])
    for r, row in zip(empty, rows(left, paths, len(empty)), strict=True):
        replicas[r] = dict(enumerate(row))


def _in_order(replicas: Sequence[dict[int, str]], standing: WorkerPlaces) -> list[dict[int, str]]:
    by_first = {row[0]: row for row in replicas}
    stands = {row[0]: middle([standing.paths[w] for w in row.values()]) for row in replicas}
    return [by_first[w] for w in in_order(list(by_first), stands)]


def wanted(there: Sequence[int], shard_count: int, replicas: int) -> list[int]:
    """The shards for which workers are missing, the scarcest first; `there`: the shard of every worker."""
    found = Counter(there)
    counts = [found[q] for q in range(shard_count)]
    # As if each that is listed was there: so two missing workers of different shards are asked for as one of each, not as
    # two of the first.
    return [q for level in range(min(counts), replicas) for q in range(shard_count) if counts[q] <= level]
