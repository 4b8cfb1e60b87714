"""A simulated agent: one node's end of the connection, with the workers that it started."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from holdfast.protocol import messages as m
from holdfast.protocol.phases import WAITING_PHASES, Phase
from simcluster.clock import Link
from simcluster.memory import SimMemory
from simcluster.worker import SIGKILL, Script, SimWorker, Trainer

if TYPE_CHECKING:
    from simcluster.cluster import Cluster


class Connection:
    """Two links. It ends for both sides, though not at the same time."""

    def __init__(self, cluster: Cluster, agent: SimAgent, session: str) -> None:
        self.agent = agent
        self.session = session
        self.open = True
        cluster.service.sockets.add(self)
        self.up = Link(cluster.clock, cluster.latency_s, lambda msg: cluster.service.receive(self, msg))
        self.down = Link(cluster.clock, cluster.latency_s, lambda msg: agent.receive(self, msg))

    def hold(self, held: bool) -> None:
        """Silence begins or ends in both directions."""
        for link in (self.up, self.down):
            if held:
                link.hold()
            else:
                link.release()


class SimAgent:
    """The agent of one node."""

    def __init__(self, cluster: Cluster, name: str, identity: str = "") -> None:
        self.cluster = cluster
        self.name = self.host = name
        self.identity = identity
        self.sessions = 1
        self.workers: dict[str, SimWorker] = {}
        self.alive = True
        self.silent = False
        self.cut = False
        self.bad = False
        self.leaving: m.Leaving | None = None
        self.connection: Connection | None = None
        self._pending: deque[tuple[float, m.AgentMessage]] = deque()
        self._ended: set[str] = set()
        self._unwanted: set[str] = set()
        self._formed: dict[str, int] = {}
        self._formed_s: dict[str, float] = {}
        self._said: dict[str, dict[str, m.WorkerMessage]] = {}
        self._stalled_s: dict[str, float] = {}
        rng, plan = cluster.saving_rng, cluster.plan
        saves = plan.snapshot_every > 0 or plan.shard_count > 1
        self.memory = SimMemory(self, saves and rng.random() >= plan.no_memory)
        self.place = self._stands(rng)
        self._connect()
        self._beat()

    def _stands(self, rng: random.Random) -> tuple[str, ...]:
        plan = self.cluster.plan
        rack = f"r{rng.randrange(plan.racks)}" if plan.racks else ""
        if not plan.halls:
            return (rack,) if rack else ()
        # Drawn apart: by the name, so that a node that comes back stands where it stood.
        own = random.Random(f"{plan.seed} {self.name}")
        return () if own.random() < plan.unplaced else (f"h{own.randrange(plan.halls)}", rack)

    @property
    def session(self) -> str:
        """New after every fence."""
        return f"{self.name}-{self.sessions}"

    def living(self) -> list[SimWorker]:
        """Workers whose process exists."""
        return [w for w in self.workers.values() if w.alive]

    # ------------------------------------------------------------ connection

    def _connect(self) -> None:
        if not self.alive or self.connection is not None:
            return
        if self.silent or not self.cluster.service.up:
            self.cluster.clock.after(self.cluster.rng.uniform(0.05, 0.5), self._connect)
            return
        connection = Connection(self.cluster, self, self.session)
        self.connection = connection
        connection.up.send(self._hello())
        now = self.cluster.clock.now
        while self._pending:
            since, message = self._pending.popleft()
            if isinstance(message, m.FromWorker):
                message = m.FromWorker(message.worker, message.message, now - since)
            connection.up.send(message)
        if self.cluster.plan.repeats:
            self._repeat(connection)

    def _repeat(self, connection: Connection) -> None:
        """What a coordinator must have heard: how workers ended, and who waits for a Break."""
        for worker in self.workers.values():
            if worker.name in self._ended:
                connection.up.send(m.Exited(worker=worker.name, code=worker.code or 0, killed=worker.killed))
            elif worker.trouble is not None:
                connection.up.send(m.FromWorker(worker.name, worker.trouble))

    def _hello(self) -> m.Hello:
        views = tuple(self.view(w) for w in self.workers.values() if w.alive or self.cluster.plan.repeats)
        slots = self.cluster.plan.spec.nproc
        return m.Hello(
            version=m.PROTOCOL_VERSION,
            node=self.name,
            session=self.session,
            host=self.host,
            slots=slots,
            pid=1,
            ports=(29500, 29501),
            workers=views,
            snapshot_port=self.memory.port,
            copies=self.memory.copies(),
            place=self.place,
            leaving=self.leaving,
            identity=self.identity,
            checks=self.cluster.ailments.basic_checks(self),
        )

    def disconnected(self, connection: Connection) -> None:
        """The other side closed the connection, or died."""
        if self.connection is connection:
            self.connection = None
            self.cluster.clock.after(self.cluster.rng.uniform(0.01, 0.6), self._connect)

    def send(self, message: m.AgentMessage) -> None:
        """To the coordinator, now or when there is one."""
        if not self.alive:
            return
        if self.connection is not None:
            self.connection.up.send(message)
            if isinstance(message, m.Hello):
                self.connection.session = message.session
        elif not isinstance(message, m.Heartbeat | m.Stalled | m.InspectReply):
            self._pending.append((self.cluster.clock.now, message))

    def silence(self, silent: bool, cut: bool) -> None:
        """The machine stops answering (cut: to other workers as well), or is back."""
        self.silent, self.cut = silent, cut
        if self.connection is not None:
            self.connection.hold(silent)
        if not silent:
            self.cluster.recheck_planes()

    def preempt(self, within_s: float) -> None:
        """The machine is taken away in a while, and says so."""
        if self.leaving is None:
            self.leaving = m.Leaving("SIGTERM", within_s)
            self.send(self.leaving)
            self.cluster.clock.after(within_s, self._taken_away)

    def _taken_away(self) -> None:
        if self.alive:
            self.cluster.log("%s is taken away", self.name)
            self.end()

    def end(self) -> None:
        """The machine is gone."""
        self.alive = False
        connection, self.connection = self.connection, None
        for worker in self.living():
            worker.die(SIGKILL)
        if connection is not None:
            self.cluster.service.peer_closed(connection)

    # ------------------------------------------------------------ workers

    def relay(self, worker: SimWorker, message: m.WorkerMessage) -> None:
        """A worker's message goes on to the coordinator."""
        self._said.setdefault(worker.name, {})[type(message).__name__] = message
        self.send(m.FromWorker(worker.name, message))

    def exited(self, worker: SimWorker, code: int) -> None:
        """A worker's process ended."""
        if self.alive:
            delay = self.cluster.rng.uniform(0.0, 0.01)
            self.cluster.clock.after(delay, self._tell_exit, worker, code)

    def _tell_exit(self, worker: SimWorker, code: int) -> None:
        if self.workers.get(worker.name) is worker:
            self._ended.add(worker.name)
            self.send(m.Exited(worker=worker.name, code=code, killed=worker.killed))

    def view(self, worker: SimWorker) -> m.WorkerView:
        """What this agent knows of a worker."""
        said = self._said.get(worker.name, {})
        ready, parked, done = said.get("Ready"), said.get("Parked"), said.get("Done")
        return m.WorkerView(
            worker=worker.name,
            slot=worker.slot,
            pid=1,
            formed=self._formed.get(worker.name, 0),
            page=worker.page(),
            process=worker.process,
            idle_s=self.cluster.clock.now - worker.moved_s,
            ready=ready if isinstance(ready, m.Ready) else None,
            attached="Attached" in said,
            parked=parked if isinstance(parked, m.Parked) else None,
            done=done if isinstance(done, m.Done) else None,
            median_s=self.cluster.plan.step_s if "Progress" in said or worker.hangs else None,
            groups=worker.groups(),
        )

    def _beat(self) -> None:
        if not self.alive:
            return
        self.send(m.Heartbeat())
        for worker in self.living():
            self._watch(worker)
        self.cluster.clock.after(self.cluster.plan.spec.timing.heartbeat_s, self._beat)

    def _watch(self, worker: SimWorker) -> None:
        """From its JoinGeneration until it parks or is done, and as long as its process is stopped."""
        said = self._said.get(worker.name, {})
        inside = worker.name in self._formed and "Parked" not in said and "Done" not in said
        if not (inside or worker.stopped or worker.hangs):
            return
        now, timing = self.cluster.clock.now, self.cluster.plan.spec.timing
        since = max(worker.moved_s, self._formed_s.get(worker.name, 0.0))
        told_s = self._stalled_s.get(worker.name, 0.0)
        if now - since >= self._allowed_s(worker) and now - told_s >= timing.stall_floor_s:
            self._stalled_s[worker.name] = now
            self.send(m.Stalled(worker.name, self.view(worker)))

    def _allowed_s(self, worker: SimWorker) -> float:
        timing = self.cluster.plan.spec.timing
        if worker.stopped:
            return timing.stall_floor_s
        if worker.hangs:
            return 20 * timing.detection_s
        if worker.phase is Phase.ASIDE:
            return timing.start_s
        if worker.trained:
            return timing.stall_s(self.cluster.plan.step_s)
        if worker.phase in (Phase.REDUCE, Phase.VOTE):
            return max(timing.stall_floor_s, timing.stall_factor * worker.own_s)
        if worker.phase in WAITING_PHASES or worker.phase is Phase.TRANSFER:
            return timing.stall_floor_s
        return timing.start_s  # a first step may compile

    # ------------------------------------------------------------ orders

    def receive(self, connection: Connection, message: m.ToAgent) -> None:
        """A message of the coordinator."""
        if self.alive and connection is self.connection:
            self._obey(message)

    def _obey(self, message: m.ToAgent) -> None:
        match message:
            case m.StartWorker():
                delay = self.cluster.rng.uniform(0.0, 0.05)
                self.cluster.clock.after(delay, self._start, self.session, message)
            case m.KillWorker(name, grace_s):
                worker = self.workers.get(name)
                if worker is None:
                    self._unwanted.add(name)
                elif worker.alive:
                    delay = self.cluster.rng.uniform(0.0, grace_s + 0.02)
                    self.cluster.clock.after(delay, worker.end)
            case m.Relay(name, said):
                worker = self.workers.get(name)
                if isinstance(said, m.Rebuild):
                    self._said.setdefault(name, {}).pop("Ready", None)
                if isinstance(said, m.JoinGeneration):
                    self._formed[name] = max(self._formed.get(name, 0), said.generation.number)
                    self._formed_s[name] = self.cluster.clock.now
                    self._said.setdefault(name, {}).pop("Parked", None)
                if worker is not None and worker.alive:
                    worker.hear(said)
            case m.Inspect(request):
                self.send(m.InspectReply(request, tuple(self.view(w) for w in self.workers.values())))
            case m.Repair():
                self.cluster.ailments.repair(self, message)
            case m.RunChecks():
                self.cluster.ailments.check(self, message)
            case m.Replicate():
                self.memory.replicate(message)
            case m.StoreShard():
                self.memory.store(message)
            case m.Publish():
                self.memory.publish(message)
            case m.SnapshotComplete(step, kept):
                self.memory.snapshot_complete(step, kept)
            case m.ForgetSnapshots(step, until):
                self.memory.forget(step, until)
            case m.Fence():
                self._fenced()
            case m.Drain():
                pass  # for the hook of a node that is to leave
            case m.Notify():
                pass  # for scripts; what is in it is looked at where it is sent
            case m.Shutdown():
                self.end()
            case _:
                raise AssertionError(f"no rule for {message}")

    def _start(self, session: str, message: m.StartWorker) -> None:
        """A warm process was there at last."""
        if not self.alive or session != self.session or message.worker in self.workers:
            return
        if message.worker in self._unwanted:
            self.send(m.Exited(worker=message.worker, code=SIGKILL, killed=True))
            return
        self.cluster.checks.worker_started(self, message)
        kind = Trainer if self.cluster.plan.level == 2 else Script
        worker = kind(self, message)
        self.workers[message.worker] = self.cluster.workers[message.worker] = worker
        self.send(m.Started(message.worker, 1, f"{message.worker}.log"))

    def _fenced(self) -> None:
        """Nothing of the old node runs on; the same connection goes on with a new one."""
        self.cluster.log("%s is fenced", self.name)
        workers, self.workers = self.living(), {}
        for worker in workers:
            worker.die(SIGKILL)
        self.sessions += 1
        self.memory.comes_back()
        self.send(self._hello())
