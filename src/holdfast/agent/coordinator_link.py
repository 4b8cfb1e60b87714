"""The agent's connection to the coordinator: one WebSocket, which is opened again whenever it breaks. Also the port at which
the node's launcher may ask whether the node has a coordinator.

While there is no coordinator, messages wait here with the time of their arrival, and training goes on.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import NamedTuple

import aiohttp
import msgspec

from holdfast.errors import ProtocolError
from holdfast.protocol import messages as m
from holdfast.protocol.health import CheckResult, Condition, Finding, Remedy, Severity
from holdfast.protocol.network import endpoint
from holdfast.protocol.network.endpoint import Endpoint, Hearing, Whereabouts
from holdfast.protocol.network.http_client import Unproven, proving, request
from holdfast.protocol.network.lookup import Lookup
from holdfast.protocol.network.range_server import RangeRequest, RangeServer
from holdfast.protocol.wire.frames import Codec, encode, encode_all

_log = logging.getLogger(__name__)
_codec: Codec[m.ToAgent] = Codec(m.ToAgent)
RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
ANSWER_S = 10.0
"""How long a coordinator may take to answer. The launcher's socket accepts connections while there is none."""
SILENT_BEATS = 4
"""So many heartbeats without a word of its machine's kernel, and it is lost: the time to detect a lost node."""
QUIET_BEATS = 20
"""So many heartbeats without a word of the coordinator, and it is asked for one: five times the time to detect a lost node, after
which a coordinator that hangs is ended by who keeps it running."""
FRAME_MESSAGES, FRAME_BYTES = 64, 256 << 10
"""Limits of a frame of several messages: their number, and the size from which no further one is added."""
ANSWER_BEATS = 4
"""So many more without an answer, and this node looks for another one."""


def give_up_when_gone(websocket: aiohttp.ClientWebSocketResponse, within_s: float) -> None:
    """Makes the kernel close the connection when the other machine's kernel has been silent for this long. A process there that
    is only busy does not count as gone."""
    raw = websocket.get_extra_info("socket")
    if raw is not None:
        # A machine without power sends no FIN. With these two limits the kernel reports its silence: keep-
        # alive for an idle connection, TCP_USER_TIMEOUT for one with unacknowledged data. The other kernel
        # acknowledges for a process that is only busy, which a ping of the application could not tell from a
        # dead one.
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(within_s * 1000))


_LAST_ACK = struct.Struct("@I")
_LAST_ACK_AT = 56
"""Of `tcpi_last_ack_recv` in the kernel's `struct tcp_info` (linux/tcp.h), in ms."""


def unheard_s(websocket: aiohttp.ClientWebSocketResponse) -> float | None:
    """Seconds for which the other machine's kernel has sent nothing, not even an acknowledgement; None: this kernel does not
    tell."""
    raw = websocket.get_extra_info("socket")
    if raw is None:
        return None
    try:
        told = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_AT + _LAST_ACK.size)
        return float(_LAST_ACK.unpack_from(told, _LAST_ACK_AT)[0]) / 1000
    except (OSError, struct.error):  # the connection ends just now, or it is none of TCP
        return None


