"""The real coordinator on a real socket, and agents that a test moves by hand."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service.server import Coordinator
from holdfast.protocol import messages as m
from holdfast.protocol.generation_difference import NOTHING, apply
from holdfast.protocol.job import JobSpec, Resume
from holdfast.protocol.job_options import SnapshotOptions, Timing
from holdfast.protocol.job_view import CHANGED, WHOLE, ReceivedView
from holdfast.protocol.network.endpoint import read_endpoint
from holdfast.protocol.snapshots import Saving
from holdfast.protocol.wire.frames import Codec, encode

_codec: Codec[m.ToAgent] = Codec(m.ToAgent)
FENCES = (m.Fence, m.Shutdown, m.KillWorker)


class Heard:
    """What came, in order; a test waits for what is still to come."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._news = asyncio.Condition()

    async def add(self, said: Any) -> None:
        async with self._news:
            self.all.append(said)
            self._news.notify_all()

    async def until(self, is_it: Callable[[Any], bool]) -> Any:
        """The first that is it, also of what came already."""
        async with self._news:
            await self._news.wait_for(lambda: any(map(is_it, self.all)))
        return next(x for x in self.all if is_it(x))


class Agent:
    """One node with one worker, which does what its coordinator says, at once."""

    def __init__(self, plane: Plane, name: str) -> None:
        self.plane, self.name, self.heard = plane, name, Heard()
        self.worker, self.generation, self.committed, self.beats = "", 0, 0, 0
        self.closed, self.formed = False, NOTHING
        self.forms: list[m.Form] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        """Connects and says hello."""
        self.line = await self.plane.session.ws_connect(f"{self.plane.url}/agent")
        await self.hello(f"s-{self.name}")
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    async def hello(self, session: str, *workers: m.WorkerView) -> None:
        """As a node of this session, with these workers."""
        await self.send(
            m.Hello(
                version=m.PROTOCOL_VERSION,
                node=self.name,
                session=session,
                host="127.0.0.1",
                slots=1,
                pid=1,
                ports=(1, 2),
                workers=workers,
                generation=(self.formed.number, self.formed.digest),
            )
        )

    async def leave(self) -> None:
        """Its connection ends, as when its process does."""
        for task in self._tasks:
            task.cancel()
        await self.line.close()

    async def says(self, message: m.WorkerMessage) -> None:
        """A word of its worker."""
        await self.send(m.FromWorker(self.worker, message))

    async def step(self) -> None:
        """Its worker commits one more step."""
        self.committed += 1
        losses = (m.ReportedStep(self.committed - 1, 1.0, 0.1),) if self.name == "n0" else ()
        await self.says(
            m.Progress(generation=self.generation, committed=self.committed, median_s=0.1, losses=losses)
        )

    async def told(self, kind: type, count: int = 1) -> Any:
        """The latest order of this kind, when so many have come."""
        await self.heard.until(lambda _: sum(isinstance(x, kind) for x in self.heard.all) >= count)
        return [x for x in self.heard.all if isinstance(x, kind)][-1]

    async def beaten(self, seconds: float) -> None:
        """Returns when it has sent as many heartbeats as it does in this time."""
        until = self.beats + int(seconds / self.plane.timing.heartbeat_s)
        await self.heard.until(lambda _: self.beats >= until)

    async def send(self, message: m.AgentMessage) -> None:
        """A word of its own."""
        await self.line.send_bytes(encode(message))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.plane.timing.heartbeat_s)
            await self.send(m.Heartbeat())
            self.beats += 1
            await self.heard.add("beat")

    async def _read(self) -> None:
        async for frame in self.line:
            for order in _codec.decode_all(frame.data):
                await self._take(order)
        self.closed = True
        await self.heard.add("closed")

    async def _take(self, order: m.ToAgent) -> None:
        said = order.message if isinstance(order, m.Relay) else order
        if isinstance(order, m.Form):
            self.forms.append(order)
            self.formed = apply(self.formed if order.change.base else NOTHING, order.change)
            ((_, join),) = order.orders
            said = msgspec.structs.replace(join, generation=self.formed)
        if isinstance(said, m.StartWorker):
            self.worker = said.worker
            await self.send(m.Started(said.worker, 1, "log"))
            await self.says(m.Attached())
            await self.says(m.Ready(digest="d", host="127.0.0.1", vote_port=1, data_port=2))
        elif isinstance(said, m.JoinGeneration):
            self.generation, self.committed = said.generation.number, said.generation.start
            await self.says(m.Joined(self.generation, 0.01))
        elif isinstance(said, m.Break | m.EndAtCommit):
            await self.says(m.Parked(generation=said.generation, committed=self.committed))
        elif isinstance(said, m.Stop):
            await self.says(m.Done(committed=self.committed, params_xxh3="bits", loss=1.0))
            await self.send(m.Exited(worker=self.worker, code=0))
        await self.heard.add(said)
        if isinstance(said, m.Shutdown):
            await self.line.close()


