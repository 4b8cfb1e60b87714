import pytest

from holdfast import formulas as f
from holdfast.errors import UsageError
from holdfast.tools.plan import renewal
from holdfast.tools.plan.renewal import Process, simulate

H = 3600.0


@pytest.mark.parametrize(
    ("mtbf_h", "recovery_s", "cost_s"), [(0.5, 600, 30), (3.09, 600, 30), (3.09, 1800, 120), (24.7, 60, 5)]
)
def test_it_agrees_with_the_exact_formula(mtbf_h, recovery_s, cost_s):
    interval_s = f.daly_interval_s(cost_s, mtbf_h * H)
    exact = f.goodput(mtbf_h * H, interval_s, cost_s, recovery_s)
    found = simulate(
        Process(
            work_s=10 * 86400.0,
            mtbf_s=mtbf_h * H,
            interval_s=interval_s,
            cost_s=cost_s,
            recoveries=((1.0, recovery_s),),
        ),
        2000,
    )
    assert found.goodput == pytest.approx(exact, abs=max(0.002, 4 * found.error))
    assert found.percentiles_s[0] < found.percentiles_s[1] < found.percentiles_s[2]


def test_two_kinds_of_recovery_are_their_mean():
    one = simulate(
        Process(work_s=5 * 86400.0, mtbf_s=20 * H, interval_s=600, cost_s=1, recoveries=((1.0, 300),)), 4000
    )
    two = simulate(
        Process(
            work_s=5 * 86400.0, mtbf_s=20 * H, interval_s=600, cost_s=1, recoveries=((0.5, 100), (0.5, 500))
        ),
        4000,
    )
    assert two.goodput == pytest.approx(one.goodput, abs=0.001)


def test_bursts_have_the_same_mean_and_more_spread():
    even = simulate(
        Process(work_s=20 * 86400.0, mtbf_s=20 * H, interval_s=600, cost_s=1, recoveries=((1.0, 1800),)), 2000
    )
    bursts = simulate(
        Process(
            work_s=20 * 86400.0, mtbf_s=20 * H, interval_s=600, cost_s=1, recoveries=((1.0, 1800),), shape=0.5
        ),
        2000,
    )
    assert bursts.percentiles_s[2] - bursts.percentiles_s[0] > 1.3 * (
        even.percentiles_s[2] - even.percentiles_s[0]
    )


def test_a_run_that_does_not_finish_says_so(monkeypatch):
    monkeypatch.setattr(renewal, "MAX_FAILURES", 1000)
    with pytest.raises(UsageError, match="does not finish"):
        simulate(Process(work_s=86400.0, mtbf_s=60, interval_s=600, cost_s=30, recoveries=((1.0, 600),)), 10)


def test_a_seed_is_one_result():
    process = Process(work_s=86400.0, mtbf_s=H, interval_s=600, cost_s=5, recoveries=((1.0, 60),))
    assert simulate(process, 100, 3) == simulate(process, 100, 3) != simulate(process, 100, 4)
