"""Who holds which shard in which replica: pure.

A replica of several workers has one worker for every shard of the state. The workers that hold the same shard are a
*column*. Survivors keep their shard, because they have its state, but not always their replica: two replicas that lost
different shards become one. A survivor whose replica lacks workers stays beside the complete replicas: it computes
nothing, but it makes every update, so its shard stays current and only what was lost is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.coordinator.membership.locality import Standing, in_order, match, middle, pick, rows
from holdfast.protocol.messages import Generation


class Seating(msgspec.Struct, frozen=True):
    """Complete replicas, each in the order of the shards; and the survivors beside them, with their shards."""

    replicas: tuple[tuple[str, ...], ...] = ()
    beside: tuple[tuple[str, int], ...] = ()

    @property
    def workers(self) -> tuple[str, ...]:
        """In the order of their ranks."""
        return (*(w for replica in self.replicas for w in replica), *(w for w, _ in self.beside))


def seat(
    previous: Generation | None,
    survivors: Mapping[str, int],
    newcomers: Mapping[str, int],
    shard_count: int,
    most: int,
    standing: Standing | None = None,
) -> Seating:
    """As many complete replicas as can be, at most `most`.

    At an unchanged number of replicas each keeps its number, so that the order of every reduction stays what it was.
    Otherwise replicas that stand close together get numbers that follow each other. A replica that is filled up gets
    workers that stand near its others, and a new one stands in as small a place as can be.

    Args:
        previous: the generation before, for who sat where.
        survivors, newcomers: workers and their shards, those to be taken first in front.
        shard_count: workers of a replica.
        standing: where they stand; None: of no node that is known.
    """
    # A worker can only take the place of its own shard: the state that it holds is of that shard, and to hold
    # another one it would have to fetch it all. So the scarcest shard decides how many replicas are complete,
    # and everything below only chooses which ones.
    columns = [[w for w, p in survivors.items() if p == q] for q in range(shard_count)]
    fresh = [[w for w, p in newcomers.items() if p == q] for q in range(shard_count)]
    count = min(most, *(len(columns[q]) + len(fresh[q]) for q in range(shard_count)))
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
    seated = {w for replica in replicas for w in replica.values()}
    if standing is not None:
        _fill(replicas, [[w for w in c if w not in seated] for c in columns], fresh, standing)
        if not unchanged:
            replicas = _in_order(replicas, standing)
        seated = {w for replica in replicas for w in replica.values()}
    for q in range(shard_count if standing is None else 0):
        # Survivors before newcomers in every column: they have the state, and a newcomer that is seated has
        # to be restored before the step can begin.
        waiting = iter([w for w in (*columns[q], *fresh[q]) if w not in seated])
        for replica in replicas:
            if q not in replica:
                replica[q] = next(waiting)
                seated.add(replica[q])
    # They compute nothing, because their replica lacks a shard, yet they are not sent home: each makes every
    # update, so its shard stays current. When one newcomer completes the replica, only that one shard is fetched,
    # not the state of all its workers.
    beside = tuple((w, p) for w, p in survivors.items() if w not in seated)
    return Seating(tuple(tuple(replica[q] for q in range(shard_count)) for replica in replicas), beside)


def _fill(
    replicas: list[dict[int, str]],
    waiting: Sequence[Sequence[str]],
    fresh: Sequence[Sequence[str]],
    standing: Standing,
) -> None:
    """Gives every replica the workers that it lacks. waiting, fresh: of each shard, survivors without a seat, and
    newcomers."""
    paths = standing.paths
    begun = {r: middle([paths[w] for w in row.values()]) for r, row in enumerate(replicas) if row}
    empty = [r for r, row in enumerate(replicas) if not row]
    left: list[list[str]] = []
    for q, survivors in enumerate(waiting):
        seats = {r: at for r, at in begun.items() if q not in replicas[r]}
        missing = len(seats) + len(empty)
        # Survivors before newcomers, however far they stand: they have the state, and a newcomer that is seated
        # has to be restored before the step can begin.
        pool = [
            *survivors,
            *pick(standing, fresh[q], max(0, missing - len(survivors)), seats.values(), begun.values()),
        ]
        for r, worker in match(seats, pool, paths).items():
            replicas[r][q] = worker
        taken = {row[q] for row in replicas if q in row}
        left.append([w for w in pool if w not in taken])
    for r, row in zip(empty, rows(left, paths, len(empty)), strict=True):
        replicas[r] = dict(enumerate(row))


def _in_order(replicas: Sequence[dict[int, str]], standing: Standing) -> list[dict[int, str]]:
    by_first = {row[0]: row for row in replicas}
    stands = {row[0]: middle([standing.paths[w] for w in row.values()]) for row in replicas}
    return [by_first[w] for w in in_order(list(by_first), stands)]


def wanted(there: Sequence[int], shard_count: int, replicas: int) -> list[int]:
    """The shards for which workers are missing, the scarcest first; `there`: the shard of every worker."""
    counts = [sum(p == q for p in there) for q in range(shard_count)]
    missing = []
    # One at a time for the scarcest, counting it as there: so two missing workers of different shards are
    # asked for as one of each, not as two of the first.
    while min(counts) < replicas:
        scarce = counts.index(min(counts))
        missing.append(scarce)
        counts[scarce] += 1
    return missing
