"""Traces of incidents: the same ids whenever they are made, and a collector's own schema understands them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from servers import Heard, listener

import holdfast
from holdfast.coordinator.service.store import LedgerEntry, News, NewStep, StepRow
from holdfast.errors import UsageError
from holdfast.observe.traces import span_id, trace_id
from holdfast.tools.tracking import otlp
from holdfast.tools.tracking.follower import tracker
from holdfast.tools.tracking.otlp import Otlp
from holdfast.tools.tracking.position import take_in

BEGAN = "2026-01-02T03:04:05.000+00:00"
LEDGER_S = 1767323045.0


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (otlp.ENDPOINT, otlp.TRACES_ENDPOINT, otlp.HEADERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(otlp.time, "sleep", lambda seconds: None)


@pytest.fixture
def collector() -> Iterator[Heard]:
    with listener() as heard:
        yield heard


def facts(number: int, t_s: float, **more: Any) -> dict[str, Any]:
    known = {"id": number, "t_s": t_s, "node": "n1", "cause": "killed", "cause_kind": "process", "ranks": [1]}
    return {**known, "earlier_stalls": 0, "detect_s": 0.5, **more}


DONE = {"decide_s": 0.25, "first_step_s": 1.0, "stall_s": 3.0, "full_strength_s": 4.0, "lost_steps": 0}


def job() -> list[LedgerEntry]:
    told = [
        facts(1, 1.0),
        {"incident": 1, "node": "n1", "text": "swap it"},
        facts(1, 1.0, **DONE),
        facts(2, 4.0),
        {"outcome": "stopped", "reason": None, "step": 9},
    ]
    kinds = ["incident-opened", "asked", "incident-closed", "incident-opened", "ended"]
    return [
        LedgerEntry(seq=i, t_s=float(i), utc=BEGAN, kind=kind, fields=fields)
        for i, (kind, fields) in enumerate(zip(kinds, told, strict=True), 1)
    ]


def tell(to: Otlp, *entries: LedgerEntry) -> None:
    news = News(ledger=BEGAN, began_utc_s=LEDGER_S, events=list(entries), steps=[], more=False)
    to.write(take_in(to.position, news))


def spans(heard: Heard) -> list[dict[str, Any]]:
    return [
        span
        for body in heard.bodies
        for resource in json.loads(body)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def test_one_trace_for_each_incident(tmp_path: Path, collector: Heard) -> None:
    for piece in job():  # each in a process of its own
        with closing(tracker(f"otlp:{collector.url}", tmp_path)) as to:
            tell(to, piece)
    first = [s for s in spans(collector) if s["traceId"] == trace_id(BEGAN, 1)]
    assert [s["name"] for s in first] == [
        "holdfast.incident",
        "holdfast.detect",
        "holdfast.decide",
        "holdfast.first_step",
    ]
    root = first[0]
    assert {s["parentSpanId"] for s in first[1:]} == {root["spanId"]}
    assert (root["startTimeUnixNano"], root["endTimeUnixNano"]) == (
        "1767323046000000000",
        "1767323050000000000",
    )
    assert [e["name"] for e in root["events"]] == ["asked"]
    assert root["status"] == {"code": otlp.OK}
    # The second was still open as the job ended.
    [second, _] = [s for s in spans(collector) if s["traceId"] == trace_id(BEGAN, 2)]
    assert second["status"] == {"code": otlp.ERROR}
    assert second["links"] == [{"traceId": root["traceId"], "spanId": root["spanId"]}]
    assert len({s["spanId"] for s in spans(collector)}) == len(spans(collector))


def test_killed_before_its_position_is_kept_it_sends_the_same_again(tmp_path: Path, collector: Heard) -> None:
    with closing(Otlp(collector.url, tmp_path)) as to:
        to._kept.replace = lambda value: None  # type: ignore[method-assign]
        tell(to, *job())
    with closing(Otlp(collector.url, tmp_path)) as to:
        tell(to, *job())
    assert len(collector.bodies) == 2
    assert collector.bodies[0] == collector.bodies[1]


def test_headers_and_endpoint_are_opentelemetrys(tmp_path, collector, monkeypatch):
    monkeypatch.setenv(otlp.ENDPOINT, collector.url)
    monkeypatch.setenv(otlp.HEADERS, "authorization=Basic%20abc, x-tenant=a")
    with closing(Otlp("", tmp_path)) as to:
        tell(to, *job())
    assert collector.headers[0]["authorization"] == "Basic abc"
    assert collector.headers[0]["x-tenant"] == "a"
    assert not any("abc" in path.read_text() for path in tmp_path.rglob("*.position"))


def test_a_collector_that_takes_nothing_keeps_the_position(tmp_path: Path, collector: Heard) -> None:
    collector.status = 503
    with closing(Otlp(collector.url, tmp_path)) as to, pytest.raises(UsageError, match="answers 503"):
        tell(to, *job())
    assert len(collector.bodies) == otlp.ATTEMPTS
    collector.status = 200
    with closing(Otlp(collector.url, tmp_path)) as to:
        assert to.position.seq == 0
        tell(to, *job())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "no endpoint was given"),
        ("https://me:secret@x", "a password"),
        ("grpc://x", "http:// or https://"),
    ],
)
def test_what_is_refused(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tracker(f"otlp:{url}", tmp_path)
    assert not list(tmp_path.iterdir())


def request_of(body: bytes) -> Any:
    """What was sent, as a collector's own schema reads it."""
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    def as_protobuf_wants(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: base64.b64encode(bytes.fromhex(v)).decode()
                if k in ("traceId", "spanId", "parentSpanId")
                else as_protobuf_wants(v)
                for k, v in value.items()
            }
        return [as_protobuf_wants(x) for x in value] if isinstance(value, list) else value

    return json_format.ParseDict(as_protobuf_wants(json.loads(body)), ExportTraceServiceRequest())


