"""A trial: the real core, and around it as much of a cluster as the core can tell from a whole one.

Agents and workers answer the core's messages as the real ones do, after the times that the scenario gives. Three things
are shortened, none of which the core can see. Steps are skipped over: progress is told when something happens. Heartbeats
stand for themselves: a node that lives was seen just now. One worker stands for a node, since what takes a node takes all
its workers, and a worker that fails holds up its node's others. And one node of the core's stands for all those to which
nothing happens for a while, since they would say the same at the same moments: to the core a node is a name, and which
machine is behind a member's name is settled shortly before something happens to it (`_bind`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from holdfast.coordinator import events as e
from holdfast.coordinator.core import Core
from holdfast.coordinator.state import CoreState, JobPhase
from holdfast.protocol import messages as m
from holdfast.protocol.health import Finding, HealthSpec, Remedy, Severity
from holdfast.protocol.job import Durable, JobSpec, Timing
from holdfast.protocol.phases import Phase, Place
from holdfast.protocol.snapshots import Copy, DurableTier, Key, Part, Saving, Shard
from holdfast.simulate.arrivals import Arrivals, Source
from holdfast.simulate.scenario import FailureClass, Scenario
from holdfast.simulate.trace import Trace

BEGIN_S = 1000.0
"""The virtual clock's first second: the core takes 0 for a clock that was never read."""

TIER = "durable"
HOP_S = 0.01
SIGKILL = -9
REST = "all-others"
"""The node that stands for all others. Sorts before them, so that it is a member and no spare."""

AHEAD = 6
"""So many failures, about, are looked ahead when machines get names."""


class Machine:
    """One machine, and the worker on it. place: where it stands; weight: for how many it stands. failures: that the core
    counts against it, while it has no name."""

    __slots__ = ("fails_s", "failure", "failures", "hung_s", "name", "number", "place", "ready", "sessions", "slow", "source", "up", "weight", "worker")  # fmt: skip

    def __init__(self, number: int, place: int, source: Source | None, weight: int = 1) -> None:
        self.number = number
        self.place = place
        self.name = REST if source is None else f"n{number:05d}"  # empty: one of those that REST stands for
        self.source = source
        self.weight = weight
        self.up = False
        self.sessions = 0
        self.worker: str | None = None
        self.ready = False
        self.hung_s: float | None = None
        self.slow = 1.0
        self.fails_s = math.inf
        self.failure: FailureClass | None = None
        self.failures = 0


class Spent(msgspec.Struct):
    """Where the wall time went, in seconds. training: as long as the steps that count take at full size."""

    training: float = 0.0
    smaller: float = 0.0
    slow: float = 0.0
    lost_steps: float = 0.0
    stalled: float = 0.0
    changes: float = 0.0
    starting: float = 0.0
    given_up: float = 0.0


class FewNames(Exception):
    """Something happens to a machine that has no name of its own: there are too few for this trial."""


