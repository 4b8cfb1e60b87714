"""Warm processes: forked by the zygote ahead of need, and handed out when a worker has to start."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections import deque
from dataclasses import dataclass

import msgspec

from holdfast.agent.zygote import Zygote
from holdfast.errors import ProtocolError
from holdfast.protocol import messages as m
from holdfast.protocol.machine.processes import available_bytes, python_for_scripts
from holdfast.protocol.wire.frames import Codec, pack

_log = logging.getLogger(__name__)
_codec: Codec[m.WorkerMessage] = Codec(m.WorkerMessage)
TRIES = 3
LEAST_FREE_BYTES = 2 << 30
"""Of the machine's memory, below which nothing is imported ahead: it is the workers'. A Trainer's imports take 0.2 GB
in each process."""


@dataclass
class WarmProcess:
    """A forked process that waits for its Start, and our end of its socket and of its output."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class WarmPool:
    """Keeps `size` warm processes. `take` waits when there is none yet.

    Once `learn` has said what the script imports, it also keeps `size` processes that have imported it. They are
    made one at a time and only while nobody starts: training goes on in parallel. `take` never waits for one.
    """

    def __init__(
        self, size: int, preload: tuple[str, ...], zygote: Zygote | None = None, shares: bool = False
    ) -> None:
        """zygote: one that is there already; else `start` makes one that imports `preload`. shares: other agents' workers run
        on this machine, too."""
        self._size = size
        self._preload = preload
        self._forked = zygote
        self._shares = shares
        self._ready: deque[WarmProcess] = deque()
        self._waiting: deque[asyncio.Future[WarmProcess]] = deque()
        self._zygote: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._forking: set[asyncio.Task[None]] = set()
        self._up = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._broken: Exception | None = None
        self._lost = 0
        self._order: m.Preload | None = None
        self._imported: deque[WarmProcess] = deque()
        self._importing: asyncio.Task[None] | None = None
        self._without: set[str] = set()
        self._failed = 0

    async def start(self) -> None:
        """Returns when there is a zygote that has imported everything."""
        # With a fork server the zygote was forked before this process had any threads. A fork later would
        # copy locks that a thread of the agent holds, and nobody would release them in the child.
        await self._open(await self._spawn() if self._forked is None else self._forked.channel)
        self._keeping = asyncio.create_task(self._keep())
        for _ in range(self._size):
            self._fork()

    async def _open(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        if await loop.sock_recv(ours, 1) != b"r":
            raise RuntimeError(f"the modules of --preload {','.join(self._preload)} cannot be imported")
        self._channel = ours
        self._up.set()

    async def _keep(self) -> None:
        """A zygote that was ended, as where memory is short, is replaced; or else nobody who waits for a process would
        ever get one, nor hear that there is none."""
        try:
            while True:
                await self._ended()
                _log.warning("the fork server ended; starting it again")
                await self._open(await self._spawn())
                # Requests that were on their way to the old process are lost with it. Each waiter needs one,
                # and the pool is filled up again.
                for _ in range(len(self._waiting) + max(0, self._size - len(self._ready))):
                    self._fork()
        except Exception as error:  # noqa: BLE001 - whoever waits hears it, and says so
            _log.error("workers can no longer be started on this node: %s", error, exc_info=error)
            # Set before the event: whoever wakes up from `take` must see it, and not wait for a process that
            # never comes.
            self._broken = error
            self._up.set()
            while self._waiting:
                self._fail(error)

    async def _ended(self) -> None:
        """Waits for the zygote's end: then it closes its end of the channel, on which it says nothing more."""
        assert self._channel is not None
        try:
            await asyncio.get_running_loop().sock_recv(self._channel, 1)
        except ConnectionError:
            pass
        # First of all, so that a `take` from here on waits for the next process instead of using a closed
        # channel.
        self._up.clear()
        self._channel.close()
        self._channel = None
        if self._forked is not None:
            # Reaped here, since it is a child of this process. On a thread: it may be a zombie only a moment
            # later.
            forked, self._forked = self._forked, None
            await asyncio.to_thread(os.waitpid, forked.pid, 0)
        if self._zygote is not None:
            await self._zygote.wait()

    def _fail(self, error: Exception) -> None:
        """Whoever waits longest gets no process."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(
                    RuntimeError(f"the process from which workers are started failed: {error}")
                )
                return

    async def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        env = dict(os.environ)
        # As torchrun: each of several would else start a thread for every core. Where it is not set, numpy's OpenBLAS has threads
        # in the zygote, and ends them itself before a fork.
        if self._size > 1 or self._shares:
            env.setdefault("OMP_NUM_THREADS", "1")
        try:
            self._zygote = await asyncio.create_subprocess_exec(
                *python_for_scripts("holdfast.agent.zygote"),
                str(theirs.fileno()),
                ",".join(self._preload),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=env,
                preexec_fn=_die_with_agent,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    async def take(self) -> WarmProcess:
        """A warm process; another one is forked to take its place in the pool.

        Raises:
            RuntimeError: none can be had.
        """
        # A worker that is asked for during a restart of the zygote waits here, and its order does not fail.
        await self._up.wait()
        if self._broken is not None and not self._ready and not self._imported:
            raise RuntimeError(f"the process from which workers are started failed: {self._broken}")
        while self._imported:
            process = self._imported.popleft()
            # It may have been ended while it waited, as where memory became short.
            if not process.reader.at_eof():
                return process
            process.writer.close()
        return await self._take_plain()

    async def _take_plain(self) -> WarmProcess:
        self._fork()
        if self._ready:
            return self._ready.popleft()
        waiter: asyncio.Future[WarmProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        return await waiter

    # ------------------------------------------------------------ what the script imports

    def learn(self, order: m.Preload) -> None:
        """From now on idle processes import this ahead."""
        # Who asks for no modules in advance (`--preload ""`) gets none of these either.
        if not any(self._preload) or order == self._order:
            return
        before, self._order, self._failed = self._order, order, 0
        # A module that they have imported may have read a variable of which nobody knew that it matters. Where only
        # modules were added, they have most of them.
        if before is not None and not set(order.variables) <= set(before.variables):
            while self._imported:
                self._imported.popleft().writer.close()
        self.import_ahead()

    def import_ahead(self) -> None:
        """Fills up the processes that have imported what the script needs. Called when no start is under way."""
        if self._order is not None and (self._importing is None or self._importing.done()):
            self._importing = asyncio.create_task(self._import_ahead())

    async def _import_ahead(self) -> None:
        try:
            while len(self._imported) < self._size and self._failed < TRIES:
                free = available_bytes()
                if free is not None and free < LEAST_FREE_BYTES:
                    _log.info(
                        "no modules are imported in advance, because little memory is free",
                        extra={"bytes": free},
                    )
                    return
                await self._import_one()
        except (OSError, RuntimeError) as error:
            # Whoever needs a process asks for one himself, and hears this error then.
            _log.info("no modules are imported in advance: %s", error)

    async def _import_one(self) -> None:
        order = self._order
        assert order is not None
        modules = tuple(x for x in order.modules if x.partition(".")[0] not in self._without)
        process = await self._take_plain()
        answer = None
        try:
            process.writer.write(pack(msgspec.structs.replace(order, modules=modules)))
            answer = await _codec.read_stream(process.reader)
        except (OSError, ProtocolError):
            pass  # as below: it has ended
        finally:
            # Whether another order came meanwhile whose variables this process was not asked about.
            stale = not set(self._order.variables) <= set(order.variables) if self._order else False
            fit = isinstance(answer, m.Preloaded) and not answer.without and not stale
            if fit:
                self._imported.append(process)
                _log.info("imported ahead", extra={"pid": process.pid, "modules": len(modules)})
            else:
                process.writer.close()
        if fit or stale:
            return
        self._failed += 1
        if isinstance(answer, m.Preloaded):
            self._without |= set(answer.without)
            _log.info("modules not imported in advance: %s (%s)", ", ".join(answer.without), answer.reason)
        else:
            _log.info("a warm process ended while it imported modules", extra={"pid": process.pid})

    def _fork(self) -> None:
        task = asyncio.create_task(self._fork_one())
        self._forking.add(task)
        task.add_done_callback(self._forking.discard)

    async def _fork_one(self) -> None:
        try:
            warm = await self._ask_for_one()
        except OSError as error:  # as where there are no descriptors left
            self._fail(error)
            return
        if warm is None:
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(warm)
                return
        self._ready.append(warm)

    async def _ask_for_one(self) -> WarmProcess | None:
        """None: the zygote has ended; the next one forks for all who wait then."""
        while self._channel is not None:
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    # The request is one byte with one end of a socket pair attached, so requests cannot be
                    # mixed up: each answer comes by its own socket.
                    socket.send_fds(self._channel, [b"f"], [theirs.fileno()])
                except OSError as error:
                    ours.close()
                    if isinstance(error, ConnectionError):
                        return None
                    raise
            try:
                reader, writer = await asyncio.open_unix_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
            try:
                warm = await _codec.read_stream(reader)
            except BaseException:
                writer.close()
                raise
            if isinstance(warm, m.Warm):
                self._lost = 0
                return WarmProcess(warm.pid, reader, writer)
            writer.close()
            self._lost += 1
            if self._lost % TRIES == 0 and self._channel is not None:
                raise ChildProcessError(f"{TRIES} forked processes ended immediately")
        return None

    async def close(self) -> None:
        """Ends the zygote and the processes that nobody took."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self._channel is not None:
            self._channel.close()
        forking = list(self._forking)
        for task in forking:
            task.cancel()
        await asyncio.gather(*forking, return_exceptions=True)
        if self._importing is not None:
            self._importing.cancel()
            await asyncio.wait([self._importing])
        for process in (*self._ready, *self._imported):
            process.writer.close()
            await process.writer.wait_closed()
        if self._zygote is not None and self._zygote.returncode is None:
            self._zygote.kill()
            await self._zygote.wait()
        if self._forked is not None:
            os.kill(self._forked.pid, signal.SIGKILL)
            await asyncio.to_thread(os.waitpid, self._forked.pid, 0)


def _die_with_agent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
