"""A job that does not run as the page's source: out of its ledger, which nobody changes any more."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from holdfast.coordinator.kernel.index import Index
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service.ledger import SideThread
from holdfast.coordinator.service.page import News, PageSource
from holdfast.coordinator.service.store import Store, newest_ledger
from holdfast.web.sources import Answer, Refused

T = TypeVar("T")


class EndedJob:
    """See `web.sources.Source`. `close` ends its thread."""

    def __init__(self, folder: Path) -> None:
        self._path, self._folder = newest_ledger(folder), folder
        # A thread of its own: a long ledger that is read here must not hold up the page of another job.
        self._thread = SideThread("page-reader")
        self._source: PageSource | None = None

    async def panel(self, name: str, query: Mapping[str, str]) -> Answer:
        """See `Source.panel`."""
        return await (await self._open()).panel(name, query)

    async def stream(self, after: int, ledger: str) -> AsyncGenerator[bytes]:
        """See `Source.stream`: what there is, and then the end."""
        async for sent in (await self._open()).stream(after, ledger):
            yield sent

    async def act(self, name: str, arguments: Mapping[str, str], dry: bool) -> Answer:
        """See `Source.act`."""
        raise Refused("the job is not running, so it cannot be changed", 409)

    def close(self) -> None:
        """Nothing more will be asked."""
        self._thread.end()

    async def _read(self, what: Callable[[Store], T]) -> T:
        return await self._thread.do(self._with_store, what)

    def _with_store(self, what: Callable[[Store], T]) -> T:
        try:
            # Opened for each reading: no handle stays on a ledger that `holdfast rm` removes
            # or the next start puts away.
            store = Store(self._path, read_only=True)
            try:
                return what(store)
            finally:
                store.close()
        except sqlite3.Error as error:
            raise Refused(f"the ledger {self._path} cannot be read: {error}", 503) from error

    async def _open(self) -> PageSource:
        if self._source is None:
            if not self._path.is_file():
                raise Refused(f"the job {self._folder.name} was never started", 404)
            state, last_s = await self._read(_stored)
            news = News()
            self._source = PageSource(
                read=self._read,
                state=state,
                index=Index(state.membership, state.spec.nproc),
                # Time stands still at the ledger's end. By this machine's clock an ended job
                # would go on losing goodput.
                clock=lambda: state.began_s + last_s,
                news=news,
                job_dir=self._folder,
                live=False,
            )
        return self._source


def _stored(store: Store) -> tuple[CoreState, float]:
    """The state as the last coordinator left it, and when the ledger ends."""
    state = store.load()
    if state is None:
        raise Refused("the job was never started", 404)
    return state, store.last_t_s()
