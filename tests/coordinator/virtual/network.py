"""Connections in memory, with the kernels at both ends: what is under way, who is cut off, who closes what and when.

A message is a frame of the WebSocket. It arrives in order and late by a random time. Where a direction is cut it waits in the
sender's kernel, as TCP repeats what is not acknowledged. A process that ends leaves it to its kernel to close, which a machine
without power does not do.
"""

from __future__ import annotations

import asyncio
import socket as so
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import WSCloseCode, WSMessage, WSMsgType
from simcluster.clock import Clock

from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.network.http_client import Unproven
from virtual.loop import VirtualLoop

CLOSED = WSMessage(WSMsgType.CLOSED, None, None)
CLOSING = WSMessage(WSMsgType.CLOSING, None, None)
SERVER_CLOSE_S = 10.0
CLIENT_CLOSE_S = 0.1
WINDOW = 256 << 10
"""Bytes that may be under way and unread, before a sender waits."""
_LAST_ACK_AT = 56

Way = tuple[str, str]
"""From one machine to another."""


class Network:
    """All machines, and what lies between them."""

    def __init__(self, clock: Clock, latency: Callable[[], float], draw: Callable[[str], float]) -> None:
        """draw: a random number of [0, 1) by a label."""
        self.clock, self.latency, self.draw = clock, latency, draw
        self.window = WINDOW
        self.cut: dict[Way, float] = {}
        """Ways on which nothing passes, and since when."""
        self.dark: set[str] = set()
        """Machines without power."""
        self.doors: dict[str, Door] = {}
        self.sockets: list[Socket] = []
        self.frames = 0

    def passes(self, source: str, target: str) -> bool:
        """Whether anything sent now arrives."""
        return (source, target) not in self.cut and not {source, target} & self.dark

    def block(self, source: str, target: str) -> None:
        """Nothing passes that way from now on."""
        self.cut.setdefault((source, target), self.clock.now)
        self._watch(source, target)

    def unblock(self, source: str, target: str) -> None:
        """What waited is delivered after the next retransmission."""
        if self.cut.pop((source, target), None) is not None:
            for socket in self.sockets:
                if (socket.machine, socket.peer.machine) == (source, target):
                    self.clock.after(self.latency() + 0.2 * self.draw("retransmission"), socket.retransmit)

    def darken(self, machine: str) -> None:
        """It has no power: it neither says nor hears anything any more."""
        self.dark.add(machine)
        for socket in self.sockets:
            if socket.machine == machine:
                socket.silent_since_s = socket.peer.silent_since_s = self.clock.now
                socket.peer.watch()

    def _watch(self, source: str, target: str) -> None:
        for socket in self.sockets:
            if {socket.machine, socket.peer.machine} == {source, target}:
                socket.watch()

    def pair(
        self, client: VirtualLoop, near: str, server: VirtualLoop | None, far: str
    ) -> tuple[Socket, Socket]:
        """The two ends of a new connection."""
        ends = Socket(self, client, near, CLIENT_CLOSE_S), Socket(self, server, far, SERVER_CLOSE_S)
        ends[0].peer, ends[1].peer = ends[1], ends[0]
        self.sockets = [s for s in self.sockets if not s.gone or not s.peer.gone]
        self.sockets += ends
        return ends

    def ended(self, loop: VirtualLoop) -> None:
        """The kernel closes what an ended process had open: one after the other."""
        for socket in self.sockets:
            if socket.loop is loop and not socket.gone:
                if self.draw("reset at the end") < 0.3:
                    socket.lose_sent()
                socket.shut()


class Door:
    """A listening socket. It may outlive the process that serves it: then who connects waits for the next one."""

    def __init__(self, network: Network, machine: str) -> None:
        self.network, self.machine = network, machine
        self.loop: VirtualLoop | None = None
        self.accept: Callable[[Socket], None] | None = None
        self._waiting: list[Socket] = []
        network.doors[machine] = self

    def open(self, loop: VirtualLoop, accept: Callable[[Socket], None]) -> None:
        """From now on a process serves it."""
        self.network.doors[self.machine] = self
        self.loop, self.accept = loop, accept
        waiting, self._waiting = self._waiting, []
        for socket in waiting:
            self._give(socket)

    def close(self) -> None:
        """Nobody serves it now."""
        self.loop = self.accept = None

    def shut(self) -> None:
        """Its launcher has ended: nobody listens any more, and who waited hears so."""
        self.close()
        self.network.doors.pop(self.machine, None)
        waiting, self._waiting = self._waiting, []
        for socket in waiting:
            socket.shut()

    def arrive(self, socket: Socket) -> None:
        """A connection was opened from outside."""
        if self.accept is None or self.loop is None or not self.loop.alive:
            self._waiting.append(socket)
        else:
            self._give(socket)

    def _give(self, socket: Socket) -> None:
        assert self.loop is not None
        assert self.accept is not None
        if not socket.gone:
            socket.loop = self.loop
            self.loop.deliver(self.accept, socket)


