"""The API server: the way to it, requests, and how they can end.

`kubernetes_asyncio` finds the server, as a pod's service account or as `kubectl` does, and proves who we are. What is sent and read is
plain JSON, so no field of a newer server is lost on the way.
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
"""How long a request may take. It may have been carried out all the same."""
CONNECT_S = 5.0
SILENT_S = 70.0
"""A watch that brings nothing for so long, no bookmark either, is cut: half of a connection may be gone."""
CLOCK_S = 3.0
"""Clocks that differ by less count as one."""
PAGE = 500
"""Objects of one answer to a list."""
MANAGER = "holdfast-operator"
"""The owner of the fields that it applies."""

Object = dict[str, Any]


# ---------------------------------------------------------------- requests


class ApiError(HoldfastError):
    """The API server refused a request. `str` has its words."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        retry_after_s: float | None = None,
        causes: frozenset[str] = frozenset(),
    ) -> None:
        """causes: reasons, as `reason`, and fields of its details."""
        super().__init__(message or reason or f"HTTP {status}")
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s
        self._causes = causes

    @property
    def is_gone(self) -> bool:
        """A list or watch has to begin anew."""
        return self.status == 410 or self.reason in ("Expired", "Gone")

    @property
    def namespace_ends(self) -> bool:
        """The namespace is being deleted. That cannot be taken back, and nothing new is made there."""
        return "NamespaceTerminating" in self._causes

    @property
    def is_of_another(self) -> bool:
        """The request is for an object of another uid. A patch with `metadata.uid` is refused for that with 422 (1.37.2)."""
        return self.status == 422 and "metadata.uid" in self._causes

    @property
    def is_unknown(self) -> bool:
        """The server does not know who asks. A pod's token may be over before its kubelet could renew it."""
        return self.status == 401

    @property
    def may_pass(self) -> bool:
        """The same request may be taken later."""
        # Everything else would be refused again: a right that is missing, or an object that is wrong. Asked
        # again for ever it would only load the server.
        return self.status in (408, 429) or self.status >= 500


class NoApiAnswer(HoldfastError):
    """Nobody knows whether the request was carried out."""


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
    """What `kubernetes_asyncio.client.ApiClient` does for us."""

    async def call_api(self, resource_path: str, method: str, **options: Any) -> aiohttp.ClientResponse: ...


