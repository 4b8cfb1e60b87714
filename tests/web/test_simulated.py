"""The page over a simulated job: its time on a made-up clock, and what may be done to it over real connections."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.engines import jobs
from holdfast.errors import UsageError
from holdfast.tools.simulate.scenario import read
from holdfast.ui.server import UiServer, loopback
from holdfast.ui.simulated import (
    LATE_S,
    SIMULATED_ACTIONS,
    SIMULATED_PANELS,
    SPEEDS,
    SimulatedHost,
    VirtualClock,
)
from holdfast.web.sessions import Role, Sessions

NODES, SPARES = 64, 16
MARK = {"X-Holdfast": "1"}


class Clock:
    """Real seconds that a test sets. tick_s: each look at it takes so long."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s, self.tick_s = 100.0, tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    return tmp_path


@asynccontextmanager
async def simulated(**fields: str) -> AsyncIterator[tuple[SimulatedHost, Clock]]:
    asked = {"nodes": NODES, "days": 30, "rate": "0", "spares": SPARES, "min_nodes": 32} | fields
    clock = Clock()
    host = SimulatedHost(read(asked), 0, jobs.JobFolder("seen", here=False), clock)
    try:
        yield host, clock
    finally:
        await host.finish()


def with_host(what: Callable[[SimulatedHost, Clock], Awaitable[None]], **fields: str) -> None:
    async def run() -> None:
        async with simulated(**fields) as (host, clock):
            await what(host, clock)

    asyncio.run(run())


# ------------------------------------------------------------ time


def test_virtual_time_goes_as_fast_as_it_is_set() -> None:
    clock = VirtualClock(1000.0, 50.0, 10)
    assert clock.at(53.0) == 1030.0
    assert clock.until(1050.0, 53.0) == 2.0
    assert clock.until(1000.0, 53.0) == 0.0
    clock.set(clock.at(53.0), 53.0, 0)
    assert clock.at(99.0) == 1030.0
    assert clock.until(1031.0, 99.0) == math.inf
    clock.set(clock.at(99.0), 99.0, 100)
    assert clock.at(100.0) == 1130.0
    assert clock.until(math.inf, 100.0) == math.inf


def test_steps_come_with_the_virtual_time_and_nothing_is_looked_at_before_one_is_due() -> None:
    async def look(host: SimulatedHost, clock: Clock) -> None:
        begun = host.cluster.steps.committed
        assert host.turn() == pytest.approx(10.0)  # a step takes ten seconds
        clock.now_s += 10.0
        assert host.turn() == pytest.approx(10.0)
        assert host.cluster.steps.committed == begun + 1
        host.set_speed("100")
        # However much is due, others have their turn between two looks.
        assert host.turn() == pytest.approx(0.1)
        for _ in range(50):
            clock.now_s += 0.1
            host.turn()
        assert host.cluster.steps.committed == begun + 1 + 50

    with_host(look)


def test_while_it_is_paused_nothing_is_due_and_no_time_passes() -> None:
    async def look(host: SimulatedHost, clock: Clock) -> None:
        clock.now_s += 3.0
        host.set_speed("0")
        shown = host.now()
        clock.now_s += 3600.0
        assert host.turn() == math.inf
        assert host.now() == shown == pytest.approx(host.cluster.now + 3.0)
        # What is done to it then is done at this moment, and found out when the time goes on.
        told = host.strike("rack-1", "power-off", dry=False)
        assert told == ["rack-1 loses power: 16 nodes"]
        assert host.turn() == math.inf
        host.set_speed("1")
        clock.now_s += 2.5
        host.turn()
        assert "l" in host.cluster.map()["switches"][0][1]

    with_host(look)


def test_the_time_that_is_shown_is_never_beyond_what_has_happened() -> None:
    async def look(host: SimulatedHost, clock: Clock) -> None:
        clock.now_s += 500.0
        assert host.now() == pytest.approx(host.cluster.next_s())
        # Each look at this clock takes longer than a slice: one event a turn. The virtual time waits for them.
        host.strike("rack-1", "power-off", dry=False)
        clock.tick_s = 1.0
        for _ in range(20):
            before_s = clock.now_s
            host.turn()
            assert host.now() <= host.cluster.next_s()
            behind_s = host._time.at(clock.now_s) - host.cluster.now
            assert behind_s <= LATE_S + clock.now_s - before_s

    with_host(look)


def test_no_more_than_half_of_a_core() -> None:
    async def look(host: SimulatedHost, clock: Clock) -> None:
        host.set_speed("100")
        clock.now_s += 10.0
        clock.tick_s = 2.0
        before_s = clock.now_s
        pause_s = host.turn()
        assert pause_s >= (clock.now_s - before_s) / 2

    with_host(look)


