"""The connections of agents: which one represents a node, and its reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import closing, suppress

from aiohttp import WSCloseCode, WSMsgType, web

from holdfast.coordinator.kernel import events as ev
from holdfast.coordinator.service.checking import CheckRuns
from holdfast.coordinator.service.decision_loop import DecisionLoop
from holdfast.coordinator.service.history_store import JobHistory
from holdfast.coordinator.service.metrics import Readings
from holdfast.coordinator.service.queues import FAREWELL_S, AgentLines, AgentQueue, drain
from holdfast.coordinator.service.watchers import Watchers
from holdfast.errors import ProtocolError
from holdfast.protocol import messages as m
from holdfast.protocol.generation_difference import NOTHING
from holdfast.protocol.phases import Phase
from holdfast.protocol.wire.frames import Codec, encode

_codec: Codec[m.AgentMessage] = Codec(m.AgentMessage)
_NOT_FOR_THE_CORE = (m.FaultFired, m.Imported)
_log = logging.getLogger(__name__)
_ENDS = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR)


class AgentConnections:
    """Serves the connections of agents. `gone` is set whenever one has ended."""

    def __init__(
        self,
        *,
        loop: DecisionLoop,
        lines: AgentLines,
        checks: CheckRuns,
        memory: JobHistory,
        watchers: Watchers,
        gone: asyncio.Event,
        term: int,
        superseded: Callable[[], None],
    ) -> None:
        """term: of leadership. superseded: called when an agent has seen a later one."""
        self._term, self._superseded = term, superseded
        self._loop, self._lines, self._checks = loop, lines, checks
        self._memory, self._watchers, self._gone = memory, watchers, gone
        self.closes_with = WSCloseCode.OK
        """What agents are told when their connection is closed: SERVICE_RESTART where another coordinator follows."""
        self._imported = m.Imported()
        """What scripts of this job imported, as far as rank 0 has said it since this process began."""
        self.readings: dict[str, Readings] = {}
        """Node to what its agent read of its machine last. Not in the state: a coordinator that takes over hears it anew."""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        # 16 MiB, the limit of a frame: a hello of a node with many workers and snapshots is the largest
        # message, and stays below one.
        socket = web.WebSocketResponse(max_msg_size=16 << 20, autoping=True)
        await socket.prepare(request)
        return await self.talk(socket, request.transport)

    async def talk(
        self, socket: web.WebSocketResponse, transport: asyncio.Transport | None
    ) -> web.WebSocketResponse:
        """Serves an open connection until it ends."""
        # Nothing is done for a connection before it has said who it is. The token was proved at the listener;
        # this is the second step, and strangers never come so far.
        hello = await self._first(socket)
        if hello is None:
            await socket.close(code=WSCloseCode.PROTOCOL_ERROR)
            return socket
        # It has proved that it knows the token, and a later coordinator has proved itself to it. The folder may say so only
        # later, or not at all where there is none.
        if hello.term > self._term:
            _log.warning("an agent has seen term %d", hello.term, extra={"node": hello.node})
            self._superseded()
            await socket.close(code=WSCloseCode.POLICY_VIOLATION)
            return socket
        line = AgentQueue(hello.node, hello.session, transport)
        ended = False
        sender = asyncio.create_task(drain(line, socket, code=lambda: self.closes_with))
        try:
            await self._on_hello(line, hello)
            # `async for` would hide whether the agent closed the connection, or only its kernel did.
            while (frame := await socket.receive()).type not in _ENDS:
                # Checked for every frame. A connection that was replaced may have frames in its buffer, and
                # they are of a past that the new agent has reported otherwise.
                if frame.type is WSMsgType.BINARY and self._speaks(line):
                    await self._on_frame(line, frame.data)
            ended = frame.type is WSMsgType.CLOSE
        except ProtocolError as error:
            ended = True
            self._watchers.say(f"{line.node}: {error}")
        finally:
            sender.cancel()
            # Only the connection that speaks for the node reports its loss. The end of one that was replaced
            # says nothing about the node.
            if self._speaks(line):
                _log.info("lost the connection of an agent", extra={"node": line.node})
                del self._lines.by_node[line.node]
                self.readings.pop(line.node, None)
                self._gone.set()
                self._checks.lost(line.node)
                # For as long as it is looked after, the node counts as there: it is silent, and no longer than any other may.
                if (ended or await self._is_gone(hello)) and line.node not in self._lines.by_node:
                    self._loop.handle(ev.NodeLost(line.node, line.known))
        return socket

    async def _is_gone(self, hello: m.Hello) -> bool:
        """Whether the agent has ended, whose connection broke without a word.

        The kernel closes the connections of a process that ends. But connections also break under agents that live: a
        firewall forgets them, an administrator resets them, and then all of a job's at the same moment. Such an agent is
        back within milliseconds, and it still listens for those that fetch snapshots; where nobody listens any more, it has
        ended. Where nobody answers in time, the node's silence decides, which tells ours from its own.
        """
        limit_s = self._loop.core.timing.heartbeat_s
        if not hello.snapshot_port:
            await asyncio.sleep(limit_s)  # nothing tells but that it is back
            return True
        try:
            async with asyncio.timeout(limit_s):
                reader, writer = await asyncio.open_connection(hello.host, hello.snapshot_port)
        except TimeoutError:
            return False
        except OSError:
            return True
        # The kernel closes what a process has left one after the other, and may have come to the listener only now. It then
        # resets the connection. An agent that lives waits for a request.
        with closing(writer), suppress(ConnectionError):
            try:
                async with asyncio.timeout(limit_s):
                    await reader.read(1)
            except TimeoutError:
                return False
        return True

    async def _first(self, socket: web.WebSocketResponse) -> m.Hello | None:
        frame = await socket.receive()
        if frame.type is not WSMsgType.BINARY:
            return None
        try:
            message = _codec.decode(frame.data)
        except ProtocolError:
            return None
        return message if isinstance(message, m.Hello) else None

    async def _on_hello(self, line: AgentQueue, hello: m.Hello) -> None:
        """A node that is not known joins with its history."""
        # One connection, one node: orders are routed by it.
        if hello.node != line.node:
            raise ProtocolError(f"its connection also sends the hello of {hello.node}")
        # Before the history is read, which may take a second: from now on nothing of the connection before is
        # believed.
        self._speak_for_node(line, hello)
        # Another generation than the newest, or one that this coordinator never knew: then it is sent the whole.
        newest = self._loop.core.state.membership.generation
        same = newest is not None and hello.generation == (newest.number, newest.digest)
        line.base = newest if newest is not None and same else NOTHING
        if hello.ledger is not None:
            self._lines.with_copy.add(hello.node)
        known = self._loop.core.state.membership.nodes.get(hello.node)
        new = known is None or known.session != hello.session
        # Only for a session that is new. A reconnect must not wait for a database that is slow.
        past = await self._memory.past(hello.identity, hello.devices) if new else ()
        if self._speaks(line):  # and no newer one came meanwhile
            line.known = hello.session
            _log.info("an agent connected", extra={"node": hello.node, "host": hello.host, "pid": hello.pid})
            self._loop.handle(ev.NodeJoined(hello, past), line)
            if self._imported.modules:
                line.put_nowait(encode(self._to_preload()))

    def _speak_for_node(self, line: AgentQueue, hello: m.Hello) -> None:
        """From now on this connection, and no other, speaks for its node. Nothing counts that the one before still says,
        nor its end.

        An agent that connects again has left its old connection. But another agent of the same node may still listen
        there, whose workers the core counts as lost: it is told to end, or it would connect again and take the place.
        """
        before, self._lines.by_node[line.node] = self._lines.by_node.get(line.node), line
        if before is None or before is line:
            line.session = hello.session
            return
        # The core still knows the old session until it has heard the new hello. If this connection ends
        # before, it is the old one that is lost.
        line.known = before.known
        # Another process of the same node. It would reconnect and take the place again, and both would fight
        # for it for ever.
        if before.session != hello.session:
            self._checks.lost(line.node)
            before.put_nowait(encode(m.Shutdown("a newer agent of this node took its place")))
        # The last message is sent first, then the connection is closed; a transport that does not take it in time is
        # aborted.
        before.put_nowait(None)
        if before.transport is not None:
            asyncio.get_running_loop().call_later(FAREWELL_S, before.transport.abort)

    async def _on_frame(self, line: AgentQueue, data: bytes) -> None:
        reports: list[m.FromWorker] = []
        for message in _codec.decode_all(data):
            # Those that come one after the other are one event.
            if isinstance(message, m.FromWorker) and not isinstance(message.message, _NOT_FOR_THE_CORE):
                reports.append(message)
                continue
            self._on_reports(line, reports)
            reports = []
            if not self._speaks(line):
                return
            if isinstance(message, m.FromWorker):
                self._on_service_report(line.node, message)
            else:
                await self._on_message(line, message)
        self._on_reports(line, reports)

    def _speaks(self, line: AgentQueue) -> bool:
        """Whether the connection still represents its node; one that was replaced meanwhile says nothing any more."""
        return self._lines.by_node.get(line.node) is line

    def _on_reports(self, line: AgentQueue, reports: list[m.FromWorker]) -> None:
        if reports and self._speaks(line):
            self._loop.handle(ev.WorkersSay(line.node, tuple(reports)))

    def _on_service_report(self, node: str, report: m.FromWorker) -> None:
        """One of `_NOT_FOR_THE_CORE`."""
        if isinstance(fired := report.message, m.FaultFired):
            # A copy is of an older step than the one that is computed meanwhile.
            step = None if fired.phase == Phase.SNAPSHOT else fired.step
            self._loop.fired(fired.fault, node, report.worker, step)
        # It decides nothing: a spare node that does not know it is only slower to start.
        elif isinstance(imported := report.message, m.Imported):
            self._learn(imported)

    async def _on_message(self, line: AgentQueue, message: m.NodeMessage) -> None:
        node = line.node
        if isinstance(message, m.Hello):
            await self._on_hello(line, message)
        # Answers to checks that a person asked for carry negative numbers and never reach the core: they
        # decide nothing.
        elif isinstance(message, m.Checked) and self._checks.answered(node, message):
            pass
        elif isinstance(message, m.FaultFired):
            self._loop.fired(message.fault, node, self._armed_worker(message.fault))
        # The rest of what a coordinator that gathered its ledger asked for, and which is gone.
        elif isinstance(message, m.LedgerKept):
            pass
        # For people. A sign of life it need not be: the heartbeat comes more often.
        elif isinstance(message, m.NodeReadings):
            self.readings[node] = message.readings
        else:
            self._loop.handle(ev.NodeSays(node, message))

    def _learn(self, imported: m.Imported) -> None:
        """Tells all nodes what the script imports, if that is new: the spare ones as well."""
        # A union, never less than before. A module that only one of several scripts imports costs a spare a
        # moment; one that was taken out again would cost a replacement its time.
        both = m.Imported(
            _union(self._imported.modules, imported.modules),
            _union(self._imported.variables, imported.variables),
        )
        if both == self._imported:
            return
        self._imported = both
        for line in self._lines.by_node.values():
            line.put_nowait(encode(self._to_preload()))

    def _to_preload(self) -> m.Preload:
        return m.Preload(modules=self._imported.modules, variables=self._imported.variables)

    def _armed_worker(self, fault: str) -> str | None:
        plan = self._loop.injector.plans.get(fault.partition("/")[0])
        return plan.struck if plan else None


def _union(known: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*known, *more)))[: m.MOST_MODULES]
