"""A way to the API server on which things go wrong, and an operator that has no other. Everything else of a test goes there directly.

A rule of the test decides what becomes of each request. The server is the real one: what passes is done.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import aiohttp
import yaml
from aiohttp import web
from realkube import LEASE, no_operator
from yarl import URL

from holdfast.kubernetes.client.api import Api, ApiError, NoApiAnswer

PORT = 16543
_PASSED_ON = ("Authorization", "Content-Type", "Accept")
_GIVEN_BACK = ("Content-Type", "Date", "Retry-After")


class Asked(NamedTuple):
    """A request of the operator's."""

    method: str
    path: str
    watches: bool = False
    version: str = ""
    """From which on it watches."""

    @property
    def acts(self) -> bool:
        """It changes something of a job: the operator's Lease and Events are neither."""
        words = "/events" in self.path
        return (
            self.method != "GET" and not words and not self.path.endswith(("/holdfast-operator", "/leases"))
        )


@dataclass(frozen=True)
class Fate:
    """What becomes of a request. By default it passes."""

    refused: int | None = None
    """With this status, and not done."""
    retry_after_s: int | None = None
    lost: bool = False
    """Done, and the connection is cut before the answer."""
    cut_s: float | None = None
    """A watch is cut after so long."""
    version: str | None = None
    """A watch is asked for from this version on."""


PASSES = Fate()


class Seen(NamedTuple):
    """What became of one."""

    at_s: float
    asked: Asked
    status: int
    """The server's, or the refusal's; 0: nobody answered."""


