"""One connection to a host: the system's `ssh`, whose other end is `holdfast.engines.ssh.node`.

This uses the user's ssh instead of a library, so that keys, agents, jump hosts, certificates, hardware keys and everything in
~/.ssh/config apply, and what works by hand works here.
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
"""Seconds until the greeting, since a first import over a slow file system takes long. After that the host is reported and tried
again."""
ANSWER_S = 60.0
FOREIGN_LINES = 200
"""Number of lines that a shell's start-up files may print."""
STDERR_BYTES = 8192
OPTIONS = (
    # A prompt would wait for ever, since it is not visible behind the live view.
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_S}",
    # A connection whose other end is gone must end, so that a new one is made.
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    # Settings that a user's configuration may have for interactive use, and with which ssh would not run the command or would not
    # end with it.
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
    """A host cannot be used now. The message names it."""


@dataclass(frozen=True)
class SshSettings:
    """How hosts are reached."""

    config: str
    """Path of ssh's configuration; empty: the user's own."""
    python: str
    """Path of the Python interpreter on the hosts."""
    version: str
    """Version of Holdfast, which the hosts must have as well."""


def ssh_command(host: str, reach: SshSettings) -> list[str]:
    """The command line of ssh. It has no secrets, which are sent over its standard input."""
    config = ["-F", reach.config] if reach.config else []
    options = [part for option in OPTIONS for part in ("-o", option)]
    # -P as in `python_module`, so that modules are not imported from the login's folder.
    remote = shlex.join([reach.python, "-P", "-m", "holdfast.engines.ssh.node"])
    return ["ssh", *config, *options, "--", host, remote]


class Connection:
    """An open connection whose greeting has been read. `close` ends it; the agent continues to run."""

    def __init__(self, host: str, process: asyncio.subprocess.Process, reach: SshSettings) -> None:
        self.host, self._process, self._reach = host, process, reach
        self.greeting: Greeting
        self._stderr = bytearray()
        self._draining = asyncio.create_task(self._drain())

    @classmethod
    async def open(cls, host: str, reach: SshSettings) -> Connection:
        """Connects and reads the greeting.

        Raises:
            HostError: the host cannot be used, with the reason.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *ssh_command(host, reach),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
                # Ctrl-C in the terminal must reach only the launcher, which ends the job in order over this connection.
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
        # Bounded, because a shell that prints without end at login would occupy one of the limited number of connection attempts,
        # and the user would not be told why.
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
        """Sends an order; returns the host's next message. Must not be called once `answers` is being read.

        Raises:
            HostError: the host refuses, does not answer in time, or the connection ended.
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
        """Sends an order. Raises HostError if the connection has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(to_host(order))
            await self._process.stdin.drain()
        except (OSError, RuntimeError):
            raise HostError(f"{self.host}: the ssh connection ended") from None

    async def answers(self) -> AsyncIterator[FromHost]:
        """The host's messages, until the connection ends."""
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
        """Reads ssh's standard error, so that ssh never blocks on it, and keeps the end of it."""
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._stderr += data
            del self._stderr[:-STDERR_BYTES]

    async def close(self) -> None:
        """Ends the connection. The process on the host ends with its input; the agent continues to run."""
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
