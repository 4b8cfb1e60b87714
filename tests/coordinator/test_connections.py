"""Which of an agent's connections speaks for its node: the real service, and sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from holdfast.coordinator.kernel.history import Remembered
from holdfast.coordinator.service import server
from holdfast.coordinator.service.server import Coordinator
from holdfast.protocol import causes
from holdfast.protocol import messages as m
from holdfast.protocol.job import JobSpec, Resume
from holdfast.protocol.job_options import Timing
from holdfast.protocol.leadership import EXIT_SUPERSEDED, claim_term
from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.wire.frames import Codec, encode

Socket = aiohttp.ClientWebSocketResponse
CODEC: Codec[m.ToAgent] = Codec(m.ToAgent)
SPEC = JobSpec(name="job", script="train.py", min_nodes=2, max_nodes=2)


class Service:
    """A coordinator that listens, agents that connect to it, and the events of its ledger as they come."""

    def __init__(self, coordinator: Coordinator, session: aiohttp.ClientSession, url: str) -> None:
        self.coordinator = coordinator
        self._session, self._url = session, url
        self.events: list[dict[str, Any]] = []
        self._news = asyncio.Condition()

    async def agent(self, session: str, node: str = "n0", snapshot_port: int = 0) -> Socket:
        link = await self._session.ws_connect(f"{self._url}/agent")
        await link.send_bytes(
            encode(
                m.Hello(
                    version=m.PROTOCOL_VERSION,
                    node=node,
                    session=session,
                    host="127.0.0.1",
                    slots=1,
                    pid=1,
                    ports=(1, 2),
                    snapshot_port=snapshot_port,
                )
            )
        )
        return link

    async def watch(self) -> None:
        async with self._session.ws_connect(f"{self._url}/watch") as watch:
            async for frame in watch:
                said = msgspec.json.decode(frame.data)
                if said["kind"] == "event":
                    async with self._news:
                        self.events.append(said["value"])
                        self._news.notify_all()

    def kinds(self, *kinds: str) -> list[str]:
        return [x["kind"] for x in self.events if x["kind"] in kinds]

    async def until(self, kind: str, count: int) -> None:
        async with self._news, asyncio.timeout(30):
            await self._news.wait_for(lambda: len(self.kinds(kind)) == count)

    async def stop(self) -> None:
        async with self._session.post(f"{self._url}/stop") as answer:
            assert answer.status == 200


@asynccontextmanager
async def serving(job_dir: Path, monkeypatch: pytest.MonkeyPatch, timing: Timing) -> AsyncIterator[Service]:
    listens: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(
        server, "write_endpoint", lambda _, endpoint: listens.done() or listens.set_result(endpoint)
    )
    spec = msgspec.structs.replace(SPEC, timing=timing)
    coordinator = Coordinator(job_dir, spec, Resume())
    running = asyncio.create_task(coordinator.serve(socket.create_server(("127.0.0.1", 0)), "127.0.0.1"))
    url = (await listens).url
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
        there = Service(coordinator, session, url)
        watching = asyncio.create_task(there.watch())
        yield there
        await there.stop()
        await watching
    await running


async def rest(link: Socket) -> list[m.ToAgent]:
    """What is still said on a connection that the coordinator ends."""
    async with asyncio.timeout(30):
        frames = [frame.data async for frame in link if frame.type is aiohttp.WSMsgType.BINARY]
        return [order for frame in frames for order in CODEC.decode_all(frame)]


def with_service(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[Service], Awaitable[None]],
    timing: Timing = SPEC.timing,
) -> None:
    job_dir = tmp_path / "jobs" / "job"
    job_dir.mkdir(parents=True)
    (job_dir / "token").write_text("secret")

    async def run() -> None:
        async with serving(job_dir, monkeypatch, timing) as there:
            await act(there)

    asyncio.run(run())


def test_another_agent_takes_the_place_and_the_one_before_is_told_to_end(tmp_path, monkeypatch):
    async def act(there: Service) -> None:
        old = await there.agent("A")
        await there.until("node-joined", 1)
        new = await there.agent("B")
        await there.until("node-joined", 2)
        with suppress(aiohttp.ClientConnectionResetError):  # it may be closed already
            await old.send_bytes(encode(m.Leaving("said by the old one", 30.0)))
        assert isinstance((await rest(old))[-1], m.Shutdown)
        await new.send_bytes(encode(m.Started("w", 1, "w.log")))
        node = there.coordinator._core.state.membership.nodes["n0"]
        assert (node.alive, node.session, node.leaving) == (True, "B", None)
        assert there.kinds("node-lost") == ["node-lost"]  # of A, when B came
        await new.close()
        await there.until("node-lost", 2)

    with_service(tmp_path, monkeypatch, act)


def test_an_agent_that_connects_again_is_neither_lost_nor_ended(tmp_path, monkeypatch):
    """Its old connection may seem open for a while: only its end is still to come."""

    async def act(there: Service) -> None:
        old = await there.agent("A")
        await there.until("node-joined", 1)
        new = await there.agent("A")
        assert not any(isinstance(order, m.Shutdown) for order in await rest(old))
        await old.close()
        await new.send_bytes(
            encode(
                m.Hello(version=m.PROTOCOL_VERSION, node="n0", session="B", host="127.0.0.1", slots=1, pid=1)
            )
        )
        await there.until("node-joined", 2)
        assert there.kinds("node-lost") == ["node-lost"]  # A, which says itself that it is B now
        await new.close()
        await there.until("node-lost", 2)

    with_service(tmp_path, monkeypatch, act)


def tear(link: Socket) -> None:
    """The connection is reset, without a word of either side."""
    raw = link.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link._response.connection.transport.abort()


@pytest.mark.parametrize("ended", [True, False])
def test_a_torn_connection_is_a_lost_node_only_where_nobody_listens_any_more(tmp_path, monkeypatch, ended):
    """A kernel closes what a process that ended has left; but connections also break under agents that live."""

    async def act(there: Service) -> None:
        looked_at, done = asyncio.Event(), asyncio.Event()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            looked_at.set()
            await done.wait()
            writer.close()

        memory = await asyncio.start_server(listen, "127.0.0.1", 0)
        port = memory.sockets[0].getsockname()[1]
        links = [await there.agent(node, node, port) for node in ("n0", "n1")]
        await there.until("node-joined", 2)
        if ended:
            memory.close()
            await memory.wait_closed()
        for link in links:
            tear(link)
        if ended:
            await there.until("node-lost", 2)
            return
        await looked_at.wait()
        back = [await there.agent(node, node, port) for node in ("n0", "n1")]
        # The end of a third, which is told after whatever the two would have caused.
        await (await there.agent("C", "n2")).close()
        await there.until("node-lost", 1)
        nodes = there.coordinator._core.state.membership.nodes
        assert (nodes["n0"].alive, nodes["n1"].alive) == (True, True)
        for link in back:
            await link.close()
        done.set()
        memory.close()

    # None of these agents says that it lives: on a machine with much to do they would be lost for that.
    with_service(tmp_path, monkeypatch, act, Timing(detection_s=30.0))


def test_a_live_agent_that_does_not_come_back_is_lost_like_one_that_is_silent(tmp_path, monkeypatch):
    async def act(there: Service) -> None:
        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        memory = await asyncio.start_server(listen, "127.0.0.1", 0)
        link = await there.agent("A", "n0", memory.sockets[0].getsockname()[1])
        await there.until("node-joined", 1)
        tear(link)
        await there.until("node-lost", 1)
        (lost,) = [event for event in there.events if event["kind"] == "node-lost"]
        assert lost["fields"]["cause"] == str(causes.NodeSilent(2.0))
        memory.close()

    with_service(tmp_path, monkeypatch, act)


class SlowHistory:
    """Reads the history of the first that asks for as long as it is told to."""

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def past(self, identity: str, devices: tuple[str, ...]) -> tuple[Remembered, ...]:
        if not self.asked.is_set():
            self.asked.set()
            await self.answers.wait()
        return ()


def test_a_hello_whose_history_comes_late_takes_no_newer_ones_place(tmp_path, monkeypatch):
    async def act(there: Service) -> None:
        slow = SlowHistory()
        monkeypatch.setattr(there.coordinator._memory, "past", slow.past)
        old = await there.agent("A")
        await slow.asked.wait()
        new = await there.agent("B")
        await there.until("node-joined", 1)
        slow.answers.set()
        assert isinstance((await rest(old))[-1], m.Shutdown)
        await there.agent("C", "n1")
        await there.until("node-joined", 2)
        assert there.coordinator._core.state.membership.nodes["n0"].session == "B"
        assert there.kinds("node-lost") == []
        await new.close()
        await there.until("node-lost", 1)

    with_service(tmp_path, monkeypatch, act)


def test_a_connection_speaks_for_one_node(tmp_path, monkeypatch):
    async def act(there: Service) -> None:
        link = await there.agent("A")
        await there.until("node-joined", 1)
        await link.send_bytes(
            encode(
                m.Hello(version=m.PROTOCOL_VERSION, node="n1", session="B", host="127.0.0.1", slots=1, pid=1)
            )
        )
        await rest(link)
        await there.until("node-lost", 1)
        assert set(there.coordinator._core.state.membership.nodes) == {"n0"}

    with_service(tmp_path, monkeypatch, act)


def test_what_rank_0_imported_is_told_to_all_nodes_and_to_those_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def learn(link: Socket) -> m.Preload:
        async with asyncio.timeout(30):
            while True:
                for order in CODEC.decode_all(await link.receive_bytes()):
                    if isinstance(order, m.Preload):
                        return order

    async def act(service: Service) -> None:
        trains, other = await service.agent("one", "n0"), await service.agent("two", "n1")
        await service.until("node-joined", 2)
        said = m.Imported(("tqdm", "tqdm.auto"), ("RANK",))
        known = m.Preload(modules=said.modules, variables=said.variables)
        await trains.send_bytes(encode(m.FromWorker("n0.0#1", said)))
        assert [await learn(trains), await learn(other)] == [known, known]
        # Said again, it is no news; what is new is added to it.
        for more in (said, m.Imported(("yaml",), ("HF_HOME",))):
            await trains.send_bytes(encode(m.FromWorker("n0.0#1", more)))
        both = m.Preload(modules=("tqdm", "tqdm.auto", "yaml"), variables=("RANK", "HF_HOME"))
        assert await learn(other) == both
        spare = await service.agent("three", "n2")
        assert await learn(spare) == both
        for link in (trains, other, spare):
            await link.close()

    with_service(tmp_path, monkeypatch, act)


def test_an_agent_that_has_seen_a_later_term_supersedes_the_coordinator(tmp_path):
    """At once, whatever the folder says; what is left to write belongs to the successor."""
    ended = []

    def exit_now(code):
        ended.append(code)
        raise asyncio.CancelledError

    async def supersede():
        job_dir = tmp_path / "jobs" / "job"
        job_dir.mkdir(parents=True)
        (job_dir / "token").write_text("secret")
        claim_term(job_dir, 2, "n0")
        spec = JobSpec(name="job", script="train.py", min_nodes=1, max_nodes=1)
        coordinator = server.Coordinator(job_dir, spec, Resume(), 2, exit_now=exit_now)
        listening = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        serving = asyncio.create_task(coordinator.serve(listening, "127.0.0.1"))
        hello = m.Hello(version=m.PROTOCOL_VERSION, node="n0", session="a", host="h", slots=1, pid=1, term=3)
        async with (
            aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session,
            session.ws_connect(f"{url}/agent") as link,
        ):
            await link.send_bytes(encode(hello))
            assert (await link.receive()).type is not aiohttp.WSMsgType.BINARY
        await asyncio.wait([serving], timeout=30)
        assert coordinator.superseded
        assert not coordinator._core.state.membership.nodes

    asyncio.run(supersede())
    assert ended == [EXIT_SUPERSEDED]
