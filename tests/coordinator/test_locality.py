"""Who stands near whom: against every other way to place them, and for clusters of 4,096 nodes."""

import inspect
import itertools
import random
import sys
from collections import Counter

import pytest
from desk import running
from hypothesis import given, settings
from hypothesis import strategies as st

from counted import lines_of
from holdfast.coordinator.membership import rank_assignment
from holdfast.coordinator.membership.policy import assign_ranks
from holdfast.coordinator.membership.rank_assignment import (
    WorkerPlaces,
    assign,
    fewest_places,
    in_order,
    match,
    path,
    pick,
    rows,
)
from holdfast.protocol.messages import Generation, Member, Parked
from holdfast.protocol.place import nearness

PLACES = st.sampled_from(
    [(), ("a",), ("a", "x"), ("a", "y"), ("b", "x"), ("b", "y"), ("c", "x", "1"), ("c", "x", "2")]
)


def paths_of(places, per_node=1):
    """Workers w0, w1, ... of nodes in these places."""
    return {f"w{i * per_node + k}": path(p, f"n{i}") for i, p in enumerate(places) for k in range(per_node)}


def crossings(order, paths, level):
    """How often neighbours in the ring of these workers stand in different places of a level."""
    at = [paths[w][:level] for w in order]
    return sum(a != b for a, b in zip(at, at[1:] + at[:1], strict=True))


def levels(paths):
    return range(1, max(map(len, paths.values()), default=0) + 1)


@given(st.lists(PLACES, max_size=14), st.integers(1, 2), st.randoms(use_true_random=False))
def test_ranks_cross_every_border_as_rarely_as_can_be(places, per_node, rng):
    paths = paths_of(places, per_node)
    workers = list(paths)
    rng.shuffle(workers)
    order = in_order(workers, paths)
    assert sorted(order) == sorted(workers)
    assert order[:1] == workers[:1]
    for level in levels(paths):
        count = len({p[:level] for p in paths.values()})
        # Each place is entered once at least, and the ring has one place or enters two.
        assert crossings(order, paths, level) == (count if count > 1 else 0)


@given(st.lists(PLACES, max_size=9), st.lists(PLACES, max_size=9))
def test_as_many_as_can_be_are_placed_near_at_every_level(vacant, places):
    holes = {i: path(p, f"gone{i}") for i, p in enumerate(vacant)}
    paths = paths_of(places)
    found = match(holes, list(paths), paths)
    assert len(found) == len(set(found.values())) == min(len(vacant), len(places))
    for level in levels(paths):
        free = Counter(p[:level] for p in holes.values() if len(p) >= level)
        there = Counter(p[:level] for p in paths.values() if len(p) >= level)
        near = sum(nearness(holes[s], paths[w]) >= level for s, w in found.items())
        assert near == sum((free & there).values())


@settings(max_examples=60)
@given(st.lists(PLACES, min_size=2, max_size=5), st.lists(PLACES, min_size=2, max_size=5))
def test_no_other_vacancies_are_nearer(vacant, places):
    """By trying all of them, which the bound of the test above is derived from."""
    holes = {i: path(p, f"gone{i}") for i, p in enumerate(vacant)}
    paths = paths_of(places)

    def near(pairs):
        return sum(nearness(holes[s], paths[w]) for s, w in pairs)

    count = min(len(vacant), len(places))
    ways = (
        zip(some, order, strict=True)
        for some in itertools.combinations(holes, count)
        for order in itertools.permutations(paths, count)
    )
    assert near(match(holes, list(paths), paths).items()) == max(map(near, ways))


@given(st.lists(st.lists(PLACES, max_size=6), min_size=1, max_size=3), st.integers(0, 6))
def test_rows_are_within_places_as_often_as_can_be(columns, most):
    paths = {f"{q}.{i}": path(p, f"n{i}") for q, column in enumerate(columns) for i, p in enumerate(column)}
    by_column = [[w for w in paths if w.startswith(f"{q}.")] for q in range(len(columns))]
    formed = rows(by_column, paths, most)
    assert len(formed) == min(most, *map(len, by_column))
    assert len({w for row in formed for w in row}) == len(formed) * len(columns)
    assert all(int(w[0]) == q for row in formed for q, w in enumerate(row))
    for level in levels(paths):
        there = [Counter(paths[w][:level] for w in column if len(paths[w]) >= level) for column in by_column]
        could = sum(min(c[place] for c in there) for place in there[0])
        within = sum(
            len({paths[w][:level] for w in row}) == 1 and all(len(paths[w]) >= level for w in row)
            for row in formed
        )
        assert within == min(could, most)