class Api:
    """One API server."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._ahead_s = 0.0

    def now_s(self) -> float:
        """UTC by the API server's clock, as it was in its last answer.

        Moments in objects are by that clock. Compared with ours, which may be minutes off, a job that is being deleted
        would have no time left to save.
        """
        return time.time() + self._ahead_s

    def _compare_clocks(self, response: aiohttp.ClientResponse) -> None:
        try:
            its_s = parsedate_to_datetime(response.headers["Date"]).timestamp()
        except (KeyError, ValueError):
            return  # a proxy on the way leaves out what it likes
        ahead_s = its_s - time.time()
        # An answer's date has whole seconds, and was on its way. Within that, clocks that agree are not moved.
        self._ahead_s = ahead_s if abs(ahead_s) > CLOCK_S else 0.0

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Object:
        """Returns the answer's object.

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
            # Never repeated here. The server may have done it, and only the caller knows whether twice does harm.
            raise NoApiAnswer(f"{method} {path}: {error or type(error).__name__}") from error
        if response.status >= 400:
            raise _refusal(response, data)
        return decode(_objects.decode, data or b"{}", f"{method} {path}: the answer", error=NoApiAnswer)

    async def get(self, path: str) -> Object:
        """One object."""
        return await self.request("GET", path)

    async def create(self, path: str, made: Object, dry_run: bool = False) -> Object:
        """dry_run: the server checks everything, and makes nothing."""
        return await self.request("POST", path, {"dryRun": "All"} if dry_run else None, made)

    async def apply(self, path: str, made: Object, manager: str = MANAGER, dry_run: bool = False) -> Object:
        """Server-side apply: of the fields that it names the manager is the owner, whoever wrote them before."""
        query = {"fieldManager": manager, "force": "true"} | ({"dryRun": "All"} if dry_run else {})
        return await self.request("PATCH", path, query, made, "application/apply-patch+yaml")

    async def test_and_set(self, path: str, patch: list[Object]) -> Object:
        """A JSON patch (RFC 6902). Where one of its tests fails it is refused with 422, and nothing is changed."""
        query = {"fieldManager": MANAGER}
        return await self.request("PATCH", path, query, patch, "application/json-patch+json")

    async def merge(self, path: str, patch: Object) -> Object:
        """A merge patch. With `metadata.resourceVersion` in it, it is refused where the object has changed."""
        return await self.request("PATCH", path, None, patch, "application/merge-patch+json")

    async def strategic(self, path: str, patch: Object) -> Object:
        """A merge patch that knows the keys of Kubernetes' own lists: of conditions, only the named one changes."""
        return await self.request("PATCH", path, None, patch, "application/strategic-merge-patch+json")

    async def delete(
        self, path: str, uid: str, grace_s: int | None = None, version: int | None = None
    ) -> Object:
        """The object of this uid, and no other of its name. version: only while it has this one."""
        # Without the uid, a request that was held up would delete the object that has taken the name since: the Secret of
        # a job that was made anew, for instance.
        only = {"uid": uid} | ({} if version is None else {"resourceVersion": str(version)})
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": only}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        return await self.request("DELETE", path, None, options)

    async def list_all(self, path: str, query: Mapping[str, str]) -> tuple[list[Object], str]:
        """All objects, and the version from which a watch goes on."""
        found: list[Object] = []
        more = {"limit": str(PAGE)}
        while True:
            page = await self.request("GET", path, {**query, **more})
            found += page["items"]
            # All pages are of the version of the first, so a watch that goes on from there misses nothing in between.
            if not (token := page["metadata"].get("continue")):
                return found, page["metadata"]["resourceVersion"]
            more = {"limit": str(PAGE), "continue": token}

    async def watch(self, path: str, query: Mapping[str, str], version: str) -> AsyncGenerator[Object]:
        """Events from this version on, until the server ends the watch.

        Raises:
            ApiError: `is_gone`: the version is too old.
            NoApiAnswer: it was cut.
        """
        asked = {
            **query,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            # Not all watches of an operator end in the same second.
            "timeoutSeconds": str(random.randint(240, 300)),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
        try:
            async with await self._send("GET", path, asked, None, "application/json", timeout) as response:
                if response.status >= 400:
                    raise _refusal(response, await response.read())
                async for line in _lines(response.content):
                    event = decode(_events.decode, line, f"the watch of {path}", error=NoApiAnswer)
                    # The server ends a watch by an event and not by a status: its HTTP status was sent when
                    # the watch began.
                    if event.type == "ERROR":
                        told = event.object
                        raise ApiError(told.get("code", 500), told.get("reason", ""), told.get("message", ""))
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
    """Lines of any length: an object may be larger than aiohttp's own limit of a line."""
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
        told = decode(_refusals.decode, data, "the refusal")
        reason, message = told.reason or reason, told.message or message
        causes = frozenset(word for one in told.details.causes for word in (one.reason, one.field))
    except Damaged:  # a proxy on the way answers as it likes
        pass
    after = response.headers.get("Retry-After", "")
    retry_after_s = float(after) if after.isdecimal() else None
    return ApiError(response.status, reason, message[:2000], retry_after_s, causes)


class Backoff:
    """How long to wait before the next try: longer each time, and not at the same moment as others."""

    def __init__(self, first_s: float = 0.1, most_s: float = 15.0) -> None:
        self._first_s, self._most_s, self._tries = first_s, most_s, 0

    def reset(self) -> None:
        """It went well."""
        self._tries = 0

    def next_s(self, error: Exception) -> float:
        """What the server asks for, if it asks."""
        if isinstance(error, ApiError) and error.retry_after_s is not None:
            return error.retry_after_s
        self._tries += 1
        # Random between the half and the whole: after an outage of the server all its clients come at once,
        # and would come at once again.
        longest_s = min(self._most_s, self._first_s * 2**self._tries)
        return random.uniform(longest_s / 2, longest_s)

    async def wait(self, error: Exception) -> None:
        """Waits for that long."""
        await asyncio.sleep(self.next_s(error))


# ------------------------------------------------------------ the way to a server

EXTRA = "holdfast-train[kubernetes]"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet shows a pod its own account."""


@asynccontextmanager
async def connect(context: str | None = None, account: Path = ACCOUNT) -> AsyncIterator[Api]:
    """An API server. context: of the kubeconfig; None: its current one, or within a pod the pod's own account.

    account: the folder of that account, with `token` and `ca.crt`. A token that is renewed there is the one that the next
    request shows.

    Raises:
        UsageError: there is no way to one.
    """
    async with open_client(context, account) as transport:
        yield Api(transport)


@asynccontextmanager
async def open_client(context: str | None = None, account: Path = ACCOUNT) -> AsyncIterator[Any]:
    """The `kubernetes_asyncio.client.ApiClient` of `connect`."""
    try:
        from kubernetes_asyncio import client, config
    except ModuleNotFoundError as error:
        # By the name of what is missing: it may be something that this library needs.
        raise UsageError(f"{error.name} is not installed: pip install '{EXTRA}'") from None
    way = client.Configuration()
    try:
        # A kubeconfig that is named wins over the pod's own account: who sets KUBECONFIG within a pod means
        # another cluster.
        if context is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            # Without the library's own renewal, which looks once a minute. After an outage that was longer than a token
            # lives, every request of that minute would be refused.
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
    """The account's token, as it is in its file now: called before each request."""
    # The kubelet replaces the folder behind a link, so what is read is one token and whole. Where none can be read the last
    # one is shown: whether it still counts is the server's to say.
    try:
        token = file.read_text().strip()
    except OSError:
        return
    if token:
        way.api_key["BearerToken"] = f"Bearer {token}"


def _kubeconfig() -> str | None:
    """None: where kubectl looks without it."""
    # Named each time: the library reads the variable when it is imported, and a process may set it later.
    return os.environ.get("KUBECONFIG") or None


def current_namespace(context: str | None) -> str:
    """The namespace that kubectl would take.

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
