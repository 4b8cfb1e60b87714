"""A client of the API server: connections, requests, and their errors.

`kubernetes_asyncio` finds the server and authenticates, by a pod's service account or as `kubectl` does. Objects are sent and
read as plain JSON, so that no field of a newer server is lost.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from holdfast.errors import Damaged, HoldfastError, UsageError
from holdfast.protocol.wire.decoding import decode

ANSWER_S = 10.0
"""Seconds that a request may take. After that it may have been carried out all the same."""
CONNECT_S = 5.0
SILENT_S = 70.0
"""Seconds without any event, bookmarks included, after which a watch is ended: the connection may be half open."""
CLOCK_S = 3.0
"""Seconds by which clocks may differ and still count as the same."""
PAGE = 500
"""Number of objects in one answer to a list."""
MANAGER = "holdfast-operator"
"""Field manager of what the operator applies."""

Object = dict[str, Any]


# ---------------------------------------------------------------- requests


class ApiError(HoldfastError):
    """The API server refused a request. `str` is its message."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        retry_after_s: float | None = None,
        causes: frozenset[str] = frozenset(),
    ) -> None:
        """causes: the reasons and fields in the details of the answer."""
        super().__init__(message or reason or f"HTTP {status}")
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s
        self._causes = causes

    @property
    def is_gone(self) -> bool:
        """Whether the version is too old, so that the objects must be listed again."""
        return self.status == 410 or self.reason in ("Expired", "Gone")

    @property
    def namespace_ends(self) -> bool:
        """Whether the namespace is being deleted. That cannot be undone, and no new objects are accepted there."""
        return "NamespaceTerminating" in self._causes

    @property
    def is_of_another(self) -> bool:
        """Whether the object has another uid than a patch with `metadata.uid`, which is refused with 422 (seen on 1.37.2)."""
        return self.status == 422 and "metadata.uid" in self._causes

    @property
    def is_unknown(self) -> bool:
        """Whether authentication failed. A pod's token may expire before its kubelet could renew it."""
        return self.status == 401

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later."""
        # Anything else would be refused again, for example because of a missing permission or an invalid object, and endless
        # retries would only load the server.
        return self.status in (408, 429) or self.status >= 500


class NoApiAnswer(HoldfastError):
    """There was no usable answer, so it is not known whether the request was carried out."""


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: Object


class _Cause(msgspec.Struct, frozen=True):
    reason: str = ""
    field: str = ""


class _Details(msgspec.Struct, frozen=True):
    causes: tuple[_Cause, ...] = ()


class _Refusal(msgspec.Struct, frozen=True):
    reason: str = ""
    message: str = ""
    details: _Details = _Details()


_objects = msgspec.json.Decoder(Object)
_refusals = msgspec.json.Decoder(_Refusal)
_events = msgspec.json.Decoder(_Event)


class Transport(Protocol):
    """The part of `kubernetes_asyncio.client.ApiClient` that is used here."""

    async def call_api(self, resource_path: str, method: str, **options: Any) -> aiohttp.ClientResponse: ...


class Api:
    """Requests to one API server."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._ahead_s = 0.0

    def now_s(self) -> float:
        """UTC by the API server's clock, as estimated from its last answer.

        Timestamps in objects are by that clock. If they were compared with this machine's clock, which may be minutes off, a job
        that is being deleted might have no time left to save.
        """
        return time.time() + self._ahead_s

    def _compare_clocks(self, response: aiohttp.ClientResponse) -> None:
        try:
            its_s = parsedate_to_datetime(response.headers["Date"]).timestamp()
        except (KeyError, ValueError):
            return  # a proxy in between may leave out the header
        ahead_s = its_s - time.time()
        # An answer's date has whole seconds, and the answer took time to arrive. Differences within that are ignored.
        self._ahead_s = ahead_s if abs(ahead_s) > CLOCK_S else 0.0

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Object:
        """Sends one request; returns the object in the answer.

        Raises:
            ApiError: it was refused.
            NoApiAnswer: it may have been carried out.
        """
        timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
        try:
            async with await self._send(method, path, query, body, content_type, timeout) as response:
                self._compare_clocks(response)
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # Never repeated here. The server may have carried it out, and only the caller knows whether a repetition does harm.
            raise NoApiAnswer(f"{method} {path}: {error or type(error).__name__}") from error
        if response.status >= 400:
            raise _refusal(response, data)
        return decode(_objects.decode, data or b"{}", f"{method} {path}: the answer", error=NoApiAnswer)

    async def get(self, path: str) -> Object:
        """Reads one object."""
        return await self.request("GET", path)

    async def create(self, path: str, made: Object, dry_run: bool = False) -> Object:
        """Creates an object. dry_run: the server checks everything but creates nothing."""
        return await self.request("POST", path, {"dryRun": "All"} if dry_run else None, made)

    async def apply(self, path: str, made: Object, manager: str = MANAGER, dry_run: bool = False) -> Object:
        """Server-side apply. The manager becomes the owner of the fields in the object, whoever owned them before."""
        query = {"fieldManager": manager, "force": "true"} | ({"dryRun": "All"} if dry_run else {})
        return await self.request("PATCH", path, query, made, "application/apply-patch+yaml")

    async def test_and_set(self, path: str, patch: list[Object]) -> Object:
        """A JSON patch (RFC 6902). If one of its tests fails it is refused with 422, and nothing is changed."""
        query = {"fieldManager": MANAGER}
        return await self.request("PATCH", path, query, patch, "application/json-patch+json")

    async def merge(self, path: str, patch: Object) -> Object:
        """A merge patch. With `metadata.resourceVersion` in it, it is refused if the object has changed."""
        return await self.request("PATCH", path, None, patch, "application/merge-patch+json")

    async def strategic(self, path: str, patch: Object) -> Object:
        """A strategic merge patch, which merges Kubernetes' own lists by key: only the conditions that it names change."""
        return await self.request("PATCH", path, None, patch, "application/strategic-merge-patch+json")

    async def delete(
        self, path: str, uid: str, grace_s: int | None = None, version: int | None = None
    ) -> Object:
        """Deletes the object with this uid, but not another one of the same name.

        Args:
            grace_s: grace period of a pod in seconds; None: its own.
            version: delete it only while it has this resource version; None: whatever it has.
        """
        # Without the uid, a delayed request would delete an object that has taken the name in the meantime, for example the
        # Secret of a job that was created again.
        only = {"uid": uid} | ({} if version is None else {"resourceVersion": str(version)})
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": only}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        return await self.request("DELETE", path, None, options)

    async def list_all(self, path: str, query: Mapping[str, str]) -> tuple[list[Object], str]:
        """All objects, and the version from which a watch can continue."""
        found: list[Object] = []
        more = {"limit": str(PAGE)}
        while True:
            page = await self.request("GET", path, {**query, **more})
            found += page["items"]
            # All pages have the version of the first one, so a watch that continues from there misses nothing.
            if not (token := page["metadata"].get("continue")):
                return found, page["metadata"]["resourceVersion"]
            more = {"limit": str(PAGE), "continue": token}

    async def watch(self, path: str, query: Mapping[str, str], version: str) -> AsyncGenerator[Object]:
        """Events from this version on, until the server ends the watch.

        Raises:
            ApiError: the watch was refused; `is_gone` if the version is too old.
            NoApiAnswer: the connection was interrupted.
        """
        asked = {
            **query,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            # Random, so that an operator's watches do not all end in the same second.
            "timeoutSeconds": str(random.randint(240, 300)),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
        try:
            async with await self._send("GET", path, asked, None, "application/json", timeout) as response:
                if response.status >= 400:
                    raise _refusal(response, await response.read())
                async for line in _lines(response.content):
                    event = decode(_events.decode, line, f"the watch of {path}", error=NoApiAnswer)
                    # The server reports an error during a watch by an event, since the HTTP status was sent when the watch
                    # began.
                    if event.type == "ERROR":
                        status = event.object
                        raise ApiError(
                            status.get("code", 500), status.get("reason", ""), status.get("message", "")
                        )
                    yield {"type": event.type, "object": event.object}
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NoApiAnswer(f"the watch of {path} was cut: {error or type(error).__name__}") from error

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Any,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        return await self._transport.call_api(
            path,
            method,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=timeout,
        )


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a stream, of any length: an object may be larger than aiohttp's limit for a line."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line


def _refusal(response: aiohttp.ClientResponse, data: bytes) -> ApiError:
    reason, message = response.reason or "", data.decode(errors="replace").strip()
    causes: frozenset[str] = frozenset()
    try:
        body = decode(_refusals.decode, data, "the refusal")
        reason, message = body.reason or reason, body.message or message
        causes = frozenset(cause for one in body.details.causes for cause in (one.reason, one.field))
    except Damaged:  # the answer of a proxy in between
        pass
    after = response.headers.get("Retry-After", "")
    retry_after_s = float(after) if after.isdecimal() else None
    return ApiError(response.status, reason, message[:2000], retry_after_s, causes)


class Backoff:
    """Exponential backoff with jitter."""

    def __init__(self, first_s: float = 0.1, most_s: float = 15.0) -> None:
        self._first_s, self._most_s, self._tries = first_s, most_s, 0

    def reset(self) -> None:
        """Starts again with the shortest delay, after a success."""
        self._tries = 0

    def next_s(self, error: Exception) -> float:
        """Seconds to wait after an error: what the server requests, else the next delay."""
        if isinstance(error, ApiError) and error.retry_after_s is not None:
            return error.retry_after_s
        self._tries += 1
        # Random between half and all of it: after an outage of the server all clients come back at once, and without jitter
        # would keep doing so.
        longest_s = min(self._most_s, self._first_s * 2**self._tries)
        return random.uniform(longest_s / 2, longest_s)

    async def wait(self, error: Exception) -> None:
        """Waits for `next_s`."""
        await asyncio.sleep(self.next_s(error))


# ------------------------------------------------------------ connecting to a server

EXTRA = "holdfast-train[kubernetes]"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which the kubelet provides a pod's service account."""


@asynccontextmanager
async def connect(context: str | None = None, account: Path = ACCOUNT) -> AsyncIterator[Api]:
    """Connects to an API server.

    Args:
        context: of the kubeconfig; None: its current one, or in a pod the pod's own service account.
        account: folder of that account, with `token` and `ca.crt`. Each request uses the token that is there then.

    Raises:
        UsageError: no cluster is configured, or `kubernetes_asyncio` is not installed.
    """
    async with open_client(context, account) as transport:
        yield Api(transport)


@asynccontextmanager
async def open_client(context: str | None = None, account: Path = ACCOUNT) -> AsyncIterator[Any]:
    """The `kubernetes_asyncio.client.ApiClient` of `connect`."""
    try:
        from kubernetes_asyncio import client, config
    except ModuleNotFoundError as error:
        # Names the missing module: it may be a dependency of this library.
        raise UsageError(f"{error.name} is not installed: pip install '{EXTRA}'") from None
    way = client.Configuration()
    try:
        # A kubeconfig has priority over the pod's own account: KUBECONFIG is set in a pod to reach another cluster.
        if context is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            # Without the library's own renewal, which reads the token once a minute. After an outage longer than the life of a
            # token, every request within that minute would be refused.
            config.load_incluster_config(
                way,
                try_refresh_token=False,
                token_filename=str(account / "token"),
                cert_filename=str(account / "ca.crt"),
            )
            way.refresh_api_key_hook = partial(_take_token, account / "token")
        else:
            await config.load_kube_config(_kubeconfig(), context, client_configuration=way)
    except (config.ConfigException, OSError) as error:
        raise UsageError(
            f"no cluster is configured: {error}; set KUBECONFIG to a kubeconfig, as for kubectl"
        ) from None
    async with client.ApiClient(way) as transport:
        yield transport


def _take_token(file: Path, way: Any) -> None:
    """Reads the service account's current token. Called before each request."""
    # The kubelet replaces the whole folder behind a symbolic link, so what is read is one complete token. If none can be read
    # the last one is used, and the server decides whether it is still valid.
    try:
        token = file.read_text().strip()
    except OSError:
        return
    if token:
        way.api_key["BearerToken"] = f"Bearer {token}"


def _kubeconfig() -> str | None:
    """The value of KUBECONFIG; None: kubectl's default location."""
    # Passed explicitly, because the library reads the variable when it is imported, and a process may set it later.
    return os.environ.get("KUBECONFIG") or None


def current_namespace(context: str | None) -> str:
    """The namespace that kubectl would use.

    Raises:
        UsageError: there is no such context.
    """
    try:
        from kubernetes_asyncio import config
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install '{EXTRA}'") from None
    try:
        contexts, active = config.list_kube_config_contexts(_kubeconfig())
    except (config.ConfigException, OSError) as error:
        raise UsageError(
            f"no cluster is configured: {error}; set KUBECONFIG to a kubeconfig, as for kubectl"
        ) from None
    found = active if context is None else next((one for one in contexts if one["name"] == context), None)
    if found is None:
        there = ", ".join(one["name"] for one in contexts) or "none"
        raise UsageError(f"--context {context!r}: the kubeconfig has {there}")
    return str(found["context"].get("namespace") or "default")
