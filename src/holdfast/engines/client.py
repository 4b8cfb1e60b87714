"""Talks to a running job's coordinator: for the launcher and for commands in another terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from holdfast.engines import jobs
from holdfast.errors import UsageError
from holdfast.protocol.job_report import report_announced
from holdfast.protocol.job_view import CHANGED, WHOLE, JobView, ReceivedView
from holdfast.protocol.network.endpoint import Endpoint, read_endpoint
from holdfast.protocol.network.http_client import Answer, Unproven, proven_session, request
from holdfast.protocol.wire.decoding import decode
from holdfast.protocol.wire.stored import read_stored_word

RETRY_S = 0.05
PATIENCE_S = 10.0
"""Seconds that an answer may take, and that the restart of a coordinator may take."""


class RequestNotTaken(Exception):
    """The request was not accepted: there is no coordinator yet, or it is handing over to another one."""


class NoAnswer(UsageError):
    """The job does not answer: it has ended, or its coordinator was lost and is not restarted."""


class Announcement(msgspec.Struct, frozen=True):
    """One message of `/watch`."""

    kind: str
    """event, status, provide-node, release-node, ended or log."""
    value: Any
    """A `JobView` for a status, a `JobReport` for the end; else decoded JSON."""


class Reach(Protocol):
    """A connection to a job's current coordinator. An async context manager."""

    async def __aenter__(self) -> Reach: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def is_running(self) -> bool:
        """Whether the job may have a coordinator."""
        ...

    async def send(self, method: str, path: str, body: str) -> Answer:
        """Sends one request.

        Raises:
            RequestNotTaken: it was not accepted, and may be sent again.
            NoAnswer: the job is not running.
            aiohttp.ClientError, TimeoutError: it may have been carried out, or not.
        """
        ...

    def listen(self, after: int) -> AsyncGenerator[str]:
        """The announcements of one connection, as JSON, beginning after the event with this number; none if there is no
        connection."""
        ...


class FolderReach:
    """Reaches the coordinator by the job's folder, which has its address and the token."""

    def __init__(self, job_dir: Path, token: str = "") -> None:
        """token: of a job that this process runs; empty: it is read from the folder."""
        self._job_dir = job_dir
        self._token, self._ours = token, bool(token)

    async def __aenter__(self) -> FolderReach:
        if self._ours:
            return self
        try:
            self._token = read_stored_word(
                self._job_dir / "token",
                "without this file no command can reach the running job; stop its launcher with Ctrl-C",
            )
        except FileNotFoundError:
            # A simulated job never had a token, only a ledger.
            if (self._job_dir / "spec.json").exists() and not jobs.is_running(self._job_dir):
                raise self._not_running() from None
            raise UsageError(
                f"the job {self._job_dir.name!r} does not exist in {self._job_dir.parent}"
            ) from None
        return self

    async def __aexit__(self, *exc: object) -> None:
        return

    async def is_running(self) -> bool:
        """See `Reach`."""
        return self._ours or jobs.is_running(self._job_dir)

    def _not_running(self) -> NoAnswer:
        name = self._job_dir.name
        return NoAnswer(f"the job {name!r} is not running; `holdfast report --job {name}` shows what it did")

    def _where(self) -> Endpoint | None:
        """The coordinator's address; None while it is starting. Raises NoAnswer if the job is not running."""
        # Checked before every attempt: the address in the folder outlives the coordinator, and another program may listen there
        # by now.
        if not self._ours and not jobs.is_running(self._job_dir):
            raise self._not_running()
        return read_endpoint(self._job_dir)

    async def send(self, method: str, path: str, body: str) -> Answer:
        """See `Reach`."""
        if (where := self._where()) is None:
            raise RequestNotTaken("it is still starting")
        try:
            return await request(self._token, where, method, path, body, limit_s=PATIENCE_S)
        except (aiohttp.ClientConnectorError, Unproven) as error:  # it may be starting again
            raise RequestNotTaken(str(error)) from error

    async def listen(self, after: int) -> AsyncGenerator[str]:
        """See `Reach`."""
        try:
            if (where := self._where()) is None:
                return
            async with (
                proven_session(self._token, where, PATIENCE_S) as session,
                session.ws_connect(f"{where.url}/watch/{after}") as socket,
            ):
                async for frame in socket:
                    if frame.type is aiohttp.WSMsgType.TEXT:
                        yield frame.data
        except (aiohttp.ClientError, OSError, NoAnswer):
            return


