import pytest

from holdfast.errors import UsageError
from holdfast.tools.plan.calibration import PastRun, calibrate, fields, why_no_rate
from holdfast.tools.plan.candidates import candidates
from holdfast.tools.plan.inputs import read
from reports import report_of


def report(incidents, hours=100.0, world=16, **more):
    told = {
        "world": {"history": [[0.0, world]]},
        "goodput": {"wall_s": hours * 3600},
        "steps": {"median_s": 2.5},
        "incidents": incidents,
    }
    return report_of(told | more)


def incident(kind="node", injected=False, **times):
    return {"cause_kind": kind, "injected": injected, "detect_s": None, "stall_s": 12.0} | times


def test_rates_have_confidence_intervals_and_few_events_say_so():
    found = calibrate(
        [PastRun(report([incident() for _ in range(4)]), 8), PastRun(report([incident("hang")]), 8)]
    )
    assert found.node_hours == pytest.approx(2 * 100 * 2)
    by_kind = {r.kind: r for r in found.rates}
    assert (by_kind["node"].failures, by_kind["hang"].failures, by_kind["all"].failures) == (4, 1, 5)
    every = by_kind["all"]
    assert every.rate == pytest.approx(5 / 400)
    assert every.low < every.rate < every.high
    assert every.few
    assert not calibrate([PastRun(report([incident()] * 12))]).rates[-1].few


def test_injected_faults_count_for_times_only():
    found = calibrate([PastRun(report([incident(injected=True, detect_s=0.5)]))])
    assert found.injected == 1
    assert found.rates[-1].failures == 0
    assert {t.phase: t.median_s for t in found.times} == {"detect_s": 0.5, "stall_s": 12.0}
    assert found.rates[-1].high > 0


def test_what_it_says_is_input_for_the_next_plan():
    made = fields(calibrate([PastRun(report([incident(detect_s=0.5, replace_s=60)] * 3, hours=5000))]))
    assert made["peer"] == "11.500s"
    inputs = read({"nodes": 64, "gpu_hours": "100k"} | made)
    assert inputs.rate == pytest.approx(3 / (5000 * 16), rel=1e-3)
    assert (inputs.times.detect_s, inputs.times.peer_s, inputs.step_s) == (0.5, 11.5, 2.5)
    assert any(c.best for c in candidates(inputs, trials=20))


def test_no_rate_is_said_where_none_is_known():
    short = calibrate([PastRun(report([], hours=0.001))])
    assert "rate" not in fields(short)
    assert why_no_rate(short) == "no failure in 0.0 node-hours"
    often = calibrate([PastRun(report([incident()], hours=0.01))])
    assert "rate" not in fields(often)
    assert why_no_rate(often) == "625% per node-hour is not a plausible rate for a cluster"
    seldom = calibrate([PastRun(report([incident()]))])
    assert (fields(seldom)["rate"], why_no_rate(seldom)) == ("0.062500%", "")


def test_what_the_wall_time_went_into():
    told = {"classes": {"start": 10.0, "productive": 80.0, "restart": 10.0}, "productive_s": 80.0}
    more = {"classes": {"start": 20.0, "productive": 280.0}, "productive_s": 280.0}
    runs = [
        report([], goodput={"wall_s": 100.0} | told),
        report([], goodput={"wall_s": 300.0} | more),
    ]
    of_before = report([])  # an older version's, without classes
    found = calibrate([PastRun(r) for r in (*runs, of_before)])
    assert found.spent_s == {"start": 30.0, "productive": 360.0, "restart": 10.0}
    assert found.goodput == pytest.approx(0.9)
    untold = {"wall_s": 50.0, "classes": {"computed": 50.0}, "productive_s": None}
    found = calibrate([PastRun(runs[0]), PastRun(report([], goodput=untold))])
    assert (found.spent_s["computed"], found.goodput) == (50.0, None)
    assert (calibrate([PastRun(of_before)]).spent_s, calibrate([PastRun(of_before)]).goodput) == ({}, None)


def test_nothing_to_learn_from():
    with pytest.raises(UsageError, match="these runs have no duration"):
        calibrate([PastRun(report_of({}))])
