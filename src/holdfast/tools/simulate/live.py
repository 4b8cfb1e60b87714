"""A simulated cluster that runs on for a viewer, who can inject faults into it.

It is a trial in which every machine is a node of the core, with a place in a rack and under a switch. Steps, snapshots and
checkpoints, which a trial skips because only its result counts, are reported to the core here as they happen. It has no
clock: the caller passes the time up to which it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.agent.simulated_sources import xid_line
from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.state import JobPhase, Node, NodePhase, Worker, WorkerPhase
from holdfast.errors import UsageError
from holdfast.health.rule_engine import RuleEngine
from holdfast.health.ruleset import catalogue
from holdfast.health.samples import LogLine
from holdfast.protocol import messages as m
from holdfast.protocol import units
from holdfast.protocol.ledger import LedgerEvent
from holdfast.protocol.place import NodePlace
from holdfast.tools.simulate import strikes
from holdfast.tools.simulate.cluster import Cluster
from holdfast.tools.simulate.machine import BEGIN_S, HOP_S, SimulatedMachine
from holdfast.tools.simulate.scenario import FailureClass, Scenario

RACK = 16
"""Machines per rack, unless the scenario has racks of another size."""
SWITCH = 8
"""Racks under one switch."""
START_S = 3600.0
"""A job that does not train by then, in seconds, is shown in its present state."""

STATES = {
    "t": "training",
    "w": "spare",
    "r": "recovering",
    "c": "starting",
    "d": "leaving",
    "h": "held back",
    "l": "gone",
}
"""The states of a node as the core knows them, by the letter in the map."""

NODE_STRIKES = {
    "kill-worker": "Kill the worker",
    "stop-worker": "Hang the worker",
    "kill-node": "Lose the node",
    "slow": "Make it slow",
    "xid-79": "Xid 79: GPU off the bus",
    "xid-94": "Xid 94: contained ECC error",
}
STRIKES = {
    "node": NODE_STRIKES,
    "rack": {"power-off": "Power off the rack"},
    "switch": {"cut": "Cut the switch"},
}
"""The faults for each kind of target, with descriptions for people."""

_TARGET = re.compile(r"(?:(rack|switch|rank)-?|(n))([0-9]{1,7})")
STALE = 4
"""With more planned events than this for each machine, those without an effect are removed from the heap."""


class Committed(NamedTuple):
    """A step that was committed."""

    step: int
    t_s: float
    """Seconds since the start of the virtual clock."""
    took_s: float
    generation: int
    world: int


class LiveCluster(Cluster):
    """A trial that is driven from outside: `begin`, then `advance` and `report` repeatedly, with `strike` in between."""

    def __init__(
        self, scenario: Scenario, seed: int, job: str, note: Callable[[float, LedgerEvent], None]
    ) -> None:
        """job, note: the job's name, and a function that is called with every entry of its ledger."""
        self.job = job
        sizes = [c.size for c in scenario.classes if c.scope == "rack"]
        self.rack_size = min(sizes, default=RACK)
        self.committed: list[Committed] = []
        """Committed steps that are not in the ledger yet: the caller that writes them removes them."""
        self.saved_s = BEGIN_S
        self.restarts = 0
        """Number of restarts of a job that gave up."""
        self._reported = 0
        super().__init__(scenario, seed, note=note)

    # ------------------------------------------------------------ time

    def begin(self) -> None:
        """All machines join, and time advances until the first step is committed."""
        self.join(list(self.machines.values()))
        while self.heap and self.heap[0][0] <= BEGIN_S + START_S and self.finished_s is None:
            self.happen()
            if self.core.state.membership.generation_committed:
                break
        self.report()

    def advance(self, until_s: float, enough: Callable[[], bool] = lambda: False) -> bool:
        """Processes the events that are due until then. False: `enough` returned true after an event, and there are
        more."""
        while self.finished_s is None and self.heap and self.heap[0][0] <= until_s:
            self.happen()
            if enough():
                return False
        if self.finished_s is None:
            self.now = max(self.now, until_s)
        return True

    def next_s(self) -> float:
        """When something is due next: an event, or the end of the step under way. Infinite: nothing."""
        if self.finished_s is not None or not self.heap:
            return math.inf
        steps = self.steps
        return min(self.heap[0][0], steps.since_s + steps.step_s if steps.running else math.inf)

    def report(self) -> None:
        """Reports to the core the steps since the last call, and the state that was saved meanwhile. Only to be called
        when everything that is due by now has happened."""
        self.commit()
        if not self.steps.running or self.steps.committed <= self._reported:
            return
        self._reported = self.steps.committed
        sayer = self.sayer()
        if sayer is None:
            return
        progress = m.Progress(
            generation=self.generation, committed=self.steps.committed, median_s=self.steps.step_s
        )
        self.tell([self.word(sayer, progress, self.now - self.steps.since_s)])
        every_s = min((s for s in (self.scenario.memory_every_s, self.scenario.durable_every_s) if s), default=math.inf)  # fmt: skip
        if self.now >= self.saved_s + every_s:
            self.saved_s = self.now
            self.tell_saved()
        self._clear()

    def commit(self) -> None:
        """Books the complete steps, and leaves the one that is under way."""
        steps = self.steps
        if not steps.running:
            return
        done = math.floor((self.now - steps.since_s) / steps.step_s + 1e-9)
        if done <= 0:
            return
        world = len(self.members)
        self.committed += [
            Committed(
                step=steps.base + k,
                t_s=steps.since_s + (k + 1) * steps.step_s - BEGIN_S,
                took_s=steps.step_s,
                generation=self.generation,
                world=world,
            )
            for k in range(done)
        ]
        # Exactly at the end of a step: in the middle of one, its completed part would be counted as lost.
        steps.settle(steps.since_s + done * steps.step_s, whole=True)

    def _clear(self) -> None:
        """Forgets events and machines without any further effect, so that memory does not grow with time."""
        if len(self.heap) > STALE * (len(self.machines) + 25):
            self.heap = [x for x in self.heap if not self._stale(x[2], x[3])]
            self.heap.sort()
        total = self.scenario.nodes + self.scenario.spares
        if self.scenario.cloud and len(self.machines) > 2 * total:
            known = self.core.state.membership.nodes
            self.machines = {n: x for n, x in self.machines.items() if x.up or n in known}
        del self.given_up[:-10]

    def _stale(self, call: Callable[..., None], args: tuple[Any, ...]) -> bool:
        if call == strikes.strike:
            return bool(args[1].fails_s != args[2] or not args[1].up)
        if call == self.all_done:
            return bool(args[0] != self.steps.token)
        return False

    # If steps are settled in the middle of a step, or a step ends at this very moment, they must be in the
    # ledger first.

    def halt(self, why: str) -> None:
        """See `Cluster.halt`."""
        self.commit()
        super().halt(why)

    def pace(self) -> None:
        """See `Cluster.pace`."""
        self.commit()
        super().pace()

    def yielded(self, generation: int, token: int) -> None:
        """See `Cluster.yielded`."""
        self.commit()
        super().yielded(generation, token)

    def all_done(self, token: int) -> None:
        """See `Cluster.all_done`."""
        self.commit()
        super().all_done(token)

    def formed(self, forms: list[tuple[SimulatedMachine, m.JoinGeneration]]) -> None:
        """See `Cluster.formed`."""
        super().formed(forms)
        # The generation may begin below the last reported step: those steps are then reported again.
        self._reported = self.steps.committed

    def ended(self, outcome: str) -> None:
        """See `Cluster.ended`. A job that a person stopped is over."""
        if outcome == "stopped":
            self.finished_s = self.now - BEGIN_S
        else:
            super().ended(outcome)

    def resubmit(self, durable: Any) -> None:
        """See `Cluster.resubmit`."""
        self.restarts += 1
        self.saved_s = self.now
        super().resubmit(durable)
        self._reported = self.steps.committed

    # ------------------------------------------------------------ places

    def stands(self, machine: SimulatedMachine) -> NodePlace:
        """See `Cluster.stands`."""
        rack = machine.place // self.rack_size
        return (f"switch-{rack // SWITCH}", f"rack-{rack}")

    def map(self) -> dict[str, Any]:
        """The cluster as the core knows it: switches, their racks, and a letter of `STATES` for each place of a rack."""
        letters = "".join(map(self._letter, self._seen()))
        racks = [letters[i : i + self.rack_size] for i in range(0, len(letters), self.rack_size)]
        return {
            "switches": [racks[i : i + SWITCH] for i in range(0, len(racks), SWITCH)],
            "states": STATES,
            "strikes": STRIKES,
        }

    def rack(self, number: int) -> dict[str, Any]:
        """One rack, node by node. Raises UsageError."""
        places = self._places("rack", number)
        rows = []
        generation = self.core.state.membership.generation
        for place, node in zip(places, self._seen()[places.start : places.stop], strict=True):
            worker = self._worker(node)
            rank = generation.rank_of(worker.name) if generation and worker else None
            name = node.name if node else ""
            rows.append({"place": place, "node": name, "rank": rank, "state": self._letter(node)})
        return {"rack": number, "switch": number // SWITCH, "nodes": rows}

    def _seen(self) -> list[Node | None]:
        """For each place the node that the core knows there; None: there is none."""
        nodes = self.core.state.membership.nodes
        return [nodes.get(x.name) if x else None for x in self._latest()]

    def _latest(self) -> list[SimulatedMachine | None]:
        """For each place the machine that stands there, or stood there last."""
        # Including one that was just lost: the core believes that it is there until it detects the loss.
        found: list[SimulatedMachine | None] = [None] * (self.scenario.nodes + self.scenario.spares)
        for machine in self.machines.values():
            before = found[machine.place]
            if machine.up or before is None or not before.up:
                found[machine.place] = machine
        return found

    def _worker(self, node: Node | None) -> Worker | None:
        if node is None:
            return None
        workers = self.core.state.membership.workers
        machine = self.machines.get(node.name)
        return workers.get(machine.worker) if machine and machine.worker else None

    def _letter(self, node: Node | None) -> str:
        if node is None or node.phase is NodePhase.LOST:
            return "l"
        if node.phase is NodePhase.HELD:
            return "h"
        if node.phase is NodePhase.LEAVING:
            return "d"
        state = self.core.state
        machine = self.machines[node.name]
        worker = state.membership.workers.get(machine.worker or "")
        if worker is None or worker.phase in (WorkerPhase.STARTING, WorkerPhase.ATTACHED):
            return "c"
        if worker.phase is WorkerPhase.READY:
            return "w"
        # A member of a generation that is not connected yet stands still.
        joined = worker.joined_generation == state.membership.number
        return "t" if worker.phase is WorkerPhase.MEMBER and joined else "r"

    # ------------------------------------------------------------ faults that a person injects

    def strike(self, target: str, kind: str, dry: bool = False) -> str:
        """Injects a fault now, and returns a description of its target. dry: only returns the description.

        target: `n00017`, `rank-3`, `rack-7` or `switch-2`. kind: one of `STRIKES` for such a thing.

        Raises:
            UsageError: there is no such target, it does not have this kind of fault, or nothing is left of it.
        """
        if self.core.state.membership.phase is JobPhase.ENDED:
            raise UsageError("the simulated job has ended, so nothing of it can be struck")
        read = _TARGET.fullmatch(target)
        if read is None:
            raise UsageError(
                f"target {units.clip(target, 40)!r} must be a node, rank, rack or switch, for example rack-7"
            )
        what, number = read[1] or "node", int(read[3])
        known = STRIKES["node" if what == "rank" else what]
        if kind not in known:
            raise UsageError(
                f"kind {units.clip(kind, 40)!r} is not available for a {what}; choose one of {', '.join(known)}"
            )
        if what in ("rack", "switch"):
            return self._strike_group(what, number, dry)
        return self._strike_node(self._node(what, number), kind, dry)

    def _node(self, what: str, number: int) -> SimulatedMachine:
        name = f"n{number:05d}"
        if what == "rank":
            generation = self.core.state.membership.generation
            members = generation.members if generation else ()
            found = next((x.node for x in members if x.rank == number), None)
            if found is None:
                raise UsageError(
                    f"the job does not have a rank {number}: it has {units.plural(len(members), 'rank')}"
                )
            name = found
        machine = self.machines.get(name)
        if machine is None or not machine.up:
            raise UsageError(f"{name} is not a node of the job at present; choose one that is")
        return machine

    def _strike_node(self, machine: SimulatedMachine, kind: str, dry: bool) -> str:
        if kind in ("kill-worker", "stop-worker") and machine.worker is None:
            raise UsageError(f"{machine.name} does not run a worker at present")
        if kind in ("kill-worker", "stop-worker") and machine.hung_s is not None:
            raise UsageError(f"the worker on {machine.name} hangs already")
        rank = self._rank(machine)
        struck = f"{NODE_STRIKES[kind]}: {machine.name}" + (f", rank {rank}" if rank is not None else "")
        if dry:
            return struck
        worker = None if kind == "kill-node" or kind.startswith("xid") else machine.worker
        name, _, code = kind.partition("-") if kind.startswith("xid") else (kind, "", "")
        fault = f"{name}={code}:node={machine.name}" if code else f"{name}:node={machine.name}"
        # As `holdfast fault` does it: the incident that follows is then known to be injected, and its time is
        # known.
        injected = e.Injected(
            fault=fault, kind=name, node=machine.name, worker=worker, step=self.steps.committed
        )
        self.tell([injected])
        self.failures[name] = self.failures.get(name, 0) + 1
        if name == "xid":
            self.at(self.now + HOP_S, self._log, machine, xid_line(int(code)))
        else:
            strikes.fail(self, machine, _CLASSES[kind])
        return struck

    def _strike_group(self, what: str, number: int, dry: bool) -> str:
        places = self._places(what, number)
        struck = [x for x in self._latest()[places.start : places.stop] if x is not None and x.up]
        if not struck:
            raise UsageError(f"all nodes of {what}-{number} are gone, so nothing is left to strike")
        how = "loses power" if what == "rack" else "is cut off"
        if not dry:
            self.failures[what] = self.failures.get(what, 0) + 1
            strikes.lose(self, struck, None)
        return f"{what}-{number} {how}: {units.plural(len(struck), 'node')}"

    def _places(self, what: str, number: int) -> range:
        size = self.rack_size * (SWITCH if what == "switch" else 1)
        total = self.scenario.nodes + self.scenario.spares
        if number * size >= total:
            raise UsageError(f"{what}-{number} does not exist; the last one is {what}-{(total - 1) // size}")
        return range(number * size, min((number + 1) * size, total))

    def _rank(self, machine: SimulatedMachine) -> int | None:
        generation = self.core.state.membership.generation
        return generation.rank_of(machine.worker) if generation and machine.worker else None

    def _log(self, machine: SimulatedMachine, text: str) -> None:
        """The kernel of a machine logs a line, and the agent judges it by the rules, as real agents do."""
        found = RuleEngine(catalogue()).on_line(LogLine("kmsg", text), self.now)
        if found and machine.up:
            self.tell([e.NodeSays(machine.name, m.FindingsReported(tuple(found)))])


_CLASSES = {
    "kill-worker": FailureClass(name="kill-worker", scope="worker", rate=0.0),
    "stop-worker": FailureClass(name="stop-worker", scope="hang", rate=0.0),
    "kill-node": FailureClass(name="kill-node", scope="node", rate=0.0),
    "slow": FailureClass(name="slow", scope="slow", rate=0.0, factor=1.5, lasts_s=3600.0, found_s=120.0),
}
