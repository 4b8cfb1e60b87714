"""The local engine: every node is an agent process of this machine, on the loopback address."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from holdfast.agent.hooks import timeout_s
from holdfast.checkpoint.memory import hand_on, remove_memory
from holdfast.engines.agents import agent_arguments
from holdfast.engines.base import NodeProvider
from holdfast.engines.jobs import JobFolder
from holdfast.engines.launcher import Launcher
from holdfast.engines.local.fork_server import AgentProcess, ForkServer
from holdfast.engines.shown import View
from holdfast.protocol.engine_orders import EngineTraits, ReleaseNode
from holdfast.protocol.job import JobSpec
from holdfast.protocol.place import NodePlace

HOST = "127.0.0.1"
CLOSE_S = 5.0


class LocalProvider:
    """Starts agents and ends them. `output` gets what they print (rank 0's output among it)."""

    traits = EngineTraits()

    def __init__(self, spec: JobSpec, job_dir: Path, memory: Path, output: Callable[[bytes], None]) -> None:
        """memory: the folder of the job's snapshot memory; every node has a folder in it."""
        self._spec, self._job_dir, self._memory, self._output = spec, job_dir, memory, output
        # As in the launcher: the write end closes with this process, and every agent sees it.
        self._lifeline, self._held = os.pipe()
        self._fork_server = ForkServer(spec.preload, spec.target)
        self._agents: dict[str, AgentProcess] = {}
        self._reading: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._hooks_s = 2 * timeout_s() if spec.health.hooks else 0.0  # on-drain, then after-job
        self._racks: dict[str, NodePlace] = {}
        self._count = 0
        # Before any agent starts. A killed start left its snapshots under the names of its nodes, and this
        # start may have fewer.
        hand_on(memory, [f"node{i}" for i in range(spec.max_nodes + spec.spares)])

    async def provide(self) -> bool:
        """Starts one more agent."""
        self._count += 1
        await self._start(f"node{self._count - 1}")
        return True

    async def _start(self, name: str) -> None:
        rack = self._racks.get(name) or self._emptiest_rack()
        arguments = agent_arguments(self._job_dir, name, HOST, self._memory / name, rack)
        arguments.append("--shared-machine")
        # What an agent writes to its output is shown to the user, rank 0's own output among it: so only warnings go there.
        arguments.append(f"--log-file={self._job_dir / 'logs' / 'agents' / name}.log")
        ours, theirs = os.pipe()
        try:
            process = await self._fork_server.fork(name, arguments, theirs, self._lifeline)
        except BaseException:
            os.close(ours)
            raise
        finally:
            # This copy has to go, or the output of an agent that ended would never reach its end.
            os.close(theirs)
        self._agents[name], self._racks[name] = process, rack
        task = asyncio.create_task(self._read(process, ours))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    def _emptiest_rack(self) -> NodePlace:
        """Where the next node stands; empty when there are no racks."""
        # The emptiest by the nodes that live, so that a replacement goes where a node was lost.
        racks: list[NodePlace] = [(f"rack{i}",) for i in range(self._spec.racks)]
        living = [self._racks[n] for n, p in self._agents.items() if p.alive]
        return min(racks, key=living.count, default=())

    async def _read(self, process: AgentProcess, pipe: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0)
        )
        while data := await reader.read(65536):
            self._output(data)
        transport.close()
        await process.wait()

    async def release(self, order: ReleaseNode) -> None:
        """Kills the agent; the kernel then kills its workers. A machine that is lost takes its memory with it."""
        node = order.node
        process = self._agents.pop(node, None)
        if process is None:
            return
        if order.planned and self._hooks_s:
            # Others are not to wait for its last hook.
            task = asyncio.create_task(self._let_go(process, node))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        else:
            await self._end(process, node)

    async def _let_go(self, process: AgentProcess, node: str) -> None:
        """Waits for an agent that was told to leave: it ends when its hooks have ended."""
        try:
            async with asyncio.timeout(self._hooks_s):
                await process.wait()
        except TimeoutError:
            pass
        await self._end(process, node)

    async def _end(self, process: AgentProcess, node: str) -> None:
        process.signal(signal.SIGKILL)
        await process.wait()
        # A lost machine loses its memory. If the local engine left it, a test of the loss of a node would
        # prove nothing.
        await asyncio.to_thread(remove_memory, self._memory / node)

    async def mark(self, node: str, reason: str) -> None:
        """Nothing to tell: a node of this engine is only a process, and only a reboot uses its name again."""

    async def reboot(self, node: str, reason: str) -> None:
        """A new agent of the same name is the machine after its boot."""
        await self._start(node)

    async def close(self, gives_back: bool = True) -> None:
        """Ends what is left: first by asking, then by SIGKILL."""
        for process in self._agents.values():
            process.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(CLOSE_S + self._hooks_s):
                await asyncio.gather(*(p.wait() for p in self._agents.values()))
        except TimeoutError:
            for process in self._agents.values():
                process.signal(signal.SIGKILL)
        await asyncio.gather(*self._leaving)
        await asyncio.gather(*self._reading)
        await self._fork_server.close()
        if gives_back:
            await asyncio.to_thread(remove_memory, self._memory)
        os.close(self._held)
        os.close(self._lifeline)


class LocalLauncher(Launcher):
    """Runs one job on this machine. Ctrl-C once stops it in order, twice at once."""

    def __init__(self, spec: JobSpec, folder: JobFolder, view: View, port: int = 0) -> None:
        super().__init__(spec, folder.path, view, port)
        self._folder = folder
        # The coordinator holds the lock as well, so that a job whose launcher was killed still counts as
        # running.
        self.inherited = (folder.lock,)
        self.relock = folder.relock

    async def open(self) -> NodeProvider:
        """Prepares the job's folder."""
        resume = self._folder.prepare(self.spec, self.view.note)
        self.note_resume(resume)
        self.heed_signals()
        return LocalProvider(self.spec, self._folder.path, self._folder.memory, self.view.output)

    async def staff(self) -> None:
        """Starts an agent for every node."""
        assert self.engine is not None
        for _ in range(self.spec.max_nodes + self.spec.spares):
            await self.engine.provide()