def test_those_that_are_taken_stand_near_to_whom_they_replace():
    paths = paths_of([("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")])
    tiers = dict.fromkeys(paths, (False, 0))
    standing = WorkerPlaces(paths, tiers)
    lost = path(("a", "x"), "gone")
    assert pick(standing, list(paths), 1, [lost], []) == ["w0"]
    assert pick(standing, ["w1", "w2"], 1, [lost], []) == ["w2"]
    # A node that failed before is taken last, however near it stands.
    failed = WorkerPlaces(paths, tiers | {"w0": (False, 1), "w3": (True, 0)})
    assert pick(failed, ["w1", "w2", "w0", "w3"], 1, [lost], []) == ["w2"]
    assert pick(failed, ["w1", "w2", "w0", "w3"], 3, [lost], []) == ["w1", "w2", "w0"]


def test_a_job_stands_in_few_places():
    paths = paths_of([("a",), ("b",), ("b",), ("a",), ("b",), ("c",)])
    assert fewest_places(list(paths), paths, ())[:3] == ["w1", "w2", "w4"]
    assert fewest_places(list(paths), paths, [path(("a",), "n9")])[:3] == ["w0", "w3", "w1"]


def test_at_an_unchanged_size_nobody_that_stays_moves():
    """However far the newcomers stand: another rank would be another order of the sum."""
    places = {w: path((p,), w) for w, p in zip("abcdef", "xyxyyx", strict=True)}
    before = Generation(
        number=1, members=tuple(Member(rank=i, worker=w, node=w, slot=0) for i, w in enumerate("abcd"))
    )
    assert assign_ranks(before, ["a", "d"], ["e", "f"], places) == ["a", "e", "f", "d"]
    assert assign_ranks(before, ["a", "b", "d"], ["f"], places) == ["a", "b", "f", "d"]
    # At another size all are in the order of their places, and the first of them stays the first.
    assert assign_ranks(before, ["a", "b", "c", "d"], ["e"], places) == ["a", "c", "b", "d", "e"]


# ---------------------------------------------------------------- replicas of several workers


def rows_of_nodes(zones, racks, nodes, shard_count):
    """A cluster whose nodes have one worker each, with the shards counted on within each rack."""
    places = [(f"z{z}", f"r{r}") for z in range(zones) for r in range(racks) for _ in range(nodes)]
    paths = {f"w{i}": path(p, f"n{i}") for i, p in enumerate(places)}
    shards = {w: i % nodes % shard_count for i, w in enumerate(paths)}
    order = list(paths)
    random.Random(3).shuffle(order)
    return WorkerPlaces(paths, dict.fromkeys(paths, (False, 0))), {w: shards[w] for w in order}


def generation_of(assigned, shard_count):
    members = [
        Member(rank=r * shard_count + q, worker=w, node=w, slot=0, replica=r, shard_index=q)
        for r, row in enumerate(assigned.replicas)
        for q, w in enumerate(row)
    ]
    return Generation(number=1, members=tuple(members), shape=(shard_count, 1))


def test_replicas_stand_within_a_rack_and_follow_each_other():
    standing, shards = rows_of_nodes(2, 2, 8, 4)
    assigned = assign(None, {}, shards, 4, 8, standing)
    racks = [{standing.paths[w][1:3] for w in row} for row in assigned.replicas]
    assert all(len(r) == 1 for r in racks)
    order = [next(iter(r)) for r in racks]
    assert len([k for k, _ in itertools.groupby(order)]) == 4
    assert len([k for k, _ in itertools.groupby(z for z, _ in order)]) == 2


def test_a_lost_shard_is_replaced_from_its_own_rack():
    standing, shards = rows_of_nodes(2, 2, 9, 4)  # a spare in each rack, built for shard 0
    spares = {w for w in shards if standing.paths[w][-1] in {"n8", "n17", "n26", "n35"}}
    assigned = assign(None, {}, {w: q for w, q in shards.items() if w not in spares}, 4, 8, standing)
    before = generation_of(assigned, 4)
    lost = assigned.replicas[5][0]
    left = {w: q for w, q in shards.items() if w not in spares and w != lost}
    again = assign(before, left, dict.fromkeys(sorted(spares), 0), 4, 8, standing)
    assert [row for i, row in enumerate(again.replicas) if i != 5] == [
        row for i, row in enumerate(assigned.replicas) if i != 5
    ]
    came = again.replicas[5][0]
    assert nearness(standing.paths[came], standing.paths[lost]) == 3


# ---------------------------------------------------------------- 4,096 nodes


