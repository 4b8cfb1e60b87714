"""Authentication of connections to the coordinator: callers have to prove that they know the job's token.

A separate thread reads their first request (`protocol.network.listener`). Only an authenticated connection reaches the web
server, so strangers cost its loop nothing. The web server checks every request again, because a connection may bring several.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from holdfast.protocol.network.endpoint import NAME_PATH, CoordinatorName, Endpoint
from holdfast.protocol.network.listener import AuthenticatingListener, head_missing
from holdfast.protocol.network.proof import ANSWER_HEADER, OWN_HEADER, REFUSAL, admit
from holdfast.protocol.network.proof import PATH as SCRAPED
from holdfast.web import application
from holdfast.web.sessions import Sessions

_PROOF: Any = getattr(web, "RequestKey", lambda name, kind: name)("proof", str)
"""Newer versions of aiohttp warn of keys that are mere texts."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


_REFUSAL = f"{REFUSAL}\n"
_REFUSED = (
    f"HTTP/1.1 401 Unauthorized\r\nContent-Length: {len(_REFUSAL)}\r\nConnection: close\r\n\r\n{_REFUSAL}"
)
_ASKS_NAME = f"GET {NAME_PATH} HTTP/".encode()


def authorized(
    token: str, where: Endpoint, *, scrape_token: str = "", sessions: Sessions | None = None
) -> Any:
    """Middleware that refuses callers without the token. A caller that proves to know it without showing it gets our proof, too.

    scrape_token: opens `/metrics` alone, see `protocol.network.proof`; empty: there is none. sessions: of browsers, which may
    have the page and nothing else.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        # The listener answers it where it is the first request of a connection. A proxy (the API server of Kubernetes) sends questions of several
        # callers over one connection, and the first of them had proved itself.
        if request.method == "GET" and request.raw_path == NAME_PATH:
            return web.Response(body=_name_of(where), content_type="application/json")
        # Both ways of showing the token lead to the same rights. The proof covers method and path, so a
        # proof that was overheard opens no other request.
        asked = request.method, request.raw_path
        answer = _admit(request.headers.items(), token, scrape_token, where, *asked)
        # The same text for a wrong token as for none, so a stranger learns nothing from the difference.
        if answer is None and sessions is not None and not _shows_token(request.headers):
            return application.admit(sessions, request) or await handler(request)
        if answer is None:
            return web.Response(status=401, text=_REFUSAL)
        request[_PROOF] = answer
        return await handler(request)

    return check


def _name_of(where: Endpoint) -> bytes:
    """What anybody may know, see `endpoint.NAME_PATH`."""
    return msgspec.json.encode(CoordinatorName(instance=where.instance, term=where.term))


def _shows_token(headers: Mapping[str, str]) -> bool:
    """A wrong proof is wrong, whatever cookie is beside it."""
    return any(name.lower() in ("authorization", OWN_HEADER.lower()) for name in headers)


async def give_proof(request: web.Request, response: web.StreamResponse) -> None:
    """Adds our proof to the answer of an authenticated request, also before the first byte of a WebSocket."""
    if answer := request.get(_PROOF):
        response.headers[ANSWER_HEADER] = answer


def _admit(
    headers: Iterable[tuple[str, str]],
    token: str,
    scrape_token: str,
    where: Endpoint,
    method: str,
    path: str,
) -> str | None:
    """See `proof.admit`; under either of the coordinator's names."""
    given = list(headers)
    tokens = [token]
    # Whoever has this one may look at figures and do nothing else. An empty one would be known to everybody.
    if scrape_token and method == "GET" and path == SCRAPED:
        tokens.append(scrape_token)
    answers = (admit(given, known, name, method, path) for known in tokens for name in where.names)
    return next((answer for answer in answers if answer is not None), None)


def first_words(head: bytes) -> tuple[str, str, list[tuple[str, str]]]:
    """Method, path and headers of a request, given its head."""
    first, *lines = head.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    path, _, _ = rest.rpartition(" ")
    pairs = (line.partition(":") for line in lines)
    return method, path, [(name, value.strip()) for name, _, value in pairs]


def page_refusal(status: int) -> bytes:
    """The answer to a browser without a session, as bytes. status: of `Sessions.judge`."""
    text = application.refusal_text(status)
    head = f"HTTP/1.1 {status} Refused\r\nContent-Type: text/plain; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(text.encode())}\r\nConnection: close\r\n\r\n{text}".encode()


class Entrance:
    """Accepts the coordinator's connections until it is closed, and passes those that authenticate to its web server."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        where: Endpoint,
        server: Callable[[], asyncio.Protocol],
        *,
        scrape_token: str = "",
        sessions: Sessions | None = None,
    ) -> None:
        """scrape_token, sessions: as for `authorized`. server: makes the protocol of a connection in the loop that runs now."""
        self._token, self._where, self._server, self._sessions = token, where, server, sessions
        self._scrape_token = scrape_token
        said = _name_of(where)
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(said)}\r\nConnection: close\r\n\r\n"
        self._says_name = head.encode() + said
        self._loop = asyncio.get_running_loop()
        self._coming: set[asyncio.Task[None]] = set()
        self._listener = AuthenticatingListener(listener, "holdfast-listener", head_missing, self._accept)

    def close(self) -> None:
        """Accepts no more connections."""
        self._listener.close()

    async def settled(self) -> None:
        """After `close`: returns when every connection that was accepted is with the web server."""
        # The listener's thread has ended, and its last calls are in the loop's queue before this one.
        await asyncio.sleep(0)
        if self._coming:
            await asyncio.wait(set(self._coming))

    def _accept(self, sock: socket.socket, head: bytes) -> bool:
        """Runs in the listener's thread: strangers do not come as far as the loop."""
        if head.startswith(_ASKS_NAME):
            sock.send(self._says_name)
            return False
        if (refusal := self._refusal(head)) is not None:
            # Sent without waiting: a few bytes always fit into an empty socket buffer, and a stranger must
            # not hold up the listener.
            sock.send(refusal)
            return False
        # The loop gets a connection that has proved itself, and never sees the others. A thousand strangers
        # cost it nothing.
        self._loop.call_soon_threadsafe(self._take, sock, head)
        return True

    def _refusal(self, head: bytes) -> bytes | None:
        """The answer that refuses a request, given its head; None: it is authenticated. The server checks again, this request
        and those that follow."""
        method, path, headers = first_words(head)
        if _admit(headers, self._token, self._scrape_token, self._where, method, path) is not None:
            return None
        named = {name.lower(): value for name, value in headers}
        if self._sessions is None or _shows_token(named):
            return _REFUSED.encode()
        status, _ = self._sessions.judge(method, path, named)
        if status == 200:
            return None
        # A person at a browser reads what to do; whoever else asks reads how to show the token.
        return page_refusal(status) if "text/html" in named.get("accept", "") else _REFUSED.encode()

    def _take(self, sock: socket.socket, head: bytes) -> None:
        task = self._loop.create_task(self._hand_over(sock, head))
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    async def _hand_over(self, sock: socket.socket, head: bytes) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: HeadFirst(self._server(), head), sock)
        except OSError:  # the caller is gone meanwhile
            sock.close()


class HeadFirst(asyncio.Protocol):
    """Passes the head that the listener has read to the server's protocol, which then takes this one's place."""

    def __init__(self, protocol: asyncio.Protocol, head: bytes) -> None:
        self._protocol, self._head = protocol, head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # What the listener has read is given to the server first. The transport begins to read after this method
        # returns, so no byte can overtake it.
        transport.set_protocol(self._protocol)
        self._protocol.connection_made(transport)
        self._protocol.data_received(self._head)