_announcements = msgspec.json.Decoder(Announcement)
_views = msgspec.json.Decoder(JobView)


def _seq(value: Any) -> int:
    return int(value["seq"])


class JobClient:
    """HTTP to the coordinator of one job, with the job's token. An async context manager."""

    def __init__(self, job_dir: Path, reach: Reach | None = None) -> None:
        """reach: how to reach the coordinator; None: by the folder."""
        self._name = job_dir.name
        self._reach: Reach = FolderReach(job_dir) if reach is None else reach

    async def __aenter__(self) -> JobClient:
        await self._reach.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._reach.__aexit__(*exc)

    async def get(self, path: str) -> Any:
        """Reads a JSON page. Raises NoAnswer if there is no answer."""
        return self._read(await self.get_bytes(path))

    async def view(self) -> JobView:
        """The job's current status. Raises NoAnswer if there is no answer."""
        answer = await self.get_bytes("/status")
        return decode(_views.decode, answer, self._unreadable, error=UsageError)

    async def get_bytes(self, path: str) -> bytes:
        """Reads any page. Raises NoAnswer if there is no answer."""
        return await self._request("GET", path)

    async def post(self, path: str, body: str = "", repeat: bool = False) -> Any:
        """Sends a request. repeat: it is idempotent, so that it is sent again if its answer was lost.

        Raises:
            UsageError: the coordinator refuses, with its message.
            NoAnswer: there is no answer.
        """
        return self._read(await self._request("POST", path, body, repeat))

    def _read(self, answer: bytes) -> Any:
        return decode(msgspec.json.decode, answer, self._unreadable, error=UsageError)

    @property
    def _unreadable(self) -> str:
        return f"the answer of the coordinator of the job {self._name!r} cannot be read"

    async def _request(self, method: str, path: str, body: str = "", repeat: bool = False) -> bytes:
        deadline = time.monotonic() + PATIENCE_S
        why = "it is still starting"
        # A request without `repeat` is sent again only if it was not accepted. One that was sent but not answered may have been
        # carried out, and a fault, for example, must not be injected twice.
        while time.monotonic() < deadline:
            try:
                return await self._send(method, path, body)
            except RequestNotTaken as error:
                why = str(error)
            except (aiohttp.ClientError, TimeoutError) as error:
                why = str(error) or type(error).__name__
                if not repeat:
                    raise self._no_answer(why) from error
            await asyncio.sleep(RETRY_S)
        raise self._no_answer(why)

    async def _send(self, method: str, path: str, body: str) -> bytes:
        answer = await self._reach.send(method, path, body)
        # Only with this header: a coordinator that cannot write its ledger also answers 503, with a message for people.
        if answer.status == 503 and "Retry-After" in answer.headers:
            raise RequestNotTaken(answer.words)
        if answer.status >= 400:
            raise UsageError(answer.words)
        return answer.body

    def _no_answer(self, why: str) -> NoAnswer:
        return NoAnswer(f"the coordinator of the job {self._name!r} does not answer: {why}")

    async def watch(self, after: int = 0) -> AsyncIterator[Announcement]:
        """Announcements, across restarts of the coordinator, until the job has ended or is no longer running.

        after: number (`seq`) of the last event that the caller already has.
        """
        while await self._reach.is_running():
            # One for each connection, because the coordinator sends changes relative to what it has sent on that connection.
            view = ReceivedView(self._unreadable, UsageError)
            # Closed explicitly instead of by the garbage collector, because the coordinator sends to every connection that is
            # open.
            async with aclosing(self._reach.listen(after)) as messages:
                async for text in messages:
                    announcement = decode(_announcements.decode, text, self._unreadable, error=UsageError)
                    if announcement.kind == "event":
                        # The next connection asks for the events after this number, so that none is shown twice or missed.
                        seq = decode(_seq, announcement.value, self._unreadable, error=UsageError)
                        after = max(after, seq)
                    elif announcement.kind == WHOLE:
                        announcement = Announcement(WHOLE, view.whole(announcement.value))
                    elif announcement.kind == CHANGED:
                        if (now := view.changed(announcement.value)) is None:
                            continue
                        announcement = Announcement(WHOLE, now)
                    elif announcement.kind == "ended":
                        report = report_announced(announcement.value, self._unreadable, UsageError)
                        announcement = Announcement("ended", report)
                    yield announcement
                    if announcement.kind == "ended":
                        return
            # Polled, because there is no event for a coordinator that listens again.
            await asyncio.sleep(RETRY_S)