class Socket:
    """One end: what `aiohttp`'s WebSockets offer, of either side, as far as coordinator and agent use it."""

    peer: Socket

    def __init__(self, network: Network, loop: VirtualLoop | None, machine: str, close_s: float) -> None:
        self.network, self.loop, self.machine, self._close_s = network, loop, machine, close_s
        self.close_code: int | None = None
        self.gone = False
        """This end is closed for good, in its kernel."""
        self.silent_since_s: float | None = None
        self.user_timeout_s: float | None = None
        self._inbox: deque[WSMessage] = deque()
        self._held: deque[WSMessage | None] = deque()
        """Sent, and under way no further than a cut."""
        self._reader: asyncio.Future[None] | None = None
        self._writers: list[asyncio.Future[None]] = []
        self._closed = False
        self._last_s = 0.0
        self._unread = 0
        self._lost = 0
        self._order = 0

    # ------------------------------------------------------------ kernels

    def _transmit(self, frame: WSMessage | None) -> None:
        """None: the end."""
        network = self.network
        self._last_s = max(self._last_s, network.clock.now + network.latency())
        self._order += 1
        network.clock.at(self._last_s, self._arrive, frame, self._order)

    def _arrive(self, frame: WSMessage | None, order: int) -> None:
        if order <= self._lost:
            return
        if self._held or not self.network.passes(self.machine, self.peer.machine):
            self._held.append(frame)
        else:
            self.peer.receives(frame)

    def retransmit(self) -> None:
        """The way is whole again, unless it was cut anew."""
        while self._held and self.network.passes(self.machine, self.peer.machine):
            self.peer.receives(self._held.popleft())

    def lose_sent(self) -> None:
        """A reset overtakes what is under way."""
        self._lost = self._order
        self._held.clear()

    def receives(self, frame: WSMessage | None) -> None:
        """The kernel has a frame, or the end, from the other side."""
        if self.gone:
            # Its answer is a reset.
            if frame is not None and self.network.passes(self.machine, self.peer.machine):
                self.network.clock.after(self.network.latency(), self.peer.breaks)
            return
        if frame is None:
            self.breaks()
            return
        self.network.frames += 1
        self._inbox.append(frame)
        self._wake()

    def breaks(self) -> None:
        """The connection has ended for this side: reset, or closed by the other one."""
        if not self.gone:
            self.gone = True
            self._wake()
            self._free()

    def shut(self) -> None:
        """This side's kernel closes it and says so."""
        if not self.gone:
            self.gone = True
            self._transmit(None)
            self._wake()
            self._free()

    def watch(self) -> None:
        """TCP_USER_TIMEOUT: a kernel that hears nothing of the other one gives up."""
        if self.user_timeout_s is not None and not self.gone:
            self.network.clock.after(self.user_timeout_s, self._give_up)

    def _give_up(self) -> None:
        if self.user_timeout_s is not None and self.unheard_s() >= self.user_timeout_s - 1e-6:
            self.breaks()

    def unheard_s(self) -> float:
        """For how long no acknowledgement can have come."""
        ways = ((self.machine, self.peer.machine), (self.peer.machine, self.machine))
        cut = [self.network.cut[way] for way in ways if way in self.network.cut]
        cut += [self.silent_since_s] if self.silent_since_s is not None else []
        return self.network.clock.now - min(cut) if cut else 0.0

    def _wake(self) -> None:
        if self.loop is not None:
            self.loop.deliver(self._look)

    def _look(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _free(self) -> None:
        for end in (self, self.peer):
            if end.loop is not None and end._writers:
                end.loop.deliver(end._let_write)

    def _let_write(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            if not writer.done():
                writer.set_result(None)

    # ------------------------------------------------------------ what programs use

    def get_extra_info(self, name: str) -> Socket | None:
        """The kernel's socket."""
        return self if name == "socket" else None

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """As of the kernel's socket."""
        if (level, option) == (so.IPPROTO_TCP, so.TCP_USER_TIMEOUT):
            self.user_timeout_s = value / 1000
            self.watch()

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """`struct tcp_info`, as far as it is read."""
        return bytes(_LAST_ACK_AT) + struct.pack("@I", int(self.unheard_s() * 1000))

    async def send_bytes(self, data: bytes) -> None:
        """Into the kernel; waits while that has no room."""
        await self._send(WSMessage(WSMsgType.BINARY, data, None), len(data))

    async def ping(self) -> None:
        """Asks for a pong."""
        await self._send(WSMessage(WSMsgType.PING, b"", None), 0)

    async def pong(self, data: bytes = b"") -> None:
        """Answers a ping."""
        await self._send(WSMessage(WSMsgType.PONG, data, None), 0)

    async def _send(self, frame: WSMessage, size: int) -> None:
        if self.gone or self._closed or self.loop is None or not self.loop.alive:
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        self._unread += size
        self._transmit(frame)
        while self._unread > self.network.window and not self.gone and not self.peer.gone:
            self._writers.append(room := self.loop.create_future())
            await room

    async def receive(self) -> WSMessage:
        """The next frame; CLOSED: there is none any more."""
        while True:
            frame = await self._next()
            if frame.type is WSMsgType.PING and self._close_s == SERVER_CLOSE_S:  # autoping
                if not self.gone and not self._closed:
                    await self.pong(frame.data)
                continue
            if frame.type is WSMsgType.PONG and self._close_s == SERVER_CLOSE_S:
                continue
            if frame.type is WSMsgType.CLOSE:
                self.close_code = frame.data
                await self.close()
            return frame

    async def _next(self) -> WSMessage:
        while not self._inbox:
            if self._closed:
                return CLOSED
            if self.gone:
                self._closed = True
                self.close_code = self.close_code or WSCloseCode.ABNORMAL_CLOSURE
                return CLOSED
            assert self.loop is not None
            self._reader = self.loop.create_future()
            await self._reader
        frame = self._inbox.popleft()
        if frame.type is WSMsgType.BINARY:
            self.peer._unread -= len(frame.data)
            self._free()
        return frame

    async def close(self, *, code: int = WSCloseCode.OK) -> None:
        """The closing handshake, as far as the other side takes part within its time."""
        if self._closed or self.loop is None or not self.loop.alive:
            return
        self._closed = True
        if not self.gone:
            self._transmit(WSMessage(WSMsgType.CLOSE, code, None))
        if self._reader is not None and not self._reader.done():
            self._inbox.append(CLOSING)
            self._reader.set_result(None)
        try:
            async with asyncio.timeout(self._close_s):
                while self.close_code is None and not self.gone:
                    self._reader = self.loop.create_future()
                    await self._reader
                    while self._inbox:
                        frame = self._inbox.popleft()
                        if frame.type is WSMsgType.CLOSE:
                            self.close_code = frame.data
                        elif frame.type is WSMsgType.CLOSING:
                            self._inbox.append(frame)
                            break
        except TimeoutError:
            self.close_code = WSCloseCode.ABNORMAL_CLOSURE
        finally:
            self.shut()

    def abort(self) -> None:
        """Of the transport: closed at once."""
        self.shut()

    async def __aenter__(self) -> Socket:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __aiter__(self) -> Socket:
        return self

    async def __anext__(self) -> WSMessage:
        frame = await self.receive()
        if frame.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
            raise StopAsyncIteration
        return frame


class Dialler:
    """Opens connections of one process to coordinators."""

    def __init__(self, network: Network, loop: VirtualLoop, machine: str) -> None:
        self._network, self._loop, self._machine = network, loop, machine

    @asynccontextmanager
    async def connected(
        self, where: Endpoint, token: str, limit: aiohttp.ClientTimeout
    ) -> AsyncIterator[Any]:
        """See `coordinator_link.open_websocket`."""
        network = self._network
        near, far = network.pair(self._loop, self._machine, None, where.host)
        try:
            async with asyncio.timeout(limit.sock_connect):
                await self._dial(where, far)
            async with asyncio.timeout(limit.total):
                # Its name is the first word: whether it is the one that was called.
                word = await near.receive()
            if word.type is not WSMsgType.BINARY:
                raise ConnectionResetError("closed before it answered")
            if word.data != where.instance.encode():
                raise Unproven(f"{where.url} is answered by another one")
            yield near
        finally:
            near.shut()

    async def _dial(self, where: Endpoint, far: Socket) -> None:
        network, near = self._network, self._machine
        while True:
            await asyncio.sleep(network.latency())
            if network.passes(near, where.host) and network.passes(where.host, near):
                break
            await asyncio.sleep(0.2)  # the kernel asks again
        door = network.doors.get(where.host)
        if door is None:
            raise ConnectionRefusedError(f"nobody listens at {where.url}")
        network.clock.after(network.latency(), door.arrive, far)
