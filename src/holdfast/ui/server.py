"""Serves the page on this machine's loopback address until it is told to end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection
from typing import Any, Protocol

from aiohttp import web

from holdfast.coordinator.service.authentication import HeadFirst, first_words, page_refusal
from holdfast.protocol.network.listener import BACKLOG, AuthenticatingListener, head_missing
from holdfast.web.application import ACTIONS, PANELS, PageHost, guard, headers_of_page, routes
from holdfast.web.sessions import Sessions

CLOSE_S = 1.0


class ClosableHost(PageHost, Protocol):
    """A host that holds resources open."""

    def close(self) -> None:
        """Releases them; no more requests will follow."""


class UiServer:
    """The page of `holdfast ui` on a loopback address. Connections without permission are refused in the listener's
    thread and cost the event loop nothing: see `protocol.network.listener`."""

    def __init__(
        self,
        host: ClosableHost,
        sessions: Sessions,
        listener: socket.socket,
        panels: Collection[str] = PANELS,
        actions: Collection[str] = ACTIONS,
    ) -> None:
        """panels, actions: as for `web.application.routes`."""
        self._host, self._sessions, self._listener = host, sessions, listener
        self._panels, self._actions = panels, actions
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, started: Callable[[], None], ends: asyncio.Event) -> None:
        """Serves until `ends` is set. started: called when the page can be reached."""
        app = web.Application(middlewares=[guard(self._sessions)])
        app.on_response_prepare.append(headers_of_page)
        app.add_routes(routes(self._host, self._sessions, self._panels, self._actions))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await runner.setup()
        assert runner.server is not None
        self._server, self._loop = runner.server, asyncio.get_running_loop()
        # After the runner: the listener hands over at once, and needs a server to hand over to.
        accepting = AuthenticatingListener(self._listener, "holdfast-ui-listener", head_missing, self._accept)
        try:
            started()
            await ends.wait()
        finally:
            # First, no new connections. The pause lets the loop take those that the listener handed over just
            # before, so that they are cancelled, too.
            accepting.close()
            await asyncio.sleep(0)
            for task in self._tasks:
                task.cancel()
            await runner.cleanup()
            self._host.close()

    def _accept(self, sock: socket.socket, head: bytes) -> bool:
        """Runs in the listener's thread."""
        method, path, headers = first_words(head)
        status, _ = self._sessions.judge(method, path, {name.lower(): value for name, value in headers})
        if status != 200:
            # One attempt without waiting: a client that does not read must not delay the listener.
            sock.send(page_refusal(status))
            return False
        # Tasks and transports belong to the loop, and must not be made in this thread.
        self._loop.call_soon_threadsafe(self._take, sock, head)
        return True

    def _take(self, sock: socket.socket, head: bytes) -> None:
        task = self._loop.create_task(self._hand_over(sock, head))
        # The loop has only weak references to tasks: one without another reference may vanish before it ends.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hand_over(self, sock: socket.socket, head: bytes) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: HeadFirst(self._server(), head), sock)
        except OSError:  # the browser has closed the connection
            sock.close()


def loopback(port: int) -> socket.socket:
    """A listening socket that can only be reached from this machine. Raises OSError."""
    # By its number: the name `localhost` may lead to another address on some machines.
    return socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
