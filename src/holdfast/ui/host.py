"""`holdfast ui` as a host of the page: all jobs of this home.

Requests for a running job go to its coordinator, at its current address. A job on Kubernetes has no address that can be
reached from here, so they go through the API server. A job that has ended is read from its ledger, which does not
change any more.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec

from holdfast.coordinator.kernel.index import PhaseIndex
from holdfast.coordinator.kernel.state import CoreState
from holdfast.coordinator.service.ledger import SideThread
from holdfast.coordinator.service.page import PageSource, Wakeup
from holdfast.coordinator.service.store import Store, newest_ledger
from holdfast.engines import jobs
from holdfast.engines.client import JobClient
from holdfast.engines.reach import client_of
from holdfast.errors import HoldfastError, UsageError
from holdfast.protocol.job_view import WHOLE
from holdfast.protocol.network.endpoint import Endpoint, read_endpoint
from holdfast.protocol.network.http_client import Unproven, proven_session
from holdfast.protocol.wire.decoding import decode
from holdfast.protocol.wire.stored import read_stored_word
from holdfast.web.application import API, JobSource, PageAnswer, PageRefused, answer, frame
from holdfast.web.sessions import CODE_PATH

KEY_FILE = "page-key"

LISTED = 50
"""Number of jobs in the list, the newest first."""

OPEN_KEPT = 4
"""Number of ended jobs whose timelines are kept in memory."""

LIST_S = 3.0
"""How long a list of jobs may be reused for other requests, in seconds."""


class UiHost:
    """See `web.application.PageHost`. `close` ends its threads."""

    def __init__(
        self, job: str | None, may_act: bool, look: Callable[[list[Path]], Awaitable[list[dict[str, Any]]]]
    ) -> None:
        """job: the job that is shown first; None: the newest. look: returns what is known of jobs, given their folders."""
        self.may_act = may_act
        self.more_jobs = 0
        self._job, self._look = job, look
        self._ended: dict[tuple[str, float], EndedJob] = {}
        self._list: tuple[float, list[dict[str, Any]]] = (-LIST_S, [])

    async def jobs(self) -> list[dict[str, Any]]:
        """See `PageHost.jobs`."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._list[0] >= LIST_S:
            # A home may be on a network file system, and a slow one must not stop the streams of this loop.
            try:
                folders = await asyncio.to_thread(jobs.folders)
                self._list = now_s, await self._look(folders[:LISTED])
            except (HoldfastError, OSError) as error:
                raise PageRefused(f"the list of jobs cannot be read: {error}", 503) from error
            self.more_jobs = max(0, len(folders) - LISTED)
        return self._list[1]

    async def source(self, job: str) -> JobSource:
        """See `PageHost.source`."""
        try:
            folder, running, started_s, is_remote = await asyncio.to_thread(self._find, job)
        # An OSError: the folder was removed in the meantime, or belongs to another user.
        except (UsageError, OSError) as error:
            raise PageRefused(str(error), 404) from error
        if running:
            # It holds nothing open, so it is made for each request and nobody has to
            # close it when the job ends.
            return RemoteJob(folder) if is_remote else RunningJob(folder)
        # Identified by its start: a job that is started again has another ledger when it ends again.
        key = folder.name, started_s
        if key not in self._ended:
            # Each has a thread and a timeline in memory, which must not accumulate when a person looks
            # through many old jobs.
            while len(self._ended) >= OPEN_KEPT:
                self._ended.pop(next(iter(self._ended))).close()
            self._ended[key] = EndedJob(folder)
        return self._ended[key]

    def _find(self, job: str) -> tuple[Path, bool, float, bool]:
        folder = jobs.existing(job or self._job)
        allocation = jobs.read_allocation(folder)
        is_remote = allocation is not None and allocation.engine == "kubernetes"
        return folder, jobs.is_running(folder), (folder / "spec.json").stat().st_mtime, is_remote

    def close(self) -> None:
        """Ends the threads that read ledgers."""
        for source in self._ended.values():
            source.close()


def page_key(home: Path) -> str:
    """The secret with which cookies of `holdfast ui` are signed; made at the first call. Remove the file to end all sessions.

    Raises:
        UsageError: it cannot be made or read.
    """
    path = home / KEY_FILE
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            # Created with its mode and exclusively: at no moment can another user read it.
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            found = path.read_text()
            # A shorter one was left by a full disk, or by a process that was killed while it wrote. It could
            # be guessed.
            if len(found) >= 32:
                return found
            raise UsageError(f"{path} is damaged: remove it, and open the page with a new link") from None
        with os.fdopen(fd, "w") as out:
            out.write(key := secrets.token_urlsafe(32))
        return key
    except OSError as error:
        raise UsageError(f"{path} cannot be used ({error.strerror}): set HOLDFAST_HOME") from None