@asynccontextmanager
async def open_websocket(
    where: Endpoint, token: str, limit: aiohttp.ClientTimeout
) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A connection to the coordinator there, which has proved that it knows the token.

    Raises:
        Unproven: it has not.
        aiohttp.ClientError, OSError, TimeoutError: nobody answers.
    """
    async with aiohttp.ClientSession(timeout=limit, middlewares=[proving(token, where)]) as session:
        yield await session.ws_connect(
            f"{where.url}/agent",
            max_msg_size=16 << 20,
            autoping=False,  # an answer to a ping is news here
            timeout=aiohttp.ClientWSTimeout(ws_close=0.1),  # type: ignore[call-arg, unused-ignore]
        )


Connect = Callable[
    [Endpoint, str, aiohttp.ClientTimeout], AbstractAsyncContextManager[aiohttp.ClientWebSocketResponse]
]


class CoordinatorLink:
    """Connects to the coordinator, says hello, and passes messages both ways; repeats that until it is closed."""

    def __init__(
        self,
        lookup: Lookup,
        token: str,
        hello: Callable[[], m.Hello],
        take: Callable[[m.ToAgent], None],
        orphan_s: float,
        orphaned: Callable[[], None],
        heartbeat_s: float,
        lost: Callable[[], None],
        join_s: float | None = None,
        connect: Connect = open_websocket,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """lost: called when a connection has ended. join_s: like orphan_s, before the first coordinator is met; None: the same.
        connect: opens a connection, as `open_websocket` does. clock: steady, called from any thread."""
        self._connect, self._clock = connect, clock
        self._lookup, self._token = lookup, token
        self._hello, self._take = hello, take
        self._orphan_s, self._orphaned = orphan_s, orphaned
        self._join_s = orphan_s if join_s is None else join_s
        self._heartbeat_s, self._lost = heartbeat_s, lost
        self.term = 0
        """The latest term of a coordinator that has proved itself here. One of an earlier term is not spoken with:
        it was cut off while another took its place, and would order what is over."""
        self.connected = False
        self.joined = asyncio.Event()
        """Some coordinator has this node's hello, now or earlier."""
        self.left_to_another = False
        """The coordinator has closed the connection because another one follows, which was not met yet."""
        self._outbox = Outbox()
        self._news = asyncio.Event()
        self._waits: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._silent = False
        self._says_hello = False
        self._lost_s: float | None = self._clock()
        self._heard_s = 0.0
        """When the coordinator last said anything."""
        self._sent_s = 0.0
        """When this side last sent something, on the loop's clock."""
        self._acked_s = 0.0
        """When its machine did, as its kernel does for a process that is busy. Looked at with each heartbeat."""
        self._unproven: Endpoint | None = None
        self._refused: Endpoint | None = None
        self._reported = False

    def send(self, message: m.AgentMessage, within_s: float = 0.0) -> None:
        """Queues a message, which is sent as soon as there is a coordinator. within_s: how long it may wait for other messages, to
        be sent in one frame with them."""
        self._outbox.put(message, self._clock())
        # Before the event that wakes the sender: `flushed` must never return with this message still in the
        # queue.
        self._idle.clear()
        if not within_s:
            self._news.set()
        elif self._waits is None:
            self._waits = asyncio.get_running_loop().call_later(within_s, self._waited)

    def _waited(self) -> None:
        self._waits = None
        self._news.set()

    def say_hello(self) -> None:
        """Says hello again on this connection, before what waits: the coordinator then repeats what this node has to know."""
        # Built when it is sent. One that waited for a connection would come after that connection's own, and describe
        # what is over.
        self._says_hello = True
        self._idle.clear()
        self._news.set()

    async def flushed(self) -> None:
        """Waits until everything is handed to the kernel."""
        self._news.set()
        await self._idle.wait()

    def hearing(self) -> Hearing:
        """Whether there is a connection now. Safe from any thread."""
        lost_s = self._lost_s
        return Hearing(term=self.term, missing_s=None if lost_s is None else self._clock() - lost_s)

    def told(self, where: Whereabouts) -> None:
        """Takes the address at which a coordinator may be, from a caller that knows the token."""
        self._lookup.told(where)

    @property
    def patience_s(self) -> float:
        """Seconds for which it looks for a coordinator before it gives up."""
        return self._orphan_s if self.joined.is_set() else self._join_s

    def go_silent(self) -> None:
        """An injected fault: stops sending and reading, but closes nothing."""
        self._silent = True

    async def run(self) -> None:
        """Runs until cancelled."""
        lost_at = self._clock()
        attempt = 0
        # A machine that is gone does not refuse a connection: it lets one wait. A coordinator that is being started lets
        # it wait for an answer; the connection is then served as soon as it listens.
        limit = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=SILENT_BEATS * self._heartbeat_s)
        while True:
            where = await self._lookup.find()
            refused = where is not None and self._is_superseded(where)
            if where is not None and not refused and await self._converse(where, limit):
                # Not a warning: a coordinator that was ended is started again, and training goes on meanwhile.
                _log.info("lost the connection to the coordinator", extra={"url": where.url})
                self._lost()
                lost_at, attempt = self._clock(), 0
            # Counted from the end of the last connection that was served. Attempts that are refused, or
            # answered by a stranger, do not prolong it.
            elif self._clock() - lost_at > self.patience_s:
                self._orphaned()
                return
            # A new coordinator can be found before it serves. If another is found than before the attempt, there is no
            # reason to wait.
            if await self._lookup.find() == where:
                # There is no event for "a process on another machine listens again": try, ever slower.
                await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
                attempt += 1

    async def _converse(self, where: Endpoint, limit: aiohttp.ClientTimeout) -> bool:
        """One connection from hello to its end; False when there was none."""
        async with AsyncExitStack() as ends:
            try:
                link = await ends.enter_async_context(self._connect(where, self._token, limit))
            except Unproven as error:
                self._not_believed(where, str(error))
                return False
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                _log.debug("no connection to the coordinator: %r", error, extra={"url": where.url})
                return False
            self.term = where.term
            return await self._talk(link)

    def _is_superseded(self, where: Endpoint) -> bool:
        """Whether a later coordinator was met already; it is logged once."""
        if where.term >= self.term:
            return False
        if self._refused != where:
            self._refused = where
            _log.warning(
                "refusing a coordinator of term %d, because one of term %d took its place",
                where.term,
                self.term,
                extra={"url": where.url},
            )
        return True

    def _not_believed(self, where: Endpoint, why: str) -> None:
        """Logs it once, and not the first time: a coordinator that has just started may not have written its address."""
        # The port of a coordinator that died may be taken by another program, and the address in the folder
        # is still the old one. The token is never sent to whoever cannot prove that it knows it.
        if self._unproven == where and not self._reported:
            self._reported = True
            _log.warning(
                "%s; nothing is sent to it, and the connection is retried", why, extra={"url": where.url}
            )
        elif self._unproven != where:
            self._unproven, self._reported = where, False

    async def _talk(self, link: aiohttp.ClientWebSocketResponse) -> bool:
        give_up_when_gone(link, SILENT_BEATS * self._heartbeat_s)
        async with link:
            self._says_hello = False
            try:
                # The hello is built now and not when the connection was lost: it is the complete truth about
                # this node, so whatever was missed in between does not matter.
                await link.send_bytes(encode(self._hello()))
            except (OSError, aiohttp.ClientError):
                return False
            self.connected, self.left_to_another = True, False
            self._sent_s = asyncio.get_running_loop().time()
            self._hear()
            self.joined.set()
            _log.info("connected to the coordinator", extra={"waiting": len(self._outbox)})
            # Only now: what is sent again must come after the hello, or the coordinator would not know whose
            # it is.
            self._outbox.repeat()
            try:
                async with asyncio.TaskGroup() as group:
                    # A task group, so that an error in any of them ends the others. An agent whose sender died
                    # alone would still look alive.
                    beside = (self._sending(link), self._beating(link), self._doubting(link))
                    tasks = [group.create_task(one) for one in beside]
                    await self._receiving(link)
                    for task in tasks:
                        task.cancel()
            finally:
                self.connected = False
                # One that had fallen silent was lost when it did. The kernel says so when it has waited for this long, and
                # this process may have been stopped for longer.
                now_s = self._clock()
                said_s = max(self._heard_s, self._acked_s, now_s - SILENT_BEATS * self._heartbeat_s)
                self._lost_s = self._lost_s or said_s
                self.left_to_another = link.close_code == aiohttp.WSCloseCode.SERVICE_RESTART
        return True

    async def _receiving(self, link: aiohttp.ClientWebSocketResponse) -> None:
        async for frame in link:
            if self._silent:
                await asyncio.Event().wait()
            self._hear()
            if frame.type is aiohttp.WSMsgType.PING:
                with suppress(ConnectionResetError):
                    await link.pong(frame.data)
            # A message that this version does not know is logged and skipped. To close the connection for it
            # would end all that the coordinator still can do with this node.
            if frame.type is aiohttp.WSMsgType.BINARY:
                try:
                    orders = _codec.decode_all(frame.data)
                except ProtocolError as error:
                    _log.warning("cannot decode a message from the coordinator: %s", error)
                else:
                    for order in orders:
                        self._carry_out(order)

    def _hear(self) -> None:
        self._heard_s, self._lost_s = self._clock(), None

    def _carry_out(self, order: m.ToAgent) -> None:
        try:
            self._take(order)
        except Exception as error:  # noqa: BLE001 - whatever it is, the orders after it are to be heard
            self.failed(order, error)

    def failed(self, order: m.ToAgent, error: BaseException) -> None:
        """Logs an order that failed, and reports it to the core, which waits for its outcome."""
        why = self.complain(f"{type(order).__name__} failed in the agent", error)
        if (answer := refusal(order, why)) is not None:
            self.send(answer)

    def complain(self, what: str, error: BaseException) -> str:
        """Logs and reports an error that ends neither the agent nor its workers. Returns the text."""
        why = f"{what}: {type(error).__name__}: {error}"
        _log.error("%s", why, exc_info=error)
        finding = Finding(
            rule="agent-broke", severity=Severity.WARNING, remedy=Remedy.WATCH, source="agent", evidence=why
        )
        self.send(m.FindingsReported((finding,)))
        return why

    async def _doubting(self, link: aiohttp.ClientWebSocketResponse) -> None:
        """Leaves a coordinator that says nothing for one of a later term.

        The kernel of a machine whose processes stand still answers for them, so the connection stays. To close it for silence alone
        would be wrong: to a coordinator that is only slow its end would be that of this node.
        """
        while True:
            await asyncio.sleep(QUIET_BEATS * self._heartbeat_s)
            asked_s = self._clock()
            if asked_s - self._heard_s < QUIET_BEATS * self._heartbeat_s:
                continue
            with suppress(ConnectionResetError):
                await link.ping()
            await asyncio.sleep(ANSWER_BEATS * self._heartbeat_s)
            while self._heard_s < asked_s:
                self._lost_s = self._heard_s
                where = await self._lookup.find()
                if where is not None and where.term > self.term and await self._is_proven(where):
                    _log.warning(
                        "the coordinator of term %d says nothing, and there is one of term %d",
                        self.term,
                        where.term,
                        extra={"url": where.url},
                    )
                    await link.close()
                    return
                await asyncio.sleep(RETRY_S[-1])

    async def _is_proven(self, where: Endpoint) -> bool:
        """Whether the job's coordinator is there. Where it was looked up, anybody may have answered."""
        try:
            await request(self._token, where, "GET", "/description", limit_s=ANSWER_S)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        return True

    async def _beating(self, link: aiohttp.ClientWebSocketResponse) -> None:
        """Sends heartbeats, unless other messages were sent: those prove as well that the agent lives."""
        loop = asyncio.get_running_loop()
        while True:
            # Four heartbeats fit into the detection time, so one that is late costs nobody its node.
            await asyncio.sleep(self._sent_s + self._heartbeat_s - loop.time())
            if (silent_s := unheard_s(link)) is not None:
                self._acked_s = self._clock() - silent_s
            if self._sent_s + self._heartbeat_s > loop.time():
                continue
            self._sent_s = loop.time()  # also where it is not sent: the next one is tried a heartbeat later
            if self._outbox:
                self._news.set()
            else:
                self.send(m.Heartbeat())

    async def _sending(self, link: aiohttp.ClientWebSocketResponse) -> None:
        loop = asyncio.get_running_loop()
        self._news.set()
        while True:
            await self._news.wait()
            self._news.clear()
            while self._outbox or self._says_hello:
                if self._silent:
                    await asyncio.Event().wait()
                if not await (self._introduced(link) if self._says_hello else self._sent(link)):
                    return
                self._sent_s = loop.time()
            self._idle.set()

    async def _introduced(self, link: aiohttp.ClientWebSocketResponse) -> bool:
        """Sends the hello; False: the connection has ended, and the next one begins with one."""
        self._says_hello = False
        try:
            await link.send_bytes(encode(self._hello()))
        except (OSError, aiohttp.ClientError):
            return False
        return True

    async def _sent(self, link: aiohttp.ClientWebSocketResponse) -> bool:
        """Sends the oldest messages in one frame; False: the connection has ended, and they wait for the next one."""
        letters, frame, size = list[Letter](), list[bytes](), 0
        while self._outbox and len(letters) < FRAME_MESSAGES and size < FRAME_BYTES:
            letters.append(letter := self._outbox.take())
            frame.append(encode(_dated(letter, self._clock())))
            size += len(frame[-1])
        try:
            await link.send_bytes(encode_all(frame))
        except (OSError, aiohttp.ClientError):
            self._outbox.put_back(letters)
            return False
        except asyncio.CancelledError:  # the connection ended meanwhile
            self._outbox.put_back(letters)
            raise
        for letter in letters:
            self._outbox.sent(letter)
        return True