@pytest.mark.parametrize("text", ["", "2", "1.5", "-1", "100 ", "nan", "1e2"])
def test_a_speed_that_is_none_of_those_is_refused(text: str) -> None:
    async def look(host: SimulatedHost, clock: Clock) -> None:
        with pytest.raises(UsageError, match="speed must be one of 0, 1, 10, 100"):
            host.set_speed(text)
        assert host.facts()["speed"] == 1

    with_host(look)


def test_a_job_that_is_over_needs_no_time() -> None:
    async def look(host: SimulatedHost, clock: Clock) -> None:
        source = await host.source("")
        told = await source.act("stop", {}, False)
        assert b"the job ends at its next commit" in told.body
        for _ in range(20):
            clock.now_s += 10.0
            host.turn()
        assert host.facts()["over"]
        assert host.turn() == math.inf
        assert b'"outcome":"stopped"' in (await source.panel("now", {})).body

    with_host(look)


def test_a_job_that_gave_up_has_another_ledger_when_it_starts_again(home: Path) -> None:
    async def look(host: SimulatedHost, clock: Clock) -> None:
        host.set_speed("100")
        first = await host.source("")
        seen = (await first.panel("now", {})).body
        for rack in range(4):
            host.strike(f"rack-{rack}", "power-off", dry=False)
        driving = asyncio.create_task(host.run())
        # 300 s until it gives up for want of nodes, 600 s until it starts again.
        async with asyncio.timeout(20):
            while not host.facts()["restarts"] or host.cluster.core is not host._core:
                clock.now_s += 0.0 if host.facts()["restarts"] else 0.1
                host._changed.set()
                await asyncio.sleep(0)
        driving.cancel()
        now = (await (await host.source("")).panel("now", {})).body
        ledgers = [part.split(b'"ledger":')[1].split(b",")[0] for part in (seen, now)]
        assert ledgers[0] != ledgers[1]

    with_host(look, replace="2h")
    assert (home / "jobs/seen/runs/1/job.sqlite").is_file()
    assert (home / "jobs/seen/job.sqlite").is_file()


# ------------------------------------------------------------ over the wire

Look = Callable[[aiohttp.ClientSession, str, SimulatedHost, Clock], Awaitable[None]]


def served(what: Look, role: Role | None = Role.ACT) -> None:
    """role: None: who asks has no session."""

    async def run() -> None:
        async with simulated() as (host, clock):
            listener = loopback(0)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            sessions = Sessions("a key", listener.getsockname()[1], lambda: 1000.0)
            ready, ends = asyncio.Event(), asyncio.Event()
            server = UiServer(host, sessions, listener, SIMULATED_PANELS, SIMULATED_ACTIONS)
            serving = asyncio.create_task(server.serve(ready.set, ends))
            try:
                await ready.wait()
                jar = aiohttp.CookieJar(unsafe=True)
                async with aiohttp.ClientSession(cookie_jar=jar, headers=MARK | {"Origin": url}) as client:
                    if role is not None:
                        await client.get(f"{url}/enter?code={sessions.new_code(role)}")
                    await what(client, url, host, clock)
            finally:
                ends.set()
                await serving

    asyncio.run(run())


async def ask(client: aiohttp.ClientSession, url: str) -> Any:
    async with client.get(url) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def test_a_strike_is_decided_by_the_core_and_told_by_every_panel() -> None:
    async def look(client: aiohttp.ClientSession, url: str, host: SimulatedHost, clock: Clock) -> None:
        assert (await ask(client, f"{url}/api/v1/session")) == {"act": True, "map": True}
        given = {"target": "rack-2", "kind": "power-off"}
        async with client.post(f"{url}/api/v1/act/strike", json=given) as response:
            found = await response.json()
        assert found["would"] == ["rack-2 loses power: 16 nodes"]
        for _ in range(60):
            clock.now_s += 1.0
            host.turn()
        now = await ask(client, f"{url}/api/v1/now")
        assert now["simulated"] == {
            "nodes": NODES, "spares": SPARES, "speed": 1, "speeds": list(SPEEDS), "reached": None, "restarts": 0, "over": False,
        }  # fmt: skip
        assert (now["world"], now["spares"], now["engine"]) == (NODES, 0, "simulated")
        (incident,) = (await ask(client, f"{url}/api/v1/incidents"))["incidents"]
        assert incident["cause"] == "16 of 16 nodes in switch-0/rack-2 were lost together (silent for 2 s)"
        assert incident["full_strength_s"] is not None
        assert (await ask(client, f"{url}/api/v1/map"))["switches"][0][2] == "l" * 16
        assert len((await ask(client, f"{url}/api/v1/map?rack=2"))["nodes"]) == 16
        columns = (await ask(client, f"{url}/api/v1/series"))["columns"]
        assert columns["loss"] == [None] * len(columns["step"])
        lines = (await ask(client, f"{url}/api/v1/lines"))["lines"]
        assert sum(kind == "node-lost" for _, _, kind, _ in lines) == 16

    served(look)


