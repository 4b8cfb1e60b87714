"""One connection to a host: the system's `ssh`, whose other end is `holdfast.engines.ssh.node`.

The user's ssh and not a library: keys, agents, jump hosts, certificates, hardware keys and every word of ~/.ssh/config are as
the user has them, and what works by hand works here.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from holdfast.engines.ssh.explain import failure
from holdfast.engines.ssh.words import (
    LINE_BYTES,
    FromHost,
    Greeting,
    RequestFailed,
    ToHost,
    read_answer,
    to_host,
)
from holdfast.errors import HoldfastError, ProtocolError

CONNECT_S = 10
GREETING_S = 60.0
"""A first import over a slow file system takes long; one that takes longer is said, and tried again."""
ANSWER_S = 60.0
FOREIGN_LINES = 200
"""So many lines may a shell's start-up files print."""
STDERR_BYTES = 8192
OPTIONS = (
    # A question would wait for ever: nobody sees it behind the live view.
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_S}",
    # A connection whose other end is gone must end, or nobody would make a new one.
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    # What a user's configuration may ask for interactive use, and what would keep ssh from running the command
    # or from ending with it.
    "RequestTTY=no",
    "RemoteCommand=none",
    "PermitLocalCommand=no",
    "ClearAllForwardings=yes",
    "ControlMaster=no",
    "ControlPersist=no",
    "ForkAfterAuthentication=no",
    "StdinNull=no",
)


class HostError(HoldfastError):
    """A host that cannot be used now; a sentence that names it."""


@dataclass(frozen=True)
class SshSettings:
    """How hosts are reached."""

    config: str
    """Path of ssh's configuration; empty: the user's own."""
    python: str
    """The interpreter's path on the hosts."""
    version: str
    """Holdfast's, which the hosts must have too."""


def ssh_command(host: str, reach: SshSettings) -> list[str]:
    """The command line. It has no secret: those go over its standard input."""
    config = ["-F", reach.config] if reach.config else []
    options = [part for option in OPTIONS for part in ("-o", option)]
    # -P as in `python_module`: the folder of the login is not looked into for modules.
    remote = shlex.join([reach.python, "-P", "-m", "holdfast.engines.ssh.node"])
    return ["ssh", *config, *options, "--", host, remote]


class Connection:
    """An open connection, whose greeting was read. `close` ends it; the agent lives on."""

    def __init__(self, host: str, process: asyncio.subprocess.Process, reach: SshSettings) -> None:
        self.host, self._process, self._reach = host, process, reach
        self.greeting: Greeting
        self._stderr = bytearray()
        self._draining = asyncio.create_task(self._drain())

    @classmethod
    async def open(cls, host: str, reach: SshSettings) -> Connection:
        """Connects and reads the greeting.

        Raises:
            HostError: the host cannot be used, and why.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *ssh_command(host, reach),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
                # Ctrl-C in the terminal is for the launcher, which ends the job in order over this connection.
                start_new_session=True,
            )
        except FileNotFoundError:
            raise HostError(f"{host}: `ssh` was not found on this machine; install the ssh client") from None
        made = cls(host, process, reach)
        try:
            async with asyncio.timeout(GREETING_S):
                made.greeting = await made._greeting()
        except TimeoutError:
            await made.close()
            raise HostError(
                f"{host}: no answer within {GREETING_S:g} s; does `ssh {host} {reach.python} -V` answer?"
            ) from None
        except BaseException:
            await made.close()
            raise
        return made

    async def _greeting(self) -> Greeting:
        # Bounded: a shell that prints for ever at login would hold a place among those that are connected,
        # and say nothing of the host.
        for _ in range(FOREIGN_LINES):
            try:
                line = await self._line()
            except HostError:
                break
            if line is None:
                break
            if (answer := self._read(line)) is not None:
                if isinstance(answer, Greeting):
                    return answer
                break
        else:
            raise HostError(
                f"{self.host}: its shell prints too much at a login without a terminal; remove that output from its "
                "start files"
            )
        await self.close()
        code, stderr = self._process.returncode, self._stderr.decode(errors="replace")
        raise HostError(failure(self.host, code, stderr, self._reach.python, self._reach.version))

    async def ask(self, order: ToHost) -> FromHost:
        """Sends an order; returns the next line of the host's. Only before `answers` is read.

        Raises:
            HostError: the host refuses, or the connection ended.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.send(order)
                while (line := await self._line()) is not None:
                    answer = self._read(line)
                    if isinstance(answer, RequestFailed):
                        raise HostError(f"{self.host}: {answer.why}")
                    if answer is not None:
                        return answer
        except TimeoutError:
            raise HostError(f"{self.host}: no answer within {ANSWER_S:g} s") from None
        raise HostError(f"{self.host}: the ssh connection ended")

    async def send(self, order: ToHost) -> None:
        """Raises HostError when the connection has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(to_host(order))
            await self._process.stdin.drain()
        except (OSError, RuntimeError):
            raise HostError(f"{self.host}: the ssh connection ended") from None

    async def answers(self) -> AsyncIterator[FromHost]:
        """What the host says, until the connection ends."""
        while True:
            try:
                line = await self._line()
                if line is None:
                    return
                answer = self._read(line)
            except HostError:
                return
            if answer is not None:
                yield answer

    async def _line(self) -> bytes | None:
        assert self._process.stdout is not None
        try:
            return await self._process.stdout.readline() or None
        except ValueError:  # longer than LINE_BYTES
            raise HostError(
                f"{self.host}: it sent a line of more than {LINE_BYTES} bytes; does its shell print something at login?"
            ) from None

    def _read(self, line: bytes) -> FromHost | None:
        try:
            return read_answer(line)
        except ProtocolError:
            raise HostError(
                f"{self.host}: it sent a message that cannot be decoded; install the same version of Holdfast there"
            ) from None

    async def _drain(self) -> None:
        """Keeps the end of what ssh prints, and reads the rest, so that ssh never waits for it."""
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._stderr += data
            del self._stderr[:-STDERR_BYTES]

    async def close(self) -> None:
        """Ends the connection. The process on the host sees the end of its input and leaves; its agent does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(1.0):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        # A ProxyCommand may hold stderr open after ssh itself is gone.
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._draining
