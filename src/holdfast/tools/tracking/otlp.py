"""`otlp:URL`: a trace for each incident, start and checkpoint, to an OpenTelemetry collector, as OTLP over HTTP in JSON.

A trace is made from the ledger when its incident is over: a span that is open across a fault would be lost with its
process. Ids are derived from the ledger's name and the incident's number, so sending it again gives the same trace.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec

import holdfast
from holdfast.coordinator.service.store import LedgerEntry, NewStep
from holdfast.errors import UsageError
from holdfast.observe.event_text import event_line
from holdfast.observe.traces import Span, phases, span_id, trace_id, whole
from holdfast.protocol.ledger import ABOUT_INCIDENTS, FACTS, add_incident
from holdfast.tools.tracking.base import FileTracker, OpenIncidents
from holdfast.tools.tracking.position import Batch

_log = logging.getLogger(__name__)
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
ANSWER_S = 10.0
ATTEMPTS = 4
APART_S = 1.0
"""Pause after the first attempt, in seconds; doubled after each further one."""
MOST_OPEN = 64
"""Number of incidents whose facts are kept until they close; beyond it, those that have been open for longest are
dropped."""
MOST_EVENTS = 16
MOST_NODES = 256
TEXT_CHARS = 200
_OVER = ("incident-closed", "incident-settled")
_ABOUT = ("finding", "verdict", "incident-joined", "incident-explained", "asked", "repairing", "repaired")
OK, ERROR = 1, 2
INTERNAL = 1
"""Kind of the spans."""
START = "start"
"""Takes the place of the number of an incident in the ids of a start's trace."""
_MARKS = {"worker-started": "workers", "formed": "formed", "started": "formed"}
_SENT = "sent"


class Trace(NamedTuple):
    """A trace: its root, its parts, and its attributes."""

    of: str
    """The value from which its ids are derived, together with the ledger's name."""
    root: Span
    parts: tuple[Span, ...]
    attributes: Mapping[str, Any]
    is_good: bool = True


def hear(marks: Mapping[str, float], part: LedgerEntry | NewStep) -> tuple[dict[str, float], Trace | None]:
    """Updates what is known of the start with one more part of the ledger; also returns its trace after its first step.

    marks: the times of the first events of each kind, in seconds since the job's start. A start that ended before its first
    step has a trace that is marked as failed.
    """
    known = dict(marks)
    if _SENT in known:
        return known, None
    if isinstance(part, LedgerEntry):
        known.setdefault("begin", part.t_s)
        if (name := _MARKS.get(part.kind)) is not None:
            known.setdefault(name, part.t_s)
        if part.kind != "ended":
            return known, None
    end_s = part.t_s if isinstance(part, LedgerEntry) else part.row.t_s
    trace = _start(known, end_s, is_good=isinstance(part, NewStep))
    return {_SENT: 1.0}, trace


def _start(known: Mapping[str, float], end_s: float, is_good: bool) -> Trace:
    begin_s = known.get("begin", 0.0)
    # Each part ends where the next one begins. A part without a known end extends to the end of the whole.
    edges = [("nodes", begin_s), ("build", known.get("workers")), ("first_step", known.get("formed"))]
    there = [(name, at_s) for name, at_s in edges if at_s is not None]
    ends = [at_s for _, at_s in there[1:]] + [end_s]
    parts = tuple(Span(name, at_s, max(at_s, to_s)) for (name, at_s), to_s in zip(there, ends, strict=True))
    return Trace(START, Span("start", begin_s, max(begin_s, end_s)), parts, {}, is_good)


def checkpoint(entry: LedgerEntry) -> Trace | None:
    """The trace of a complete checkpoint; None if the time of its beginning was not measured."""
    took_s = entry.fields.get("took_s")
    if entry.kind != "saved" or took_s is None:
        return None
    step, url = entry.fields["step"], entry.fields["url"]
    root = Span("checkpoint", max(0.0, entry.t_s - took_s), entry.t_s)
    about = {"holdfast.step": step, "holdfast.tier": url, "holdfast.skipped": entry.fields.get("skipped")}
    return Trace(f"checkpoint {step} {url}", root, (), about)


