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
    columns = [[w for w, p in survivors.items() if p == q] for q in range(shard_count)]
    fresh = [[w for w, p in newcomers.items() if p == q] for q in range(shard_count)]
    count = min(most, *(len(columns[q]) + len(fresh[q]) for q in range(shard_count)))
    old: dict[int, dict[int, str]] = {}
    for member in previous.members if previous else ():
        if member.worker in survivors and member.replica >= 0:
            old.setdefault(member.replica, {})[member.shard_index] = member.worker
    fullest = sorted(old, key=lambda r: (-len(old[r]), r))[:count]
    unchanged = previous is not None and count == previous.replicas
    rows: list[dict[int, str]] = [{} for _ in range(count)]
    if unchanged and all(r < count for r in fullest):
        for number in fullest:
            rows[number] = dict(old[number])
    else:
        for place, number in enumerate(sorted(fullest)):
            rows[place] = dict(old[number])
    seated = {w for row in rows for w in row.values()}
    for q in range(shard_count):
        waiting = iter([w for w in (*columns[q], *fresh[q]) if w not in seated])
        for row in rows:
            if q not in row:
                row[q] = next(waiting)
                seated.add(row[q])
    beside = tuple((w, p) for w, p in survivors.items() if w not in seated)
    return Seating(tuple(tuple(row[q] for q in range(shard_count)) for row in rows), beside)


def wanted(there: Sequence[int], shard_count: int, rows: int) -> list[int]:
    """The shards for which workers are missing, the scarcest first; `there`: the shard of every worker."""
    counts = [sum(p == q for p in there) for q in range(shard_count)]
    missing = []
    while min(counts) < rows:
        scarce = counts.index(min(counts))
        missing.append(scarce)
        counts[scarce] += 1
    return missing