def test_what_may_be_changed_of_a_real_job_may_be_changed_of_this_one() -> None:
    async def look(client: aiohttp.ClientSession, url: str, host: SimulatedHost, clock: Clock) -> None:
        async with client.post(f"{url}/api/v1/act/resize", json={"nodes": "63"}) as response:
            assert (await response.json())["would"][
                0
            ] == "from 64 to 63 nodes, which are 63 workers, between two steps"
        async with client.post(f"{url}/api/v1/act/drain", json={"node": "n00009"}) as response:
            assert response.status == 200
        for _ in range(60):
            clock.now_s += 1.0
            host.turn()
        assert (await ask(client, f"{url}/api/v1/now"))["world"] == 63
        assert (await ask(client, f"{url}/api/v1/map?rack=0"))["nodes"][9]["state"] == "l"

    served(look)


@pytest.mark.parametrize(
    ("action", "body", "status", "says"),
    [
        ("strike", b'{"target": "rack-99", "kind": "power-off"}', 400, "rack-99 does not exist; the last one is rack-4"),
        ("strike", b'{"target": "<b>", "kind": "cut"}', 400, "must be a node, rank, rack or switch"),
        ("strike", b"{}", 400, "must be a node, rank, rack or switch"),
        ("strike", b'{"target": 7}', 400, "send a JSON object of texts"),
        ("strike", b"[", 400, "send a JSON object of texts"),
        ("strike", b'{"target": "' + b"x" * 5000 + b'"}', 413, "more than 4096 bytes"),
        ("speed", b'{"speed": "1000000"}', 400, "speed must be one of 0, 1, 10, 100"),
        ("explode", b"{}", 404, "no action 'explode'"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_a_sentence(
    action: str, body: bytes, status: int, says: str
) -> None:
    async def look(client: aiohttp.ClientSession, url: str, host: SimulatedHost, clock: Clock) -> None:
        before = host._seq
        async with client.post(f"{url}/api/v1/act/{action}", data=body) as response:
            assert response.status == status
            assert says in await response.text()
        assert host._seq == before

    served(look)


@pytest.mark.parametrize(
    ("role", "headers", "status"),
    [(None, {}, 401), (Role.VIEW, {}, 403), (Role.ACT, {"Origin": "http://evil.example"}, 403), (Role.ACT, {"X-Holdfast": "0"}, 403)],
)  # fmt: skip
def test_nobody_strikes_without_a_session_that_may(
    role: Role | None, headers: dict[str, str], status: int
) -> None:
    async def look(client: aiohttp.ClientSession, url: str, host: SimulatedHost, clock: Clock) -> None:
        given = {"target": "rack-2", "kind": "power-off"}
        async with client.post(f"{url}/api/v1/act/strike", json=given, headers=headers) as response:
            assert response.status == status
        clock.now_s += 9.0
        host.turn()
        assert set("".join(host.cluster.map()["switches"][0])) == {"t", "w"}

    served(look, role)


def test_a_rack_that_is_not_there_has_no_panel() -> None:
    async def look(client: aiohttp.ClientSession, url: str, host: SimulatedHost, clock: Clock) -> None:
        for rack, status in (("99", 404), ("x", 400), ("-1", 400)):
            async with client.get(f"{url}/api/v1/map?rack={rack}") as response:
                assert response.status == status

    served(look)


# ------------------------------------------------------------ the command


def test_the_commands_show_what_it_left() -> None:
    async def look(host: SimulatedHost, clock: Clock) -> None:
        host.strike("rack-1", "power-off", dry=False)
        for _ in range(60):
            clock.now_s += 1.0
            host.turn()

    with_host(look)
    for command, says in (
        ("status", "stopped"),
        ("why", "n00016: 16 of 16 nodes in switch-0/rack-1 were lost together (silent for 2 s)"),
        ("events", "switch-0/rack-1"),
        ("report", "stopped"),
    ):
        found = CliRunner().invoke(app, [command, "--job", "seen"])
        assert (found.exit_code, says in found.output) == (0, True), (command, found.output, found.exception)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--port", "1"], "--port needs --page"),
        (["--page", "--replay", "1"], "remove --trace, --replay"),
        (["--page", "--json"], "remove --trace, --replay"),
        (["--page", "--nodes", "100000"], "more than 8192"),
        (["--page", "--nodes", "x"], "nodes"),
        (["--page", "--job", "../x"], "must begin with a letter or digit"),
    ],
)
def test_the_command_refuses_what_does_not_go_together(options: list[str], says: str) -> None:
    found = CliRunner().invoke(app, ["plan", "simulate", *options])
    assert found.exit_code != 0
    assert says in str(found.exception) + found.output
