"""Who holds which shard in which replica, over many losses and arrivals."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordinator.membership.rank_assignment import RankAssignment, WorkerPlaces, assign, path, wanted
from holdfast.protocol.messages import Generation, Member


def generation(assigned: RankAssignment, shard_count: int) -> Generation:
    complete = len(assigned.replicas) * shard_count
    places = dict(assigned.beside) | {w: p for row in assigned.replicas for p, w in enumerate(row)}
    members = tuple(
        Member(
            rank=r,
            worker=w,
            node=w,
            slot=0,
            replica=r // shard_count if r < complete else -1,
            shard_index=places[w],
        )
        for r, w in enumerate(assigned.workers)
    )
    return Generation(number=1, members=members, shape=(shard_count, 1))


@st.composite
def situations(draw):
    """A generation as assigned made it, what is left of it, and who came."""
    shard_count = draw(st.integers(1, 4))
    places = st.lists(st.integers(0, shard_count - 1), max_size=12)
    first = {f"a{i}": p for i, p in enumerate(draw(places))}
    before = generation(assign(None, {}, first, shard_count, draw(st.integers(0, 4))), shard_count)
    more = {f"b{i}": p for i, p in enumerate(draw(places))}
    held = {x.worker: x.shard_index for x in before.members}
    before = generation(assign(before, held, more, shard_count, draw(st.integers(0, 4))), shard_count)
    held = {x.worker: x.shard_index for x in before.members}
    lost = draw(st.sets(st.sampled_from(sorted(held)))) if held else set()
    survivors = {w: p for w, p in held.items() if w not in lost}
    newcomers = {f"c{i}": p for i, p in enumerate(draw(places))}
    return (
        before,
        survivors,
        newcomers,
        shard_count,
        draw(st.integers(0, 4)),
        draw(standings(held | newcomers)),
    )


@st.composite
def standings(draw, workers):
    """Where they stand: nowhere that is known, or each in some rack. What holds of assignments holds with and without."""
    if draw(st.booleans()):
        return None
    racks = st.sampled_from([(), ("a", "x"), ("a", "y"), ("b", "x")])
    paths = {w: path(draw(racks), w) for w in workers}
    return WorkerPlaces(paths, {w: (False, draw(st.integers(0, 1))) for w in workers})


@given(situations())
def test_as_many_rows_as_can_be(situation):
    _, survivors, newcomers, shard_count, most, *_ = situation
    assigned = assign(*situation)
    there = Counter([*survivors.values(), *newcomers.values()])
    assert len(assigned.replicas) == min(most, *(there[p] for p in range(shard_count)))


@given(situations())
def test_everyone_is_in_once_and_where_its_shard_is(situation):
    _, survivors, newcomers, shard_count, _, *_ = situation
    assigned = assign(*situation)
    places = survivors | newcomers
    assert len(set(assigned.workers)) == len(assigned.workers)
    assert all([places[w] for w in row] == list(range(shard_count)) for row in assigned.replicas)
    assert dict(assigned.beside).items() <= survivors.items()
    assert survivors.keys() <= set(assigned.workers), "a survivor is never left out"


@given(situations())
def test_survivors_are_taken_before_newcomers(situation):
    _, _, newcomers, shard_count, _, *_ = situation
    assigned = assign(*situation)
    for shard_index in range(shard_count):
        came = any(row[shard_index] in newcomers for row in assigned.replicas)
        assert not came or shard_index not in dict(assigned.beside).values()


@given(situations())
def test_rows_that_lost_nobody_stay_together(situation):
    before, survivors, _, _, _, *_ = situation
    assigned = assign(*situation)
    old = [tuple(m.worker for m in before.members if m.replica == r) for r in range(before.replicas)]
    whole = [row for row in old if all(w in survivors for w in row)]
    kept = [row for row in whole if row in assigned.replicas]
    assert len(kept) == min(len(whole), len(assigned.replicas))
    if len(assigned.replicas) == before.replicas:
        assert all(assigned.replicas[old.index(row)] == row for row in kept), "each keeps its number"
    else:
        assert sorted(kept, key=assigned.replicas.index) == sorted(kept, key=old.index)


@given(situations())
def test_the_same_situation_is_seated_alike(situation):
    assert assign(*situation) == assign(*situation)


@given(situations())
def test_nothing_changes_where_nothing_happened(situation):
    before, _, _, shard_count, _, *_ = situation
    held = {x.worker: x.shard_index for x in before.members}
    again = assign(before, held, {}, shard_count, before.replicas)
    assert again.workers[: before.strength] == tuple(x.worker for x in before.members[: before.strength])


@given(
    st.integers(1, 4).flatmap(lambda n: st.tuples(st.lists(st.integers(0, n - 1)), st.just(n))),
    st.integers(0, 4),
)
def test_with_those_that_are_wanted_the_rows_are_complete(case, rows):
    there, shard_count = case
    missing = wanted(there, shard_count, rows)
    counts = Counter([*there, *missing])
    assert all(counts[p] >= rows for p in range(shard_count))
    assert all(Counter(there)[p] < rows for p in missing), "nobody is wanted where there are enough"


def two_rows() -> Generation:
    return generation(assign(None, {}, {"a": 0, "b": 1, "c": 0, "d": 1}, 2, 2), 2)


def test_two_replicas_that_lost_different_shards_become_one():
    assigned = assign(two_rows(), {"b": 1, "c": 0}, {}, 2, 2)
    assert assigned == RankAssignment((("c", "b"),))


def test_who_misses_its_neighbour_stays_beside_until_there_is_one():
    alone = assign(two_rows(), {"a": 0, "b": 1, "d": 1}, {}, 2, 2)
    assert alone == RankAssignment((("a", "b"),), (("d", 1),))
    healed = assign(generation(alone, 2), {"a": 0, "b": 1, "d": 1}, {"e": 0}, 2, 2)
    assert healed == RankAssignment((("a", "b"), ("e", "d")))


def test_at_an_unchanged_size_the_newcomer_sits_where_the_lost_one_was():
    assigned = assign(two_rows(), {"b": 1, "c": 0, "d": 1}, {"e": 0}, 2, 2)
    assert assigned == RankAssignment((("e", "b"), ("c", "d")))


def test_newcomers_for_a_shard_that_nobody_lacks_make_no_row():
    assert assign(two_rows(), {"a": 0, "b": 1}, {"e": 0, "f": 0}, 2, 2) == RankAssignment((("a", "b"),))
