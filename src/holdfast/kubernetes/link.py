"""The operator's connection to one coordinator: what it says, and when there is something new. It proves itself before anything
of it is believed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec

from holdfast.agent.coordinator_link import give_up_when_gone
from holdfast.errors import HoldfastError
from holdfast.kubernetes.observed import NodeSaid, Said
from holdfast.protocol.engine_orders import Availability, EngineOrders
from holdfast.protocol.health import CLUSTER_NAME
from holdfast.protocol.network.endpoint import Endpoint
from holdfast.protocol.network.http_client import proven_session, request
from holdfast.protocol.network.lookup import Lookup
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.wire.decoding import decode

ANSWER_S = 5.0
AGAIN_S = 1.0
"""Between two tries to reach it."""


class Silent(HoldfastError):
    """The coordinator does not answer."""


class RefusedByCoordinator(HoldfastError):
    """It answers, and does not do what was asked. `str` has its words."""


def said_of(status: Mapping[str, Any], orders: EngineOrders, term: int) -> Said:
    """Its pages `/status` and `/orders` as values. Pure."""
    training = {one["node"] for one in status["workers"] if one["rank"] is not None}
    incidents = status["incidents"]
    newest = incidents[-1] if incidents else None
    snapshot = status["saving"]["snapshot"]
    tiers = [tier for tier in status["saving"]["tiers"] if tier["step"] is not None]
    newest_tier = max(tiers, key=lambda tier: tier["step"], default=None)
    machines = status["health"]["quarantine"]
    return Said(
        term=term,
        phase=status["phase"],
        wanted=orders.nodes,
        orders=orders.orders,
        nodes={
            one["node"]: NodeSaid(alive=one["alive"], trains=one["node"] in training)
            for one in status["nodes"]
        },
        outcome=status["outcome"],
        reason=status["reason"],
        step=status["step"] or None,
        loss=status["loss"],
        goodput=status["goodput"].get("share"),
        level=status["level"],
        # Incidents are numbered from 1 on, and the page has the newest only.
        incidents=newest["id"] if newest is not None else 0,
        open_incidents=sum(one["full_strength_s"] is None for one in incidents),
        last_incident=None if newest is None else f"incident {newest['id']} on {newest['node']}",
        snapshot=None if snapshot is None else f"step {snapshot['step']} on {snapshot['nodes']} nodes each",
        checkpoint=None if newest_tier is None else f"{newest_tier['url']}/step-{newest_tier['step']}",
        asks=tuple(one["text"] for one in status["health"]["asks"]),
        bad_machines=frozenset(
            machine.removeprefix(CLUSTER_NAME) for machine in machines if machine.startswith(CLUSTER_NAME)
        ),
    )


class CoordinatorLink:
    """To the coordinator at one pod's address. `changed` is called when it is reached, when it has a new order, and when it is lost."""

    def __init__(
        self,
        *,
        host: str,
        term: int,
        token: str,
        lookup: Lookup,
        changed: Callable[[], None],
        detection_s: float,
    ) -> None:
        """detection_s: a machine that is silent for so long counts as one that does not answer."""
        self.host, self.term = host, term
        self._token, self._changed = token, changed
        self._lookup, self._detection_s = lookup, detection_s
        self._where: Endpoint | None = None
        self.lost = False
        """The connection that is kept to it has ended, or could not be made. Another one is tried all the time."""

    async def listen(self) -> None:
        """Until it is cancelled."""
        while True:
            with suppress(Silent, aiohttp.ClientError, OSError, TimeoutError):
                where = await self._find()
                async with (
                    proven_session(self._token, where, ANSWER_S, self._detection_s) as session,
                    session.ws_connect(f"{where.url}/presence?orders") as socket,
                ):
                    give_up_when_gone(socket, self._detection_s)
                    self.lost = False
                    self._changed()
                    # A word comes with each order. And the connection itself is a message: it ends with the
                    # coordinator's process. So the operator looks at that moment and not at the next poll.
                    async for _ in socket:
                        self._changed()
            self._where, self.lost = None, True
            self._changed()
            await asyncio.sleep(AGAIN_S)

    async def ask(self) -> Said:
        """Raises Silent."""
        status, orders = await self._request("GET", "/status"), await self._request("GET", "/orders")
        return decode(
            self._said, (status, orders), "what the coordinator answers cannot be read", error=Silent
        )

    def _said(self, answers: tuple[bytes, bytes]) -> Said:
        status, orders = answers
        return said_of(msgspec.json.decode(status), msgspec.json.decode(orders, type=EngineOrders), self.term)

    async def tell(self, news: Availability) -> None:
        """Raises Silent."""
        await self._request("POST", "/engine", msgspec.json.encode(news))

    async def stop(self, reason: str, cause: NoticeCause) -> None:
        """Raises Silent."""
        await self._request("POST", "/stop?" + urlencode({"reason": reason, "cause": cause.value}))

    async def resize(self, nodes: int) -> None:
        """Raises Silent; RefusedByCoordinator with its words."""
        await self._request("POST", "/resize?" + urlencode({"nodes": nodes, "reason": "the object changed"}))

    async def _find(self) -> Endpoint:
        # Another term's at this address: the pod is gone, and its address is another one's.
        if self._where is None:
            self._where = await self._lookup.find()
        if self._where is None or self._where.term != self.term:
            self._where = None
            raise Silent(f"no coordinator of term {self.term} at {self.host}")
        return self._where

    async def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        where = await self._find()
        try:
            answer = await request(
                self._token, where, method, path, body, limit_s=ANSWER_S, connect_s=self._detection_s
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._where = None
            raise Silent(f"{method} {path}: {error or type(error).__name__}") from error
        # It hands over or begins: asked again it may answer. Any other refusal is final, and the object's
        # status has its words.
        if answer.status == 503:
            raise Silent(answer.words)
        if answer.status >= 400:
            raise RefusedByCoordinator(answer.words)
        return answer.body