class Otlp(FileTracker):
    """Sends the spans of incidents that are over, and at the job's end of those that are not."""

    needs_target = False

    @classmethod
    def check(cls, target: str) -> None:
        """See `TrackerKind`."""
        traces_url(target)

    def __init__(self, url: str, folder: Path) -> None:
        """url: that of the collector; if '', that of OpenTelemetry's variables.

        Raises:
            UsageError: there is no usable URL, or another follower uses it.
        """
        self._url = traces_url(url)
        self._job = folder.name
        place = folder / "tracked"
        place.mkdir(mode=0o700, exist_ok=True)
        key = hashlib.sha256(self._url.encode()).hexdigest()[:16]
        super().__init__(place / f"otlp-{key}.position")

    def _begin(self) -> None:
        self._headers = _headers()

    def write(self, batch: Batch) -> None:
        """See `Tracker`. Raises UsageError: the spans were not accepted; the position stays as it was."""
        incidents = self._kept.value.told
        if batch.position.ledger != self.position.ledger:
            incidents = OpenIncidents()  # another start has incidents with numbers of its own
        spans: list[dict[str, Any]] = []
        made = Made(ledger=batch.position.ledger, began_utc_s=batch.began_utc_s)
        for part in batch.parts:
            if isinstance(part, LedgerEntry):
                incidents = _with_event(incidents, part)
                spans += self._spans_of(incidents, part, made)
                if (saved := checkpoint(part)) is not None:
                    spans += made.trace(saved)
            if isinstance(part, LedgerEntry | NewStep):
                marks, begun = hear(incidents.start, part)
                incidents = msgspec.structs.replace(incidents, start=marks)
                spans += made.trace(begun) if begun is not None else []
        # Sent before the position is kept: if it is killed in between, the next follower sends spans with the
        # same ids.
        if spans:
            self._send(_request(spans, self._job, batch.position.ledger))
        incidents = _without_closed(incidents)
        self._kept.replace(msgspec.structs.replace(self._kept.value, told=incidents, position=batch.position))

    def _spans_of(self, incidents: OpenIncidents, entry: LedgerEntry, made: Made) -> list[dict[str, Any]]:
        over = [entry.fields["id"]] if entry.kind in _OVER else []
        # Nothing comes after the end, so open incidents are sent up to there.
        over = list(incidents.facts) if entry.kind == "ended" else over
        return [
            span
            for number in over
            if number in incidents.facts and (entry.kind != "ended" or number not in incidents.closed)
            for span in made.spans(incidents, number)
        ]

    def _send(self, body: dict[str, Any]) -> None:
        _with_patience(lambda: asyncio.run(_post(self._url, self._headers, msgspec.json.encode(body))))


def _with_patience(send: Callable[[], str | None]) -> None:
    """Calls `send` until it succeeds. send: returns the reason of a failure, or None."""
    why: str | None = None
    for attempt in range(ATTEMPTS):
        if (why := send()) is None:
            return
        if attempt + 1 < ATTEMPTS:
            time.sleep(APART_S * 2**attempt)  # on the tracker's own thread
    raise UsageError(
        f"otlp: the collector did not accept the spans: {why}. Run the command again to continue from here"
    )


async def _post(url: str, headers: Mapping[str, str], body: bytes) -> str | None:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    sent = {**headers, "Content-Type": "application/json"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, data=body, headers=sent, allow_redirects=False) as answer,
        ):
            return None if answer.status < 300 else f"it answers {answer.status}"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        # Only the type of the error: its text contains the URL, which may contain a password.
        return f"no answer ({type(error).__name__})"


