"""One job's task and its coordinator: which one it listens to, what that says, what it is told, and whether nodes hear it. A coordinator
proves itself before anything of it is believed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from urllib.parse import urlencode

import aiohttp
import msgspec

from holdfast.agent.coordinator_link import give_up_when_gone
from holdfast.errors import Damaged, HoldfastError
from holdfast.kubernetes.names import AGENT_PORT
from holdfast.kubernetes.objects.pod import PodSeen
from holdfast.kubernetes.policy.losses import VOTERS
from holdfast.kubernetes.policy.plan import AskResize, AskStop, CoordinatorReport, NodeReport, Tell
from holdfast.kubernetes.tasks.expectations import Expectations
from holdfast.protocol.engine_orders import Availability, EngineOrders
from holdfast.protocol.health import CLUSTER_NAME
from holdfast.protocol.job_view import JobView
from holdfast.protocol.network.endpoint import (
    MAX_ANSWER_BYTES,
    PATH,
    Endpoint,
    Hearing,
    Whereabouts,
    agent_name,
)
from holdfast.protocol.network.http_client import proven_session, proving_to, request
from holdfast.protocol.network.lookup import Lookup
from holdfast.protocol.network.sockets import host_and_port
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.wire.decoding import decode

_log = logging.getLogger(__name__)

ANSWER_S = 5.0
AGAIN_S = 1.0
"""Between two tries to reach it."""
ASK_ANYWAY_S = 5.0
"""So often a coordinator is asked at least, to which no connection can be kept."""


# ---------------------------------------------------------------- the connection to one coordinator


class Silent(HoldfastError):
    """The coordinator does not answer."""


class RefusedByCoordinator(HoldfastError):
    """It answers, and does not do what was asked. `str` has its words."""


class JobLink:
    """`follow` chooses the coordinator; the rest is about that one."""

    def __init__(
        self, name: str, expected: Expectations, lookup: Callable[[str], Lookup], wake: Callable[[], None]
    ) -> None:
        """lookup: of the coordinator at an address. wake: has the job's task look."""
        self._name, self._expected, self._lookup, self._wake = name, expected, lookup, wake
        self._link: CoordinatorConnection | None = None
        self._listening: asyncio.Task[None] | None = None
        self._since_s = 0.0
        self._in_vain_s: float | None = None
        """When it was asked and did not answer; None: it answered the last time, or was not asked yet."""

    @property
    def silent_s(self) -> float:
        """See `Observed`."""
        return 0.0 if self._link is None else time.monotonic() - self._since_s

    @property
    def listens(self) -> bool:
        """There is a coordinator to listen to."""
        return self._link is not None

    async def follow(self, pod: PodSeen | None, token: str, detection_s: float) -> None:
        """Listens to this coordinator, and to no other. token: the job's. detection_s: its time to detect a lost node."""
        wanted = None if pod is None or pod.address is None else (pod.address, pod.number)
        if self._link is not None and (self._link.host, self._link.term) == wanted:
            return
        await self.close()
        self._since_s, self._in_vain_s = time.monotonic(), None
        if wanted is not None:
            host, term = wanted
            self._link = CoordinatorConnection(
                host=host,
                term=term,
                token=token,
                lookup=self._lookup(host),
                changed=self._wake,
                detection_s=detection_s,
            )
            self._listening = asyncio.create_task(self._link.listen())

    async def close(self) -> None:
        """Listens to nobody."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._listening, self._link = None, None

    async def ask(self) -> CoordinatorReport | None:
        """None: it does not answer now."""
        if self._link is None:
            return None
        if (
            self._link.lost
            and self._in_vain_s is not None
            and time.monotonic() - self._in_vain_s < ASK_ANYWAY_S
        ):
            # A machine that is gone would be waited for at each look, and the nodes' word with it. Once there is a
            # connection again the job's task looks at once.
            return None
        try:
            said = await self._link.ask()
        except (Silent, RefusedByCoordinator):
            self._in_vain_s = time.monotonic()
            return None
        self._in_vain_s = None
        self._since_s = time.monotonic()
        self._expected.meet(said.term, said.alive, [order.order_id for order in said.orders])
        return said

    async def talk(self, action: Tell | AskStop | AskResize) -> None:
        """What it does not hear now is decided anew at the next look."""
        if self._link is None:
            return
        try:
            match action:
                case Tell(news):
                    await self._link.tell(news)
                case AskStop(reason, cause):
                    await self._link.stop(reason, cause)
                case AskResize(nodes):
                    await self._link.resize(nodes)
            self._expected.did(action)
        except Silent as error:
            _log.info("%s", error, extra={"job": self._name})
        except RefusedByCoordinator as error:
            if isinstance(action, AskResize):
                self._expected.resize_refused(action.nodes, str(error))
            _log.warning("the coordinator refuses: %s", error, extra={"job": self._name})


class CoordinatorConnection:
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

    async def ask(self) -> CoordinatorReport:
        """Raises Silent."""
        status, orders = await self._request("GET", "/status"), await self._request("GET", "/orders")
        return decode(
            self._said, (status, orders), "what the coordinator answers cannot be read", error=Silent
        )

    def _said(self, answers: tuple[bytes, bytes]) -> CoordinatorReport:
        status, orders = answers
        return said_of(
            msgspec.json.decode(status, type=JobView),
            msgspec.json.decode(orders, type=EngineOrders),
            self.term,
        )

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


def said_of(view: JobView, orders: EngineOrders, term: int) -> CoordinatorReport:
    """Its pages `/status` and `/orders` as one value. Pure."""
    training = {one.node for one in view.workers if one.rank is not None}
    newest = view.incidents[-1] if view.incidents else None
    snapshot = view.saving.snapshot
    saved = [(tier.step, tier.url) for tier in view.saving.tiers if tier.step is not None]
    newest_saved = max(saved, key=lambda one: one[0], default=None)
    return CoordinatorReport(
        term=term,
        phase=view.phase,
        wanted=orders.nodes,
        orders=orders.orders,
        nodes={one.node: NodeReport(alive=one.alive, trains=one.node in training) for one in view.nodes},
        outcome=view.outcome,
        reason=view.reason,
        step=view.step or None,
        loss=view.loss,
        goodput=view.goodput.share,
        level=view.level,
        # Incidents are numbered from 1 on, and the view has the newest only.
        incidents=newest.id if newest is not None else 0,
        open_incidents=sum(one.full_strength_s is None for one in view.incidents),
        last_incident=None if newest is None else f"incident {newest.id} on {newest.node}",
        snapshot=None if snapshot is None else f"step {snapshot.step} on {snapshot.nodes} nodes each",
        checkpoint=None if newest_saved is None else f"{newest_saved[1]}/step-{newest_saved[0]}",
        asks=tuple(one.text for one in view.health.asks),
        bad_machines=frozenset(
            machine.removeprefix(CLUSTER_NAME)
            for machine in view.health.quarantine
            if machine.startswith(CLUSTER_NAME)
        ),
    )


# ------------------------------------------------------------ the nodes' word: whether they hear their coordinator

NODE_ANSWER_S = 2.0
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
            _ask(pod, token, path, port, MORE_S if pod.machine in machines else NODE_ANSWER_S)
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