class Cluster:
    """One trial."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        names: int = 0,
        one_by_one: bool = False,
        trace: Trace | None = None,
        note: Callable[[float, str, dict[str, Any]], None] | None = None,
    ) -> None:
        """names: so many nodes beside the spares and the one that stands for the rest; 0: every machine is one. one_by_one: the core hears every message
        by itself. trace: which nodes there are when, instead of the scenario's failures. note: is told every entry of the
        ledger."""
        self.scenario = scenario
        self.seed = seed
        self.rng = random.Random(seed * 15_485_863 + 11)
        self.now = BEGIN_S
        self.machines: dict[str, Machine] = {}
        self.arrivals = Arrivals(scenario, seed)
        self.spent = Spent()
        self.failures: dict[str, int] = {}
        self.job_starts = 0
        self.given_up: list[str] = []
        self.nodes_new = 0
        self.finished_s: float | None = None
        self.node_s = 0.0
        self._there = 0
        self._counted_s = BEGIN_S
        self.committed = 0
        self.lost_steps = 0
        self.incidents = 0
        self._trace = trace
        self._names = names if 0 < names < scenario.nodes and trace is None else 0
        self._window_s = 3600.0 * AHEAD / max(1e-9, scenario.nodes * scenario.rate)
        self._rest: list[Machine] = []
        self._groups: list[tuple[FailureClass, range, Source]] = []
        self._group_s: list[float] = []
        self._savers: list[Machine] = []
        self._one_by_one = one_by_one
        self._note = note
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._tick_s = math.inf
        self._under_way = 0
        self._waiting_orders = 0
        self._pool: deque[Machine] = deque()
        self._holes: deque[int] = deque()
        self._untold = False
        self._halted_s = BEGIN_S
        self._halted_for = "starting"
        self._stepping = False
        self._since_s = BEGIN_S
        self._base = 0
        self._step_s = scenario.step_s
        self._speed = 1.0
        self._slowness = 1.0
        self._members: list[Machine] = []
        self._restoring: frozenset[str] = frozenset()
        self._generation = 0
        self._segments: deque[tuple[float, int, float]] = deque(maxlen=4096)
        self._token = 0
        self._place()
        self.core = self._new_core()

    # ------------------------------------------------------------ the beginning

    def _place(self) -> None:
        """Machines in all places, the last ones as spares, with their first failures."""
        s = self.scenario
        if self._trace is not None:
            self._place_traced(self._trace)
            return
        for number in range(s.nodes + s.spares):
            machine = Machine(number, number, self.arrivals.machine(number))
            self._expect(machine, *self._next(machine))
            if self._names and number < s.nodes:
                machine.name = ""
                self._rest.append(machine)
            else:
                self.machines[machine.name] = machine
        for index, group in enumerate(self.arrivals.groups()):
            self._groups.append(group)
            self._group_s.append(math.inf)
            self._expect_group(index)
        if self._names:
            soon = self._soon(self.now + 1.5 * self._window_s)
            if len(soon) > self._names:
                raise FewNames
            numbers = {x.number for x in soon}
            rest = [x for x in self._rest if x.number not in numbers]
            for machine in sorted([*soon, *rest[: self._names - len(soon)]], key=lambda x: x.number):
                machine.name = f"n{machine.number:05d}"
                self.machines[machine.name] = machine
                self._rest.remove(machine)
            self.machines = {REST: Machine(-1, -1, None, weight=len(self._rest)), **self.machines}
            self.at(self.now + self._window_s, self._bind, self.now + 1.5 * self._window_s)
        self._folded = max(0, len(self._rest) - 1)

    def _place_traced(self, trace: Trace) -> None:
        """Nodes come and go as recorded, and at its end the record is all that is known."""
        numbers: dict[str, int] = {}
        for change in trace.changes:
            number = numbers.setdefault(change.node, len(numbers))
            machine = self.machines.setdefault(f"n{number:05d}", Machine(number, number, Source(0, ())))
            if change.t_s > 0 or not change.up:
                self.at(BEGIN_S + change.t_s, self._traced, machine, change.up)
            else:
                machine.up = True
        self.at(BEGIN_S + trace.ends_s, self._out_of_trace)
        self._folded = 0

    def _traced(self, machine: Machine, up: bool) -> None:
        if up and not machine.up:
            self._arrive(machine)
        elif machine.up and not up:
            self.failures["gone"] = self.failures.get("gone", 0) + 1
            self._lose([machine], None)

    def _out_of_trace(self) -> None:
        if self._stepping:
            self._settle(self.now)
        else:
            self._account(self.now - self._halted_s)
        self._finish("stopped")

    def _next(self, machine: Machine) -> tuple[float, FailureClass | None]:
        return machine.source.next(self.now) if machine.source is not None else (math.inf, None)

    def _soon(self, until_s: float) -> list[Machine]:
        """Machines without a name to which something may happen until then."""
        places = {
            place
            for (kind, group, _), at_s in zip(self._groups, self._group_s, strict=True)
            if at_s < until_s and kind.scope != "job"
            for place in group
        }
        for machine in (*self._rest, *self.machines.values()):
            if machine.fails_s < until_s and machine.failure is not None and machine.failure.burst:
                places.update(self._rack(machine.place, machine.failure))
        return [x for x in self._rest if x.fails_s < until_s or x.place in places]

    def _bind(self, known_s: float) -> None:
        """Machines to which something happens soon take the names of members to which nothing does.

        known_s: until when those that need a name have one.
        """
        if not self._stepping:
            if self.now < known_s:
                self.at(self.now + (known_s - self.now) / 2 + 1.0, self._bind, known_s)
                return
            raise FewNames
        until_s = self.now + 1.5 * self._window_s
        soon = self._soon(until_s)
        nodes = self.core.state.nodes
        free = [x for x in self._members if x.name != REST and self._plain(x, until_s)]
        if len(free) < len(soon):
            raise FewNames
        for idle, machine in zip(free, soon, strict=False):
            machine.name, machine.worker, machine.sessions = idle.name, idle.worker, idle.sessions
            machine.up = machine.ready = True
            node = nodes[idle.name]
            idle.failures, node.failures = node.failures, machine.failures
            idle.name, idle.worker, idle.up = "", None, False
            self.machines[machine.name] = machine
            self._members[self._members.index(idle)] = machine
            self._savers = [machine if x is idle else x for x in self._savers]
            self._rest[self._rest.index(machine)] = idle
        self.at(self.now + self._window_s, self._bind, until_s)

    def _plain(self, machine: Machine, until_s: float) -> bool:
        """Nothing is the matter with it, nor will be."""
        if not machine.up or machine.worker is None or machine.hung_s is not None or machine.slow > 1.0:
            return False
        if machine.fails_s < until_s:
            return False
        return not any(
            at_s < until_s and machine.place in group
            for (_, group, _), at_s in zip(self._groups, self._group_s, strict=True)
        )

    def _rack(self, place: int, kind: FailureClass) -> range:
        first = place - place % kind.size
        return range(first, min(first + kind.size, self.scenario.nodes + self.scenario.spares))

    def _new_core(self) -> Core:
        """A job begins: for the first time, or again after it gave up."""
        s = self.scenario
        nodes = s.nodes - self._folded
        spec = JobSpec(
            "simulated",
            "train.py",
            min_nodes=max(1, s.least - self._folded),
            max_nodes=nodes,
            spares=s.spares,
            wait_for_spare=s.least == s.nodes,
            engine="simulated",
            max_restarts=s.max_restarts,
            timing=Timing(detection_s=s.detection_s),
            saving=Saving("auto", 1, 0, (DurableTier(TIER, "0"),) if s.durable_every_s else ()),
            health=HealthSpec(blast_share=min(1.0, HealthSpec().blast_share * s.nodes / nodes)),
        )
        self.job_starts += 1
        return Core(spec, CoreState(spec=spec, level=2))

    def run(self) -> None:
        """Lets time pass until the work is done.

        Raises:
            FewNames: another try with more of them is needed.
        """
        self._join([x for x in self.machines.values() if x.up or self._trace is None])
        while self.finished_s is None and self._heap:
            at_s, _, call, args = heapq.heappop(self._heap)
            self.now = at_s
            call(*args)

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Calls `call(*args)` at a time."""
        if time_s < math.inf:
            self._order += 1
            heapq.heappush(self._heap, (max(time_s, self.now), self._order, call, args))

    # ------------------------------------------------------------ in and out of the core

    def tell(self, events: list[e.Event], starting: bool = False) -> None:
        """The core hears what came at this moment, and what it decides is done. starting: the order in which it would
        hear of each would decide who is a spare, so it hears of all at once."""
        core = self.core
        if self._untold and (sayer := self._sayer()):
            self._untold = False
            said = m.Progress(self._generation, self.committed, self._step_s)
            age_s = self.now - self._halted_s if not self._stepping else 0.0
            events = [self._from(sayer, said, age_s), *events]
        if (
            self._one_by_one and self._generation
        ):  # who is ready first at the very start decides who is a spare
            actions = [a for event in events for a in core.handle(event, self.now)]
        else:
            actions = core.handle_all(events, self.now)
        nodes = core.state.nodes
        for event in events:
            name = event.node if isinstance(event, e.NodeSays) else event.hello.node if isinstance(event, e.NodeJoined) else ""  # fmt: skip
            if (node := nodes.get(name)) is not None and node.alive and self.machines[name].up:
                node.last_seen_s = math.inf
        self._do(actions)
        if self.finished_s is None and self.core is core:
            self._wind()

    def _sayer(self) -> Machine | None:
        return next((x for x in self._members if x.up and x.worker and x.hung_s is None), None)

    def _from(self, machine: Machine, message: m.WorkerMessage, age_s: float = 0.0) -> e.NodeSays:
        return e.NodeSays(machine.name, m.FromWorker(machine.worker or "", message, age_s))

    def _wind(self) -> None:
        due = self.core.next_deadline()
        if due is not None and due < self._tick_s:
            self._tick_s = max(due, self.now + 1e-3)
            self.at(self._tick_s, self._tick, self._tick_s)

    def _tick(self, planned_s: float) -> None:
        if planned_s == self._tick_s:
            self._tick_s = math.inf
            self.tell([e.Tick()])

    def _do(self, actions: list[e.Action]) -> None:
        forms: list[tuple[Machine, m.Form]] = []
        breaks: list[Machine] = []
        stops: list[tuple[Machine, m.Stop]] = []
        if actions and type(actions[-1]) is e.End:  # agents leave, their machines stay
            actions = [a for a in actions if type(a) is not e.Send]
        for action in actions:
            if type(action) is e.Send:
                machine, message = self.machines[action.node], action.message
                if type(message) is m.Tell:
                    said = message.message
                    if type(said) is m.Form:
                        forms.append((machine, said))
                    elif type(said) is m.Break:
                        breaks.append(machine)
                    elif type(said) is m.Yield:
                        if self._stepping:
                            self._end_at_commit()
                    elif type(said) is m.Stop:
                        stops.append((machine, said))
                else:
                    self._obey(machine, message)
            elif type(action) is e.Record:
                if self._note is not None:
                    self._note(self.now - BEGIN_S, action.kind, action.fields)
            elif type(action) is e.ProvideNode:
                pass  # see _order_nodes: a request that the core repeats is one that is still on its way
            elif type(action) is e.ReleaseNode:
                self._released(action.node)
            elif type(action) is e.RebootNode:
                self.at(self.now + self.scenario.start_s, self._come_back, self.machines[action.node])
            elif type(action) is e.End:
                self._ended(action.outcome)
                return
        if breaks:
            self._halt("stalled")
            self.at(self.now + 2 * HOP_S, self._park, breaks, self._generation)
        if forms:
            self._formed(forms)
        if stops:
            self.at(self.now + 2 * HOP_S, self._stopped, stops)
        self._order_nodes()

    def _obey(self, machine: Machine, message: m.ToAgent) -> None:
        match message:
            case m.StartWorker(name):
                machine.worker, machine.ready = name, False
                self.at(self.now + self.scenario.start_s, self._started, machine, name)
            case m.KillWorker(name):
                if machine.worker == name:
                    machine.worker, machine.hung_s = None, None
            case m.Inspect(request):
                if machine.up:
                    self.at(self.now + 10 * HOP_S, self._inspected, machine, request)
            case m.Shutdown() | m.Fence():
                if self.core.state.phase is not JobPhase.ENDED:  # else it is there for the job's next start
                    self._leave(machine)
            case m.StoreShard(tier, key, _):
                if machine.up:
                    stored = m.Stored(tier, key, _SHARD, took_s=self.scenario.store_s)
                    self.at(self.now + self.scenario.store_s, self._say, machine, stored)
            case m.Publish(tier, step):
                if machine.up:
                    self.at(self.now + HOP_S, self._say, machine, m.Published(tier.url, step))
            case m.RunChecks(request):
                if machine.up:
                    self.at(self.now + 1.0, self._say, machine, m.Checked(request, ()))
            case m.Repair(request):
                if machine.up:
                    self.at(self.now + 30.0, self._say, machine, m.Repaired(request))
            case _:
                pass  # copies of snapshots and what they make superfluous: memory is not modelled byte by byte

    def _say(self, machine: Machine, message: m.AgentMessage) -> None:
        if machine.up:
            self.tell([e.NodeSays(machine.name, message)])

    # ------------------------------------------------------------ nodes come and go

    def _join(self, machines: Iterable[Machine]) -> None:
        hellos: list[e.Event] = []
        for machine in machines:
            self._count(machine.weight)
            machine.up, machine.worker, machine.ready, machine.hung_s = True, None, False, None
            machine.sessions += 1
            session = f"{machine.name}/{self.job_starts}.{machine.sessions}"
            hello = m.Hello(m.PROTOCOL_VERSION, machine.name, session, machine.name, 1, 1, snapshot_port=1)
            hellos.append(e.NodeJoined(hello))
        self.tell(hellos, starting=True)

    def _started(self, machine: Machine, name: str) -> None:
        """Those that were started together are ready together."""
        events: list[e.Event] = []
        heap = self._heap
        while True:
            if machine.up and machine.worker == name and machine.hung_s is None:
                machine.ready = True
                events.append(self._from(machine, m.Ready("0", machine.name, 1, 1)))
            if not (heap and heap[0][0] == self.now and heap[0][2] == self._started):
                break
            machine, name = heapq.heappop(heap)[3]
        if events:
            self.tell(events, starting=True)

    def _order_nodes(self) -> None:
        """The engine remembers what it was asked for: asked again for what is on its way, it does nothing."""
        s = self.scenario
        if self._trace is not None:
            return
        while self._under_way < self.core.state.replacing:
            self._under_way += 1
            delay_s = s.replace_s * self.rng.uniform(0.8, 1.2)
            if s.scarce and self.rng.random() < s.scarce:
                delay_s += self.rng.expovariate(1 / max(1.0, s.capacity_s))
            if s.cloud:
                self.at(self.now + delay_s, self._new_machine)
            elif self._pool:
                self.at(self.now + delay_s, self._come_back, self._pool.popleft())
            else:
                self._waiting_orders += 1

    def _new_machine(self) -> None:
        total = self.scenario.nodes + self.scenario.spares
        number = total + self.nodes_new
        self.nodes_new += 1
        place = self._holes.popleft() if self._holes else number % total
        machine = Machine(number, place, self.arrivals.machine(number))
        self.machines[machine.name] = machine
        self._arrive(machine)

    def _come_back(self, machine: Machine) -> None:
        if not machine.up:
            self._arrive(machine)

    def _arrive(self, machine: Machine) -> None:
        self._under_way = max(0, self._under_way - 1)
        machine.slow = 1.0
        self._expect(machine, *self._next(machine))
        self._join([machine])

    def _repaired(self, machine: Machine) -> None:
        """It waits to be asked for, or somebody waits for it."""
        if self._waiting_orders:
            self._waiting_orders -= 1
            self.at(self.now + self.scenario.replace_s, self._come_back, machine)
        else:
            self._pool.append(machine)

    def _leave(self, machine: Machine) -> None:
        """A machine without a fault leaves the job: it is there for another request."""
        if machine.up:
            self._count(-machine.weight)
            machine.up, machine.worker = False, None
            if not self.scenario.cloud and self._trace is None:
                self._repaired(machine)

    def _count(self, more: int) -> None:
        """Adds up how long how many nodes are there, for what they cost."""
        self.node_s += self._there * (self.now - self._counted_s)
        self._counted_s = self.now
        self._there += more

    def _released(self, name: str) -> None:
        machine = self.machines[name]
        if machine.up:
            self._leave(machine)

    def _down(self, machine: Machine, repair_s: float | None) -> None:
        """A machine fails, silently: the coordinator hears nothing of it from now on."""
        self._count(-machine.weight)
        machine.up, machine.ready = False, False
        node = self.core.state.nodes.get(machine.name)
        if node is not None and node.alive:
            node.last_seen_s = self.now
        if self._trace is not None:
            return
        if self.scenario.cloud:
            self._holes.append(machine.place)
        else:
            after_s = self.scenario.repair_s if repair_s is None else repair_s
            self.at(self.now + after_s * self.rng.uniform(0.5, 1.5), self._repaired, machine)

    # ------------------------------------------------------------ failures

    def _expect(self, machine: Machine, at_s: float, kind: FailureClass | None) -> None:
        machine.fails_s, machine.failure = at_s, kind
        self.at(at_s, self._strike, machine, at_s)

    def _strike(self, machine: Machine, planned_s: float) -> None:
        kind = machine.failure
        if machine.fails_s != planned_s or kind is None or machine.source is None:
            return
        if not machine.name:
            raise FewNames
        if not machine.up:
            return
        self.failures[kind.name] = self.failures.get(kind.name, 0) + 1
        extra = machine.source.burst(kind)
        for delay_s in extra:
            rack = self._rack(machine.place, kind)
            self.at(self.now + delay_s, self._follow, rack[machine.source.pick(len(rack))], kind)
        if kind.scope != "node":
            self._expect(machine, *machine.source.next(self.now))
        self._fail(machine, kind)

    def _follow(self, place: int, kind: FailureClass) -> None:
        for machine in self.machines.values():
            if machine.place == place and machine.up:
                self.failures[kind.name] += 1
                self._fail(machine, kind)
                return
        if any(x.place == place for x in self._rest):
            raise FewNames

    def _fail(self, machine: Machine, kind: FailureClass) -> None:
        member = machine in self._members
        if kind.scope == "node":
            self._lose([machine], None)
        elif kind.scope == "slow":
            machine.slow = kind.factor
            self.at(self.now + kind.lasts_s, self._fast_again, machine)
            self._pace()
            if kind.found_s and kind.found_s < kind.lasts_s:
                self.at(
                    self.now + kind.found_s / 2, self._found_slow, machine, Severity.WARNING, Remedy.WATCH
                )
                self.at(self.now + kind.found_s, self._found_slow, machine, Severity.ERROR, Remedy.REPLACE)
        elif machine.worker is None or machine.hung_s is not None:
            return
        elif kind.scope == "worker" or not (member and machine.ready):
            if member:
                self._halt("stalled")
            self.at(self.now + HOP_S, self._exit, machine, machine.worker)
        else:
            machine.hung_s = self.now
            self._halt("stalled")
            stall_s = self.core.timing.stall_s(self._step_s)
            self.at(self.now + stall_s, self._stalled, machine, machine.worker)

    def _lose(self, machines: list[Machine], repair_s: float | None) -> None:
        if any(x in self._members for x in machines):
            self._halt("stalled")
            if not any(x.up for x in self._members if x not in machines):
                self._tell_saved()
        for machine in machines:
            self._down(machine, repair_s)
        self._wind()

    def _expect_group(self, index: int) -> None:
        at_s, _ = self._groups[index][2].next(self.now)
        self._group_s[index] = at_s
        self.at(at_s, self._strike_group, index)

    def _strike_group(self, index: int) -> None:
        kind, places, _ = self._groups[index]
        self._expect_group(index)
        self.failures[kind.name] = self.failures.get(kind.name, 0) + 1
        if kind.scope == "job":
            self._end_all_workers()
            return
        if any(x.place in places for x in self._rest):
            raise FewNames
        struck = [x for x in self.machines.values() if x.up and x.place in places]
        if struck:
            self._lose(struck, kind.lasts_s)

    def _end_all_workers(self) -> None:
        """All processes end at once: what is left is in memory and in durable tiers."""
        self._halt("stalled")
        self._tell_saved()
        self.at(self.now + HOP_S, self._exit_all, [(x, x.worker) for x in self._members if x.up and x.worker])

    def _exit_all(self, pairs: list[tuple[Machine, str]]) -> None:
        events: list[e.Event] = []
        for machine, name in pairs:
            if machine.up and machine.worker == name:
                machine.worker = None
                events.append(e.NodeSays(machine.name, m.Exited(name, SIGKILL)))
        self.tell(events)

    def _exit(self, machine: Machine, name: str, code: int = SIGKILL) -> None:
        if machine.up and machine.worker == name:
            machine.worker = None
            self.tell([e.NodeSays(machine.name, m.Exited(name, code))])

    def _stalled(self, machine: Machine, name: str) -> None:
        if machine.up and machine.worker == name and machine.hung_s is not None:
            self.tell([e.NodeSays(machine.name, m.Stalled(name, self._view(machine)))])
            again_s = self.now + self.core.timing.stall_floor_s
            self.at(again_s, self._stalled, machine, name)

    def _inspected(self, machine: Machine, request: int) -> None:
        """All agents answer at once."""
        events: list[e.Event] = []
        heap = self._heap
        while True:
            if machine.up and machine.worker:
                events.append(e.NodeSays(machine.name, m.Views(request, (self._view(machine),))))
            if not (heap and heap[0][0] == self.now and heap[0][2] == self._inspected):
                break
            machine, request = heapq.heappop(heap)[3]
        if events:
            self.tell(events)

    def _view(self, machine: Machine) -> m.WorkerView:
        hung = machine.hung_s is not None
        phase = Phase.FORWARD if hung else Phase.REDUCE if machine in self._members else Phase.IDLE
        place = Place(self._generation, self.committed, int(phase))
        idle_s = self.now - (machine.hung_s if machine.hung_s is not None else self._halted_s)
        return m.WorkerView(
            machine.worker or "", 0, 1, self._generation, place, idle_s=idle_s, median_s=self._step_s
        )

    def _found_slow(self, machine: Machine, severity: Severity, remedy: Remedy) -> None:
        """Its peers show that it is slow: first a warning, then, when that has cost enough, it is to be replaced."""
        if machine.up and machine.worker and machine.slow > 1.0 and machine in self._members:
            done = self._base
            if self._stepping:
                done += math.floor((self.now - self._since_s) / self._step_s)
            said = m.Progress(self._generation, done, self._step_s)
            finding = Finding("slow-node", severity, remedy, "peers", evidence="slower than its peers")
            self.tell([self._from(machine, said), e.NodeSays(machine.name, m.Found((finding,)))])

    def _fast_again(self, machine: Machine) -> None:
        if machine.slow > 1.0:
            machine.slow = 1.0
            self._pace()

    # ------------------------------------------------------------ generations

    def _park(self, machines: list[Machine], generation: int) -> None:
        if generation != self._generation:
            return
        events: list[e.Event] = []
        holds = m.Parked(generation, self.committed)
        nothing = m.Parked(generation, None)
        for machine in machines:
            if machine.up and machine.worker and machine.hung_s is None:
                events.append(self._from(machine, nothing if machine.name in self._restoring else holds))
        if events:
            self.tell(events)

    def _formed(self, forms: list[tuple[Machine, m.Form]]) -> None:
        s = self.scenario
        first = forms[0][1]
        self._generation, start = first.generation.number, first.generation.start
        if start < self.committed:
            lost_s = (self.committed - start) * s.step_s
            self.lost_steps += self.committed - start
            self.spent.training -= lost_s
            self.spent.lost_steps += lost_s
        self.committed = self._base = start
        self._members = [machine for machine, _ in forms]
        self._savers = [machine for machine, form in forms if form.saves]
        restoring = [(machine, form) for machine, form in forms if form.restore]
        self._restoring = frozenset(machine.name for machine, _ in restoring)
        took_s = s.join_s
        if restoring:
            form = restoring[0][1]
            took_s += (
                s.load_s if form.durable is not None else s.memory_s if form.copy is not None else s.peer_s
            )
        self.at(self.now + took_s, self._joined, self._generation, took_s - s.join_s if restoring else None)

    def _joined(self, generation: int, restore_s: float | None) -> None:
        """All are connected and have the state: the first step begins."""
        if generation != self._generation or self.core.state.phase is not JobPhase.RUNNING:
            return
        if not all(x.up and x.worker and x.hung_s is None for x in self._members):
            return
        self._restoring = frozenset()
        said = m.Joined(generation, self.scenario.join_s, restore_s)
        self.tell([self._from(x, said) for x in self._members])
        self._account(self.now - self._halted_s)
        self._stepping = True
        self._start_steps()
        self.at(self.now + self._step_s, self._first_commit, generation, self._token)

    def _account(self, seconds: float) -> None:
        setattr(self.spent, self._halted_for, getattr(self.spent, self._halted_for) + seconds)

    def _start_steps(self) -> None:
        """Steps follow each other from now on, as long as nothing happens."""
        s = self.scenario
        weight = sum(x.weight for x in self._members)
        self._slowness = max((x.slow for x in self._members), default=1.0)
        if s.micro_batches:
            self._speed = math.ceil(s.micro_batches / weight) / math.ceil(s.micro_batches / s.nodes)
        else:
            self._speed = s.nodes / weight
        self._step_s = s.step_s * self._speed * self._slowness
        self._since_s, self._base = self.now, self.committed
        self._segments.append((self.now, self._base, self._step_s))
        self._token += 1
        left = s.steps - self.committed
        self.at(self.now + left * self._step_s, self._all_done, self._token)

    def _first_commit(self, generation: int, token: int) -> None:
        """Newcomers say how long a step takes; the coordinator hears that training goes on."""
        if generation != self._generation or not self._stepping:
            return
        self.committed = max(self.committed, self._base + 1) if token == self._token else self.committed
        said = m.Progress(generation, max(self.committed, self._base + 1), self._step_s)
        known = self.core.state.workers
        fresh = [x for x in self._members if x.worker and known[x.worker].median_s is None]
        sayer = self._sayer()
        events: list[e.Event] = [self._from(x, said) for x in fresh if x.up]
        if sayer is not None and sayer not in fresh:
            events.append(self._from(sayer, said))
        self.tell(events)

    def _pace(self) -> None:
        """A member became slow, or fast again: the steps from now on take another time. The one under way is cut."""
        if self._stepping and max((x.slow for x in self._members), default=1.0) != self._slowness:
            self._settle(self.now)
            self._start_steps()

    def _settle(self, until_s: float, whole: bool = False) -> None:
        """Books the steps since the last time, up to a moment. whole: it is the end of a step."""
        passed_s = until_s - self._since_s
        steps = passed_s / self._step_s
        done = round(steps) if whole else math.floor(steps + 1e-9)
        s, ideal_s = self.spent, self.scenario.step_s
        s.training += done * ideal_s
        s.smaller += done * ideal_s * (self._speed - 1)
        s.slow += done * ideal_s * self._speed * (self._slowness - 1)
        s.lost_steps += passed_s - done * self._step_s
        self.committed = self._base + done
        self._base = self.committed
        self._since_s = until_s

    def _halt(self, why: str) -> None:
        """Nobody commits from now on."""
        if self._stepping:
            self._settle(self.now)
            self._stepping, self._untold = False, True
            self._halted_s, self._halted_for = self.now, why
            self._token += 1

    def _end_at_commit(self) -> None:
        """A planned change: the members leave together at the end of the step."""
        done = math.floor((self.now - self._since_s) / self._step_s + 1e-9) + 1
        at_s = self._since_s + done * self._step_s
        self.at(at_s, self._yielded, self._generation, self._token)
        self._yield_token = self._token

    def _yielded(self, generation: int, token: int) -> None:
        if generation != self._generation or not self._stepping:
            return
        if token == self._token:
            self._settle(self.now, whole=True)
        else:
            self._settle(self.now)
        self._stepping, self._untold = False, False
        self._halted_s, self._halted_for = self.now, "changes"
        self._token += 1
        self._park(list(self._members), generation)

    def _all_done(self, token: int) -> None:
        if token == self._token and self._stepping:
            self._settle(self.now, whole=True)
            self._finish("finished")

    def _finish(self, outcome: str) -> None:
        self._count(0)
        self.finished_s = self.now - BEGIN_S
        self.incidents += len(self.core.state.incidents)
        if self._note is not None:
            self._note(self.finished_s, "ended", {"outcome": outcome, "reason": None, "step": self.committed})

    # ------------------------------------------------------------ saved state, and the end of a job

    def _committed_at(self, time_s: float) -> int:
        for since_s, base, step_s in reversed(self._segments):
            if since_s <= time_s:
                return min(self.committed, base + math.floor((time_s - since_s) / step_s))
        return 0

    def _tell_saved(self) -> None:
        """Before it matters, the coordinator hears of the newest checkpoint and the newest snapshot."""
        s, events = self.scenario, list[e.Event]()
        sayer = self._sayer()
        passed_s = self.now - BEGIN_S
        if s.durable_every_s and sayer is not None:
            begun_s = (passed_s - s.store_s) // s.durable_every_s * s.durable_every_s
            step = self._committed_at(BEGIN_S + begun_s) if begun_s > 0 else 0
            known = self.core.state.durable
            if step and (known is None or known.step < step):
                events.append(self._from(sayer, m.Saved(step, TIER)))
        if s.memory_every_s:
            step = self._committed_at(BEGIN_S + passed_s // s.memory_every_s * s.memory_every_s)
            copy = Copy(Key(step, self._generation, 0, 1), _SHARD)
            events += [e.NodeSays(x.name, m.Held(copy)) for x in self._savers if x.up] if step else []
        if events:
            self.tell(events)

    def _stopped(self, stops: list[tuple[Machine, m.Stop]]) -> None:
        """Workers save and leave, as they were told."""
        for machine, stop in stops:
            name = machine.worker
            if not machine.up or name is None:
                continue
            events: list[e.Event] = []
            if stop.save_to is not None:
                events.append(self._from(machine, m.Saved(self.committed, stop.save_to.url)))
            events.append(self._from(machine, m.Done(self.committed, "0", None, stopped=True)))
            self.tell(events)
            self._exit(machine, name, 0)

    def _ended(self, outcome: str) -> None:
        """The job gave up: somebody starts it again after a while."""
        state = self.core.state
        self.given_up.append(state.stop_reason or outcome)
        self.incidents += len(state.incidents)
        self._halt("given_up")
        self._halted_for = "given_up"
        self.at(self.now + self.scenario.resubmit_s, self._resubmit, state.durable)

    def _resubmit(self, durable: Durable | None) -> None:
        start = durable.step if durable else 0
        if start < self.committed:
            lost_s = (self.committed - start) * self.scenario.step_s
            self.spent.training -= lost_s
            self.spent.lost_steps += lost_s
            self.lost_steps += self.committed - start
        self.committed = self._base = start
        self._generation, self._members, self._tick_s, self._untold = 0, [], math.inf, False
        self.core = self._new_core()
        self._waiting_orders = 0
        self._under_way = 0
        there = [x for x in self.machines.values() if x.up]
        self._count(-sum(x.weight for x in there))  # they are counted again as they join
        self.tell([e.Tick(), e.DurableFound(durable)])
        self._join(there)


_SHARD = Shard(0, Part("head", 1, "0"), Part("row", 1, "0"))