_LISTED = ("seq", "t_s", "utc", "kind")


class RemoteJob:
    """A job on Kubernetes, see `web.application.JobSource`. It holds nothing open between requests.

    Requests go the same way as those of the commands. That way cannot carry a stream of bytes, so the page's stream is
    made here from what every watcher of the job receives: each event by its number, and the panel `now` when something
    changed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def panel(self, name: str, query: Mapping[str, str]) -> PageAnswer:
        """See `JobSource.panel`."""
        async with client_of(self._folder) as client:
            return answer(await self._ask(client, name, query))

    async def act(self, name: str, arguments: Mapping[str, str], dry: bool) -> PageAnswer:
        """See `JobSource.act`. Sent only once: an action without an answer may have been carried out."""
        body = msgspec.json.encode(arguments).decode()
        try:
            async with client_of(self._folder) as client:
                return answer(await client.post(f"{API}/act/{name}?dry={int(dry)}", body, repeat=dry))
        except UsageError as error:
            raise PageRefused(str(error)) from error

    async def stream(self, after: int, ledger: str) -> AsyncGenerator[bytes]:
        """See `JobSource.stream`."""
        yield b"retry: 500\n\n"
        shown: dict[str, Any] = {}
        async with client_of(self._folder) as client:
            now = await self._ask(client, "now", {})
            # Another start of the job has another ledger, whose numbers begin again.
            if after > now["ledger_seq"] or (ledger and ledger != now["ledger"]):
                yield frame("reset", b"{}", now["ledger_seq"])
                after = now["ledger_seq"]
            try:
                async for message in client.watch(after):
                    if message.kind == "event":
                        event = {k: message.value[k] for k in _LISTED}
                        yield frame("event", msgspec.json.encode(event), message.value["seq"])
                    elif message.kind == WHOLE:
                        # A status arrives when something changed, at most five times a second. The panel
                        # itself is made by the coordinator, as for every other job.
                        now = await self._ask(client, "now", {})
                        changed = {k: v for k, v in now.items() if k not in shown or shown[k] != v}
                        shown = now
                        yield frame("delta", msgspec.json.encode(changed))
            except (UsageError, PageRefused):
                # Without this message a broken stream looks like a job in which nothing happens.
                yield frame("away", b"{}")
                return
        yield frame("over", b"{}")

    async def _ask(self, client: JobClient, name: str, query: Mapping[str, str]) -> Any:
        try:
            return await client.get(f"{API}/{name}?{urlencode(query)}")
        except UsageError as error:
            raise PageRefused(str(error)) from error


PATIENCE_S = 10.0
"""How long a request waits for a coordinator that is being restarted, in seconds."""
RETRY_S = 0.1
QUIET_S = 60.0
"""A stream without a byte for this long is broken, in seconds: the coordinator sends a comment four times in this
period."""
CHUNK_BYTES = 1 << 16


def _code(body: bytes) -> str:
    return str(msgspec.json.decode(body)["code"])


class RunningJob:
    """See `web.application.JobSource`. Every request looks up the coordinator's address anew, so a coordinator that
    moves is followed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def panel(self, name: str, query: Mapping[str, str]) -> PageAnswer:
        """See `JobSource.panel`."""
        return await self._ask("GET", f"{API}/{name}?{urlencode(query)}", b"", again=True)

    async def act(self, name: str, arguments: Mapping[str, str], dry: bool) -> PageAnswer:
        """See `JobSource.act`. Sent only once: an action without an answer may have been carried out."""
        path = f"{API}/act/{name}?dry={int(dry)}"
        return await self._ask("POST", path, msgspec.json.encode(arguments), again=dry)

    async def code(self, role: str) -> str:
        """A code for the coordinator's own page."""
        found = await self._ask("POST", f"{CODE_PATH}?role={role}", b"", again=True)
        return decode(_code, found.body, "the coordinator's answer cannot be read", error=PageRefused)

    async def where(self) -> Endpoint:
        """The coordinator's address now. Raises PageRefused."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while (found := await asyncio.to_thread(self._look)) is None:
            if asyncio.get_running_loop().time() > deadline:
                raise PageRefused("the coordinator is being started", 503)
            await asyncio.sleep(RETRY_S)  # no event announces a new address file
        return found

    def _look(self) -> Endpoint | None:
        # The address file outlives the coordinator, and another program may listen at that address now. It
        # would have to prove that it knows the token, and cannot.
        if not jobs.is_running(self._folder):
            raise PageRefused(f"the job {self._folder.name} is not running any more", 409)
        return read_endpoint(self._folder)

    def _token(self) -> str:
        try:
            # Read for each request: every start of the job makes a new token.
            return read_stored_word(self._folder / "token", "the running job cannot be reached")
        except (FileNotFoundError, UsageError) as error:
            raise PageRefused(str(error), 503) from None

    async def _ask(self, method: str, path: str, body: bytes, *, again: bool) -> PageAnswer:
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
                        return PageAnswer(read)
                    # Only this answer says that nothing was done and that another try can succeed. Any other
                    # is the coordinator's own answer.
                    if response.status != 503 or "Retry-After" not in response.headers:
                        raise PageRefused(read.decode(errors="replace").strip(), response.status)
                    error: Exception = PageRefused("the coordinator hands over", 503)
            except (aiohttp.ClientConnectorError, Unproven) as failure:  # no coordinator got it
                error = failure
            except (aiohttp.ClientError, TimeoutError) as failure:
                # The request may have been carried out while its answer was lost. Sent again, an
                # action could be done twice.
                if not again:
                    raise PageRefused(
                        "the coordinator did not answer, but the action may have been carried out; check before you "
                        f"try again: {failure}",
                        504,
                    ) from None
                error = failure
            if asyncio.get_running_loop().time() > deadline:
                raise PageRefused(f"the coordinator does not answer: {error}", 503)
            await asyncio.sleep(RETRY_S)

    async def stream(self, after: int, ledger: str) -> AsyncGenerator[bytes]:
        """See `JobSource.stream`: the coordinator's stream, byte for byte. It ends when that does, and the browser asks
        for the events that follow."""
        where = await self.where()
        path = f"{API}/stream?{urlencode({'after': after, 'ledger': ledger})}"
        try:
            async with (
                proven_session(self._token(), where, PATIENCE_S) as session,
                session.get(
                    f"{where.url}{path}", timeout=aiohttp.ClientTimeout(total=None, sock_read=QUIET_S)
                ) as response,
            ):
                # The browser connects again by itself, and the coordinator's address is then looked up anew.
                if response.status != 200:
                    return
                # Only complete events are passed on: the half of one at the end of the stream would be lost,
                # and spoil the next one.
                rest = b""
                async for piece in response.content.iter_chunked(CHUNK_BYTES):
                    whole, end, rest = (rest + piece).rpartition(b"\n\n")
                    if end:
                        yield whole + end
        except (aiohttp.ClientError, TimeoutError):
            # Without this message a broken stream looks like a job in which nothing happens.
            yield frame("away", b"{}")


T = TypeVar("T")


class EndedJob:
    """See `web.application.JobSource`. `close` ends its thread."""

    def __init__(self, folder: Path) -> None:
        self._path, self._folder = newest_ledger(folder), folder
        # A thread of its own: reading a long ledger here must not delay the page of another job.
        self._thread = SideThread("page-reader")
        self._source: PageSource | None = None

    async def panel(self, name: str, query: Mapping[str, str]) -> PageAnswer:
        """See `JobSource.panel`."""
        return await (await self._open()).panel(name, query)

    async def stream(self, after: int, ledger: str) -> AsyncGenerator[bytes]:
        """See `JobSource.stream`: the events that exist, and then the end."""
        async for sent in (await self._open()).stream(after, ledger):
            yield sent

    async def act(self, name: str, arguments: Mapping[str, str], dry: bool) -> PageAnswer:
        """See `JobSource.act`."""
        raise PageRefused("the job is not running, so it cannot be changed", 409)

    def close(self) -> None:
        """Ends the thread; no more requests will follow."""
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
            raise PageRefused(f"the ledger {self._path} cannot be read: {error}", 503) from error

    async def _open(self) -> PageSource:
        if self._source is None:
            if not self._path.is_file():
                raise PageRefused(f"the job {self._folder.name} was never started", 404)
            state, last_s = await self._read(_stored)
            news = Wakeup()
            self._source = PageSource(
                read=self._read,
                state=state,
                index=PhaseIndex(state.membership, state.spec.nproc),
                # Time stands still at the ledger's end. By this machine's clock, an ended job would continue
                # to lose goodput.
                clock=lambda: state.began_s + last_s,
                news=news,
                job_dir=self._folder,
                live=False,
            )
        return self._source


def _stored(store: Store) -> tuple[CoreState, float]:
    """The state as the last coordinator left it, and the time of the ledger's end."""
    state = store.load()
    if state is None:
        raise PageRefused("the job was never started", 404)
    return state, store.last_t_s()
