"""Sends what is queued for one connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import WSCloseCode, web

FAREWELL_S = 2.0
"""So long the last words to a connection may take before it is closed anyway."""


async def drain(
    queue: Any,
    socket: web.WebSocketResponse,
    code: Callable[[], WSCloseCode] = lambda: WSCloseCode.OK,
) -> None:
    """Sends what is queued, in order, until cancelled or the other side is gone; after None it closes with the code."""
    try:
        while (data := await queue.get()) is not None:
            await socket.send_bytes(data)
        await socket.close(code=code())
    except (ConnectionError, OSError):
        return
