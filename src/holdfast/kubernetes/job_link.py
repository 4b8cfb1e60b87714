"""One job's task and its coordinator: whom it listens to, what was said, and what is told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from holdfast.kubernetes.actions import AskResize, AskStop, Tell
from holdfast.kubernetes.desk import Desk
from holdfast.kubernetes.link import CoordinatorLink, RefusedByCoordinator, Silent
from holdfast.kubernetes.observed import PodSeen, Said
from holdfast.protocol.network.lookup import Lookup

_log = logging.getLogger(__name__)
ASK_ANYWAY_S = 5.0
"""So often a coordinator is asked at least, to which no connection can be kept."""


class JobLink:
    """`follow` chooses the coordinator; the rest is about that one."""

    def __init__(
        self, name: str, desk: Desk, lookup: Callable[[str], Lookup], wake: Callable[[], None]
    ) -> None:
        """lookup: of the coordinator at an address. wake: has the job's task look."""
        self._name, self._desk, self._lookup, self._wake = name, desk, lookup, wake
        self._link: CoordinatorLink | None = None
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
            self._link = CoordinatorLink(
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

    async def ask(self) -> Said | None:
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
        alive = [name for name, node in said.nodes.items() if node.alive]
        self._desk.meet(said.term, alive, [order.order_id for order in said.orders])
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
            self._desk.did(action)
        except Silent as error:
            _log.info("%s", error, extra={"job": self._name})
        except RefusedByCoordinator as error:
            if isinstance(action, AskResize):
                self._desk.resize_refused(action.nodes, str(error))
            _log.warning("the coordinator refuses: %s", error, extra={"job": self._name})
