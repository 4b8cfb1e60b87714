"""The order of additions: any division of the micro-batches into contiguous ranges gives the same tree."""

import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast.train.place import folds, share, shares, subtrees


def add_up(micro_batches, nodes, values):
    """Expressions as text: equal text means the same additions in the same order."""
    stack = []
    for value, times in zip(values, folds(micro_batches, nodes), strict=True):
        stack.append(value)
        for _ in range(times):
            right, left = stack.pop(), stack.pop()
            stack.append(f"({left}+{right})")
    return stack


def subtree_sums(micro_batches, numbers):
    leaves = [(m, m + 1) for m in numbers]
    return add_up(micro_batches, leaves, [str(m) for m in numbers])


def whole(micro_batches):
    (total,) = subtree_sums(micro_batches, range(micro_batches))
    return total


@given(st.data())
def test_any_contiguous_division_gives_the_same_additions(data):
    count = data.draw(st.integers(1, 70))
    cuts = sorted(
        data.draw(st.lists(st.integers(0, count), max_size=9))
    )  # equal cuts: a range without numbers
    ranges = [range(a, b) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    nodes, sums = [], []
    for numbers in ranges:
        own = subtrees(count, numbers)
        own_sums = subtree_sums(count, numbers)
        assert len(own) == len(own_sums) <= 2 * max(1, math.ceil(math.log2(count)))
        nodes += own
        sums += own_sums
    assert add_up(count, nodes, sums) == [whole(count)]


@given(st.integers(1, 300), st.integers(1, 64))
def test_every_micro_batch_is_computed_once(count, world):
    parts = shares(count, world)
    assert [m for part in parts for m in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts == [share(count, rank, world) for rank in range(world)]


@given(st.integers(1, 300))
def test_what_a_leaf_is_added_to_first_is_the_leaf_before_it(count):
    """So autograd may make that sum."""
    for m, times in enumerate(folds(count, [(m, m + 1) for m in range(count)])):
        if times:
            assert len(subtrees(count, range(m - 1, m + 1))) == 1


@given(st.integers(0, 6), st.integers(0, 4))
def test_worlds_of_a_power_of_two_send_one_subtree_each(log_world, log_each):
    world = 2**log_world
    for count in {world * 2**log_each, world * 3 * 2**log_each}:
        assert [len(subtrees(count, part)) for part in shares(count, world)] == [1] * world


def test_a_small_tree_looks_as_documented():
    assert whole(6) == "((0+(1+2))+(3+(4+5)))"
    assert subtrees(6, range(1, 5)) == [(1, 3), (3, 4), (4, 5)]
