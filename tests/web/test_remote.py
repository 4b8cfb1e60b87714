"""The page of a job that is reached by the way of the commands alone, as on Kubernetes: a real coordinator behind it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from holdfast.engines.client import JobClient
from holdfast.protocol.network.http_client import Answer
from holdfast.ui import host
from holdfast.web.application import PageRefused

sys.path.insert(0, str(Path(__file__).parents[1] / "coordinator"))
from fakeagents import Plane, serving


class Tunnel:
    """A way without an address."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def __aenter__(self) -> Tunnel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return

    async def is_running(self) -> bool:
        return self._plane.state.membership.outcome is None

    async def send(self, method: str, path: str, body: str) -> Answer:
        address = f"{self._plane.url}{path}"
        async with self._plane.session.request(method, address, data=body or None) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def listen(self, after: int) -> AsyncGenerator[str]:
        async with self._plane.session.ws_connect(f"{self._plane.url}/watch/{after}") as socket:
            async for said in socket:
                if said.type is aiohttp.WSMsgType.TEXT:
                    yield said.data


def test_the_page_of_a_job_that_has_no_address_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(plane: Plane) -> None:
        await plane.pair()
        monkeypatch.setattr(host, "client_of", lambda folder: JobClient(folder, Tunnel(plane)))
        job = host.RemoteJob(tmp_path / "jobs/job")
        now = msgspec.json.decode((await job.panel("now", {})).body)
        assert (now["job"], now["world"]) == ("job", 2)
        with pytest.raises(PageRefused, match="no panel"):
            await job.panel("none", {})
        told = msgspec.json.decode((await job.act("stop", {}, True)).body)
        assert told["dry"] is True
        frames = []
        async for sent in job.stream(1, ""):
            frames.append(sent)
            # All that had happened has come: now it is stopped, from the page.
            if sum(b"event: delta" in f for f in frames) == 1 and b"event: delta" in sent:
                await job.act("stop", {}, False)
                for agent in plane.agents:
                    await agent.leave()
                async with plane.session.post(f"{plane.url}/stop") as answer:
                    assert answer.status == 200
        seqs = [int(f.split(b"id: ")[1].split(b"\n")[0]) for f in frames if b"event: event" in f]
        assert seqs == list(range(2, seqs[-1] + 1))
        assert frames[-1] == b"event: over\ndata: {}\n\n"

    async def main() -> None:
        async with serving(tmp_path) as plane:
            await look(plane)

    asyncio.run(main())
