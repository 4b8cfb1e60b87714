"""A job as the page's source, from the core's state and the ledger: in the coordinator, and for a job that has ended.

What costs time is done on the thread that reads the ledger. All viewers share what was made for one of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from holdfast.coordinator.kernel.index import Index
from holdfast.coordinator.kernel.phases import WorkerPhase
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service import page_facts, page_reader, worker_output
from holdfast.coordinator.service.launches import launches
from holdfast.coordinator.service.store import Store
from holdfast.protocol.verified import samples_shown, verified
from holdfast.web import views
from holdfast.web.cost import cost
from holdfast.web.sources import Answer, Refused, answer, frame, whole
from holdfast.web.story import BOOKMARK_EVERY, Story

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


class Reader(Protocol):
    """Reads the ledger on a thread, one thing after the other."""

    def __call__(self, what: Callable[[Store], T], /) -> Awaitable[T]: ...


class News:
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
    """See `web.sources.Source`."""

    def __init__(
        self,
        *,
        read: Reader,
        state: CoreState,
        index: Index,
        clock: Callable[[], float],
        news: News,
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
        self._story = Story()
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=FRAMES)
        self._facts: dict[str, Any] = {}
        self._now: dict[str, Any] = {}
        self._made: tuple[dict[str, Any], dict[str, Any], bytes] = ({}, {}, b"")
        self._facts_at = -EVERY_S
        self._taken_at = -EVERY_S
        self._looking, self._taking = asyncio.Lock(), asyncio.Lock()
        self._filling: asyncio.Task[None] | None = None
        self._recent: dict[str, Any] | None = None
        self._cache: dict[tuple[Any, ...], tuple[float, int, Answer]] = {}

    # ------------------------------------------------------------ panels

    async def panel(self, name: str, query: Mapping[str, str]) -> Answer:
        """See `Source.panel`."""
        await self._look(whole=name not in ("now", "ranks", "log", "series"))
        loop = asyncio.get_running_loop()
        key = (name, *sorted(query.items()))
        made_s, seq, kept = self._cache.get(key, (0.0, 0, None))
        # Good only while nothing was taken in since. `now` is never taken from here:
        # `_look` has just made it.
        if kept is not None and seq == self._story.seq and loop.time() - made_s < FRESH_S and name != "now":
            return kept
        made = await self._make(name, query)
        # Keys are words of viewers, so their number has to have a bound.
        if len(self._cache) >= MOST_CACHED:
            self._cache.pop(next(iter(self._cache)))
        self._cache[key] = loop.time(), self._story.seq, made
        return made

    async def _make(self, name: str, query: Mapping[str, str]) -> Answer:
        if name == "ranks":
            # Made in pieces on the loop, which owns the state. Sorting and encoding need no
            # state, and go to the thread.
            rows = await page_facts.ranks(self._state)
            first, count = whole(query, "first", 0) or 0, min(500, whole(query, "count", 60) or 60)
            chosen = query.get("q", "")[:200]

            def table(_: Store) -> Answer:
                rows.sort(key=page_facts.urgency)
                return answer(views.ranks(rows, chosen, first, count))

            return await self._read(table)
        if name == "log":
            # By a worker's name and never by a path: a viewer can only choose among the job's own logs.
            path = self._log_of(query.get("worker", ""))
            if not path:
                raise Refused("no such worker", 404)
            return await self._read(lambda _: answer(worker_output.tail(self._job_dir, path)))
        if name == "incident":
            return await self._incident(whole(query, "id", None))
        facts = self._facts
        if name == "incidents":
            # A query must not ask for an answer that grows with the job.
            before, count = (
                whole(query, "before", None),
                min(200, whole(query, "count", views.SHOWN) or views.SHOWN),
            )
            older = await self._older(views.wanted(self._story, before, count))
            return await self._read(lambda _: answer(views.incidents(self._story, before, count, older)))
        # The story is read where it is written, so no entry is taken in meanwhile.
        return await self._read(lambda store: answer(self._view(store, name, query, facts)))

    def _log_of(self, worker: str) -> str:
        """Where the log of a worker is; empty: it has none."""
        known = self._state.membership.workers.get(worker)
        # The core forgets workers that have ended, and their logs stay.
        return known.log if known is not None else worker_output.usual_log(self._job_dir, worker)

    async def _incident(self, number: int | None) -> Answer:
        story = self._story
        known = story.incidents.get(number) if number is not None else None
        if known is None and number is not None and 0 < number <= story.newest:
            known = (await self._older([number])).get(number)
        if known is None:
            raise Refused(
                f"this job does not have an incident {number}: it has {story.forgotten + len(story.incidents)}",
                404,
            )
        one, began = known, self._facts["began_utc_s"]
        begun_utc_s = None if began is None else began + (one.get("first_t_s") or 0.0)
        struck = await self._read(lambda store: page_reader.struck(store, one))
        worker = self._state.membership.workers.get(struck.worker)
        lives = self._live and worker is not None and worker.phase is not WorkerPhase.GONE
        log = struck.log or self._log_of(struck.worker)

        def told(store: Store) -> Answer:
            output = page_reader.output(self._job_dir, struck.worker, log, begun_utc_s, lives)
            return answer(page_reader.incident(store, story, one) | {"output": output})

        return await self._read(told)

    async def _older(self, numbers: list[int]) -> dict[int, dict[str, Any]]:
        """Incidents that the story has let go, out of their part of the ledger."""
        if not numbers:
            return {}
        part = self._story.before(numbers[0])
        # Up to the second bookmark after them: one is let go only when it is over, and is so within some others.
        until = next(
            (seq for n, seq, _ in self._story.bookmarks if n > numbers[-1] + BOOKMARK_EVERY), self._story.seq
        )
        # In several pieces: what waits for the same thread gets its turn between them.
        while await self._read(lambda store: page_reader.older(store, part, until)):
            pass
        found = {n: part.incidents[n] for n in numbers if n in part.incidents}
        # What has let them go saw their end.
        return {n: one | {"open": False} for n, one in found.items() if "id" in one}

    def _view(self, store: Store, name: str, query: Mapping[str, str], facts: Mapping[str, Any]) -> Any:
        story, before = self._story, whole(query, "before", None)
        # A query must not ask for an answer that grows with the job.
        count = min(200, whole(query, "count", views.SHOWN) or views.SHOWN)
        match name:
            case "now":
                return self._now
            case "findings":
                return views.findings(story, before, count)
            case "timeline":
                until_s = float(whole(query, "to", None) or max(facts["t_s"], story.t_s))
                return views.timeline(story, until_s, float(whole(query, "from", 0) or 0))
            case "decisions":
                return views.decisions(story, before, count)
            case "strip":
                return views.strip(story, max(facts["t_s"], story.t_s))
            case "cost":
                return cost(story, facts["goodput"])
            case "launches":
                return launches(self._job_dir, self._state.spec, store)
            case "stall":
                return views.stall(story)
            case "series":
                found = page_reader.series(store, query)
                if "columns" not in found:
                    return found
                page_reader.place_findings(store, story)
                return found | {
                    "marks": views.marks(story),
                    "worlds": list(story.worlds),
                }
            case "checkpoints":
                there = page_facts.kept(list(story.checkpoints), self._state.spec.saving.tiers)
                return views.checkpoints(story, facts, there, verified(self._job_dir))
            case "samples":
                # Only the note of the newest check: the record itself may have gigabytes.
                return samples_shown(self._job_dir, facts["samples_folder"]) | {"step": facts["step"]}
            case "lines":
                return views.lines(story)
            case _:
                raise Refused(f"no panel {name!r}", 404)

    async def _look(self, whole: bool = True) -> None:
        """Takes in what the ledger has, and the facts of this moment; one look for all who ask at once.

        whole: waits until the story has all of the ledger. The first look at a long one takes seconds, and a person who asks
        whether it trains need not wait for that.
        """
        if whole or (self._filling is not None and self._filling.done()):
            await self._take_in()
        elif self._filling is None:
            self._filling = asyncio.create_task(self._take_in())
            # What fails here fails again for whoever needs the whole of it, and is told there.
            self._filling.add_done_callback(lambda task: task.cancelled() or task.exception())
        loop = asyncio.get_running_loop()
        # One after the other: the second who asks finds the facts that the first has made.
        async with self._looking:
            if loop.time() - self._facts_at < EVERY_S and not self._news.over:
                return
            # Asked for by itself the first time, so that `now` need not wait until the story is read.
            if self._recent is None:
                self._recent = await self._read(page_reader.recent)
            recent = self._recent
            facts = page_facts.facts(self._state, self._index, self._clock(), recent)
            facts |= {
                "ledger_trouble": self._trouble(),
                "live": self._live,
                "simulated": self._simulated(),
            }
            if not self._live and facts["outcome"] is None:
                # A coordinator that ends a job writes the outcome before it leaves. There is none: it was killed.
                facts |= {"phase": "ended", "outcome": "killed"}
            # A new dict each time, never one that is changed: a stream knows by identity
            # which moment it has shown.
            self._now = views.now(facts, self._story)
            self._facts, self._facts_at = facts, loop.time()

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
        more = page_reader.take_in(store, self._story, self._frames)
        # Only with the last piece: between two pieces the story is older than the newest steps.
        if not more:
            self._recent = page_reader.recent(store)
        return more

    # ------------------------------------------------------------ the stream

    async def stream(self, after: int, ledger: str) -> AsyncGenerator[bytes]:
        """See `Source.stream`. A slow viewer is behind in the ledger and nowhere else: nothing is queued for it."""
        # Browsers wait for seconds by their own choice, and a coordinator that follows is there in less.
        yield b"retry: 500\n\n"
        await self._look()
        # Another start of the job has another ledger, whose numbers begin again.
        if after > self._story.seq or (ledger and ledger != self._story.began_utc):
            yield frame("reset", b"{}", self._story.seq)
            after = self._story.seq
        shown: dict[str, Any] = {}
        while True:
            if batch := await self._after(after):
                # As one piece: each piece that is sent costs 40 microseconds of the loop, and a viewer that is far behind
                # gets thousands of entries.
                yield b"".join(sent for _, sent in batch)
                after = batch[-1][0]
            # One batch at a time: what else waits for the thread gets its turn in between.
            if after < self._story.seq:
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
        if after >= self._story.seq:
            return []
        return await self._read(lambda store: page_reader.frames_after(store, after, BATCH))

    async def act(self, name: str, arguments: Mapping[str, str], dry: bool) -> Answer:
        """See `Source.act`."""
        if self._act is None:
            raise Refused("the job has ended: nothing of it can be changed", 409)
        return answer(await self._act(name, arguments, dry))
