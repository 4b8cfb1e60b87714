"""The cluster of one schedule around real services: machines, their processes, and what strikes them."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

from simcluster.checks import Violation, brief
from simcluster.cluster import Cluster
from simcluster.plan import Plan
from simcluster.worker import SimWorker

from holdfast.protocol.job import Durable
from virtual.agent import VirtualAgent
from virtual.checks import Invariants, VirtualChecks
from virtual.coordinator import HEAD, SECOND, VirtualService
from virtual.disk import Disk
from virtual.loop import HANDLE_S, State, VirtualLoop
from virtual.luck import Luck
from virtual.network import Network, Socket

END_S = 120.0
"""So long after the job's end its coordinator may take to say goodbye."""


class VirtualCluster(Cluster):
    """As `simcluster.Cluster`, with the real service, its disk and its connections."""

    makes_agent = VirtualAgent
    makes_checks = VirtualChecks
    agents: dict[str, VirtualAgent]  # type: ignore[assignment]
    service: VirtualService

    def __init__(self, plan: Plan, luck: Luck, job_dir: Path, tells: bool = False) -> None:
        """tells: keeps the whole story, not only its end."""
        self.luck, self.job_dir = luck, job_dir
        self.loops: list[VirtualLoop] = []
        self.heads = [HEAD, SECOND] if luck.shared else [HEAD]
        self.violation: Violation | None = None
        self.asked_for_whole = 0
        self.story: list[str] = []
        self._tells = tells
        self._digest = hashlib.blake2b(digest_size=8)
        self._draws: dict[str, int] = {}
        self._calm = False
        (job_dir / "token").write_text("token")
        super().__init__(plan)

    def begin(self, found: Durable | None) -> VirtualService:
        self.network = Network(self.clock, self.latency_s, self.draw)
        self.network.window = self.luck.window or self.network.window
        self.disk = Disk(self.clock, self.draw, self.luck.write_s)
        self.invariants = Invariants(self)
        self.service = service = VirtualService(self)
        service.checkpoints = () if found is None else (found,)
        service.start()
        for at_s, kind in self.luck.strikes:
            self.clock.after(at_s, self.strike, kind)
        return service

    def draw(self, label: str) -> float:
        """A random number of [0, 1) that depends on the seed, the label, and how often the label was drawn."""
        count = self._draws[label] = self._draws.get(label, 0) + 1
        return random.Random(f"{self.plan.seed} {label} {count}").random()

    def log(self, text: str, *args: Any) -> None:
        super().log(text, *args)
        self._digest.update(f"{self.clock.now:.6f} {text} {args!r}".encode())
        if self._tells:
            self.story.append(f"{self.clock.now - self.began_s:9.4f}  {text % tuple(map(brief, args))}")

    @property
    def trace_digest(self) -> str:
        """Of everything that was logged."""
        return self._digest.hexdigest()

    def broke(self, what: str, error: BaseException | None = None) -> None:
        """Something in the code raised what nobody expected."""
        if self.violation is None:
            if isinstance(error, Violation):
                self.violation = error
                return
            try:
                self.checks.fail("%s", what)
            except Violation as violation:
                violation.__cause__ = error
                self.violation = violation

    # ------------------------------------------------------------ what strikes

    def moment(self, name: str, worker: SimWorker | None = None) -> None:
        super().moment(name, worker)
        self.strike_at(name, worker.agent.name if worker is not None else "")

    def joining(self, identity: str) -> list[str]:
        """Machines with this identity."""
        return [a.name for a in self.agents.values() if identity and a.identity == identity]

    def strike_at(self, name: str, near: str) -> None:
        """Counts a moment down for what waits for it."""
        for index, (moment, count, kind) in enumerate(self.luck.moments):
            if moment != name:
                continue
            if count > 1:
                self.luck.moments[index] = (moment, count - 1, kind)
            else:
                del self.luck.moments[index]
                self.clock.after(0.01 * self.draw("after a moment"), self.strike, kind, near)
            return

    def strike(self, kind: str, near: str = "") -> None:
        """One fault of the service's surroundings. near: the machine where it is expected."""
        if self._calm or self.service.ended is not None:
            return
        self.log("luck: %s", kind)
        self.faults.last_s = self.clock.now
        self.invariants.struck(kind)
        draw, now = self.draw, self.clock.now
        match kind:
            case "disk-error":
                self.disk.fails_until_s = now + 0.1 + 8 * draw("a disk's errors")
            case "disk-hang":
                self.disk.hangs_until_s = now + (1.0, 5.0, 20.0, 60.0)[int(4 * draw("a disk hangs"))]
            case "one-way":
                if (agent := self._some_agent("one way", near)) is not None:
                    head = self.service.machine
                    way = (agent.name, head) if draw("which way") < 0.5 else (head, agent.name)
                    self.network.block(*way)
                    self.invariants.suffers(agent.name, ails=True)
                    self.clock.after(0.2 + 6 * draw("a way heals"), self._heal_way, agent, way)
            case "half-dead":
                if (socket := self._some_socket(near)) is not None:
                    self.invariants.suffers(socket.machine)
                    self.invariants.suffers(socket.peer.machine)
                    socket.breaks()
            case "stop-coordinator":
                self.service.stop(0.2 + 10 * draw("stopped for"))
            case "stop-agent":
                if (agent := self._some_agent("stopped", near)) is not None:
                    agent.loop.stop_process()
                    self.invariants.suffers(agent.name, ails=True)
                    self.clock.after(0.1 + 4 * draw("an agent stopped for"), self._go_on, agent)
            case "slow-coordinator":
                if self.service.process is not None:
                    loop = self.service.process.loop
                    loop.handle_s = (1e-3, 1e-2, 0.1)[int(3 * draw("slowness"))]
                    self.clock.after(0.5 + 8 * draw("slow for"), self._speed_up, loop)
            case "succession":
                # The coordinator lives, stands still, or its machine has no power.
                fate = draw("before a succession")
                if fate < 0.4:
                    self.service.stop(20 * draw("stopped before a succession"))
                elif fate < 0.6 and not self.network.dark & set(self.heads):
                    self.network.darken(self.service.machine)
                    self.service.crash()
                self.clock.after(3 * draw("a succession"), self.service.supersede)
            case "hand-over":
                self.service.terminate()
            case "kill-coordinator":
                self.service.crash_soon()

    def _some_agent(self, label: str, near: str) -> VirtualAgent | None:
        living = [a for a in self.agents.values() if a.alive and a.loop.state is State.RUNS]
        living = [a for a in living if a.name == near] or living
        return living[int(len(living) * self.draw(label))] if living else None

    def _some_socket(self, near: str) -> Socket | None:
        there = [s for s in self.network.sockets if not s.gone and not s.peer.gone]
        there = [s for s in there if near in (s.machine, s.peer.machine)] or there
        return there[int(len(there) * self.draw("half dead"))] if there else None

    def _heal_way(self, agent: VirtualAgent, way: tuple[str, str]) -> None:
        if not agent.silent:
            self.network.unblock(*way)
        self.invariants.suffers(agent.name, ails=True)

    def _go_on(self, agent: VirtualAgent) -> None:
        agent.loop.continue_process()
        self.invariants.suffers(agent.name, ails=True)

    def _speed_up(self, loop: VirtualLoop) -> None:
        loop.handle_s = HANDLE_S

    # ------------------------------------------------------------ time

    def run(self, limit_s: float) -> None:
        self.clock.after(self.plan.faults_until_s, self._settle)
        ended_s = None
        while not self.service.over:
            if self.clock.now - self.began_s > limit_s and self.service.ended is None:
                self.checks.fail("the job did not end within %g s", limit_s)
            if self.service.ended is not None:
                ended_s = self.clock.now if ended_s is None else ended_s
                if self.clock.now - ended_s > END_S:
                    self.checks.fail("the coordinator has not ended %g s after its job", END_S)
            if not self.clock.step():
                self.checks.fail("nothing is left to happen, and the job has not ended")
            if self.violation is not None:
                raise self.violation
        self.checks.final()
        self.invariants.final()

    def _settle(self) -> None:
        self._calm = True
        self.disk.fails_until_s = self.disk.hangs_until_s = 0.0
        super()._settle()

    def bury(self) -> None:
        """Ends all that is left of it."""
        for loop in self.loops:
            loop.bury()
        for process in self.service.processes:
            if process.coordinator is not None and (store := process.coordinator._ledger._store) is not None:
                store.close()
