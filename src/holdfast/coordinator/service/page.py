"""A job as the page's source, from the core's state and the ledger: in the coordinator, and for a job that has ended.

What costs time is done on the thread that reads the ledger. All viewers share what was made for one of them.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from holdfast.coordinator.kernel.index import PhaseIndex
from holdfast.coordinator.kernel.state import CoreState, WorkerPhase
from holdfast.coordinator.service import job_view, worker_output
from holdfast.coordinator.service.all_starts import launches
from holdfast.coordinator.service.store import LedgerEntry, Store, began_utc_s
from holdfast.observe.incident_report import incident_lines
from holdfast.observe.printable import printable
from holdfast.protocol.verified import samples_shown, verified
from holdfast.web import views
from holdfast.web.application import PageAnswer, PageRefused, answer, frame, whole
from holdfast.web.timeline import BOOKMARK_EVERY, JobTimeline
from holdfast.web.views import cost

T = TypeVar("T")
EVERY_S = 0.5
"""Deltas are made at most so often, for all viewers together."""
QUIET_S = 15.0
"""A stream without news gets a comment, by which proxies and browsers know that it lives."""
FRESH_S = 2.0
"""A panel that was asked for is good for others for so long, if nothing has happened."""
FRAMES = 1024
"""Entries that are kept as they are streamed; a viewer that is further behind reads the ledger."""
BATCH = 256
MOST_CACHED = 32


ENTRIES_AT_ONCE = 2000
"""Entries that are taken in at once: where reading takes turns with writing, a decision waits no longer than for these."""

RECENT = 64

AROUND = 2000
"""Entries around an incident that it may be told from."""

INCIDENT_LINES = 40
"""Of a log, beside an incident."""

FINDINGS_SHOWN = 20

STEPS_SOUGHT = 50
"""Findings whose step is looked for in one look."""


class LedgerReader(Protocol):
    """Reads the ledger on a thread, one thing after the other."""

    def __call__(self, what: Callable[[Store], T], /) -> Awaitable[T]: ...


class Wakeup:
    """Wakes all who wait for something to happen to the job."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.over = False
        """Nothing more will happen here: streams end."""

    def tell(self) -> None:
        """Something happened."""
        # Whoever waits from now on gets a new event: it is for what comes next, and not for this.
        self._event.set()
        self._event = asyncio.Event()

    def end(self) -> None:
        """Streams end now."""
        self.over = True
        self.tell()

    async def wait(self, limit_s: float) -> bool:
        """Whether something happened in time."""
        try:
            await asyncio.wait_for(self._event.wait(), limit_s)
        except TimeoutError:
            return False
        return True


