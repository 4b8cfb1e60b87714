"""Many agents in one process: connections, signs of life, and workers that say what real ones would say, but compute nothing."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import aiohttp
import msgspec

from bench.coordinator import hello
from holdfast.protocol import messages as m
from holdfast.protocol.generation_difference import NOTHING, apply
from holdfast.protocol.phases import PageReading, Phase, Spent
from holdfast.protocol.wire.frames import Codec, encode, encode_all

TOKEN = "of-the-bench"
AT_ONCE = 64
"""Agents that connect side by side."""
SPENT_EVERY = 64
"""Steps of a second each, so a block of them is told of about once a minute."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What all processes of a run know."""

    nodes: int
    """Spares included."""
    per_node: int
    shards: int
    """Workers of a replica."""
    detection_s: float


@dataclass
class SimWorker:
    """A process that is not there."""

    name: str
    shard_index: int
    generation: int = 0
    committed: int = 0


@dataclass
class Seen:
    """What the agents of a process have seen since the last question."""

    nbytes: int = 0
    frames: int = 0
    members: Counter[int] = field(default_factory=Counter)
    """By generation, the workers that were told of it."""
    last_s: float = 0.0
    """When the last of them was told, on the machine's steady clock."""
    closed: int = 0
    """Connections that the coordinator ended."""


