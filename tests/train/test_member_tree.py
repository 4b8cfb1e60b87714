"""The tree of the members, and what becomes of their words on the way through it: the same for any tree, and as without one."""

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.protocol.job import FAN_OUT_VARIABLE, tree_fan_out
from holdfast.train.member_tree import (
    END,
    NOT_IN_SUM,
    OTHER_SUM,
    SAVE,
    Round,
    Word,
    fan_out_for,
    joined,
    merged,
    parents,
    result,
    rounded,
    sides,
)

doubles = st.floats(allow_nan=True, allow_infinity=True)
fan_outs = st.integers(1, 9)
nodes = st.lists(st.integers(0, 12), min_size=1, max_size=60).map(lambda found: [f"n{i}" for i in found])


def word(kind, step, rank, **parts):
    return Word(kind=kind, step=step, count=1, latest=rank, **parts)


def bits(number):
    """Of NaN there is one."""
    return "nan" if math.isnan(number) else struct.pack("<d", number)


def outcome(terms):
    """What `math.fsum` makes of them: its bits, or its error."""
    try:
        return bits(math.fsum(terms))
    except (ValueError, OverflowError) as error:
        return type(error)


def over(tree, own):
    """The word of the root, when every member says its own."""
    words = dict(enumerate(own))
    for rank in reversed(range(len(tree))):
        below = [(child, words[child]) for child, parent in enumerate(tree) if parent == rank]
        latest = below[-1][1].latest if below else rank
        words[rank] = merged(words[rank], rank, below, latest)
    return words[0]


@given(nodes, fan_outs)
def test_every_member_is_below_the_root_once(nodes, fan_out):
    tree = parents(nodes, fan_out)
    assert tree[0] == -1
    assert all(0 <= parent < rank for rank, parent in enumerate(tree) if rank)
    for rank, node in enumerate(nodes):
        children = [child for child, parent in enumerate(tree) if parent == rank]
        there = [child for child in children if nodes[child] == node]
        assert len(children) - len(there) <= fan_out
        leader = nodes.index(node)
        assert len(there) == (nodes.count(node) - 1 if rank == leader else 0)
        assert rank == leader or tree[rank] == leader


@given(nodes, fan_outs, st.data())
def test_a_side_is_the_neighbour_on_the_way(nodes, fan_out, data):
    tree = parents(nodes, fan_out)
    rank = data.draw(st.integers(0, len(nodes) - 1))
    for other, side in enumerate(sides(tree, rank)):
        above, way = other, []
        while above >= 0:
            way.append(above)
            above = tree[above]
        if other == rank:
            assert side == rank
        elif rank in way:
            assert side == way[way.index(rank) - 1]
        else:
            assert side == tree[rank]


@given(st.lists(st.lists(doubles, max_size=6), min_size=1, max_size=40), fan_outs, st.data())
@settings(deadline=None, max_examples=300)
def test_sums_have_the_bits_of_fsum_in_any_tree(terms, fan_out, data):
    places = data.draw(st.lists(st.integers(0, 12), min_size=len(terms), max_size=len(terms)))
    tree = parents([f"n{i}" for i in places], fan_out)
    words = [word(Round.WEIGHTS, 3, rank, sums=(tuple(mine),)) for rank, mine in enumerate(terms)]
    total = result(over(tree, words), len(terms))
    flat = [x for mine in terms for x in mine]
    (column,) = total.sums
    # Whether `fsum` refuses a sum that is too large on the way only depends on the order of the terms. The tree does not.
    if outcome(flat) is not OverflowError:
        assert outcome(column) == outcome(flat)


@given(st.lists(doubles, max_size=30), st.data())
@settings(deadline=None)
def test_joined_numbers_stand_for_the_terms(terms, data):
    cut = data.draw(st.integers(0, len(terms)))
    few = joined([*joined(terms[:cut]), *joined(terms[cut:])])
    if outcome(terms) is not OverflowError and outcome(few) is not OverflowError:
        assert outcome(few) == outcome(terms)


