import io

import pytest

from holdfast.tools.plan import candidates
from holdfast.tools.plan import candidates as c
from holdfast.tools.plan.inputs import read

INPUTS = read({"nodes": 256, "gpu_hours": "1M", "rate": "0.02%"})


def test_the_interval_curve_has_its_optimum_at_dalys():
    curves = candidates.goodput_by_interval(INPUTS, 600)
    for curve, best in zip(curves[::2], curves[1::2], strict=True):
        assert max(y for _, y in curve.points) == pytest.approx(best.points[0][1], abs=1e-4)


def test_goodput_falls_with_size():
    for curve in candidates.goodput_by_size(INPUTS, 0, True):
        values = [y for _, y in curve.points]
        assert values == sorted(values, reverse=True)


def test_a_terminal_shows_every_curve():
    from holdfast.tools.plots import print_curves

    said = io.StringIO()
    print_curves(said, "cost", candidates.cost_by_spares(INPUTS, 4), "spares")
    assert all(
        name in said.getvalue()
        for name in ("restart from storage, wait", "peers in memory, continue with fewer nodes")
    )
    assert "4 spares" in said.getvalue()


def test_pictures_as_files(tmp_path):
    pytest.importorskip("matplotlib")
    from holdfast.tools.plots import draw_curves, draw_waterfall

    draw_curves(tmp_path / "a" / "x.svg", "x", candidates.cost_by_spares(INPUTS, 2), "spares", "cost")
    way = c.evaluate(INPUTS, c.PEERS, 0, True)
    draw_waterfall(tmp_path / "y.png", "y", [(p.part, p.seconds) for p in c.waterfall(INPUTS, way)], "s")
    assert (tmp_path / "a" / "x.svg").read_text().startswith("<?xml")
    assert (tmp_path / "y.png").read_bytes().startswith(b"\x89PNG")
