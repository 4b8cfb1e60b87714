"""What the page reads of the ledger, on the thread that reads: never on the loop that answers heartbeats."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.coordinator.service.store import Store
from holdfast.observe.incident_report import AROUND_S, story
from holdfast.web.sources import Refused, frame, whole
from holdfast.web.story import Story

CHUNK = 2000
"""Entries that are taken in at once: where reading takes turns with writing, a decision waits no longer than for these."""
RECENT = 64
AROUND = 2000
"""Entries around an incident that its story may be told from."""
LOG_LINES = 200
LOG_BYTES = 64_000


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
    ledger: when its first entry was written, by which it is known, and the number of its newest."""
    rows = store.newest_steps(RECENT)
    weights = [r.weight for r in rows if r.weight is not None]
    first = store.raw_entries(0, 1)
    return {
        "ledger": first[0][2] if first else "",
        "ledger_seq": store.last_seq() if first else 0,
        "step": rows[-1].step if rows else None,
        "loss": rows[-1].loss if rows else None,
        "t_s": max((r.t_s for r in rows), default=None),
        "weight": statistics.fmean(weights) if weights else None,
    }


def incident(store: Store, told: Story, number: int | None) -> dict[str, Any]:
    """One incident: its facts, its story in lines, and the entries around it. Raises Refused."""
    known = told.incidents.get(number) if number is not None else None
    if known is None:
        raise Refused(f"this job does not have an incident {number}: it has {len(told.incidents)}", 404)
    first, last = known["seqs"]
    # Entries before the first sign belong to it, too: a fault that was injected, a worker that ended.
    around = store.entries(max(0, first - AROUND // 4), AROUND)
    until_s = max((e.t_s for e in around if e.seq <= last), default=0.0) + AROUND_S
    entries = [msgspec.structs.asdict(e) for e in around if e.seq <= last or e.t_s <= until_s]
    return {"incident": {k: v for k, v in known.items() if k != "seqs"}, "story": story(known["id"], entries)}


def series(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Curves, see `rollups.series`, and the names of what the script logged. With `?figure=NAME` also the curve of that one,
    see `figure_rollups.series`: of one at a time, so that the answer is as small with 64 names as with none. Raises Refused."""
    first, last = whole(query, "from", 0) or 0, whole(query, "to", None)
    points = max(2, whole(query, "points", 2000, most=2000) or 2000)
    names, name = store.figure_names(), query.get("figure")
    found = {"columns": store.series(first, last, points), "newest": store.last_step(), "figures": names}
    if name is None:
        return found
    if name not in names:
        raise Refused(
            f"this job has not logged a value named {name[:64]!r}; logged names: {', '.join(names) or 'none'}",
            404,
        )
    return found | {"figure": {"name": name, "columns": store.figure_series(name, first, last, points)}}


def log(job_dir: Path, path: str) -> dict[str, Any]:
    """The last lines of a worker's log, if it is in the job's folder; else where it is."""
    if not path:
        return {"path": None, "lines": [], "note": "the location of its output is not known"}
    # The path came from an agent. Nothing outside of the job's folder is shown, whatever it says.
    real, home = Path(path).resolve(), job_dir.resolve()
    if not real.is_relative_to(home) or not real.is_file():
        return {"path": path, "lines": [], "note": "the log is on its node, under this path"}
    with real.open("rb") as file:
        # Only the end is read: a worker's log may have many gigabytes.
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        text = file.read(LOG_BYTES)
    lines = text.decode(errors="replace").splitlines()[-LOG_LINES:]
    # A progress bar writes over its own line: a terminal shows what is behind the last return.
    return {"path": path, "lines": [line.rpartition("\r")[2][:2000] for line in lines], "note": ""}
