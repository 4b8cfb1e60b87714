"""The operator's questions to the nodes: whether they hear their coordinator."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import aiohttp
import msgspec

from holdfast.engines.kubernetes.coordinator_loss import VOTERS
from holdfast.engines.kubernetes.names import AGENT_PORT
from holdfast.engines.kubernetes.observed import PodSeen
from holdfast.protocol.hearing import MAX_ANSWER_BYTES, PATH, Hearing, Whereabouts, agent_name
from holdfast.protocol.http_client import proving_to
from holdfast.protocol.sockets import host_and_port

ANSWER_S = 2.0
BESIDE_S = 0.5
"""The same for a node on the coordinator's machine, which may be lost with it. If it lives, it is reached as fast as the others, and
its word counts for little: it hears the coordinator through one kernel."""
_hearings = msgspec.json.Decoder(Hearing)


async def ask_nodes(
    nodes: Sequence[PodSeen], token: str, coordinator: PodSeen | None = None, port: int = AGENT_PORT
) -> dict[str, Hearing | None]:
    """What some of them say, by name, chosen anew each time; None: no answer, or none that is proven.

    coordinator: they are told where it is. The cluster's name service may know a new coordinator's address much later.
    """
    asked = random.sample(nodes, min(VOTERS, len(nodes)))
    path, machine = PATH, None
    if coordinator is not None and coordinator.stays and coordinator.address is not None:
        path, machine = Whereabouts(coordinator.number, coordinator.address).path, coordinator.machine
    limits_s = (BESIDE_S if pod.machine == machine else ANSWER_S for pod in asked)
    questions = (_ask(pod, token, path, port, limit_s) for pod, limit_s in zip(asked, limits_s, strict=True))
    answers = await asyncio.gather(*questions)
    return {pod.name: answer for pod, answer in zip(asked, answers, strict=True)}


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
            return _hearings.decode(await answer.read())
    # An agent of an earlier version takes the connection and closes it.
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError):
        return None