class Known:
    """Generations that agents of this process have made. What one has computed the others need not: it is not what is measured."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], m.Generation] = {}

    def after(self, base: m.Generation, change: m.Difference) -> m.Generation:
        """The generation that a difference makes."""
        base = base if change.base else NOTHING
        found = self._made.get((base.digest, change.digest))
        if found is None:
            found = self._made[base.digest, change.digest] = apply(base, change)
        return found


class SimAgent:
    """One node."""

    def __init__(self, number: int, shape: Shape, seen: Seen, known: Known) -> None:
        self.name = f"node-{number:05d}"
        self.workers: dict[str, SimWorker] = {}
        self.lost = False
        self._number, self._shape, self._seen = number, shape, seen
        self._known, self._formed = known, NOTHING
        self._codec: Codec[m.ToAgent] = Codec(m.ToAgent)
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: list[bytes] = []
        self._sent_s = 0.0
        self._returns = False

    async def join(self, session: aiohttp.ClientSession, url: str) -> None:
        """Connects and says hello; then it lives by itself."""
        self._session, self._url = session, url
        await self._connect()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    async def _connect(self) -> None:
        """Says hello with what its workers do, and the generation that it has."""
        socket = await self._session.ws_connect(self._url, max_msg_size=256 << 20)
        formed = self._formed
        said = msgspec.structs.replace(
            hello(self._number, self._shape.per_node),
            workers=self._views(idle_s=0.0),
            generation=(formed.number, formed.digest) if formed.number else (0, ""),
        )
        self._socket, self._waiting = socket, [encode(said), *self._waiting]
        await self._flush()

    def expect_another(self) -> None:
        """When its connection ends, it connects again, to the coordinator that follows."""
        self._returns = True

    async def lose(self) -> None:
        """As a machine that is gone."""
        self.lost = True
        for task in self._tasks:
            task.cancel()
        if self._socket is not None:
            await self._socket.close()

    async def train(self) -> None:
        """A step of a second: every worker tells of it."""
        for worker in list(self.workers.values()):
            if worker.generation and not self.lost:
                worker.committed += 1
                self._says(worker, self._progress(worker))
        await self._flush()

    async def fail_all(self) -> None:
        """Every worker finds the gradient not finite."""
        for worker in list(self.workers.values()):
            if worker.generation:
                failed = m.Failed(
                    generation=worker.generation,
                    step=worker.committed,
                    phase=Phase.REDUCE,
                    error="NonFiniteGradient",
                    message="the gradient is not finite",
                )
                self._says(worker, failed)
                self._says(worker, self._parked(worker))
        await self._flush()

    @property
    def trains(self) -> bool:
        """Whether a worker of it was told to join a generation."""
        return any(worker.generation for worker in self.workers.values())

    async def stall(self) -> None:
        """One worker stands still for too long, in the reduction, where all others are as well."""
        if self.workers:
            self._waiting.append(encode(m.Stalled(next(iter(self.workers)), self._views()[0])))
            await self._flush()

    def _views(self, idle_s: float = 60.0) -> tuple[m.WorkerView, ...]:
        return tuple(
            m.WorkerView(
                worker=worker.name,
                slot=slot,
                pid=1,
                formed=worker.generation,
                page=PageReading(
                    generation=worker.generation, committed=worker.committed, phase=Phase.REDUCE
                ),
                attached=True,
                idle_s=idle_s,
            )
            for slot, worker in enumerate(self.workers.values())
        )

    def _progress(self, worker: SimWorker) -> m.Progress:
        spent: tuple[Spent, ...] = ()
        if worker.committed % SPENT_EVERY == 0:
            spent = (
                Spent(
                    first=max(0, worker.committed - SPENT_EVERY),
                    micros=1,
                    data_s=0.01,
                    forward_s=0.3,
                    backward_s=0.6,
                    wait_s=0.05,
                    update_s=0.04,
                    aside_s=0.0,
                ),
            )
        return m.Progress(generation=worker.generation, committed=worker.committed, median_s=1.0, spent=spent)

    def _parked(self, worker: SimWorker, agreement: int = -1) -> m.Parked:
        return m.Parked(generation=worker.generation, committed=worker.committed, agreement=agreement)

    async def _beat(self) -> None:
        # The first at a time of its own: thousands of nodes do not start in the same moment.
        every_s = self._shape.detection_s / 4
        await asyncio.sleep(every_s * (self._number % 97) / 97)
        while True:
            if time.monotonic() >= self._sent_s + every_s:
                await self._send(m.Heartbeat())
            await asyncio.sleep(self._sent_s + every_s - time.monotonic())

    async def _send(self, message: m.AgentMessage) -> None:
        self._waiting.append(encode(message))
        await self._flush()

    async def _flush(self) -> None:
        """Sends what waits in one frame, as an agent does with what its workers say in the same moment."""
        if not self._waiting or self._socket is None or self._socket.closed:
            return  # what waits goes out when it is connected again
        frame, self._waiting, self._sent_s = self._waiting, [], time.monotonic()
        try:
            await self._socket.send_bytes(encode_all(frame))
        except (ConnectionError, aiohttp.ClientError):
            return  # `_read` notices the end

    def _says(self, worker: SimWorker, message: m.WorkerMessage) -> None:
        self._waiting.append(encode(m.FromWorker(worker.name, message)))

    async def _read(self) -> None:
        while True:
            assert self._socket is not None
            async for frame in self._socket:
                if frame.type is not aiohttp.WSMsgType.BINARY:
                    break
                self._seen.nbytes += len(frame.data)
                self._seen.frames += 1
                for order in self._codec.decode_all(frame.data):
                    self._take(order)
                await self._flush()
            if self.lost:
                return
            if not self._returns:
                self._seen.closed += 1
                return
            while self._socket.closed:
                await asyncio.sleep(0.1 + self._number % 97 / 970)
                with suppress(aiohttp.ClientError):
                    await self._connect()

    def _take(self, order: m.ToAgent) -> None:
        match order:
            case m.StartWorker():
                self._start(order)
            case m.KillWorker(name):
                if self.workers.pop(name, None) is not None:
                    self._waiting.append(encode(m.Exited(worker=name, code=-9, killed=True)))
            case m.Form():
                # One for all agents of a process: what they compute counts for nobody.
                self._formed = self._known.after(self._formed, order.change)
                for name, join in order.orders:
                    if (worker := self.workers.get(name)) is not None:
                        self._hear(worker, msgspec.structs.replace(join, generation=self._formed))
            case m.Inspect(request):
                self._waiting.append(encode(m.InspectReply(request, self._views())))
            case m.Relay(name, message):
                if (worker := self.workers.get(name)) is not None:
                    self._hear(worker, message)
            case _:
                pass

    def _start(self, order: m.StartWorker) -> None:
        shards = self._shape.shards
        worker = SimWorker(order.worker, int(order.env[m.SHARD_INDEX_VARIABLE]) % shards)
        self.workers[worker.name] = worker
        self._waiting.append(encode(m.Started(worker.name, 1, f"/logs/{worker.name}.log")))
        self._says(worker, m.Attached())
        self._says(worker, self._ready(worker))

    def _ready(self, worker: SimWorker) -> m.Ready:
        return m.Ready(
            digest=f"of-shard-{worker.shard_index}",
            host=f"{self.name}.cluster.local",
            vote_port=34567,
            data_port=34568,
            shape=(self._shape.shards, 1),
            shard_index=worker.shard_index,
        )

    def _hear(self, worker: SimWorker, message: m.ToWorker) -> None:
        match message:
            case m.JoinGeneration():
                worker.generation, worker.committed = message.generation.number, message.generation.start
                self._seen.members[worker.generation] += 1
                self._seen.last_s = time.monotonic()
                self._says(worker, m.Joined(worker.generation, 0.01))
            case m.Break(_, _, True):
                self._says(worker, m.Halted(worker.generation, {}))
            case m.RunTo(_, _, agreement, True):
                self._says(worker, self._parked(worker, agreement))
            case m.RunTo(_, begun, agreement, False):
                self._says(worker, m.Halted(worker.generation, begun, agreement))
            case m.Break() | m.EndAtCommit():
                self._says(worker, self._parked(worker))
            case m.Rebuild(shard_index):
                worker.shard_index = shard_index
                self._says(worker, self._ready(worker))
            case _:
                pass


async def _run(conn: Connection, url: str, numbers: list[int], shape: Shape) -> None:
    seen, known = Seen(), Known()
    agents = [SimAgent(number, shape, seen, known) for number in numbers]
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None, sock_connect=60)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    loop, training = asyncio.get_running_loop(), False
    watching: asyncio.Task[None] | None = None

    async def steps() -> None:
        while True:
            await asyncio.sleep(1.0)
            if training:
                for agent in agents:
                    await agent.train()

    async def watch() -> None:
        async with session.ws_connect(url.replace("/agent", "/watch"), max_msg_size=256 << 20) as socket:
            async for _ in socket:
                pass

    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        for first in range(0, len(agents), AT_ONCE):
            await asyncio.gather(*(agent.join(session, url) for agent in agents[first : first + AT_ONCE]))
        conn.send("connected")
        stepping = asyncio.create_task(steps())
        while True:
            asked = await loop.run_in_executor(None, conn.recv)
            match asked:
                case ("train", on):
                    training = on
                case ("lose", names):
                    await asyncio.gather(*(agent.lose() for agent in agents if agent.name in names))
                case ("fail",):
                    await asyncio.gather(*(agent.fail_all() for agent in agents))
                case ("stall", name):
                    await asyncio.gather(*(agent.stall() for agent in agents if agent.name == name))
                case ("another",):
                    for agent in agents:
                        agent.expect_another()
                case ("watch",):
                    watching = asyncio.create_task(watch())
                case ("inside",):
                    conn.send([a.name for a in agents if not a.lost and a.trains])
                case ("seen",):
                    conn.send(seen)
                case ("end",):
                    break
        stepping.cancel()
        if watching is not None:
            watching.cancel()
    os._exit(0)


def start(url: str, numbers: list[int], shape: Shape) -> tuple[multiprocessing.Process, Connection]:
    """A process with these nodes. It says "connected", and answers questions."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_main, args=(theirs, url, numbers, shape), daemon=True)
    process.start()
    return process, ours


def _main(conn: Connection, url: str, numbers: list[int], shape: Shape) -> None:
    asyncio.run(_run(conn, url, numbers, shape))
