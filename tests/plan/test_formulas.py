import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import formulas as f

H = 3600.0


def test_the_exact_form():
    """Monte Carlo of the same model, recovery 600 s, cost 30 s, Daly's interval."""
    for mtbf_h, simulated in [(3.09, 0.8796), (0.5, 0.594)]:
        asked = mtbf_h * H, f.daly_interval_s(30, mtbf_h * H), 30, 600
        assert f.goodput(*asked) == pytest.approx(simulated, abs=1e-3)


@given(st.floats(0.1, 600), st.floats(60, 1e6), st.floats(0.3, 3))
def test_no_interval_is_better_than_dalys_by_more_than_a_little(cost_s, mtbf_s, factor):
    if cost_s > mtbf_s / 2:
        return  # where saving costs as much as failing, the estimate is rough and little depends on it
    best = f.daly_interval_s(cost_s, mtbf_s)
    other = f.goodput(mtbf_s, best * factor, cost_s, 60)
    assert f.goodput(mtbf_s, best, cost_s, 60) >= other * 0.99


def test_limits():
    assert f.goodput(math.inf, 3600, 36, 600) == pytest.approx(1 / 1.01)
    assert f.goodput(H, 0, 0, 0) == 1.0
    assert f.run_time_s(H, 1.0, 3600, 1, 1) == math.inf
    assert f.goodput(1.0, 3600, 1, 1) == 0.0
    assert f.daly_interval_s(0, H) == 0.0
    assert f.daly_interval_s(3 * H, H) == H
    assert f.young_interval_s(10, 2000) == 200


def test_confidence_intervals_of_rates():
    """Garwood's tables: 4 events give 1.09 to 10.24, none gives 0 to 3.69."""
    assert f.rate_interval(4, 1.0) == (pytest.approx(1.0899, abs=1e-3), pytest.approx(10.2416, abs=1e-3))
    assert f.rate_interval(0, 1.0) == (0.0, pytest.approx(3.6889, abs=1e-3))
    low, high = f.rate_interval(4, 55 * 228)
    assert (100 * low, 100 * high) == (pytest.approx(0.0087, abs=1e-4), pytest.approx(0.0817, abs=2e-4))
    low, high = f.rate_interval(400, 1.0)
    assert (low, high) == (pytest.approx(361.8, abs=0.5), pytest.approx(441.2, abs=0.5))


def test_spares():
    assert f.spare_free(1, 0.0) == 1.0
    assert f.spare_free(0, 1.0) == 0.0
    assert f.spare_free(1, 1.0) == pytest.approx(math.exp(-1))


def test_days_and_money():
    assert f.productive_days(6.5e6, 256 * 8) == pytest.approx(132.24, abs=0.01)
    assert f.cost(104, 2048, 5) == 25559040
    assert f.mtbf_hours(8, 0) == math.inf
