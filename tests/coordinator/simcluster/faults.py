"""Bad luck: what a plan's faults do to the simulated cluster, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import WorkerPhase
from holdfast.protocol.phases import Phase
from simcluster.worker import Trainer

if TYPE_CHECKING:
    from simcluster.agent import SimAgent
    from simcluster.cluster import Cluster
    from simcluster.worker import SimWorker


class Faults:
    """Strikes at the plan's times and moments, until `stop`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.over = False
        self.slow = False
        self.last_s = 0.0
        self.made_bad = False
        self._codes = 2
        self.killed: list[str] = []
        """Workers whose end says what a script's own error would."""
        self._flaky: set[int] = set()
        self._flaky_left = 0
        self._torn_until_s = 0.0
        self._nan: tuple[int, int] | None = None
        self._nan_next = False
        self._silenced: list[SimAgent] = []
        self._triggers = list(cluster.plan.triggers)
        for after_s, kind in cluster.plan.faults:
            cluster.clock.after(after_s, self.strike, kind, None)
        for after_s, kind in cluster.plan.changes:
            cluster.clock.after(after_s, self._change, kind)
        if cluster.plan.stop_after_s is not None:
            cluster.clock.after(cluster.plan.stop_after_s, self._stop_job)

    def stop(self) -> None:
        """From now on nothing new breaks; what is broken stays so, but the network heals."""
        self.over = True
        self.cluster.ailments.over = True
        self.slow = self._nan_next = False
        self._flaky_left, self._torn_until_s = 0, 0.0
        self._triggers.clear()
        self.cluster.service.calm()
        for worker in self.cluster.workers.values():
            if isinstance(worker, Trainer):
                worker.armed.clear()
        for agent in self._silenced:
            if agent.alive and self.cluster.rng.random() < 0.5:
                agent.silence(False, False)

    def moment(self, name: str, worker: SimWorker | None) -> None:
        """Counts a moment down for every trigger that waits for it."""
        for index, (moment, count, kind) in enumerate(self._triggers):
            if moment == name:
                if count > 1:
                    self._triggers[index] = (moment, count - 1, kind)
                else:
                    del self._triggers[index]
                    self.cluster.clock.after(
                        self.cluster.rng.choice((0.0, 0.0, 0.003)), self.strike, kind, worker
                    )
                return

    def strike(self, kind: str, worker: SimWorker | None) -> None:
        """One fault, on this worker or on one that is drawn."""
        if self.over or self.cluster.service.ended is not None:
            return
        self.last_s = self.cluster.clock.now
        self.cluster.log("fault: %s", kind)
        strikes: dict[str, Callable[[SimWorker | None], None]] = {
            "kill-worker": self._kill_worker,
            "kill-node": self._kill_node,
            "kill-spare": self._kill_spare,
            "lose-rack": self._lose_rack,
            "silent-node": lambda w: self._silence(w, cut=False),
            "cut-node": lambda w: self._silence(w, cut=True),
            "stop-worker": self._stop_worker,
            "freeze-worker": self._freeze_worker,
            "hang-worker": lambda w: self._arm(w, "hang"),
            "lose-reduce": lambda w: self._arm(w, "deaf"),
            "raise": lambda w: self._arm(w, "raise"),
            "raise-again": lambda w: self._arm(w, "raise-again"),
            "torn": lambda w: self._arm(w, "torn"),
            "nan": self._make_nan,
            "flaky-network": self._make_flaky,
            "torn-links": self._tear_links,
            "slow-network": self._make_slow,
            "kill-coordinator": self._kill_coordinator,
            "join-node": lambda w: self._join(),
            "bad-node": self._make_bad,
            "kill-all-workers": lambda w: self._kill_all(),
            "kill-shard": lambda w: self._kill_some(w, "shard_index"),
            "kill-replica": lambda w: self._kill_some(w, "replica"),
            "silence-holders": lambda w: self._silence_holders(),
        }
        strikes[kind](worker)

    # ------------------------------------------------------------ collectives

    def flaky(self, number: int) -> bool:
        """Whether no collective of this generation ever closes."""
        if self._flaky_left and number not in self._flaky:
            self._flaky_left -= 1
            self._flaky.add(number)
        return number in self._flaky

    @property
    def torn_links(self) -> bool:
        """Whether every collective fails at once."""
        return self.cluster.clock.now < self._torn_until_s

    def nan_at(self, step: int, number: int) -> bool:
        """Whether the gradient of this step is not finite: on every rank alike."""
        if self._nan_next and (self._nan is None or self._nan[0] != step):
            self._nan_next, self._nan = False, (step, number)
        return self._nan == (step, number)

    # ------------------------------------------------------------ strikes

    def _pick(self, worker: SimWorker | None) -> SimWorker | None:
        if worker is not None and worker.running and self.cluster.rng.random() < 0.5:
            return worker
        living = [w for a in self.cluster.agents.values() if a.alive for w in a.living() if w.running]
        return self.cluster.rng.choice(living) if living else None

    def _tell(self, kind: str, strike: Callable[[], None], node: str | None, worker: str | None) -> None:
        """Most injected faults are told to the coordinator, shortly before or after they strike."""
        cluster = self.cluster
        told = cluster.rng.random() < cluster.plan.tells_injections
        event = e.Injected(fault=f"sim-{kind}", kind=kind, node=node, worker=worker)
        if told and cluster.rng.random() < 0.7:
            cluster.service.handle(event)
            strike()
        else:
            strike()
            if told:
                cluster.clock.after(cluster.rng.uniform(0.0, 0.05), cluster.service.handle, event)

    def _kill_worker(self, worker: SimWorker | None) -> None:
        target = self._pick(worker)
        if target is None:
            return
        self._codes += 1
        code = self.cluster.rng.choice((-9, -9, -11, -6, self._codes))
        if target.phase is Phase.DONE:
            code = -9  # what a script does after its last step is not asked here
        self.killed.append(target.name)
        self._tell("kill-worker", lambda: target.die(code), target.agent.name, target.name)

    def _kill_some(self, worker: SimWorker | None, what: str) -> None:
        """All workers of one replica, or all that hold one shard, as the newest generation has them."""
        core = self.cluster.service.core
        generation = core.state.membership.generation if core is not None else None
        if generation is None:
            return
        parts: dict[int, list[str]] = {}
        for member in generation.members:
            parts.setdefault(getattr(member, what), []).append(member.worker)
        names = parts[self.cluster.rng.choice(sorted(parts))]
        found = [self.cluster.find_trainer(n) for n in names]
        self._kill_these([w for w in found if w is not None and w.running])

    def _kill_all(self) -> None:
        """Nothing live is left to go on from."""
        agents = self.cluster.agents.values()
        self._kill_these([w for a in agents if a.alive for w in a.living() if w.running])

    def _kill_these(self, struck: Sequence[SimWorker]) -> None:
        """The coordinator is told of all of it or of nothing."""
        cluster = self.cluster
        told = cluster.service.up and cluster.rng.random() < cluster.plan.tells_injections
        for target in struck if told else ():
            cluster.service.handle(
                e.Injected(
                    fault="sim-kill-worker", kind="kill-worker", node=target.agent.name, worker=target.name
                )
            )
        for target in struck:
            target.die(-9)
        self.killed.extend(w.name for w in struck)

    def _silence_holders(self) -> None:
        """Every node that holds a snapshot is cut off, and comes back with it when the job has gone on without."""
        for agent in [a for a in self.cluster.agents.values() if a.alive and a.memory.copies()]:
            agent.silence(True, True)
            self._silenced.append(agent)
            self.cluster.clock.after(self.cluster.rng.choice((2.5, 4.0, 8.0)), self._heal, agent)

    def _kill_spare(self, worker: SimWorker | None) -> None:
        core = self.cluster.service.core
        if core is None:
            return
        names = [w.name for w in core.workers_in(WorkerPhase.READY, WorkerPhase.STARTING)]
        spares = [w for n in names if (w := self.cluster.workers.get(n)) is not None and w.running]
        if spares:
            target = self.cluster.rng.choice(spares)
            self.killed.append(target.name)
            target.die(-9)

    def _node(self, worker: SimWorker | None) -> SimAgent | None:
        if worker is not None and worker.agent.alive and self.cluster.rng.random() < 0.5:
            return worker.agent
        living = [a for a in self.cluster.agents.values() if a.alive]
        return self.cluster.rng.choice(living) if living else None

    def _kill_node(self, worker: SimWorker | None) -> None:
        agent = self._node(worker)
        if agent is not None:
            self._tell("kill-node", agent.end, agent.name, None)

    def _lose_rack(self, worker: SimWorker | None) -> None:
        """All nodes of one place, by their power or by their switch."""
        agent, rng = self._node(worker), self.cluster.rng
        if agent is None or not agent.place:
            return
        heals_s = rng.choice((None, 3.0, 8.0))
        for other in [a for a in self.cluster.agents.values() if a.alive and a.place == agent.place]:
            if heals_s is None:
                self.cluster.clock.after(rng.uniform(0.0, 0.3), other.end)
            elif not other.silent:
                other.silence(True, True)
                self._silenced.append(other)
                self.cluster.clock.after(heals_s, self._heal, other)

    def _silence(self, worker: SimWorker | None, cut: bool) -> None:
        agent = self._node(worker)
        if agent is None:
            return
        self._tell("drop-node", lambda: agent.silence(True, cut), agent.name, None)
        self._silenced.append(agent)
        self.cluster.clock.after(self.cluster.rng.choice((0.3, 1.0, 3.0, 8.0)), self._heal, agent)

    def _heal(self, agent: SimAgent) -> None:
        if agent.alive and agent.silent:
            agent.silence(False, False)

    def _stop_worker(self, worker: SimWorker | None) -> None:
        target = self._pick(worker)
        if target is not None:
            self._tell("stop-worker", lambda: target.freeze(stopped=True), target.agent.name, target.name)

    def _freeze_worker(self, worker: SimWorker | None) -> None:
        """A deadlock in which the process looks alive: nothing in it answers any more.

        Before `hf.start` and after the last step nobody could tell that from a script that takes its time.
        """
        target = self._pick(worker)
        if isinstance(target, Trainer) and target.phase not in (Phase.STARTUP, Phase.DONE):
            target.freeze(stopped=False)

    def _arm(self, worker: SimWorker | None, fault: str) -> None:
        target = self._pick(worker)
        if isinstance(target, Trainer):
            target.armed[fault] = None

    def _make_nan(self, worker: SimWorker | None) -> None:
        self._nan_next = True

    def _make_flaky(self, worker: SimWorker | None) -> None:
        self._flaky_left = self.cluster.rng.choice((1, 1, 2, 4))

    def _tear_links(self, worker: SimWorker | None) -> None:
        self._torn_until_s = self.cluster.clock.now + self.cluster.rng.choice((0.2, 2.0, 10.0))

    def _make_slow(self, worker: SimWorker | None) -> None:
        self.slow = True
        self.cluster.clock.after(self.cluster.rng.uniform(0.2, 3.0), self._make_fast)

    def _make_fast(self) -> None:
        self.slow = False

    def _make_bad(self, worker: SimWorker | None) -> None:
        agent = self._node(worker)
        if agent is not None:
            agent.bad = self.made_bad = True

    def _join(self) -> None:
        self.cluster.add_node()

    def _kill_coordinator(self, worker: SimWorker | None) -> None:
        if self.cluster.rng.random() < 0.7:
            self.cluster.service.crash_soon()
        else:
            self.cluster.service.crash()

    # ------------------------------------------------------------ planned changes

    def _change(self, kind: str) -> None:
        """One planned change of the membership. A person asks again when the coordinator does not answer."""
        cluster, rng = self.cluster, self.cluster.change_rng
        spec, core = cluster.plan.spec, cluster.service.core
        if cluster.service.ended is not None:
            return
        if core is None:
            cluster.clock.after(0.2, self._change, kind)
            return
        cluster.log("change: %s", kind)
        living = [a for a in cluster.agents.values() if a.alive]
        if kind == "resize" and not spec.wait_for_spare:
            nodes = max(rng.randint(spec.min_nodes, spec.max_nodes), core.state.least_nodes)
            cluster.service.handle(e.ResizeRequested(nodes, "simulated"))
        elif kind == "capacity":
            least = 0 if rng.random() < 0.1 else spec.min_nodes
            within_s = rng.choice((None, 1.0, 20.0))
            cluster.service.handle(e.Capacity(rng.randint(least, spec.max_nodes + 1), "preempted", within_s))
        elif kind == "no-capacity-limit":
            cluster.service.handle(e.Capacity(None, "there is room again"))
        elif kind == "join":
            cluster.add_node()
        elif kind.startswith("drain") and living:
            within_s = rng.choice((0.5, 5.0)) if kind == "drain-soon" else None
            cluster.service.handle(e.NodeGoing(rng.choice(living).name, "simulated", within_s))
        elif kind.startswith("preempt") and living:
            rng.choice(living).preempt(rng.choice((0.5, 3.0)) if kind == "preempt-soon" else 30.0)

    def _stop_job(self) -> None:
        if not self.cluster.service.up:
            self.cluster.clock.after(0.2, self._stop_job)
            return
        self.cluster.log("fault: the job is asked to stop")
        self.cluster.service.handle(e.StopRequested("simulated"))
