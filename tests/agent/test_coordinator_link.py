"""An agent and its coordinator: what is said again after a reconnection, what is lost, what an order breaks."""

import asyncio
import socket
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import WSCloseCode, WSMsgType, web

from holdfast.agent import coordinator_link
from holdfast.agent.coordinator_link import CoordinatorLink, unheard_s
from holdfast.coordinator.service.authentication import authorized, give_proof
from holdfast.protocol import messages as m
from holdfast.protocol.network.endpoint import Endpoint, Hearing, write_endpoint
from holdfast.protocol.network.lookup import FolderLookup
from holdfast.protocol.phases import Spent
from holdfast.protocol.snapshots import Key
from holdfast.protocol.wire.frames import Codec, encode

HELLO = m.Hello(version=m.PROTOCOL_VERSION, node="n0", session="s", host="n0", slots=1, pid=1)
CODEC: Codec = Codec(m.AgentMessage)


def progress(step):
    spent = (
        Spent(
            first=step,
            micros=1,
            data_s=0.0,
            forward_s=0.1,
            backward_s=0.1,
            wait_s=0.0,
            update_s=0.0,
            aside_s=0.0,
        ),
    )
    return m.FromWorker(
        "w",
        m.Progress(
            generation=1,
            committed=step + 1,
            median_s=0.1,
            losses=(m.ReportedStep(step, 2.5, 0.1),),
            figures=((step, {"x": 1.0}),),
            spent=spent,
        ),
    )


class Coordinator:
    """Takes connections, and what is said on each of them."""

    def __init__(self, answers=True):
        """answers: pings. One whose machine stands still does not, and the kernel keeps its connections."""
        self.said, self.frames = [], 0
        self.news = asyncio.Condition()
        self.connection = None
        self.answers = answers
        self.pings = self.pongs = 0

    async def serve(self, request):
        socket = self.connection = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        heard = []
        self.said.append(heard)
        async for frame in socket:
            if frame.type is WSMsgType.PING:
                self.pings += 1
                if self.answers:
                    await socket.pong(frame.data)
            elif frame.type is WSMsgType.PONG:
                self.pongs += 1
            else:
                assert frame.type is WSMsgType.BINARY
                heard += CODEC.decode_all(frame.data)
                self.frames += 1
            async with self.news:
                self.news.notify_all()
        return socket

    async def hears(self, connection, *kinds):
        """Waits until these kinds of messages, and no others but heartbeats and readings, have come on a connection."""

        def there():
            if len(self.said) <= connection:
                return False
            return [type(x) for x in self.said[connection] if not isinstance(x, UNASKED)] == [*kinds]

        async with self.news:
            await asyncio.wait_for(self.news.wait_for(there), 30)
        return [x for x in self.said[connection] if not isinstance(x, UNASKED)]

    async def until(self, is_it):
        async with self.news:
            await asyncio.wait_for(self.news.wait_for(is_it), 30)


NOTHING = lambda *_: None  # noqa: E731

UNASKED = m.Heartbeat | m.NodeReadings
"""What an agent sends whenever it is time."""


