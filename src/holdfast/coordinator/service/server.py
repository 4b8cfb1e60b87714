"""The coordinator as a process: it turns connections and time into events for the core, and the core's
actions into messages, entries of the ledger and announcements. It decides nothing.

Agents come in by `agents`, people and engines by `routes`; both give their events to the `decision_loop`, which feeds the
core, and sends what it decided by `queues` and `watchers`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from aiohttp import WSCloseCode, web

from holdfast import logs
from holdfast.coordinator.kernel import events as ev
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.machine import Core
from holdfast.coordinator.service.agents import AgentConnections
from holdfast.coordinator.service.authentication import Entrance, Handler, authorized, give_proof
from holdfast.coordinator.service.checking import CheckRuns
from holdfast.coordinator.service.decision_loop import (
    HANDED_OVER,
    LAST_S,
    Anchor,
    CoreClock,
    DecisionLoop,
    HandoverPoint,
)
from holdfast.coordinator.service.history_store import FILE_NAME, JobHistory
from holdfast.coordinator.service.injector import Injector, Planned
from holdfast.coordinator.service.job_view import build_report
from holdfast.coordinator.service.ledger import Ledger, LedgerCopies, SideThread, Unreadable
from holdfast.coordinator.service.page_host import CoordinatorPage
from holdfast.coordinator.service.queues import FAREWELL_S, AgentLines
from holdfast.coordinator.service.routes import Routes
from holdfast.coordinator.service.store import KEEPERS, Store, own_ledger
from holdfast.coordinator.service.tally import StepSummary
from holdfast.coordinator.service.watchers import StatusFeed, Watchers
from holdfast.protocol import ledger
from holdfast.protocol.job import JobDescription, JobSpec, Resume
from holdfast.protocol.job_report import JobReport, encode_report
from holdfast.protocol.leadership import EXIT_HANDED_OVER, EXIT_SUPERSEDED, LOOK_S, newest_term
from holdfast.protocol.network.endpoint import Endpoint, read_endpoint, write_endpoint
from holdfast.protocol.network.proof import read_scrape_token
from holdfast.protocol.wire.stored import read_stored_word
from holdfast.web.application import API, headers_of_page
from holdfast.web.sessions import Sessions

_log = logging.getLogger(__name__)
_anchors = msgspec.msgpack.Decoder(Anchor)
_names = msgspec.msgpack.Decoder(list[str])
_plans = msgspec.msgpack.Decoder(dict[str, Planned])
_hand_overs = msgspec.msgpack.Decoder(HandoverPoint)

LINGER_S = 15.0
"""For whoever looked on and has to find this coordinator anew: by the API server, through its proxy."""

PUBLISH_S = 2.0
"""How often the address in the job's folder is looked at. A network's file system has no event for what others delete."""


class Coordinator:
    """One job's coordinator. `serve` returns when the job is over. The process ends there where another takes its place."""

    def __init__(
        self,
        job_dir: Path,
        spec: JobSpec,
        resume: Resume,
        term: int = 0,
        copies: int = 0,
        machine: str = "",
        *,
        steady: Callable[[], float] = time.monotonic,
        thread: Callable[[str], SideThread] = SideThread,
        exit_now: Callable[[int], NoReturn] = logs.exit_now,
    ) -> None:
        """term: of leadership, where coordinators on several machines could be; 0: there is one machine. copies: of the ledger, which
        agents keep. machine: this one's lasting identity; empty: not known. steady: its clock. thread: starts one for what may block,
        by its name. exit_now: ends this process.

        Raises:
            sqlite3.Error: the ledger cannot be opened now.
        """
        self._job_dir, self._term, self._file_ends = job_dir, term, copies > 0
        self._token = read_stored_word(job_dir / "token")
        self._exit_now = exit_now
        # A file on this machine alone may be opened by others here: `holdfast events` within its pod.
        path, shared = own_ledger(job_dir, term), bool(term) and not copies
        self._lines = AgentLines()
        self._copies = LedgerCopies(
            count=copies,
            term=term,
            machine=machine,
            lines=self._lines,
            read_base=lambda: self._ledger.read(Store.copy),
        )
        self._ledger = Ledger(
            path=path,
            shared=shared,
            open_store=lambda: Store(path, shared=shared),
            trouble=lambda why: self._loop.on_ledger_trouble(why),
            also=self._copies.on_batch,
            thread=thread,
        )
        store = self._ledger.store
        saved = store.load()
        self._clock = CoreClock(store.kept_as("clock", _anchors), steady=steady)
        self._core = Core(spec, saved)
        keepers = store.kept_as(KEEPERS, _names) or []
        self._watchers = Watchers(StatusFeed(self._core.state, self._clock), keepers)
        # Read with the rest: of a damaged ledger nothing may be used, and whoever makes this coordinator waits then.
        self._plans = store.kept_as("injector", _plans)
        self._told = store.kept_as(HANDED_OVER, _hand_overs)
        self._resumed = saved is not None
        self._resume = resume
        where = self._core.spec.health.history or str(job_dir.absolute().parents[1] / FILE_NAME)
        self._memory = JobHistory(where, spec.name, self._no_history)
        self._folder = thread("folder")
        self._gone = asyncio.Event()
        self._loop = DecisionLoop(
            core=self._core,
            clock=self._clock,
            injector=Injector(spec.faults),
            ledger_file=self._ledger,
            memory=self._memory,
            lines=self._lines,
            watchers=self._watchers,
            copies=self._copies,
            job_dir=job_dir,
        )
        checks = CheckRuns(
            lambda node, order: self._loop.do(ev.Send(node, order)),
            lambda node, found: self._loop.handle(ev.NodeSays(node, found)),
        )
        self._agents = AgentConnections(
            loop=self._loop,
            lines=self._lines,
            checks=checks,
            memory=self._memory,
            watchers=self._watchers,
            gone=self._gone,
            term=term,
            superseded=self._on_superseded,
        )
        self._routes = Routes(
            loop=self._loop,
            ledger_file=self._ledger,
            checks=checks,
            watchers=self._watchers,
            gone=self._gone,
            describe=self._describe,
            readings=self._agents.readings,
        )
        self.superseded = False
        self._leaves = asyncio.Event()
        self._launcher_lives = True
        self._unanswered = 0

    @property
    def outcome(self) -> str | None:
        """How the job ended; None while it runs."""
        return self._core.state.membership.outcome

    async def serve(
        self, listener: socket.socket, host: str, lifeline: int | None = None, instance: str = ""
    ) -> None:
        """Serves until the job is over.

        Args:
            listener: where others connect already. host: by which they reach it.
            lifeline: a pipe whose end says that the launcher is gone.
            instance: its name, see `protocol.network.endpoint`; empty: one is made up.
        """
        where = Endpoint(
            host=host,
            port=listener.getsockname()[1],
            pid=os.getpid(),
            instance=instance or secrets.token_hex(8),
            term=self._term,
        )
        scrape_token = read_scrape_token(self._job_dir)
        page = CoordinatorPage(
            loop=self._loop,
            ledger_file=self._ledger,
            watchers=self._watchers,
            job_dir=self._job_dir,
            sessions=Sessions(self._token, where.port, time.time, frozenset({host.lower()})),
        )
        app = web.Application(
            middlewares=[
                authorized(self._token, where, scrape_token=scrape_token, sessions=page.sessions),
                self._count_requests(),
            ]
        )
        app.on_response_prepare.append(give_proof)
        app.on_response_prepare.append(headers_of_page)
        app.add_routes([web.get("/agent", self._agents.serve), *self._routes.all(), *page.routes()])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=FAREWELL_S)
        await runner.setup()
        self.begin(where)
        assert runner.server is not None
        entrance = Entrance(
            listener, self._token, where, runner.server, scrape_token=scrape_token, sessions=page.sessions
        )
        loop = asyncio.get_running_loop()
        # Ctrl-C reaches the whole process group. The launcher decides what it means and asks for a stop; a
        # coordinator that ended by itself would take the job's state with it.
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        # Whoever ends this process need not want the end of the job: a machine without a GPU may be drained.
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        if lifeline is not None:
            loop.add_reader(lifeline, self._launcher_gone, lifeline)
        await self.run(entrance)
        page.news.end()
        await self.farewell()
        entrance.close()
        await runner.cleanup()
        await self.close()

    def begin(self, where: Endpoint) -> None:
        """Begins to decide, and publishes the address at which it is about to serve."""
        # Before anything is answered or written: another machine took over while this process was starting.
        if newest_term(self._job_dir) > self._term:
            _log.warning("another coordinator took over before this one served", extra={"term": self._term})
            self._exit_now(EXIT_SUPERSEDED)
        self._deciding = asyncio.create_task(self._loop.decide_all())
        # The past is handled before the address is published, so that the first agent finds a core that knows
        # where the job stands.
        self._take_over()
        _log.info("serving", extra={"url": where.url, "resumed": self._resumed, "seq": self._loop.seq})
        self._beside = [asyncio.create_task(self._keep_published(where, self._write_where(where)))]
        if self._term:
            self._beside.append(asyncio.create_task(self._watch_term()))

    async def run(self, entrance: Entrance) -> None:
        """Returns when the job is over and its report is written. entrance: by which others come in."""
        over = asyncio.create_task(self._loop.over.wait())
        leaves = asyncio.create_task(self._leaves.wait())
        # If the deciding task raised, this process ends with it. A coordinator that answers but decides
        # nothing would look healthy to everybody who watches it.
        deciding = self._deciding
        await asyncio.wait([over, deciding, leaves], return_when=asyncio.FIRST_COMPLETED)
        if deciding.done():
            deciding.result()
        if self._leaves.is_set() and not self._loop.over.is_set():
            await self._hand_over(entrance, deciding)
        for task in (leaves, *self._beside):
            task.cancel()
        if self.superseded:
            # Without cleaning up: closing the ledger or a connection properly would write or send something,
            # and both belong to the successor by now.
            self._exit_now(EXIT_SUPERSEDED)
        _log.info("the job has ended", extra={"outcome": self.outcome})
        await self._write_report()

    async def close(self) -> None:
        """Ends what is left when nobody is served any more."""
        await self._memory.close()
        self._deciding.cancel()
        self._copies.close()
        # Last of all, since everything above may still write an entry.
        if not await self._ledger.close(0.0 if self._loop.unwritten else LAST_S):
            _log.error("the last entries of the ledger are lost: %s", self._ledger.why)

    def _write_where(self, where: Endpoint) -> OSError | None:
        """Puts the address into the job's folder, unless it is there. Returns why it could not."""
        try:
            there = read_endpoint(self._job_dir)
            if there is None or (there != where and there.term <= where.term):
                write_endpoint(self._job_dir, where)
        except OSError as error:
            return error
        return None

    async def _keep_published(self, where: Endpoint, why: OSError | None) -> None:
        """A folder that is full or away is tried again, and a file that somebody deleted is put back: commands and agents that come
        later find the job by it. why: the first attempt failed."""
        told = False
        while True:
            if why is not None and not told:
                _log.error(
                    "the address cannot be written, so commands do not find this job: %s; it is tried again",
                    why,
                )
            if why is None and told:
                _log.warning("the address could be written")
            told = why is not None
            await asyncio.sleep(PUBLISH_S)
            why = await self._folder.do(self._write_where, where)

    async def _watch_term(self) -> None:
        """Looks whether another took over: see `protocol.leadership`. The folder may hang without this process doing so."""
        # On a thread of its own. A shared folder that hangs would otherwise stop the loop, and with it the
        # heartbeat that keeps agents calm.
        while await self._term_in_folder() <= self._term:  # noqa: ASYNC110 - another machine's file
            await asyncio.sleep(LOOK_S)
        self._on_superseded()

    async def _term_in_folder(self) -> int:
        """The newest term, as far as the folder tells; 0: it cannot be read now."""
        try:
            return await self._folder.do(newest_term, self._job_dir)
        except OSError:
            # Looked at again: one failed look must not be the last, or this process would never see that another took over.
            return 0

    def _on_superseded(self) -> None:
        """Ends this process without another word: somebody else decides."""
        _log.warning("another coordinator took over; this one ends immediately", extra={"term": self._term})
        self.superseded = True
        self._loop.over.set()

    async def farewell(self) -> None:
        """Says goodbye at the end of the job."""
        await self._take_leave()
        await self._linger()

    async def _take_leave(self) -> None:
        """Agents and watchers read their last messages and close by themselves; aiohttp's own cleanup would cut them off in
        the middle."""
        self._watchers.end()
        try:
            async with asyncio.timeout(FAREWELL_S):
                while self._lines.by_node or self._watchers.all:
                    self._gone.clear()
                    await self._gone.wait()
        except TimeoutError:
            pass

    async def _linger(self) -> None:
        """Where the ledger's file ends with this machine: somebody who looks on may be just on the way to this coordinator, and
        nobody else could give the ledger away."""
        watchers = self._watchers
        # A job that nobody looks at ends at once.
        if not self._file_ends or not watchers.keepers:
            return
        served, leaves = (asyncio.ensure_future(event.wait()) for event in (watchers.served, self._leaves))
        done, _ = await asyncio.wait({served, leaves}, timeout=LINGER_S, return_when=asyncio.FIRST_COMPLETED)
        served.cancel()
        leaves.cancel()
        if served not in done:
            _log.info("nobody took the ledger, which ends with this pod")

    # ------------------------------------------------------------ handing over

    def _on_sigterm(self) -> None:
        if not self._launcher_lives:
            # Nobody would start the next one, and this one ends the job in order already.
            _log.warning("SIGTERM: not handing over, because the launcher is gone and the job ends")
        elif not self._leaves.is_set():
            _log.info("SIGTERM: handing over to another coordinator")
            self._leaves.set()

    async def _hand_over(self, entrance: Entrance, deciding: asyncio.Task[None]) -> None:
        """Leaves the job to the next process, with everything written that was decided and answered everything that was
        asked. Returns only when the job is over instead."""
        # Who connects from here on waits in the launcher's socket for the next coordinator.
        entrance.close()
        await entrance.settled()
        self._loop.leave()
        # Only a ledger that cannot be written takes so long. What is not written was not done either, so it is left to
        # the next process, as by one that is killed.
        await asyncio.wait([deciding], timeout=LAST_S)
        if deciding.done():
            deciding.result()
        if self._loop.over.is_set():
            return
        deciding.cancel()
        whole = await self._loop.write_last()
        try:
            async with asyncio.timeout(FAREWELL_S):
                while self._unanswered:
                    self._gone.clear()
                    await self._gone.wait()
        except TimeoutError:
            pass
        # Orders that were decided still go out before the connection is closed. The code tells agents that leave, and that
        # would else end with their coordinator, that another one follows.
        self._agents.closes_with = WSCloseCode.SERVICE_RESTART
        for line in self._lines.by_node.values():
            line.put_nowait(None)
        await self._take_leave()
        await self._memory.close()
        if not await self._ledger.close(0.0 if not whole else LAST_S):
            _log.error("handing over without the ledger's last entries: %s", self._ledger.why)
        _log.info("handed over", extra={"seq": self._loop.seq})
        # Without aiohttp's cleanup, which would wait for those who only listen.
        self._exit_now(EXIT_HANDED_OVER)

    def _count_requests(self) -> Any:
        """Counts requests that wait for an answer, and sends those that come too late to the next coordinator."""

        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self._loop.has_left:
                return web.Response(
                    status=503, text="the coordinator hands over; ask again", headers={"Retry-After": "0"}
                )
            # One that becomes a WebSocket has no answer to wait for, and a stream of events has no end.
            if "Upgrade" in request.headers or request.path == f"{API}/stream":
                return await handler(request)
            self._unanswered += 1
            try:
                return await handler(request)
            finally:
                self._unanswered -= 1
                self._gone.set()

        return count

    def _launcher_gone(self, lifeline: int) -> None:
        self._launcher_lives = False
        asyncio.get_running_loop().remove_reader(lifeline)
        self._loop.handle(ev.StopRequested("the launcher has ended"))

    def _take_over(self) -> None:
        if self._resumed:
            if self._plans is not None:
                self._loop.injector.plans = self._plans
                self._loop.injector.mark_running()
            state = self._core.state
            # The time when the old coordinator was last known to live, from the ledger: the incident of its
            # loss begins there and not now.
            last_s, by_intent = state.began_s + self._ledger.store.last_t_s(), False
            told = self._told
            if told is not None and told.seq == self._loop.seq:
                # Only if nothing was written since: a hand-over that was followed by another coordinator is
                # not the reason why this one begins.
                last_s, by_intent = told.at_s, True
            self._loop.handle(ev.Recovered(last_s, by_intent))
        else:
            self._loop.handle(ev.Tick())
            # At least one entry, None if there are none: the core must hear that nothing was found, because
            # it waits for this answer before it starts from scratch.
            newest, *older = *self._resume.checkpoints, None
            self._loop.handle(ev.DurableFound(newest, tuple(filter(None, older)), self._resume.passed_over))

    def _describe(self) -> JobDescription:
        """Reads files, so it is called on a thread."""
        spec, digest = self._core.spec, ""
        if not spec.module:
            with suppress(OSError):
                digest = sha256(Path(spec.cwd, spec.script).read_bytes()).hexdigest()
        identity = read_stored_word(self._job_dir / "identity")
        return JobDescription(
            spec=spec,
            identity=identity,
            script_digest=digest,
            job_dir=str(self._job_dir.absolute()),
        )

    def _no_history(self, why: str) -> None:
        """Said once; the job goes on without."""
        self._loop.note(ledger.History(reason=why))

    async def _write_report(self) -> None:
        state = self._core.state
        try:
            steps, told = await self._ledger.summary(), await self._ledger.incidents(incidents.total(state))
        except Unreadable as error:
            self._watchers.say(
                f"the report does not contain steps and old incidents, because they cannot be read: {error}"
            )
            steps, told = StepSummary(), []
        report = build_report(state, steps, self._clock(), told)
        path = self._job_dir / "report.json"
        try:
            async with asyncio.timeout(LAST_S):
                await self._folder.do(_put_report, path, report)
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no answer for {LAST_S:g} s"
            self._watchers.say(f"{path} cannot be written ({why}); its content follows")
        self._watchers.announce_end(report)


def _put_report(path: Path, report: JobReport) -> None:
    work = path.with_suffix(".tmp")
    work.write_bytes(encode_report(report))
    work.replace(path)
