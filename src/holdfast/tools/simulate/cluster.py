"""A trial: the real core, and around it a cluster that is simulated in just the detail that the core can see.

Agents and workers answer the core's messages as the real ones do, after the times that the scenario gives. Four things are
simplified, none of which the core can see. Steps are not simulated one by one: progress is reported when something happens.
There are no heartbeats: a node that lives counts as seen just now. One worker represents a node, because the loss of a node
takes all its workers, and a worker that fails holds up the others of its node. And one node of the core represents all those
to which nothing happens for a while, because they would send the same messages at the same moments: to the core a node is a
name, and which machine has a member's name is decided shortly before something happens to it (`names.bind`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.deadlines import Watched
from holdfast.coordinator.kernel.state import CoreState, JobPhase, MembershipState
from holdfast.coordinator.machine import Core
from holdfast.protocol import ledger
from holdfast.protocol import messages as m
from holdfast.protocol.engine_orders import EngineOrder, OrderDone, ProvideNode, RebootNode, ReleaseNode
from holdfast.protocol.job import Durable, JobSpec
from holdfast.protocol.job_options import HealthSpec, Timing
from holdfast.protocol.ledger import LedgerEvent
from holdfast.protocol.place import NodePlace
from holdfast.protocol.snapshots import Copy, DurableTier, Key, Part, Saving, Shard
from holdfast.tools.simulate import names, strikes
from holdfast.tools.simulate.arrivals import Arrivals, FailureStream
from holdfast.tools.simulate.machine import BEGIN_S, HOP_S, REST, FewNames, SimulatedMachine
from holdfast.tools.simulate.scenario import FailureClass, Scenario
from holdfast.tools.simulate.steps import Steps
from holdfast.tools.simulate.trace import NodeTrace

AHEAD = 6
"""About how many failures are looked ahead when machines get names."""

TIER = "durable"


class Cluster:
    """One trial."""

    job = "simulated"
    """The job's name in the specification that the core gets."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        names: int = 0,
        one_by_one: bool = False,
        trace: NodeTrace | None = None,
        note: Callable[[float, LedgerEvent], None] | None = None,
    ) -> None:
        """names: number of nodes with names, besides the spares and the node that represents the rest; 0: every machine
        has one. one_by_one: the core gets every message separately. trace: a record of the nodes' presence, in place of
        the scenario's failures. note: called with every entry of the ledger."""
        self.scenario = scenario
        self.seed = seed
        # A random stream of its own for what the cluster draws. Failures are drawn elsewhere, per machine, so
        # a change in how the cluster is run changes no failure.
        self.rng = random.Random(seed * 15_485_863 + 11)
        self.now = BEGIN_S
        self.machines: dict[str, SimulatedMachine] = {}
        self.arrivals = Arrivals(scenario, seed)
        self.steps = Steps(scenario.step_s, BEGIN_S)
        self.failures: dict[str, int] = {}
        self.job_starts = 0
        self.given_up: list[str] = []
        self.nodes_new = 0
        self.finished_s: float | None = None
        self.node_s = 0.0
        self.there = 0
        self.counted_s = BEGIN_S
        self.incidents = 0
        self.trace = trace
        # With a trace every node is different, and none can represent another.
        self.names = names if 0 < names < scenario.nodes and trace is None else 0
        # About AHEAD failures fit into one window. Shorter windows would bind names all the time, longer ones
        # would need more names than there are.
        self.window_s = 3600.0 * AHEAD / max(1e-9, scenario.nodes * scenario.rate)
        self.rest: list[SimulatedMachine] = []
        self.groups: list[tuple[FailureClass, range, FailureStream]] = []
        self.group_s: list[float] = []
        self.savers: list[SimulatedMachine] = []
        self.one_by_one = one_by_one
        self.note = note
        # The second entry is the order of insertion: events of one moment happen in the order in which they
        # were planned, so a trial depends on its seed alone.
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = 0
        self.tick_s = math.inf
        self.under_way = 0
        self.waiting_orders = 0
        self.pool: deque[SimulatedMachine] = deque()
        self.holes: deque[int] = deque()
        self.members: list[SimulatedMachine] = []
        self.restoring: frozenset[str] = frozenset()
        self.generation = 0
        self.place()
        self.core = self.new_core()

    # ------------------------------------------------------------ the beginning

    def place(self) -> None:
        """Creates the machines of all places, the last ones as spares, with their first failures."""
        s = self.scenario
        if self.trace is not None:
            self.place_traced(self.trace)
            return
        for number in range(s.nodes + s.spares):
            machine = SimulatedMachine(number, number, self.arrivals.machine(number))
            # Drawn for every machine at once, including those without a name, from the machine's own source.
            # So it does not affect the failures which machines have names.
            strikes.expect(self, machine, *self.next(machine))
            if self.names and number < s.nodes:
                machine.name = ""
                self.rest.append(machine)
            else:
                self.machines[machine.name] = machine
        for index, group in enumerate(self.arrivals.groups()):
            self.groups.append(group)
            self.group_s.append(math.inf)
            strikes.expect_group(self, index)
        if self.names:
            soon = names.soon(self, self.now + 1.5 * self.window_s)
            # Detected before the trial begins. It is run again with twice as many names, and with the same
            # failures.
            if len(soon) > self.names:
                raise FewNames
            numbers = {x.number for x in soon}
            rest = [x for x in self.rest if x.number not in numbers]
            for machine in sorted([*soon, *rest[: self.names - len(soon)]], key=lambda x: x.number):
                machine.name = f"n{machine.number:05d}"
                self.machines[machine.name] = machine
                self.rest.remove(machine)
            # First in the dict, and its name sorts first, so the core makes it a member and never a spare: a
            # spare that represents 2,000 machines would distort everything.
            self.machines = {REST: SimulatedMachine(-1, -1, None, weight=len(self.rest)), **self.machines}
            self.at(self.now + self.window_s, names.bind, self, self.now + 1.5 * self.window_s)
        self.folded = max(0, len(self.rest) - 1)

    def place_traced(self, trace: NodeTrace) -> None:
        """Nodes come and go as recorded; the trial ends with the record."""
        numbers: dict[str, int] = {}
        for change in trace.changes:
            number = numbers.setdefault(change.node, len(numbers))
            machine = self.machines.setdefault(
                f"n{number:05d}", SimulatedMachine(number, number, FailureStream(0, ()))
            )
            if change.t_s > 0 or not change.up:
                self.at(BEGIN_S + change.t_s, self.traced, machine, change.up)
            else:
                machine.up = True
        # The record may end before the work: the result is then what was done until its end.
        self.at(BEGIN_S + trace.ends_s, self.out_of_trace)
        self.folded = 0

    def traced(self, machine: SimulatedMachine, up: bool) -> None:
        if up and not machine.up:
            self.arrive(machine)
        elif machine.up and not up:
            self.failures["gone"] = self.failures.get("gone", 0) + 1
            strikes.lose(self, [machine], None)

    def out_of_trace(self) -> None:
        if self.steps.running:
            self.steps.settle(self.now)
        else:
            self.steps.account(self.now)
        self.finish("stopped")

    def next(self, machine: SimulatedMachine) -> tuple[float, FailureClass | None]:
        return machine.source.next(self.now) if machine.source is not None else (math.inf, None)

    def new_core(self) -> Core:
        """Starts a job: for the first time, or again after it gave up."""
        s = self.scenario
        nodes = s.nodes - self.folded
        spec = JobSpec(
            name=self.job,
            script="train.py",
            # All sizes are reduced by the machines that have no name, so the core sees the same shortage at
            # the same moment as it would with all of them.
            min_nodes=max(1, s.least - self.folded),
            max_nodes=nodes,
            spares=s.spares,
            wait_for_spare=s.least == s.nodes,
            engine="simulated",
            max_restarts=s.max_restarts,
            timing=Timing(detection_s=s.detection_s),
            saving=Saving(tiers=(DurableTier(TIER, "0"),) if s.durable_every_s else ()),
            # The share is scaled up again: it limits machines, and the core counts names.
            health=HealthSpec(blast_radius=f"{min(1.0, HealthSpec().blast_share * s.nodes / nodes):.20f}"),
        )
        self.job_starts += 1
        return Core(spec, CoreState(spec=spec, membership=MembershipState(level=2)))

    def run(self) -> None:
        """Advances the virtual time until the work is done.

        Raises:
            FewNames: the trial needs more names.
        """
        self.join([x for x in self.machines.values() if x.up or self.trace is None])
        # The whole simulation. There is no other loop and no other clock.
        while self.finished_s is None and self.heap:
            self.happen()

    def happen(self) -> None:
        """Processes the next event, to which the core reacts."""
        at_s, _, call, args = heapq.heappop(self.heap)
        self.now = at_s
        call(*args)

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Calls `call(*args)` at a time."""
        if time_s < math.inf:
            self.order += 1
            # Never in the past: an event that is due already happens now, after those planned for now before
            # it.
            heapq.heappush(self.heap, (max(time_s, self.now), self.order, call, args))

    # ------------------------------------------------------------ in and out of the core

    def tell(self, events: list[e.Event]) -> None:
        """Passes the events of this moment to the core, and carries out its decisions."""
        core = self.core
        # Steps are not reported one by one. Before the core gets any other event it has to know the progress
        # of training, or it would resolve to an older step.
        if self.steps.untold and (sayer := self.sayer()):
            self.steps.untold = False
            progress = m.Progress(
                generation=self.generation, committed=self.steps.committed, median_s=self.steps.step_s
            )
            # The commit is as old as the halt. Without its age, the stall of an incident would begin when it
            # was reported.
            age_s = self.now - self.steps.halted_s if not self.steps.running else 0.0
            events = [self.word(sayer, progress, age_s), *events]
        # Used only by a test that shows that batches do not change the result.
        if self.one_by_one and self.generation:  # at the start, readiness decides on spares
            actions = [a for event in events for a in core.handle(event, self.now)]
        else:
            actions = core.handle_all(events, self.now)
        nodes = core.state.membership.nodes
        for event in events:
            name = event.node if isinstance(event, e.NodeSays | e.WorkersSay) else event.hello.node if isinstance(event, e.NodeJoined) else ""  # fmt: skip
            if (node := nodes.get(name)) is not None and node.alive and self.machines[name].up:
                # A node that lives never counts as silent: real heartbeats would be most of all events, and
                # change nothing. `down` sets the time when it fails.
                node.last_seen_s = math.inf
        self.do(actions)
        # The decision may have ended this core's job and begun the next one.
        if self.finished_s is None and self.core is core:
            self.wind()

    def sayer(self) -> SimulatedMachine | None:
        return next((x for x in self.members if x.up and x.worker and x.hung_s is None), None)

    def word(self, machine: SimulatedMachine, message: m.WorkerMessage, age_s: float = 0.0) -> e.WorkersSay:
        return e.WorkersSay(machine.name, (m.FromWorker(machine.worker or "", message, age_s),))

    def wind(self) -> None:
        due = self.core.next_deadline()
        # Only the earliest tick is planned. A later deadline is found again when that one is handled.
        if due is not None and due < self.tick_s:
            # As the service does, a little late rather than early.
            self.tick_s = max(due, self.now + 1e-3)
            self.at(self.tick_s, self.tick, self.tick_s)

    def tick(self, planned_s: float) -> None:
        # A tick that was planned earlier and replaced by a sooner one stays in the heap, and is ignored here.
        if planned_s == self.tick_s:
            self.tick_s = math.inf
            self.tell([e.Tick()])

    def do(self, actions: list[e.Action]) -> None:
        # Orders of one batch reach all workers at the same moment, so they are collected and carried out
        # together: one event instead of one per worker.
        forms: list[tuple[SimulatedMachine, m.JoinGeneration]] = []
        breaks: list[SimulatedMachine] = []
        stops: list[tuple[SimulatedMachine, m.Stop]] = []
        if actions and type(actions[-1]) is e.End:  # agents leave, their machines stay
            actions = [a for a in actions if type(a) is not e.Send]
        for action in actions:
            if type(action) is e.Send:
                machine, message = self.machines[action.node], action.message
                if type(message) is m.Relay:
                    order = message.message
                    if type(order) is m.JoinGeneration:
                        forms.append((machine, order))
                    elif type(order) is m.Break:
                        breaks.append(machine)
                    elif type(order) is m.EndAtCommit:
                        if self.steps.running:
                            self.end_at_commit()
                    elif type(order) is m.Stop:
                        stops.append((machine, order))
                else:
                    self.obey(machine, message)
            elif type(action) is e.Record:
                if self.note is not None:
                    self.note(self.now - BEGIN_S, action.event)
            elif type(action) is ProvideNode:
                # `order_nodes` does the rest: a request that the core repeats is still being served.
                self.acknowledge(action)
            elif type(action) is ReleaseNode:
                self.acknowledge(action)
                self.released(action.node)
            elif type(action) is RebootNode:
                self.acknowledge(action)
                self.at(self.now + self.scenario.start_s, self.come_back, self.machines[action.node])
            elif type(action) is e.End:
                self.ended(action.outcome)
                return
        # Breaks before forms: a batch may end one generation and begin the next, and the steps must be halted
        # before they start again.
        if breaks:
            self.halt("stalled")
            # A round trip: the order takes a hop, the report another one.
            self.at(self.now + 2 * HOP_S, self.park, breaks, self.generation)
        if forms:
            self.formed(forms)
        if stops:
            self.at(self.now + 2 * HOP_S, self.stopped, stops)
        self.order_nodes()

    def acknowledge(self, order: EngineOrder) -> None:
        """The engine has accepted the order, so it is not announced again."""
        self.at(self.now + 2 * HOP_S, self.acknowledged, self.core, order.order_id)

    def acknowledged(self, core: Core, order_id: int) -> None:
        if self.core is core and self.finished_s is None:
            self.tell([OrderDone(order_id)])

    def obey(self, machine: SimulatedMachine, message: m.ToAgent) -> None:
        match message:
            case m.StartWorker(worker=name):
                # The name that the core gave: an order for a worker of an earlier life of this machine then
                # matches nothing, as with a real agent.
                machine.worker, machine.ready = name, False
                self.at(self.now + self.scenario.start_s, self.started, machine, name)
            case m.KillWorker(name):
                if machine.worker == name:
                    machine.worker, machine.hung_s = None, None
            case m.Inspect(request):
                if machine.up:
                    self.at(self.now + 10 * HOP_S, strikes.inspected, self, machine, request)
            case m.Shutdown() | m.Fence():
                if (
                    self.core.state.membership.phase is not JobPhase.ENDED
                ):  # otherwise it stays for the job's next start
                    self.leave(machine)
            case m.StoreShard(tier, key, _):
                if machine.up:
                    stored = m.Stored(tier=tier, key=key, shard=_SHARD, took_s=self.scenario.store_s)
                    self.at(self.now + self.scenario.store_s, self.say, machine, stored)
            case m.Publish(tier, step):
                if machine.up:
                    self.at(self.now + HOP_S, self.say, machine, m.Published(tier.url, step))
            case m.RunChecks(request=request):
                if machine.up:
                    self.at(self.now + 1.0, self.say, machine, m.Checked(request, ()))
            case m.Repair(request):
                if machine.up:
                    self.at(self.now + 30.0, self.say, machine, m.Repaired(request))
            case _:
                pass  # copies of snapshots, and their removal: memory is not modelled byte by byte

    def say(self, machine: SimulatedMachine, message: m.NodeMessage) -> None:
        if machine.up:
            self.tell([e.NodeSays(machine.name, message)])

    # ------------------------------------------------------------ nodes come and go

    def join(self, machines: Iterable[SimulatedMachine]) -> None:
        # Nodes that join at one moment are reported together. The order within a moment is the simulator's,
        # and must not decide which of them become spares.
        hellos: list[e.Event] = []
        for machine in machines:
            self.count(machine.weight)
            machine.up, machine.worker, machine.ready, machine.hung_s = True, None, False, None
            machine.sessions += 1
            session = f"{machine.name}/{self.job_starts}.{machine.sessions}"
            hello = m.Hello(
                version=m.PROTOCOL_VERSION,
                node=machine.name,
                session=session,
                host=machine.name,
                slots=1,
                pid=1,
                snapshot_port=1,
                place=self.stands(machine),
            )
            hellos.append(e.NodeJoined(hello))
        self.tell(hellos)

    def stands(self, machine: SimulatedMachine) -> NodePlace:
        """The place of a machine that the core gets. Empty in a trial: machines take turns in the names of its nodes."""
        return ()

    def started(self, machine: SimulatedMachine, name: str) -> None:
        """Workers that were started together are ready together."""
        events: list[e.Event] = []
        heap = self.heap
        # Everything that was planned for this moment is taken from the heap now: workers started together are
        # ready together, as one batch.
        while True:
            if machine.up and machine.worker == name and machine.hung_s is None:
                machine.ready = True
                events.append(
                    self.word(machine, m.Ready(digest="0", host=machine.name, vote_port=1, data_port=1))
                )
            if not (heap and heap[0][0] == self.now and heap[0][2] == self.started):
                break
            machine, name = heapq.heappop(heap)[3]
        if events:
            self.tell(events)

    def order_nodes(self) -> None:
        """Orders nodes that the core asked for. The engine remembers its orders: a repeated request for a node on its
        way does nothing."""
        s = self.scenario
        if self.trace is not None:
            return
        # Compared with the number of nodes that the core awaits, not with its requests: it repeats a request
        # whose answer is late, and a real engine does not provide two nodes for it either.
        while self.under_way < self.core.state.membership.replacing:
            self.under_way += 1
            delay_s = s.replace_s * self.rng.uniform(0.8, 1.2)
            if s.scarce and self.rng.random() < s.scarce:
                delay_s += self.rng.expovariate(1 / max(1.0, s.capacity_s))
            if s.cloud:
                self.at(self.now + delay_s, self.new_machine)
            elif self.pool:
                self.at(self.now + delay_s, self.come_back, self.pool.popleft())
            else:
                self.waiting_orders += 1

    def new_machine(self) -> None:
        total = self.scenario.nodes + self.scenario.spares
        number = total + self.nodes_new
        self.nodes_new += 1
        # In the cloud a new machine takes the place of the lost one, so that racks keep their size.
        place = self.holes.popleft() if self.holes else number % total
        machine = SimulatedMachine(number, place, self.arrivals.machine(number))
        self.machines[machine.name] = machine
        self.arrive(machine)

    def come_back(self, machine: SimulatedMachine) -> None:
        if not machine.up:
            self.arrive(machine)

    def arrive(self, machine: SimulatedMachine) -> None:
        self.under_way = max(0, self.under_way - 1)
        # It comes back repaired.
        machine.slow = 1.0
        strikes.expect(self, machine, *self.next(machine))
        self.join([machine])

    def repaired(self, machine: SimulatedMachine) -> None:
        """A repaired machine serves an order that waits, or goes into the pool."""
        # An order waits for it already, so it does not rest in the pool first.
        if self.waiting_orders:
            self.waiting_orders -= 1
            self.at(self.now + self.scenario.replace_s, self.come_back, machine)
        else:
            self.pool.append(machine)

    def leave(self, machine: SimulatedMachine) -> None:
        """A machine without a fault leaves the job: it is available for another request."""
        if machine.up:
            self.count(-machine.weight)
            machine.up, machine.worker = False, None
            if not self.scenario.cloud and self.trace is None:
                self.repaired(machine)

    def count(self, more: int) -> None:
        """Adds up the node-hours, for the cost, and changes the number of nodes."""
        # Called before every change of the number, so each period is counted with its own number.
        self.node_s += self.there * (self.now - self.counted_s)
        self.counted_s = self.now
        self.there += more

    def released(self, name: str) -> None:
        machine = self.machines[name]
        if machine.up:
            self.leave(machine)

    def down(self, machine: SimulatedMachine, repair_s: float | None) -> None:
        """A machine fails silently: from now on the coordinator gets no message from it."""
        self.count(-machine.weight)
        machine.up, machine.ready = False, False
        node = self.core.state.membership.nodes.get(machine.name)
        # From this moment it is silent. The core detects this after the detection time, as a real one would.
        if node is not None and node.alive:
            node.last_seen_s = self.now
            # The deadline is earlier than before: until now it was infinite.
            self.core.watch.watch(Watched.SILENT, node.name)
        if self.trace is not None:
            return
        if self.scenario.cloud:
            self.holes.append(machine.place)
        else:
            after_s = self.scenario.repair_s if repair_s is None else repair_s
            self.at(self.now + after_s * self.rng.uniform(0.5, 1.5), self.repaired, machine)

    # ------------------------------------------------------------ generations

    def park(self, machines: list[SimulatedMachine], generation: int) -> None:
        # Ignores an order of a generation that has been replaced meanwhile. Every delayed call checks this,
        # as every real message does.
        if generation != self.generation:
            return
        events: list[e.Event] = []
        # All members have the same step, because each commit requires a vote; those that were still fetching
        # their state have nothing.
        holds = m.Parked(generation=generation, committed=self.steps.committed)
        nothing = m.Parked(generation=generation, committed=None)
        for machine in machines:
            if machine.up and machine.worker and machine.hung_s is None:
                events.append(self.word(machine, nothing if machine.name in self.restoring else holds))
        if events:
            self.tell(events)

    def formed(self, forms: list[tuple[SimulatedMachine, m.JoinGeneration]]) -> None:
        s = self.scenario
        first = forms[0][1]
        self.generation, start = first.generation.number, first.generation.start
        self.steps.went_back(start)
        self.members = [machine for machine, _ in forms]
        self.savers = [machine for machine, form in forms if form.saves]
        restoring = [(machine, form) for machine, form in forms if form.restore]
        self.restoring = frozenset(machine.name for machine, _ in restoring)
        # The time to join and, for members that need the state, to fetch it: from disk, from memory or from a
        # peer.
        took_s = s.join_s
        if restoring:
            form = restoring[0][1]
            took_s += (
                s.load_s if form.durable is not None else s.memory_s if form.copy is not None else s.peer_s
            )
        self.at(self.now + took_s, self.on_joined, self.generation, took_s - s.join_s if restoring else None)

    def on_joined(self, generation: int, restore_s: float | None) -> None:
        """All members are connected and have the state: the first step begins."""
        if generation != self.generation or self.core.state.membership.phase is not JobPhase.RUNNING:
            return
        # One of them failed while they joined. The core detects that by itself, and forms another generation.
        if not all(x.up and x.worker and x.hung_s is None for x in self.members):
            return
        self.restoring = frozenset()
        joined = m.Joined(generation, self.scenario.join_s, restore_s)
        self.tell([self.word(x, joined) for x in self.members])
        self.steps.account(self.now)
        self.start_steps()
        self.at(self.now + self.steps.step_s, self.first_commit, generation, self.steps.token)

    def start_steps(self) -> None:
        """From now on steps follow each other as long as nothing happens."""
        s = self.scenario
        weight = sum(x.weight for x in self.members)
        # With fewer workers a step takes longer in proportion; with whole micro-batches it grows in jumps, as
        # a real one does.
        speed = s.nodes / weight
        if s.micro_batches:
            speed = math.ceil(s.micro_batches / weight) / math.ceil(s.micro_batches / s.nodes)
        self.steps.start(self.now, speed, max((x.slow for x in self.members), default=1.0))
        left = s.steps - self.steps.committed
        # The end is planned as if nothing happened until then. The token shows later whether anything did.
        self.at(self.now + left * self.steps.step_s, self.all_done, self.steps.token)

    def first_commit(self, generation: int, token: int) -> None:
        """New members report how long a step takes, and the coordinator learns that training continues."""
        if generation != self.generation or not self.steps.running:
            return
        self.steps.committed = (
            max(self.steps.committed, self.steps.base + 1)
            if token == self.steps.token
            else self.steps.committed
        )
        progress = m.Progress(
            generation=generation,
            committed=max(self.steps.committed, self.steps.base + 1),
            median_s=self.steps.step_s,
        )
        known = self.core.state.membership.workers
        fresh = [x for x in self.members if x.worker and known[x.worker].median_s is None]
        sayer = self.sayer()
        events: list[e.Event] = [self.word(x, progress) for x in fresh if x.up]
        if sayer is not None and sayer not in fresh:
            events.append(self.word(sayer, progress))
        self.tell(events)

    def pace(self) -> None:
        """A member became slow, or fast again: from now on steps have another duration. The step under way is cut off."""
        if self.steps.running and max((x.slow for x in self.members), default=1.0) != self.steps.slowness:
            self.steps.settle(self.now)
            self.start_steps()

    def halt(self, why: str) -> None:
        """No step is committed from now on."""
        if self.steps.running:
            self.steps.halt(self.now, why)

    def end_at_commit(self) -> None:
        """A planned change: the members leave together at the end of the step."""
        done = math.floor((self.now - self.steps.since_s) / self.steps.step_s + 1e-9) + 1
        # The end of the step that is under way, exactly: a planned change loses nothing.
        at_s = self.steps.since_s + done * self.steps.step_s
        self.at(at_s, self.yielded, self.generation, self.steps.token)

    def yielded(self, generation: int, token: int) -> None:
        if generation != self.generation or not self.steps.running:
            return
        self.steps.halt(self.now, "changes", whole=token == self.steps.token, told=True)
        self.park(list(self.members), generation)

    def all_done(self, token: int) -> None:
        if token == self.steps.token and self.steps.running:
            self.steps.settle(self.now, whole=True)
            self.finish("finished")

    def finish(self, outcome: str) -> None:
        self.count(0)
        self.finished_s = self.now - BEGIN_S
        self.incidents += incidents.total(self.core.state)
        if self.note is not None:
            ended = ledger.Ended(outcome=outcome, reason=None, step=self.steps.committed)
            self.note(self.finished_s, ended)

    # ------------------------------------------------------------ saved state, and the end of a job

    def tell_saved(self) -> None:
        """Reports the newest checkpoint and the newest snapshot before the coordinator needs them."""
        s, events = self.scenario, list[e.Event]()
        sayer = self.sayer()
        passed_s = self.now - BEGIN_S
        if s.durable_every_s and sayer is not None:
            begun_s = (passed_s - s.store_s) // s.durable_every_s * s.durable_every_s
            step = self.steps.committed_at(BEGIN_S + begun_s) if begun_s > 0 else 0
            known = self.core.state.storage.durable
            if step and (known is None or known.step < step):
                # Checkpoints between two incidents have no effect, so only the newest is reported, and only
                # when it may matter.
                events.append(self.word(sayer, m.Saved(step, TIER)))
        if s.memory_every_s:
            step = self.steps.committed_at(BEGIN_S + passed_s // s.memory_every_s * s.memory_every_s)
            copy = Copy(Key(step, self.generation, 0, 1), _SHARD)
            events += (
                [e.NodeSays(x.name, m.SnapshotStored(copy)) for x in self.savers if x.up] if step else []
            )
        if events:
            self.tell(events)

    def stopped(self, stops: list[tuple[SimulatedMachine, m.Stop]]) -> None:
        """Workers save and leave, as ordered."""
        for machine, stop in stops:
            name = machine.worker
            if not machine.up or name is None:
                continue
            events: list[e.Event] = []
            if stop.save_to is not None:
                events.append(self.word(machine, m.Saved(self.steps.committed, stop.save_to.url)))
            events.append(
                self.word(
                    machine, m.Done(committed=self.steps.committed, params_xxh3="0", loss=None, stopped=True)
                )
            )
            self.tell(events)
            strikes.end_worker(self, machine, name, 0)

    def ended(self, outcome: str) -> None:
        """The job gave up: a person starts it again after a while."""
        state = self.core.state
        self.given_up.append(state.membership.stop_reason or outcome)
        self.incidents += incidents.total(state)
        self.halt("given_up")
        self.steps.halted_for = "given_up"
        self.at(self.now + self.scenario.resubmit_s, self.resubmit, state.storage.durable)

    def resubmit(self, durable: Durable | None) -> None:
        start = durable.step if durable else 0
        self.steps.went_back(start)
        self.generation, self.members, self.tick_s, self.steps.untold = 0, [], math.inf, False
        # The next job knows what was saved, and nothing else.
        self.core = self.new_core()
        self.waiting_orders = 0
        self.under_way = 0
        there = [x for x in self.machines.values() if x.up]
        self.count(-sum(x.weight for x in there))  # they are counted again as they join
        self.tell([e.Tick(), e.DurableFound(durable)])
        self.join(there)


_SHARD = Shard(0, Part("head", 1, "0"), Part("row", 1, "0"), 0)