class Plane:
    """One coordinator that serves, and who watches it."""

    def __init__(self, coordinator: Coordinator, url: str, session: aiohttp.ClientSession) -> None:
        self.coordinator, self.url, self.session = coordinator, url, session
        self.timing = coordinator._core.timing
        self.heard = Heard()
        self.agents: list[Agent] = []
        self.serving: asyncio.Task[None] | None = None

    @property
    def state(self) -> CoreState:
        return self.coordinator._core.state

    async def agent(self, name: str) -> Agent:
        """One more node."""
        agent = Agent(self, name)
        await agent.join()
        self.agents.append(agent)
        return agent

    async def pair(self) -> tuple[Agent, Agent]:
        """Two that train, and have committed three steps."""
        first, second = await self.agent("n0"), await self.agent("n1")
        for agent in (first, second):
            await agent.told(m.JoinGeneration)
        for _ in range(3):
            await first.step()
            await second.step()
        await self.committed(3)
        return first, second

    async def committed(self, step: int) -> None:
        """Returns when the coordinator has heard of this step."""
        await self.heard.until(lambda said: said[0] == "status" and said[1]["step"] >= step)

    async def event(self, kind: str) -> dict[str, Any]:
        """An entry of the ledger, when it is announced."""
        said = await self.heard.until(lambda said: said[0] == "event" and said[1]["kind"] == kind)
        return said[1]["fields"]

    async def line(self, text: str) -> str:
        """A line for people."""
        said = await self.heard.until(lambda said: said[0] == "log" and text in said[1]["text"])
        return said[1]["text"]

    def lines(self) -> list[str]:
        return [said[1]["text"] for said in self.heard.all if said[0] == "log"]

    async def get(self, path: str) -> str:
        async with self.session.get(self.url + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.text()

    async def figure(self, name: str) -> float:
        """One of the figures for Prometheus."""
        found = re.search(rf"^{name} (.*)$", await self.get("/metrics"), re.MULTILINE)
        assert found is not None
        return float(found[1])

    async def watch(self) -> None:
        """Hears what everybody hears who watches."""
        view = ReceivedView()
        async with self.session.ws_connect(f"{self.url}/watch") as watch:
            async for frame in watch:
                said = msgspec.json.decode(frame.data)
                kind, value = said["kind"], said["value"]
                if kind == WHOLE:
                    value = msgspec.to_builtins(view.whole(value))
                elif kind == CHANGED:
                    kind, value = WHOLE, msgspec.to_builtins(view.changed(value))
                await self.heard.add((kind, value))


@asynccontextmanager
async def serving(home: Path, detection_s: float = 1.0, copies: int = 0, **spec: Any) -> AsyncIterator[Plane]:
    """A coordinator in this process, on a real socket, that somebody watches. copies: of its ledger, which else outlives it."""
    job_dir = home / "jobs" / "job"
    job_dir.mkdir(parents=True, exist_ok=True)
    (job_dir / "token").write_text("secret")
    defaults = {"min_nodes": 1, "max_nodes": 2, "saving": Saving(SnapshotOptions("0"))}
    job = JobSpec(
        name="job", script="train.py", **{**defaults, **spec}, timing=Timing(detection_s=detection_s)
    )
    coordinator = Coordinator(job_dir, job, Resume(), copies=copies)
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    headers = {"Authorization": "Bearer secret"}
    async with asyncio.timeout(60), aiohttp.ClientSession(headers=headers) as session:
        plane = Plane(coordinator, url, session)
        plane.serving = asyncio.create_task(coordinator.serve(listening, "127.0.0.1"))
        watching = asyncio.create_task(plane.watch())
        await plane.heard.until(lambda said: said[0] == "status")
        try:
            yield plane
        finally:
            for agent in plane.agents:
                await agent.leave()
            if plane.state.membership.outcome is None:
                await session.post(f"{url}/stop")
            await plane.serving
            await watching
    assert read_endpoint(job_dir) is not None