def _dated(letter: Letter, at_s: float) -> m.AgentMessage:
    """The message, with how long it has waited at this time where that matters."""
    message, waited_s = letter.message, at_s - letter.arrived_s
    if isinstance(message, m.FromWorker):
        return msgspec.structs.replace(message, age_s=waited_s)
    return _aged(message, waited_s) if isinstance(message, m.FindingsReported) else message


def _aged(found: m.FindingsReported, waited_s: float) -> m.FindingsReported:
    """Findings that waited for a coordinator are older by that."""
    return m.FindingsReported(
        tuple(msgspec.structs.replace(f, age_s=round(f.age_s + waited_s, 3)) for f in found.findings)
    )


async def show_ready(
    node: str,
    host: str,
    port: int,
    token: str,
    joined: asyncio.Event,
    heard: Callable[[], Hearing],
    told: Callable[[Whereabouts], None],
) -> None:
    """Listens from the moment the node has joined, until it is cancelled. heard: called from any thread. told: called in this loop.

    Who knows the job's token may ask there whether the node hears its coordinator, and tell it where there is another one.

    A node that lost its coordinator stays ready. It trains on, and a disruption budget must not count it as broken.
    """
    await joined.wait()
    loop = asyncio.get_running_loop()
    server = _Server(
        node, host, port, token, heard, lambda where: loop.call_soon_threadsafe(lambda: told(where))
    )
    try:
        await asyncio.Event().wait()
    finally:
        server.close()


