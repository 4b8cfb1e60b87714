"""How a node finds its job's coordinator: in the job's folder, or at an address that it was given."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec

from holdfast.errors import Damaged, UsageError
from holdfast.protocol.network.endpoint import (
    NAME_PATH,
    CoordinatorName,
    Endpoint,
    Whereabouts,
    read_endpoint,
)
from holdfast.protocol.network.sockets import host_and_port
from holdfast.protocol.wire.decoding import decode

ASK_S = 2.0
"""How long whoever listens at the address may take to say its name."""
NAME_S = 0.3
"""How long the name may take to lead to a coordinator, where another address is known."""
MAX_ADDRESSES = 8
"""Of one name. A name service answers with two while one coordinator takes another's place."""
_MAX_ANSWER_BYTES = 1024
_names = msgspec.json.Decoder(CoordinatorName)


class Lookup(Protocol):
    """Finds the newest coordinator of one job, as far as it can be known."""

    async def find(self) -> Endpoint | None:
        """The address; None while there is none. It is not verified here: see `protocol.network.http_client`."""
        ...

    def told(self, where: Whereabouts) -> None:
        """It may be there, too."""
        ...


class FolderLookup:
    """In a folder that the coordinator can write and this node can read."""

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir

    async def find(self) -> Endpoint | None:
        """See `Lookup`."""
        return read_endpoint(self._job_dir)

    def told(self, where: Whereabouts) -> None:
        """See `Lookup`. The folder says it, without delay."""


class AddressLookup:
    """At HOST:PORT. Where the host's name has several addresses, the coordinator of the latest term counts."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._told: Whereabouts | None = None
        self._news = asyncio.Event()
        self._naming: asyncio.Task[Endpoint | None] | None = None

    def told(self, where: Whereabouts) -> None:
        """See `Lookup`. Of several that were told the latest term counts."""
        if self._told is None or where.term >= self._told.term:
            self._told = where
            self._news.set()

    async def find(self) -> Endpoint | None:
        """See `Lookup`. The name is resolved anew each time, since a coordinator may come back on another machine."""
        # One question at a time: the name service may take many seconds to give no answer, each in a thread of its own.
        if self._naming is None or self._naming.done():
            self._naming = asyncio.create_task(self._named())
        naming = self._naming
        if self._told is None:
            await self._either(naming)
        other = None
        if (told := self._told) is not None:
            other = await self._told_of(told, naming)
            # The name may still lead to a machine that is gone, whose answer would be waited for.
            await asyncio.wait((naming,), timeout=NAME_S)
        named = naming.result() if naming.done() else None
        # The address may be another job's by now. There it would be asked in vain, so the name is believed first.
        return other if named is None or (other is not None and other.term > named.term) else named

    async def _either(self, naming: asyncio.Task[Endpoint | None]) -> None:
        """Until the name has led somewhere, or somebody tells of an address."""
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait((naming, news), return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()

    async def _named(self) -> Endpoint | None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError:
            return None
        hosts = list(dict.fromkeys(str(address[4][0]) for address in found))[:MAX_ADDRESSES]
        answers = await asyncio.gather(*(self._ask(host) for host in hosts))
        return max((x for x in answers if x is not None), key=lambda x: x.term, default=None)

    async def _told_of(self, where: Whereabouts, naming: asyncio.Task[Endpoint | None]) -> Endpoint | None:
        """Who is there, if the name does not lead to one of the same or a later term before."""
        asking = asyncio.create_task(self._ask(where.address))
        try:
            await asyncio.wait((naming, asking), return_when=asyncio.FIRST_COMPLETED)
            if naming.done() and (named := naming.result()) is not None and named.term >= where.term:
                return None
            found = await asking
        finally:
            asking.cancel()
        return found if found is not None and found.term == where.term else None

    async def _ask(self, host: str) -> Endpoint | None:
        where = host_and_port(host, self._port)
        limit = aiohttp.ClientTimeout(total=ASK_S)
        with suppress(aiohttp.ClientError, OSError, TimeoutError, Damaged):
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.get(f"http://{where}{NAME_PATH}", allow_redirects=False) as answer,
            ):
                # Whoever says no length could go on for ever.
                if not 0 < (answer.content_length or 0) <= _MAX_ANSWER_BYTES:
                    return None
                said = decode(_names.decode, await answer.read(), "its name")
                # The address is in the name, so whoever listens here can only have said its own: see `Endpoint.dialled`.
                return Endpoint(
                    host=host,
                    port=self._port,
                    pid=0,
                    instance=said.instance,
                    term=said.term,
                    dialled=where,
                )
        return None


def parse_address(text: str, option: str) -> AddressLookup:
    """Reads HOST:PORT, as `option` was given.

    Raises:
        UsageError: it is none.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{option} must be HOST:PORT (got {text!r}), for example node0:29400")
    return AddressLookup(host.removeprefix("[").removesuffix("]"), int(port))
