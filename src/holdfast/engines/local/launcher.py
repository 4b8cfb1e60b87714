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
    """Starts and ends agents on this machine."""

    traits = EngineTraits()

    def __init__(self, spec: JobSpec, job_dir: Path, memory: Path, output: Callable[[bytes], None]) -> None:
        """Takes over the snapshots that an earlier start has left.

        Args:
            memory: the folder of the job's snapshot memory, with a folder for every node.
            output: gets what agents print, including rank 0's output.
        """
        self._spec, self._job_dir, self._memory, self._output = spec, job_dir, memory, output
        # As in the launcher: the write end is closed when this process ends, which every agent notices.
        self._lifeline, self._held = os.pipe()
        self._fork_server = ForkServer(spec.preload, spec.target)
        self._agents: dict[str, AgentProcess] = {}
        self._reading: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._hooks_s = 2 * timeout_s() if spec.health.hooks else 0.0  # on-drain, then after-job
        self._racks: dict[str, NodePlace] = {}
        self._count = 0
        # Before any agent starts: a start that was killed has left its snapshots under the names of its nodes, and this start may
        # have fewer nodes.
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
        # An agent's output, which includes that of rank 0, is shown to the user. So its log goes to a file, and only warnings to
        # its output.
        arguments.append(f"--log-file={self._job_dir / 'logs' / 'agents' / name}.log")
        ours, theirs = os.pipe()
        try:
            process = await self._fork_server.fork(name, arguments, theirs, self._lifeline)
        except BaseException:
            os.close(ours)
            raise
        finally:
            # This copy must be closed, or the end of an agent's output would never be seen.
            os.close(theirs)
        self._agents[name], self._racks[name] = process, rack
        task = asyncio.create_task(self._read(process, ours))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    def _emptiest_rack(self) -> NodePlace:
        """The rack for the next node; empty if there are no racks."""
        # The one with the fewest living nodes, so that a replacement goes where a node was lost.
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
        """Kills the agent, upon which the kernel kills its workers, and removes the node's memory, as with a lost machine."""
        node = order.node
        process = self._agents.pop(node, None)
        if process is None:
            return
        if order.planned and self._hooks_s:
            # In the background, so that other orders do not wait for its last hook.
            task = asyncio.create_task(self._let_go(process, node))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        else:
            await self._end(process, node)

    async def _let_go(self, process: AgentProcess, node: str) -> None:
        """Waits for an agent that was told to leave, which ends after its hooks, and then ends it."""
        try:
            async with asyncio.timeout(self._hooks_s):
                await process.wait()
        except TimeoutError:
            pass
        await self._end(process, node)

    async def _end(self, process: AgentProcess, node: str) -> None:
        process.signal(signal.SIGKILL)
        await process.wait()
        # A lost machine loses its memory. If the local engine kept it, a test of the loss of a node would prove nothing.
        await asyncio.to_thread(remove_memory, self._memory / node)

    async def mark(self, node: str, reason: str) -> None:
        """Does nothing: a node of this engine is only a process, and only a reboot uses its name again."""

    async def reboot(self, node: str, reason: str) -> None:
        """Starts a new agent of the same name, as the machine after its boot."""
        await self._start(node)

    async def close(self, gives_back: bool = True) -> None:
        """Ends all agents: first with SIGTERM, after a timeout with SIGKILL."""
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
        # The coordinator holds the lock as well, so that a job whose launcher was killed still counts as running.
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
