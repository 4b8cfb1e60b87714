"""Traces: ids derived from the ledger, so that every program derives the same ones; the phases of an incident as
spans of time; and a job as a Chrome trace, for https://ui.perfetto.dev, speedscope and chrome://tracing. Pure.

In a Chrome trace processes are the coordinator and the nodes; threads are incidents and slots. The format is the "Trace
Event Format": times are in
microseconds, here since the job's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from holdfast.observe.event_text import event_line
from holdfast.protocol.ledger import add_incident


def trace_id(ledger: str, incident: int | str) -> str:
    """32 hexadecimal digits. ledger: its name, which is different for every start of a job. incident: its number; a
    text for something else that has a trace."""
    return _digest(ledger, str(incident))[:32]


def span_id(ledger: str, incident: int | str, name: str) -> str:
    """16 hexadecimal digits. name: of the span within the incident's trace."""
    return _digest(ledger, str(incident), name)[:16]


def event_id(ledger: str, seq: int) -> str:
    """16 hexadecimal digits, of one event."""
    return _digest(ledger, "event", str(seq))[:16]


def _digest(*parts: str) -> str:
    # A separator that no part has, so that two lists of parts never make the same text.
    return sha256("\0".join(parts).encode()).hexdigest()


Facts = Mapping[str, Any]
"""The fields of an incident's event, see `protocol.ledger.IncidentFacts`."""


class Span(NamedTuple):
    """A span of time, in seconds since the job's start."""

    name: str
    begin_s: float
    end_s: float


def whole(facts: Facts) -> Span | None:
    """From the fault to full strength, or to the last known moment before that; None: not even the beginning is known."""
    began_s = facts.get("t_s")
    if began_s is None:
        return None
    # The latest end that is known: full strength comes after the stall, and the stall after the detection.
    known = [facts.get(name) for name in ("full_strength_s", "stall_s", "detect_s")]
    return Span("incident", began_s, began_s + next((x for x in known if x is not None), 0.0))


def phases(facts: Facts) -> list[Span]:
    """The phases of an incident, in their order. None overlaps another, and all are within the whole.

    The ledger has durations, some of which overlap: a new worker starts while the decision is made. Each phase gets the
    part that comes after those before it.
    """
    span = whole(facts)
    if span is None:
        return []
    detected_s = span.begin_s + (facts.get("detect_s") or 0.0)
    ends = [("detect", detected_s if facts.get("detect_s") is not None else None)]
    ends += [(n, _after(detected_s, facts.get(f"{n}_s"))) for n in ("decide", "replace")]
    # From here on backward: the first step after the recovery is the last event with a known time.
    if (step_s := facts.get("first_step_s")) is not None:
        joined_s = span.end_s - step_s
        restored = facts.get("restore_s")
        ends.append(("join", joined_s - (restored or 0.0) if facts.get("join_s") is not None else None))
        ends += [("restore", joined_s if restored is not None else None), ("first_step", span.end_s)]
    found, at_s = [], span.begin_s
    for name, end_s in ends:
        if end_s is not None and (until_s := min(end_s, span.end_s)) > at_s:
            found.append(Span(name, at_s, until_s))
            at_s = until_s
    return found


def _after(begin_s: float, took_s: float | None) -> float | None:
    return None if took_s is None else begin_s + took_s


Entry = Mapping[str, Any]
"""seq, t_s, utc, kind and fields of an event."""
Step = tuple[float, int]
"""When a step was committed, in seconds since the job's start, and by how many workers."""

MOST = 150_000
"""Limit on the events of the trace: about 30 MB. The number of events beyond it is in `otherData.left_out`."""
POINTS = 2_000
"""Points of the curve of steps per second."""
COORDINATOR, GENERATIONS, DECISIONS, INCIDENTS = 1, 1, 2, 10
"""The coordinator's process and its threads; overlapping incidents have a thread each, starting with the last of these."""
FAULTS = 100_000
"""The first thread of a node after those of its slots."""
SHORT_S = 0.001
"""How long a fault is drawn if the time of its detection is not known."""
_DECISIONS = ("verdict", "formed", "restart", "resize", "asked", "storm", "blast-limit", "changed")


