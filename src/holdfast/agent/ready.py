"""Shows that a node has joined: from then on its port takes connections. Who knows the job's token may ask there whether the
node hears its coordinator, and tell it where there is another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from holdfast.protocol.network import endpoint
from holdfast.protocol.network.endpoint import Hearing, Whereabouts
from holdfast.protocol.network.range_server import RangeServer, Request


async def show_ready(
    node: str,
    host: str,
    port: int,
    token: str,
    joined: asyncio.Event,
    heard: Callable[[], Hearing],
    told: Callable[[Whereabouts], None],
) -> None:
    """Listens from the moment the node has joined, until it is cancelled. heard: called from any thread. told: called in this loop.

    A node that lost its coordinator stays ready. It trains on, and a disruption budget must not count it as broken.
    """
    await joined.wait()
    loop = asyncio.get_running_loop()
    server = _Server(
        node, host, port, token, heard, lambda where: loop.call_soon_threadsafe(lambda: told(where))
    )
    try:
        await asyncio.Event().wait()
    finally:
        server.close()


class _Server(RangeServer):
    def __init__(
        self,
        node: str,
        host: str,
        port: int,
        token: str,
        heard: Callable[[], Hearing],
        told: Callable[[Whereabouts], object],
    ) -> None:
        self._heard, self._told = heard, told
        super().__init__(host, token, endpoint.agent_name(node), "holdfast-ready", port)

    def answer(self, request: Request) -> None:
        told = endpoint.told_by(request.path)
        if told is not None:
            self._told(told)
        if told is not None or request.path == endpoint.PATH:
            request.send(msgspec.json.encode(self._heard()))
        else:
            request.send_error(404)
