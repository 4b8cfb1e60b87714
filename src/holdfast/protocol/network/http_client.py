"""HTTP to a job's coordinator, which must prove its identity before anything that it says is believed.

Whatever listens at the coordinator's address gets a question that is useless to a stranger, see `protocol.network.proof`. A
server that does not answer it correctly counts as no coordinator: the request fails as one that nobody took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import ClientHandlerType, ClientMiddlewareType, ClientRequest, ClientResponse

from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.network.proof import ANSWER_HEADER, Question


class Unproven(aiohttp.ClientError):
    """Somebody answered who is not the coordinator that was called: a stranger, or a newer coordinator, whose address
    and name are in the job's folder by now. Nothing was done or told; try again."""


def proving(token: str, where: Endpoint) -> ClientMiddlewareType:
    """For a session all of whose requests go to this coordinator process, WebSockets included."""
    return proving_to(token, where.name, where.address, "the job's coordinator")


def proving_to(token: str, server: str, address: str, who: str) -> ClientMiddlewareType:
    """For a session all of whose requests go to one server of the job.

    Args:
        server: its name, see `protocol.network.proof`.
        address: for people, as `who` it is.
    """

    async def prove(request: ClientRequest, send: ClientHandlerType) -> ClientResponse:
        question = Question(token, server, request.method, request.url.raw_path_qs)
        request.headers["Authorization"] = question.authorization
        # The request goes out before the other side has proved itself. That is safe because it carries no
        # token, and its code is of use with no other server.
        response = await send(request)
        # Before anything of the answer is read. Whoever listens on the port of a dead coordinator could
        # otherwise tell a launcher that its job is over.
        if not question.proves(response.headers.get(ANSWER_HEADER, "")):
            response.close()
            raise Unproven(f"the process that listens at {address} has not proved that it is {who}")
        return response

    return prove


def proven_session(
    token: str, where: Endpoint, limit_s: float, connect_s: float | None = None
) -> aiohttp.ClientSession:
    """For this coordinator process alone. limit_s: for a whole request, and for the opening of a WebSocket. connect_s: for the
    connection alone; None: as long."""
    limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=connect_s)
    return aiohttp.ClientSession(timeout=limit, middlewares=[proving(token, where)])


@dataclass(frozen=True)
class Answer:
    """The answer of a coordinator that has proven its identity. Whether its status is a success is for the caller to judge."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def words(self) -> str:
        """The body, where it says why something is refused."""
        return self.body.decode(errors="replace").strip()


async def request(
    token: str,
    where: Endpoint,
    method: str,
    path: str,
    body: str | bytes = b"",
    *,
    limit_s: float,
    connect_s: float | None = None,
) -> Answer:
    """One request to a coordinator. connect_s: for the connection alone, which a machine without power does not refuse.

    Raises:
        aiohttp.ClientConnectorError: nobody listens there; nothing was sent.
        Unproven: a stranger answered, who could do nothing with what was sent.
        aiohttp.ClientError, OSError, TimeoutError: it may have been carried out, or not.
    """
    async with (
        proven_session(token, where, limit_s, connect_s) as session,
        session.request(method, f"{where.url}{path}", data=body or None) as response,
    ):
        return Answer(response.status, response.headers, await response.read())
