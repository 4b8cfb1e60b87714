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

ANSWER_S = 2.0
_hearings = msgspec.json.Decoder(Hearing)


async def ask_nodes(
    nodes: Sequence[PodSeen], token: str, where: Whereabouts | None = None, port: int = AGENT_PORT
) -> dict[str, Hearing | None]:
    """What some of them say, by name, chosen anew each time; None: no answer, or none that is proven.

    where: told them with the question. The cluster's name service may know a new coordinator's address much later.
    """
    asked = random.sample(nodes, min(VOTERS, len(nodes)))
    path = PATH if where is None else where.path
    answers = await asyncio.gather(*(_ask(pod, token, path, port) for pod in asked))
    return {pod.name: answer for pod, answer in zip(asked, answers, strict=True)}


async def _ask(pod: PodSeen, token: str, path: str, port: int) -> Hearing | None:
    host = pod.address or ""
    where = f"{f'[{host}]' if ':' in host else host}:{port}"
    prove = proving_to(token, agent_name(pod.name), where, f"the agent of {pod.name}")
    limit = aiohttp.ClientTimeout(total=ANSWER_S)
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
