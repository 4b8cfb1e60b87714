"""`holdfast plan placement`: shares that can be counted by hand, refusals, and a cluster of 4,096 nodes."""

import json

import pytest
from typer.testing import CliRunner

from counted import lines_of
from holdfast.cli.placement import crossings
from holdfast.cli.plan import app
from holdfast.errors import UsageError
from holdfast.tools.plan.crossing import crossing_share


def striped(halls: int, racks: int, nodes: int) -> dict[str, tuple[str, ...]]:
    """Names that go around the racks: n0 in the first, n1 in the second."""
    total = halls * racks
    return {f"n{i}": (f"h{i % total // racks}", f"r{i % racks}") for i in range(total * nodes)}


def test_hops_are_counted():
    ring = [("a", "1"), ("a", "2"), ("b", "3"), ("b", "4")]
    assert crossing_share([ring], 1) == 0.5
    assert crossing_share([ring], 2) == 1.0
    assert crossing_share([ring[:2], ring[2:]], 1) == 0.0
    assert crossing_share([ring[:1]], 1) == 0.0


def test_ranks_that_follow_the_path_cross_as_rarely_as_can_be():
    hall, rack = crossings(striped(2, 2, 4), 16, 1, 1, 1)
    assert (hall.places, rack.places) == (2, 4)
    assert hall.gradients == 2 / 16
    assert rack.gradients == 4 / 16
    assert rack.gradients_unplaced == 1.0
    assert hall.copies == rack.copies == 1.0
    assert hall.shards is None


def test_replicas_stay_within_a_rack():
    hall, rack = crossings(striped(2, 2, 4), 16, 2, 8, 1)
    assert hall.shards == rack.shards == 0.0
    # One replica in each rack, so each hop of the gradients leaves it.
    assert rack.gradients == 1.0
    assert hall.gradients == 0.5
    assert rack.shards_unplaced is not None
    assert rack.shards_unplaced > 0.4


def test_what_is_left_over_in_racks_makes_replicas_across_them():
    _, rack = crossings(striped(1, 2, 3), 6, 1, 2, 1)
    assert rack.shards == pytest.approx(2 / 6)  # one of three pairs


def test_eight_times_as_many_nodes_cost_about_eight_times_as_much():
    small, large = (
        lines_of(lambda racks=racks: crossings(striped(4, racks, 8), 32 * racks, 8, 64, 1))
        for racks in (2, 16)
    )
    assert large < 12 * small


def test_4096_nodes_of_8_workers():
    found = crossings(striped(4, 32, 32), 4096, 8, 64, 1)
    assert [c.places for c in found] == [4, 128]
    assert found[1].shards == 0.0
    assert found[0].copies == 1.0


def test_the_command(tmp_path):
    file = tmp_path / "topology"
    file.write_text("a[1-4] h1/r1\nb[1-4] h1/r2\n")
    shown = CliRunner().invoke(app, ["placement", "--topology", str(file)], catch_exceptions=False)
    assert "copies elsewhere" in shown.stdout
    assert "25.0%" in shown.stdout
    told = CliRunner().invoke(app, ["placement", "--topology", str(file), "--json"], catch_exceptions=False)
    assert [c["places"] for c in json.loads(told.stdout)] == [1, 2]


@pytest.mark.parametrize(
    ("options", "said"), [(["--nnodes", "9"], "names only 8 hosts"), (["--shards", "9"], "8 workers")]
)
def test_what_cannot_be_is_refused(tmp_path, options, said):
    file = tmp_path / "topology"
    file.write_text("a[1-8] h1/r1\n")
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(app, ["placement", "--topology", str(file), *options], catch_exceptions=False)
