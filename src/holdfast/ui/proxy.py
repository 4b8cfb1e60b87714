"""A running job as the page's source: its coordinator is asked, wherever it is now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from urllib.parse import urlencode

import aiohttp
import msgspec

from holdfast.engines import jobs
from holdfast.errors import UsageError
from holdfast.protocol.network.endpoint import Endpoint, read_endpoint
from holdfast.protocol.network.http_client import Unproven, proven_session
from holdfast.protocol.wire.decoding import decode
from holdfast.protocol.wire.stored import read_stored_word
from holdfast.web.application import API
from holdfast.web.sources import CODE_PATH, Answer, Refused, frame

PATIENCE_S = 10.0
"""So long a request waits for a coordinator that is being started again."""
RETRY_S = 0.1
QUIET_S = 60.0
"""A stream without a byte for so long is broken: the coordinator sends a comment four times in this time."""
CHUNK_BYTES = 1 << 16


def _code(body: bytes) -> str:
    return str(msgspec.json.decode(body)["code"])


class RunningJob:
    """See `web.sources.Source`. Every request finds the coordinator anew, so one that moves is followed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def panel(self, name: str, query: Mapping[str, str]) -> Answer:
        """See `Source.panel`."""
        return await self._ask("GET", f"{API}/{name}?{urlencode(query)}", b"", again=True)

    async def act(self, name: str, arguments: Mapping[str, str], dry: bool) -> Answer:
        """See `Source.act`. Sent once: what was not answered may have been done."""
        path = f"{API}/act/{name}?dry={int(dry)}"
        return await self._ask("POST", path, msgspec.json.encode(arguments), again=dry)

    async def code(self, role: str) -> str:
        """A code for the coordinator's own page."""
        found = await self._ask("POST", f"{CODE_PATH}?role={role}", b"", again=True)
        return decode(_code, found.body, "the coordinator's answer cannot be read", error=Refused)

    async def where(self) -> Endpoint:
        """The coordinator's address now. Raises Refused."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while (found := await asyncio.to_thread(self._look)) is None:
            if asyncio.get_running_loop().time() > deadline:
                raise Refused("the coordinator is being started", 503)
            await asyncio.sleep(RETRY_S)  # its file tells nobody
        return found

    def _look(self) -> Endpoint | None:
        # The address in the folder outlives the coordinator, and another program may listen there now. It would have to
        # prove itself, and does not get as far as that.
        if not jobs.is_running(self._folder):
            raise Refused(f"the job {self._folder.name} is not running any more", 409)
        return read_endpoint(self._folder)

    def _token(self) -> str:
        try:
            # Read for each request: every start of the job makes a new token.
            return read_stored_word(self._folder / "token", "the running job cannot be reached")
        except (FileNotFoundError, UsageError) as error:
            raise Refused(str(error), 503) from None

    async def _ask(self, method: str, path: str, body: bytes, *, again: bool) -> Answer:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            where = await self.where()
            try:
                async with (
                    proven_session(self._token(), where, PATIENCE_S) as session,
                    session.request(method, f"{where.url}{path}", data=body or None) as response,
                ):
                    read = await response.read()
                    if response.status < 400:
                        return Answer(read)
                    # Only this answer says that nothing was done and that another try can work. Any other is
                    # the coordinator's own word.
                    if response.status != 503 or "Retry-After" not in response.headers:
                        raise Refused(read.decode(errors="replace").strip(), response.status)
                    error: Exception = Refused("the coordinator hands over", 503)
            except (aiohttp.ClientConnectorError, Unproven) as failure:  # nobody heard it
                error = failure
            except (aiohttp.ClientError, TimeoutError) as failure:
                # The request may have been carried out while its answer was lost. Sent again, an
                # action could be done twice.
                if not again:
                    raise Refused(
                        "the coordinator did not answer, but the action may have been carried out; check before you "
                        f"try again: {failure}",
                        504,
                    ) from None
                error = failure
            if asyncio.get_running_loop().time() > deadline:
                raise Refused(f"the coordinator does not answer: {error}", 503)
            await asyncio.sleep(RETRY_S)

    async def stream(self, after: int, ledger: str) -> AsyncGenerator[bytes]:
        """See `Source.stream`: the coordinator's, byte for byte. It ends with it, and the browser asks for what follows."""
        where = await self.where()
        path = f"{API}/stream?{urlencode({'after': after, 'ledger': ledger})}"
        try:
            async with (
                proven_session(self._token(), where, PATIENCE_S) as session,
                session.get(
                    f"{where.url}{path}", timeout=aiohttp.ClientTimeout(total=None, sock_read=QUIET_S)
                ) as response,
            ):
                # The browser connects again by itself, and then the coordinator is looked for anew.
                if response.status != 200:
                    return
                # In whole events: half of one before the end would be read as one by nobody, and hide the next.
                rest = b""
                async for piece in response.content.iter_chunked(CHUNK_BYTES):
                    whole, end, rest = (rest + piece).rpartition(b"\n\n")
                    if end:
                        yield whole + end
        except (aiohttp.ClientError, TimeoutError):
            # Without this word a broken stream looks like a job in which nothing happens.
            yield frame("away", b"{}")
