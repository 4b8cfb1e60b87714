"""The fake API server with the behaviour that an operator lives by: deletion, patches, and watches of what changes."""

import asyncio
import json
import re
from typing import Any

from aiohttp import web
from fakeapi import FakeApi, refused
from jsonpatch import Refused, patched

_COLLECTION = re.compile(r"^(/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/[^/]+)?/([a-z]+)$")


def _namespace(path: str) -> str:
    found = re.search("/namespaces/([^/]+)/", f"{path}/")
    return found[1] if found else ""


def ended(namespace: str) -> web.Response:
    """As a real API server refuses what is new in a namespace that is being deleted (1.37.2)."""
    why = f"unable to create new content in namespace {namespace} because it is being terminated"
    cause = {"reason": "NamespaceTerminating", "message": f"namespace {namespace} is being terminated"}
    body = {"kind": "Status", "status": "Failure", "code": 403, "reason": "Forbidden"}
    words = {"message": f"is forbidden: {why}", "details": {"causes": [cause]}}
    return web.json_response(body | words, status=403)


def merged(there: Any, patch: Any) -> Any:
    """A JSON merge patch: null removes."""
    if not isinstance(patch, dict):
        return patch
    made = dict(there) if isinstance(there, dict) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = merged(made.get(name), value)
    return made


class LiveApi(FakeApi):
    """`unanswered`: paths whose next creation is carried out and not answered. `made`: names of pods, as they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str, dict[str, Any]]] = []
        self.news = asyncio.Condition()
        self.unanswered: set[str] = set()
        self.made: list[str] = []
        self.quota: int | None = None
        self.ending: set[str] = set()
        """Namespaces that are being deleted."""
        self._uid = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, path, dict(request.query), body))
        if "watch" in request.query:
            return await self._watch_all(request, path)
        new = request.method == "POST" or "apply-patch" in request.headers.get("Content-Type", "")
        if new and path not in self.objects and (namespace := _namespace(path)) in self.ending:
            return ended(namespace)
        match request.method:
            case "GET" if path in self.objects:
                return web.json_response(self.objects[path])
            case "GET" if _COLLECTION.match(path):
                return web.json_response(
                    {
                        "items": [one for at, one in self.objects.items() if self.belongs(at, path)],
                        "metadata": {"resourceVersion": str(len(self.log))},
                    }
                )
            case "POST":
                return await self._create(f"{path}/{body['metadata']['name']}", body, request)
            case "PATCH":
                return await self._patch(path, body, await request.text())
            case "DELETE":
                return await self._delete(path, body)
        return refused(404, "NotFound", {})

    @staticmethod
    def belongs(path: str, collection: str) -> bool:
        found = _COLLECTION.match(collection)
        assert found is not None
        return re.fullmatch(f"{re.escape(found[1])}(/namespaces/[^/]+)?/{found[2]}/[^/]+", path) is not None

    async def put(self, path: str, made: dict[str, Any], kind: str = "MODIFIED") -> dict[str, Any]:
        self.version += 1
        made["metadata"]["resourceVersion"] = str(self.version)
        self.objects[path] = made
        await self._tell(kind, path, made)
        return made

    async def remove(self, path: str) -> None:
        await self._tell("DELETED", path, self.objects.pop(path))

    async def until(self, is_it: Any) -> None:
        async with self.news:
            await self.news.wait_for(is_it)

    def named(self, plural: str) -> set[str]:
        return {path.rpartition("/")[2] for path in self.objects if f"/{plural}/" in path}

    async def _tell(self, kind: str, path: str, made: dict[str, Any]) -> None:
        async with self.news:
            self.log.append((kind, path, json.loads(json.dumps(made))))
            self.news.notify_all()

    async def _create(self, path: str, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if path in self.objects:
            return refused(409, "AlreadyExists", {})
        if "/pods/" in path and self.quota is not None and len(self.named("pods")) >= self.quota:
            return refused(403, "Forbidden", {})
        self._uid += 1
        body["metadata"] |= {"uid": f"uid-{self._uid}"}
        if "/pods/" in path:
            self.made.append(path.rpartition("/")[2])
        made = await self.put(path, body, "ADDED")
        if path in self.unanswered:
            self.unanswered.discard(path)
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(made)

    async def _patch(self, path: str, body: Any, sent: str) -> web.Response:
        at = path.removesuffix("/status")
        if at not in self.objects:
            return refused(404, "NotFound", {})
        there = json.loads(json.dumps(self.objects[at]))
        if isinstance(body, list):  # a JSON patch
            try:
                made = patched(there, sent)
            except Refused:
                return refused(422, "Invalid", {})
            # Of a patch of /status the API server takes nothing else.
            return web.json_response(await self.put(at, there | {"status": made["status"]}))
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in (None, there["metadata"]["resourceVersion"]):
            return refused(409, "Conflict", {})
        if at != path and "/nodes/" in path:
            conditions = {one["type"]: one for one in there.get("status", {}).get("conditions", ())}
            for one in body["status"]["conditions"]:
                conditions[one["type"]] = conditions.get(one["type"], {}) | one
            there["status"] = {**there.get("status", {}), "conditions": list(conditions.values())}
        elif at != path:
            there["status"] = body["status"]
        else:
            there = merged(there, {key: value for key, value in body.items() if key != "status"})
        if "deletionTimestamp" in there["metadata"] and not there["metadata"].get("finalizers"):
            await self.remove(at)
            return web.json_response(there)
        return web.json_response(await self.put(at, there))

    async def _delete(self, path: str, body: dict[str, Any]) -> web.Response:
        there = self.objects.get(path)
        if there is None:
            return refused(404, "NotFound", {})
        if not body["preconditions"].items() <= there["metadata"].items():
            return refused(409, "Conflict", {})
        await self.remove(path)
        return web.json_response(there)

    async def _watch_all(self, request: web.Request, collection: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        position = int(request.query["resourceVersion"])
        while True:
            for number, (kind, path, made) in enumerate(self.log[position:], position + 1):
                if self.belongs(path, collection):
                    # The version of an event is its place in the log, so that a watch can be resumed.
                    told = {"type": kind, "object": made}
                    await response.write(json.dumps(told).encode() + b"\n")
                position = number
            async with self.news:
                if len(self.log) == position:
                    await self.news.wait()
