"""Machines, kubelets, a scheduler, and a coordinator with its agents: what happens around the operator."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from holdfast.kubernetes.objects.kueue import WorkloadSeen
from holdfast.kubernetes.objects.machine import MachineSeen
from holdfast.kubernetes.objects.pod import PodSeen, TerminationMessage
from holdfast.kubernetes.objects.resource import HoldfastJob
from holdfast.kubernetes.policy.plan import CoordinatorReport, NodeReport
from holdfast.protocol.engine_orders import (
    Availability,
    EngineOrder,
    NodeGoing,
    NodeTaken,
    OrderDone,
    ProvideNode,
    ReleaseNode,
)
from holdfast.protocol.network.endpoint import Hearing
from holdfast.protocol.notices import NoticeCause
from simkube.choices import Choices
from simkube.server import Server


class Silent(Exception):
    """The coordinator does not answer."""


@dataclass
class Machine:
    name: str
    up: bool = True
    cordoned: bool = False
    bad: bool = False
    """Agents crash on it, as soon as they start."""


@dataclass
class Coordinator:
    """What a job's coordinator knows. It is the core in miniature: it loses nodes, orders, and ends in order."""

    term: int
    target: int
    spares: int
    fewest: int = 1
    nodes: dict[str, bool] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    orders: dict[int, EngineOrder] = field(default_factory=dict)
    last_order: int = 0
    step: int = 0
    stopping: str | None = None
    cause: str = ""
    outcome: str | None = None

    def order(self, order: EngineOrder) -> None:
        self.last_order += 1
        self.orders[self.last_order] = msgspec.structs.replace(order, order_id=self.last_order)

    def lose(self, node: str, planned: bool, may_return: bool = False) -> None:
        if self.nodes.get(node):
            self.nodes[node] = False
            self.leaving.discard(node)
            reason = "left" if planned else "silent"
            self.order(ReleaseNode(node=node, reason=reason, planned=planned, may_return=may_return))
            self.order(ProvideNode("one is missing"))

    def joins(self, node: str) -> None:
        self.nodes[node] = True
        for number, order in list(self.orders.items()):
            if isinstance(order, ReleaseNode) and order.node == node:
                del self.orders[number]

    def training(self) -> set[str]:
        there = [name for name, alive in sorted(self.nodes.items()) if alive]
        return set(there[: self.target]) if len(there) >= self.fewest else set()


