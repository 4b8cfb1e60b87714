"""The cluster of one schedule: clock, network, engine, agents, and the coordinator around the core."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase
from holdfast.protocol import messages as m
from holdfast.protocol.job import Durable
from holdfast.protocol.snapshots import Copy, Holder
from simcluster.agent import SimAgent
from simcluster.ailments import Ailments
from simcluster.checks import Checks
from simcluster.clock import Clock
from simcluster.faults import Faults
from simcluster.plan import FOREVER, Plan
from simcluster.plane import Key, Plane
from simcluster.service import Service
from simcluster.worker import Script, SimWorker, Trainer

TRACE_LINES = 60
EXTRA_STEPS = 5
"""After the faults, once at full strength, every job still trains this many steps."""

EXTRA_SAVED_STEPS = 40
"""With snapshots, this many: time for several of them."""


class Cluster:
    """Everything that exists in one schedule."""

    makes_agent: type[SimAgent] = SimAgent
    makes_checks: type[Checks] = Checks

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed * 2 + 1)
        self.saving_rng = random.Random(-2_000_003 - plan.seed)
        self.change_rng = random.Random(-4_000_037 - plan.seed)
        self.clock = Clock()
        self.began_s = self.clock.now
        self.trace: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=TRACE_LINES)
        self.until = plan.steps
        self.whole_s = self.began_s
        self.durables: dict[tuple[str, int], tuple[int, tuple[int, ...] | None]] = {}
        self.files: dict[tuple[str, str], int] = {}
        self.agents: dict[str, SimAgent] = {}
        self.workers: dict[str, SimWorker] = {}
        self.attempts: dict[str, frozenset[str]] = {}
        self._planes: dict[int, Plane] = {}
        self._roots = 1
        self._nodes = 0
        self._chains = [[self.root(1, p)] for p in range(plan.shard_count)]
        self.checks = self.makes_checks(self)
        self.faults = Faults(self)
        self.ailments = Ailments(self)
        found = None
        if plan.durable_step is not None and plan.level == 2:
            bits = tuple(self.chain(plan.durable_step, p) for p in range(plan.shard_count))
            self.durables[("before", plan.durable_step)] = (plan.durable_step, bits)
            if plan.steps != FOREVER:
                self.until += plan.durable_step
            found = Durable(plan.durable_step, "before")
        self.service: Any = self.begin(found)
        for _ in range(plan.spec.max_nodes + plan.spec.spares):
            self.clock.after(self.rng.uniform(0.0, 1.0), self.add_node)

    def begin(self, found: Durable | None) -> Any:
        """Starts the coordinator. found: in a durable tier, before the job began."""
        self.service = service = Service(self)
        service.handle(e.Tick())
        if found is not None:
            service.handle(e.DurableFound(found))
        return service

    # ------------------------------------------------------------ what the parts ask of it

    def log(self, text: str, *args: Any) -> None:
        """A line of the trace, put together only when somebody reads it."""
        self.trace.append((self.clock.now, text, args))

    def latency_s(self) -> float:
        """How long one message takes."""
        if self.faults.slow or (self.plan.slow_messages and self.rng.random() < self.plan.slow_messages):
            return self.rng.uniform(0.05, 0.8)
        return self.rng.uniform(0.2, 2.0) * self.plan.latency_s

    def hop_s(self) -> float:
        """How long the last word of a collective takes to one member."""
        return self.rng.uniform(0.0, 0.005)

    def new_root(self) -> int:
        """The state of a model that was built without a seed."""
        self._roots += 1
        return self._roots

    def root(self, root: int, shard_index: int) -> int:
        """A worker's shard of a model as it was built."""
        return root if self.plan.shard_count == 1 else hash((root, shard_index)) & ((1 << 60) - 1)

    def next_bits(self, step: int, bits: int, contents: frozenset[int], line: int = 0) -> int:
        """The state after one update: a function of the state, the step and the data, and of nothing else.

        line: but where nothing is promised to be exact, steps that are done again come out differently.
        """
        if self.plan.equal_starts:
            line = 0
        return hash((bits, step, len(contents), sum(contents), line)) & ((1 << 60) - 1)

    def read_memory(self, reader: SimAgent, copy: Copy, holders: tuple[Holder, ...]) -> int | None:
        """A shard from the memory of the first node that has it and can be reached."""
        for holder in holders:
            agent = self.agents.get(holder.node)
            if agent is None or not agent.alive:
                continue
            if agent is not reader and (agent.cut or reader.cut):
                continue
            if (bits := agent.memory.read(copy)) is not None:
                return bits
        return None

    def chain(self, steps: int, shard_index: int) -> int:
        """A shard of the state after so many steps without any fault, from root 1."""
        known, contents = self._chains[shard_index], frozenset(range(self.plan.micro_batches))
        while len(known) <= steps:
            known.append(self.next_bits(len(known) - 1, known[-1], contents))
        return known[steps]

    def plane(self, generation: m.Generation) -> Plane:
        """The data plane of a generation."""
        if generation.number not in self._planes:
            self._planes[generation.number] = Plane(self, generation)
        return self._planes[generation.number]

    def recheck_planes(self) -> None:
        """A cut network is whole again."""
        for plane in list(self._planes.values()):
            plane.recheck()

    def peers(self, script: SimWorker) -> list[Script]:
        """The other workers of an attempt at level 0, as far as they were started."""
        names = self.attempts.get(script.name, frozenset())
        found = [self.workers.get(n) for n in sorted(names - {script.name})]
        return [w for w in found if isinstance(w, Script)]

    def find_trainer(self, name: str) -> Trainer | None:
        """A worker by its name."""
        worker = self.workers.get(name)
        return worker if isinstance(worker, Trainer) else None

    def start_error(self, worker: SimWorker) -> str | None:
        """What user code raises before the first step, if anything."""
        if self.plan.bug == "start":
            return "invalid syntax"
        return f"uncorrectable ECC error on {worker.agent.name}" if worker.agent.bad else None

    def ended(self, outcome: str) -> None:
        """The coordinator says that the job is over."""
        self.log("the job ended: %s", outcome)

    def tears_end(self, key: Key) -> bool:
        """Whether a member misses the last word of the last vote."""
        last = self.plan.torn_end and key == ("vote", self.until - 1, 0)
        return last and not self.faults.over and self.rng.random() < 0.4

    def moment(self, name: str, worker: SimWorker | None = None) -> None:
        """Something happened at which a fault may be waiting to strike."""
        self.faults.moment(name, worker)

    # ------------------------------------------------------------ engine

    def add_node(self, identity: str = "") -> SimAgent:
        """One more machine."""
        name = f"n{self._nodes}"
        agent = self.makes_agent(self, name, identity or self.ailments.identity(name))
        self._nodes += 1
        self.agents[agent.name] = agent
        self.log("%s is there", agent.name)
        return agent

    def provide(self) -> None:
        """The engine was asked for a node."""
        if not self.faults.over and self.rng.random() < self.plan.engine_refuses:
            self.clock.after(self.rng.uniform(0.05, 2.0), self._refuse)
        else:
            self.clock.after(self.rng.uniform(0.1, 4.0), self.add_node)

    def _refuse(self) -> None:
        self.service.handle(e.NodeUnavailable("the cluster is full"))

    def release(self, node: str) -> None:
        """The engine was told that the job went on without a node."""
        agent = self.agents.get(node)
        if agent is not None and agent.alive and self.rng.random() >= self.plan.release_fails:
            self.clock.after(self.rng.uniform(0.01, 1.0), self._kill_released, agent, agent.sessions)

    def _kill_released(self, agent: SimAgent, sessions: int) -> None:
        if agent.alive and agent.sessions == sessions:
            agent.end()

    # ------------------------------------------------------------ the end of the faults

    def run(self, limit_s: float) -> None:
        """Lets time pass until the job is over."""
        self.clock.after(self.plan.faults_until_s, self._settle)
        while self.service.ended is None:
            if self.clock.now - self.began_s > limit_s:
                self.checks.fail("the job did not end within %g s", limit_s)
            if not self.clock.step():
                self.checks.fail("nothing is left to happen, and the job has not ended")
        self.checks.final()

    def _settle(self) -> None:
        self.faults.stop()
        self.log("no more faults from here")
        self._watch()

    def _watch(self) -> None:
        """Ends a job without a last step a few steps after it is whole again."""
        self.checks.alive()
        core = self.service.core
        if self.until == FOREVER and core is not None and core.state.membership.phase is JobPhase.RUNNING:
            state = core.state
            began = (
                state.membership.generation is not None
                and state.membership.generation_committed > state.membership.generation.start
            )
            whole = core.at_full_strength() and not any(i.open for i in state.incidents)
            patience_s = self.plan.faults_until_s + 60.0
            if self.plan.budget_is_small and self.clock.now - self.began_s > patience_s:
                whole = True  # it may never be again
            if began and whole:
                extra = EXTRA_SAVED_STEPS if self.plan.snapshot_every else EXTRA_STEPS
                self.until = self.checks.newest + extra
                self.whole_s = self.clock.now
                self.log("the last step is %d", self.until)
        self.clock.after(0.25, self._watch)
