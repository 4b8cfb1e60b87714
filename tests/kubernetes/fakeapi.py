"""A small API server over HTTP: objects in a dictionary, watches that a test feeds, and answers that it spoils."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from holdfast.kubernetes.client.api import Api


class FakeApi:
    """`spoil` has answers that come before the right ones: (status, reason, headers); status 0: the connection is cut."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 10
        self.spoil: list[tuple[int, str, dict[str, str]]] = []
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.watches: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self.watched: asyncio.Queue[str] = asyncio.Queue()
        self.dates: list[str | None] = []
        """Of its next answers; None: the right one."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, request.path, dict(request.query), body))
        if self.spoil:
            status, reason, headers = self.spoil.pop(0)
            if status == 0:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return refused(status, reason, headers)
        if "watch" in request.query:
            return await self._watch(request)
        folder, _, name = request.path.rpartition("/")
        match request.method:
            case "GET" if request.path in self.objects:
                answer = web.json_response(self.objects[request.path])
                if self.dates and (date := self.dates.pop(0)) is not None:
                    answer.headers["Date"] = date
                return answer
            case "GET" if name.islower() and folder + "/" + name in self.folders():
                items = [one for path, one in self.objects.items() if path.startswith(request.path + "/")]
                return web.json_response({"items": items, "metadata": {"resourceVersion": str(self.version)}})
            case "POST":
                return self._put(f"{request.path}/{body['metadata']['name']}", body, new=True)
            case "PUT":
                return self._put(request.path, body, new=False)
        return refused(404, "NotFound", {})

    def folders(self) -> set[str]:
        return {path.rpartition("/")[0] for path in self.objects} | {"/api/v1/pods"}

    def _put(self, path: str, body: dict[str, Any], new: bool) -> web.Response:
        there = self.objects.get(path)
        if new and there is not None:
            return refused(409, "AlreadyExists", {})
        given = body["metadata"].get("resourceVersion")
        if there is not None and given not in (None, there["metadata"]["resourceVersion"]):
            return refused(409, "Conflict", {})
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.objects[path] = body
        return web.json_response(body)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watched.put_nowait(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        for event in await self.watches.get():
            await response.write(json.dumps(event).encode() + b"\n")
        return response


def refused(status: int, reason: str, headers: dict[str, str]) -> web.Response:
    body = {"kind": "Status", "code": status, "reason": reason, "message": f"{reason}: in its own words"}
    return web.json_response(body, status=status, headers=headers)


def event(type_: str, name: str, version: int) -> dict[str, Any]:
    return {"type": type_, "object": {"metadata": {"name": name, "resourceVersion": str(version)}}}


class Transport:
    """Calls as kubernetes_asyncio does."""

    def __init__(self, session: aiohttp.ClientSession, base: str) -> None:
        self._session, self._base = session, base

    async def call_api(self, resource_path: str, method: str, **options: Any) -> aiohttp.ClientResponse:
        body = options["body"]
        return await self._session.request(
            method,
            self._base + resource_path,
            params=options["query_params"],
            headers=options["header_params"],
            data=None if body is None else json.dumps(body),
            timeout=options["_request_timeout"],
        )


@asynccontextmanager
async def serving(fake: FakeApi) -> AsyncIterator[Api]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield Api(Transport(session, str(server.make_url("")).rstrip("/")))
