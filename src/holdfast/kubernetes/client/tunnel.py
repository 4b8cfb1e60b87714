"""HTTP to a port of a pod through the API server's proxy, for clients outside of the cluster.

The API server authenticates itself by its certificate, and checks that the caller may reach the pod (`pods/proxy`). It does not
pass on `Authorization`, so the proof for the pod is sent in a header of our own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import aiohttp
from yarl import URL

from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.network.http_client import Answer, Unproven
from holdfast.protocol.network.proof import ANSWER_HEADER, OWN_HEADER, Question

CONNECT_S = 5.0
HEARTBEAT_S = 5.0
"""Seconds between two pings over a WebSocket; the other end has half of that to answer."""


class Tunnel:
    """Connections to one port of the pods of a namespace. client: a `kubernetes_asyncio.client.ApiClient`."""

    def __init__(self, client: Any, namespace: str, port: int) -> None:
        self._client, self._namespace, self._port = client, namespace, port

    async def ask_openly(self, pod: str, path: str, limit_s: float) -> Answer:
        """Reads a page that a pod serves without authentication.

        Raises:
            aiohttp.ClientError, TimeoutError: the API server does not answer.
        """
        limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        url, headers = await self._address(pod, path)
        async with self._session.request("GET", url, headers=headers, timeout=limit) as response:
            return Answer(response.status, response.headers, await response.read())

    async def request(
        self, pod: str, where: Endpoint, token: str, method: str, path: str, body: str, limit_s: float
    ) -> Answer:
        """Like `protocol.network.http_client.request`, to the coordinator in this pod.

        Raises:
            Unproven: something else answered, perhaps the API server itself, and the pod did not accept the request.
            aiohttp.ClientError, TimeoutError: the request may have been carried out, or not.
        """
        # Valid for this request only: the proof covers method and path, so nobody in between can use it for another one.
        question = Question(token, where.name, method, path)
        url, headers = await self._address(pod, path)
        headers[OWN_HEADER] = question.authorization
        limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        async with self._session.request(
            method, url, headers=headers, data=body.encode() or None, timeout=limit
        ) as response:
            data = await response.read()
            # Checked before the answer is used, because anything in between can answer by itself, with any status.
            if not question.proves(response.headers.get(ANSWER_HEADER, "")):
                raise Unproven(f"{pod} cannot be reached: {data[:200].decode(errors='replace').strip()}")
            return Answer(response.status, response.headers, data)

    @asynccontextmanager
    async def socket(
        self, pod: str, where: Endpoint, token: str, path: str, limit_s: float
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket to the coordinator in this pod. limit_s: the time for closing it.

        Raises:
            Unproven: something else answered.
            aiohttp.ClientError, TimeoutError: it cannot be opened.
        """
        question = Question(token, where.name, "GET", path)
        url, headers = await self._address(pod, path)
        headers[OWN_HEADER] = question.authorization
        async with self._session.ws_connect(
            url,
            headers=headers,
            # Without pings the API server would keep a connection open even if its machine is gone.
            heartbeat=HEARTBEAT_S,
            # A ledger is sent as one message, of any size.
            timeout=aiohttp.ClientWSTimeout(ws_close=limit_s),
            max_msg_size=0,
        ) as socket:
            # aiohttp has no public API for the headers of the handshake. Without this check anybody's socket would be trusted.
            if not question.proves(socket._response.headers.get(ANSWER_HEADER, "")):
                raise Unproven(
                    f"the process that answers for {pod} has not proved that it is the job's coordinator"
                )
            yield socket

    async def run(self, pod: str, container: str, command: list[str]) -> AsyncIterator[bytes]:
        """Runs a command in a container (`pods/exec`); yields its output as it arrives.

        Raises:
            aiohttp.ClientError: it cannot be started.
        """
        asked = [("container", container), ("stdout", "true"), ("stderr", "true")]
        query = urlencode([*asked, *(("command", argument) for argument in command)])
        url = f"{self._host}/api/v1/namespaces/{self._namespace}/pods/{pod}/exec?{query}"
        headers = await self._credentials()
        headers["Sec-WebSocket-Protocol"] = "v4.channel.k8s.io"
        async with self._session.ws_connect(url, headers=headers) as socket:
            async for frame in socket:
                # The first byte is the channel: 1 is standard output, 2 standard error, and 3 the exit status.
                if frame.type is aiohttp.WSMsgType.BINARY and frame.data[:1] in (b"\x01", b"\x02"):
                    yield frame.data[1:]

    @property
    def _session(self) -> aiohttp.ClientSession:
        # The client's own session has the certificates of the cluster and of the user. A session of our own would have to read
        # the kubeconfig again.
        session: aiohttp.ClientSession = self._client.rest_client.pool_manager
        return session

    @property
    def _host(self) -> str:
        return str(self._client.configuration.host).rstrip("/")

    async def _address(self, pod: str, path: str) -> tuple[Any, dict[str, str]]:
        # Marked as encoded, so that the coordinator reads exactly this path: the proof covers every byte of it.
        at = f"{self._host}/api/v1/namespaces/{self._namespace}/pods/http:{pod}:{self._port}/proxy{path}"
        return URL(at, encoded=True), await self._credentials()

    async def _credentials(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        # Read for each request: tokens of clouds expire, and the client renews them.
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        return headers
