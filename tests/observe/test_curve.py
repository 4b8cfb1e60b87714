"""The picture of the loss."""

import math
import sys

import pytest

from holdfast.errors import UsageError
from holdfast.observe.curve import draw_curve
from reports import incident_of

STEPS = [(i, 5.0 + 0.2 * i, 1.8 + 3 * math.exp(-i / 40)) for i in range(150)]
PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def matplotlib():
    pytest.importorskip("matplotlib")


@pytest.mark.parametrize("count", [0, 1, 10, 30])
def test_it_draws_any_number_of_incidents(tmp_path, incident, count):
    incidents = [
        incident_of(incident | {"id": i + 1, "t_s": 6.0 + i, "at_step": 5 * i}) for i in range(count)
    ]
    draw_curve(STEPS, incidents, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


def test_it_draws_a_second_curve_and_unknown_times(tmp_path, incident):
    unknown = incident | {
        "t_s": None,
        "at_step": None,
        "stall_s": None,
        "full_strength_s": None,
        "fault": None,
    }
    draw_curve(STEPS, [incident_of(incident), incident_of(unknown | {"id": 2})], tmp_path / "a.png", STEPS)
    draw_curve(STEPS, [incident_of(incident), incident_of(unknown | {"id": 2})], tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(UsageError, match="no loss to draw"):
        draw_curve([], [], tmp_path / "loss.png")


def test_a_missing_folder_is_said(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        draw_curve(STEPS, [], tmp_path / "nowhere" / "loss.png")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'holdfast-train\[plot\]'"):
        draw_curve(STEPS, [], tmp_path / "loss.png")
