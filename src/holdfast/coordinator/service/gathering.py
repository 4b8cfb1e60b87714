"""How a coordinator that starts without a ledger, on another machine than its predecessor, gets the newest copy from the
agents.

It listens at its final address, collects which agents connect and which copies they have, fetches the newest one, and closes
their connections. The agents reconnect at once, to the coordinator that goes on from that ledger.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from holdfast.coordinator.service.authentication import Entrance, authorized, give_proof
from holdfast.coordinator.service.queues import FAREWELL_S
from holdfast.coordinator.service.store import FIRST, LedgerBatch, Store
from holdfast.errors import HoldfastError, ProtocolError
from holdfast.protocol import messages as m
from holdfast.protocol.messages import LedgerMark
from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.wire.decoding import MOST_BYTES, decode
from holdfast.protocol.wire.frames import Codec, encode

_log = logging.getLogger(__name__)
_codec: Codec[m.AgentMessage] = Codec(m.AgentMessage)
_batches = msgspec.msgpack.Decoder(LedgerBatch)
OTHERS_S = 0.5
"""So long after the first copy another agent may still come with a newer one. All of them look for a coordinator several times a
second."""
FEW_S = 3.0
"""The same while most nodes have not come. One of them may keep what was decided last, and an agent that has just lost another
coordinator looks for this one where the name service, or the operator, says that it is."""
GIVE_S = 60.0
"""How long an agent may take for one part of its copy."""


class CoordinatorSuperseded(HoldfastError):
    """An agent has spoken with a coordinator of a later term."""


class Unusable(HoldfastError):
    """A copy has no ledger that one could go on from."""


@dataclass(kw_only=True)
class Choice:
    """Chooses which agent's copy is used, and when. Pure: the time is an argument."""

    nodes: int
    """That the job has when all are there."""
    orphan_s: float
    """After so long without a coordinator an agent has ended its workers."""
    began_s: float
    heard: dict[str, LedgerMark | None] = field(default_factory=dict)
    first_copy_s: float | None = None
    refused: set[str] = field(default_factory=set)
    """Whose copy proved to be unusable."""

    def hear(self, node: str, mark: LedgerMark | None, now_s: float) -> None:
        """Notes an agent that connected, with the mark of its copy."""
        self.heard[node] = mark
        if mark is not None and self.first_copy_s is None:
            self.first_copy_s = now_s

    def refuse(self, node: str) -> None:
        """Excludes an agent's copy, because it is of no use."""
        self.refused.add(node)

    def newest(self) -> str | None:
        """The agent with the newest copy; None: none that connected has one."""
        there = [
            (mark, node) for node, mark in self.heard.items() if mark is not None and node not in self.refused
        ]
        # By term first and batch second, as `LedgerMark` is ordered: a later coordinator began from all that
        # an earlier one had written, so its copy is the newer one even with fewer batches.
        return max(there)[1] if there else None

    def due_s(self) -> float:
        """When to decide at the latest."""
        if self.first_copy_s is not None and self.newest() is not None:
            return self.first_copy_s + (OTHERS_S if 2 * len(self.heard) > self.nodes else FEW_S)
        # Who keeps a copy may be slow to find this address. Once its workers have ended nothing is lost any more by
        # beginning from a checkpoint.
        return self.began_s + self.orphan_s

    def is_due(self, now_s: float) -> bool:
        """Whether there is nothing left to wait for."""
        return len(self.heard) >= self.nodes or now_s >= self.due_s()


