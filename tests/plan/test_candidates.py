import pytest

from holdfast.errors import UsageError
from holdfast.tools.plan import candidates as c
from holdfast.tools.plan.inputs import from_report, read
from reports import report_of

LLAMA = {"nodes": 2048, "gpu_hours": "21M", "rate": "0.0161%", "price": 2.5}


def test_the_parts_of_the_time_add_up():
    inputs = read(LLAMA)
    for strategy in c.STRATEGIES:
        way = c.evaluate(inputs, strategy, 1, True)
        parts = c.waterfall(inputs, way)
        assert sum(p.seconds for p in parts) == pytest.approx(way.wall_s)
        assert all(p.seconds >= 0 for p in parts)


def test_one_way_is_marked_and_it_is_the_cheapest():
    ways = c.candidates(read(LLAMA), trials=50)
    (best,) = [w for w in ways if w.best]
    assert best.cost == min(w.cost for w in ways)
    assert best.strategy == c.PEERS
    for way in ways:
        low, middle, high = way.percentiles_s
        assert low <= middle <= high
        assert middle == pytest.approx(way.wall_s, rel=0.03)


def test_sensitivity_is_to_the_rate():
    inputs = read(LLAMA)
    rows = c.sensitivity(inputs, c.evaluate(inputs, c.STORAGE, 0, True))
    shares = [r.chosen_goodput for r in rows]
    assert shares == sorted(shares, reverse=True)
    assert all(r.best_goodput >= r.chosen_goodput for r in rows)


def test_without_failures_only_saving_costs():
    way = c.evaluate(read(LLAMA | {"rate": 0}), c.PEERS, 0, True)
    assert way.goodput == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"nodes": -4}, "nodes must be at least 1 (got -4), for example 256"),
        ({"nodes": 0.5}, "nodes must be a whole number (got 0.5)"),
        ({"rate": 0.05}, "rate: 0.05 means that every node fails after 20.0 hours; if a percentage is meant, write 0.05%"),
        ({"rate": {"gpu": "-1%"}}, "rate.gpu: '-1%' is negative; for example 0.016%"),
        ({"detect": "90 minutes"}, "detect must be a time (got '90 minutes'), for example 90s, 15m"),
        ({"gpu_hours": 0}, "gpu_hours: 0 is zero; for example 10M"),
        ({"checkpoint_size": 840}, "checkpoint_size must be a size with a unit (got 840), for example 840GB"),
        ({"tokens": "15T"}, "gpu_hours and tokens cannot be combined"),
        ({"mtbf": "3h"}, "rate and mtbf cannot be combined"),
        ({"preset": "cloud"}, "preset must be one of self-managed"),
        ({"preset": "holdfast"}, "needs the report of a job"),
        ({"nodez": 4}, "unknown field 'nodez': did you mean 'nodes'?"),
        ({"price": True}, "price must be a number (got True)"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_its_name_with_an_example(fields, said):
    with pytest.raises(UsageError) as refused:
        read(LLAMA | fields)
    assert said in str(refused.value)


def test_what_is_missing_is_asked_for():
    with pytest.raises(UsageError, match="nodes is missing; for example nodes: 256"):
        read({})
    with pytest.raises(UsageError, match="nodes is missing; for example --nodes 256"):
        read({}, as_flags=True)
    with pytest.raises(
        UsageError, match="specify --gpu-hours 10M, or --tokens 15T and --tokens-per-gpu-s 400"
    ):
        read({"nodes": 4}, as_flags=True)
    with pytest.raises(UsageError, match="specify gpu_hours: 10M, or tokens"):
        read({"nodes": 4, "rate": 0})
    with pytest.raises(UsageError, match="rate is missing"):
        read({"nodes": 4, "gpu_hours": 5})


def test_failures_that_come_faster_than_any_recovery():
    with pytest.raises(
        UsageError, match=r"does not finish: a failure comes every 30 s \(MTBF of 2048 nodes\)"
    ):
        c.candidates(read({"nodes": 2048, "gpu_hours": "21M", "mtbf": "30s"}))


def test_times_of_ones_own_report():
    times = from_report(
        report_of({"job": "x", "incidents": [{"stall_s": 2.0, "detect_s": 0.5, "replace_s": 9.0}]})
    )
    assert (times.detect_s, times.peer_s, times.replace_s) == (0.5, 1.5, 9.0)
    assert "medians of 1 incident" in times.source
    spare = from_report(report_of({"incidents": [{"stall_s": 2.0, "replace_s": 0.1, "rung": "spare"}]}))
    assert spare.replace_s == 900
    assert "no node was replaced without a spare" in spare.source
    with pytest.raises(UsageError, match="there is no incident in it that training survived"):
        from_report(report_of({}))


def test_tokens_and_throughput():
    inputs = read({"nodes": 100, "tokens": "3.6T", "tokens_per_gpu_s": 1000, "rate": 0})
    assert inputs.gpu_hours == pytest.approx(1e6)
    assert inputs.work_s == pytest.approx(1e6 / 800 * 3600)


def test_without_numpy_there_are_no_percentiles_and_the_rest_is_there(monkeypatch):
    monkeypatch.setattr(c, "available", lambda: False)
    ways = c.candidates(read(LLAMA))
    assert any(w.best for w in ways)
    assert all(w.percentiles_s == () for w in ways)
