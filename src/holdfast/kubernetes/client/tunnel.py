"""HTTP to a port of a pod, by the API server's proxy: for whoever is outside of the cluster.

The API server proves itself by its certificate, and checks that the caller may reach the pod (`pods/proxy`). It keeps
`Authorization` for itself, so what the pod is shown goes in a header of our own.
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
"""Between two questions over a WebSocket whether its other end lives; it has half of that to answer."""


class Tunnel:
    """To one port of the pods of a namespace. client: a `kubernetes_asyncio.client.ApiClient`."""

    def __init__(self, client: Any, namespace: str, port: int) -> None:
        self._client, self._namespace, self._port = client, namespace, port

    async def ask_openly(self, pod: str, path: str, limit_s: float) -> Answer:
        """A page that a pod shows to anybody.

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
        """As `protocol.network.http_client.request`, of the coordinator in this pod.

        Raises:
            Unproven: another one answered, perhaps the API server itself: the pod did not take the request.
            aiohttp.ClientError, TimeoutError: it may have been carried out, or not.
        """
        # For this one request: the proof covers method and path, so nobody on the way can use it for another.
        question = Question(token, where.name, method, path)
        url, headers = await self._address(pod, path)
        headers[OWN_HEADER] = question.authorization
        limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        async with self._session.request(
            method, url, headers=headers, data=body.encode() or None, timeout=limit
        ) as response:
            data = await response.read()
            # Before the answer is used: who stands between can answer by itself, with any status.
            if not question.proves(response.headers.get(ANSWER_HEADER, "")):
                raise Unproven(f"{pod} cannot be reached: {data[:200].decode(errors='replace').strip()}")
            return Answer(response.status, response.headers, data)

    @asynccontextmanager
    async def socket(
        self, pod: str, where: Endpoint, token: str, path: str, limit_s: float
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket of the coordinator in this pod. limit_s: for its opening.

        Raises:
            Unproven: another one answered.
            aiohttp.ClientError, TimeoutError: it cannot be opened.
        """
        question = Question(token, where.name, "GET", path)
        url, headers = await self._address(pod, path)
        headers[OWN_HEADER] = question.authorization
        async with self._session.ws_connect(
            url,
            headers=headers,
            # The API server holds a connection for as long as it is asked to, also one to a machine that is gone.
            heartbeat=HEARTBEAT_S,
            # A ledger is one message, of any size.
            timeout=aiohttp.ClientWSTimeout(ws_close=limit_s),
            max_msg_size=0,
        ) as socket:
            # aiohttp gives no public way to the headers of the handshake. Without this look anybody's
            # socket would be believed.
            if not question.proves(socket._response.headers.get(ANSWER_HEADER, "")):
                raise Unproven(
                    f"the process that answers for {pod} has not proved that it is the job's coordinator"
                )
            yield socket

    async def run(self, pod: str, container: str, command: list[str]) -> AsyncIterator[bytes]:
        """What a command in a container prints, as it comes (`pods/exec`).

        Raises:
            aiohttp.ClientError: it cannot be started.
        """
        asked = [("container", container), ("stdout", "true"), ("stderr", "true")]
        query = urlencode([*asked, *(("command", word) for word in command)])
        url = f"{self._host}/api/v1/namespaces/{self._namespace}/pods/{pod}/exec?{query}"
        headers = await self._credentials()
        headers["Sec-WebSocket-Protocol"] = "v4.channel.k8s.io"
        async with self._session.ws_connect(url, headers=headers) as socket:
            async for frame in socket:
                # The first byte is the channel: 1 is what was printed; 2 are errors of the command, 3 its end.
                if frame.type is aiohttp.WSMsgType.BINARY and frame.data[:1] in (b"\x01", b"\x02"):
                    yield frame.data[1:]

    @property
    def _session(self) -> aiohttp.ClientSession:
        # The client's own session knows the cluster's certificates and the person's. Ours would have
        # to read the kubeconfig again.
        session: aiohttp.ClientSession = self._client.rest_client.pool_manager
        return session

    @property
    def _host(self) -> str:
        return str(self._client.configuration.host).rstrip("/")

    async def _address(self, pod: str, path: str) -> tuple[Any, dict[str, str]]:
        # Encoded already, as the coordinator reads it: what is proven is the path to the last byte.
        at = f"{self._host}/api/v1/namespaces/{self._namespace}/pods/http:{pod}:{self._port}/proxy{path}"
        return URL(at, encoded=True), await self._credentials()

    async def _credentials(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        # Asked for each request: a token of a cloud ends after a while, and the client renews it.
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        return headers
