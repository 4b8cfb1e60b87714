import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.formulas import divide, idle_share, suggest


@pytest.mark.parametrize(
    ("count", "world", "share"), [(64, 60, 0.4667), (512, 60, 0.0519), (12, 3, 0.0), (11, 5, 0.2667)]
)
def test_the_idle_share_is_what_the_slowest_leaves(count, world, share):
    """The first two figures are those of the published granularity trap: 53% and 94.8% in use."""
    assert idle_share(count, world) == pytest.approx(share, abs=5e-5)


@given(st.integers(1, 200), st.integers(1, 200))
def test_it_is_the_time_that_workers_wait(count, world):
    if world > count:
        with pytest.raises(ValueError, match=f"between 1 and {count}"):
            idle_share(count, world)
        return
    shares = [(r + 1) * count // world - r * count // world for r in range(world)]
    assert idle_share(count, world) == pytest.approx(1 - sum(shares) / (world * max(shares)))
    (found,) = divide(count, [world])
    assert (found.most, found.least) == (max(shares), min(shares))


def test_smaller_micro_batches_are_suggested_where_they_help():
    assert [(d.world, d.idle) for d in divide(8, range(7, 10))] == [(7, pytest.approx(3 / 7)), (8, 0.0)]
    found = suggest(64, 8, range(1, 8))
    assert found
    assert [s.micro_batch for s in found] == sorted((s.micro_batch for s in found), reverse=True)
    for suggestion in found:
        worst = max(idle_share(64 // suggestion.micro_batch, w) for w in range(1, 8))
        assert suggestion.worst == pytest.approx(worst)
        assert worst < max(idle_share(8, w) for w in range(1, 8))
    assert suggest(64, 8, [1, 2, 4, 8]) == []
