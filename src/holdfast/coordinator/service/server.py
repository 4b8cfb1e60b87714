"""The coordinator as a process: it turns connections and time into events for the core, and the core's
actions into messages, rows and announcements. It decides nothing.

Everything goes one way. Connections and timers put events into an inbox. One task takes all that wait there, has the core
decide, has that written, and then does it; meanwhile the next events gather. So however long a write takes, no order
leaves before it, nobody's word is lost, and nobody is taken for silent because of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from holdfast.coordinator.kernel import events as ev
from holdfast.coordinator.kernel.validate import validate
from holdfast.coordinator.machine import Core
from holdfast.coordinator.membership import resize, script_metrics
from holdfast.coordinator.service.authentication import Entrance, authorized, give_proof
from holdfast.coordinator.service.checking import CheckRuns, check_routes
from holdfast.coordinator.service.clock import Anchor, CoreClock
from holdfast.coordinator.service.history_store import FILE_NAME
from holdfast.coordinator.service.history_writer import Memory
from holdfast.coordinator.service.inbox import Inbox, Waiting
from holdfast.coordinator.service.injector import Injector, Planned, Strike
from holdfast.coordinator.service.ledger import Ledger, SideThread, Unreadable
from holdfast.coordinator.service.metrics import CONTENT_TYPE, metrics_text
from holdfast.coordinator.service.report import build_report, build_status, shown_blame
from holdfast.coordinator.service.starvation import Starving
from holdfast.coordinator.service.store import SNAPSHOT, LedgerEntry, Page, Said, StepRow, Store, own_ledger
from holdfast.errors import ProtocolError, UsageError
from holdfast.protocol import ledger
from holdfast.protocol import messages as m
from holdfast.protocol.availability import Availability, NodeGoing
from holdfast.protocol.endpoint import Endpoint, write_endpoint
from holdfast.protocol.faults import NODE_FAULTS, FaultKind, check_watched, node_name, parse_fault
from holdfast.protocol.frames import Codec, encode
from holdfast.protocol.job import JobSpec, Resume
from holdfast.protocol.leadership import LOOK_S, newest_term
from holdfast.protocol.ledger import LedgerEvent

_log = logging.getLogger(__name__)
_engine_says = msgspec.json.Decoder(Availability)
_codec: Codec[m.AgentMessage] = Codec(m.AgentMessage)
STATUS_EVERY_S = 0.2
FAREWELL_S = 2.0
EXIT_DEPOSED = 4
LAST_S = 10.0
"""How long a job that ends waits for a ledger that cannot be written. What it trained is in its checkpoints."""
VALIDATE_VARIABLE = "HOLDFAST_VALIDATE"
"""With 1 the state is checked after every batch of events; what is wrong goes to the coordinator's log."""


class Line(asyncio.Queue[bytes | None]):
    """A connection of an agent: what it is sent, in order; None: the end.

    Attributes:
        session: of the agent's last hello. known: the one that the core knows on this node; when the connection ends, it
            is this one that is lost.
        joined: the core has heard of it; before that, orders are for the agent that it knows.
    """

    def __init__(self, node: str, session: str, transport: asyncio.Transport | None) -> None:
        super().__init__()
        self.node, self.session, self.known, self.transport = node, session, session, transport
        self.joined = False


