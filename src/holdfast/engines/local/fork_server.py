"""The engine's side of `agent/fork_server.py`: agents as forks of one process that has imported everything."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

from holdfast.errors import HoldfastError
from holdfast.protocol.machine.processes import python_for_scripts


class AgentProcess:
    """An agent, held by its pidfd, so that another process that gets its pid is never signalled."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._ended)

    @property
    def alive(self) -> bool:
        """Whether it still runs, as far as is known."""
        return not self._gone.is_set()

    def signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self.alive:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                return

    async def wait(self) -> None:
        """Returns when it has ended."""
        await self._gone.wait()

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._gone.set()


class ForkServer:
    """Forks agents. Its process starts with the first one and ends with `close`, or with this process."""

    def __init__(self, preload: tuple[str, ...], workers: int) -> None:
        """preload: modules to import. workers: the job's number of workers, which all run on this machine."""
        self._preload = preload
        self._workers = workers
        self._process: AgentProcess | asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._turn = asyncio.Lock()

    async def fork(self, node: str, arguments: list[str], output: int, lifeline: int) -> AgentProcess:
        """Forks an agent.

        Args:
            output: file descriptor for what it prints.
            lifeline: a pipe that is closed when this process is gone.

        Raises:
            HoldfastError: the modules to preload cannot be imported.
        """
        request = "\n".join([node, *arguments]).encode()
        # One request at a time, because answers on the channel do not name their request.
        async with self._turn:
            for _ in range(2):  # a process that was killed is started again
                channel = self._channel or await self._start()
                try:
                    socket.send_fds(channel, [request], [output, lifeline])
                    answer, fds = await _receive(channel)
                except OSError:
                    answer = b""
                if answer:
                    return AgentProcess(int(answer), fds[0])
                # An empty answer means that the process is gone. Agents that it has forked continue to run.
                await self.close()
        raise HoldfastError(
            "the process that starts agents was killed twice; the machine may not have enough memory"
        )

    async def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = await self._spawn(theirs)
        theirs.close()
        ours.setblocking(False)
        if (await _receive(ours))[0] != b"ready":
            ours.close()
            raise HoldfastError(f"the modules of --preload {','.join(self._preload)} cannot be imported")
        self._channel = ours
        return ours

    async def _spawn(self, channel: socket.socket) -> AgentProcess | asyncio.subprocess.Process:
        """Starts the process with its end of the channel. A separate method, because tests fork this process as well."""
        env = dict(os.environ)
        if self._workers > 1:  # as torchrun does, since otherwise each would start a thread for every core
            env.setdefault("OMP_NUM_THREADS", "1")
        return await asyncio.create_subprocess_exec(
            *python_for_scripts("holdfast.agent.fork_server"),
            str(channel.fileno()),
            ",".join(self._preload),
            pass_fds=(channel.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )

    async def close(self) -> None:
        """Ends the process; agents continue to run."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            await self._process.wait()


async def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """The next packet and its file descriptors; both are empty if the other side is gone."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(channel, readable.set_result, None)
    try:
        await readable
    finally:
        loop.remove_reader(channel)
    packet, fds, _, _ = socket.recv_fds(channel, 4096, 1)
    return packet, fds
