"""What people, watchers and engines may ask of a running job over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import WSCloseCode, web

from holdfast.coordinator.kernel import events as ev
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.membership import resize
from holdfast.coordinator.service.checking import CheckRuns, check_routes
from holdfast.coordinator.service.decision_loop import DecisionLoop
from holdfast.coordinator.service.job_view import build_report
from holdfast.coordinator.service.ledger import Ledger, Unreadable
from holdfast.coordinator.service.metrics import Readings, Scrape
from holdfast.coordinator.service.queues import FAREWELL_S
from holdfast.coordinator.service.store import KEEPERS, LedgerBatch, News, Store
from holdfast.coordinator.service.tally import Tally
from holdfast.coordinator.service.watchers import JobWatcher, Watchers, announcement
from holdfast.errors import Damaged, UsageError
from holdfast.protocol.engine_orders import Availability, EngineOrders, NodeGoing, as_announced, kind_of
from holdfast.protocol.faults import check_watched, node_name, parse_fault
from holdfast.protocol.health import Remedy
from holdfast.protocol.job import JobDescription
from holdfast.protocol.job_view import LEDGER_KEPT
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.wire.decoding import decode

MOST_KEEPERS = 64
"""Of whom each is waited for at the end. Who comes after them is given the ledger as well."""
BODY_PIECE = 1 << 18
"""Bytes of a large answer that are sent at once."""
SETTLED_S = 2.0
"""So long after a commit what its script logged for it has been told. A killed rank 0 loses its last 50 ms for good."""

_engine_says = msgspec.json.Decoder(Availability)
_going = msgspec.json.Decoder(NodeGoing)


class Routes:
    """The coordinator's routes but that of agents. `gone` is set whenever somebody stops watching."""

    def __init__(
        self,
        *,
        loop: DecisionLoop,
        ledger_file: Ledger,
        checks: CheckRuns,
        watchers: Watchers,
        gone: asyncio.Event,
        describe: Callable[[], JobDescription],
        readings: Mapping[str, Readings],
    ) -> None:
        """readings: node to what its agent read of its machine, as it is now."""
        self._describe_job = describe
        self._loop, self._ledger, self._checks = loop, ledger_file, checks
        self._watchers, self._gone = watchers, gone
        self._tally = Tally()
        self._readings = readings

    def all(self) -> list[web.RouteDef]:
        """For `web.Application.add_routes`."""
        return [
            web.get("/watch", self._watch),
            # In the path and not in a query: Kubernetes' API server leaves the query of a WebSocket out on its way.
            web.get(r"/watch/{after:\d{1,18}}", self._watch),
            web.get(r"/watch/{after:\d{1,18}}/keep/{keeper:[0-9a-f]{1,32}}", self._watch),
            web.get("/status", self._status_page),
            web.get("/report", self._report_page),
            web.get("/metrics", self._metrics_page),
            web.get("/ledger", self._ledger_page),
            web.get("/news", self._news_page),
            web.get("/orders", self._orders_page),
            web.get("/presence", self._presence),
            web.get("/description", self._describe),
            web.post("/stop", self._stop),
            web.post("/fault", self._fault),
            web.post("/resize", self._resize),
            web.post("/drain", self._drain),
            web.post("/engine", self._engine),
            *check_routes(self._checks, lambda: self._loop.core.state),
            web.post("/clear", self._clear),
            web.post("/node", self._node),
        ]

    async def _describe(self, request: web.Request) -> web.StreamResponse:
        """What a node needs to know before it joins."""
        try:
            return _json(await asyncio.to_thread(self._describe_job))
        except (OSError, UsageError) as error:
            return web.Response(status=503, text=str(error))

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """Every event from `/SEQ` or `?after=SEQ` on, and the status, whole and then as it changes (`protocol.job_view`), one
        JSON text each. With `/keep/NAME` the ledger follows in binary when the job has ended: for who looks on from where
        the job's folder is not, and says `LEDGER_KEPT` when it has it. NAME: one of its own, the same in each connection."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        watcher = JobWatcher(int(request.match_info.get("after") or request.query.get("after", "0")))
        # Registered before the past is read. In the other order an event that is announced in between would
        # be neither in the past nor announced.
        self._watchers.all.add(watcher)
        # Those that were announced while nobody listened, or that an engine before this one was given.
        for order in self._loop.open_orders():
            watcher.tell(announcement(kind_of(order), as_announced(order)))
        # Read in the same moment: who is registered before the end is told of it, and nobody twice.
        last, keeper = self._watchers.last, request.match_info.get("keeper")
        if keeper is not None and len(self._watchers.keepers) < MOST_KEEPERS:
            self._watchers.keepers.add(keeper)
            self._note_keepers()
        sender = asyncio.create_task(self._send(watcher, socket, keeps=keeper is not None))
        try:
            # The status of before may be as old as the last watcher.
            await self._watchers.look()
            if last is not None:
                watcher.tell(last)
                watcher.end()
            async for frame in socket:
                if keeper is not None and frame.data == LEDGER_KEPT:
                    self._watchers.served.set()
        finally:
            # Ctrl-C closes in order, and nobody comes back. Whose connection broke will look for the job again.
            if keeper is not None and socket.close_code == WSCloseCode.OK:
                self._watchers.keepers.discard(keeper)
                self._note_keepers()
            self._watchers.all.discard(watcher)
            self._gone.set()
            sender.cancel()
        return socket

    def _note_keepers(self) -> None:
        # For the next coordinator, which would else have to wait at the end for people who never looked. At the end, and
        # where this one hands over, it closes their connections itself: that says nothing about them.
        if not self._loop.has_left and not self._loop.over.is_set():
            self._ledger.write(LedgerBatch(kept={KEEPERS: msgspec.msgpack.encode(self._watchers.keepers)}))

    async def _send(self, watcher: JobWatcher, socket: web.WebSocketResponse, keeps: bool) -> None:
        try:
            code = await watcher.send(socket, self._ledger.read, self._watchers.feed)
            # After the last announcement nobody can ask any more: the port is about to be closed. The watcher closes the
            # connection: a frame that ends it from here would come before its word that it has the ledger.
            if keeps and code == WSCloseCode.OK and self._loop.core.state.membership.outcome is not None:
                await socket.send_bytes(await self._ledger.read(Store.copy))
            else:
                await socket.close(code=code)
        except Unreadable:
            await socket.close()
        except (ConnectionError, OSError):
            return

    async def _status_page(self, request: web.Request) -> web.StreamResponse:
        return await _in_pieces(request, await self._watchers.feed.page(), "application/json")

    async def _report_page(self, request: web.Request) -> web.StreamResponse:
        try:
            state = self._loop.core.state
            steps, told = await self._ledger.summary(), await self._ledger.incidents(incidents.total(state))
        except Unreadable as error:
            return web.Response(status=503, text=str(error))
        return _json(build_report(state, steps, self._loop.clock(), told))

    async def _metrics_page(self, request: web.Request) -> web.StreamResponse:
        before = self._tally
        try:
            self._tally = await self._ledger.read(lambda store: store.tally(before))
        # A scrape must not fail because of the disk: the metric that alerts on the disk is on the same page.
        except Unreadable:
            pass
        writable = self._ledger.why is None
        core, clock = self._loop.core, self._loop.clock
        figures = Scrape(core.state, core.index, self._tally, clock(), writable, self._readings)
        body, content_type = await asyncio.to_thread(figures.encode, request.headers.get("Accept", ""))
        return await _in_pieces(request, body, content_type)

    async def _ledger_page(self, request: web.Request) -> web.StreamResponse:
        """The job's SQLite file."""
        try:
            copy = await self._ledger.read(Store.copy)
        except Unreadable as error:
            return web.Response(status=503, text=str(error))
        return await _in_pieces(request, copy, "application/vnd.sqlite3")

    async def _news_page(self, request: web.Request) -> web.StreamResponse:
        """`?seq=&place=`: what a follower of the ledger has not read yet, see `Store.news`."""
        try:
            seq, place = (int(request.query.get(name, "0")) for name in ("seq", "place"))
        except ValueError:
            return web.Response(status=400, text="seq and place must be whole numbers: ?seq=N&place=N")
        # A follower is given a step once and never again. So it gets a step only when what the script logged
        # for it can no longer come.
        until_s = self._loop.clock() - self._loop.core.state.began_s - SETTLED_S
        try:
            # Encoded on the thread that reads: an entry may name thousands of workers.
            news = await self._ledger.read(lambda store: _encoded(store.news(seq, place, until_s)))
        except Unreadable as error:
            return web.Response(status=503, text=str(error))
        return await _in_pieces(request, news, "application/json")

    async def _orders_page(self, request: web.Request) -> web.StreamResponse:
        """See `protocol.engine_orders.EngineOrders`."""
        state = self._loop.core.state
        return _json(
            EngineOrders(nodes=state.wanted_nodes + state.spec.spares, orders=self._loop.open_orders())
        )

    async def _presence(self, request: web.Request) -> web.StreamResponse:
        """Open for as long as this process lives: its end is how those who would take over hear of it. With `?orders` it says a word
        at each new order to the engine."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if "orders" not in request.query:
            async for _ in socket:
                pass
            return socket
        news = asyncio.Event()
        self._watchers.engines.add(news)
        sender = asyncio.create_task(_tell_of_orders(news, socket))
        try:
            async for _ in socket:
                pass
        finally:
            self._watchers.engines.discard(news)
            sender.cancel()
        return socket

    async def _stop(self, request: web.Request) -> web.StreamResponse:
        """`?reason=&cause=`: the job is to end. cause: one of `NoticeCause`, by default `stop`."""
        try:
            cause = NoticeCause(request.query.get("cause", NoticeCause.STOP))
        except ValueError:
            return web.Response(status=400, text=f"send ?cause=, one of {', '.join(NoticeCause)}")
        try:
            # A person who presses Ctrl-C gets an answer in any case. The stop itself is decided when its
            # event can be written.
            async with asyncio.timeout(FAREWELL_S):
                await self._loop.effect(ev.StopRequested(request.query.get("reason", "asked for"), cause))
        except TimeoutError:
            pass
        return _json({"stopping": True})

    async def _fault(self, request: web.Request) -> web.StreamResponse:
        try:
            spec = parse_fault(await request.text())
            check_watched(spec, self._loop.core.spec.health.watch)
            # Refused with the list of what there is. A fault for a rank that does not exist would wait for
            # ever, and the person with it.
            self._check_target(spec.rank, spec.node)
        except UsageError as error:
            return web.Response(status=400, text=str(error))
        now = self._loop.clock()
        plan = self._loop.injector.add(spec, now)
        for order in self._loop.injector.fire_now(plan, self._loop.core.state):
            self._loop.order_fault(order)
        self._loop.plan_tick()
        return _json({"fault": str(spec)})

    def _check_target(self, rank: int | None, node: int | str | None) -> None:
        state = self._loop.core.state
        members = state.membership.generation.members if state.membership.generation else ()
        if rank is not None and rank not in {x.rank for x in members}:
            raise UsageError(
                f"this job does not have a rank {rank}: it has {len(members)} ranks, counted from 0"
            )
        if node is not None and node_name(node) not in {
            n for n, x in state.membership.nodes.items() if x.alive
        }:
            alive = ", ".join(n for n, x in state.membership.nodes.items() if x.alive)
            raise UsageError(f"this job does not have a node {node_name(node)}; its nodes are {alive}")

    async def _resize(self, request: web.Request) -> web.StreamResponse:
        """`?nodes=N&reason=`: how many to train on from now on."""
        try:
            nodes = int(request.query.get("nodes", ""))
        except ValueError:
            return web.Response(status=400, text="nodes must be a whole number: ?nodes=N")
        state = self._loop.core.state
        try:
            resize.check_resize(state, nodes)
        except UsageError as error:
            return web.Response(status=400, text=str(error))
        # A change that cannot be written would be carried out much later, when the disk has room again and
        # nobody expects it.
        if refusal := self._refusal():
            return refusal
        before = state.wanted_nodes
        await self._loop.effect(ev.ResizeRequested(nodes, request.query.get("reason", "asked for")))
        return _json(
            {"before": before, "nodes": state.wanted_nodes, "capacity": state.membership.capacity_nodes}
        )

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        """A NodeGoing as JSON, of a node that must be there."""
        try:
            going = decode(
                _going.decode, await request.read(), "the body must be a NodeGoing", error=UsageError
            )
            resize.check_drain(self._loop.core.state, going.node)
        except UsageError as error:
            return web.Response(status=400, text=str(error))
        if refusal := self._refusal():
            return refusal
        await self._loop.effect(going)
        return _json({"node": going.node})

    async def _clear(self, request: web.Request) -> web.StreamResponse:
        """`?machine=ID&rule=&remember=`: a person says that a machine is well, or that a rule was wrong about it. remember: not
        empty where the history of machines has no record of it."""
        machine = request.query.get("machine", "")
        if not machine:
            return web.Response(status=400, text="send ?machine=ID")
        if refusal := self._refusal():
            return refusal
        rule, remember = request.query.get("rule", ""), bool(request.query.get("remember"))
        await self._loop.effect(ev.MachineCleared(machine, rule, remember))
        return _json({})

    async def _node(self, request: web.Request) -> web.StreamResponse:
        """`?node=&remedy=&reason=`: a person wants a node rebooted or replaced."""
        try:
            remedy = Remedy(request.query.get("remedy", ""))
            if remedy not in (Remedy.REBOOT, Remedy.REPLACE):
                raise ValueError
        except ValueError:
            return web.Response(status=400, text="send ?remedy=reboot or ?remedy=replace")
        node = request.query.get("node", "")
        try:
            resize.check_drain(self._loop.core.state, node)
        except UsageError as error:
            return web.Response(status=400, text=str(error))
        if refusal := self._refusal():
            return refusal
        await self._loop.effect(ev.NodeOrdered(node, remedy, request.query.get("reason", "asked for")))
        return _json({"node": node})

    async def _engine(self, request: web.Request) -> web.StreamResponse:
        """Takes what the engine knows of capacity: an `Availability`, as JSON."""
        try:
            event = decode(_engine_says.decode, await request.read(), "the body must be an Availability")
        except Damaged as error:
            return web.Response(status=400, text=str(error))
        # What an engine reports about capacity is a fact, and not a wish. It is taken in, and decided when it
        # can be written.
        if self._ledger.why is None:
            await self._loop.effect(event)
        else:
            self._loop.handle(event)
        return _json({})

    def _refusal(self) -> web.Response | None:
        """What a person hears who wants something changed that cannot be written: else it would happen much later."""
        if self._ledger.why is None:
            return None
        told = f"the ledger cannot be written ({self._ledger.why}): nothing was changed; try again when it can be written"
        return web.Response(status=503, text=told)


async def _tell_of_orders(news: asyncio.Event, socket: web.WebSocketResponse) -> None:
    while True:
        await news.wait()
        # Cleared first: an order that comes while the word is sent is told by another one.
        news.clear()
        # The word says only that there is something new. The engine reads all open orders, so none can be missed.
        try:
            await socket.send_str("orders")
        except ConnectionResetError:
            return  # it has gone


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _encoded(news: News) -> bytes:
    """As JSON. Entry by entry: the interpreter is held for one call of the encoder, so all in one would hold the loop too."""
    events = [msgspec.Raw(msgspec.json.encode(entry)) for entry in news.events]
    return msgspec.json.encode(msgspec.structs.asdict(news) | {"events": events})


async def _in_pieces(request: web.Request, body: bytes, content_type: str) -> web.StreamResponse:
    """An answer that may be large, with a turn for others after each piece."""
    response = web.StreamResponse(headers={"Content-Type": content_type})
    response.content_length = len(body)
    await response.prepare(request)
    # As one body it would be copied into the socket's buffer at a stroke, and 8 MB held the loop for 12 ms.
    whole = memoryview(body)
    for begin in range(0, len(whole), BODY_PIECE):
        await response.write(whole[begin : begin + BODY_PIECE])
        await asyncio.sleep(0)
    await response.write_eof()
    return response
