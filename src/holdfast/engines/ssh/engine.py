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
"""A host that is there says within this time that its agent has ended."""
TOGETHER = 32
"""Hosts that are connected at a time: each connection costs this machine a process and some cryptography."""
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
        """env: variables for the agents. output: gets what rank 0 prints. post: tells the coordinator about capacity."""
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
        """Connects all hosts; returns what each that answers sees, and what is wrong with each other one."""
        problems: dict[str, str] = {}

        async def try_one(name: str) -> None:
            try:
                self._surveyed[name] = await self._connect(name)
            except HostError as error:
                problems[name] = str(error)

        await asyncio.gather(*(try_one(name) for name in self._ssh))
        return {name: self._ends(link) for name, link in self._surveyed.items()}, problems

    async def check(self, address: str, port: int) -> dict[str, str]:
        """Asks every connected host whether the job can run there; returns what is wrong, and lets go of those hosts."""
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
        # `mismatch` and the addresses are judged here and for a host that comes later alike.
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
        """Starts agents on the first `count` hosts, those that answered before others. identity: of the job's memory."""
        self._identity = identity
        self._folder = Inotify(self._pass_on_endpoint)
        self._folder.watch(self._job_dir, _IN_MOVED_TO)
        self._hosts.order(list(self._surveyed))
        self._hosts.use(count)
        self._managing = asyncio.create_task(self._manage())

    async def _manage(self) -> None:
        """Connects whatever is due."""
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
                # Random: several hosts may be checked at once, each with files of its own.
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
            # Nothing if the host said that its agent has ended.
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
        # One that a coordinator wrote between the reading of the file and this line.
        self._pass_on_endpoint()

    def _shares(self, name: str, boot: str) -> bool:
        """Whether another one of the hosts is the same machine."""
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
        # A host that stays away for a night would else fill the screen.
        if self._last_told.get(name) != text:
            self._last_told[name] = text
            self._note(text)

    def _pass_on_endpoint(self) -> None:
        """To hosts that do not share the folder: the agents there connect to the new coordinator."""
        endpoint = read_endpoint(self._job_dir)
        if endpoint is not None:
            for name in list(self._links):
                self._spawn(self._send(name, CoordinatorStarted(endpoint)))

    async def _send(self, name: str, order: CoordinatorStarted | Kill | Close) -> bool:
        """Whether it could be sent."""
        link = self._links.get(name)
        if link is None:
            return False
        try:
            await link.send(order)
        except HostError:
            return False  # a new connection says it again
        return True

    # ------------------------------------------------------------ see Engine

    async def provide(self) -> bool:
        """Starts an agent on a host of the reserve. Hosts that were lost are tried again in any case."""
        why = self._hosts.provide(self._now())
        if why:
            self._post(NodeUnavailable(why))
            return False
        self._news.set()
        return True

    async def release(self, order: ReleaseNode) -> None:
        """Ends what runs there, where the host can be reached. Where not, its agent ends by itself, or is turned away by
        the coordinator; a new connection ends it too."""
        node = order.node
        if order.planned:
            # One that was drained for another reason is somebody's to bring back.
            self._hosts.left(node, returns=order.cause is NoticeCause.RESIZE)
            self._spawn(self._end_after_hooks(node))
        else:
            self._hosts.lost(node, self._now())
            self._spawn(self._end(node))
        self._news.set()

    async def _end(self, node: str) -> None:
        """Ends the agent of a lost node. A host that does not do it at once is cut off, so that it can be tried again."""
        link = self._links.get(node)
        if link is not None and await self._send(node, Kill()):
            await asyncio.sleep(KILLED_S)
            # Still the same connection: a host that came back meanwhile has a new one, which is not to be
            # cut.
            if self._links.get(node) is link:
                await link.close()

    async def _end_after_hooks(self, node: str) -> None:
        await asyncio.sleep(CLOSE_S + self._hooks_s)
        host = self._hosts.all.get(node)
        if host is not None and host.stage in (HostStage.LEFT, HostStage.BAD):
            await self._send(node, Kill())

    async def mark(self, node: str, reason: str) -> None:
        """The job does not use the host any more. Nobody else is told: hosts without a scheduler have no owner to tell."""
        self._hosts.bad(node)
        self._note(f"{node} is not used any more: {reason}")

    async def reboot(self, node: str, reason: str) -> None:
        """A person has to: ssh gives no right to it. The host is used again once it was rebooted."""
        self._hosts.reboot(node, self._now())
        self._note(f"reboot {node} ({reason}): it then joins the job again without further action")
        self._news.set()

    def on_event(self, kind: str, node: str) -> None:
        """An event of the job that says which nodes are in it, or that it has ended."""
        if kind == "node-joined":
            self._hosts.joined(node, self._now())
        elif kind == "ended":
            # The agents end with the job, and nobody is to start them again.
            self._closing = True
            if self._managing is not None:
                self._managing.cancel()

    # ------------------------------------------------------------ the end

    async def close(self, gives_back: bool = True) -> None:
        """Ends every agent that can be reached. The others end by the coordinator's word, or without one after `orphan_s`."""
        self._closing = True
        if self._managing is not None:
            self._managing.cancel()
        if self._folder is not None:
            self._folder.close()
        within_s = CLOSE_S + self._hooks_s
        for name in list(self._links):
            await self._send(name, Close(within_s, gives_back))
        # Each task ends when its host says that the agent has, or with the connection. Attempts to connect have
        # nothing to end.
        listening = [t for t in self._tasks if t.get_name() in self._links]
        if listening:
            await asyncio.wait(listening, timeout=within_s + 2.0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._surveyed.values():  # of the reserve
            await link.close()

    def _spawn(self, coroutine: object, name: str = "") -> None:
        assert asyncio.iscoroutine(coroutine)
        task: asyncio.Task[None] = asyncio.create_task(coroutine, name=name or None)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def environment_of(names: tuple[str, ...], here: dict[str, str]) -> dict[str, str]:
    """`--env`'s variables, with this environment's values; those that are not set are left out."""
    return {name: here[name] for name in names if name in here}
