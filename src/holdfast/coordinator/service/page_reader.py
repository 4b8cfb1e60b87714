"""What the page reads of the ledger, on the thread that reads: never on the loop that answers heartbeats."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.coordinator.service import worker_output
from holdfast.coordinator.service.store import Store, began_utc_s
from holdfast.observe.incident_report import AROUND_S, story
from holdfast.observe.printable import printable
from holdfast.web import views
from holdfast.web.sources import Refused, frame, whole
from holdfast.web.story import Story

CHUNK = 2000
"""Entries that are taken in at once: where reading takes turns with writing, a decision waits no longer than for these."""
RECENT = 64
AROUND = 2000
"""Entries around an incident that its story may be told from."""
INCIDENT_LINES = 40
"""Of a log, beside an incident."""
FINDINGS_SHOWN = 20
STEPS_SOUGHT = 50
"""Findings whose step is looked for in one look."""


def take_in(store: Store, told: Story, frames: Any) -> bool:
    """Takes in what the ledger has and the story lacks; whether there is more. frames: gets each entry as it is sent."""
    rows = store.raw_entries(told.seq, CHUNK)
    for seq, t_s, utc, kind, text in rows:
        told.add(seq, t_s, utc, kind, text)
        # Kept as bytes: an entry is encoded once, however many viewers get it.
        frames.append((seq, event_frame(seq, t_s, utc, kind)))
    return len(rows) == CHUNK


def event_frame(seq: int, t_s: float, utc: str, kind: str) -> bytes:
    """An entry as it is streamed: what happened and when. What it means is in the panels, which the page asks for again."""
    return frame("event", msgspec.json.encode({"seq": seq, "t_s": t_s, "utc": utc, "kind": kind}), seq)


def frames_after(store: Store, after: int, count: int) -> list[tuple[int, bytes]]:
    """Entries as they are streamed."""
    return [
        (seq, event_frame(seq, t_s, utc, kind)) for seq, t_s, utc, kind, _ in store.raw_entries(after, count)
    ]


def recent(store: Store) -> dict[str, Any]:
    """Of the newest steps: number, loss, when, and the mean weight (tokens, samples). Of the
    ledger: when its first entry was written, by which it is known, the number of its newest, and when the job's clock began,
    in seconds since 1970."""
    rows = store.newest_steps(RECENT)
    weights = [r.weight for r in rows if r.weight is not None]
    first = store.raw_entries(0, 1)
    return {
        "ledger": first[0][2] if first else "",
        "ledger_seq": store.last_seq() if first else 0,
        "began_utc_s": _began_utc_s(first[0]) if first else None,
        "step": rows[-1].step if rows else None,
        "loss": rows[-1].loss if rows else None,
        "t_s": max((r.t_s for r in rows), default=None),
        "weight": statistics.fmean(weights) if weights else None,
    }


def _began_utc_s(first: tuple[int, float, str, str, str]) -> float | None:
    try:
        return round(began_utc_s((first[2], first[1])), 3)
    except ValueError:  # a damaged row: then the page shows no clock times
        return None


def older(store: Store, told: Story, until: int) -> bool:
    """Takes a piece of the ledger into a story of old incidents; whether there is more up to the entry `until`."""
    rows = [row for row in store.raw_entries(told.seq, CHUNK) if row[0] <= until]
    for row in rows:
        told.add(*row)
    return len(rows) == CHUNK


class Struck(msgspec.Struct, frozen=True):
    """Whom an incident struck first."""

    worker: str
    """Its name; empty: nobody knows."""
    log: str
    """Where its log is, if its end was reported; else empty."""


def struck(store: Store, incident: Mapping[str, Any]) -> Struck:
    """The first worker that an incident struck."""
    first, last = incident["seqs"]
    ranks, node = incident.get("ranks") or [], incident.get("node")
    names: list[str] = []
    if incident.get("formed") is not None:
        # Of an old generation the ledger has let the names go.
        formed = store.entries(incident["formed"] - 1, 1)
        names = [str(name) for name in formed[0].fields.get("workers") or []] if formed else []
    worker = next((names[rank] for rank in ranks if rank < len(names)), "")
    around = store.entries(max(0, first - AROUND // 4), AROUND)
    for entry in around:
        if entry.seq > last and entry.t_s > (incident.get("first_t_s") or 0.0) + AROUND_S:
            break
        near = entry.seq >= first or entry.t_s >= (incident.get("first_t_s") or 0.0) - AROUND_S
        if near and not worker and entry.kind in ("failed", "worker-exited", "stalled"):
            worker = entry.fields["worker"] if node is not None and entry.fields.get("node") == node else ""
        if worker and entry.kind == "worker-exited" and entry.fields.get("worker") == worker:
            return Struck(worker, str(entry.fields.get("log") or ""))
    return Struck(worker, "")


def incident(store: Store, told: Story, known: Mapping[str, Any]) -> dict[str, Any]:
    """One incident: its facts, its story in lines, what health rules found of it or before it on its node, and the incidents
    beside it."""
    first, last = known["seqs"]
    # Entries before the first sign belong to it, too: a fault that was injected, a worker that ended.
    around = store.entries(max(0, first - AROUND // 4), AROUND)
    until_s = max((e.t_s for e in around if e.seq <= last), default=0.0) + AROUND_S
    entries = [msgspec.structs.asdict(e) for e in around if e.seq <= last or e.t_s <= until_s]
    number = known["id"]
    return {
        "incident": {k: v for k, v in known.items() if k not in ("seqs", "formed")},
        "story": [printable(line) for line in story(number, entries)],
        "findings": _findings(told, known, entries),
        "previous": number - 1 if number > 1 else None,
        "next": number + 1 if number < told.newest else None,
    }


def _findings(told: Story, known: Mapping[str, Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
    """own: findings that belong to an incident, oldest first. before: the newest one on its node before it, of any other
    incident or of none, with `ago_s`; None: there is none that is known of."""
    there = {
        e["seq"]: {"seq": e["seq"], "t_s": e["t_s"], **e["fields"]} for e in entries if e["kind"] == "finding"
    }
    there |= {f["seq"]: f for f in list(told.findings)}
    begun_s, node, number = known.get("first_t_s") or 0.0, known.get("node"), known["id"]
    own = [f for _, f in sorted(there.items()) if f.get("incident") == number]
    others = [f for f in there.values() if f.get("incident") != number and node and f.get("node") == node]
    before = max((f for f in others if f["t_s"] <= begun_s), key=lambda f: f["seq"], default=None)
    return {
        "own": [views.finding(f) for f in own[:FINDINGS_SHOWN]],
        "before": None
        if before is None
        else views.finding(before) | {"ago_s": round(begun_s - before["t_s"], 3)},
    }


def output(job_dir: Path, worker: str, log: str, begun_utc_s: float | None, lives: bool) -> dict[str, Any]:
    """The end of a worker's log, and its stack, of an incident. lives: it trains on, so its log has gone on since. `stack.note`
    and `log.note` say why there is none."""
    if not worker:
        none = {"lines": [], "note": "the incident names no worker, or the ledger has let its name go"}
        return {"worker": None, "log": {"path": None, **none}, "stack": {"source": "", **none}}
    found = worker_output.tail(job_dir, log)
    stack = worker_output.stack(job_dir, log, found["lines"], begun_utc_s)
    if not stack["lines"]:
        stack["note"] = (
            "it wrote none: a process that is killed from outside leaves no stack, and what stands still is looked at only "
            "when it is found"
        )
    if lives and found["lines"]:
        found["note"] = "it was not ended, so these are its newest lines and not those of the incident"
    return {
        "worker": worker,
        "log": found | {"lines": found["lines"][-INCIDENT_LINES:]},
        "stack": {"note": "", **stack},
    }


def place_findings(store: Store, told: Story) -> None:
    """Gives the newest findings the step at which they were made, `at_step`, for the marks of the curves."""
    left = [f for f in told.findings if "at_step" not in f and views.marks_curves(f)][-STEPS_SOUGHT:]
    for one in left:
        one["at_step"] = store.step_at(one["t_s"])


def series(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Curves, see `rollups.series`, and the names of what the script logged. With `?figure=NAME` the curve of that one instead,
    see `figure_rollups.series`: one at a time, so that a page asks for those that are looked at. Raises Refused."""
    first, last = whole(query, "from", 0) or 0, whole(query, "to", None)
    points = max(2, whole(query, "points", 2000, most=2000) or 2000)
    names, name = store.figure_names(), query.get("figure")
    found: dict[str, Any] = {"newest": store.last_step(), "figures": names}
    if name is None:
        return found | {"columns": store.series(first, last, points)}
    if name not in names:
        raise Refused(
            f"this job has not logged a value named {name[:64]!r}; logged names: {', '.join(names) or 'none'}",
            404,
        )
    return found | {"figure": {"name": name, "columns": store.figure_series(name, first, last, points)}}