def chrome_trace(job: str, entries: Sequence[Entry], steps: Sequence[Step]) -> dict[str, Any]:
    """The trace as a JSON object. entries: all events of the ledger, oldest first. steps: in the order of their times."""
    made = _Trace()
    made.process(COORDINATOR, f"coordinator of {job}", 0)
    made.thread(COORDINATOR, GENERATIONS, "generations")
    made.thread(COORDINATOR, DECISIONS, "decisions")
    end_s = max((e["t_s"] for e in entries), default=0.0)
    # Incidents and generations come first, because they explain the rest, and the limit cuts off the end.
    for number, node in enumerate(_nodes(entries), COORDINATOR + 1):
        made.pids[node] = number
        made.process(number, node, number)
    _incidents(made, entries)
    _generations(made, entries, end_s)
    _decisions(made, entries)
    _rates(made, steps)
    _workers(made, entries, end_s)
    return {
        "traceEvents": made.events,
        "displayTimeUnit": "ms",
        "otherData": {"job": job, "left_out": made.left_out},
    }


class _Trace:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.left_out = 0
        self.pids: dict[str, int] = {}
        self._threads: set[tuple[int, int]] = set()
        self._lanes: dict[tuple[int, int], list[float]] = {}

    def add(self, event: dict[str, Any]) -> None:
        if len(self.events) < MOST:
            self.events.append(event)
        else:
            self.left_out += 1

    def process(self, pid: int, name: str, order: int) -> None:
        self.add({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        self.add(
            {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}}
        )

    def thread(self, pid: int, tid: int, name: str) -> None:
        if (pid, tid) not in self._threads:
            self._threads.add((pid, tid))
            self.add({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})

    def lane(self, pid: int, first: int, name: str, begin_s: float, end_s: float) -> int:
        """The first thread, from `first` on, that is free at this time. Called in the order of `begin_s`."""
        lanes = self._lanes.setdefault((pid, first), [])
        lane = next((i for i, free_s in enumerate(lanes) if free_s <= begin_s), len(lanes))
        # A slice just past the end appends, so a new lane needs no case of its own.
        lanes[lane : lane + 1] = [end_s]
        self.thread(pid, first + lane, name)
        return first + lane

    def slice(
        self,
        pid: int,
        tid: int,
        name: str,
        begin_s: float,
        end_s: float,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds a span of time. One that begins within another span of its thread must end within it."""
        # Both ends are rounded, and not the duration: a part that is rounded by itself
        # could end after the whole.
        at = {"pid": pid, "tid": tid, "ts": _us(begin_s), "dur": max(0, _us(end_s) - _us(begin_s))}
        self.add({"ph": "X", "cat": "holdfast", "name": name, **at, "args": dict(args or {})})

    def flow(self, phase: str, number: int, pid: int, tid: int, at_s: float) -> None:
        """phase: s, t or f. The arrow attaches to the slice that covers this moment."""
        ends = {"bp": "e"} if phase == "f" else {}
        at = {"pid": pid, "tid": tid, "ts": _us(at_s)}
        self.add({"ph": phase, "cat": "incident", "name": "incident", "id": number, **at, **ends})

    def counter(self, name: str, at_s: float, value: float) -> None:
        at = {"pid": COORDINATOR, "tid": 0, "ts": _us(at_s)}
        self.add({"ph": "C", "name": name, **at, "args": {name: value}})


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _nodes(entries: Iterable[Entry]) -> list[str]:
    """The nodes in the order in which they joined, grouped by place."""
    places = {
        e["fields"]["node"]: e["fields"].get("place") or "" for e in entries if e["kind"] == "node-joined"
    }
    return sorted(places, key=lambda node: places[node])


def _incidents(made: _Trace, entries: Iterable[Entry]) -> None:
    facts: dict[int, dict[str, Any]] = {}
    for entry in entries:
        add_incident(facts, entry["kind"], entry["fields"])
    # By their beginnings, as `lane` requires. By number, an incident that occurred again would overlap
    # another.
    for number, incident in sorted(facts.items(), key=lambda item: item[1].get("t_s") or 0.0):
        span = whole(incident)
        if span is None:
            continue
        tid = made.lane(COORDINATOR, INCIDENTS, "incidents", span.begin_s, span.end_s)
        args = {
            k: incident.get(k) for k in ("cause", "node", "ranks", "rung", "lost_steps", "verdict", "at_step")
        }
        made.slice(
            COORDINATOR, tid, f"incident {number}: {incident['cause']}"[:120], span.begin_s, span.end_s, args
        )
        parts = {p.name: p for p in phases(incident)}
        for part in parts.values():
            made.slice(COORDINATOR, tid, part.name, part.begin_s, part.end_s)
        _flow(made, number, incident, tid, parts)


def _flow(made: _Trace, number: int, incident: Mapping[str, Any], tid: int, parts: Mapping[str, Any]) -> None:
    """An arrow from the fault on its node to the decision, and on to the first step."""
    pid = made.pids.get(incident.get("node") or "")
    step = parts.get("first_step")
    if pid is not None:
        begin_s = incident["t_s"]
        end_s = begin_s + max(incident.get("detect_s") or 0.0, SHORT_S)
        on = made.lane(pid, FAULTS, "faults", begin_s, end_s)
        made.slice(pid, on, incident.get("fault") or incident["cause"][:80], begin_s, end_s)
        if step is not None:
            made.flow("s", number, pid, on, begin_s)
            if (decide := parts.get("decide")) is not None:
                made.flow("t", number, COORDINATOR, tid, decide.begin_s)
            made.flow("f", number, COORDINATOR, tid, step.begin_s)


def _generations(made: _Trace, entries: Sequence[Entry], end_s: float) -> None:
    """Adds the generations: from when to when each trained, with how many workers, and from which step on."""
    formed = [e for e in entries if e["kind"] in ("formed", "started")]
    for entry, until_s in zip(formed, _ends(formed, entries, end_s), strict=True):
        fields = entry["fields"]
        args = {k: fields.get(k) for k in ("start", "world", "source", "applied") if k in fields}
        name = f"generation {fields['generation']}"
        made.slice(COORDINATOR, GENERATIONS, name, entry["t_s"], until_s, args)
        made.counter("world size", entry["t_s"], fields["world"])
        # Viewers draw a value until the next one: without this, training would seem to continue between two
        # generations.
        made.counter("world size", until_s, 0)


def _ends(formed: Sequence[Entry], entries: Sequence[Entry], end_s: float) -> list[float]:
    """When each generation ended: when it broke, at its planned end, or when the next one was formed."""
    broke = {e["fields"]["generation"]: e["t_s"] for e in entries if e["kind"] == "broke"}
    following = [e["t_s"] for e in formed[1:]] + [end_s]
    return [
        min(broke.get(e["fields"]["generation"], next_s), next_s)
        for e, next_s in zip(formed, following, strict=True)
    ]


def _decisions(made: _Trace, entries: Iterable[Entry]) -> None:
    for entry in entries:
        if entry["kind"] in _DECISIONS:
            text = event_line(entry, everything=True, width=200)
            at = {"pid": COORDINATOR, "tid": DECISIONS, "ts": _us(entry["t_s"])}
            args = {"text": text, "seq": entry["seq"]}
            made.add({"ph": "i", "cat": "holdfast", "name": entry["kind"], "s": "t", **at, "args": args})


def _rates(made: _Trace, steps: Sequence[Step]) -> None:
    """Steps per second, in blocks of as many as give at most `POINTS` values."""
    size = max(1, -(-len(steps) // POINTS))
    for i in range(size, len(steps), size):
        took_s = steps[i][0] - steps[i - size][0]
        if took_s > 0:  # several steps may be reported together
            made.counter("steps per second", steps[i][0], round(size / took_s, 3))


def _workers(made: _Trace, entries: Sequence[Entry], end_s: float) -> None:
    """Adds each worker's process, and in it the ranks that it had."""
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    for entry in entries:
        worker = entry["fields"].get("worker")
        if entry["kind"] == "worker-started":
            began.setdefault(worker, entry["t_s"])
        elif entry["kind"] in ("worker-exited", "worker-ended", "worker-done"):
            # The first sign of the end counts: a worker that exited is named again when its node is lost.
            ended.setdefault(worker, entry["t_s"])
        elif entry["kind"] in ("node-lost", "node-left"):
            node = entry["fields"]["node"]
            for name in [n for n in began if n.partition(".")[0] == node]:
                ended.setdefault(name, entry["t_s"])
    for worker, begin_s in began.items():
        pid, tid = _place(made, worker)
        if pid:
            made.slice(pid, tid, worker, begin_s, ended.get(worker, end_s))
    formed = [e for e in entries if e["kind"] in ("formed", "started")]
    for entry, until_s in zip(formed, _ends(formed, entries, end_s), strict=True):
        for rank, worker in enumerate(entry["fields"]["workers"]):
            pid, tid = _place(made, worker)
            last_s = min(until_s, ended.get(worker, end_s))
            # Within the process: a generation may be recorded before the start of the process is.
            first_s = max(entry["t_s"], began.get(worker, end_s))
            if pid and last_s > first_s:
                args = {"generation": entry["fields"]["generation"]}
                made.slice(pid, tid, f"rank {rank}", first_s, last_s, args)


def _place(made: _Trace, worker: str) -> tuple[int, int]:
    """Process and thread of `node.slot#incarnation`; 0: its node is not known."""
    node, _, rest = worker.rpartition(".")
    slot = rest.partition("#")[0]
    pid = made.pids.get(node, 0)
    if not pid or not slot.isdigit():
        return 0, 0
    made.thread(pid, int(slot) + 1, f"slot {slot}")
    return pid, int(slot) + 1
