"""The coordinator as a host of the page: its own job, and what a person may change of it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from holdfast.coordinator.service.decision_loop import DecisionLoop
from holdfast.coordinator.service.ledger import Ledger, Unreadable
from holdfast.coordinator.service.page import News, PageSource
from holdfast.coordinator.service.page_actions import PageActions
from holdfast.coordinator.service.store import Store
from holdfast.coordinator.service.watchers import Watchers
from holdfast.observe.dashboard import job_word
from holdfast.web.application import routes
from holdfast.web.sessions import Role, Sessions
from holdfast.web.sources import CODE_PATH, Refused, Source

T = TypeVar("T")


class CoordinatorPage:
    """See `web.application.Host`."""

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
        self.sessions, self.news = sessions, News()
        self._loop, self._ledger, self._job_dir = loop, ledger_file, job_dir
        # By the call that wakes the watchers: the page hears of all that they hear of, and polls nothing.
        watchers.also = self.news.tell
        self._source: PageSource | None = None

    def routes(self) -> list[web.RouteDef]:
        """Those of the page, and the one where codes are made for it."""
        return [web.post(CODE_PATH, self._code), *routes(self, self.sessions)]

    async def jobs(self) -> list[dict[str, Any]]:
        """See `Host.jobs`: this one alone."""
        state = self._loop.core.state
        shown = {"phase": state.membership.phase.value, "outcome": state.membership.outcome}
        return [
            {
                "job": state.spec.name,
                "state": job_word(shown),
                "step": state.step,
                "goodput": None,
                "age_s": round(self._loop.clock() - state.began_s, 3),
                "running": True,
            }
        ]

    async def source(self, job: str) -> Source:
        """See `Host.source`."""
        state = self._loop.core.state
        if job not in ("", state.spec.name):
            raise Refused(f"this is the page of the job {state.spec.name}: run `holdfast ui` for others", 404)
        # Made for the first viewer: a job that nobody looks at keeps no story.
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
        return _readable(self._ledger.read(what))

    async def _code(self, request: web.Request) -> web.StreamResponse:
        """`?role=view|act`: a code for a browser. Only who proves the token comes here."""
        try:
            role = Role(request.query.get("role", Role.VIEW))
        except ValueError:
            return web.Response(status=400, text=f"send ?role=, one of {', '.join(Role)}")
        return web.json_response({"code": self.sessions.new_code(role), "at": time.time()})


async def _readable(reading: Awaitable[T]) -> T:
    try:
        return await reading
    except Unreadable as error:
        raise Refused(str(error), 503) from error
