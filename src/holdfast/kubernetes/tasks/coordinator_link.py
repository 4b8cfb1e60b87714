"""How a job's task talks to the job's coordinator: which one it listens to, the reports and messages, and what nodes report of
it.

A coordinator must prove that it knows the job's token before anything of it is used.
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
"""Seconds between two tries to connect."""
ASK_ANYWAY_S = 5.0
"""Interval at which a coordinator is queried although no connection to it can be kept."""


# ---------------------------------------------------------------- the connection to one coordinator


class Silent(HoldfastError):
    """The coordinator does not answer."""


class RefusedByCoordinator(HoldfastError):
    """The coordinator answers but refuses a request. `str` is its message."""


class JobLink:
    """The job's link to its coordinator. `follow` selects the coordinator that the other methods talk to."""

    def __init__(
        self, name: str, expected: Expectations, lookup: Callable[[str], Lookup], wake: Callable[[], None]
    ) -> None:
        """lookup: finds the coordinator at an address. wake: makes the job's task reconcile."""
        self._name, self._expected, self._lookup, self._wake = name, expected, lookup, wake
        self._link: CoordinatorConnection | None = None
        self._listening: asyncio.Task[None] | None = None
        self._since_s = 0.0
        self._in_vain_s: float | None = None
        """When it last failed to answer; None: it answered the last query, or was not queried yet."""

    @property
    def silent_s(self) -> float:
        """See `Observed`."""
        return 0.0 if self._link is None else time.monotonic() - self._since_s

    @property
    def listens(self) -> bool:
        """Whether a coordinator is selected."""
        return self._link is not None

    async def follow(self, pod: PodSeen | None, token: str, detection_s: float) -> None:
        """Listens to this coordinator only; None: to none.

        Args:
            token: the job's.
            detection_s: the job's time to detect a lost node.
        """
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
        """Stops listening."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._listening, self._link = None, None

    async def ask(self) -> CoordinatorReport | None:
        """The coordinator's report; None: there is no coordinator, or it does not answer now."""
        if self._link is None:
            return None
        if (
            self._link.lost
            and self._in_vain_s is not None
            and time.monotonic() - self._in_vain_s < ASK_ANYWAY_S
        ):
            # Otherwise each look would wait for a machine that is gone before it asks the nodes. As soon as there is a
            # connection again, the job's task looks at once.
            return None
        try:
            report = await self._link.ask()
        except (Silent, RefusedByCoordinator):
            self._in_vain_s = time.monotonic()
            return None
        self._in_vain_s = None
        self._since_s = time.monotonic()
        self._expected.meet(report.term, report.alive, [order.order_id for order in report.orders])
        return report

    async def talk(self, action: Tell | AskStop | AskResize) -> None:
        """Sends the message of an action. If it does not arrive, the next look decides anew whether to send it."""
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
    """A connection to the coordinator at one pod's address.

    `changed` is called when the coordinator is reached, when it has a new order, and when the connection is lost.
    """

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
        """detection_s: seconds of silence after which its machine counts as one that does not answer."""
        self.host, self.term = host, term
        self._token, self._changed = token, changed
        self._lookup, self._detection_s = lookup, detection_s
        self._where: Endpoint | None = None
        self.lost = False
        """Whether the permanent connection has ended or could not be made; further attempts are being made."""

    async def listen(self) -> None:
        """Keeps a connection to the coordinator until cancelled."""
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
                    # Each order sends a message. The end of the connection is a signal too, since it ends with the
                    # coordinator's process. So the operator looks at that moment and not only at the next poll.
                    async for _ in socket:
                        self._changed()
            self._where, self.lost = None, True
            self._changed()
            await asyncio.sleep(AGAIN_S)

    async def ask(self) -> CoordinatorReport:
        """The coordinator's report. Raises Silent."""
        status, orders = await self._request("GET", "/status"), await self._request("GET", "/orders")
        return decode(
            self._read_report, (status, orders), "what the coordinator answers cannot be read", error=Silent
        )

    def _read_report(self, answers: tuple[bytes, bytes]) -> CoordinatorReport:
        status, orders = answers
        return said_of(
            msgspec.json.decode(status, type=JobView),
            msgspec.json.decode(orders, type=EngineOrders),
            self.term,
        )

    async def tell(self, news: Availability) -> None:
        """Sends news about nodes or orders. Raises Silent or RefusedByCoordinator."""
        await self._request("POST", "/engine", msgspec.json.encode(news))

    async def stop(self, reason: str, cause: NoticeCause) -> None:
        """Asks it to save the state and end the job. Raises Silent or RefusedByCoordinator."""
        await self._request("POST", "/stop?" + urlencode({"reason": reason, "cause": cause.value}))

    async def resize(self, nodes: int) -> None:
        """Asks for another number of nodes. Raises Silent, or RefusedByCoordinator with the reason."""
        await self._request("POST", "/resize?" + urlencode({"nodes": nodes, "reason": "the object changed"}))

    async def _find(self) -> Endpoint:
        # A coordinator of another term at this address means that the pod is gone and its address is used by another one.
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
        # 503: it is starting or handing over, and may answer a repeated request. Any other refusal is final, and its message
        # is put into the object's status.
        if answer.status == 503:
            raise Silent(answer.words)
        if answer.status >= 400:
            raise RefusedByCoordinator(answer.words)
        return answer.body


def said_of(view: JobView, orders: EngineOrders, term: int) -> CoordinatorReport:
    """A coordinator's pages `/status` and `/orders` as one value. Pure."""
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
        # Incidents are numbered from 1, and the view has only the newest ones.
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


# ------------------------------------------------------------ what the nodes report of their coordinator

NODE_ANSWER_S = 2.0
MORE_S = 0.5
"""Seconds to wait for a further answer once most nodes have answered, and for the answer of a node on a coordinator's machine,
which may be lost together with it. Nodes that are gone must not delay each look, and with it a new coordinator. A node that lives
answers as fast as the others. The answer of one on the coordinator's machine counts for little, since both are on one kernel."""
_hearings = msgspec.json.Decoder(Hearing)


async def ask_nodes(
    nodes: Sequence[PodSeen],
    token: str,
    coordinator: PodSeen | None = None,
    machines: Collection[str | None] = (),
    port: int = AGENT_PORT,
) -> dict[str, Hearing | None]:
    """Asks a random sample of nodes for their connection to the coordinator.

    Args:
        token: the job's.
        coordinator: its pod, whose address the nodes are told: the cluster's name service may know that of a new one much later.
        machines: those of the job's coordinators, by whose nodes' answers the call must not be delayed.
        port: of the agents.

    Returns:
        The answers by node; None: no answer in time, or one without proof.
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
    """Waits for all answers, but once most have arrived for at most `MORE_S` for each further one."""
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
    # An agent of an earlier version accepts the connection and closes it.
    except (aiohttp.ClientError, OSError, TimeoutError, Damaged):
        return None
