"""What is computed twice, and by whom."""

import pytest

from holdfast.train.place import share
from holdfast.train.replay import replay_of


def drawn(every, nodes, steps, micro_batches=12, seed=7):
    found = {s: replay_of(every, seed, s, micro_batches, nodes) for s in range(steps)}
    return {s: r for s, r in found.items() if r is not None}


def test_one_step_of_each_block_is_drawn_and_not_always_the_same():
    steps = list(drawn(10, ("a", "b"), 1000))
    assert [s // 10 for s in steps] == list(range(100))
    assert {s % 10 for s in steps} == set(range(10))
    assert list(drawn(1, ("a", "b"), 5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("nodes", [("a", "b"), ("a", "b", "c"), ("a", "a", "b", "b", "c", "c"), ("a",) * 3])
def test_others_compute_it_again_on_other_nodes_where_there_are_any(nodes):
    owners, checkers = set(), set()
    for replay in drawn(1, nodes, 300).values():
        assert replay.micro in share(12, replay.owner, len(nodes))
        three = {replay.owner, replay.checker, replay.third}
        assert len(three) == 3
        assert (replay.third is None) == (len(nodes) == 2)
        asked = {nodes[rank] for rank in three if rank is not None}
        assert len(asked) == min(3, len(set(nodes)))
        owners.add(replay.owner)
        checkers.add(replay.checker)
    assert owners == checkers == set(range(len(nodes)))


def test_nothing_is_drawn_without_the_option_or_another_worker():
    assert drawn(0, ("a", "b"), 100) == {} == drawn(1, ("a",), 100)