class PageSource:
    """See `web.application.JobSource`."""

    def __init__(
        self,
        *,
        read: LedgerReader,
        state: CoreState,
        index: PhaseIndex,
        clock: Callable[[], float],
        news: Wakeup,
        job_dir: Path,
        live: bool,
        trouble: Callable[[], str | None] = lambda: None,
        act: Callable[[str, Mapping[str, str], bool], Awaitable[dict[str, Any]]] | None = None,
        simulated: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        """clock: of the core. trouble: why the ledger cannot be written. live: the job runs. act: None: it cannot be changed.
        simulated: what is told of a simulation, see `views.now`."""
        self._read, self._state, self._index, self._clock = read, state, index, clock
        self._news, self._job_dir, self._live = news, job_dir, live
        self._trouble, self._act, self._simulated = trouble, act, simulated
        self._timeline = JobTimeline()
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=FRAMES)
        self._status: dict[str, Any] = {}
        self._now: dict[str, Any] = {}
        self._made: tuple[dict[str, Any], dict[str, Any], bytes] = ({}, {}, b"")
        self._status_at = -EVERY_S
        self._taken_at = -EVERY_S
        self._looking, self._taking = asyncio.Lock(), asyncio.Lock()
        self._filling: asyncio.Task[None] | None = None
        self._recent: dict[str, Any] | None = None
        self._cache: dict[tuple[Any, ...], tuple[float, int, PageAnswer]] = {}

    # ------------------------------------------------------------ panels

    async def panel(self, name: str, query: Mapping[str, str]) -> PageAnswer:
        """See `JobSource.panel`."""
        await self._look(whole=name not in ("now", "ranks", "log", "series"))
        loop = asyncio.get_running_loop()
        key = (name, *sorted(query.items()))
        made_s, seq, kept = self._cache.get(key, (0.0, 0, None))
        # Good only while nothing was taken in since. `now` is never taken from here:
        # `_look` has just made it.
        if (
            kept is not None
            and seq == self._timeline.seq
            and loop.time() - made_s < FRESH_S
            and name != "now"
        ):
            return kept
        made = await self._make(name, query)
        # Keys are words of viewers, so their number has to have a bound.
        if len(self._cache) >= MOST_CACHED:
            self._cache.pop(next(iter(self._cache)))
        self._cache[key] = loop.time(), self._timeline.seq, made
        return made

    async def _make(self, name: str, query: Mapping[str, str]) -> PageAnswer:
        if name == "ranks":
            # Made in pieces on the loop, which owns the state. Sorting and encoding need no
            # state, and go to the thread.
            rows = await job_view.rank_rows(self._state)
            first, count = whole(query, "first", 0) or 0, min(500, whole(query, "count", 60) or 60)
            chosen = query.get("q", "")[:200]

            def table(_: Store) -> PageAnswer:
                rows.sort(key=job_view.by_urgency)
                return answer(views.ranks(rows, chosen, first, count))

            return await self._read(table)
        if name == "log":
            # By a worker's name and never by a path: a viewer can only choose among the job's own logs.
            path = self._log_of(query.get("worker", ""))
            if not path:
                raise PageRefused("no such worker", 404)
            return await self._read(lambda _: answer(worker_output.tail(self._job_dir, path)))
        if name == "incident":
            return await self._incident(whole(query, "id", None))
        status = self._status
        if name == "incidents":
            # A query must not ask for an answer that grows with the job.
            before, count = (
                whole(query, "before", None),
                min(200, whole(query, "count", views.SHOWN) or views.SHOWN),
            )
            older = await self._older(views.wanted(self._timeline, before, count))
            return await self._read(lambda _: answer(views.incidents(self._timeline, before, count, older)))
        # The timeline is read where it is written, so no entry is taken in meanwhile.
        return await self._read(lambda store: answer(self._view(store, name, query, status)))

    def _log_of(self, worker: str) -> str:
        """Where the log of a worker is; empty: it has none."""
        known = self._state.membership.workers.get(worker)
        # The core forgets workers that have ended, and their logs stay.
        return known.log if known is not None else worker_output.usual_log(self._job_dir, worker)

    async def _incident(self, number: int | None) -> PageAnswer:
        timeline = self._timeline
        known = timeline.incidents.get(number) if number is not None else None
        if known is None and number is not None and 0 < number <= timeline.newest:
            known = (await self._older([number])).get(number)
        if known is None:
            raise PageRefused(
                f"this job does not have an incident {number}: it has {timeline.forgotten + len(timeline.incidents)}",
                404,
            )
        one, began = known, self._status["began_utc_s"]
        begun_utc_s = None if began is None else began + (one.get("first_t_s") or 0.0)
        struck = await self._read(lambda store: _struck(store, one))
        worker = self._state.membership.workers.get(struck.worker)
        lives = self._live and worker is not None and worker.phase is not WorkerPhase.GONE
        log = struck.log or self._log_of(struck.worker)

        def with_output(store: Store) -> PageAnswer:
            output = _output(self._job_dir, struck.worker, log, begun_utc_s, lives)
            return answer(_incident_told(store, timeline, one) | {"output": output})

        return await self._read(with_output)

    async def _older(self, numbers: list[int]) -> dict[int, dict[str, Any]]:
        """Incidents that the timeline has let go, out of their part of the ledger."""
        if not numbers:
            return {}
        part = self._timeline.before(numbers[0])
        # Up to the second bookmark after them: one is let go only when it is over, and is so within some others.
        until = next(
            (seq for n, seq in self._timeline.bookmarks if n > numbers[-1] + BOOKMARK_EVERY),
            self._timeline.seq,
        )
        # In several pieces: what waits for the same thread gets its turn between them.
        while await self._read(lambda store: _take_older(store, part, until)):
            pass
        found = {n: part.incidents[n] for n in numbers if n in part.incidents}
        # What has let them go saw their end.
        return {n: one | {"open": False} for n, one in found.items() if "id" in one}

    def _view(self, store: Store, name: str, query: Mapping[str, str], status: Mapping[str, Any]) -> Any:
        timeline, before = self._timeline, whole(query, "before", None)
        # A query must not ask for an answer that grows with the job.
        count = min(200, whole(query, "count", views.SHOWN) or views.SHOWN)
        match name:
            case "now":
                return self._now
            case "findings":
                return views.findings(timeline, before, count)
            case "timeline":
                until_s = float(whole(query, "to", None) or max(status["t_s"], timeline.t_s))
                return views.incident_timeline(timeline, until_s, float(whole(query, "from", 0) or 0))
            case "decisions":
                return views.decisions(timeline, before, count)
            case "strip":
                return views.strip(timeline, max(status["t_s"], timeline.t_s))
            case "cost":
                return cost(timeline, status["goodput"])
            case "launches":
                return launches(self._job_dir, self._state.spec, store)
            case "stall":
                return views.stall(timeline)
            case "series":
                found = _series(store, query)
                if "columns" not in found:
                    return found
                _place_findings(store, timeline)
                return found | {
                    "marks": views.marks(timeline),
                    "worlds": list(timeline.worlds),
                }
            case "checkpoints":
                there = job_view.kept_checkpoints(list(timeline.checkpoints), self._state.spec.saving.tiers)
                return views.checkpoints(timeline, status, there, verified(self._job_dir))
            case "samples":
                # Only the note of the newest check: the record itself may have gigabytes.
                told: dict[str, Any] = msgspec.to_builtins(
                    samples_shown(self._job_dir, status["samples_folder"])
                )
                return told | {"step": status["step"]}
            case "lines":
                return views.lines(timeline)
            case _:
                raise PageRefused(f"no panel {name!r}", 404)

    async def _look(self, whole: bool = True) -> None:
        """Takes in what the ledger has, and the status at this moment; one look for all who ask at once.

        whole: waits until the timeline has all of the ledger. The first look at a long one takes seconds, and a person who asks
        whether it trains need not wait for that.
        """
        if whole or (self._filling is not None and self._filling.done()):
            await self._take_in()
        elif self._filling is None:
            self._filling = asyncio.create_task(self._take_in())
            # What fails here fails again for whoever needs the whole of it, and is told there.
            self._filling.add_done_callback(lambda task: task.cancelled() or task.exception())
        loop = asyncio.get_running_loop()
        # One after the other: the second who asks finds the status that the first has made.
        async with self._looking:
            if loop.time() - self._status_at < EVERY_S and not self._news.over:
                return
            # Asked for by itself the first time, so that `now` need not wait until the timeline is read.
            if self._recent is None:
                self._recent = await self._read(_recent_steps)
            recent = self._recent
            status = job_view.page_status(self._state, self._index, self._clock(), recent)
            status |= {
                "ledger_trouble": self._trouble(),
                "live": self._live,
                "simulated": self._simulated(),
            }
            if not self._live:
                status["phase"], status["outcome"] = job_view.how_left(self._state)
            # A new dict each time, never one that is changed: a stream knows by identity
            # which moment it has shown.
            self._now = views.now(status, self._timeline)
            self._status, self._status_at = status, loop.time()

    async def _take_in(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._taking:
            if loop.time() - self._taken_at < EVERY_S and not self._news.over:
                return
            # In several pieces where there is much: what waits for the same thread gets its turn between them.
            while await self._read(self._piece):
                pass
            self._taken_at = loop.time()

    def _piece(self, store: Store) -> bool:
        """On the reading thread; whether there is more."""
        more = _take_in(store, self._timeline, self._frames)
        # Only with the last piece: between two pieces the timeline is older than the newest steps.
        if not more:
            self._recent = _recent_steps(store)
        return more

    # ------------------------------------------------------------ the stream

    async def stream(self, after: int, ledger: str) -> AsyncGenerator[bytes]:
        """See `JobSource.stream`. A slow viewer is behind in the ledger and nowhere else: nothing is queued for it."""
        # Browsers wait for seconds by their own choice, and a coordinator that follows is there in less.
        yield b"retry: 500\n\n"
        await self._look()
        # Another start of the job has another ledger, whose numbers begin again.
        if after > self._timeline.seq or (ledger and ledger != self._timeline.began_utc):
            yield frame("reset", b"{}", self._timeline.seq)
            after = self._timeline.seq
        shown: dict[str, Any] = {}
        while True:
            if batch := await self._after(after):
                # As one piece: each piece that is sent costs 40 microseconds of the loop, and a viewer that is far behind
                # gets thousands of entries.
                yield b"".join(sent for _, sent in batch)
                after = batch[-1][0]
            # One batch at a time: what else waits for the thread gets its turn in between.
            if after < self._timeline.seq:
                continue
            current = self._now
            if shown is not current:
                yield self._delta(shown, current)
                shown = current
            if self._news.over or not self._live:
                yield frame("over", b"{}")
                return
            if not await self._news.wait(QUIET_S):
                yield b": still here\n\n"
                continue
            await asyncio.sleep(EVERY_S)  # what happens meanwhile is one delta
            await self._look()

    def _delta(self, shown: dict[str, Any], current: dict[str, Any]) -> bytes:
        """What changed between two moments. Viewers that keep up all go from the same one to the same one."""
        before, after, made = self._made
        # A viewer that is behind gets a delta of its own. It is right by what that viewer
        # has, whoever asked before.
        if before is not shown or after is not current:
            changed = {k: v for k, v in current.items() if k not in shown or shown[k] != v}
            made = frame("delta", msgspec.json.encode(changed))
            self._made = shown, current, made
        return made

    async def _after(self, after: int) -> list[tuple[int, bytes]]:
        # Only if there is no gap between what the viewer has and what is kept. Else entries would be missing.
        if self._frames and self._frames[0][0] <= after + 1:
            return [x for x in self._frames if x[0] > after][:BATCH]
        if after >= self._timeline.seq:
            return []
        return await self._read(lambda store: _frames_after(store, after, BATCH))

    async def act(self, name: str, arguments: Mapping[str, str], dry: bool) -> PageAnswer:
        """See `JobSource.act`."""
        if self._act is None:
            raise PageRefused("the job has ended: nothing of it can be changed", 409)
        return answer(await self._act(name, arguments, dry))


# ------------------------------------------------------------ on the thread that reads


def _take_in(store: Store, timeline: JobTimeline, frames: Any) -> bool:
    """Takes in what the ledger has and the timeline lacks; whether there is more. frames: gets each entry as it is sent."""
    rows = store.raw_entries(timeline.seq, ENTRIES_AT_ONCE)
    for seq, t_s, utc, kind, text in rows:
        timeline.add(seq, t_s, utc, kind, text)
        # Kept as bytes: an entry is encoded once, however many viewers get it.
        frames.append((seq, _event_frame(seq, t_s, utc, kind)))
    return len(rows) == ENTRIES_AT_ONCE


def _event_frame(seq: int, t_s: float, utc: str, kind: str) -> bytes:
    """An entry as it is streamed: what happened and when. What it means is in the panels, which the page asks for again."""
    return frame("event", msgspec.json.encode({"seq": seq, "t_s": t_s, "utc": utc, "kind": kind}), seq)


def _frames_after(store: Store, after: int, count: int) -> list[tuple[int, bytes]]:
    """Entries as they are streamed."""
    return [
        (seq, _event_frame(seq, t_s, utc, kind)) for seq, t_s, utc, kind, _ in store.raw_entries(after, count)
    ]


def _recent_steps(store: Store) -> dict[str, Any]:
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


def _take_older(store: Store, timeline: JobTimeline, until: int) -> bool:
    """Takes a piece of the ledger into a timeline of old incidents; whether there is more up to the entry `until`."""
    rows = [row for row in store.raw_entries(timeline.seq, ENTRIES_AT_ONCE) if row[0] <= until]
    for row in rows:
        timeline.add(*row)
    return len(rows) == ENTRIES_AT_ONCE


class _Struck(msgspec.Struct, frozen=True):
    """Whom an incident struck first."""

    worker: str
    """Its name; empty: nobody knows."""
    log: str
    """Where its log is, if its end was reported; else empty."""


def _struck(store: Store, incident: Mapping[str, Any]) -> _Struck:
    """The first worker that an incident struck."""
    worker = next(iter(incident.get("workers") or []), "")
    if not worker:
        return _Struck("", "")
    for entry in _around(store, incident):
        if entry.kind == "worker-exited" and entry.fields.get("worker") == worker:
            return _Struck(worker, str(entry.fields.get("log") or ""))
    return _Struck(worker, "")


def _around(store: Store, incident: Mapping[str, Any]) -> list[LedgerEntry]:
    """The entries among which those of an incident are: of its first sign there may be some before it was opened."""
    return store.entries(max(0, incident["seqs"][0] - AROUND // 4), AROUND)


def _incident_told(store: Store, timeline: JobTimeline, known: Mapping[str, Any]) -> dict[str, Any]:
    """One incident: its fields, its report in lines, what health rules found of it or before it on its node, and the incidents
    beside it."""
    number = known["id"]
    around = [msgspec.structs.asdict(e) for e in _around(store, known)]
    entries = [e for e in around if e["seq"] <= known["seqs"][1]]
    lines = incident_lines(number, around)
    return {
        "incident": {k: v for k, v in known.items() if k != "seqs"},
        "story": [printable(line) for line in lines],
        "findings": _findings(timeline, known, entries),
        "previous": number - 1 if number > 1 else None,
        "next": number + 1 if number < timeline.newest else None,
    }


def _findings(
    timeline: JobTimeline, known: Mapping[str, Any], entries: list[dict[str, Any]]
) -> dict[str, Any]:
    """own: findings that belong to an incident, oldest first. before: the newest one on its node before it, of any other
    incident or of none, with `ago_s`; None: there is none that is known of."""
    there = {
        e["seq"]: {"seq": e["seq"], "t_s": e["t_s"], **e["fields"]} for e in entries if e["kind"] == "finding"
    }
    there |= {f["seq"]: f for f in list(timeline.findings)}
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


def _output(job_dir: Path, worker: str, log: str, begun_utc_s: float | None, lives: bool) -> dict[str, Any]:
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


def _place_findings(store: Store, timeline: JobTimeline) -> None:
    """Gives the newest findings the step at which they were made, `at_step`, for the marks of the curves."""
    left = [f for f in timeline.findings if "at_step" not in f and views.marks_curves(f)][-STEPS_SOUGHT:]
    for one in left:
        one["at_step"] = store.step_at(one["t_s"])


def _series(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """Curves, see `rollups.series`, and the names of what the script logged. With `?figure=NAME` the curve of that one instead,
    see `rollups.figure_series`: one at a time, so that a page asks for those that are looked at. Raises PageRefused."""
    first, last = whole(query, "from", 0) or 0, whole(query, "to", None)
    points = max(2, whole(query, "points", 2000, most=2000) or 2000)
    names, name = store.figure_names(), query.get("figure")
    found: dict[str, Any] = {"newest": store.last_step(), "figures": names}
    if name is None:
        return found | {"columns": store.series(first, last, points)}
    if name not in names:
        raise PageRefused(
            f"this job has not logged a value named {name[:64]!r}; logged names: {', '.join(names) or 'none'}",
            404,
        )
    return found | {"figure": {"name": name, "columns": store.figure_series(name, first, last, points)}}