def test_a_sum_beyond_the_largest_number_on_the_way_only_is_one():
    assert rounded(joined([1e308, 1e308, -1e308])) == (1e308,)
    assert outcome(rounded(joined([1e308, 1e308]))) is OverflowError
    assert outcome(rounded(joined([math.inf, -math.inf, math.nan]))) is ValueError


def test_few_numbers_stand_for_many():
    many = [math.ldexp(1.0, -k) * (-1) ** k for k in range(40)] * 30
    assert len(joined(many)) < 4


@given(nodes, fan_outs, st.data())
def test_what_one_member_says_the_root_hears(nodes, fan_out, data):
    size, tree = len(nodes), parents(nodes, fan_out)
    ends, saves = (data.draw(st.sets(st.integers(0, size - 1))) for _ in range(2))
    told = data.draw(st.dictionaries(st.integers(0, size - 1), st.floats(allow_nan=False)))
    own = [
        word(
            Round.VOTE,
            7,
            rank,
            flags=END * (rank in ends) | SAVE * (rank in saves),
            seen=(float(rank % 3),),
            by_rank=((rank, told[rank], 0.0, 0.0),) if rank in told else (),
        )
        for rank in range(size)
    ]
    total = result(over(tree, own), size)
    assert (bool(total.flags & END), bool(total.flags & SAVE)) == (bool(ends), bool(saves))
    assert {rank: x for rank, x, _, _ in total.by_rank} == told
    assert len(total.seen) == min(2, size) if size > 1 else len(total.seen) == 1


@given(nodes, fan_outs, st.data())
def test_there_is_no_result_without_every_member(nodes, fan_out, data):
    """R2: with a member missing, a vote would commit a step that is not prepared there."""
    tree = parents(nodes, fan_out)
    own = [word(Round.VOTE, 7, rank) for rank in range(len(nodes))]
    assert result(over(tree, own), len(nodes)) is not None
    assert result(over(tree, own), len(nodes) + 1) is None


@pytest.mark.parametrize("fan_out", [1, 2, 8])
def test_whoever_sums_something_else_is_named_to_all(fan_out):
    tree = parents([f"n{rank // 2}" for rank in range(12)], fan_out)
    alike = [word(Round.SUM, 3, rank, sums=((1.0,),), seen=(5.0,)) for rank in range(12)]
    assert over(tree, alike).sums == ((12.0,),)
    other = [*alike[:7], word(Round.SUM, 3, 7, sums=((1.0,), (2.0,)), seen=(6.0,)), *alike[8:]]
    total = over(tree, other)
    assert (total.flags, 7 in total.ranks) == (OTHER_SUM, True)
    outside = [*alike[:7], word(Round.WEIGHTS, 3, 7, sums=((1.0,), (2.0,))), *alike[8:]]
    total = over(tree, outside)
    assert (total.flags, total.ranks[1]) == (NOT_IN_SUM, 7)
    inside = [word(Round.WEIGHTS, 3, r, sums=((1.0,), (2.0,))) for r in range(12)]
    inside[7] = alike[7]
    total = over(tree, inside)
    assert (total.flags, total.ranks[0]) == (NOT_IN_SUM, 7)


def test_a_small_job_is_a_mesh_unless_the_environment_says_otherwise():
    assert fan_out_for(16) is None
    assert fan_out_for(17) == 8
    assert fan_out_for(2, tree_fan_out({FAN_OUT_VARIABLE: "1"})) == 1
    assert tree_fan_out({}) is None


@pytest.mark.parametrize("text", ["0", "-1", "eight", "2.0", " 2", "²"])
def test_no_fan_out_is_refused(text):
    with pytest.raises(UsageError, match="must be a whole number of 1 or more"):
        tree_fan_out({FAN_OUT_VARIABLE: text})
