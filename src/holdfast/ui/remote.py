"""A running job whose coordinator has no address here, as the page's source: one on Kubernetes, through the API server.

Requests go the way of the commands. A stream of bytes does not go there, so the page's stream is made here of what everybody
hears who watches the job: each event by its number, and the panel `now` when something changed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from holdfast.engines.client import JobClient
from holdfast.engines.reach import client_of
from holdfast.errors import UsageError
from holdfast.protocol.wire.status_change import WHOLE
from holdfast.web.application import API
from holdfast.web.sources import Answer, Refused, answer, frame

_LISTED = ("seq", "t_s", "utc", "kind")


class RemoteJob:
    """See `web.sources.Source`. It holds nothing open but while it is asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def panel(self, name: str, query: Mapping[str, str]) -> Answer:
        """See `Source.panel`."""
        async with client_of(self._folder) as client:
            return answer(await self._ask(client, name, query))

    async def act(self, name: str, arguments: Mapping[str, str], dry: bool) -> Answer:
        """See `Source.act`. Sent once: what was not answered may have been done."""
        body = msgspec.json.encode(arguments).decode()
        try:
            async with client_of(self._folder) as client:
                return answer(await client.post(f"{API}/act/{name}?dry={int(dry)}", body, repeat=dry))
        except UsageError as error:
            raise Refused(str(error)) from error

    async def stream(self, after: int, ledger: str) -> AsyncGenerator[bytes]:
        """See `Source.stream`."""
        yield b"retry: 500\n\n"
        shown: dict[str, Any] = {}
        async with client_of(self._folder) as client:
            now = await self._ask(client, "now", {})
            # Another start of the job has another ledger, whose numbers begin again.
            if after > now["ledger_seq"] or (ledger and ledger != now["ledger"]):
                yield frame("reset", b"{}", now["ledger_seq"])
                after = now["ledger_seq"]
            try:
                async for said in client.watch(after):
                    if said.kind == "event":
                        told = {k: said.value[k] for k in _LISTED}
                        yield frame("event", msgspec.json.encode(told), said.value["seq"])
                    elif said.kind == WHOLE:
                        # A status comes when something changed, at most five times a second. What the page shows of it is
                        # made by the coordinator, as for every other job.
                        now = await self._ask(client, "now", {})
                        changed = {k: v for k, v in now.items() if k not in shown or shown[k] != v}
                        shown = now
                        yield frame("delta", msgspec.json.encode(changed))
            except (UsageError, Refused):
                # Without this word a broken stream looks like a job in which nothing happens.
                yield frame("away", b"{}")
                return
        yield frame("over", b"{}")

    async def _ask(self, client: JobClient, name: str, query: Mapping[str, str]) -> Any:
        try:
            return await client.get(f"{API}/{name}?{urlencode(query)}")
        except UsageError as error:
            raise Refused(str(error)) from error
