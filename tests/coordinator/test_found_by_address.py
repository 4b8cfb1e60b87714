"""A coordinator that is found at an address: it says its name to anybody, and its name is good at that address alone."""

import asyncio
import socket
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import pytest
from aiohttp import web

from holdfast.coordinator.service.authentication import Entrance, authorized, give_proof
from holdfast.errors import UsageError
from holdfast.protocol.network import lookup
from holdfast.protocol.network.endpoint import Endpoint, Whereabouts, told_by
from holdfast.protocol.network.http_client import Unproven, proving
from holdfast.protocol.network.lookup import AddressLookup, parse_address

TOKEN = "secret"


@asynccontextmanager
async def coordinator(instance, term=1, host="127.0.0.1", port=0):
    listener = socket.create_server((host, port))
    where = Endpoint(host=host, port=listener.getsockname()[1], pid=1, instance=instance, term=term)
    app = web.Application(middlewares=[authorized(TOKEN, where)])
    app.on_response_prepare.append(give_proof)

    async def secret(request):
        return web.Response(text=f"of {instance}")

    app.add_routes([web.get("/secret", secret)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    entrance = Entrance(listener, TOKEN, where, runner.server)
    try:
        yield where
    finally:
        entrance.close()
        await runner.cleanup()


@contextmanager
def stranger(answer, port=0):
    """Whoever connects gets these bytes."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        loop = asyncio.get_running_loop()

        async def serve():
            listener.setblocking(False)
            while True:
                caller, _ = await loop.sock_accept(listener)
                await loop.sock_recv(caller, 4096)
                await loop.sock_sendall(caller, answer)
                caller.close()

        serving = asyncio.create_task(serve())
        try:
            yield listener.getsockname()[1]
        finally:
            serving.cancel()


def name_of(where):
    said = f'{{"instance":"{where.instance}","term":{where.term}}}'
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(said)}\r\n\r\n{said}".encode()


async def ask(where, url=None):
    async with (
        aiohttp.ClientSession(middlewares=[proving(TOKEN, where)]) as session,
        session.get(f"{url or where.url}/secret") as answer,
    ):
        return await answer.text()


def test_it_is_known_by_the_name_that_it_says_and_by_the_one_in_its_folder():
    async def talk():
        async with coordinator("first", term=3) as where:
            found = await AddressLookup("127.0.0.1", where.port).find()
            assert (found.instance, found.term, found.port) == ("first", 3, where.port)
            return await ask(found), await ask(where)

    assert asyncio.run(talk()) == ("of first", "of first")


def test_a_stranger_who_says_the_name_of_one_that_lives_gets_nothing_that_is_good_there():
    """The request that it is sent cannot be passed on: it is for the stranger's address."""

    async def talk():
        async with coordinator("living") as where:
            with stranger(name_of(where)) as port:
                found = await AddressLookup("127.0.0.1", port).find()
                assert found.instance == "living"
                with pytest.raises(Unproven):  # as it would be answered by the living one
                    await ask(found, where.url)

    asyncio.run(talk())


def test_an_answer_that_a_former_coordinator_had_is_not_believed():
    async def talk():
        async with coordinator("now") as where:
            before = Endpoint(
                host=where.host,
                port=where.port,
                pid=0,
                instance="before",
                term=where.term,
                dialled=f"{where.host}:{where.port}",
            )
            with pytest.raises(Unproven):
                await ask(before)

    asyncio.run(talk())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 5_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"\x00\xff" * 100,
        b"",
    ],
)
def test_whoever_says_no_name_is_no_coordinator(answer):
    async def talk():
        with stranger(answer) as port:
            return await AddressLookup("127.0.0.1", port).find()

    assert asyncio.run(talk()) is None


def test_of_two_behind_one_name_the_later_term_counts(monkeypatch):
    async def talk():
        async with (
            coordinator("old", term=1) as old,
            coordinator("new", term=2, host="127.0.0.2", port=old.port),
        ):

            async def both(*arguments, **more):
                return [(0, 0, 0, "", (host, old.port)) for host in ("127.0.0.1", "127.0.0.2")]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
            return (await AddressLookup("coordinator.job", old.port).find()).instance

    assert asyncio.run(talk()) == "new"


