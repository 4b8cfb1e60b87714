"""Who holds which shard in which replica: pure.

A replica of several workers is a *row*, with one worker for every shard of the state; the workers that
hold the same shard are a *column*. Survivors keep their shard, because they have its state, but not always their row:
two replicas that lost different shards become one. A survivor for whose row workers are missing stays beside the rows:
it computes nothing, but it makes every update, so its shard stays current and only what was lost is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.protocol.messages import Generation


class Seating(msgspec.Struct, frozen=True):
    """Complete rows, each in the order of the shards; and the survivors beside them, with their shards."""

    rows: tuple[tuple[str, ...], ...] = ()
    beside: tuple[tuple[str, int], ...] = ()

    @property
    def workers(self) -> tuple[str, ...]:
        """In the order of their ranks."""
        return (*(w for row in self.rows for w in row), *(w for w, _ in self.beside))


def seat(
    previous: Generation | None,
    survivors: Mapping[str, int],
    newcomers: Mapping[str, int],
    shard_count: int,
    most: int,
) -> Seating:
    """As many complete rows as can be, at most `most`.

    At an unchanged number of rows each keeps its number, so that the order of every reduction stays what it was.

    Args:
        previous: the generation before, for who sat where.
        survivors, newcomers: workers and their shards, those to be taken first in front.
        shard_count: workers of a replica.
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
    # The rows that lost least are kept, since a row whose workers all survive keeps its process groups and
    # connects to nobody. Ties go to the lower number, so that every coordinator decides alike.
    fullest = sorted(old, key=lambda r: (-len(old[r]), r))[:count]
    unchanged = previous is not None and count == previous.replicas
    rows: list[dict[int, str]] = [{} for _ in range(count)]
    # Equal count and no number beyond it: rows stay where they are. Each row is one summand of the gradient,
    # so a row that moved would change the order of the sum and the last bits of the loss.
    if unchanged and all(r < count for r in fullest):
        for number in fullest:
            rows[number] = dict(old[number])
    else:
        # Otherwise rows close up, in their old order. The order changes, but the number of summands has
        # changed as well, so the bits could not have stayed.
        for place, number in enumerate(sorted(fullest)):
            rows[place] = dict(old[number])
    seated = {w for row in rows for w in row.values()}
    for q in range(shard_count):
        # Survivors before newcomers in every column: they have the state, and a newcomer that is seated has
        # to be restored before the step can begin.
        waiting = iter([w for w in (*columns[q], *fresh[q]) if w not in seated])
        for row in rows:
            if q not in row:
                row[q] = next(waiting)
                seated.add(row[q])
    # They compute nothing, because their row lacks a shard, yet they are not sent home: each makes every
    # update, so its shard stays current. When one newcomer completes the row, only that one shard is fetched,
    # not the whole row.
    beside = tuple((w, p) for w, p in survivors.items() if w not in seated)
    return Seating(tuple(tuple(row[q] for q in range(shard_count)) for row in rows), beside)


def wanted(there: Sequence[int], shard_count: int, rows: int) -> list[int]:
    """The shards for which workers are missing, the scarcest first; `there`: the shard of every worker."""
    counts = [sum(p == q for p in there) for q in range(shard_count)]
    missing = []
    # One at a time for the scarcest, counting it as there: so two missing workers of different shards are
    # asked for as one of each, not as two of the first.
    while min(counts) < rows:
        scarce = counts.index(min(counts))
        missing.append(scarce)
        counts[scarce] += 1
    return missing
