"""The page over a simulated job: the same routes and panels, the coordinator's own core, and a virtual clock that a
person sets.

One task advances the cluster's time, at a speed that is chosen on the page, and writes the core's decisions into a
ledger as the coordinator does. Everything that the page shows of the job comes from that ledger and from the core's state.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import msgspec

from holdfast.coordinator.kernel.state import CoreState, JobPhase
from holdfast.coordinator.service.job_view import build_report
from holdfast.coordinator.service.ledger import Ledger, Unreadable
from holdfast.coordinator.service.page import PageSource, Wakeup
from holdfast.coordinator.service.page_host import listed, prepared, readable
from holdfast.coordinator.service.store import SNAPSHOT, LedgerBatch, LedgerEntry, ReportedSteps, Store
from holdfast.engines.jobs import JobFolder
from holdfast.errors import UsageError
from holdfast.protocol.job_report import encode_report
from holdfast.protocol.ledger import LedgerEvent
from holdfast.protocol.messages import ReportedStep
from holdfast.tools.simulate.live import LiveCluster
from holdfast.tools.simulate.machine import BEGIN_S
from holdfast.tools.simulate.scenario import Scenario
from holdfast.web.application import ACTIONS, PANELS, JobSource, PageAnswer, PageRefused, answer, whole

T = TypeVar("T")

SIMULATED_PANELS = (*PANELS, "map")
SIMULATED_ACTIONS = (*ACTIONS, "strike", "speed")

SPEEDS = (0, 1, 10, 100)
"""The choices of speed, in virtual seconds per real second; 0: time stands still."""
SLICE_S = 0.02
"""The longest time, in seconds, for which the event loop is blocked at once, unless a single event takes longer."""
SHARE = 0.5
"""The largest share of a processor core that the simulation uses: after each turn it pauses accordingly, and the
virtual time pauses with it."""
EVERY_S = 0.1
"""The shortest pause between two turns, in seconds, however much is due."""
LATE_S = 1.0
"""By how many real seconds the cluster may lag behind its clock."""
MEASURED_S = 5.0
"""The period, in seconds, over which the displayed speed is averaged."""
WRITE_S = 5.0


class VirtualClock:
    """Converts real seconds to virtual ones, at a speed that may be changed. Pure: the caller passes the real time."""

    def __init__(self, virtual_s: float, real_s: float, speed: float) -> None:
        self.speed = speed
        self._virtual_s, self._real_s = virtual_s, real_s

    def at(self, real_s: float) -> float:
        """The virtual time."""
        return self._virtual_s + (real_s - self._real_s) * self.speed

    def set(self, virtual_s: float, real_s: float, speed: float | None = None) -> None:
        """Continues from this virtual time, at another speed if one is given."""
        self._virtual_s, self._real_s = virtual_s, real_s
        self.speed = self.speed if speed is None else speed

    def until(self, virtual_s: float, real_s: float) -> float:
        """Real seconds until a virtual time; infinite: it is never reached."""
        if self.speed <= 0 or virtual_s == math.inf:
            return math.inf
        return max(0.0, (virtual_s - self.at(real_s)) / self.speed)


class SimulatedHost:
    """See `web.application.PageHost`: a host of one simulated job. `run` advances its time, and `finish` ends it."""

    may_act = True
    more_jobs = 0

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        folder: JobFolder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """folder: the job's folder, without a previous start in it. clock: real seconds."""
        self._folder, self._clock = folder, clock
        self._entries: list[tuple[float, LedgerEvent]] = []
        self._began = datetime.now(UTC)
        self.began_s = BEGIN_S
        """When the job's newest start began, on the core's clock."""
        self._seq = 0
        self._kept_at = -math.inf
        self.cluster = LiveCluster(scenario, seed, folder.path.name, self._note)
        self.cluster.begin()
        self._time = VirtualClock(self.cluster.now, clock(), 1)
        self._reached: tuple[float, float, float] = (clock(), self.cluster.now, 1.0)
        self._changed = asyncio.Event()
        self._ledger = self._new_ledger()
        self._core, self._news = self.cluster.core, Wakeup()
        self._page = self._new_page()
        self._write()

    # ------------------------------------------------------------ time

    async def run(self) -> None:
        """Advances the cluster's time until it is cancelled. It sleeps until something is due: nothing is polled."""
        while True:
            # Cleared before the turn, so that changes from now on wake it again.
            self._changed.clear()
            wait_s = self.turn()
            if self.cluster.core is not self._core:
                await self._start_again()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if wait_s == math.inf else wait_s):
                    await self._changed.wait()

    def turn(self) -> float:
        """Processes the events that are due, or a part of them; returns the seconds until the next turn."""
        began = self._clock()
        speed = self._time.speed
        if speed > 0:
            # Only up to the next start of the job, which has a ledger of its own.
            done = self.cluster.advance(
                self._time.at(began),
                lambda: self._clock() - began > SLICE_S or self.cluster.core is not self._core,
            )
            if done:
                self.cluster.report()
            else:
                # More is due than there was time for. A little lag is caught up later; beyond that the
                # virtual time waits, or it would run away from the events.
                late_s = self._time.at(began) - self.cluster.now
                self._time.set(self.cluster.now + min(late_s, speed * LATE_S), began)
            self._measure()
        if self.cluster.core is not self._core:
            return 0.0
        self._write()
        took_s = self._clock() - began
        wait_s = self._time.until(self.cluster.next_s(), self._clock())
        # Never without a pause: the viewers of the page are served by the same loop.
        return max(wait_s, took_s * (1 - SHARE) / SHARE, EVERY_S)

    def _measure(self) -> None:
        real_s, virtual_s, _ = self._reached
        passed_s = self._clock() - real_s
        if passed_s >= MEASURED_S:
            self._reached = (self._clock(), self.cluster.now, (self.cluster.now - virtual_s) / passed_s)

    def now(self) -> float:
        """The virtual time, on the core's clock: between two events it is the clock's, and never later than the next
        event."""
        return max(self.cluster.now, min(self._time.at(self._clock()), self.cluster.next_s()))

    # ------------------------------------------------------------ the ledger

    def _note(self, t_s: float, event: LedgerEvent) -> None:
        self._entries.append((t_s, event))

    def _new_ledger(self) -> Ledger:
        path = self._folder.path
        (path / "spec.json").write_bytes(msgspec.json.encode(self.cluster.core.spec))
        ledger = path / "job.sqlite"
        return Ledger(ledger, False, lambda: Store(ledger), lambda why: None)

    def _new_page(self) -> PageSource:
        core = self._core
        return PageSource(
            read=self._read,
            state=core.state,
            index=core.index,
            clock=self.now,
            news=self._news,
            job_dir=self._folder.path,
            live=True,
            trouble=lambda: self._ledger.why,
            act=self._act,
            simulated=self.facts,
        )

    def _read(self, what: Callable[[Store], T]) -> Awaitable[T]:
        return readable(self._ledger.read(what))

    def _write(self, last: bool = False) -> None:
        """Writes the core's decisions and the steps since the last call into the ledger, and notifies the viewers."""
        began_s = self.began_s
        batch = LedgerBatch()
        entries, self._entries = self._entries, []
        for t_s, event in entries:
            self._seq += 1
            at_s = round(t_s + BEGIN_S - began_s, 4)
            utc = (self._began + timedelta(seconds=t_s)).isoformat(timespec="milliseconds")
            batch.entries.append(LedgerEntry(seq=self._seq, t_s=at_s, utc=utc, kind=event.kind, fields=event))
        steps, self.cluster.committed = self.cluster.committed, []
        for step in steps:
            # NaN is null in the ledger: no loss is computed here.
            reported = ReportedStep(step.step, math.nan, step.took_s, made_in=step.generation)
            at_s = round(step.t_s + BEGIN_S - began_s, 4)
            batch.steps.append(
                ReportedSteps(t_s=at_s, losses=(reported,), generation=step.generation, world=step.world)
            )
        real_s = self._clock()
        if last or (entries and real_s - self._kept_at >= WRITE_S):
            self._kept_at = real_s
            batch.kept[SNAPSHOT] = msgspec.msgpack.encode(self._core.state)
        if batch.entries or batch.steps or batch.kept:
            self._ledger.write(batch)
            self._news.tell()

    async def _start_again(self) -> None:
        """Begins a new ledger after the job gave up and was started again, as every start has its own."""
        # Entries that the new core has made already belong into the new ledger.
        begun_s = self.cluster.core.state.began_s - BEGIN_S
        entries = self._entries
        self._entries = [x for x in entries if x[0] < begun_s]
        await self._close()
        self._folder.put_away()
        self._entries = [x for x in entries if x[0] >= begun_s]
        self._core, self._news = self.cluster.core, Wakeup()
        self.began_s, self._seq, self._kept_at = self._core.state.began_s, 0, -math.inf
        self._ledger = self._new_ledger()
        self._page = self._new_page()
        self._write()

    async def _close(self) -> None:
        self._news.end()
        state = self._core.state
        for node in state.membership.nodes.values():
            # Nodes that live have their last contact at infinity; a report needs a time.
            node.last_seen_s = min(node.last_seen_s, self.cluster.now)
        self._write(last=True)
        with suppress(Unreadable):
            await self._report(state)
        await self._ledger.close(WRITE_S)

    async def _report(self, state: CoreState) -> None:
        incidents = await self._ledger.incidents(state.forgotten)
        report = build_report(state, await self._ledger.summary(), self.cluster.now, incidents)
        (self._folder.path / "report.json").write_bytes(encode_report(report))

    async def finish(self) -> None:
        """Writes what is left. The folder then has a job that has ended, which every command can show."""
        membership = self._core.state.membership
        membership.phase, membership.outcome = JobPhase.ENDED, membership.outcome or "stopped"
        await self._close()
        self._folder.close()

    # ------------------------------------------------------------ the host of the page

    async def jobs(self) -> list[dict[str, Any]]:
        """See `PageHost.jobs`: this one alone."""
        return [listed(self._core.state, self.now())]

    async def source(self, job: str) -> JobSource:
        """See `PageHost.source`."""
        if job not in ("", self._folder.path.name):
            raise PageRefused(f"this is the page of the simulated job {self._folder.path.name} alone", 404)
        return _Simulated(self, self._page)

    def close(self) -> None:
        """Ends the streams; no more requests will follow."""
        self._news.end()

    # ------------------------------------------------------------ additions to the page of a simulated job

    def facts(self) -> dict[str, Any]:
        """The fields of the panel `now` about the simulation."""
        cluster = self.cluster
        lags = self._time.speed > 0 and self._reached[2] < 0.8 * self._time.speed
        return {
            "nodes": cluster.scenario.nodes,
            "spares": cluster.scenario.spares,
            "speed": int(self._time.speed),
            "speeds": SPEEDS,
            "reached": round(self._reached[2], 1) if lags else None,
            "restarts": cluster.restarts,
            "over": cluster.finished_s is not None,
        }

    def map(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The panel `map`: the whole cluster, or with `?rack=` the nodes of one rack. Raises PageRefused."""
        rack = whole(query, "rack", None)
        try:
            return self.cluster.map() if rack is None else self.cluster.rack(rack)
        except UsageError as error:
            raise PageRefused(str(error), 404) from error

    def set_speed(self, text: str) -> list[str]:
        """Sets the speed. Raises UsageError."""
        if text not in map(str, SPEEDS):
            raise UsageError(f"speed must be one of {', '.join(map(str, SPEEDS))}")
        real_s = self._clock()
        # From the displayed time: a new speed must not move the time back or forth.
        self._time.set(self.now(), real_s, float(text))
        self._reached = (real_s, self.cluster.now, float(text))
        self._wake()
        return ["the time stands still" if text == "0" else f"{text} virtual seconds pass in a second"]

    def strike(self, target: str, kind: str, dry: bool) -> list[str]:
        """Injects a fault at the present virtual time. Raises UsageError."""
        self._catch_up()
        done = self.cluster.strike(target, kind, dry)
        self._write()
        self._wake()
        return [done]

    def _catch_up(self) -> None:
        """Processes what is due before a person's action, as far as there is time for it. Raises UsageError if the job was
        started again meanwhile."""
        began = self._clock()
        self.cluster.advance(
            self.now(), lambda: self._clock() - began > SLICE_S or self.cluster.core is not self._core
        )
        if self.cluster.core is not self._core:
            self._wake()
            raise UsageError("the simulated job has just been started again; look at it, and try again")

    async def _act(self, name: str, arguments: Mapping[str, str], dry: bool) -> dict[str, Any]:
        """Drain, resize, clear and stop: checked as in a real job, and decided by the same core."""
        try:
            if not dry:
                self._catch_up()
            would, event = prepared(self._core.state, name, arguments)
        except UsageError as error:
            raise PageRefused(str(error)) from error
        if not dry:
            self.cluster.tell([event])
            self._write()
            self._wake()
        # There is no command for it: other processes cannot reach a simulated job.
        return {"action": name, "dry": dry, "would": would, "command": ""}

    def _wake(self) -> None:
        self._news.tell()
        self._changed.set()


class _Simulated:
    """See `web.application.JobSource`: the job's page, with the map and the faults that can be injected."""

    def __init__(self, host: SimulatedHost, page: PageSource) -> None:
        self._host, self._page = host, page

    async def panel(self, name: str, query: Mapping[str, str]) -> PageAnswer:
        """See `JobSource.panel`."""
        if name == "map":
            return answer(self._host.map(query))
        return await self._page.panel(name, query)

    def stream(self, after: int, ledger: str) -> AsyncGenerator[bytes]:
        """See `JobSource.stream`."""
        return self._page.stream(after, ledger)

    async def act(self, name: str, arguments: Mapping[str, str], dry: bool) -> PageAnswer:
        """See `JobSource.act`."""
        try:
            match name:
                case "strike":
                    would = self._host.strike(arguments.get("target", ""), arguments.get("kind", ""), dry)
                case "speed":
                    would = self._host.set_speed(arguments.get("speed", ""))
                case _:
                    return await self._page.act(name, arguments, dry)
        except UsageError as error:
            raise PageRefused(str(error)) from error
        t_s = self._host.cluster.now - self._host.began_s
        return answer({"action": name, "dry": dry, "would": would, "command": "", "t_s": round(t_s, 3)})
