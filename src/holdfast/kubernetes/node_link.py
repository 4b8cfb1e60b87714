"""The operator's questions to the nodes: whether they hear their coordinator."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence

import aiohttp
import msgspec

from holdfast.errors import Damaged
from holdfast.kubernetes.coordinator_loss import VOTERS
from holdfast.kubernetes.names import AGENT_PORT
from holdfast.kubernetes.observed import PodSeen
from holdfast.protocol.network.endpoint import MAX_ANSWER_BYTES, PATH, Hearing, Whereabouts, agent_name
from holdfast.protocol.network.http_client import proving_to
from holdfast.protocol.network.sockets import host_and_port
from holdfast.protocol.wire.decoding import decode

ANSWER_S = 2.0
MORE_S = 0.5
"""So long others are waited for once most have answered, and a node on the machine of a coordinator, which may be lost with it. A new
coordinator must not wait at each look for nodes that are gone. If such a node lives, it is reached as fast as the others, and the word of
one beside the coordinator counts for little: it hears that one through one kernel."""
_hearings = msgspec.json.Decoder(Hearing)


async def ask_nodes(
    nodes: Sequence[PodSeen],
    token: str,
    coordinator: PodSeen | None = None,
    machines: Collection[str | None] = (),
    port: int = AGENT_PORT,
) -> dict[str, Hearing | None]:
    """What some of them say, by name, chosen anew each time; None: no answer in time, or none that is proven.

    coordinator: they are told where it is. The cluster's name service may know a new coordinator's address much later. machines: of it and
    of those before it.
    """
    asked = random.sample(nodes, min(VOTERS, len(nodes)))
    path = PATH
    if coordinator is not None and coordinator.stays and coordinator.address is not None:
        path = Whereabouts(coordinator.number, coordinator.address).path
    questions = {
        pod.name: asyncio.create_task(
            _ask(pod, token, path, port, MORE_S if pod.machine in machines else ANSWER_S)
        )
        for pod in asked
    }
    try:
        await _most(set(questions.values()))
        return {name: question.result() if question.done() else None for name, question in questions.items()}
    finally:
        for question in questions.values():
            question.cancel()
        await asyncio.gather(*questions.values(), return_exceptions=True)


async def _most(questions: set[asyncio.Task[Hearing | None]]) -> None:
    """Waits for all answers, and once most are there only for as long as it takes the next one."""
    left = questions
    while left:
        answered = sum(question.done() and question.result() is not None for question in questions)
        within_s = MORE_S if answered > len(questions) // 2 else None
        done, left = await asyncio.wait(left, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return


async def _ask(pod: PodSeen, token: str, path: str, port: int, limit_s: float) -> Hearing | None:
    host = pod.address or ""
    where = host_and_port(host, port)
    prove = proving_to(token, agent_name(pod.name), where, f"the agent of {pod.name}")
    limit = aiohttp.ClientTimeout(total=limit_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, middlewares=[prove]) as session,
            session.get(f"http://{where}{path}", allow_redirects=False) as answer,
        ):
            if answer.status != 200 or not 0 < (answer.content_length or 0) <= MAX_ANSWER_BYTES:
                return None
            return decode(_hearings.decode, await answer.read(), "its hearing")
    # An agent of an earlier version takes the connection and closes it.
    except (aiohttp.ClientError, OSError, TimeoutError, Damaged):
        return None