class _Server(RangeServer):
    def __init__(
        self,
        node: str,
        host: str,
        port: int,
        token: str,
        heard: Callable[[], Hearing],
        told: Callable[[Whereabouts], object],
    ) -> None:
        self._heard, self._told = heard, told
        super().__init__(host, token, endpoint.agent_name(node), "holdfast-ready", port)

    def answer(self, request: RangeRequest) -> None:
        told = endpoint.told_by(request.path)
        if told is not None:
            self._told(told)
        if told is not None or request.path == endpoint.PATH:
            request.send(msgspec.json.encode(self._heard()))
        else:
            request.send_error(404)


KEPT_MESSAGES = 10_000


REPEATED = 512
"""So many of the newest losses are told again on a new connection: a coordinator that died, or hung before that, may not
have written what it was sent. Everything else that it may have missed is in the hello."""


FREED = 1 / 8
"""This share of a full queue is freed at once: one look through it makes room for many messages."""


class Letter(NamedTuple):
    """A message that waits for a coordinator."""

    arrived_s: float
    """When it came, on the link's clock."""
    message: m.AgentMessage
    again: bool = False
    """It was sent before, to a coordinator that may not have written it."""


class Outbox:
    """A queue of bounded length for the agent's messages to the coordinator, oldest first. The sender takes a letter out, and
    then calls `sent`, or puts it back if it could not be sent: so a letter that is being sent is not among those that may be
    dropped.

    While there is no coordinator everything waits here with the time of its arrival. A full queue has to drop something: never
    the newest message, and none that counts while there is another one.
    """

    def __init__(self, kept: int = KEPT_MESSAGES, repeated: int = REPEATED) -> None:
        self._kept = kept
        self._waiting: deque[Letter] = deque()
        # Bounded by itself: what was sent needs no promise, only a good chance to be written by the next
        # coordinator.
        self._told: deque[Letter] = deque(maxlen=repeated)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: m.AgentMessage, now_s: float) -> None:
        """Appends a message. It is kept, whatever else has to be dropped for it."""
        if len(self._waiting) >= self._kept:
            self._make_room()
        # After room was made, and without a look at its worth. The newest message is the one that somebody
        # waits for now.
        self._waiting.append(Letter(now_s, message))

    def take(self) -> Letter:
        """Takes the oldest message out."""
        return self._waiting.popleft()

    def put_back(self, letters: Sequence[Letter]) -> None:
        """Puts letters that could not be sent back to the front."""
        self._waiting.extendleft(reversed(letters))

    def sent(self, letter: Letter) -> None:
        """Notes that a letter was handed to the kernel."""
        if (losses := _losses(letter.message)) is not None:
            # Only losses and figures. Everything else that a new coordinator may have missed is in the hello,
            # and to send it twice could count it twice.
            self._told.append(Letter(letter.arrived_s, losses, again=True))

    def repeat(self) -> None:
        """On a new connection: queues the newest losses again, before the rest, as far as there is room."""
        room = max(0, self._kept - len(self._waiting))
        # From the newest back, each put before the one after it: they arrive in their old order, and if there
        # is no room for all of them it is the oldest that are lost.
        while self._told and room:
            self._waiting.appendleft(self._told.pop())
            room -= 1
        self._told.clear()

    def _make_room(self) -> None:
        """Drops the least important messages, the oldest first."""
        # A stable order of two keys, so that of messages with the same worth the oldest goes first. This runs
        # once for an eighth of the queue, not for every message.
        order = sorted(range(len(self._waiting)), key=lambda i: (_worth(self._waiting[i]), i))
        dropped = set(order[: max(1, int(self._kept * FREED))])
        self._waiting = deque(letter for i, letter in enumerate(self._waiting) if i not in dropped)