@pytest.mark.look
def test_opentelemetrys_own_schema_has_every_field(tmp_path: Path, collector: Heard) -> None:
    """JSON's ids are hexadecimal there, and protobuf's mapping wants base64: that is the only difference."""
    with closing(Otlp(collector.url, tmp_path)) as to:
        tell(to, *job())
    [body] = collector.bodies
    request = request_of(body)
    [scope] = request.resource_spans[0].scope_spans
    root = scope.spans[0]
    assert (root.trace_id.hex(), len(root.trace_id), len(root.span_id)) == (trace_id(BEGAN, 1), 16, 8)
    assert root.end_time_unix_nano - root.start_time_unix_nano == 4_000_000_000
    assert {a.key: a.value for a in root.attributes}["holdfast.incident.id"].int_value == 1
    assert [s.name for s in scope.spans][:2] == ["holdfast.incident", "holdfast.detect"]


@pytest.mark.look
def test_the_official_sdk_says_the_same_of_the_same_incident(tmp_path: Path, collector: Heard) -> None:
    """Built with OpenTelemetry's own classes and encoded by its exporter, from what happened and not from what was sent."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    with closing(Otlp(collector.url, tmp_path)) as to:
        tell(to, *job())
    ours = request_of(collector.bodies[0])
    [said] = [
        a["value"]["stringValue"]
        for s in spans(collector)
        for e in s.get("events", [])
        for a in e["attributes"]
    ]
    assert "swap it" in said
    resource = Resource(
        {"service.name": "holdfast", "service.namespace": tmp_path.name, "service.instance.id": BEGAN}
    )
    scope = InstrumentationScope("holdfast", holdfast.__version__)

    def context(number: int, name: str) -> SpanContext:
        ids = int(trace_id(BEGAN, number), 16), int(span_id(BEGAN, number, name), 16)
        return SpanContext(*ids, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def span(name: str, number: int, own: str, begin_s: float, end_s: float, **more: Any) -> ReadableSpan:
        times = {"start_time": nano(begin_s), "end_time": nano(end_s)}
        known = {"kind": SpanKind.INTERNAL, "resource": resource, "instrumentation_scope": scope, **times}
        return ReadableSpan(name, context(number, own), **known, **more)

    def phase(name: str, number: int, begin_s: float, end_s: float) -> ReadableSpan:
        parent = context(number, "incident 0")
        plain = {"is_goodput_span": False}
        return span(f"holdfast.{name}", number, f"{name} 0", begin_s, end_s, parent=parent, attributes=plain)

    known = {
        "error.type": "process",
        "is_goodput_span": False,
        "holdfast.cause": "killed",
        "holdfast.node": "n1",
    }
    first = known | {
        "holdfast.incident.id": 1,
        "holdfast.ranks": [1],
        "holdfast.lost_steps": 0,
        "holdfast.stall_s": 3.0,
    }
    second = known | {"holdfast.incident.id": 2, "holdfast.ranks": [1]}
    theirs = encode_spans(
        [
            span(
                "holdfast.incident", 1, "incident 0", 1.0, 5.0, attributes=first, status=Status(StatusCode.OK),
                events=[Event("asked", {"holdfast.text": said}, nano(2.0))],
            ),
            phase("detect", 1, 1.0, 1.5),
            phase("decide", 1, 1.5, 1.75),
            phase("first_step", 1, 1.75, 5.0),
            span(
                "holdfast.incident", 2, "incident 0", 4.0, 4.5, attributes=second, status=Status(StatusCode.ERROR),
                links=[Link(context(1, "incident 0"))],
            ),
            phase("detect", 2, 4.0, 4.5),
        ]
    )  # fmt: skip
    [scope_spans] = ours.resource_spans[0].scope_spans
    others = [
        s for s in scope_spans.spans if s.trace_id.hex() not in (trace_id(BEGAN, 1), trace_id(BEGAN, 2))
    ]
    for start in others:  # the job's start, which has a test of its own
        scope_spans.spans.remove(start)
    [[one, *_], [other, *_]] = [without_flags(request)["resourceSpans"] for request in (ours, theirs)]
    assert one["resource"] == other["resource"]
    [told], [expected] = one["scopeSpans"], other["scopeSpans"]
    assert told["scope"] == expected["scope"]
    for said_span, wanted in zip(told["spans"], expected["spans"], strict=True):
        assert said_span == wanted, wanted["name"]


def nano(at_s: float) -> int:
    return round((LEDGER_S + at_s) * 1e9)


def without_flags(request: Any) -> dict[str, Any]:
    """As plain values. Flags say how a trace was sampled, which is of no use here; attributes have no order, and an empty status is
    one that is not set."""
    from google.protobuf import json_format

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {k: plain(v) for k, v in value.items() if k != "flags" and v != {}}
            if "attributes" in kept:
                kept["attributes"].sort(key=lambda one: one["key"])
            return kept
        return [plain(x) for x in value] if isinstance(value, list) else value

    found: dict[str, Any] = plain(json_format.MessageToDict(request))
    return found


def new_step(step: int, t_s: float) -> NewStep:
    row = StepRow(step=step, t_s=t_s, loss=1.0, took_s=0.1, generation=1, world=1)
    return NewStep(place=step + 1, made_in=1, row=row, figures={})


def entry(seq: int, kind: str, **fields: Any) -> LedgerEntry:
    return LedgerEntry(seq=seq, t_s=float(seq), utc=BEGAN, kind=kind, fields=fields)


def test_a_start_and_a_checkpoint_have_a_trace_each(tmp_path: Path, collector: Heard) -> None:
    began = [
        entry(1, "node-joined"),
        entry(2, "worker-started"),
        entry(3, "worker-started"),
        entry(4, "formed"),
    ]
    saved = entry(9, "saved", step=7, url="/scratch", took_s=2.5)
    pieces: list[tuple[list[LedgerEntry], list[NewStep]]] = [
        (began[:2], []), (began[2:], []), ([], [new_step(0, 6.0)]), ([saved], [new_step(1, 7.0)]),
        ([entry(10, "saved", step=8, url="/own")], []),  # by a worker itself: nobody measured it
    ]  # fmt: skip
    for events, steps in pieces:  # each in a process of its own
        with closing(tracker(f"otlp:{collector.url}", tmp_path)) as to:
            news = News(ledger=BEGAN, began_utc_s=LEDGER_S, events=events, steps=steps, more=False)
            to.write(take_in(to.position, news))
    seen = {
        s["name"]: tuple(
            round(int(s[k]) / 1e9 - LEDGER_S, 3) for k in ("startTimeUnixNano", "endTimeUnixNano")
        )
        for s in spans(collector)
    }
    assert seen == {
        "holdfast.start": (1, 6), "holdfast.nodes": (1, 2), "holdfast.build": (2, 4), "holdfast.first_step": (4, 6),
        "holdfast.checkpoint": (6.5, 9),
    }  # fmt: skip
    assert len(spans(collector)) == len(seen)
    assert len({s["traceId"] for s in spans(collector)}) == 2


def test_a_start_that_never_made_a_step_says_so(tmp_path: Path, collector: Heard) -> None:
    with closing(tracker(f"otlp:{collector.url}", tmp_path)) as to:
        tell(to, entry(1, "node-joined"), entry(5, "ended", outcome="failed", reason=None, step=0))
    root, nodes = spans(collector)
    assert (root["name"], root["status"]["code"], nodes["name"]) == ("holdfast.start", 2, "holdfast.nodes")
