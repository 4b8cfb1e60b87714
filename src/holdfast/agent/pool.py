"""Warm processes: asked of the zygote ahead of need, handed out in the moment of need."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass

from holdfast.agent.zygote import Zygote
from holdfast.protocol import messages as m
from holdfast.protocol.frames import Codec

_codec: Codec[m.WorkerMessage] = Codec(m.WorkerMessage)


@dataclass
class WarmProcess:
    """A forked process that waits for its Start, and our end of its socket and of its output."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class WarmPool:
    """Keeps `size` warm processes. `take` waits when there is none yet."""

    def __init__(self, size: int, preload: tuple[str, ...], zygote: Zygote | None = None) -> None:
        """zygote: one that is there already; else `start` makes one that imports `preload`."""
        self._size = size
        self._preload = preload
        self._forked = zygote
        self._ready: deque[WarmProcess] = deque()
        self._waiting: deque[asyncio.Future[WarmProcess]] = deque()
        self._zygote: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._forking: set[asyncio.Task[None]] = set()
        self._up = asyncio.Event()

    async def start(self) -> None:
        """Returns when there is a zygote that has imported everything."""
        ours = await self._spawn() if self._forked is None else self._forked.channel
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        if await loop.sock_recv(ours, 1) != b"r":
            raise RuntimeError(f"the modules of --preload {','.join(self._preload)} cannot be imported")
        self._channel = ours
        self._up.set()
        for _ in range(self._size):
            self._fork()

    async def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        env = dict(os.environ)
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; it also keeps the zygote free of threads
        self._zygote = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "holdfast.agent.zygote",
            str(theirs.fileno()),
            ",".join(self._preload),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            env=env,
            preexec_fn=_die_with_agent,
        )
        theirs.close()
        return ours

    async def take(self) -> WarmProcess:
        """A warm process; another one is forked to take its place in the pool."""
        await self._up.wait()
        self._fork()
        if self._ready:
            return self._ready.popleft()
        waiter: asyncio.Future[WarmProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        return await waiter

    def _fork(self) -> None:
        task = asyncio.create_task(self._fork_one())
        self._forking.add(task)
        task.add_done_callback(self._forking.discard)

    async def _fork_one(self) -> None:
        assert self._channel is not None
        ours, theirs = socket.socketpair()
        socket.send_fds(self._channel, [b"f"], [theirs.fileno()])
        theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        warm = await _codec.read_stream(reader)
        if not isinstance(warm, m.Warm):
            writer.close()
            return
        process = WarmProcess(warm.pid, reader, writer)
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(process)
                return
        self._ready.append(process)

    async def close(self) -> None:
        """Ends the zygote and the processes that nobody took."""
        if self._channel is not None:
            self._channel.close()
        for process in self._ready:
            process.writer.close()
        for task in list(self._forking):
            task.cancel()
        if self._zygote is not None and self._zygote.returncode is None:
            self._zygote.kill()
            await self._zygote.wait()
        if self._forked is not None:
            os.kill(self._forked.pid, signal.SIGKILL)
            await asyncio.to_thread(os.waitpid, self._forked.pid, 0)


def _die_with_agent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
