"""A trace keeps the rules of its format, whatever the ledger says, and is bounded."""

from __future__ import annotations

import random
from typing import Any

import pytest

from holdfast.observe import traces as module
from holdfast.observe.traces import chrome_trace, phases, whole

Event = dict[str, Any]


def entry(seq: int, t_s: float, kind: str, /, **fields: Any) -> Event:
    return {"seq": seq, "t_s": t_s, "utc": "", "kind": kind, "fields": fields}


def incident(number: int, t_s: float, node: str | None, **more: Any) -> Event:
    facts = {"id": number, "t_s": t_s, "node": node, "cause": "killed", "ranks": [1], "fault": None}
    return facts | more


WHOLE = {
    "detect_s": 0.5, "decide_s": 0.25, "replace_s": 1.0, "join_s": 0.5, "restore_s": 0.25, "first_step_s": 1.0,
    "full_strength_s": 5.0, "stall_s": 5.0,
}  # fmt: skip


def job() -> list[Event]:
    """Two nodes; one is lost in step 10, and its place is taken."""
    return [
        entry(1, 0.0, "node-joined", node="n0", host="a", slots=1, place="rack2"),
        entry(2, 0.0, "node-joined", node="n1", host="b", slots=1, place="rack1"),
        entry(3, 1.0, "worker-started", worker="n0.0#1", node="n0", pid=1, log="x"),
        entry(4, 1.0, "worker-started", worker="n1.0#2", node="n1", pid=2, log="x"),
        entry(5, 3.0, "formed", generation=1, start=0, world=2, workers=["n0.0#1", "n1.0#2"], source="fresh"),
        entry(6, 10.5, "node-lost", node="n1", cause="gone"),
        entry(7, 10.5, "broke", generation=1, reason="n1 is lost", step=10),
        entry(8, 10.5, "incident-opened", **incident(1, 10.0, "n1")),
        entry(9, 11.0, "formed", generation=2, start=10, world=1, workers=["n0.0#1"], source="live"),
        entry(10, 15.0, "incident-closed", **incident(1, 10.0, "n1", **WHOLE)),
    ]


def check(trace: dict[str, Any]) -> None:
    """The rules: slices of a thread are nested, and arrows begin and end in slices, in the order of time."""
    events = trace["traceEvents"]
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for e in events:
        assert isinstance(e.get("ts", 0), int)
        if e["ph"] == "X":
            assert e["dur"] >= 0
            threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert threads.keys() <= named
    for slices in threads.values():
        open_until: list[int] = []
        for begin, end in sorted(slices, key=lambda x: (x[0], -x[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "half of a slice is within another"
            open_until.append(end)
    flows: dict[int, list[Event]] = {}
    for e in events:
        if e["ph"] in "stf":
            flows.setdefault(e["id"], []).append(e)
            assert any(begin <= e["ts"] <= end for begin, end in threads[e["pid"], e["tid"]])
    for arrow in flows.values():
        assert (arrow[0]["ph"], arrow[-1]["ph"]) == ("s", "f")
        assert [e["ts"] for e in arrow] == sorted(e["ts"] for e in arrow)


def test_a_fault_leads_to_a_decision_and_to_the_first_step():
    trace = chrome_trace("job", job(), [(3.0 + i, 2) for i in range(8)])
    check(trace)
    events = trace["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["coordinator of job", "n1", "n0"]  # by rack
    spans = {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] >= 10}
    assert spans["detect"] == (10_000_000, 500_000)
    assert spans["first_step"] == (14_000_000, 1_000_000)
    assert [e["ph"] for e in events if e["ph"] in "stf"] == ["s", "t", "f"]
    assert [e["args"]["world size"] for e in events if e["name"] == "world size"] == [2, 0, 1, 0]
    # A worker of a lost node ends with it.
    [lost] = [e for e in events if e["name"] == "n1.0#2"]
    assert lost["ts"] + lost["dur"] == 10_500_000


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST", 20)
    trace = chrome_trace("job", job(), [(float(i), 2) for i in range(10_000)])
    assert len(trace["traceEvents"]) == 20
    assert trace["otherData"]["left_out"] > 500
    monkeypatch.undo()
    trace = chrome_trace("job", job(), [(float(i), 2) for i in range(100_000)])
    assert sum(e["name"] == "steps per second" for e in trace["traceEvents"]) <= module.POINTS


@pytest.mark.parametrize("seed", range(20))
def test_phases_never_overlap(seed: int):
    rng = random.Random(seed)
    entries = [*job()]
    for number in range(2, 12):
        told = {name: rng.choice((None, 0.0, rng.random() * 3)) for name in WHOLE}
        told["stall_s"] = told["stall_s"] or told["full_strength_s"]
        facts = incident(number, 10.0 + rng.random() * 5, rng.choice(("n0", "n1", None)), **told)
        entries.append(entry(20 + number, 20.0, "incident-closed", **facts))
        span = whole(facts)
        assert span is not None
        at_s = span.begin_s
        for phase in phases(facts):
            assert at_s <= phase.begin_s < phase.end_s <= span.end_s
            at_s = phase.end_s
    check(chrome_trace("job", entries, []))
