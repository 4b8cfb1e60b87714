"""What an agent sends again to a coordinator that may know nothing of it."""

import asyncio
import socket

from aiohttp import WSMsgType, web

from holdfast.agent.link import CoordinatorLink
from holdfast.coordinator.door import authorized, give_proof
from holdfast.protocol import messages as m
from holdfast.protocol.endpoint import Endpoint, write_endpoint
from holdfast.protocol.frames import Codec
from holdfast.protocol.phases import Spent
from holdfast.protocol.snapshots import Key

HELLO = m.Hello(m.PROTOCOL_VERSION, "n0", "s", "n0", 1, 1)
CODEC: Codec = Codec(m.AgentMessage)


def progress(step):
    spent = (Spent(step, 1, 0.0, 0.1, 0.1, 0.0, 0.0, 0.0),)
    return m.FromWorker("w", m.Progress(1, step + 1, 0.1, ((step, 2.5, 0.1),), {"x": 1.0}, spent))


class Coordinator:
    """Takes connections, and what is said on each of them."""

    def __init__(self):
        self.said = []
        self.news = asyncio.Condition()
        self.connection = None

    async def serve(self, request):
        socket = self.connection = web.WebSocketResponse()
        await socket.prepare(request)
        heard = []
        self.said.append(heard)
        async for frame in socket:
            assert frame.type is WSMsgType.BINARY
            heard.append(CODEC.decode(frame.data))
            async with self.news:
                self.news.notify_all()
        return socket

    async def hears(self, connection, *kinds):
        """Waits until these kinds of messages, and no others but heartbeats, have come on a connection."""

        def there():
            if len(self.said) <= connection:
                return False
            return [type(x) for x in self.said[connection] if not isinstance(x, m.Heartbeat)] == [*kinds]

        async with self.news:
            await asyncio.wait_for(self.news.wait_for(there), 30)
        return [x for x in self.said[connection] if not isinstance(x, m.Heartbeat)]


async def talk(job_dir):
    coordinator = Coordinator()
    listening = socket.create_server(("127.0.0.1", 0))
    where = Endpoint("127.0.0.1", listening.getsockname()[1], 1, "first")
    app = web.Application(middlewares=[authorized("token", where)])
    app.on_response_prepare.append(give_proof)
    app.add_routes([web.get("/agent", coordinator.serve)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    write_endpoint(job_dir, where)
    nothing = lambda *_: None  # noqa: E731
    link = CoordinatorLink(job_dir, "token", lambda: HELLO, nothing, 60.0, nothing, 0.5, nothing)
    running = asyncio.create_task(link.run())
    try:
        link.send(progress(7))
        link.send(m.NotHeld(Key(7, 1, 0, 1), "no memory"))
        link.send(progress(8))
        await coordinator.hears(0, m.Hello, m.FromWorker, m.NotHeld, m.FromWorker)
        await coordinator.connection.close()
        link.send(progress(9))
        return await coordinator.hears(1, m.Hello, m.FromWorker, m.FromWorker, m.FromWorker)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await runner.cleanup()


def test_losses_that_a_dead_coordinator_may_not_have_written_are_said_again(tmp_path):
    _, *again = asyncio.run(talk(tmp_path))
    assert [x.message.losses for x in again] == [((step, 2.5, 0.1),) for step in (7, 8, 9)]
    assert [x.message.spent for x in again[:2]] == [(), ()]  # what is counted is not counted twice
    assert again[2].message.spent
    assert all(x.age_s > 0 for x in again)
