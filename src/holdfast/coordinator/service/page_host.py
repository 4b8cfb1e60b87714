"""The coordinator as a host of the page: its own job, and what a person may change of it, each with a look at what would happen
first."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from holdfast.coordinator.kernel import events as ev
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.membership import resize
from holdfast.coordinator.service.decision_loop import DecisionLoop
from holdfast.coordinator.service.ledger import Ledger, Unreadable
from holdfast.coordinator.service.page import PageSource, Wakeup
from holdfast.coordinator.service.store import Store
from holdfast.coordinator.service.watchers import Watchers
from holdfast.errors import UsageError
from holdfast.observe.dashboard import job_word
from holdfast.protocol import units
from holdfast.protocol.engine_orders import NodeGoing
from holdfast.protocol.notices import NoticeCause
from holdfast.web.application import JobSource, PageRefused, routes
from holdfast.web.sessions import CODE_PATH, Role, Sessions

T = TypeVar("T")


class CoordinatorPage:
    """See `web.application.PageHost`."""

    may_act = True
    more_jobs = 0

    def __init__(
        self,
        *,
        loop: DecisionLoop,
        ledger_file: Ledger,
        watchers: Watchers,
        job_dir: Path,
        sessions: Sessions,
    ) -> None:
        self.sessions, self.news = sessions, Wakeup()
        self._loop, self._ledger, self._job_dir = loop, ledger_file, job_dir
        # By the call that wakes the watchers: the page hears of all that they hear of, and polls nothing.
        watchers.also = self.news.tell
        self._source: PageSource | None = None

    def routes(self) -> list[web.RouteDef]:
        """Those of the page, and the one where codes are made for it."""
        return [web.post(CODE_PATH, self._code), *routes(self, self.sessions)]

    async def jobs(self) -> list[dict[str, Any]]:
        """See `PageHost.jobs`: this one alone."""
        return [listed(self._loop.core.state, self._loop.clock())]

    async def source(self, job: str) -> JobSource:
        """See `PageHost.source`."""
        state = self._loop.core.state
        if job not in ("", state.spec.name):
            raise PageRefused(
                f"this is the page of the job {state.spec.name}: run `holdfast ui` for others", 404
            )
        # Made for the first viewer: a job that nobody looks at keeps no timeline.
        if self._source is None:
            self._source = PageSource(
                read=self._read,
                state=state,
                index=self._loop.core.index,
                clock=self._loop.clock,
                news=self.news,
                job_dir=self._job_dir,
                live=True,
                # Asked each time: the ledger may fail, and recover, after the source was made.
                trouble=lambda: self._ledger.why,
                act=PageActions(self._loop, self._ledger).act,
            )
        return self._source

    def _read(self, what: Callable[[Store], T]) -> Awaitable[T]:
        return readable(self._ledger.read(what))

    async def _code(self, request: web.Request) -> web.StreamResponse:
        """`?role=view|act`: a code for a browser. Only who proves the token comes here."""
        try:
            role = Role(request.query.get("role", Role.VIEW))
        except ValueError:
            return web.Response(status=400, text=f"send ?role=, one of {', '.join(Role)}")
        return web.json_response({"code": self.sessions.new_code(role), "at": time.time()})


def listed(state: CoreState, now: float) -> dict[str, Any]:
    """A job that runs in the list of jobs; see `PageHost.jobs`."""
    return {
        "job": state.spec.name,
        "state": job_word(state.membership.phase.value, state.membership.outcome),
        "step": state.step,
        "goodput": None,
        "age_s": round(now - state.began_s, 3),
        "running": True,
    }


async def readable(reading: Awaitable[T]) -> T:
    """What was read of the ledger. Raises PageRefused."""
    try:
        return await reading
    except Unreadable as error:
        raise PageRefused(str(error), 503) from error


REASON = "requested on the page"


class PageActions:
    """Drain, resize, clear and stop: checked as the commands are, and decided by the same core."""

    def __init__(self, loop: DecisionLoop, ledger_file: Ledger) -> None:
        self._loop, self._ledger = loop, ledger_file

    async def act(self, name: str, arguments: Mapping[str, str], dry: bool) -> dict[str, Any]:
        """See `JobSource.act`. Raises PageRefused."""
        state = self._loop.core.state
        try:
            # For a dry run, too: what a look promises is what would be accepted.
            told, event = prepared(state, name, arguments)
        except UsageError as error:
            raise PageRefused(str(error)) from error
        if not dry:
            # A change that cannot be written would be carried out much later, when nobody expects it.
            if self._ledger.why is not None:
                raise PageRefused(
                    f"the ledger cannot be written ({self._ledger.why}): nothing was changed", 503
                )
            await self._loop.effect(event)
        return {
            "action": name,
            "dry": dry,
            "would": told,
            "command": command(state.spec.name, name, arguments),
        }


def prepared(state: CoreState, name: str, arguments: Mapping[str, str]) -> tuple[list[str], Any]:
    """What would happen, in sentences, and the event that makes it happen. Raises UsageError."""
    match name:
        case "drain":
            node = arguments.get("node", "")
            resize.check_drain(state, node)
            return drained(state, node), NodeGoing(node, REASON)
        case "resize":
            text = arguments.get("nodes", "")
            if not (text.isascii() and text.isdigit() and len(text) < 8):
                raise UsageError("send nodes, a whole number")
            resize.check_resize(state, int(text))
            return resized(state, int(text)), ev.ResizeRequested(int(text), REASON)
        case "clear":
            machine = arguments.get("machine", "")
            if not machine or len(machine) > 200:
                raise UsageError("the body must contain machine, a name from the list of what to do")
            why = state.health.quarantine.get(machine)
            told = f"{machine} may be used again" + (f"; it was not, because {why}" if why else "")
            return [told], ev.MachineCleared(machine, remember=True)
        case _:
            return stopped(state), ev.StopRequested(REASON, NoticeCause.STOP)


def drained(state: CoreState, name: str) -> list[str]:
    """What draining a node would do."""
    members = state.membership.generation.members if state.membership.generation else ()
    here = sum(x.node == name for x in members)
    if not here:
        return [
            f"{name} does not have any workers of the job: it leaves immediately, and training is not affected"
        ]
    world = len(members)
    # Without those that leave already: two drains at once must not count on each other's node.
    others = sum(
        1 for n in state.membership.nodes.values() if n.alive and n.leaving is None and n.name != name
    )
    if others >= state.wanted_nodes:
        told = f"a spare node replaces it, and training continues with {units.plural(world, 'worker')}"
    elif (world - here) >= state.needed:
        told = (
            f"there is no spare node: training continues with {units.plural(world - here, 'worker')} until another "
            "node joins"
        )
    else:
        told = (
            f"{name} continues to train until another node has joined, because at least "
            f"{units.plural(state.needed, 'worker')} are needed"
        )
    return [f"{name} leaves between two steps", told, "no committed step is lost"]


def resized(state: CoreState, nodes: int) -> list[str]:
    """What a resize would do."""
    before = state.wanted_nodes
    workers = nodes * state.spec.nproc
    # A replica is whole or does not train, so workers that fill none are not counted.
    workers -= workers % state.membership.shard_count
    if nodes == before:
        return [f"nothing changes: the job already has {units.plural(nodes, 'node')} as its size"]
    how = "as soon as the nodes have joined" if nodes > before else "between two steps"
    return [
        f"from {before} to {units.plural(nodes, 'node')}, which are {units.plural(workers, 'worker')}, {how}",
        "the global batch and the order of samples stay the same",
        "no committed step is lost",
    ]


def stopped(state: CoreState) -> list[str]:
    """What a stop would do."""
    tiers = [tier.url for tier in state.spec.saving.tiers]
    saved = (
        f"its last state is saved to {tiers[0]}"
        if tiers
        else "its last state stays only in the nodes' memory"
    )
    return [
        "the job ends at its next commit",
        saved,
        "`holdfast run` with the same --job continues from there",
    ]


def command(job: str, name: str, arguments: Mapping[str, str]) -> str:
    """The command that does the same."""
    match name:
        case "drain":
            return f"holdfast drain {arguments.get('node', '')} --job {job}"
        case "resize":
            return f"holdfast resize {arguments.get('nodes', '')} --job {job}"
        case "clear":
            return f"holdfast node clear {arguments.get('machine', '')}"
        case _:
            return f"holdfast stop --job {job}"