class Coordinator:
    """One job's coordinator. `serve` returns when the job is over, or when another took its place."""

    def __init__(self, job_dir: Path, spec: JobSpec, resume: Resume, term: int = 0) -> None:
        """term: of office, where coordinators on several machines could be; 0: there is one machine.

        Raises:
            sqlite3.Error: the ledger cannot be opened now.
        """
        self._job_dir, self._term = job_dir, term
        self._token = (job_dir / "token").read_text().strip()
        path, shared = own_ledger(job_dir, term), bool(term)
        self._ledger = Ledger(path, shared, lambda: Store(path, shared=shared), self._ledger_trouble)
        store = self._ledger.store
        saved = store.load()
        kept = store.kept("clock")
        self._seq = store.last_seq()
        self._clock = CoreClock(msgspec.msgpack.decode(kept, type=Anchor) if kept else None)
        self._core = Core(spec, saved)
        self._validates = os.environ.get(VALIDATE_VARIABLE) == "1"
        self._injector = Injector(spec.faults)
        self._resumed = saved is not None
        self._resume = resume
        where = self._core.spec.health.history or str(job_dir.absolute().parents[1] / FILE_NAME)
        self._memory = Memory(where, spec.name, self._no_history)
        self._inbox = Inbox()
        self._starving = Starving(self._core.timing.heartbeat_s)
        self._agents: dict[str, Line] = {}
        self._watchers: set[_Watcher] = set()
        self._folder = SideThread("folder")
        self._checks = CheckRuns(
            lambda node, order: self._do(ev.Send(node, order)),
            lambda node, found: self.handle(ev.NodeSays(node, found)),
        )
        self._tick: asyncio.TimerHandle | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends_at: float | None = None
        self._unwritten = False
        self._failed_at = 0.0
        self._productive = (0, 0.0)
        self._formed: tuple[m.Generation, msgspec.Raw] | None = None
        self._status_due = False
        self._over = asyncio.Event()
        self._gone = asyncio.Event()
        self.deposed = False

    @property
    def outcome(self) -> str | None:
        """How the job ended; None while it runs."""
        return self._core.state.outcome

    async def serve(self, listener: socket.socket, host: str, lifeline: int | None = None) -> None:
        """Serves until the job is over.

        Args:
            listener: where others connect already. host: by which they reach it.
            lifeline: a pipe whose end says that the launcher is gone.
        """
        if newest_term(self._job_dir) > self._term:
            os._exit(EXIT_DEPOSED)
        where = Endpoint(host, listener.getsockname()[1], os.getpid(), secrets.token_hex(8))
        app = web.Application(middlewares=[authorized(self._token, where)])
        app.on_response_prepare.append(give_proof)
        app.add_routes(
            [
                web.get("/agent", self._agent),
                web.get("/watch", self._watch),
                web.get("/status", self._status_page),
                web.get("/report", self._report_page),
                web.get("/metrics", self._metrics_page),
                web.get("/ledger", self._ledger_page),
                web.get("/presence", self._presence),
                web.post("/stop", self._stop),
                web.post("/fault", self._fault),
                web.post("/resize", self._resize),
                web.post("/drain", self._drain),
                web.post("/engine", self._engine),
                *check_routes(self._checks, lambda: self._core.state),
                web.post("/clear", self._clear),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=FAREWELL_S)
        await runner.setup()
        deciding = asyncio.create_task(self.decide_all())
        self._take_over()
        _log.info("serving", extra={"url": where.url, "resumed": self._resumed, "seq": self._seq})
        write_endpoint(self._job_dir, where)  # who is turned away by its name finds it there
        assert runner.server is not None
        entrance = Entrance(listener, self._token, where, runner.server)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        loop.add_signal_handler(signal.SIGTERM, lambda: self.handle(ev.StopRequested("SIGTERM")))
        if lifeline is not None:
            loop.add_reader(lifeline, self._launcher_gone, lifeline)
        holding = asyncio.create_task(self._hold_office()) if self._term else None
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait([over, deciding], return_when=asyncio.FIRST_COMPLETED)
        if deciding.done():
            deciding.result()  # raises: this process ends, and the next one goes on from what is written
        if holding is not None:
            holding.cancel()
        if self.deposed:
            os._exit(EXIT_DEPOSED)  # not a word more to anyone
        _log.info("the job is over", extra={"outcome": self.outcome})
        await self._write_report()
        for watcher in self._watchers:
            watcher.tell(None)
        try:
            async with asyncio.timeout(FAREWELL_S):
                while self._agents or self._watchers:  # cleanup would wait for them, and read nothing more
                    self._gone.clear()
                    await self._gone.wait()
        except TimeoutError:
            pass
        entrance.close()
        await runner.cleanup()
        await self._memory.close()
        deciding.cancel()
        if not await self._ledger.close(0.0 if self._unwritten else LAST_S):
            _log.error("the ledger's last entries are lost: %s", self._ledger.why)

    async def _hold_office(self) -> None:
        """Looks whether another took over: see `protocol.leadership`. The folder may hang without this process doing so."""
        while await self._folder.do(newest_term, self._job_dir) <= self._term:  # noqa: ASYNC110 - another machine's file
            await asyncio.sleep(LOOK_S)
        _log.warning("another coordinator took over; this one ends at once", extra={"term": self._term})
        self.deposed = True
        self._over.set()

    def _launcher_gone(self, lifeline: int) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        self.handle(ev.StopRequested("the launcher is gone"))

    def _take_over(self) -> None:
        if self._resumed:
            kept = self._ledger.store.kept("injector")
            if kept:
                plans = msgspec.msgpack.decode(kept, type=dict[str, Planned])
                self._injector.plans = plans
                self._injector.mark_running()
            state = self._core.state
            self.handle(ev.Recovered(state.began_s + self._ledger.store.last_t_s()))
        else:
            self.handle(ev.Tick())
            newest, *older = *self._resume.checkpoints, None
            self.handle(ev.DurableFound(newest, tuple(filter(None, older)), self._resume.passed_over))

    # ------------------------------------------------------------ the core

    def handle(self, event: ev.Event, line: Line | None = None) -> None:
        """Takes an event in, for the core to hear of soon. line: of the agent that it came by."""
        self._take_in(event, line)

    def _take_in(self, event: ev.Event, line: Line | None = None) -> Waiting | None:
        if _ending(event) and self._ends_at is None:
            self._ends_at = asyncio.get_running_loop().time()
            self._ends.set_result(None)
        return self._inbox.put(event, line)

    async def effect(self, event: ev.Event) -> None:
        """Takes an event in, and waits until what was decided about it is written and done."""
        if (waiting := self._take_in(event)) is not None:
            waiting.done = asyncio.get_running_loop().create_future()
            await waiting.done

    async def decide_all(self) -> None:
        """The one way from what came to what is done about it, until cancelled."""
        self._late_s()
        while True:
            waiting = await self._inbox.take()
            now_s = time.monotonic()
            events = [w.aged(now_s) for w in waiting]
            if (late_s := self._late_s()) is not None:
                events = [*self._excuses(late_s), *events]
            for each in waiting:
                self._meet(each)
            if events:
                await self._decide(events)
            for each in waiting:
                if each.done is not None and not each.done.done():
                    each.done.set_result(None)

    def _late_s(self) -> float | None:
        """How late this look is, of which there are two for every heartbeat; None: it is not time for one."""
        loop, every_s = asyncio.get_running_loop(), self._core.timing.heartbeat_s / 2
        late_s = 0.0
        if self._beat is not None:
            late_s = loop.time() - self._beat.when()
            if late_s < 0:
                return None
            self._beat.cancel()
        self._beat = loop.call_later(every_s, self._inbox.wake)
        return late_s

    def _excuses(self, late_s: float) -> list[ev.Event]:
        """What the core has to know before it looks at any deadline, or it would end those for whom there was no time: that
        the processor or the ledger kept this process from listening, and agents from speaking."""
        excuses: list[ev.Event] = []
        if late_s > self._core.timing.heartbeat_s / 2:
            excuses.append(ev.Overslept(late_s))
        heard = [(n.name, n.last_seen_s) for n in self._core.state.nodes.values() if n.alive]
        starved = self._starving.look(heard, self._clock())
        return [*excuses, *(ev.Starved(node, waited_s) for node, waited_s in starved.items())]

    def _meet(self, waiting: Waiting) -> None:
        """From here on orders to a node go to the agent that the core hears of now. A decision about the agent before it must
        not reach it: it would start workers that nobody knows of."""
        if isinstance(waiting.event, ev.NodeJoined) and waiting.line is not None:
            waiting.line.joined = True
            hello = waiting.event.hello
            self._starving.joined(hello.node, hello.kernel, hello.pid)

    async def _decide(self, events: list[ev.Event]) -> None:
        """One batch: decided at one moment, written at once, then done."""
        now, state = self._clock(), self._core.state
        before = state.generation
        actions = self._core.handle_all(events, now)
        for wrong in validate(state) if self._validates else ():
            _log.error("the coordinator's state is not valid: %s; after %s", wrong, events)
        formed = any(isinstance(a, ev.Record) and a.kind in ("formed", "started") for a in actions)
        strikes = self._injector.formed(state, now) if formed else []
        strikes += self._injector.due(state, now)
        urgent = bool(actions) or not all(map(_routine, events))
        page = self._page(events, actions, now, before)
        if urgent:
            page.kept[SNAPSHOT] = msgspec.msgpack.encode(state)
            page.kept["clock"] = msgspec.msgpack.encode(self._clock.mark())
            page.kept["injector"] = msgspec.msgpack.encode(self._injector.plans)
            await self._written(page)
        elif page.steps:
            self._ledger.write(page)  # agents tell again what a coordinator that died had not written
        self._carry_out(actions, strikes)
        for entry in page.entries:
            _log.debug("event %s", entry.kind, extra={"seq": entry.seq, "event": entry.fields})
            self._announce("event", entry)
        if self._core.moved or self._tick is None:
            self._plan_tick()
        self._plan_status()

    def _page(
        self, events: list[ev.Event], actions: list[ev.Action], now: float, before: m.Generation | None
    ) -> Page:
        """What a batch leaves in the ledger. before: the generation in which its steps were made."""
        state = self._core.state
        records = [a for a in actions if isinstance(a, ev.Record)]
        if any(isinstance(a, ev.End) for a in actions):
            records += [ev.Record(ledger.FaultNotFired(fault=f)) for f in self._injector.unfired()]
        page = Page([self._entry(r.event, now) for r in records])
        for event in events:
            said = _with_losses(event)
            made_in = before or state.generation
            if said is not None and made_in is not None:
                t_s = round(now - state.began_s - _age_s(event), 4)
                logged = script_metrics.rows(state, said) if isinstance(said, m.Progress) else ()
                page.steps.append(Said(t_s, said.losses, said.generation, len(made_in.members), logged))
        return page

    def _entry(self, event: LedgerEvent, now: float) -> LedgerEntry:
        self._seq += 1
        utc = datetime.now(UTC).isoformat(timespec="milliseconds")
        return LedgerEntry(self._seq, round(now - self._core.state.began_s, 4), utc, event.kind, event)

    async def _written(self, page: Page) -> None:
        """Waits until a decision is in the ledger: nobody may hear of it before, or the next coordinator could decide
        otherwise. Only a job that ends does not wait for ever: there is no next one."""
        writing = self._ledger.write(page)
        if not self._ends.done():
            await asyncio.wait([writing, self._ends], return_when=asyncio.FIRST_COMPLETED)
        if writing.done() or self._ends_at is None:
            writing.result()
            return
        left_s = self._ends_at + LAST_S - asyncio.get_running_loop().time()
        await asyncio.wait([writing], timeout=max(left_s, 0.0 if self._unwritten else LAST_S / 2))
        if not writing.done() and not self._unwritten:
            self._unwritten = True
            told = (
                f"the job ends without its ledger, which cannot be written: {self._ledger.why or 'no answer'}"
            )
            self._say(told)

    def _note(self, event: LedgerEvent) -> None:
        """An event that the core knows nothing of. It is announced when it is written."""
        entry = self._entry(event, self._clock())
        self._ledger.write(Page([entry])).add_done_callback(lambda _: self._announce("event", entry))

    def _ledger_trouble(self, why: str | None) -> None:
        now_s = asyncio.get_running_loop().time()
        if why is not None:
            self._failed_at = now_s
            where = f"{self._job_dir} ({why})"
            self._say(
                f"the ledger cannot be written in {where}: training goes on, what has to be written first waits; make "
                "room there, or make it writable"
            )
            self._note(ledger.LedgerFailed(reason=why))
        else:
            failed_s = round(now_s - self._failed_at, 1)
            text = f"the ledger is written again, after {failed_s:g} s; nothing is missing in it"
            self._say(text)
            self._note(ledger.LedgerBack(failed_s=failed_s))

    def _carry_out(self, actions: list[ev.Action], strikes: list[Strike]) -> None:
        begun = {
            a.message.worker
            for a in actions
            if isinstance(a, ev.Send) and isinstance(a.message, m.StartWorker)
        }
        early = [s for s in strikes if getattr(s.message, "worker", None) not in begun]
        for strike in early:
            self._strike(strike)  # before the JoinGeneration: a fault may wait for the joining itself
        for action in actions:
            self._do(action)
        for strike in strikes:
            if strike not in early:
                self._strike(strike)  # nobody can be told anything before it is started

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.Send(node, message):
                if (line := self._agents.get(node)) and line.joined:
                    line.put_nowait(self._frame(message))
            case ev.ProvideNode(reason):
                self._announce("provide-node", {"reason": reason})
            case ev.ReleaseNode(node, reason, planned):
                self._announce("release-node", {"node": node, "reason": reason, "planned": planned})
            case ev.MarkNode(node, reason):
                self._announce("mark-node", {"node": node, "reason": reason})
            case ev.RebootNode(node, reason):
                self._announce("reboot-node", {"node": node, "reason": reason})
            case ev.Remember():
                self._memory.remember(action)
            case ev.End():
                self._over.set()
            case _:
                pass

    def _frame(self, message: m.ToAgent) -> bytes:
        """The same generation is in every JoinGeneration of a batch: it is encoded once."""
        if not isinstance(message, m.Relay) or not isinstance(message.message, m.JoinGeneration):
            return encode(message)
        generation = message.message.generation
        if self._formed is None or self._formed[0] is not generation:
            self._formed = generation, msgspec.Raw(encode(generation))
        form = msgspec.structs.replace(message.message, generation=self._formed[1])
        return encode(m.Relay(message.worker, form))

    def _plan_tick(self) -> None:
        times = [t for t in (self._core.next_deadline(), self._injector.next_due()) if t is not None]
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        if times and not self._over.is_set():
            delay = max(0.0, min(times) - self._clock()) + 1e-3
            self._tick = asyncio.get_running_loop().call_later(delay, self._tick_due, 2)

    def _tick_due(self, turns: int) -> None:
        """A turn of the loop runs what timers are due before it reads on from what has arrived. Who has spoken in time is
        not to be judged before that is read."""
        self._tick = None
        if turns:
            asyncio.get_running_loop().call_soon(self._tick_due, turns - 1)
        else:
            for excuse in self._excuses(0.0):
                self.handle(excuse)
            self.handle(ev.Tick())

    # ------------------------------------------------------------ injected faults

    def _strike(self, strike: Strike) -> None:
        if strike.message is None:
            self._fired(f"{strike.plan}/", None, None)
        elif (line := self._agents.get(strike.node)) and line.joined:
            line.put_nowait(encode(strike.message))

    def _fired(self, id: str, node: str | None, worker: str | None) -> None:
        plan = self._injector.fired(id)
        if plan is None:
            return
        kind = plan.spec.kind
        struck = None if kind in NODE_FAULTS else worker
        waiting = self._take_in(ev.Injected(str(plan.spec), kind.value, node, struck))
        if kind is FaultKind.KILL_COORDINATOR and waiting is not None:
            waiting.done = asyncio.get_running_loop().create_future()
            waiting.done.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    # ------------------------------------------------------------ agents

    async def _agent(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(max_msg_size=16 << 20, autoping=True)
        await socket.prepare(request)
        hello = await self._first(socket)
        if hello is None:
            await socket.close(code=WSCloseCode.PROTOCOL_ERROR)
            return socket
        line = Line(hello.node, hello.session, request.transport)
        sender = asyncio.create_task(_drain(line, socket))
        try:
            await self._joined(line, hello)
            async for frame in socket:
                if frame.type is WSMsgType.BINARY and self._agents.get(line.node) is line:
                    await self._heard(line, frame.data)
        except ProtocolError as error:
            self._say(f"{line.node}: {error}")
        finally:
            sender.cancel()
            if self._agents.get(line.node) is line:
                _log.info("lost the connection of an agent", extra={"node": line.node})
                del self._agents[line.node]
                self._gone.set()
                self._checks.lost(line.node)
                self.handle(ev.NodeLost(line.node, line.known))
        return socket

    async def _first(self, socket: web.WebSocketResponse) -> m.Hello | None:
        frame = await socket.receive()
        if frame.type is not WSMsgType.BINARY:
            return None
        try:
            message = _codec.decode(frame.data)
        except ProtocolError:
            return None
        return message if isinstance(message, m.Hello) else None

    async def _joined(self, line: Line, hello: m.Hello) -> None:
        """A node that is not known joins with its history."""
        if hello.node != line.node:
            raise ProtocolError(f"its connection says hello for {hello.node}, too")
        self._take_place(line, hello)
        known = self._core.state.nodes.get(hello.node)
        new = known is None or known.session != hello.session
        past = await self._memory.past(hello.identity, hello.devices) if new else ()
        if self._agents.get(line.node) is line:  # and no newer one came meanwhile
            line.known = hello.session
            _log.info("an agent connected", extra={"node": hello.node, "host": hello.host, "pid": hello.pid})
            self.handle(ev.NodeJoined(hello, past), line)

    def _take_place(self, line: Line, hello: m.Hello) -> None:
        """From now on this connection, and no other, speaks for its node. Nothing counts that the one before still says,
        nor its end.

        An agent that connects again has left its old connection. But another agent of the same node may still listen
        there, whose workers the core counts as lost: it is told to end, or it would connect again and take the place.
        """
        before, self._agents[line.node] = self._agents.get(line.node), line
        if before is None or before is line:
            line.session = hello.session
            return
        line.known = before.known
        if before.session != hello.session:
            self._checks.lost(line.node)
            before.put_nowait(encode(m.Shutdown("a newer agent of this node took its place")))
        before.put_nowait(None)
        if before.transport is not None:
            asyncio.get_running_loop().call_later(FAREWELL_S, before.transport.abort)

    def _no_history(self, why: str) -> None:
        """Said once; the job goes on without."""
        self._note(ledger.History(reason=why))

    async def _heard(self, line: Line, data: bytes) -> None:
        node, message = line.node, _codec.decode(data)
        if isinstance(message, m.Hello):
            await self._joined(line, message)
        elif isinstance(message, m.Checked) and self._checks.answered(node, message):
            pass
        elif isinstance(message, m.FaultFired):
            self._fired(message.fault, node, self._armed_worker(message.fault))
        elif isinstance(message, m.FromWorker) and isinstance(message.message, m.FaultFired):
            self._fired(message.message.fault, node, message.worker)
        else:
            self.handle(ev.NodeSays(node, message))

    def _armed_worker(self, fault: str) -> str | None:
        plan = self._injector.plans.get(fault.partition("/")[0])
        return plan.struck if plan else None

    # ------------------------------------------------------------ people and engines

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """Every event from `?after=SEQ` on and the status as it changes, one JSON text each."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        watcher = _Watcher()
        after = int(request.query.get("after", "0"))
        self._watchers.add(watcher)  # what is announced from now on waits until it knows the past
        sender = asyncio.create_task(_drain(watcher.queue, socket, text=True))
        try:
            try:
                watcher.begin(await self._ledger.read(lambda store: _past(store, after)))
            except Unreadable as error:
                watcher.begin([(0, _announcement("log", {"text": str(error)}))])
            watcher.tell(_announcement("status", self._status()))
            async for _ in socket:
                pass
        finally:
            self._watchers.discard(watcher)
            self._gone.set()
            sender.cancel()
        return socket

    async def _status_page(self, request: web.Request) -> web.StreamResponse:
        return _json(self._status())

    async def _report_page(self, request: web.Request) -> web.StreamResponse:
        try:
            steps = await self._steps()
        except Unreadable as error:
            return web.Response(status=503, text=str(error))
        return _json(build_report(self._core.state, steps, self._clock()))

    async def _metrics_page(self, request: web.Request) -> web.StreamResponse:
        try:
            self._productive = await self._ledger.read(Store.productive)
        except Unreadable:
            pass  # what was known last is better than no figures: others do not need the ledger
        steps, productive_s = self._productive
        text = metrics_text(self._core.state, steps, productive_s, self._clock(), self._ledger.why is None)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _ledger_page(self, request: web.Request) -> web.StreamResponse:
        """The job's SQLite file."""
        try:
            return web.Response(
                body=await self._ledger.read(Store.copy), content_type="application/vnd.sqlite3"
            )
        except Unreadable as error:
            return web.Response(status=503, text=str(error))

    async def _steps(self) -> list[StepRow]:
        """All committed steps: those of the ledger, and those that it could not take yet."""
        left = Page(steps=self._ledger.unwritten().steps)
        return await self._ledger.read(lambda store: store.steps(left))

    async def _presence(self, request: web.Request) -> web.StreamResponse:
        """Open for as long as this process lives: its end is how those who would take over hear of it."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            pass
        return socket

    async def _stop(self, request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self.effect(ev.StopRequested(request.query.get("reason", "asked for")))
        except TimeoutError:
            pass  # it waits for the ledger, and so long only: LAST_S
        return _json({"stopping": True})

    async def _fault(self, request: web.Request) -> web.StreamResponse:
        try:
            spec = parse_fault(await request.text())
            check_watched(spec, self._core.spec.health.watch)
            self._check_target(spec.rank, spec.node)
        except UsageError as error:
            return web.Response(status=400, text=str(error))
        now = self._clock()
        plan = self._injector.add(spec, now)
        for strike in self._injector.strike_now(plan, self._core.state):
            self._strike(strike)
        self._plan_tick()
        return _json({"fault": str(spec)})

    def _check_target(self, rank: int | None, node: int | str | None) -> None:
        state = self._core.state
        members = state.generation.members if state.generation else ()
        if rank is not None and rank not in {x.rank for x in members}:
            raise UsageError(f"no rank {rank} in this job: there are {len(members)}, counted from 0")
        if node is not None and node_name(node) not in {n for n, x in state.nodes.items() if x.alive}:
            alive = ", ".join(n for n, x in state.nodes.items() if x.alive)
            raise UsageError(f"no node {node_name(node)} in this job: there are {alive}")

    async def _resize(self, request: web.Request) -> web.StreamResponse:
        """`?nodes=N&reason=`: how many to train on from now on."""
        try:
            nodes = int(request.query.get("nodes", ""))
        except ValueError:
            return web.Response(status=400, text="send ?nodes=N, a whole number")
        state = self._core.state
        try:
            resize.check_resize(state, nodes)
        except UsageError as error:
            return web.Response(status=400, text=str(error))
        if refusal := self._refusal():
            return refusal
        before = state.wanted_nodes
        await self.effect(ev.ResizeRequested(nodes, request.query.get("reason", "asked for")))
        return _json({"before": before, "nodes": state.wanted_nodes, "capacity": state.capacity_nodes})

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        """A NodeGoing as JSON, of a node that must be there."""
        try:
            going = msgspec.json.decode(await request.read(), type=NodeGoing)
            resize.check_drain(self._core.state, going.node)
        except (msgspec.MsgspecError, UsageError) as error:
            return web.Response(status=400, text=str(error))
        if refusal := self._refusal():
            return refusal
        await self.effect(going)
        return _json({"node": going.node})

    async def _clear(self, request: web.Request) -> web.StreamResponse:
        """`?machine=ID&rule=`: a person says that a machine is well, or that a rule was wrong about it."""
        machine = request.query.get("machine", "")
        if not machine:
            return web.Response(status=400, text="send ?machine=ID")
        if refusal := self._refusal():
            return refusal
        await self.effect(ev.MachineCleared(machine, request.query.get("rule", "")))
        return _json({})

    async def _engine(self, request: web.Request) -> web.StreamResponse:
        """What the engine knows of capacity: one of `protocol.availability`, as JSON."""
        try:
            event = _engine_says.decode(await request.read())
        except msgspec.MsgspecError as error:
            return web.Response(status=400, text=str(error))
        if self._ledger.why is None:
            await self.effect(event)
        else:
            self.handle(event)  # it is heard of when that can be written
        return _json({})

    def _refusal(self) -> web.Response | None:
        """What a person hears who wants something changed that cannot be written: else it would happen much later."""
        if self._ledger.why is None:
            return None
        told = f"the ledger cannot be written ({self._ledger.why}): nothing is changed; try again when it can"
        return web.Response(status=503, text=told)

    def _say(self, text: str) -> None:
        """Something about the coordinator itself: for whoever looks on, and for the log."""
        _log.info("%s", text)
        self._announce("log", {"text": text})

    def _announce(self, kind: str, value: Any) -> None:
        if self._watchers:
            data = _announcement(kind, value)
            for watcher in self._watchers:
                watcher.tell(data, value.seq if isinstance(value, LedgerEntry) else 0)

    def _plan_status(self) -> None:
        if self._watchers and not self._status_due:
            self._status_due = True
            asyncio.get_running_loop().call_later(STATUS_EVERY_S, self._send_status)

    def _send_status(self) -> None:
        self._status_due = False
        self._announce("status", self._status())

    def _status(self) -> dict[str, Any]:
        return build_status(self._core.state, self._clock())

    async def _write_report(self) -> None:
        state = self._core.state
        try:
            steps = await self._steps()
        except Unreadable as error:
            self._say(f"the report knows no steps: {error}")
            steps = []
        report = build_report(state, steps, self._clock())
        # Of faults that the job has survived the incidents tell; what is printed last is why it failed.
        failed = state.outcome == "failed" and state.blame is not None
        report["blame"] = shown_blame(state.blame) if failed and state.blame else None
        path = self._job_dir / "report.json"
        try:
            async with asyncio.timeout(LAST_S):
                await self._folder.do(_put_report, path, report)
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no answer for {LAST_S:g} s"
            self._say(f"{path} cannot be written ({why}); what it says is shown here")
        self._announce("ended", report)


class _Watcher:
    """Somebody who watches. What is announced while the past is still being read waits for it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._held: list[tuple[int, bytes | None]] | None = []
        self._read = 0

    def tell(self, data: bytes | None, seq: int = 0) -> None:
        """Queues an announcement; None: the last one was before. seq: of an event, which may have been read already."""
        if 0 < seq <= self._read:
            return
        if self._held is not None:
            self._held.append((seq, data))
        else:
            self.queue.put_nowait(data)

    def begin(self, past: list[tuple[int, bytes]]) -> None:
        """The past comes first, and nothing twice."""
        held, self._held = self._held or [], None
        self._read = past[-1][0] if past else 0
        for _, data in past:
            self.queue.put_nowait(data)
        for seq, later in held:
            self.tell(later, seq)


def _past(store: Store, after: int) -> list[tuple[int, bytes]]:
    return [(entry.seq, _announcement("event", entry)) for entry in store.events(after)]


def _put_report(path: Path, report: dict[str, Any]) -> None:
    work = path.with_suffix(".tmp")
    work.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    work.replace(path)


def _ending(event: ev.Event) -> bool:
    """From here on the job comes to its end, whatever the ledger does: it was asked to, or somebody has all steps."""
    if isinstance(event, ev.StopRequested):
        return True
    if not isinstance(event, ev.NodeSays):
        return False
    said = event.message
    if isinstance(said, m.Exited):
        return said.code == 0
    return isinstance(said, m.FromWorker) and isinstance(said.message, m.Done)


async def _drain(queue: Any, socket: web.WebSocketResponse, text: bool = False) -> None:
    """Sends what is queued, in order, until cancelled or the other side is gone; after None it closes."""
    try:
        while (data := await queue.get()) is not None:
            if text:
                await socket.send_str(data.decode())
            else:
                await socket.send_bytes(data)
        await socket.close()
    except (ConnectionError, OSError):
        return


def _announcement(kind: str, value: Any) -> bytes:
    return msgspec.json.encode({"kind": kind, "value": value})


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _with_losses(event: ev.Event) -> m.Progress | m.Parked | None:
    """The message that tells losses or figures, if it is one."""
    if isinstance(event, ev.NodeSays) and isinstance(event.message, m.FromWorker):
        said = event.message.message
        if isinstance(said, m.Parked) and said.losses:
            return said
        if isinstance(said, m.Progress) and (said.losses or said.figures):
            return said
    return None


def _age_s(event: ev.Event) -> float:
    """How long the news waited in the agent while there was no coordinator."""
    said = event.message if isinstance(event, ev.NodeSays) else None
    return said.age_s if isinstance(said, m.FromWorker) else 0.0


def _routine(event: ev.Event) -> bool:
    """Events that come many times a second and change nothing that a successor could not learn anew."""
    if isinstance(event, ev.Tick | ev.Starved):
        return True
    if not isinstance(event, ev.NodeSays):
        return False
    said = event.message
    return isinstance(said, m.Heartbeat | m.StoreProgress) or (
        isinstance(said, m.FromWorker) and isinstance(said.message, m.Progress | m.Restoring)
    )
