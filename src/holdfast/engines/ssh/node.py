"""`python -m holdfast.engines.ssh.node`: the launcher's process on a host, at the other end of ssh.

It checks the host, starts the agent in a session of its own, passes on the agent's output, and carries out the launcher's orders.
It ends with the ssh connection. The agent does not, but depends on its own connection to the coordinator.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.metadata
import os
import platform
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast import __version__
from holdfast.engines.ssh.words import (
    LINE_BYTES,
    OUTPUT_BYTES,
    AgentEnded,
    Begin,
    Begun,
    Check,
    Close,
    CoordinatorStarted,
    FromHost,
    Greeting,
    HostChecked,
    Kill,
    Output,
    RequestFailed,
    ToHost,
    from_host,
    read_order,
)
from holdfast.errors import Damaged, HoldfastError, UsageError
from holdfast.protocol.machine.processes import kernel_id, python_module
from holdfast.protocol.network.endpoint import write_endpoint
from holdfast.protocol.network.sockets import host_and_port
from holdfast.protocol.wire.stored import decode_file

REACH_S = 5.0


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a node's agent in the job's folder on its host."""

    start: str
    """Id of the launcher's start that started it."""
    pid: int
    began: int
    """When the process began, in clock ticks since the boot. Together with `kernel` it distinguishes processes with the same
    pid."""
    kernel: str


def greeting() -> Greeting:
    """The greeting for this environment and connection."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    # sshd sets it to CLIENT_IP CLIENT_PORT SERVER_IP SERVER_PORT.
    ends = os.environ.get("SSH_CONNECTION", "").split()
    return Greeting(
        version=__version__,
        python=".".join(platform.python_version_tuple()[:2]),
        torch=torch,
        boot=kernel_id().partition(" ")[0],
        client=ends[0] if len(ends) == 4 else "",
        server=ends[2] if len(ends) == 4 else "",
    )


def find_problems(asked: Check, shared: bool) -> list[str]:
    """Why the job cannot run on this host; each a sentence without the host's name. shared: see `HostChecked`."""
    from holdfast.engines.folders import find_environment_problems, find_tier_problem

    found = find_environment_problems(
        script=asked.script, module=asked.module, cwd=asked.cwd, preload=asked.preload, digest=asked.digest
    )
    own = Path(asked.home) / "jobs" / asked.job
    found += [why for url in asked.tiers if (why := find_tier_problem(url, own, shared, asked.nonce))]
    try:
        socket.create_connection(asked.coordinator, REACH_S).close()
    except OSError as error:
        where = host_and_port(*asked.coordinator)
        found.append(
            f"it cannot reach the coordinator at {where} ({error}); open that port (--port chooses it), or specify "
            "an address that it can reach with --address"
        )
    return found


_running = msgspec.json.Decoder(Running)