def _worth(letter: Letter) -> int:
    """Least: what was sent before; what is soon said anew; rows of the ledger. Most: what the core waits for."""
    message = letter.message
    if letter.again:
        return 0
    if isinstance(message, m.Heartbeat | m.StoreProgress | m.Stalled | m.NodeReadings):
        return 1
    if isinstance(message, m.FromWorker) and isinstance(message.message, m.Progress | m.Restoring):
        inner = message.message
        # A row of losses is lost for the curve that a person sees. Nothing decides by it.
        return 2 if isinstance(inner, m.Progress) and (inner.losses or inner.figures) else 1
    return 3


def _losses(message: m.AgentMessage) -> m.AgentMessage | None:
    """What of a message may be told again, without anything that is counted."""
    if not isinstance(message, m.FromWorker) or not isinstance(message.message, m.Progress):
        return None
    if not message.message.losses and not message.message.figures:
        return None
    # `spent` is added up by the core, so a repetition would count the time twice. Losses and figures are
    # written by their step, and a second copy changes nothing.
    return m.FromWorker(message.worker, msgspec.structs.replace(message.message, spent=()))


def refusal(order: m.ToAgent, why: str) -> m.AgentMessage | None:
    """The outcome of an order that failed; None: nothing waits for one, or not for longer than its deadline.

    The core waits for the outcome of most orders, of some for ever. So an order that fails has an outcome, too: the same that
    the agent sends when what was ordered goes wrong.
    """
    match order:
        case m.StartWorker(worker=worker):
            return m.Exited(worker=worker, code=-signal.SIGKILL, tail=(why,), killed=True)
        case m.Replicate(copy):
            return m.SnapshotRejected(copy.key, why)
        case m.StoreShard(tier, key):
            return m.Stored(tier=tier, key=key, shard=None, reason=why)
        case m.Publish(tier, step):
            return m.Published(tier.url, step, why)
        case m.RunChecks(request=request):
            return m.Checked(request, (CheckResult(name="agent", condition=Condition.UNKNOWN, detail=why),))
        case m.Repair(request):
            return m.Repaired(request, why)
        case _:
            return None