@dataclass
class ApiProxy:
    """Serves from a thread of its own: a test that waits for a machine's boot holds up no operator."""

    server: str
    """The real one's address."""
    folder: Path
    """The cluster's."""
    rule: Callable[[Asked], Fate] = lambda asked: PASSES
    after: Callable[[Asked, int], None] = lambda asked, status: None
    """Called when a request was done, before its answer is passed on."""
    seen: list[Seen] = field(default_factory=list)
    gone: int = 0
    """Watches that the server ended because it does not know their version any more."""

    def __post_init__(self) -> None:
        self._ends = asyncio.Event()
        self._runs = threading.Event()
        self._streams = self._muted = 0
        self._limits: list[asyncio.Timeout] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def url(self) -> str:
        """Of this one."""
        return f"{self.server.rpartition(':')[0]}:{PORT}"

    def start(self) -> None:
        self._thread.start()
        assert self._runs.wait(10), "the proxy does not serve"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(30)

    def mute(self) -> None:
        """Of the watches that are open now no byte comes any more, and none is closed: as behind a firewall that forgot them."""
        self._muted = self._streams

    def cut(self) -> None:
        """The watches that are open now."""

        def now() -> None:
            for limit in self._limits:
                limit.reschedule(self._loop.time())
            self._limits.clear()

        self._loop.call_soon_threadsafe(now)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        pki = self.folder / "pki"
        trusted = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        shown.load_cert_chain(pki / "api.crt", pki / "api.key")
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(ssl=trusted, limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            app = web.Application(client_max_size=16 << 20)
            app.router.add_route("*", "/{path:.*}", self._pass)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            host = self.url.removeprefix("https://").rpartition(":")[0]
            await web.TCPSite(runner, host, PORT, ssl_context=shown, reuse_address=True).start()
            self._runs.set()
            await self._ends.wait()
            await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        watches = request.query.get("watch") == "true"
        version = request.query.get("resourceVersion", "") if watches else ""
        asked = Asked(request.method, request.path, watches, version)
        fate = self.rule(asked)
        if fate.refused is not None:
            return self._refuse(request, asked, fate)
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        body = await request.read()
        # It is encoded already, and goes on as the operator wrote it.
        where = URL(f"{self.server}{request.path_qs}", encoded=True)
        if fate.version is not None:
            where = where.update_query(resourceVersion=fate.version)
        try:
            async with self._session.request(
                asked.method, where, data=body or None, headers=headers
            ) as answer:
                if asked.watches and answer.status == 200:
                    return await self._stream(request, asked, answer, fate)
                data = await answer.read()
                kept = {name: answer.headers[name] for name in _GIVEN_BACK if name in answer.headers}
        except aiohttp.ClientError:
            return self._cut(request, asked)
        self.gone += asked.watches and answer.status == 410
        self.seen.append(Seen(time.monotonic(), asked, answer.status))
        self.after(asked, answer.status)
        if fate.lost:
            return self._cut(request)
        return web.Response(status=answer.status, headers=kept, body=data)

    def _refuse(self, request: web.Request, asked: Asked, fate: Fate) -> web.Response:
        assert fate.refused is not None
        self.seen.append(Seen(time.monotonic(), asked, fate.refused))
        headers = {} if fate.retry_after_s is None else {"Retry-After": str(fate.retry_after_s)}
        return web.Response(status=fate.refused, headers=headers, text="refused on the way")

    def _cut(self, request: web.Request, asked: Asked | None = None) -> web.Response:
        if asked is not None:
            self.seen.append(Seen(time.monotonic(), asked, 0))
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _stream(
        self, request: web.Request, asked: Asked, answer: aiohttp.ClientResponse, fate: Fate
    ) -> web.StreamResponse:
        self.seen.append(Seen(time.monotonic(), asked, answer.status))
        self._streams += 1
        number = self._streams
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        limit = asyncio.timeout(fate.cut_s)
        try:
            await response.prepare(request)
            async with limit:
                self._limits.append(limit)
                async for data in answer.content.iter_any():
                    if number > self._muted:
                        self.gone += b'"code":410' in data
                        await response.write(data)
        except TimeoutError:
            return self._cut(request)
        except (aiohttp.ClientError, ConnectionError):
            pass
        finally:
            if limit in self._limits:
                self._limits.remove(limit)
        return response


class ProxiedOperator:
    """An operator as a process beside the cluster. One that ends by itself or is killed is followed by another at once."""

    def __init__(
        self, api: Api, kubeconfig: Path, log: Path, options: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """environment: more of it."""
        self._api, self._kubeconfig, self._log = api, kubeconfig, log
        self._options, self._environment = options, environment
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def kill(self) -> None:
        """At once. Any thread may."""
        if self._process is not None:
            self._process.kill()

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                await self._start()
                assert self._process is not None
                await asyncio.to_thread(self._process.wait)
        finally:
            if self._process is not None:
                self._process.terminate()
                await asyncio.to_thread(self._process.wait)

    async def _start(self) -> None:
        # As if its time were over. Fifteen seconds for each of many kills prove nothing more.
        with suppress(ApiError, NoApiAnswer):
            lease = await self._api.get(LEASE)
            await self._api.delete(LEASE, lease["metadata"]["uid"])
        self._process = self._started()
        self.starts += 1

    def _started(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "holdfast.kubernetes", "--namespace", "holdfast-system"]
        argv += self._options
        env = os.environ | {"KUBECONFIG": str(self._kubeconfig)} | self._environment
        with self._log.open("ab") as out:
            return subprocess.Popen(argv, env=env, stdout=out, stderr=out)


@asynccontextmanager
async def behind_proxy(
    api: Api, home: Path, *options: str, environment: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[tuple[ApiProxy, ProxiedOperator]]:
    """The cluster's only operator meanwhile, which has these options and variables, has no other way to the API server."""
    proxy, kubeconfig = _led_by(home)
    operator = ProxiedOperator(api, kubeconfig, home / "operator.log", options, environment)
    async with no_operator(api):
        proxy.start()
        running = asyncio.create_task(operator.run())
        try:
            yield proxy, operator
        finally:
            proxy.rule = lambda asked: PASSES
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await asyncio.to_thread(proxy.close)


def _led_by(home: Path) -> tuple[ApiProxy, Path]:
    """A proxy, and the kubeconfig that leads to it."""
    config: Any = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    where = config["clusters"][0]["cluster"]
    proxy = ApiProxy(where["server"], Path(os.environ["HOLDFAST_KUBE_DIR"]))
    where["server"] = proxy.url
    kubeconfig = home / "by-the-proxy"
    kubeconfig.write_text(yaml.safe_dump(config))
    return proxy, kubeconfig