class HostSession:
    """The host's side of one connection."""

    def __init__(self, say: int) -> None:
        """say: file descriptor for messages to the launcher."""
        self._say_to = say
        self._folder = Path()
        self._shared = False
        self._start = ""
        self._pidfd = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._gone = asyncio.Event()
        self._over = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._memory = Path()
        self._out: Path | None = None
        self._seen = 0

    def say(self, message: FromHost) -> None:
        """Sends a message to the launcher. Blocks while the connection stalls, without effect on the agent, which writes to a
        file."""
        data = from_host(message)
        while data:
            data = data[os.write(self._say_to, data) :]

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Carries out orders until the connection or the agent ends."""
        self.say(greeting())
        reading = asyncio.create_task(self._read(reader))
        ending = asyncio.create_task(self._over.wait())
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()  # raises its error, if there was one
        if self._closing is not None:
            await self._closing
        if self._over.is_set():
            self._copy()
            self.say(AgentEnded(self._process.wait() if self._process is not None else None))
        reading.cancel()
        ending.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            order = read_order(line)
            try:
                if (answer := await self._carry_out(order)) is not None:
                    self.say(answer)
            except (HoldfastError, OSError) as error:
                self.say(RequestFailed(str(error)))

    async def _carry_out(self, order: ToHost) -> FromHost | None:
        match order:
            case Check():
                return await asyncio.to_thread(self._check, order)
            case Begin():
                await self._begin(order)
            case CoordinatorStarted(endpoint):
                if not self._shared:
                    write_endpoint(self._folder, endpoint)
            case Kill():
                self._signal(signal.SIGKILL)
            case Close(within_s, gives_back):
                self._closing = asyncio.create_task(self._close(within_s, gives_back))
        return None

    # ------------------------------------------------------------ before the start

    def _check(self, asked: Check) -> HostChecked:
        from holdfast.engines import jobs
        from holdfast.engines.folders import is_marked

        # The launcher's path is used here as well, so that hosts that share the folder use the same one.
        os.environ["HOLDFAST_HOME"] = asked.home
        self._folder = jobs.job_dir(asked.job)
        self._shared = is_marked(self._folder, asked.nonce)
        problems = find_problems(asked, self._shared)
        if not self._shared:
            if jobs.is_running(self._folder):
                problems.append(
                    f"a job named {asked.job!r} is already running on this host; choose another name with --job"
                )
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                jobs.check_own(self._folder)
            except UsageError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(
                    f"{self._folder} cannot be created ({error.strerror}); set HOLDFAST_HOME to another folder"
                )
        return HostChecked(self._shared, tuple(problems))

    # ------------------------------------------------------------ the agent

    async def _begin(self, order: Begin) -> None:
        from holdfast.engines import jobs

        self._start = order.start
        (self._folder / "hosts").mkdir(exist_ok=True, mode=0o700)
        # Two connections to one host may get here at the same time: an old one that is not known to be dead, and a new one. There
        # must never be more than one agent of a node.
        with (self._folder / "hosts" / f"{order.node}.lock").open("w") as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            found = self._find(order.node)
            # An agent of an earlier start holds the job's ports and its memory, and would join a coordinator that does not expect
            # it. So it is ended before the next one is started.
            if found is not None and (order.fresh or found.start != order.start):
                self._signal(signal.SIGKILL)
                await self._gone.wait()
                self._gone.clear()
                found = None
            if not self._shared:
                if found is None:
                    await asyncio.to_thread(self._prepare, order)
                if order.endpoint is not None:
                    write_endpoint(self._folder, order.endpoint)
            pid = found.pid if found is not None else self._spawn(order, jobs.memory_of(self._folder))
        self._out = self._folder / "logs" / "agents" / f"{order.node}.out"
        self._seen = order.seen
        self.say(Begun(pid, found is not None))
        self._follow()
        if self._gone.is_set():  # while it was being started
            self._over.set()

    def _prepare(self, order: Begin) -> None:
        from holdfast.engines.folders import prepare_folder

        prepare_folder(self._folder, order.spec, order.token, order.identity)

    def _spawn(self, order: Begin, memory: Path) -> int:
        from holdfast.engines.agents import agent_arguments

        logs = self._folder / "logs" / "agents"
        logs.mkdir(parents=True, exist_ok=True)
        self._memory = memory / order.node
        arguments = agent_arguments(self._folder, order.node, order.address, self._memory)
        arguments.append(f"--log-file={logs / order.node}.log")
        if order.shared_machine:
            arguments.append("--shared-machine")
        env = {**os.environ, **order.env}
        with (logs / f"{order.node}.out").open("ab") as out:
            self._process = subprocess.Popen(
                python_module("holdfast.agent", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=order.spec.cwd,
                env=env,
                # The agent must not end with the connection.
                start_new_session=True,
            )
        pid = self._process.pid
        self._watch(os.pidfd_open(pid))
        known = Running(start=order.start, pid=pid, began=_began(pid), kernel=kernel_id())
        # Written to a temporary file and renamed: half a file would be read as none, so that the next connection would start a
        # second agent.
        work = self._folder / "hosts" / f".{order.node}.json"
        work.write_bytes(msgspec.json.encode(known))
        work.replace(self._folder / "hosts" / f"{order.node}.json")
        return pid

    def _find(self, node: str) -> Running | None:
        """The agent of this node that runs here, held by its pidfd; None: there is none."""
        try:
            known = decode_file(_running.decode, self._folder / "hosts" / f"{node}.json")
            fd = os.pidfd_open(known.pid)
        except (OSError, Damaged, OverflowError):
            return None
        # Checked after the pidfd is open, so that the pid cannot be reused in between.
        if known.kernel != kernel_id() or _began(known.pid) != known.began:
            os.close(fd)
            return None
        self._watch(fd)
        return known

    def _watch(self, pidfd: int) -> None:
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._agent_gone)

    def _agent_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._gone.set()
        if self._out is not None:
            self._over.set()

    def _signal(self, number: int) -> None:
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def _close(self, within_s: float, gives_back: bool) -> None:
        # SIGTERM first, on which an agent that has lost its coordinator ends in order.
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(within_s):
                if self._pidfd >= 0:
                    await self._gone.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
        if gives_back:
            from holdfast.checkpoint.memory import remove_memory
            from holdfast.engines.jobs import memory_of

            await asyncio.to_thread(remove_memory, memory_of(self._folder))

    # ------------------------------------------------------------ its output

    def _follow(self) -> None:
        from holdfast.observe.inotify import Inotify

        assert self._out is not None
        self._inotify = Inotify(self._copy)
        self._inotify.watch(self._out)
        self._copy()

    def _copy(self) -> None:
        if self._out is None:
            return
        with self._out.open("rb") as out:
            out.seek(self._seen)
            while data := out.read(OUTPUT_BYTES):
                self._seen += len(data)
                self.say(Output(data))


def _began(pid: int) -> int:
    """When a process began, in clock ticks since the boot; 0: there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[19])


async def _serve() -> None:
    # Standard output is redirected to standard error, so that output of libraries does not mix with messages to the launcher.
    say = os.dup(1)
    os.dup2(2, 1)
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb", 0)
    )
    with suppress(BrokenPipeError, ConnectionResetError):
        await HostSession(say).serve(reader)


def main() -> None:
    """Serves one connection over standard input and output."""
    os.umask(0o077)
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
