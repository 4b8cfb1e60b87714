"""Injected faults: which worker or node each one hits, and when."""

from __future__ import annotations

import random

import msgspec

from holdfast.coordinator.kernel.state import CoreState, JobPhase
from holdfast.protocol import messages as m
from holdfast.protocol.faults import NODE_FAULTS, PHASES, ArmedFault, FaultKind, FaultSpec, node_name
from holdfast.protocol.phases import Phase

MIN_GAP_S = 1e-3


class Planned(msgspec.Struct, kw_only=True):
    """One `--fault`, and how many times it is still to fire."""

    id: str
    spec: FaultSpec
    left: int
    """How often it is still to fire."""
    due_s: float | None = None
    """When it fires next, on the core's clock; None: it waits for a step, or for nothing any more."""
    fired: int = 0
    """How often it struck."""
    struck: str | None = None
    """The worker that it was sent to last, or its own `id` where it hits a node without steps; None:
    none."""


class FaultOrder(msgspec.Struct, frozen=True):
    """The order to an agent that makes a fault happen."""

    plan: str
    """The `id` of the fault."""
    node: str = ""
    """Whose agent; empty: nobody's."""
    message: m.ToAgent | None = None
    """None: the coordinator itself is hit."""


class Injector:
    """The faults of one job. Times are those of the core's clock."""

    def __init__(self, specs: tuple[FaultSpec, ...]) -> None:
        self.plans: dict[str, Planned] = {}
        self._running_since: float | None = None
        for spec in specs:
            self.add(spec, None)

    def add(self, spec: FaultSpec, now: float | None) -> Planned:
        """One more fault. `now`: it was asked for while the job runs, so its time counts from here."""
        plan = Planned(id=f"fault-{len(self.plans)}", spec=spec, left=spec.times)
        self.plans[plan.id] = plan
        if now is not None:
            self._schedule(plan, now, first=True)
        return plan

    def formed(self, state: CoreState, now: float) -> list[FaultOrder]:
        """A generation was formed: faults that wait for a step go to the workers that now hold the ranks."""
        if self._running_since is None:
            self._running_since = now
            for plan in self.plans.values():
                self._schedule(plan, now, first=True)
        generation = state.membership.generation
        members = {x.worker: x for x in generation.members} if generation and self.plans else {}
        # Every member gets a list, also an empty one: that is how a worker which lost its rank is disarmed.
        by_worker: dict[str, list[ArmedFault]] = {w: [] for w in members}
        for plan in self.plans.values():
            if plan.left > 0 and plan.due_s is None and not _timed(plan.spec):
                for member in self._targets(plan, state):
                    by_worker.setdefault(member.worker, []).append(_armed(plan))
        return [
            FaultOrder("", members[w].node, m.Relay(w, m.Arm(tuple(faults))))
            for w, faults in by_worker.items()
        ]

    def due(self, state: CoreState, now: float) -> list[FaultOrder]:
        """Faults whose time has come."""
        orders = []
        for plan in self.plans.values():
            # Before the times: a spare never comes to a step, so a plan that waits for one of its steps would
            # never fire, and a person would take the silence for a node that survived it.
            if plan.left > 0 and (idle := self._idle_node(plan, state)) is not None:
                plan.struck = plan.id
                orders.append(FaultOrder(plan.id, idle, m.RunFault(_armed(plan))))
                continue
            if plan.left <= 0 or plan.due_s is None or now < plan.due_s:
                continue
            if state.membership.phase is not JobPhase.RUNNING:
                # Put off and not skipped: a person who asked for a fault every 8 s wants one as soon as there is
                # a worker to hit.
                plan.due_s = now + 0.1
                continue
            order = self._order_of(plan, state)
            if order is not None:
                orders.append(order)
            self._schedule(plan, now, first=False)
        return orders

    def fire_now(self, plan: Planned, state: CoreState) -> list[FaultOrder]:
        """A fault that was asked for without a time, while the job runs."""
        if _timed(plan.spec):
            return []
        if plan.spec.step is None and plan.spec.phase is None:
            order = self._order_of(plan, state)
            return [order] if order else []
        member = self._target(plan, state)
        return (
            [FaultOrder(plan.id, member.node, m.Relay(member.worker, m.Arm((_armed(plan),))))]
            if member
            else []
        )

    def mark_running(self) -> None:
        """A new coordinator goes on with the plans of the old one; their times stand."""
        # Any value but None will do: with None, `formed` would take the next generation for the first and
        # start the clock of every timed fault again.
        self._running_since = 0.0

    def next_due(self) -> float | None:
        """When `due` is to be asked next."""
        return min((p.due_s for p in self.plans.values() if p.left > 0 and p.due_s is not None), default=None)

    def _idle_node(self, plan: Planned, state: CoreState) -> str | None:
        """A fault of a whole node that waits for a step, when that node is a spare: it has no steps of its own."""
        spec = plan.spec
        if spec.node is None or spec.kind not in NODE_FAULTS or plan.struck or _timed(spec) or spec.phase:
            return None
        name = node_name(spec.node)
        node, generation = state.membership.nodes.get(name), state.membership.generation
        if (
            generation is None
            or node is None
            or not node.alive
            or state.membership.committed < (spec.step or 0)
        ):
            return None
        return None if any(x.node == name for x in generation.members) else name

    def unfired(self) -> list[str]:
        """Faults that never fired, for the ledger: a person relies on them."""
        return [str(p.spec) for p in self.plans.values() if not p.fired]

    def fired(self, id: str) -> Planned | None:
        """A fault is happening now."""
        plan = self.plans.get(id.partition("/")[0])
        if plan is not None:
            # Counted as it happens and not as it is sent. A worker may end before it gets to the step; the
            # fault then goes to whoever has the rank next, and none of those that were asked for is missing.
            plan.left -= 1
            plan.fired += 1
        return plan

    def _schedule(self, plan: Planned, now: float, first: bool) -> None:
        spec = plan.spec
        if spec.every_s is not None:
            plan.due_s = now + max(spec.every_s, MIN_GAP_S)
        elif spec.after_s is not None and first:
            plan.due_s = now + spec.after_s
        elif not first:
            plan.due_s = None if spec.every_s is None else plan.due_s

    def _order_of(self, plan: Planned, state: CoreState) -> FaultOrder | None:
        if plan.spec.kind is FaultKind.KILL_COORDINATOR:
            return FaultOrder(plan.id)
        member = self._target(plan, state)
        armed = _armed(plan)
        if member is None:
            node = None if plan.spec.node is None else state.membership.nodes.get(node_name(plan.spec.node))
            spare = node is not None and node.alive and plan.spec.kind in NODE_FAULTS
            return FaultOrder(plan.id, node.name, m.RunFault(armed)) if spare and node else None
        plan.struck = member.worker
        if plan.spec.kind is FaultKind.SLOW and plan.spec.node is not None:
            return FaultOrder(plan.id, member.node, m.RunFault(armed))
        if plan.spec.phase is not None:
            return FaultOrder(plan.id, member.node, m.Relay(member.worker, m.Arm((armed,))))
        return FaultOrder(plan.id, member.node, m.RunFault(armed, member.worker))

    def _targets(self, plan: Planned, state: CoreState) -> list[m.Member]:
        """A node that is slow is so for all of its workers; any other fault hits one."""
        member = self._target(plan, state)
        if member is None or state.membership.generation is None:
            return []
        if plan.spec.kind is FaultKind.SLOW and plan.spec.node is not None:
            return [x for x in state.membership.generation.members if x.node == member.node]
        return [member]

    def _target(self, plan: Planned, state: CoreState) -> m.Member | None:
        if state.membership.generation is None:
            return None
        spec, members = plan.spec, state.membership.generation.members
        if spec.rank is not None:
            return next((x for x in members if x.rank == spec.rank), None)
        if spec.node is not None:
            return next((x for x in members if x.node == node_name(spec.node)), None)
        if spec.phase == "transfer":
            restoring = [
                x
                for x in members
                if (assignment := state.membership.assignments.get(x.worker)) and assignment.restore
            ]
            return restoring[0] if restoring else None
        # Drawn from the plan and how often it fired, not from one stream: so a replay hits the same ranks,
        # whatever else was injected.
        return random.Random(f"{spec.seed}/{plan.id}/{plan.fired}").choice(members)


def _timed(spec: FaultSpec) -> bool:
    return spec.after_s is not None or spec.every_s is not None


def _armed(plan: Planned) -> ArmedFault:
    spec = plan.spec
    phase: Phase | None = PHASES[spec.phase] if spec.phase else None
    number = None if phase is None else int(phase)
    return ArmedFault(
        id=f"{plan.id}/{plan.fired}",
        kind=spec.kind,
        step=spec.step,
        phase=number,
        code=spec.code,
        factor=spec.factor,
    )
