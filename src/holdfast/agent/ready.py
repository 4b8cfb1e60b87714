"""Says that a node has joined to whoever may connect to a port, as Kubernetes' probes do."""

from __future__ import annotations

import asyncio


async def show_ready(host: str, port: int, joined: asyncio.Event) -> None:
    """Listens from the moment the node has joined, until it is cancelled. Nothing is read from a connection, nor written: that
    it comes to be is all there is to know.

    A node that lost its coordinator stays ready. It trains on, and a disruption budget must not count it as broken.
    """
    await joined.wait()
    async with await asyncio.start_server(_close, host, port, backlog=8) as server:
        await server.serve_forever()


async def _close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()
