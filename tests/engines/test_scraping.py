"""How a Prometheus finds a home's jobs, and what its token opens."""

from __future__ import annotations

import asyncio
import fcntl
import json
import socket
import stat
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from holdfast.coordinator.service.authentication import Entrance, authorized
from holdfast.engines.scraping import publish, withdraw
from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.network.proof import read_scrape_token


def job(home: Path, name: str) -> Path:
    folder = home / "jobs" / name
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    return folder


def found(home: Path) -> dict[str, list[str]]:
    """Jobs to their addresses, as Prometheus reads them."""
    files = [json.loads(path.read_bytes()) for path in (home / "prometheus").glob("*.json")]
    return {entry["labels"]["holdfast_job"]: entry["targets"] for file in files for entry in file}


def test_a_job_is_found_while_it_runs(tmp_path: Path) -> None:
    first, second = job(tmp_path, "first"), job(tmp_path, "second")
    with (first / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        publish(first, "127.0.0.1", 9400)
        token = read_scrape_token(first)
        publish(second, "::1", 9401)
        assert found(tmp_path) == {"first": ["127.0.0.1:9400"], "second": ["[::1]:9401"]}
        assert (read_scrape_token(second), len(token) > 30) == (token, True)
        assert stat.S_IMODE((tmp_path / "metrics-token").stat().st_mode) == 0o600
        # The second one's launcher was killed, so nobody has its lock: the next start takes its file away.
        publish(first, "127.0.0.1", 9402)
        assert found(tmp_path) == {"first": ["127.0.0.1:9402"]}
        # What another launcher wrote meanwhile stays.
        withdraw(first, "127.0.0.1", 9400)
        assert found(tmp_path) == {"first": ["127.0.0.1:9402"]}
        withdraw(first, "127.0.0.1", 9402)
        assert found(tmp_path) == {}


def test_a_home_that_cannot_be_written_keeps_no_job_from_starting(tmp_path: Path) -> None:
    folder = job(tmp_path, "job")
    (tmp_path / "prometheus").write_text("a file, where the folder should be")
    publish(folder, "127.0.0.1", 9400)
    withdraw(folder, "127.0.0.1", 9400)


def test_a_folder_in_no_home_is_nobodys(tmp_path: Path) -> None:
    publish(tmp_path / "elsewhere", "127.0.0.1", 9400)
    assert read_scrape_token(tmp_path / "elsewhere") == ""
    assert not list(tmp_path.iterdir())


async def answers(scrape_token: str, bearer: str, method: str, path: str) -> int:
    listener = socket.create_server(("127.0.0.1", 0))
    where = Endpoint(host="127.0.0.1", port=listener.getsockname()[1], pid=1, instance="x")
    app = web.Application(middlewares=[authorized("job", where, scrape_token=scrape_token)])

    async def well(request: web.Request) -> web.Response:
        return web.Response()

    app.add_routes([web.route("*", "/{path:.*}", well)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    entrance = Entrance(listener, "job", where, runner.server, scrape_token=scrape_token)
    try:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {bearer}"}) as session,
            session.request(method, f"{where.url}{path}") as answer,
        ):
            return answer.status
    finally:
        entrance.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("token", "bearer", "method", "path", "status"),
    [
        ("scrape", "scrape", "GET", "/metrics", 200),
        ("scrape", "job", "GET", "/status", 200),
        ("scrape", "scrape", "GET", "/status", 401),
        ("scrape", "scrape", "POST", "/metrics", 401),
        ("scrape", "scrape", "POST", "/stop", 401),
        ("scrape", "scrape", "GET", "/metrics/../stop", 401),
        ("scrape", "other", "GET", "/metrics", 401),
        ("", "", "GET", "/metrics", 401),
    ],
)
def test_what_the_token_of_a_home_opens(token: str, bearer: str, method: str, path: str, status: int) -> None:
    assert asyncio.run(answers(token, bearer, method, path)) == status