def cluster(nodes=4096):
    """Zones of 4 blocks of 8 racks of 32 nodes, in no order."""
    places = [(f"z{i // 1024}", f"b{i // 256}", f"r{i // 32}") for i in range(nodes)]
    paths = {f"w{i}": path(p, f"n{i}") for i, p in enumerate(places)}
    workers = list(paths)
    random.Random(5).shuffle(workers)
    return paths, workers


@pytest.fixture(scope="module")
def large():
    return cluster()


def test_ranks_of_4096_nodes(large):
    paths, workers = large
    order = assign_ranks(None, [], workers, paths)
    assert [crossings(order, paths, level) for level in (2, 3, 4)] == [4, 16, 128]


def test_a_rack_of_4096_nodes_is_replaced_from_its_block(large):
    paths, workers = large
    order = in_order(workers, paths)
    rack = paths[order[0]][:4]
    lost = [w for w in order if paths[w][:4] == rack]
    spares = {f"s{i}": path((f"z{i % 4}", f"b{i % 16}", f"spare{i % 16}"), f"spare{i}") for i in range(640)}
    known = paths | spares
    standing = WorkerPlaces(known, dict.fromkeys(spares, (False, 0)))
    before = Generation(
        number=1, members=tuple(Member(rank=i, worker=w, node=w, slot=0) for i, w in enumerate(order))
    )
    gone = set(lost)
    staying = [w for w in order if w not in gone]
    taken = pick(standing, list(spares), len(lost), [known[w] for w in lost], [known[w] for w in staying])
    after = assign_ranks(before, staying, taken, known)
    assert [w for w in after if w not in spares] == staying
    assert all(nearness(known[w], known[order[0]]) >= 2 for w in taken)


def test_replicas_of_32_of_4096_nodes(large):
    paths, workers = large
    number = {w: int(w[1:]) % 32 for w in workers}
    standing = WorkerPlaces(paths, dict.fromkeys(workers, (False, 0)))
    assigned = assign(None, {}, number, 32, 128, standing)
    assert all(len({paths[w][:4] for w in row}) == 1 for row in assigned.replicas)
    before, lost = generation_of(assigned, 32), assigned.replicas[70][7]
    left = {w: q for w, q in number.items() if w != lost}
    again = assign(before, left, {}, 32, 128, standing)
    assert len(again.replicas) == 127


def ranked(nodes):
    paths, workers = cluster(nodes)
    return lines_of(lambda: assign_ranks(None, [], workers, paths))


def assigned_at(nodes):
    paths, workers = cluster(nodes)
    number = {w: int(w[1:]) % 32 for w in workers}
    standing = WorkerPlaces(paths, dict.fromkeys(workers, (False, 0)))
    return lines_of(lambda: assign(None, {}, number, 32, nodes // 32, standing))


def replaced(nodes):
    """A rack, by an eighth as many spares as there are nodes."""
    paths, workers = cluster(nodes)
    order = in_order(workers, paths)
    lost = [w for w in order if paths[w][:4] == paths[order[0]][:4]]
    gone = set(lost)
    vacant = [paths[w] for w in lost]
    beside = [paths[w] for w in order if w not in gone]
    spares = {f"s{i}": path((f"z{i % 4}", f"b{i % 16}", f"spare{i}"), f"spare{i}") for i in range(nodes // 8)}
    standing = WorkerPlaces(paths | spares, dict.fromkeys(spares, (False, 0)))
    return lines_of(lambda: pick(standing, list(spares), 32, vacant, beside))


@pytest.mark.parametrize("cost", [ranked, assigned_at, replaced])
def test_eight_times_as_many_nodes_cost_about_eight_times_as_much(cost):
    assert cost(4096) < 12 * cost(512)


OF_PLACES = {
    function.__code__
    for function in vars(rank_assignment).values()
    if inspect.isfunction(function)
    and {"place", "places", "path", "paths"} & {*inspect.signature(function).parameters}
}
"""The functions that compare places."""


def called(places):
    """Functions that compare places and that a loss and the replacement call."""
    seen = set()

    def note(frame, what, _):
        if what == "call" and frame.f_code in OF_PLACES:
            seen.add(frame.f_code.co_name)

    desk = running(3, spares=1, places=places)
    sys.setprofile(note)
    try:
        desk.lose("n1")
        for worker in desk.members():
            desk.says(worker, Parked(generation=1, committed=5))
    finally:
        sys.setprofile(None)
    assert desk.state.membership.number == 2
    return seen


def test_nothing_is_computed_of_a_job_without_places():
    assert called(()) == set()
    assert "match" in called((("a",), ("a",), ("b",), ("a",)))