@asynccontextmanager
async def serving(job_dir, term=0, answers=True, token="token"):
    coordinator = Coordinator(answers)
    listening = socket.create_server(("127.0.0.1", 0))
    where = Endpoint(host="127.0.0.1", port=listening.getsockname()[1], pid=1, instance="first", term=term)
    app = web.Application(middlewares=[authorized(token, where)])
    app.on_response_prepare.append(give_proof)
    app.add_routes([web.get("/agent", coordinator.serve)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    write_endpoint(job_dir, where)
    try:
        yield coordinator
    finally:
        await runner.cleanup()


@asynccontextmanager
async def linked(job_dir, take=NOTHING, heartbeat_s=0.5, answers=True, clock=time.monotonic):
    link = CoordinatorLink(
        Looked(job_dir), "token", lambda: HELLO, take, 60.0, NOTHING, heartbeat_s, NOTHING, clock=clock
    )
    async with serving(job_dir, answers=answers) as coordinator:
        running = asyncio.create_task(link.run())
        try:
            yield coordinator, link
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def talk(job_dir):
    async with linked(job_dir) as (coordinator, link):
        link.send(progress(7))
        link.send(m.SnapshotRejected(Key(7, 1, 0, 1), "no memory"))
        link.send(progress(8))
        await coordinator.hears(0, m.Hello, m.FromWorker, m.SnapshotRejected, m.FromWorker)
        await coordinator.connection.close()
        link.send(progress(9))
        return await coordinator.hears(1, m.Hello, m.FromWorker, m.FromWorker, m.FromWorker)


def test_losses_that_a_dead_coordinator_may_not_have_written_are_said_again(tmp_path):
    _, *again = asyncio.run(talk(tmp_path))
    assert [x.message.losses for x in again] == [(m.ReportedStep(step, 2.5, 0.1),) for step in (7, 8, 9)]
    assert [x.message.figures for x in again] == [((step, {"x": 1.0}),) for step in (7, 8, 9)]
    assert [x.message.spent for x in again[:2]] == [(), ()]  # what is counted is not counted twice
    assert again[2].message.spent
    assert all(x.age_s > 0 for x in again)


def test_what_may_wait_is_sent_in_one_frame_with_what_may_not(tmp_path):
    async def said():
        async with linked(tmp_path, heartbeat_s=600.0) as (coordinator, link):
            await coordinator.hears(0, m.Hello)
            for step in range(5):
                link.send(progress(step), within_s=600.0)
            link.send(m.SnapshotRejected(Key(7, 1, 0, 1), "no memory"))
            *reports, _ = (await coordinator.hears(0, m.Hello, *[m.FromWorker] * 5, m.SnapshotRejected))[1:]
            return [x.message.committed for x in reports], coordinator.frames

    assert asyncio.run(said()) == ([1, 2, 3, 4, 5], 2)


@pytest.mark.parametrize(("within_s", "heartbeat_s"), [(0.02, 600.0), (600.0, 0.02)])
def test_what_may_wait_goes_when_its_time_is_over_and_as_a_sign_of_life(tmp_path, within_s, heartbeat_s):
    async def said():
        async with linked(tmp_path, heartbeat_s=heartbeat_s) as (coordinator, link):
            await coordinator.hears(0, m.Hello)
            link.send(progress(7), within_s)
            (_, report) = await coordinator.hears(0, m.Hello, m.FromWorker)
            return report.age_s, coordinator.said[0]

    age_s, messages = asyncio.run(said())
    assert age_s >= 0.5 * min(within_s, heartbeat_s) or isinstance(messages[1], m.Heartbeat)


def test_a_second_hello_comes_before_what_waits_and_never_on_a_later_connection(tmp_path):
    async def said():
        async with linked(tmp_path) as (coordinator, link):
            await coordinator.hears(0, m.Hello)
            link.send(progress(7))
            link.say_hello()
            await link.flushed()
            await coordinator.hears(0, m.Hello, m.Hello, m.FromWorker)
            link._lost = lambda: [link.say_hello(), link.send(progress(8))]
            await coordinator.connection.close()
            await coordinator.hears(1, m.Hello, m.FromWorker, m.FromWorker)

    asyncio.run(said())


def test_a_full_queue_keeps_what_is_new_on_a_new_connection(tmp_path):
    """The last steps' losses are told again only as far as there is room."""
    repeated, full = 512, 10_000

    async def heard():
        async with linked(tmp_path) as (coordinator, link):
            for step in range(repeated):
                link.send(progress(step))
            await coordinator.hears(0, m.Hello, *[m.FromWorker] * repeated)
            link._lost = lambda: [link.send(m.Exited(worker=f"w{number}", code=1)) for number in range(full)]
            await coordinator.connection.close()
            async with coordinator.news:
                all_came = coordinator.news.wait_for(lambda: sum(map(len, coordinator.said[1:])) > full)
                await asyncio.wait_for(all_came, 60)
            return coordinator.said[1]

    exits = [x.worker for x in asyncio.run(heard()) if isinstance(x, m.Exited)]
    assert exits == [f"w{number}" for number in range(full)]


def test_an_order_that_raises_ends_neither_the_link_nor_the_waiting_for_it(tmp_path):
    start = m.StartWorker(worker="w1", slot=0, script="x.py", args=(), module=False, cwd=".", env={})
    obeyed, links = [], []

    def take(order):
        if isinstance(order, m.StartWorker):
            raise OSError(30, "Read-only file system")
        obeyed.append(order)
        links[0].send(m.InspectReply(order.request, ()))

    async def answered():
        async with linked(tmp_path, take) as (coordinator, link):
            links.append(link)
            await coordinator.hears(0, m.Hello)
            await coordinator.connection.send_bytes(encode(start))
            _, found, exited = await coordinator.hears(0, m.Hello, m.FindingsReported, m.Exited)
            await coordinator.connection.send_bytes(encode(m.Inspect(3)))
            await coordinator.hears(0, m.Hello, m.FindingsReported, m.Exited, m.InspectReply)
            return found, exited

    found, exited = asyncio.run(answered())
    assert "StartWorker" in found.findings[0].evidence
    assert "Read-only file system" in found.findings[0].evidence
    assert (exited.worker, exited.killed) == ("w1", True)
    assert "Read-only file system" in exited.tail[0]
    assert obeyed == [m.Inspect(3)]


def test_a_coordinator_that_hands_over_says_that_another_one_follows(tmp_path):
    async def heard():
        told = []
        async with linked(tmp_path) as (coordinator, link):
            link._lost = lambda: told.append(link.left_to_another)
            await coordinator.hears(0, m.Hello)
            await coordinator.connection.close(code=WSCloseCode.SERVICE_RESTART)
            await coordinator.hears(1, m.Hello)
            await coordinator.connection.close()
            await coordinator.hears(2, m.Hello)
        return told

    assert asyncio.run(heard()) == [True, False]


def test_a_coordinator_of_an_earlier_term_is_not_spoken_with(tmp_path):
    """One that was cut off comes back, and writes its address over that of its successor."""

    async def heard():
        link = CoordinatorLink(
            FolderLookup(tmp_path), "token", lambda: HELLO, NOTHING, 60.0, NOTHING, 0.5, NOTHING
        )
        refused = asyncio.Event()
        is_superseded = link._is_superseded

        def looked(where):
            if answer := is_superseded(where):
                refused.set()
            return answer

        link._is_superseded = looked
        async with serving(tmp_path, 3) as newer:
            running = asyncio.create_task(link.run())
            await newer.hears(0, m.Hello)
            assert link.term == 3
            async with serving(tmp_path, 2) as older:
                await newer.connection.close()
                await asyncio.wait_for(refused.wait(), 30)
                async with serving(tmp_path, 3) as again:
                    await again.hears(0, m.Hello)
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                return older.said

    assert asyncio.run(heard()) == []


class Looked(FolderLookup):
    """Says when somebody looks."""

    def __init__(self, job_dir):
        super().__init__(job_dir)
        self.times, self.again = 0, asyncio.Event()

    async def find(self):
        self.times += 1
        self.again.set()
        return await super().find()

    async def looks(self):
        """Waits until the next time. A link that is connected looks where it has missed its coordinator."""
        self.again.clear()
        await asyncio.wait_for(self.again.wait(), 30)


def test_a_coordinator_that_stands_still_is_left_for_one_of_a_later_term(tmp_path):
    async def heard():
        async with linked(tmp_path, heartbeat_s=0.02, answers=False) as (coordinator, link):
            await coordinator.hears(0, m.Hello)
            assert link.hearing() == Hearing(term=0, missing_s=None)
            await link._lookup.looks()
            assert link.hearing().missing_s > 0
            assert link.connected
            async with serving(tmp_path, term=1) as later:
                await later.hears(0, m.Hello)
                assert link.hearing() == Hearing(term=1, missing_s=None)
            return len(coordinator.said)

    assert asyncio.run(heard()) == 1


def test_a_coordinator_that_stands_still_is_not_left_for_a_stranger(tmp_path):
    """Nor for one of the same term, as long as its connection stays. When it goes on, it is heard again."""

    async def heard():
        async with linked(tmp_path, heartbeat_s=0.02, answers=False) as (coordinator, link):
            await coordinator.hears(0, m.Hello)
            async with serving(tmp_path, term=1, token="another") as stranger:
                asked = asyncio.Event()
                is_proven = link._is_proven

                async def noted(where):
                    assert not await is_proven(where)
                    asked.set()
                    return False

                link._is_proven = noted
                await asyncio.wait_for(asked.wait(), 30)
                assert link.connected
                assert link.hearing().missing_s > 0
                assert stranger.said == []
                await coordinator.connection.ping()  # it goes on
                await coordinator.until(lambda: coordinator.pongs)
                assert link.hearing().missing_s is None
            return len(coordinator.said)

    assert asyncio.run(heard()) == 1


def test_a_coordinator_that_has_nothing_to_say_is_not_doubted(tmp_path):
    async def heard():
        async with linked(tmp_path, heartbeat_s=0.02) as (coordinator, link):
            await coordinator.hears(0, m.Hello)
            looked = link._lookup.times
            await coordinator.until(lambda: coordinator.pings == 3)
            assert link.hearing().missing_s is None
            assert link._lookup.times == looked
            return len(coordinator.said)

    assert asyncio.run(heard()) == 1


def test_the_first_coordinator_is_waited_for_longer_than_a_later_one(tmp_path):
    async def ended():
        over = asyncio.Event()
        lookup = Looked(tmp_path)
        link = CoordinatorLink(
            lookup, "token", lambda: HELLO, NOTHING, 0.0, over.set, 0.5, NOTHING, join_s=60.0
        )
        running = asyncio.create_task(link.run())
        for _ in range(5):
            await lookup.looks()
        assert not over.is_set()
        async with serving(tmp_path) as coordinator:
            await coordinator.hears(0, m.Hello)
            assert not over.is_set()
        await asyncio.wait_for(running, 30)
        return over.is_set()

    assert asyncio.run(ended())


class Clock:
    """Shows what it is set to."""

    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.mark.parametrize(
    ("said_s", "missing_s"),
    [
        pytest.param(100.05, 0.02, id="its machine fell silent"),
        pytest.param(None, 0.07, id="the kernel does not tell"),
        pytest.param(90.0, 0.08, id="this process stood still"),
    ],
)
def test_a_coordinator_is_missed_since_its_machine_last_said_anything(
    tmp_path, monkeypatch, said_s, missing_s
):
    """Within the time after which the kernel ends a connection for silence: four heartbeats, 0.08 s."""

    async def heard():
        clock, hearings = Clock(), []
        async with linked(tmp_path, heartbeat_s=0.02, clock=clock) as (coordinator, link):
            link._lost = lambda: hearings.append(link.hearing())
            await coordinator.hears(0, m.Hello)
            link._heard_s = 90.0 if said_s == 90.0 else 100.0
            silent_s = None if said_s is None else lambda: clock.now_s - said_s
            monkeypatch.setattr(coordinator_link, "unheard_s", lambda _: silent_s and silent_s())
            beats = len(coordinator.said[0])
            # The second of them was sent after the look that came with it.
            await coordinator.until(lambda: len(coordinator.said[0]) >= beats + 2)
            clock.now_s = 100.07
            await coordinator.connection.close()
            await coordinator.hears(1, m.Hello)
        return hearings

    (hearing,) = asyncio.run(heard())
    assert hearing.missing_s == pytest.approx(missing_s)


def test_the_kernel_tells_since_when_a_machine_is_silent():
    class Told:
        def __init__(self, raw):
            self.raw = raw

        def get_extra_info(self, name):
            return {"socket": self.raw}[name]

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as mine,
    ):
        before_s = time.monotonic()
        assert 0 <= unheard_s(Told(mine)) < 30
        other, _ = server.accept()
        with other:
            mine.sendall(b"?")
            assert other.recv(1) == b"?"
        assert unheard_s(Told(mine)) <= time.monotonic() - before_s + 1
    assert unheard_s(Told(mine)) is None
    assert unheard_s(Told(None)) is None
    one, two = socket.socketpair()
    with one, two:
        assert unheard_s(Told(one)) is None
