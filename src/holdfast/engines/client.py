"""Talks to a running job's coordinator: for the launcher and for commands in another terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from holdfast.errors import UsageError
from holdfast.protocol.endpoint import read_endpoint

RETRY_S = 0.05


class Announcement(msgspec.Struct, frozen=True):
    """One message of `/watch`. kind: event, status, provide-node, release-node, ended or log."""

    kind: str
    value: Any


class JobClient:
    """HTTP to the coordinator of one job, with the job's token. An async context manager."""

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> JobClient:
        try:
            token = (self._job_dir / "token").read_text().strip()
        except OSError:
            raise UsageError(f"there is no job {self._job_dir.name!r} in {self._job_dir.parent}") from None
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    def _url(self, path: str) -> str:
        where = read_endpoint(self._job_dir)
        if where is None:
            raise UsageError(f"the job {self._job_dir.name!r} is not running")
        return f"{where.url}{path}"

    async def get(self, path: str) -> Any:
        """A JSON page. Raises UsageError when nobody answers."""
        return await self._request("GET", path)

    async def post(self, path: str, body: str = "") -> Any:
        """A request. Raises UsageError with the coordinator's words when it refuses."""
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: str = "") -> Any:
        assert self._session is not None
        try:
            async with self._session.request(method, self._url(path), data=body or None) as response:
                data = await response.read()
                if response.status >= 400:
                    raise UsageError(data.decode(errors="replace").strip())
                return msgspec.json.decode(data)
        except aiohttp.ClientError as error:
            raise UsageError(f"the job {self._job_dir.name!r} does not answer: {error}") from error

    async def watch(self, follow: bool = True) -> AsyncIterator[Announcement]:
        """Announcements, across restarts of the coordinator, until the job has ended."""
        assert self._session is not None
        after = 0
        while True:
            try:
                async with self._session.ws_connect(self._url(f"/watch?after={after}")) as socket:
                    async for frame in socket:
                        if frame.type is not aiohttp.WSMsgType.TEXT:
                            continue
                        said = msgspec.json.decode(frame.data, type=Announcement)
                        if said.kind == "event":
                            after = max(after, int(said.value["seq"]))
                        yield said
                        if said.kind == "ended":
                            return
            except (aiohttp.ClientError, UsageError, ConnectionError):
                if not follow:
                    return
            await asyncio.sleep(RETRY_S)