class Gathering:
    """Serves agents until a copy was taken, or there is none."""

    def __init__(self, *, job_dir: Path, token: str, where: Endpoint, choice: Choice) -> None:
        self._job_dir, self._token, self._where, self._choice = job_dir, token, where, choice
        self._callers: dict[str, _Caller] = {}
        self._news = asyncio.Event()
        self._superseded = False

    async def run(self, listener: socket.socket) -> bool:
        """Whether there is a ledger in the job's folder now. listener: stays open.

        Raises:
            CoordinatorSuperseded: the job is another coordinator's.
        """
        app = web.Application(middlewares=[authorized(self._token, self._where)])
        app.on_response_prepare.append(give_proof)
        # Other requests are for the coordinator that this one becomes. To a person 404 would be its answer.
        app.add_routes([web.get("/agent", self._serve), web.route("*", "/{path:.*}", _later)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=FAREWELL_S)
        await runner.setup()
        assert runner.server is not None
        # Its own descriptor: the listener closes the one that it is given.
        entrance = Entrance(listener.dup(), self._token, self._where, runner.server)
        try:
            return await self._choose()
        finally:
            entrance.close()
            await entrance.settled()
            for caller in list(self._callers.values()):
                # Agents that leave the job would end with their coordinator: another one follows.
                await caller.connection.close(code=WSCloseCode.SERVICE_RESTART)
            await runner.cleanup()

    async def _choose(self) -> bool:
        loop = asyncio.get_running_loop()
        while True:
            if self._superseded:
                raise CoordinatorSuperseded("an agent has seen a later term")
            self._news.clear()
            if not self._choice.is_due(loop.time()):
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._choice.due_s()):
                        await self._news.wait()
                continue
            node = self._choice.newest()
            if node is None:
                _log.info(
                    "no agent keeps the ledger; the job begins from what is saved",
                    extra={"agents": len(self._choice.heard)},
                )
                return False
            try:
                await self._take(node)
            except (Unusable, sqlite3.Error, OSError, TimeoutError) as error:
                _log.warning(
                    "the copy of the ledger at %s cannot be used: %s", node, error or type(error).__name__
                )
                self._choice.refuse(node)
            else:
                return True

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        connection = web.WebSocketResponse(max_msg_size=16 << 20)
        await connection.prepare(request)
        hello = next(iter(await _next(connection) or ()), None)
        if not isinstance(hello, m.Hello):
            await connection.close(code=WSCloseCode.PROTOCOL_ERROR)
            return connection
        if hello.term > self._where.term:
            self._superseded = True
        caller = self._callers[hello.node] = _Caller(connection)
        # The newest hello counts: an agent that came back meanwhile may have fewer batches than it had, and
        # says so.
        self._choice.hear(hello.node, hello.ledger, asyncio.get_running_loop().time())
        self._news.set()
        # Whatever else it says is in its next hello, or is told again.
        while (messages := await _next(connection)) is not None:
            for message in messages:
                if isinstance(message, m.LedgerKept):
                    await caller.parts.put(message)
        await caller.parts.put(None)
        return connection

    async def _take(self, node: str) -> None:
        caller = self._callers[node]
        await caller.connection.send_bytes(encode(m.SendLedger()))
        with closing(Restored(self._job_dir / ".gathered.sqlite")) as restored:
            while True:
                async with asyncio.timeout(GIVE_S):
                    part = await caller.parts.get()
                if part is None:
                    raise Unusable("its agent is gone")
                await asyncio.to_thread(restored.add, part)
                if part.last:
                    break
            mark = await asyncio.to_thread(restored.finish, self._job_dir / FIRST)
        _log.info("took the ledger from an agent", extra={"node": node, "batch": mark})


class _Caller:
    """An agent that came."""

    def __init__(self, connection: web.WebSocketResponse) -> None:
        self.connection = connection
        # Bounded: what an agent sends waits in the kernel while the disk is written.
        self.parts: asyncio.Queue[m.LedgerKept | None] = asyncio.Queue(2)


async def _later(request: web.Request) -> web.StreamResponse:
    return web.Response(
        status=503, text="the coordinator gathers its ledger; ask again", headers={"Retry-After": "1"}
    )


async def _next(connection: web.WebSocketResponse) -> list[m.AgentMessage] | None:
    """The messages of the next frame; None: the connection has ended, or speaks another language."""
    frame = await connection.receive()
    if frame.type is not WSMsgType.BINARY:
        return None
    try:
        return _codec.decode_all(frame.data)
    except ProtocolError:
        return None


class Restored:
    """A ledger made of a copy's parts, in a file of its own until it is complete. Blocks; for one thread at a time."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._store: Store | None = None
        self._batch = bytearray()
        work.unlink(missing_ok=True)

    def add(self, part: m.LedgerKept) -> None:
        """The next part.

        Raises:
            Unusable: it does not fit to those before it.
        """
        if part.base:
            if self._store is not None:
                raise Unusable("it has two bases")
            with self._work.open("ab") as file:
                file.write(part.data)
            if not part.more:
                self._store = Store(self._work)
        elif part.data:
            if len(self._batch) + len(part.data) > MOST_BYTES:
                raise Unusable("it has a batch that is too long")
            self._batch += part.data
            if not part.more:
                self._write(part.mark.batch)

    def _write(self, number: int) -> None:
        if self._store is None:
            raise Unusable("it has batches and no base")
        batch = decode(_batches.decode, self._batch, f"batch {number} is of another version", error=Unusable)
        self._batch.clear()
        there = self._store.batches()
        if number <= there:
            return  # it was written while the base was read
        if number != there + 1:
            raise Unusable(f"batch {number} comes after batch {there}")
        self._store.write(batch)

    def finish(self, path: Path) -> int:
        """Puts the ledger in its place; returns the number of its newest batch.

        Raises:
            Unusable: there is no state in it.
        """
        if self._store is None or self._store.load() is None:
            raise Unusable("it is not complete")
        number = self._store.batches()
        self.close()
        # Only a complete ledger gets this name. A process that is killed before leaves a file that nobody
        # reads, and the next one gathers anew.
        self._work.replace(path)
        return number

    def close(self) -> None:
        """Ends it, complete or not."""
        if self._store is not None:
            self._store.close()
            self._store = None


async def gather(
    listener: socket.socket,
    *,
    host: str,
    term: int,
    job_dir: Path,
    token: str,
    nodes: int,
    orphan_s: float,
    instance: str,
) -> bool:
    """See `Gathering.run`. nodes: of the job, with its spares."""
    where = Endpoint(host=host, port=listener.getsockname()[1], pid=os.getpid(), instance=instance, term=term)
    choice = Choice(nodes=nodes, orphan_s=orphan_s, began_s=asyncio.get_running_loop().time())
    return await Gathering(job_dir=job_dir, token=token, where=where, choice=choice).run(listener)
