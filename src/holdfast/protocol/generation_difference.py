"""A generation as what has changed since one that the other side has.

From one generation to the next a few of thousands of workers change, and the ranks behind them close up. So members are sent as
runs: a number of members of the generation before, from a given rank on, or new members. Rank, replica and, in a complete replica,
the shard follow from the position. A digest of the whole shows whether both sides have the same generation. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from holdfast.errors import ProtocolError
from holdfast.protocol.messages import Came, Difference, Generation, Kept, Member, NewMember

NOTHING = Generation(number=0, members=())
"""Stands for the generation of a side that has none."""


def difference(base: Generation, new: Generation) -> Difference:
    """How to make the new one of the other. Linear in the members."""
    ranks = {member.worker: rank for rank, member in enumerate(base.members)}
    runs: list[Kept | Came] = []
    came: list[Member] = []
    first = count = 0

    def close() -> None:
        nonlocal count
        if count:
            runs.append(Kept(first, count))
            count = 0
        if came:
            runs.append(_came(came))
            came.clear()

    for rank, member in enumerate(new.members):
        before = ranks.get(member.worker)
        if before is None or _placed(base.members[before], rank, new) != member:
            if count:
                close()
            came.append(member)
        elif count and before == first + count:
            count += 1
        else:
            close()
            first, count = before, 1
    close()
    return Difference(
        number=new.number,
        base=base.number,
        members=tuple(runs),
        complete=new.replicas,
        start=new.start,
        shape=new.shape,
        connected_in=tuple(_runs(new.groups_connected_in)),
        digest=new.digest,
    )


def apply(base: Generation, change: Difference) -> Generation:
    """The generation that `difference` was made of.

    Raises:
        ProtocolError: this is not the generation that it was made from, or it is damaged.
    """
    if change.base != base.number:
        raise ProtocolError(
            f"a difference from generation {change.base}, but {base.number} is the newest here"
        )
    per_replica = change.shape[0] * change.shape[1]
    seated = change.complete * per_replica
    # A run is short however many it stands for, so a damaged one is refused before it is made.
    if _length(run.count for run in change.members if isinstance(run, Kept)) > len(base.members):
        raise ProtocolError(f"a difference keeps more members than the {len(base.members)} before")
    members: list[Member] = []
    for run in change.members:
        if isinstance(run, Kept):
            if not 0 <= run.first <= run.first + run.count <= len(base.members):
                raise ProtocolError(
                    f"a difference names members {run.first} to {run.first + run.count} of {len(base.members)}"
                )
            members += base.members[run.first : run.first + run.count]
        else:
            members += _members(run)
    if _length(count for _, count in change.connected_in) > len(members):
        raise ProtocolError(
            f"a difference names the groups of more replicas than {len(members)} members form"
        )
    made = Generation(
        number=change.number,
        members=tuple(_seat(member, rank, seated, per_replica) for rank, member in enumerate(members)),
        start=change.start,
        shape=change.shape,
        groups_connected_in=tuple(number for number, count in change.connected_in for _ in range(count)),
    )
    if made.digest != change.digest:
        raise ProtocolError(
            f"generation {change.number} is not what its coordinator formed: the digests differ"
        )
    return made


def _length(counts: Iterable[int]) -> int:
    """Their sum.

    Raises:
        ProtocolError: one is negative.
    """
    length = 0
    for count in counts:
        if count < 0:
            raise ProtocolError(f"a difference has a run of {count}")
        length += count
    return length


def _placed(member: Member, rank: int, of: Generation) -> Member:
    return _seat(member, rank, of.strength, of.shard_count)


def _seat(member: Member, rank: int, seated: int, per_replica: int) -> Member:
    """The member at this rank. Beside the complete replicas it keeps its shard."""
    inside = rank < seated
    replica = rank // per_replica if inside else -1
    shard_index = rank % per_replica if inside else member.shard_index
    if (member.rank, member.replica, member.shard_index) == (rank, replica, shard_index):
        return member
    return msgspec.structs.replace(member, rank=rank, replica=replica, shard_index=shard_index)


def _came(members: Sequence[Member]) -> Came:
    nodes: dict[tuple[str, str], int] = {}
    rows = []
    for member in members:
        prefix = f"{member.node}.{member.slot}#"
        number = member.worker.removeprefix(prefix)
        plain = member.worker.startswith(prefix) and number.isdecimal() and str(int(number)) == number
        rows.append(
            NewMember(
                node=nodes.setdefault((member.node, member.host), len(nodes)),
                slot=member.slot,
                name=int(number) if plain else member.worker,
                vote_port=member.vote_port,
                data_port=member.data_port,
                shard_index=member.shard_index,
            )
        )
    return Came(tuple(nodes), tuple(rows))


def _members(run: Came) -> Iterator[Member]:
    for row in run.members:
        if not 0 <= row.node < len(run.nodes):
            raise ProtocolError(f"a difference names node {row.node} of {len(run.nodes)}")
        node, host = run.nodes[row.node]
        yield Member(
            rank=-1,
            worker=row.name if isinstance(row.name, str) else f"{node}.{row.slot}#{row.name}",
            node=node,
            slot=row.slot,
            host=host,
            vote_port=row.vote_port,
            data_port=row.data_port,
            shard_index=row.shard_index,
        )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    count = 0
    for position, number in enumerate(numbers):
        count += 1
        if position + 1 == len(numbers) or numbers[position + 1] != number:
            yield number, count
            count = 0
