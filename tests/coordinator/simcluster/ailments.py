"""What is found on the simulated nodes, and what becomes of repairs, checks and machines that come back.

Invariants: no more machines are acted on than the blast limit allows, nothing is done for what is on trial, unknown or
shared, a machine that was given up is not used before it has passed its checks, and the budgets hold.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from holdfast.coordinator.health import limits
from holdfast.coordinator.kernel import events as e
from holdfast.coordinator.kernel.history import RecordKind, Remembered
from holdfast.protocol import messages as m
from holdfast.protocol.health import CheckResult, Condition, Finding, Remedy, Severity

if TYPE_CHECKING:
    from holdfast.coordinator.machine import Core
    from simcluster.agent import SimAgent
    from simcluster.cluster import Cluster

REMEDIES = {
    "replace": Remedy.REPLACE,
    "reset": Remedy.RESET_DEVICE,
    "reboot": Remedy.REBOOT,
    "restart": Remedy.RESTART_WORKER,
}
HARMLESS = ("trial-", "unknown-", "shared-")
"""How the rules begin for which nothing may ever be done."""


class Ailments:
    """Finds things on nodes, and plays their agents and their engine."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.over = False
        self.rng = random.Random(-6_000_023 - cluster.plan.seed)
        self.acts = 0
        self.swaps = 0
        self._swapped_s = float("-inf")
        self._size = 0
        self._given_up: set[str] = set()
        self._passed: dict[int, str] = {}
        self._counted: set[tuple[int, str, str]] = set()
        for after_s, kind in cluster.plan.findings:
            cluster.clock.after(after_s, self.find, kind)
        self.people = random.Random(-9_000_011 - cluster.plan.seed)
        for after_s in cluster.plan.clears:
            cluster.clock.after(after_s, self.clear)

    def identity(self, name: str) -> str:
        """Some machines cannot be told again."""
        return f"M-{name}" if self.cluster.plan.findings and self.rng.random() < 0.8 else ""

    def past(self, identity: str) -> tuple[Remembered, ...]:
        """What is known of a machine from jobs before: some are lemons."""
        own = random.Random(f"{self.cluster.plan.seed} {identity}")
        if not identity or own.random() >= self.cluster.plan.lemons:
            return ()
        return tuple(
            Remembered(kind=RecordKind.INCIDENT, age_s=3600.0, job=f"job{i}", rule="ecc") for i in range(3)
        )

    # ------------------------------------------------------------ what is found

    def find(self, kind: str) -> None:
        """Something is found on a node that is drawn."""
        living = [a for a in self.cluster.agents.values() if a.alive and not a.silent]
        if self.over or self.cluster.service.ended is not None or not living:
            return
        agent = self.rng.choice(living)
        self.cluster.log("found: %s on %s", kind, agent.name)
        self.cluster.faults.last_s = self.cluster.clock.now
        if kind.startswith("storm"):
            for other in living:
                self.cluster.clock.after(
                    self.rng.uniform(0.0, 0.5), self._tell, other, self._finding(kind, "storm")
                )
        elif kind == "and-dies":
            self._tell(agent, self._finding("replace-later", "dying"))
            self.cluster.clock.after(self.rng.uniform(0.0, 1.0), self._kill, agent)
        elif kind == "dies-and":
            self._kill(agent)
            finding = self._finding(self.rng.choice(("replace-now", "reset-now", "reboot-later")), "dead")
            self.cluster.clock.after(self.rng.uniform(0.0, 1.0), self._tell, agent, finding)
        elif kind == "well-again":
            finding = self._finding("replace-later", "well")
            self._tell(agent, finding)
            well = msgspec.structs.replace(finding, condition=Condition.HEALTHY)
            self.cluster.clock.after(self.rng.uniform(0.0, 3.0), self._tell, agent, well)
        else:
            for _ in range(self.rng.choice((1, 1, 2, 3))):
                rule = f"{kind}-{self.rng.randrange(2)}"
                self.cluster.clock.after(
                    self.rng.choice((0.0, 0.1, 12.0)), self._tell, agent, self._finding(kind, rule)
                )

    def clear(self) -> None:
        """A person says that a machine is well, or that a rule was wrong about it: mostly of one that is not used."""
        core = self.cluster.service.core
        if self.cluster.service.ended is not None or core is None:
            return
        health = core.state.health
        machines = [*health.quarantine, *(a.machine for a in health.acts)] or [
            n.machine for n in core.state.membership.nodes.values()
        ]
        if not machines:
            return
        machine = self.people.choice(machines)
        rules = ["", health.quarantine_rules.get(machine, ""), *(a.rule for a in health.acts)]
        rule = self.people.choice(rules)
        self.cluster.log("cleared: %s of %s", machine, rule or "everything")
        self.cluster.service.handle(e.MachineCleared(machine, rule))

    def _finding(self, kind: str, rule: str) -> Finding:
        word, _, when = kind.partition("-")
        severity = Severity.FATAL if when == "now" else Severity.ERROR
        drawn = self.rng.choice(list(REMEDIES.values()))
        if self.cluster.plan.only_planned and drawn is Remedy.RESTART_WORKER:
            drawn = Remedy.REPLACE  # to end a worker cannot wait for a step's edge
        remedy = REMEDIES.get(word, drawn)
        finding = Finding(
            rule=rule,
            severity=severity,
            remedy=remedy,
            source="kmsg",
            device=self.rng.choice(("", "GPU-1", "GPU-2")),
            evidence="simulated",
        )
        change: dict[str, dict[str, object]] = {
            "shared": {"shared": True, "severity": Severity.FATAL},
            "trial": {"dry_run": True, "severity": Severity.FATAL},
            "unknown": {"condition": Condition.UNKNOWN, "severity": Severity.FATAL},
            "warning": {"severity": Severity.WARNING},
            "ask": {"remedy": Remedy.ASK},
            "soft": {"source": "worker"},
            "said": {"source": "log", "firm": True},
        }
        return msgspec.structs.replace(finding, **change.get(word, {}))

    def _tell(self, agent: SimAgent, finding: Finding) -> None:
        if agent.alive:
            ours = agent.living() if finding.firm else []
            worker = self.rng.choice(ours).name if ours else ""
            agent.send(m.FindingsReported((msgspec.structs.replace(finding, worker=worker),)))

    def _kill(self, agent: SimAgent) -> None:
        if not self.over:
            for worker in agent.living()[:1]:
                self.cluster.faults.killed.append(worker.name)
                worker.die(-9)

    # ------------------------------------------------------------ agents

    def basic_checks(self, agent: SimAgent) -> tuple[CheckResult, ...]:
        """Before a node joins."""
        bad = not self.over and agent.sessions == 1 and self.rng.random() < self.cluster.plan.refused_checks
        condition = Condition.FAULTY if bad else self.rng.choice((Condition.HEALTHY, Condition.UNKNOWN))
        return (CheckResult(name="disk", condition=condition),) if self.cluster.plan.findings else ()

    def repair(self, agent: SimAgent, order: m.Repair) -> None:
        """The agent does it, or does not."""
        self.cluster.checks.require(not agent.living(), "%s is repaired while it has workers", agent.name)
        if self.rng.random() < self.cluster.plan.repair_silent:
            return
        error = "simulated" if self.rng.random() < self.cluster.plan.repair_fails else None
        self.cluster.clock.after(self.rng.uniform(0.1, 3.0), agent.send, m.Repaired(order.request, error))

    def check(self, agent: SimAgent, order: m.RunChecks) -> None:
        """The deep checks of a node."""
        if not self.over and self.rng.random() < self.cluster.plan.check_silent:
            return
        bad = self.rng.random() < self.cluster.plan.check_fails
        condition = Condition.FAULTY if bad else Condition.HEALTHY
        if not bad:
            self._passed[order.request] = agent.identity or agent.name
        answer = m.Checked(order.request, (CheckResult(name="memory", condition=condition),))
        self.cluster.clock.after(self.rng.uniform(0.5, 5.0), agent.send, answer)

    # ------------------------------------------------------------ the engine

    def acted(self, action: e.MarkNode | e.RebootNode | e.Remember) -> None:
        """The engine is told; what was taken away may come back."""
        if isinstance(action, e.Remember):
            return
        agent = self.cluster.agents.get(action.node)
        identity = agent.identity if agent is not None else ""
        if isinstance(action, e.RebootNode):
            if not self.over or self.rng.random() < 0.5:
                self.cluster.clock.after(self.rng.uniform(1.0, 8.0), self._back, identity)
        elif identity and not self.over and self.rng.random() < self.cluster.plan.comes_back:
            self.cluster.clock.after(self.rng.uniform(1.0, 8.0), self._back, identity)

    def _back(self, identity: str) -> None:
        there = any(a.alive and a.identity == identity for a in self.cluster.agents.values() if identity)
        if self.cluster.service.ended is None and not there:
            self.cluster.add_node(identity)

    # ------------------------------------------------------------ invariants

    def handled(self, event: e.Event, actions: list[e.Action], core: Core) -> None:
        """After every event."""
        if not self.cluster.plan.findings:
            return
        require, state = self.cluster.checks.require, core.state
        near, share = limits.acted_on(core), state.spec.health.blast_share
        size, self._size = (
            max(self._size, limits.fleet_size(core)),
            limits.fleet_size(core),
        )  # who is acted on may be gone
        limit = limits.blast_limit(size, share)
        for act in state.health.acts:
            key = (act.incident, act.machine, act.remedy.value)
            if not act.earlier and limits.acts_on_node(act.remedy) and key not in self._counted:
                again = any(machine == act.machine for _, machine, _ in self._counted)
                self._counted.add(key)
                before = {m for _, m, _ in self._counted if m in near} - {act.machine}
                require(again or len(before) < limit, "%s is the %d. of %d", act, len(near), limit)
            require(not act.rule.startswith(HARMLESS), "acted on %s", act)
        spent = sum(n for r, n in state.health.totals.acts.items() if limits.acts_on_node(Remedy(r)))
        require(spent <= state.spec.max_restarts, "%d acts of %d", spent, state.spec.max_restarts)
        for action in actions:
            if isinstance(action, e.Record) and action.kind == "readmitted":
                checked = bool(action.fields["checks"]) or isinstance(event, e.MachineCleared)
                require(checked, "%s is readmitted without checks", action.fields["node"])
            if isinstance(action, e.Record) and action.kind == "lemon-leaves":
                self._lemon_leaves(action.fields, core)
            if isinstance(action, e.Send) and isinstance(action.message, m.StartWorker):
                node = state.membership.nodes.get(action.node)
                if node is not None:
                    require(
                        node.machine not in state.health.quarantine,
                        "%s is used, though given up",
                        action.node,
                    )
                    require(node.held is None, "%s is used, though held: %s", action.node, node.held)
            if isinstance(action, e.MarkNode):
                self.acts += 1
        if isinstance(event, e.MachineCleared) and not event.rule:
            require(event.machine not in state.health.quarantine, "%s is still kept out", event.machine)
        require(state.health.quarantine_rules.keys() <= state.health.quarantine.keys(), "a rule for nothing")
        for incident in state.incidents[-8:]:
            require(len(incident.evidence) <= 8, "evidence of %d", incident.id)

    def _lemon_leaves(self, told: dict[str, object], core: Core) -> None:
        require, state = self.cluster.checks.require, core.state
        self.swaps += 1
        require(bool(state.membership.nodes[str(told["node"])].lemon), "%s is no lemon", told)
        require(
            not any(state.membership.nodes[n].lemon for n in str(told["instead"]).split(", ")),
            "for another lemon: %s",
            told,
        )
        now = self.cluster.clock.now
        require(
            now - self._swapped_s >= state.spec.health.blast_window_s,
            "again after %g s",
            now - self._swapped_s,
        )
        self._swapped_s = now
