import json

import pytest

from holdfast.errors import UsageError
from holdfast.tools.simulate.scenario import read
from holdfast.tools.simulate.trace import parse
from holdfast.tools.simulate.trial import run

SPOT = json.dumps({"metadata": {"gap_seconds": 600}, "data": [4] * 6 + [2] * 6 + [4] * 30})
DATED = "2021-12-11, 11:00:00, 4\n2021-12-11, 12:00:00, 2\n2021-12-11, 13:00:00, 4\n2021-12-11, 18:00:00, 4\n"
OWN = "t_s,node,event\n0,a,up\n0,b,up\n0,c,up\n0,d,up\n3600,d,down\n3600,c,down\n7200,e,up\n7200,f,up\n25200,f,up\n"


@pytest.mark.parametrize("text", [SPOT, DATED, OWN])
def test_formats_that_say_the_same(text):
    trace = parse("x", text)
    assert trace.most == 4
    downs = [c.t_s for c in trace.changes if not c.up]
    assert downs == [3600.0, 3600.0]
    assert [c.t_s for c in trace.changes if c.up][:6] == [0, 0, 0, 0, 7200, 7200]


@pytest.mark.parametrize("text", [SPOT, DATED, OWN])
def test_an_elastic_job_trains_on_what_is_there(text):
    trace = parse("x", text)
    asked = read({"nodes": 4, "min_nodes": 1, "days": trace.ends_s / 86400, "rate": 0, "start": "10s"})
    found = run(asked, 0, trace=trace)
    assert found.done < 1
    assert found.spent.smaller == pytest.approx(1800, rel=0.05)  # an hour on half of the nodes
    assert found.wall_s == pytest.approx(trace.ends_s, rel=0.01)
    assert found.given_up == []


def test_nobody_is_left_for_a_while():
    trace = parse("x", json.dumps({"metadata": {"gap_seconds": 3600}, "data": [2, 0, 2, 2]}))
    asked = read({"nodes": 2, "min_nodes": 1, "days": 1, "rate": 0, "start": "10s"})
    found = run(asked, 0, trace=trace)
    assert found.spent.stalled + found.spent.given_up == pytest.approx(3600, rel=0.3)
    assert found.spent.training == pytest.approx(
        3 * 3600 - 1816, abs=400
    )  # half an hour since the checkpoint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "trace x is empty; for example"),
        ("time,node\n1,2\n", "the head is time,node; it must be t_s,node,event"),
        ("t_s,node,event\n0,a,up\nsoon,b,up\n", "trace x, line 3: t_s 'soon' is no number of seconds"),
        ("t_s,node,event\n0,a,on\n", "event 'on' is neither up nor down"),
        ("t_s,node,event\n9,a,up\n5,b,up\n", "times must not be negative, nor go back"),
        ('{"data": [1]}', "metadata.gap_seconds and data are missing"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds: 0 is not positive"),
        ('[{"t": 1}]', 'for example {"t_s": 60, "node": "a", "up": true}'),
        ("2021-12-11; 4\n", "trace x, line 1: '2021-12-11; 4' is not like"),
        ("[", "trace x is no JSON"),
        ('{"metadata": {"gap_seconds": 5}, "data": [0, 0]}', "no node is ever there"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(text, said):
    with pytest.raises(UsageError) as refused:
        parse("x", text)
    assert said in str(refused.value)
