"""The coordinator's last words."""

import asyncio
import socket
from pathlib import Path

import aiohttp
import msgspec
import pytest

from holdfast.coordinator.service import server
from holdfast.coordinator.service.decision_loop import DecisionLoop
from holdfast.coordinator.service.server import Coordinator
from holdfast.engines import jobs
from holdfast.engines.client import JobClient
from holdfast.protocol.job import JobSpec, Resume
from holdfast.protocol.network.endpoint import Endpoint


async def watched_to_the_end(job_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What somebody hears who only listens; the coordinator ends meanwhile."""
    listens: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(server, "write_endpoint", lambda _, endpoint: listens.set_result(endpoint))
    spec = JobSpec(name="job", script="train.py", min_nodes=1, max_nodes=1)
    coordinator = Coordinator(job_dir, spec, Resume())
    listening = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(coordinator.serve(listening, "127.0.0.1"))
    where = await listens
    kinds = []
    # As through a proxy that keeps Authorization for itself.
    async with aiohttp.ClientSession(headers={"X-Holdfast-Token": "secret"}) as session:
        both = {"Authorization": "Bearer of-the-proxy"}
        async with session.post(f"{where.url}/stop", headers=both) as answer:
            assert answer.status == 401
        async with session.ws_connect(f"{where.url}/watch") as watch:
            async with session.post(f"{where.url}/stop") as answer:
                assert answer.status == 200
            async for frame in watch:
                kinds.append(msgspec.json.decode(frame.data)["kind"])
        await serving
    return kinds


def test_whoever_watches_hears_the_end_and_holds_nobody_up(tmp_path, monkeypatch):
    """The time for farewells is for agents that are silent, not for those who listen."""
    monkeypatch.setattr(server, "FAREWELL_S", 10_000.0)
    job_dir = tmp_path / "jobs" / "job"
    job_dir.mkdir(parents=True)
    (job_dir / "token").write_text("secret")

    async def soon() -> list[str]:
        async with asyncio.timeout(60):
            return await watched_to_the_end(job_dir, monkeypatch)

    assert asyncio.run(soon())[-1] == "ended"


async def stopped_by_one_that_comes_late(job_dir: Path) -> int:
    """A request that a coordinator hears when it decides nothing any more; returns how often it was sent."""
    spec = JobSpec(name="job", script="train.py", min_nodes=1, max_nodes=1)
    coordinator = Coordinator(job_dir, spec, Resume())
    serving = asyncio.create_task(coordinator.serve(socket.create_server(("127.0.0.1", 0)), "127.0.0.1"))
    async with JobClient(job_dir) as client:
        await client.post("/stop")
    await serving
    return coordinator._loop.looked


def test_a_request_to_a_coordinator_that_hands_over_goes_to_the_next_one(tmp_path, monkeypatch):
    """The same one stands for the next."""

    def has_left(self: DecisionLoop) -> bool:
        self.looked = getattr(self, "looked", 0) + 1
        return self.looked < 3

    monkeypatch.setattr(DecisionLoop, "has_left", property(has_left, lambda self, value: None), raising=False)
    monkeypatch.setattr(jobs, "is_running", lambda job_dir: True)
    job_dir = tmp_path / "jobs" / "job"
    job_dir.mkdir(parents=True)
    (job_dir / "token").write_text("secret")

    async def soon() -> int:
        async with asyncio.timeout(60):
            return await stopped_by_one_that_comes_late(job_dir)

    assert asyncio.run(soon()) == 3
