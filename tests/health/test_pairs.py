"""Two rounds of pairs single out the bad node or the bad way."""

import random

import pytest

from holdfast.health.checks.pairs import Measured, Pair, first_round, judge, second_round
from holdfast.protocol.health import Condition

FAST, SLOW, NONE = Measured(10e9, 20e-6), Measured(1e9, 20e-6), Measured(0.0, why="refused")


def measure(batches: list[list[Pair]], nodes=(), links=(), bad: Measured = SLOW) -> dict[Pair, Measured]:
    """What pairs measure when these nodes, or the ways between these pairs, are bad."""
    return {
        p: bad if set(p) & set(nodes) or p in links or p[::-1] in links else FAST for b in batches for p in b
    }


def rounds(count: int, bad: Measured = SLOW, **faults) -> dict:
    first = measure(first_round([f"n{i}" for i in range(count)]), bad=bad, **faults)
    second = measure(second_round(first), bad=bad, **faults)
    return judge(first, second)


def faulty(results: dict) -> tuple[set[str], set[Pair]]:
    nodes = {n for n, rs in results.items() if rs[0].condition is Condition.FAULTY}
    links = {tuple(sorted((n, r.with_node))) for n, rs in results.items() for r in rs[1:]}
    return nodes, links


def test_everyone_is_measured_and_nobody_twice_at_once():
    for count in range(2, 12):
        batches = first_round([f"n{i}" for i in range(count)])
        assert {n for b in batches for p in b for n in p} == {f"n{i}" for i in range(count)}
        for batch in batches:
            members = [n for p in batch for n in p]
            assert len(members) == len(set(members))
    assert first_round(["n0"]) == []


def test_all_are_well():
    assert faulty(rounds(6)) == (set(), set())
    assert second_round(measure(first_round(["n0", "n1", "n2", "n3"]))) == []


@pytest.mark.parametrize("bad", [SLOW, NONE, Measured(10e9, 900e-6), Measured(10e9, 20e-6, damaged=True)])
@pytest.mark.parametrize("count", [3, 4, 5, 8, 9])
def test_one_bad_node(count, bad):
    for i in range(count):
        if count == 3 and i == 0:
            continue  # it is in both pairs, so both are bad: see below
        assert faulty(rounds(count, bad, nodes={f"n{i}"})) == ({f"n{i}"}, set())


@pytest.mark.parametrize("bad", [SLOW, NONE])
@pytest.mark.parametrize("count", [4, 5, 8])
def test_one_bad_way(count, bad):
    for pair in first_round([f"n{i}" for i in range(count)])[0]:
        assert faulty(rounds(count, bad, links={pair})) == (set(), {tuple(sorted(pair))})


def test_two_bad_nodes_in_one_pair():
    assert faulty(rounds(6, nodes={"n2", "n3"})) == ({"n2", "n3"}, set())


def test_everything_bad_is_nobodys_fault():
    results = rounds(3, NONE, nodes={"n0"})
    assert {r[0].condition for r in results.values()} == {Condition.UNKNOWN}


def test_everyone_equally_slow_is_the_network_as_it_is():
    results = rounds(4, nodes={"n0", "n1", "n2", "n3"})
    assert {r[0].condition for r in results.values()} == {Condition.HEALTHY}


def test_what_could_not_be_measured_is_unknown():
    first = {("n0", "n1"): FAST, ("n2", "n3"): Measured(None, why="n3 did not answer")}
    results = judge(first, {})
    assert results["n0"][0].condition is Condition.HEALTHY
    assert (results["n3"][0].condition, results["n3"][0].detail) == (Condition.UNKNOWN, "n3 did not answer")


def test_slow_and_not_measured_again_is_unknown():
    first = {("n0", "n1"): FAST, ("n2", "n3"): SLOW, ("n4", "n5"): FAST}
    second = {("n2", "n0"): FAST, ("n3", "n1"): Measured(None, why="gone")}
    results = judge(first, second)
    assert results["n2"][0].condition is Condition.HEALTHY
    assert results["n3"][0].condition is Condition.UNKNOWN


def test_noise_accuses_nobody():
    chance = random.Random(7)
    for _ in range(200):

        def noisy(batches):
            return {
                p: Measured(chance.gauss(10e9, 0.8e9), abs(chance.gauss(30e-6, 5e-6)))
                for b in batches
                for p in b
            }

        first = noisy(first_round([f"n{i}" for i in range(16)]))
        assert faulty(judge(first, noisy(second_round(first)))) == (set(), set())
