"""A generation as a difference: both sides mean the same, and a change costs what has changed."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ProtocolError
from holdfast.protocol.generation_difference import NOTHING, Difference, apply, difference
from holdfast.protocol.messages import Came, Generation, Kept, Member, NewMember


def generation(number, workers, shards=1, start=0, connected=()):
    """workers: name to node; complete replicas first, those that are left stand beside them with shard 0."""
    complete = len(workers) // shards * shards
    members = tuple(
        Member(
            rank=rank,
            worker=worker,
            node=node,
            slot=int(worker.partition(".")[2].partition("#")[0] or 3),
            host=f"{node}.local",
            vote_port=20_000 + len(worker),
            data_port=30_000,
            replica=rank // shards if rank < complete else -1,
            shard_index=rank % shards if rank < complete else 0,
        )
        for rank, (worker, node) in enumerate(workers.items())
    )
    return Generation(
        number=number, members=members, start=start, shape=(shards, 1), groups_connected_in=tuple(connected)
    )


def sent(change):
    """As it comes over a wire."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(change), type=Difference)


names = st.lists(st.integers(0, 60), unique=True, max_size=40)


@given(names, names, st.integers(1, 4), st.lists(st.integers(1, 3), max_size=6))
def test_both_sides_have_the_same_generation(before, after, shards, connected):
    def named(numbers, way):
        # Names as workers have them, and others.
        return {f"n{i // 8}.{way(i)}#{i}" if i % 5 else f"odd-{i}": f"n{i // 8}" for i in numbers}

    base = generation(3, named(before, lambda i: i % 8), shards)
    connected = connected[: len(after) // shards]
    new = generation(4, named(after, lambda i: i % 8), shards, start=7, connected=connected)
    assert apply(base, sent(difference(base, new))) == new
    assert apply(NOTHING, sent(difference(NOTHING, new))) == new


@pytest.mark.parametrize("shards", [1, 8])
def test_a_lost_node_costs_what_has_changed_and_not_the_size_of_the_job(shards):
    def without(lost, nodes):
        return {f"n{n}.{s}#{8 * n + s + 1}": f"n{n}" for n in range(nodes) if n != lost for s in range(8)}

    sizes = []
    for nodes in (16, 512):
        base, new = (generation(k, without(lost, nodes), shards) for k, lost in ((1, None), (2, 5)))
        change = difference(base, new)
        assert apply(base, sent(change)) == new
        sizes.append(len(msgspec.msgpack.encode(change)))
    assert sizes[1] < sizes[0] + 20 < 400


def test_a_whole_generation_takes_few_bytes_for_each_worker():
    whole = generation(
        1, {f"node-{n:05d}.{s}#{8 * n + s + 1}": f"node-{n:05d}" for n in range(512) for s in range(8)}
    )
    assert len(msgspec.msgpack.encode(difference(NOTHING, whole))) < 25 * len(whole.members)


def test_another_base_is_refused():
    base, new = generation(1, {"a.0#1": "a", "b.0#2": "b"}), generation(2, {"b.0#2": "b"})
    change = difference(base, new)
    with pytest.raises(ProtocolError, match="from generation 1, but 5 is the newest here"):
        apply(msgspec.structs.replace(base, number=5), change)
    other = msgspec.structs.replace(base, members=tuple(reversed(base.members)))
    with pytest.raises(ProtocolError, match="the digests differ"):
        apply(other, change)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"members": (Kept(1, 2),)}, "names members 1 to 3 of 2"),
        ({"members": (Kept(0, 2), Kept(0, 1))}, "keeps more members than the 2 before"),
        ({"members": (Kept(0, 10**12),)}, "keeps more members than the 2 before"),
        ({"members": (Kept(1, -1),)}, "has a run of -1"),
        ({"connected_in": ((1, 10**12),)}, "groups of more replicas than 1 members form"),
        ({"connected_in": ((1, -1),)}, "has a run of -1"),
        (
            {
                "members": (
                    Came((), (NewMember(node=0, slot=0, name=1, vote_port=1, data_port=1, shard_index=0),)),
                )
            },
            "names node 0 of 0",
        ),
        ({"complete": 0}, "the digests differ"),
    ],
)
def test_a_damaged_difference_is_refused(fields, why):
    base, new = generation(1, {"a.0#1": "a", "b.0#2": "b"}), generation(2, {"b.0#2": "b"})
    change = msgspec.structs.replace(difference(base, new), **fields)
    with pytest.raises(ProtocolError, match=why):
        apply(base, sent(change))
