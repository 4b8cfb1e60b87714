"""Places out of measured pairs: simulated clusters are found again, and noise makes none."""

import itertools
import random
from collections.abc import Iterator

import pytest

from holdfast.health.checks.pairs import Measured, Pair
from holdfast.health.checks.places import TWICE_UP_TO, better, between, domains, tournament, turns
from holdfast.protocol.place import MOST_LEVELS, NodePlace, nearness

NEAR_S, RATE = 40e-6, 10e9
JITTER = 0.3
BROKEN = Measured(0.0, why="refused"), Measured(None, why="gone"), Measured(RATE, NEAR_S, damaged=True)


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


def alike(count: int, chance: random.Random, jitter: float = JITTER) -> dict[Pair, Measured]:
    def about(value: float) -> float:
        return value * chance.uniform(1 - jitter, 1 + jitter)

    return {p: Measured(about(RATE), about(NEAR_S)) for p in itertools.combinations(names(count), 2)}


# ---------------------------------------------------------------- the tournament


@pytest.mark.parametrize("count", range(1, 34))
def test_everyone_meets_everyone_once_and_nobody_is_in_two_pairs_at_once(count):
    batches = tournament(names(count))
    played = [frozenset(p) for b in batches for p in b]
    assert len(played) == len(set(played)) == count * (count - 1) // 2
    assert all(len(p) == 2 for p in played)
    for batch in batches:
        members = [n for p in batch for n in p]
        assert len(members) == len(set(members))
    assert len(batches) == (0 if count == 1 else count - 1 if count % 2 == 0 else count)


def test_nobody_plays_nobody():
    assert tournament([]) == []


def test_few_nodes_play_twice_and_the_better_figures_count():
    assert [turns(names(n)) for n in (3, TWICE_UP_TO, TWICE_UP_TO + 1)] == [2, 2, 1]
    fast, near = Measured(2e9, 50e-6), Measured(1e9, 20e-6)
    assert better(fast, near) == better(near, fast) == Measured(2e9, 20e-6)
    assert better(fast, Measured(2e9)) == fast
    for broken in BROKEN:
        assert better(fast, broken) == better(broken, fast) == fast
    assert better(BROKEN[0], BROKEN[1]) == BROKEN[1]


@pytest.mark.parametrize("count", range(3, TWICE_UP_TO + 1))
def test_disturbed_pairs_seldom_make_places(count):
    """One pair of ten takes five times as long, as on machines that do something else."""

    def about(chance: random.Random) -> dict[Pair, Measured]:
        return {
            p: Measured(
                RATE * chance.lognormvariate(0, 0.15),
                NEAR_S * chance.lognormvariate(0, 0.2) * (5 if chance.random() < 0.1 else 1),
            )
            for p in itertools.combinations(names(count), 2)
        }

    divided = 0
    for seed in range(400):
        chance = random.Random(seed)
        one, other = about(chance), about(chance)
        divided += any(domains({p: better(one[p], other[p]) for p in one}).values())
    assert divided <= 2


# ---------------------------------------------------------------- clusters that are found again


