"""The fake API server with the behaviour that an operator lives by: deletion, patches, and watches of what changes.

`test_real_compared.py` gives it and a real one the same requests. It fills no defaults in, and takes what a schema would refuse.
"""

import asyncio
import copy
import json
import re
from collections.abc import Iterator, Mapping
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


def of_another() -> web.Response:
    """A patch that names another object's uid."""
    cause = {"reason": "FieldValueInvalid", "message": "field is immutable", "field": "metadata.uid"}
    body = {"kind": "Status", "status": "Failure", "code": 422, "reason": "Invalid"}
    return web.json_response(body | {"message": "is invalid", "details": {"causes": [cause]}}, status=422)


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


def selected(made: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    """Whether a list or watch with this query has the object."""
    metadata = made["metadata"]
    labels = metadata.get("labels") or {}
    for one in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = one.partition("=")
        if labels.get(key) != value:
            return False
    fields = {"metadata.name": metadata["name"], "metadata.namespace": metadata.get("namespace")}
    return all(
        fields[key] == value
        for one in filter(None, query.get("fieldSelector", "").split(","))
        for key, _, value in [one.partition("=")]
    )


def leaves(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The fields of an object that somebody owns: of server-side apply."""
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from leaves(one, (*above, name))
    else:
        yield above, value


def _without(made: Any, path: tuple[str, ...]) -> None:
    *above, last = path
    for name in above:
        if not isinstance(made := made.get(name), dict):
            return
    made.pop(last, None)


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
        self._owners: dict[str, dict[tuple[str, ...], set[str]]] = {}
        """Who owns which field, by the object's path; empty: everybody who does not apply."""
        self._uid = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, path, dict(request.query), body))
        if "watch" in request.query:
            return await self._watch_all(request, path)
        applies = "apply-patch" in request.headers.get("Content-Type", "")
        new = request.method == "POST" or applies
        if new and path not in self.objects and (namespace := _namespace(path)) in self.ending:
            return ended(namespace)
        match request.method:
            case "GET" if path in self.objects:
                return web.json_response(self.objects[path])
            case "GET" if _COLLECTION.match(path):
                return web.json_response(
                    {
                        "items": [
                            one
                            for at, one in self.objects.items()
                            if self.belongs(at, path) and selected(one, request.query)
                        ],
                        "metadata": {"resourceVersion": str(len(self.log))},
                    }
                )
            case "POST":
                return await self._create(f"{path}/{body['metadata']['name']}", body, request)
            case "PATCH" if applies:
                return await self._apply(path, body, request)
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
        self._count(made)
        self.objects[path] = made
        await self._tell(kind, path, made)
        return made

    async def remove(self, path: str) -> None:
        self._owners.pop(path, None)
        gone = self.objects.pop(path)
        self._count(gone)
        await self._tell("DELETED", path, gone)

    def _count(self, made: dict[str, Any]) -> None:
        # The version of an object is its event's place in the log, so that a list's version and a watch fit it.
        self.version = len(self.log) + 1
        made["metadata"]["resourceVersion"] = str(self.version)

    async def until(self, is_it: Any) -> None:
        async with self.news:
            await self.news.wait_for(is_it)

    def named(self, plural: str) -> set[str]:
        return {path.rpartition("/")[2] for path in self.objects if f"/{plural}/" in path}

    async def _tell(self, kind: str, path: str, made: dict[str, Any]) -> None:
        async with self.news:
            self.log.append((kind, path, copy.deepcopy(made)))
            self.news.notify_all()

    async def _create(self, path: str, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if path in self.objects:
            return refused(409, "AlreadyExists", {})
        if "/pods/" in path and self.quota is not None and len(self.named("pods")) >= self.quota:
            return refused(403, "Forbidden", {})
        self._uid += 1
        body["metadata"] |= {"uid": f"uid-{self._uid}"}
        if namespace := _namespace(path):
            body["metadata"]["namespace"] = namespace
        if "/apis/holdfast.dev/" in path:
            body["metadata"]["generation"] = 1
            body.pop("status", None)
        if "/pods/" in path:
            self.made.append(path.rpartition("/")[2])
        made = await self.put(path, body, "ADDED")
        if path in self.unanswered:
            self.unanswered.discard(path)
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(made)

    async def _apply(self, path: str, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        manager = request.query["fieldManager"]
        wanted = {at: value for at, value in leaves(body) if at[0] not in ("kind", "apiVersion", "status")}
        if path not in self.objects:
            self._owners[path] = {at: {manager} for at in wanted}
            return await self._create(path, body, request)
        owners = self._owners.setdefault(path, {})
        before, owned = dict(leaves(self.objects[path])), copy.deepcopy(owners)
        made = merged(copy.deepcopy(self.objects[path]), body)
        for at in [at for at, them in owners.items() if manager in them and at not in wanted]:
            # It goes when nobody else has it.
            owners[at].discard(manager)
            if not owners[at]:
                del owners[at]
                _without(made, at)
        for at, value in wanted.items():
            # By force: who had it with another value has it no more.
            others = owners.get(at, {""} if at in before else set()) if before.get(at) == value else set()
            owners[at] = others | {manager}
        return await self._changed(path, made, owned != owners)

    async def _patch(self, path: str, body: Any, sent: str) -> web.Response:
        at = path.removesuffix("/status")
        if at not in self.objects:
            return refused(404, "NotFound", {})
        there = copy.deepcopy(self.objects[at])
        if isinstance(body, list):  # a JSON patch
            try:
                made = patched(there, sent)
            except Refused:
                return refused(422, "Invalid", {})
            # Of a patch of /status the API server takes nothing else.
            rest = {key: value for key, value in there.items() if key != "status"}
            return await self._changed(at, rest | ({"status": made["status"]} if "status" in made else {}))
        asked = body.get("metadata", {})
        if asked.get("resourceVersion") not in (None, there["metadata"]["resourceVersion"]):
            return refused(409, "Conflict", {})
        if asked.get("uid") not in (None, there["metadata"].get("uid")):
            return of_another()
        if at != path and "/nodes/" in path:
            conditions = {one["type"]: one for one in there.get("status", {}).get("conditions", ())}
            for one in body["status"]["conditions"]:
                conditions[one["type"]] = conditions.get(one["type"], {}) | one
            there["status"] = {**there.get("status", {}), "conditions": list(conditions.values())}
        elif at != path:
            there["status"] = body["status"]
        else:
            there = merged(there, {key: value for key, value in body.items() if key != "status"})
        return await self._changed(at, there)

    async def _changed(self, path: str, made: dict[str, Any], owners: bool | None = None) -> web.Response:
        """owners: whether those of its fields have changed, which a real server writes into the object; None: by no apply."""
        before = self.objects[path]
        metadata = made["metadata"]
        for key in ("labels", "annotations", "finalizers"):
            if not metadata.get(key):
                metadata.pop(key, None)
        if "/configmaps/" in path and not made.get("data"):
            made.pop("data", None)  # of its own kinds the server leaves out what is empty
        if "/apis/holdfast.dev/" in path and made.get("spec") != before.get("spec"):
            metadata["generation"] = metadata.get("generation", 1) + 1
        if "deletionTimestamp" in metadata:
            if set(metadata.get("finalizers", ())) - set(before["metadata"].get("finalizers", ())):
                return refused(422, "Invalid", {})
            if "finalizers" not in metadata:
                # The change itself is never stored: watches are told of the object as it was.
                await self.remove(path)
                return web.json_response(made)
        if made == before and not owners:
            return web.json_response(before)  # nothing is written, and no watch is told
        if owners is None:
            old, new = dict(leaves(before)), dict(leaves(made))
            for at in [at for at in old | new if old.get(at, ...) != new.get(at, ...)]:
                self._owners.get(path, {}).pop(at, None)
        return web.json_response(await self.put(path, made))

    async def _delete(self, path: str, body: dict[str, Any]) -> web.Response:
        there = self.objects.get(path)
        if there is None:
            return refused(404, "NotFound", {})
        if not body["preconditions"].items() <= there["metadata"].items():
            return refused(409, "Conflict", {})
        if "/pods/" not in path and there["metadata"].get("finalizers"):
            if "deletionTimestamp" in there["metadata"]:
                return web.json_response(there)
            made = copy.deepcopy(there)
            made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            if "generation" in made["metadata"]:
                made["metadata"]["generation"] += 1
            return web.json_response(await self.put(path, made))
        await self.remove(path)
        gone = {"kind": "Status", "status": "Success"}
        return web.json_response(there if "/pods/" in path else gone)

    async def _watch_all(self, request: web.Request, collection: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        position = int(request.query["resourceVersion"])
        has_selector = "labelSelector" in request.query or "fieldSelector" in request.query
        there: dict[str, dict[str, Any]] = {}
        for kind, path, made in self.log[:position]:
            there.pop(path, None)
            if kind != "DELETED" and self.belongs(path, collection) and selected(made, request.query):
                there[path] = made
        while True:
            for number, (kind, path, made) in enumerate(self.log[position:], position + 1):
                position = number
                if not self.belongs(path, collection):
                    continue
                if has_selector:
                    stays = kind != "DELETED" and selected(made, request.query)
                    if not stays and path not in there:
                        continue
                    # To who watches some objects, one that is not of them any more is gone, as it was when it was.
                    if not stays and kind != "DELETED":
                        version = {"resourceVersion": made["metadata"]["resourceVersion"]}
                        made = {**there[path], "metadata": {**there[path]["metadata"], **version}}
                    kind = "DELETED" if not stays else "MODIFIED" if path in there else "ADDED"
                    there.pop(path, None)
                    if stays:
                        there[path] = made
                await response.write(json.dumps({"type": kind, "object": made}).encode() + b"\n")
            async with self.news:
                if len(self.log) == position:
                    await self.news.wait()