async def found_where(named, told, term, monkeypatch):
    """Whom a node finds that was told of a coordinator at an address. named: what the name service says, late or never."""
    async with (
        coordinator("old", term=1) as old,
        coordinator("new", term=2, host="127.0.0.2", port=old.port),
    ):

        async def resolve(*arguments, **more):
            return [(0, 0, 0, "", (host, old.port)) for host in await named()]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        if named is not silent:  # it answers, however long that takes on a busy machine
            monkeypatch.setattr("holdfast.protocol.network.lookup.NAME_S", 30.0)
        lookup = AddressLookup("coordinator.job", old.port)
        lookup.told(Whereabouts(term, told))
        found = await lookup.find()
        return found and found.instance


async def of_before():
    return ["127.0.0.1"]


async def of_now():
    return ["127.0.0.2"]


async def unknown():
    raise OSError("no such name")


async def silent():
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("named", "told", "term", "found"),
    [
        (of_before, "127.0.0.2", 2, "new"),
        (unknown, "127.0.0.2", 2, "new"),
        (silent, "127.0.0.2", 2, "new"),
        (of_now, "127.0.0.1", 1, "new"),
        (unknown, "127.0.0.1", 1, "old"),
        # Another job's coordinator has the address now.
        (of_before, "127.0.0.2", 3, "old"),
        (unknown, "127.0.0.2", 1, None),
        (of_before, "127.0.0.9", 2, "old"),
    ],
)
def test_what_a_node_was_told_counts_where_its_name_service_is_behind(named, told, term, found, monkeypatch):
    monkeypatch.setattr(lookup, "NAME_S", 0.01)
    assert asyncio.run(found_where(named, told, term, monkeypatch)) == found


def test_a_node_that_waits_for_a_name_looks_where_it_is_told(monkeypatch):
    async def talk():
        asked, begun, answers = 0, asyncio.Event(), asyncio.Event()

        async def resolve(*arguments, **more):
            nonlocal asked
            asked += 1
            begun.set()
            await answers.wait()
            return [(0, 0, 0, "", ("127.0.0.3", new.port))]

        async with coordinator("new", term=2, host="127.0.0.2") as new:
            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
            monkeypatch.setattr(lookup, "NAME_S", 0.0)
            where = AddressLookup("coordinator.job", new.port)
            looking = asyncio.create_task(where.find())
            await begun.wait()
            where.told(Whereabouts(2, "127.0.0.2"))
            found = [(await looking).instance, (await where.find()).instance]
            async with coordinator("next", term=3, host="127.0.0.3", port=new.port):
                # The name was asked for once, and not anew at each look.
                answers.set()
                monkeypatch.setattr(lookup, "NAME_S", 60.0)
                return [*found, (await where.find()).instance, asked]

    assert asyncio.run(talk()) == ["new", "new", "next", 1]


def test_a_told_machine_that_is_silent_is_not_waited_for_where_the_name_leads_on(monkeypatch):
    async def talk():
        async with coordinator("new", term=2, host="127.0.0.2") as new:

            async def resolve(*arguments, **more):
                return [(0, 0, 0, "", ("127.0.0.2", new.port))]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
            # Its kernel takes connections, and nobody answers.
            with socket.create_server(("127.0.0.4", new.port)):
                where = AddressLookup("coordinator.job", new.port)
                where.told(Whereabouts(1, "127.0.0.4"))
                return (await where.find()).instance

    monkeypatch.setattr(lookup, "ASK_S", 1e6)
    assert asyncio.run(asyncio.wait_for(talk(), 60)) == "new"


def test_of_what_a_node_was_told_the_latest_term_counts():
    where = AddressLookup("nobody.invalid", 1)
    for told in (Whereabouts(2, "127.0.0.2"), Whereabouts(1, "127.0.0.1")):
        where.told(told)
    assert where._told.term == 2


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/coordinator/3/10.0.0.7", Whereabouts(3, "10.0.0.7")),
        ("/coordinator/3/fd00::7", Whereabouts(3, "fd00::7")),
        ("/coordinator", None),
        ("/coordinator/", None),
        ("/coordinator/3", None),
        ("/coordinator/3/", None),
        ("/coordinator/three/10.0.0.7", None),
        ("/coordinator/3/elsewhere.example", None),
        ("/coordinator/3/10.0.0.7:80", None),
        ("/coordinator/3/10.0.0.7/more", None),
        ("/snapshot/3/10.0.0.7", None),
    ],
)
def test_an_agent_is_told_an_address_and_nothing_else(path, told):
    assert told_by(path) == told
    assert told is None or told.path == path


def test_a_name_that_nobody_knows_is_no_coordinator():
    assert asyncio.run(AddressLookup("nobody.invalid", 1).find()) is None


@pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:x", "host:0", "host:70000"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match="--join"):
        parse_address(text, "--join")
