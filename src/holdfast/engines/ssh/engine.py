"""The ssh engine: an agent on each host, started over the user's own ssh and kept running. `hosts` decides; this acts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from holdfast.agent.hooks import timeout_s
from holdfast.engines.folders import Markers
from holdfast.engines.jobs import home
from holdfast.engines.ssh.addresses import Seen, bind_address, plain_address, why_apart
from holdfast.engines.ssh.connection import Connection, HostError, SshSettings
from holdfast.engines.ssh.explain import mismatch
from holdfast.engines.ssh.hosts import Hosts, HostStage
from holdfast.engines.ssh.node import greeting
from holdfast.engines.ssh.words import (
    AgentEnded,
    Begin,
    Begun,
    Check,
    Close,
    CoordinatorStarted,
    HostChecked,
    Kill,
    Output,
)
from holdfast.observe.inotify import Inotify
from holdfast.protocol.engine_orders import Availability, EngineTraits, NodeUnavailable, ReleaseNode
from holdfast.protocol.job import JobSpec
from holdfast.protocol.network.endpoint import read_endpoint
from holdfast.protocol.notices import NoticeCause
from holdfast.protocol.wire.stored import read_stored_word

CLOSE_S = 5.0
KILLED_S = 2.0
"""Seconds within which a reachable host reports that its agent has ended after it was told to kill it."""
TOGETHER = 32
"""Number of hosts to which connections are made at a time: each costs this machine a process and some cryptography."""
_IN_MOVED_TO = 0x80


class SshProvider:
    """The hosts of one job. Node names are the hosts' names."""

    traits = EngineTraits(nodes_are_machines=True)

    def __init__(
        self,
        spec: JobSpec,
        job_dir: Path,
        *,
        reach: SshSettings,
        env: dict[str, str],
        output: Callable[[bytes], None],
        note: Callable[[str], None],
        post: Callable[[Availability], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            reach: how the hosts are reached.
            env: variables for the agents.
            output: gets the output of rank 0.
            note: shows a message to the user.
            post: tells the coordinator about available nodes.
        """
        self._spec, self._job_dir, self._reach, self._env = spec, job_dir, reach, env
        self._output, self._note, self._post = output, note, post
        self._ssh = dict(zip(spec.ssh.names, spec.ssh.hosts, strict=True))
        self._hosts = Hosts(spec.ssh.names)
        self._surveyed: dict[str, Connection] = {}
        self._links: dict[str, Connection] = {}
        self._connecting = asyncio.Semaphore(TOGETHER)
        self._seen: dict[str, int] = dict.fromkeys(self._ssh, 0)
        self._last_told: dict[str, str] = {}
        self._start = secrets.token_hex(8)
        self._coordinator = ("", 0)
        self._identity = ""
        self._shared = False
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._managing: asyncio.Task[None] | None = None
        self._folder: Inotify | None = None
        self._closing = False
        self._hooks_s = 2 * timeout_s() if spec.health.hooks else 0.0  # on-drain, then after-job
        self._ours = greeting()
        self._digest = "" if spec.module else sha256(Path(spec.cwd, spec.script).read_bytes()).hexdigest()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # ------------------------------------------------------------ before the job starts

    async def survey(self) -> tuple[dict[str, Seen], dict[str, str]]:
        """Connects to all hosts; returns the addresses that each reachable host sees, and the problem of each other host."""
        problems: dict[str, str] = {}

        async def try_one(name: str) -> None:
            try:
                self._surveyed[name] = await self._connect(name)
            except HostError as error:
                problems[name] = str(error)

        await asyncio.gather(*(try_one(name) for name in self._ssh))
        return {name: self._ends(link) for name, link in self._surveyed.items()}, problems

    async def check(self, address: str, port: int) -> dict[str, str]:
        """Asks every connected host whether the job can run there; returns the problems by host, and disconnects those hosts.

        address, port: the coordinator's.
        """
        self._coordinator = (address, port)
        problems: dict[str, str] = {}

        async def try_one(name: str) -> None:
            try:
                await self._check(self._surveyed[name], marker)
            except HostError as error:
                problems[name] = str(error)
                await self._surveyed.pop(name).close()

        marker = secrets.token_hex(8)
        with Markers(self._spec, self._job_dir, marker):
            await asyncio.gather(*(try_one(name) for name in list(self._surveyed)))
        return problems

    async def _connect(self, name: str) -> Connection:
        async with self._connecting:
            link = await Connection.open(self._ssh[name], self._reach)
        # Checked here, so that this applies to hosts that are connected later as well.
        wrong = mismatch(name, link.greeting, self._ours, self._reach.python)
        if wrong is None and not self._ends(link).server:
            wrong = (
                f"{name}: ssh reaches it at {link.greeting.server or 'an unknown address'}, which only its neighbours can use; "
                "add `AddressFamily inet` to its entry in ~/.ssh/config"
            )
        if wrong is not None:
            await link.close()
            raise HostError(wrong)
        return link

    def _ends(self, link: Connection) -> Seen:
        return Seen(plain_address(link.greeting.client), plain_address(link.greeting.server))

    async def _check(self, link: Connection, marker: str) -> None:
        spec = self._spec
        if (apart := why_apart(self._ends(link), self._coordinator[0])) is not None:
            raise HostError(f"{link.host}: {apart}")
        answer = await link.ask(
            Check(
                home=str(home().absolute()),
                job=spec.name,
                nonce=marker,
                script=spec.script,
                module=spec.module,
                digest=self._digest,
                cwd=spec.cwd,
                preload=spec.preload,
                tiers=tuple(t.url for t in spec.saving.tiers),
                coordinator=self._coordinator,
            )
        )
        if not isinstance(answer, HostChecked):
            raise HostError(
                f"{link.host}: its answer belongs to another request; install the same version of Holdfast there"
            )
        if answer.problems:
            raise HostError(f"{link.host}: {'; '.join(answer.problems)}")

    # ------------------------------------------------------------ agents

    async def start(self, count: int, identity: str) -> None:
        """Starts agents on the first `count` hosts, preferring those that answered. identity: of the job's snapshot memory."""
        self._identity = identity
        self._folder = Inotify(self._pass_on_endpoint)
        self._folder.watch(self._job_dir, _IN_MOVED_TO)
        self._hosts.order(list(self._surveyed))
        self._hosts.use(count)
        self._managing = asyncio.create_task(self._manage())

    async def _manage(self) -> None:
        """Starts the connections that are due. Runs until cancelled."""
        while True:
            self._news.clear()
            for name in self._hosts.due(self._now()):
                self._spawn(self._keep(name), name)
            wake_s = self._hosts.wake_s()
            try:
                async with asyncio.timeout_at(wake_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _keep(self, name: str) -> None:
        """One connection to a host, from its beginning to its end."""
        link = None
        try:
            link = self._surveyed.pop(name, None)
            if link is None:
                link = await self._connect(name)
                # Random, because several hosts may be checked at the same time, each with markers of its own.
                marker = secrets.token_hex(8)
                with Markers(self._spec, self._job_dir, marker):
                    await self._check(link, marker)
            await self._begin(name, link)
        except (HostError, OSError) as error:
            self._tell(name, f"{error}; the connection is retried")
            self._hosts.failed(name, self._now())
            self._news.set()
            if link is not None:
                await link.close()
            return
        self._last_told.pop(name, None)
        try:
            await self._listen(name, link)
        finally:
            self._links.pop(name, None)
            # This has no effect if the host has reported the end of its agent.
            self._hosts.cut(name, self._now())
            self._news.set()
            await link.close()

    async def _begin(self, name: str, link: Connection) -> None:
        host = self._hosts.all[name]
        if why := self._hosts.greeted(name, link.greeting.boot):
            raise HostError(f"{name}: {why}")
        running = host.stage is HostStage.RUNNING
        answer = await link.ask(
            Begin(
                spec=self._spec,
                token=read_stored_word(self._job_dir / "token"),
                identity=self._identity,
                start=self._start,
                node=name,
                address=bind_address(self._ends(link), self._coordinator[0]),
                endpoint=read_endpoint(self._job_dir),
                env=self._env,
                fresh=host.fresh,
                seen=self._seen[name],
                shared_machine=self._shares(name, link.greeting.boot),
            )
        )
        if not isinstance(answer, Begun):
            raise HostError(
                f"{name}: its answer belongs to another request; install the same version of Holdfast there"
            )
        if not self._hosts.begun(name):
            await link.send(Kill())
        elif running and answer.attached:
            self._note(f"connected to {name} again; its agent kept running")
        self._links[name] = link
        # In case a coordinator has written a new one since the file was read above.
        self._pass_on_endpoint()

    def _shares(self, name: str, boot: str) -> bool:
        """Whether another host is the same machine."""
        return any(h.boot == boot for h in self._hosts.all.values() if h.name != name)

    async def _listen(self, name: str, link: Connection) -> None:
        async for answer in link.answers():
            if isinstance(answer, Output):
                self._seen[name] += len(answer.data)
                self._output(answer.data)
            elif isinstance(answer, AgentEnded):
                if not self._closing and self._hosts.all[name].stage is HostStage.RUNNING:
                    code = "" if answer.code is None else f" with exit code {answer.code}"
                    self._note(f"the agent of {name} ended{code}; its host is connected again")
                self._hosts.ended(name, self._now())
                return

    def _tell(self, name: str, text: str) -> None:
        # Only once in a row: a host that stays unreachable for a night would otherwise fill the screen.
        if self._last_told.get(name) != text:
            self._last_told[name] = text
            self._note(text)

    def _pass_on_endpoint(self) -> None:
        """Sends the coordinator's address to the hosts, so that agents that do not share the folder connect to a new
        coordinator."""
        endpoint = read_endpoint(self._job_dir)
        if endpoint is not None:
            for name in list(self._links):
                self._spawn(self._send(name, CoordinatorStarted(endpoint)))

    async def _send(self, name: str, order: CoordinatorStarted | Kill | Close) -> bool:
        """Sends an order to a host, if it is connected. Returns whether it was sent."""
        link = self._links.get(name)
        if link is None:
            return False
        try:
            await link.send(order)
        except HostError:
            return False  # it is sent again on a new connection
        return True

    # ------------------------------------------------------------ see Engine

    async def provide(self) -> bool:
        """Starts an agent on a host of the reserve. Hosts that were lost are tried again independently of this."""
        why = self._hosts.provide(self._now())
        if why:
            self._post(NodeUnavailable(why))
            return False
        self._news.set()
        return True

    async def release(self, order: ReleaseNode) -> None:
        """Ends the agent, if its host can be reached. Otherwise the agent ends by itself or is rejected by the coordinator, or a
        new connection ends it."""
        node = order.node
        if order.planned:
            # If it was drained for another reason than a resize, only a person brings it back.
            self._hosts.left(node, returns=order.cause is NoticeCause.RESIZE)
            self._spawn(self._end_after_hooks(node))
        else:
            self._hosts.lost(node, self._now())
            self._spawn(self._end(node))
        self._news.set()

    async def _end(self, node: str) -> None:
        """Ends the agent of a lost node. If the host does not do so at once its connection is closed, so that it can be tried
        again."""
        link = self._links.get(node)
        if link is not None and await self._send(node, Kill()):
            await asyncio.sleep(KILLED_S)
            # Only if it is still the same connection: a host that came back in the meantime has a new one.
            if self._links.get(node) is link:
                await link.close()

    async def _end_after_hooks(self, node: str) -> None:
        await asyncio.sleep(CLOSE_S + self._hooks_s)
        host = self._hosts.all.get(node)
        if host is not None and host.stage in (HostStage.LEFT, HostStage.BAD):
            await self._send(node, Kill())

    async def mark(self, node: str, reason: str) -> None:
        """Stops using the host. Nothing else is told: without a scheduler there is nothing that manages the hosts."""
        self._hosts.bad(node)
        self._note(f"{node} is not used any more: {reason}")

    async def reboot(self, node: str, reason: str) -> None:
        """Asks the user to reboot the host, since ssh may not have the permission. The host is used again after the reboot."""
        self._hosts.reboot(node, self._now())
        self._note(f"reboot {node} ({reason}): it then joins the job again without further action")
        self._news.set()

    def on_event(self, kind: str, node: str) -> None:
        """Takes an event of the job, of which nodes that join and the job's end matter."""
        if kind == "node-joined":
            self._hosts.joined(node, self._now())
        elif kind == "ended":
            # The agents end with the job, and must not be started again.
            self._closing = True
            if self._managing is not None:
                self._managing.cancel()

    # ------------------------------------------------------------ the end

    async def close(self, gives_back: bool = True) -> None:
        """Ends every agent that can be reached. The others end when the coordinator tells them to, or without it after
        `orphan_s`."""
        self._closing = True
        if self._managing is not None:
            self._managing.cancel()
        if self._folder is not None:
            self._folder.close()
        within_s = CLOSE_S + self._hooks_s
        for name in list(self._links):
            await self._send(name, Close(within_s, gives_back))
        # Each of these tasks ends when its host reports the end of the agent, or with the connection. Attempts to connect are
        # just cancelled.
        listening = [t for t in self._tasks if t.get_name() in self._links]
        if listening:
            await asyncio.wait(listening, timeout=within_s + 2.0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._surveyed.values():  # connections to unused hosts
            await link.close()

    def _spawn(self, coroutine: object, name: str = "") -> None:
        assert asyncio.iscoroutine(coroutine)
        task: asyncio.Task[None] = asyncio.create_task(coroutine, name=name or None)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def environment_of(names: tuple[str, ...], here: dict[str, str]) -> dict[str, str]:
    """The variables of `--env` with their values in this environment; variables that are not set are left out."""
    return {name: here[name] for name in names if name in here}
