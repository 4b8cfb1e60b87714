"""A copy of all objects of one kind, kept up to date by a list and a watch.

A watch can end at any moment. The next one continues from the last version that was received. If the server does not have that
version any more, everything is listed again, and objects that are not in the new list were deleted in the meantime.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing

from holdfast.kubernetes.client.api import Api, ApiError, Backoff, NoApiAnswer, Object

_log = logging.getLogger(__name__)


class Informer:
    """Calls back for each change.

    Attributes:
        listed: set after the first list. Before that, a missing object does not count as deleted.
        restarts: number of lists after the first one.
    """

    def __init__(
        self,
        *,
        api: Api,
        path: str,
        query: Mapping[str, str],
        on_list: Callable[[list[Object], str], None],
        on_change: Callable[[Object], None],
        on_gone: Callable[[Object], None],
        backoff: Backoff | None = None,
    ) -> None:
        """on_list: receives all objects, and the version of the list."""
        self._backoff = backoff or Backoff()
        self._api, self._path, self._query = api, path, query
        self._on_list, self._on_change, self._on_gone = on_list, on_change, on_gone
        self.listed = asyncio.Event()
        self.restarts = 0

    async def run(self) -> None:
        """Runs until cancelled. Raises ApiError if the operator lacks the permission to list or watch."""
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                # Closed explicitly instead of by the garbage collector, because it holds a connection.
                async with aclosing(self._api.watch(self._path, self._query, version)) as events:
                    async for event in events:
                        version = event["object"]["metadata"]["resourceVersion"]
                        self._backoff.reset()
                        self._take(event)
                # With a pause, in case the server ends each watch at once.
                await self._wait(NoApiAnswer("the watch has ended"))
            except ApiError as error:
                if error.is_gone:
                    version = ""
                elif not error.may_pass and not error.is_unknown:
                    raise
                await self._wait(error)
            except NoApiAnswer as error:
                await self._wait(error)

    async def _list(self) -> str:
        found, version = await self._api.list_all(self._path, self._query)
        self._on_list(found, version)
        self.restarts += self.listed.is_set()
        self.listed.set()
        return version

    def _take(self, event: Object) -> None:
        match event["type"]:
            case "ADDED" | "MODIFIED":
                self._on_change(event["object"])
            case "DELETED":
                self._on_gone(event["object"])
            case _:  # a bookmark: nothing but a version
                pass

    async def _wait(self, error: Exception) -> None:
        _log.info("%s; it is tried again", error, extra={"path": self._path})
        await self._backoff.wait(error)