def traces_url(url: str) -> str:
    """The URL for spans, by the rules of OpenTelemetry: the variable for traces is the whole URL, the general one its
    beginning."""
    whole_url = os.environ.get(TRACES_ENDPOINT, "") if not url else ""
    base = url or os.environ.get(ENDPOINT, "")
    found = whole_url or (base.rstrip("/") + "/v1/traces" if base else "")
    if not found:
        raise UsageError(f"otlp: no endpoint was given; use otlp:URL, or set {ENDPOINT}")
    try:
        parts = urlsplit(found)
    except ValueError:
        raise UsageError("otlp: the URL cannot be read") from None
    if url and parts.password is not None:
        raise UsageError(
            "otlp: the URL contains a password, which every user of the machine could see in the command line: set "
            f"{HEADERS} or {ENDPOINT} instead"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("otlp: the URL must begin with http:// or https://; gRPC is not supported")
    return found


def _headers() -> dict[str, str]:
    """Parses `name=value,name=value`, where values are quoted as in a URL."""
    pairs = (pair.partition("=") for pair in os.environ.get(HEADERS, "").split(",") if "=" in pair)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


# ---------------------------------------------------------------- pure from here on


def _with_event(incidents: OpenIncidents, entry: LedgerEntry) -> OpenIncidents:
    """The state updated with an event."""
    facts, about, before, closed = (
        dict(incidents.facts),
        dict(incidents.about),
        dict(incidents.before),
        set(incidents.closed),
    )
    fields = entry.fields
    if entry.kind in ABOUT_INCIDENTS and fields["id"] in facts:
        facts[fields["id"]] = dict(facts[fields["id"]])
    add_incident(facts, entry.kind, fields)
    if entry.kind in FACTS:
        number = fields["id"]
        if entry.kind == "incident-opened" and (node := fields.get("node")):
            # The previous incident of the node, for a link. The newest node is the last entry.
            previous = incidents.nodes.get(node)
            if previous is not None and previous != number:
                before[number] = previous
        closed.add(number) if entry.kind in _OVER else closed.discard(number)
        facts = dict(list(facts.items())[-MOST_OPEN:])
    number = fields.get("incident") if entry.kind != "incident-joined" else fields.get("id")
    number = fields.get("id") if entry.kind == "incident-explained" else number
    if entry.kind in _ABOUT and number in facts:
        text = event_line(msgspec.to_builtins(entry), everything=True, width=TEXT_CHARS)
        about[number] = (*about.get(number, ()), (entry.t_s, entry.kind, text))[:MOST_EVENTS]
    nodes = dict(incidents.nodes)
    if entry.kind == "incident-opened" and (node := fields.get("node")):
        # Removed and added again: the order is that of the newest incidents, and the limit drops the oldest.
        nodes.pop(node, None)
        nodes[node] = fields["id"]
        nodes = dict(list(nodes.items())[-MOST_NODES:])
    about = {n: x for n, x in about.items() if n in facts}
    return msgspec.structs.replace(
        incidents, facts=facts, about=about, before=before, closed=frozenset(closed), nodes=nodes
    )


def _without_closed(incidents: OpenIncidents) -> OpenIncidents:
    """The state without incidents that were sent. If one of them is opened again, its event has all facts again."""
    return msgspec.structs.replace(
        incidents,
        closed=frozenset(),
        facts={n: x for n, x in incidents.facts.items() if n not in incidents.closed},
        about={n: x for n, x in incidents.about.items() if n not in incidents.closed},
        before={n: x for n, x in incidents.before.items() if n not in incidents.closed},
    )


class Made(msgspec.Struct, frozen=True):
    """Makes spans of one ledger's incidents."""

    ledger: str
    began_utc_s: float

    def spans(self, incidents: OpenIncidents, number: int) -> list[dict[str, Any]]:
        """The incident and its phases; none if the time of its beginning is not known."""
        facts = incidents.facts[number]
        span = whole(facts)
        if span is None:
            return []
        # An incident that stopped training again has another root in the same trace.
        strike = facts.get("earlier_stalls") or 0
        root = span_id(self.ledger, number, f"incident {strike}")
        is_over = facts.get("full_strength_s") is not None
        known = self._span(number, root, "", "holdfast.incident", span)
        known["attributes"] = _attributes(_described(number, facts))
        known["status"] = {"code": OK if is_over else ERROR}
        known["events"] = [
            {
                "timeUnixNano": self._nano(at_s),
                "name": kind,
                "attributes": _attributes({"holdfast.text": text}),
            }
            for at_s, kind, text in incidents.about.get(number, ())
        ]
        if (before := incidents.before.get(number)) is not None:
            link = {
                "traceId": trace_id(self.ledger, before),
                "spanId": span_id(self.ledger, before, "incident 0"),
            }
            known["links"] = [link]
        children = []
        for phase in phases(facts):
            name = f"holdfast.{phase.name}"
            child = self._span(
                number, span_id(self.ledger, number, f"{phase.name} {strike}"), root, name, phase
            )
            child["attributes"] = _attributes({"is_goodput_span": False})
            children.append(child)
        return [known, *children]

    def trace(self, one: Trace) -> list[dict[str, Any]]:
        """The spans of a start or a checkpoint, and of its parts."""
        root = span_id(self.ledger, one.of, one.root.name)
        whole_span = self._span(one.of, root, "", f"holdfast.{one.root.name}", one.root)
        whole_span["attributes"] = _attributes({"is_goodput_span": False, **one.attributes})
        whole_span["status"] = {"code": OK if one.is_good else ERROR}
        parts = [
            self._span(one.of, span_id(self.ledger, one.of, part.name), root, f"holdfast.{part.name}", part)
            for part in one.parts
        ]
        return [whole_span, *parts]

    def _span(self, number: int | str, own: str, parent: str, name: str, span: Span) -> dict[str, Any]:
        return {
            "traceId": trace_id(self.ledger, number),
            "spanId": own,
            **({"parentSpanId": parent} if parent else {}),
            "name": name,
            "kind": INTERNAL,
            "startTimeUnixNano": self._nano(span.begin_s),
            "endTimeUnixNano": self._nano(span.end_s),
        }

    def _nano(self, at_s: float) -> str:
        # As text: the numbers of JSON lack the precision.
        return str(round((self.began_utc_s + at_s) * 1e9))


def _described(number: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    ours = (
        "cause",
        "rung",
        "at_step",
        "ranks",
        "lost_steps",
        "rule",
        "verdict",
        "node",
        "stall_s",
        "injected",
    )
    return {
        "holdfast.incident.id": number,
        "error.type": facts.get("cause_kind"),
        "is_goodput_span": False,
        **{f"holdfast.{name}": facts.get(name) for name in ours},
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attributes in OTLP's form. Unknown values are left out."""
    return [{"key": key, "value": _value(x)} for key, x in values.items() if x is not None]


def _value(value: Any) -> dict[str, Any]:
    match value:
        # Before int: in Python every bool is an int, and would be sent as a number.
        case bool():
            return {"boolValue": value}
        case int():
            # As text: the JSON form of OTLP requires this for 64-bit integers, because JSON readers may round
            # them.
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list() | tuple():
            return {"arrayValue": {"values": [_value(x) for x in value]}}
        case _:
            return {"stringValue": str(value)}


def _request(spans: list[dict[str, Any]], job: str, ledger: str) -> dict[str, Any]:
    resource = {"service.name": "holdfast", "service.namespace": job, "service.instance.id": ledger}
    scope = {"name": "holdfast", "version": holdfast.__version__}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": scope, "spans": spans}],
            }
        ]
    }