class Cluster:
    """Everything but the operator. `tick` lets a little happen."""

    def __init__(self, dice: random.Random, server: Server, machines: int, until: int) -> None:
        self.dice, self.server, self.until = dice, server, until
        self.machines = {f"m{k}": Machine(f"m{k}") for k in range(machines)}
        self.coordinator: Coordinator | None = None
        self.spoken_for = ""
        """Uid of the coordinator's job."""
        self.saved = 0
        self.now_s = 1_000_000.0
        self.script_fails = False
        self._dead: set[str] = set()
        self.unreachable: set[str] = set()
        """Uids of coordinators' pods whose network is broken: their machines are ready."""
        self._down: dict[str, float] = {}
        """Uids of pods whose container has ended, and how soon the kubelet starts it again: by this chance in each second."""
        self.returned = 0
        """Nodes that came back in their pods."""
        self._heard: dict[str, tuple[int, float]] = {}
        """Which term each node has met, by its pod's uid, and when it last heard it."""
        self.neighbours: list[Server] = []
        """Whose pods are on the same machines."""
        self.quota = 0
        """Nodes that Kueue lets in."""
        self.choices: Choices | None = None
        """Machines that Kueue chooses; None: the scheduler does."""

    def seen_machines(self) -> dict[str, MachineSeen]:
        return {
            one.name: MachineSeen(
                name=one.name,
                ready=one.up,
                going="it is cordoned" if one.cordoned else None,
            )
            for one in self.machines.values()
        }

    def runs(self, pod: PodSeen) -> bool:
        """Its processes run, whatever the API server says."""
        return (
            pod.machine is not None
            and self.machines[pod.machine].up
            and pod.uid not in self._dead
            and pod.uid not in self._down
            and pod.phase == "Running"
            and (pod.crash is None or pod.ready)
        )

    # ------------------------------------------------------------ a little happens

    def tick(self) -> None:
        self.now_s += 1.0
        self.server.collect_some()
        for pod in list(self.server.pods.values()):
            self._kubelet(pod)
        self._schedule()
        self._coordinate()
        self._let_in()
        if self.choices is not None:
            self.choices.act()

    def _let_in(self) -> None:
        """Kueue: quota is held from an admission until its owner gives it back."""
        server = self.server
        for one in list(server.workloads.values()):
            if one in self.admissible() and self.dice.random() < 0.5:
                server.change_workload(one.name, admitted=True, reserved=True, evicted=None)
                if self.choices is not None:
                    self.choices.choose(one)
            elif one.reserved and not one.active and one.evicted is None:
                server.change_workload(one.name, evicted="Deactivated")

    def admissible(self) -> list[WorkloadSeen]:
        """Those that Kueue has quota for, and may admit at any moment."""
        all_ = self.server.workloads.values()
        free = self.quota - sum(one.nodes for one in all_ if one.reserved and not one.finished)
        waits = [one for one in all_ if not one.reserved and one.active and not one.finished]
        if self.choices is not None:
            free = min(free, len(self.choices.free()))
        return [one for one in waits if one.nodes <= free]

    def evict(self, name: str) -> None:
        """Somebody of higher priority wants its quota."""
        if self.server.workloads[name].reserved and not self.server.workloads[name].finished:
            self.server.change_workload(name, evicted="Preempted")

    def _is_held(self) -> bool:
        """Whether the scheduler binds no node: their PodGroup would not be complete, or is not there."""
        job = self.server.object.job if self.server.object is not None else None
        if job is None or job.spec.scheduling.gang is None:
            return False
        members = self.server.beside.get("PodGroup")
        nodes = [pod for pod in self.server.mine() if not pod.coordinator and not pod.ended]
        bound = {pod.machine for pod in nodes if pod.machine is not None}
        wait = sum(pod.machine is None and not pod.deleting for pod in nodes)
        free = sum(one.up and not one.cordoned and one.name not in bound for one in self.machines.values())
        return members is None or len(bound) + min(wait, free) < members

    def _schedule(self) -> None:
        all_ = [pod for one in (self.server, *self.neighbours) for pod in one.pods.values()]
        # A pod whose processes are over holds nothing.
        taken = {pod.machine for pod in all_ if pod.machine and not pod.coordinator and not pod.ended}
        is_held = self._is_held()
        for pod in list(self.server.pods.values()):
            if pod.machine is not None or pod.deleting or self.dice.random() < 0.2:
                continue
            free = [
                one.name
                for one in self.machines.values()
                if one.up and not one.cordoned and (pod.coordinator or one.name not in taken | pod.avoids)
            ]
            if is_held and not pod.coordinator:
                free = []
            if self.choices is not None and not pod.coordinator:
                if pod.gated:
                    continue  # the scheduler does not look at it
                free = [name for name in free if name == pod.chosen]
            if free:
                machine = self.dice.choice(free)
                taken.add(machine)
                self.server.change(pod.name, machine=machine, unschedulable=False, waits=None)
            elif not pod.unschedulable:
                self.server.change(pod.name, unschedulable=True, waits="no machine is free")

    def _kubelet(self, pod: PodSeen) -> None:
        machine = self.machines[pod.machine] if pod.machine else None
        if machine is None:
            if pod.deleting:
                self.server.remove(pod.name)
        elif not machine.up:
            return
        elif pod.deleting:
            if self.dice.random() < 0.7:
                self._dead.add(pod.uid)
                self.server.remove(pod.name)
        elif pod.uid in self._dead and not pod.ended:
            self.server.change(pod.name, phase="Failed", ready=False)
        elif pod.ended:
            return
        elif pod.uid in self._down:
            self._start_again(pod)
        elif pod.ready:
            if pod.mislabelled and pod in self.orphans() and self.dice.random() < 0.1:
                # It gives up. No operator sees it, so nobody else ends it.
                self._dead.add(pod.uid)
                self.server.change(pod.name, phase="Failed", ready=False)
        elif machine.bad and not pod.coordinator:
            started = {"phase": "Running", "address": "10.0.0.1"}
            self.server.change(pod.name, **started, restarts=pod.restarts + 1, crash="exit code 1: bad")
        elif self.dice.random() < 0.7:
            # A node is ready when it has joined.
            joins = self.coordinator is not None and self.reached() is not None
            ready = pod.coordinator or pod.uid in self._heard or joins
            if ready or pod.phase != "Running":
                self.server.change(pod.name, phase="Running", ready=ready, address="10.0.0.1")

    def _start_again(self, pod: PodSeen) -> None:
        if pod.ready:
            self.server.change(pod.name, ready=False, crash="exit code 137", backs_off=pod.restarts > 0)
        elif self.dice.random() < self._down[pod.uid]:
            del self._down[pod.uid]
            # On a machine that is bad by now it crashes again, before it is ready.
            bad = self.machines[pod.machine or ""].bad
            self.server.change(pod.name, ready=not bad, restarts=pod.restarts + 1, backs_off=False)

    def orphans(self) -> list[PodSeen]:
        """Pods that have lost their label: nodes of a run without a coordinator, and coordinators of a run without nodes."""
        mine = [pod for pod in self.server.mine() if self.runs(pod)]
        others = {(pod.run, pod.coordinator) for pod in mine}
        return [pod for pod in mine if pod.mislabelled and (pod.run, not pod.coordinator) not in others]

    def _coordinate(self) -> None:
        job = self.server.object.job if self.server.object is not None else None
        pods = [pod for pod in self.server.mine() if pod.coordinator and self.runs(pod) and not pod.deleting]
        newest = max(pods, key=lambda pod: pod.number, default=None)
        if newest is None or job is None:
            self.coordinator = None
            return
        if (
            self.coordinator is None
            or self.spoken_for != job.id.uid
            or self.coordinator.term != newest.number
        ):
            self.spoken_for = job.id.uid
            spec = self.server.beside.get("ConfigMap", job).spec
            self.coordinator = Coordinator(
                newest.number, spec.nodes, spec.spares, spec.fewest, step=self.saved
            )
        if newest.uid not in self.unreachable:
            self._decide(self.coordinator, newest)

    def _decide(self, known: Coordinator, pod: PodSeen) -> None:
        if known.outcome is not None:
            return
        here = {
            one.name
            for one in self.server.mine()
            if not one.coordinator and one.run == pod.run and self.runs(one)
        }
        for name in sorted(here):
            self._heard[self.server.pods[name].uid] = known.term, self.now_s
        for name in sorted(here):
            self.returned += known.nodes.get(name) is False
            if not known.nodes.get(name):
                known.joins(name)
        for name in sorted(known.nodes):
            if known.nodes[name] and name not in here:
                ended = self.server.pods.get(name)
                known.lose(name, planned=False, may_return=ended is not None and ended.uid in self._down)
        wanted = known.target + known.spares
        alive = {name for name, lives in known.nodes.items() if lives}
        for name in sorted(known.leaving & alive):
            # Its replacement first, or it leaves a full job.
            if len(alive - known.leaving) >= wanted or self.dice.random() < 0.1:
                known.lose(name, planned=True)
                self._dead.add(self.server.pods[name].uid)
                self.server.change(name, phase="Succeeded", ready=False)
        for name in sorted(alive - known.leaving, reverse=True)[
            : max(0, len(alive - known.leaving) - wanted)
        ]:
            known.leaving.add(name)
        if known.training():
            known.step += 1
        if known.stopping is not None or known.step >= self.until or (self.script_fails and known.step > 5):
            outcome = (
                "stopped"
                if known.stopping is not None
                else "finished"
                if known.step >= self.until
                else "failed"
            )
            self._end(known, pod, outcome)

    def _end(self, known: Coordinator, pod: PodSeen, outcome: str) -> None:
        known.outcome, self.saved = outcome, known.step
        for one in self.server.mine():
            if one.run == pod.run and self.runs(one) and not one.coordinator:
                self._dead.add(one.uid)
                self.server.change(one.name, phase="Succeeded", ready=False)
        self._dead.add(pod.uid)
        termination_message = TerminationMessage(
            outcome=outcome, reason=known.stopping or "", cause=known.cause
        )
        self.server.change(pod.name, phase="Succeeded", ready=False, termination_message=termination_message)

    # ------------------------------------------------------------ what the operator says to the coordinator

    def said(self, uid: str) -> CoordinatorReport:
        """uid: of the job that it is to be the coordinator of. Others do not know its token."""
        known = self._known(uid)
        training = known.training()
        return CoordinatorReport(
            term=known.term,
            phase="running" if training else "gathering",
            wanted=known.target + known.spares,
            orders=tuple(known.orders.values()),
            nodes={
                name: NodeReport(alive=lives, trains=name in training, leaves=name in known.leaving)
                for name, lives in known.nodes.items()
            },
            step=known.step or None,
        )

    def hearings(self, asked: list[PodSeen]) -> dict[str, Hearing | None]:
        """What nodes say of their coordinator."""
        answers: dict[str, Hearing | None] = dict.fromkeys(pod.name for pod in asked)
        for pod in asked:
            there = self.server.pods.get(pod.name)
            if there is not None and self.runs(there):
                term, heard_s = self._heard.get(there.uid, (0, 0.0))
                missing_s = None if heard_s == self.now_s else self.now_s - heard_s
                answers[pod.name] = Hearing(term=term, missing_s=missing_s)
        return answers

    def tell(self, uid: str, news: Availability) -> None:
        known = self._known(uid)
        match news:
            case OrderDone(order_id=number):
                known.orders.pop(number, None)
            case NodeGoing(node=node) if known.nodes.get(node):
                known.leaving.add(node)
            case NodeTaken(node=node):
                if known.nodes.get(node):
                    known.lose(node, planned=False)

    def stop(self, uid: str, reason: str, cause: NoticeCause) -> None:
        known = self._known(uid)
        known.stopping, known.cause = reason, cause

    def resize(self, uid: str, nodes: int) -> None:
        self._known(uid).target = nodes

    def _known(self, uid: str) -> Coordinator:
        if self.coordinator is None or self.coordinator.outcome is not None or self.spoken_for != uid:
            raise Silent
        # Nobody reaches it: its network is broken.
        if self.reached() is None:
            raise Silent
        return self.coordinator

    def reached(self) -> PodSeen | None:
        """The coordinator's pod, where nodes and the operator reach it."""
        known = self.coordinator
        term = known.term if known is not None else None
        pods = (pod for pod in self.server.mine() if pod.coordinator and pod.number == term)
        return next((pod for pod in pods if pod.uid not in self.unreachable), None)

    # ------------------------------------------------------------ faults

    def power_loss(self) -> None:
        up = [one for one in self.machines.values() if one.up]
        if len(up) > 1:
            self.dice.choice(up).up = False

    def cut_coordinator(self) -> None:
        """The network of its pod is broken, and its machine is ready."""
        if (pod := self.reached()) is not None:
            self.unreachable.add(pod.uid)

    def is_cut(self) -> bool:
        """It runs, and nobody reaches it."""
        pods = (pod for pod in self.server.mine() if pod.coordinator and self.runs(pod))
        return any(pod.uid in self.unreachable for pod in pods)

    def power_returns(self) -> None:
        for machine in self.machines.values():
            if not machine.up:
                machine.up = True
                for pod in list(self.server.pods.values()):
                    if pod.machine == machine.name:
                        self._dead.add(pod.uid)

    def kill_pod(self) -> None:
        """A process dies for good, or somebody evicts it."""
        pods = [pod for pod in self.server.pods.values() if self.runs(pod)]
        if pods:
            pod = self.dice.choice(pods)
            if self.dice.random() < 0.5:
                self.server.change(pod.name, deleting=True)
            else:
                self._dead.add(pod.uid)

    def kill_container(self) -> None:
        """All that runs in a node's container ends: the kernel killed it for memory, for example."""
        pods = [pod for pod in self.server.pods.values() if self.runs(pod) and not pod.coordinator]
        if pods:
            self._down[self.dice.choice(pods).uid] = self.dice.choice((0.5, 0.5, 0.5, 0.03))

    def are_waited_for(self) -> bool:
        """Nodes that may come back in their pods."""
        pods = [pod for pod in self.server.mine() if pod.uid in self._down and pod.machine is not None]
        return any(pod.stays and self.machines[pod.machine or ""].up for pod in pods)

    def job(self) -> HoldfastJob | None:
        return self.server.object.job if self.server.object is not None else None
