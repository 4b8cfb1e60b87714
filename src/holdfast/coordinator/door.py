"""Who may speak with the coordinator: those who prove that they know the job's token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from holdfast.protocol.endpoint import Endpoint
from holdfast.protocol.proof import ANSWER_HEADER, answer_to_header, bears

_PROOF: Any = getattr(web, "RequestKey", lambda name, kind: name)("proof", str)
"""Newer versions of aiohttp warn of keys that are mere texts."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def authorized(token: str, where: Endpoint) -> Any:
    """Turns away who does not know the token; who proves that he does without showing it gets the proof that we do."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        answer = answer_to_header(given, token, where.name, request.method, request.raw_path)
        if answer is None and not bears(given, token):
            return web.Response(status=401, text="send the job's token: Authorization: Bearer TOKEN\n")
        request[_PROOF] = answer
        return await handler(request)

    return check


async def give_proof(request: web.Request, response: web.StreamResponse) -> None:
    """Goes before everything that a caller hears who has proven himself: also before the first byte of a WebSocket."""
    if answer := request.get(_PROOF):
        response.headers[ANSWER_HEADER] = answer
