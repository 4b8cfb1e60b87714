"""Buddies: every failure of as many nodes as there are buddies is survived, and many larger ones."""

import random
from itertools import combinations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counted import lines_of
from holdfast.checkpoint.placement import Placement, place
from holdfast.protocol.place import NodePlace, nearness


def nodes(count: int, per_rack: int | None = None) -> dict[str, NodePlace]:
    return {f"n{i:03}": () if per_rack is None else (f"r{i // per_rack:02}",) for i in range(count)}


def survived(placement: Placement, names, lost: int) -> float:
    """The share of all ways to lose so many nodes that leave a copy of everything."""
    ways = list(combinations(names, lost))
    return sum(placement.survives(set(way)) for way in ways) / len(ways)


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("count", range(2, 11))
def test_as_many_lost_nodes_as_buddies_are_always_survived(count, copies):
    names = nodes(count)
    placement = place(names, copies)
    have = min(copies, count - 1)
    assert all(len(set(b)) == have and n not in b for n, b in placement.buddies.items())
    assert placement.short == (tuple(names) if count - 1 < copies else ())
    for lost in range(1, have + 1):
        assert survived(placement, names, lost) == 1.0


def test_pairs_survive_more_double_failures_than_a_ring():
    names = nodes(16)
    assert survived(place(names, 1), names, 2) == pytest.approx(1 - 8 / comb(16, 2))  # 93.3%
    ring = {n: (f"n{(i + 1) % 16:03}",) for i, n in enumerate(names)}
    assert survived(Placement(ring, (), (), ()), names, 2) == pytest.approx(1 - 16 / comb(16, 2))  # 86.7%


def test_large_clusters_by_sampling():
    """128 nodes in pairs survive four failures at once in 95.3% of all ways (counted exactly below)."""
    names = nodes(128)
    placement = place(names, 1)
    rng = random.Random(0)
    sample = sum(placement.survives(set(rng.sample(list(names), 4))) for _ in range(20_000)) / 20_000
    assert sample == pytest.approx(comb(64, 4) * 2**4 / comb(128, 4), abs=0.006)


@pytest.mark.parametrize(
    ("count", "per_rack", "copies"), [(8, 4, 1), (16, 4, 1), (12, 4, 2), (24, 8, 2), (9, 3, 2)]
)
def test_a_whole_rack_may_fail(count, per_rack, copies):
    names = nodes(count, per_rack)
    placement = place(names, copies)
    assert placement.close == ()
    for rack in set(names.values()):
        assert placement.survives({n for n, r in names.items() if r == rack})


def test_too_few_racks_are_said():
    names = nodes(6, per_rack=5)  # five nodes in one rack, one in another
    placement = place(names, 1)
    assert len(placement.close) >= 4
    assert survived(placement, names, 1) == 1.0
    assert place(nodes(1), 1).short == ("n000",)
    assert place(nodes(4), 0).buddies == dict.fromkeys(nodes(4), ())


def test_a_lost_node_moves_only_its_own_group():
    names = nodes(12, per_rack=3)
    first = place(names, 1)
    gone = first.groups[2][0]
    left = {n: r for n, r in names.items() if n != gone}
    second = place(left, 1, first.groups)
    moved = {n for n in left if second.buddies[n] != first.buddies[n]}
    orphan = first.groups[2][1]
    assert orphan in moved
    assert len(moved) <= 3  # the orphan, and the pair that it joins
    third = place(left | {"new": names[gone]}, 1, second.groups)
    assert all(third.buddies[n] for n in third.buddies)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.sampled_from([("a",), ("b",), ("c", "x"), ("c", "y"), ("d", "x"), ()]), min_size=1, max_size=24
    ),
    st.integers(0, 4),
    st.data(),
)
def test_any_cluster_and_any_change(labels, copies, data):
    names: dict[str, NodePlace] = {f"n{i}": rack for i, rack in enumerate(labels)}
    placement = place(names, copies)
    for _ in range(3):
        have = min(copies, len(names) - 1)
        assert set(placement.buddies) == set(names)
        for node, buddies in placement.buddies.items():
            assert len(set(buddies)) == len(buddies) == have
            assert node not in buddies
        members = [n for g in placement.groups for n in g]
        assert sorted(members) == sorted(names)
        gone = data.draw(st.sets(st.sampled_from(sorted(names)), max_size=max(0, len(names) - 1)))
        names = {n: r for n, r in names.items() if n not in gone}
        placement = place(names, copies, placement.groups)


def cluster(zones: int, racks: int, per_rack: int) -> dict[str, NodePlace]:
    """Names that do not follow the places."""
    places = [(f"z{z}", f"r{r}") for z in range(zones) for r in range(racks) for _ in range(per_rack)]
    random.Random(7).shuffle(places)
    return {f"n{i:04}": place for i, place in enumerate(places)}


@pytest.mark.parametrize(
    ("zones", "racks", "copies", "shared"),
    [(2, 4, 1, 0), (3, 4, 2, 0), (1, 8, 1, 1), (2, 8, 2, 1), (1, 1, 1, 2)],
)
def test_copies_are_as_far_apart_as_they_can_be(zones, racks, copies, shared):
    """No zone is shared where there are as many zones as copies; else no rack."""
    names = cluster(zones, racks, per_rack=8)
    placement = place(names, copies)
    for node, buddies in placement.buddies.items():
        held = [names[n] for n in (node, *buddies)]
        assert max(nearness(a, b) for a, b in combinations(held, 2)) == shared


def test_eight_times_as_many_nodes_cost_about_eight_times_as_much():
    small, large = (cluster(4, 32, per_rack) for per_rack in (4, 32))
    assert lines_of(lambda: place(large, 1)) < 12 * lines_of(lambda: place(small, 1))


def test_buddies_of_4096_nodes_stand_in_other_zones():
    names = cluster(4, 32, per_rack=32)
    first = place(names, 1)
    assert all(names[n][0] != names[b][0] for n, (b,) in first.buddies.items())
    gone = next(iter(names))
    left = {n: p for n, p in names.items() if n != gone}
    second = place(left, 1, first.groups)
    assert sum(second.buddies[n] != first.buddies[n] for n in left) <= 3


def test_groups_of_different_zones_stay_when_a_loss_makes_the_zones_unequal():
    names = cluster(2, 2, per_rack=4)
    first = place(names, 1)
    gone = first.groups[0][0]
    second = place({n: p for n, p in names.items() if n != gone}, 1, first.groups)
    whole = {frozenset(g) for g in first.groups[1:]}
    assert len(whole & {frozenset(g) for g in second.groups}) >= len(whole) - 1  # one takes the orphan in