class Cluster:
    """A random tree of places, at least two nodes in each, and what its pairs measure."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        count = self.chance.randint(4, 48)
        depth = self.chance.randint(1, 1 if count < 8 else 2 if count < 16 else 3)
        self.nodes = names(count)
        self.places = self._named(self._divided(self.chance.sample(self.nodes, count), depth), ())
        # From the outermost in: what a border costs, in latency, in bandwidth or in both.
        self.borders = [
            self.chance.choice([(x, 1.0), (1.0, x), (x, x)])
            for x in (self.chance.uniform(4, 6) for _ in range(depth))
        ]

    def _divided(self, nodes: list[str], depth: int) -> list:
        if not depth:
            return nodes
        least = 2**depth
        cuts = range(least, len(nodes) - least + 1)
        chosen = sorted(self.chance.sample(cuts, self.chance.randint(1, min(4, len(cuts)))))
        cuts = [a for a, b in zip(chosen, [-least, *chosen], strict=False) if a - b >= least]
        parts = [nodes[a:b] for a, b in itertools.pairwise([0, *cuts, len(nodes)])]
        return [self._divided(part, depth - 1) for part in parts]

    def _named(self, tree: list, above: NodePlace) -> dict[str, NodePlace]:
        if isinstance(tree[0], str):
            return dict.fromkeys(tree, above)
        places: dict[str, NodePlace] = {}
        first = {id(part): min(int(n[1:]) for n in self._named(part, ())) for part in tree}
        for number, part in enumerate(sorted(tree, key=lambda part: first[id(part)]), 1):
            places |= self._named(part, (*above, f"d{number}"))
        return places

    def measured(self, jitter: float, broken: bool) -> dict[Pair, Measured]:
        found = {}
        for pair in itertools.combinations(self.nodes, 2):
            latency_s, rate = NEAR_S, RATE
            for slower, narrower in self.borders[nearness(*(self.places[n] for n in pair)) :]:
                latency_s, rate = latency_s * slower, rate / narrower
            latency_s, rate = (x * self.chance.uniform(1 - jitter, 1 + jitter) for x in (latency_s, rate))
            found[pair] = Measured(rate, latency_s)
        return found | ({p: self.chance.choice(BROKEN) for p in self._unlucky()} if broken else {})

    def _unlucky(self) -> Iterator[Pair]:
        """At most one pair of a node, and not the only one of a place: nothing could tell that these two are near."""
        order = self.chance.sample(self.nodes, len(self.nodes))
        for one, other in zip(order[::2], order[1::2], strict=False):
            at = self.places[one]
            if at != self.places[other] or sum(p == at for p in self.places.values()) > 2:
                yield min(one, other, key=self.nodes.index), max(one, other, key=self.nodes.index)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("broken", [False, True])
def test_a_cluster_is_found_again(seed, broken):
    cluster = Cluster(seed)
    measured = cluster.measured(JITTER, broken)
    assert domains(measured) == cluster.places


def test_the_clusters_of_that_test_have_one_to_three_levels():
    depths = {len(place) for seed in range(60) for place in Cluster(seed).places.values()}
    assert depths == {1, 2, 3}


@pytest.mark.parametrize("seed", range(10))
def test_the_same_measurement_gives_the_same_places_in_the_same_order(seed):
    cluster = Cluster(seed)
    measured = cluster.measured(JITTER, broken=True)
    found = domains(measured)
    for _ in range(5):
        turned = [(p if cluster.chance.random() < 0.5 else p[::-1], m) for p, m in measured.items()]
        cluster.chance.shuffle(turned)
        assert list(domains(dict(turned)).items()) == list(found.items())
        assert between(found, dict(turned)) == between(found, measured)


def test_a_node_far_from_all_others_stands_alone():
    measured = alike(5, random.Random(0), 0.1)
    measured |= {p: Measured(RATE, 1e-3) for p in measured if "n2" in p}
    expected = {"n0": "d1", "n1": "d1", "n2": "d2", "n3": "d1", "n4": "d1"}
    assert domains(measured) == {n: (place,) for n, place in expected.items()}


def test_there_are_never_more_levels_than_a_place_may_have():
    nodes = names(MOST_LEVELS + 4)
    measured = {
        (a, b): Measured(RATE, 1e-4 * 4 ** max(int(a[1:]), int(b[1:])))
        for a, b in itertools.combinations(nodes, 2)
    }
    assert max(map(len, domains(measured).values())) == MOST_LEVELS


# ---------------------------------------------------------------- what makes no places


@pytest.mark.parametrize("count", range(3, 17))
def test_noise_makes_no_places(count):
    for seed in range(100):
        chance = random.Random(seed)
        assert set(domains(alike(count, chance)).values()) == {()}


@pytest.mark.parametrize("count", [24, 48, 64])
def test_noise_makes_no_places_of_many_nodes(count):
    for seed in range(3):
        assert set(domains(alike(count, random.Random(seed))).values()) == {()}


@pytest.mark.parametrize("count", range(3, 12))
def test_one_disturbed_pair_makes_no_places(count):
    for seed in range(30):
        chance = random.Random(seed)
        measured = alike(count, chance)
        measured[chance.choice(list(measured))] = chance.choice([Measured(RATE / 50, 20e-3), *BROKEN])
        assert set(domains(measured).values()) == {()}


def test_latencies_below_the_floor_make_no_places():
    measured = {
        p: Measured(RATE, 10e-6 if int(p[0][1:]) // 2 == int(p[1][1:]) // 2 else 55e-6)
        for p in itertools.combinations(names(6), 2)
    }
    assert set(domains(measured).values()) == {()}


@pytest.mark.parametrize("slow", [{"n1"}, {"n1", "n3"}])
def test_a_slow_card_is_no_place(slow):
    """It is slow with everybody, whoever is near."""
    measured = alike(6, random.Random(1))
    measured |= {p: Measured(RATE / 10, m.latency_s) for p, m in measured.items() if slow & set(p)}
    assert set(domains(measured).values()) == {()}


# ---------------------------------------------------------------- what could not be measured


def test_a_node_without_any_pair_is_left_out():
    measured = alike(4, random.Random(2), 0.1)
    measured |= {p: Measured(None, why="n3 did not answer") for p in measured if "n3" in p}
    assert domains(measured) == {"n0": (), "n1": (), "n2": ()}
    assert domains({}) == {}
    assert domains({("n0", "n1"): BROKEN[0]}) == {}


def test_those_who_reach_none_of_the_most_are_left_out():
    measured = {
        p: Measured(RATE, NEAR_S) if (p[0] in "n0 n1") == (p[1] in "n0 n1") else BROKEN[0]
        for p in itertools.combinations(names(5), 2)
    }
    assert domains(measured) == {"n2": (), "n3": (), "n4": ()}


def test_figures_of_each_place():
    latencies = {0: 400e-6, 1: 100e-6, 2: 20e-6}
    places = {"n0": ("d1", "d1"), "n1": ("d1", "d1"), "n2": ("d1", "d2"), "n3": ("d2",)}
    measured = {
        (a, b): Measured(1e9, latencies[nearness(places[a], places[b])])
        for a, b in itertools.combinations(places, 2)
    }
    rows = between(places, measured)
    assert [(r.place, r.pairs, r.latency_s) for r in rows] == [
        ((), 3, 400e-6),
        (("d1",), 2, 100e-6),
        (("d1", "d1"), 1, 20e-6),
        (("d1", "d2"), 0, None),
        (("d2",), 0, None),
    ]
    assert rows[1].nodes == ("n0", "n1", "n2")
