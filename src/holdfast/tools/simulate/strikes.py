"""Failures of a simulated cluster, and the messages of agents and peers about them."""

from __future__ import annotations

import heapq
import math

from holdfast.coordinator.kernel import events as e
from holdfast.protocol import messages as m
from holdfast.protocol.health import Finding, Remedy, Severity
from holdfast.protocol.phases import PageReading, Phase
from holdfast.tools.simulate import names
from holdfast.tools.simulate.machine import HOP_S, SIGKILL, FewNames, SimulatedMachine
from holdfast.tools.simulate.scenario import FailureClass
from holdfast.tools.simulate.trial_view import TrialView


def expect(cluster: TrialView, machine: SimulatedMachine, at_s: float, kind: FailureClass | None) -> None:
    """Plans the next failure of a machine."""
    machine.fails_s, machine.failure = at_s, kind
    cluster.at(at_s, strike, cluster, machine, at_s)


def strike(cluster: TrialView, machine: SimulatedMachine, planned_s: float) -> None:
    """A machine fails, and may take others of its rack with it."""
    kind = machine.failure
    # The failure has been planned anew since: the machine was repaired or replaced before it came.
    if machine.fails_s != planned_s or kind is None or machine.source is None:
        return
    # The machine is one of those that another one represents. The trial is run again with more names instead
    # of giving a wrong result.
    if not machine.name:
        raise FewNames
    if not machine.up:
        return
    cluster.failures[kind.name] = cluster.failures.get(kind.name, 0) + 1
    extra = machine.source.burst(kind)
    for delay_s in extra:
        rack = names.rack(cluster, machine.place, kind)
        cluster.at(cluster.now + delay_s, follow, cluster, rack[machine.source.pick(len(rack))], kind)
    # A machine that is lost draws its next failure when it comes back; one that lives on draws it now.
    if kind.scope != "node":
        expect(cluster, machine, *machine.source.next(cluster.now))
    fail(cluster, machine, kind)


def follow(cluster: TrialView, place: int, kind: FailureClass) -> None:
    """Another machine of the rack fails."""
    for machine in cluster.machines.values():
        if machine.place == place and machine.up:
            cluster.failures[kind.name] += 1
            fail(cluster, machine, kind)
            return
    if any(x.place == place for x in cluster.rest):
        raise FewNames


def fail(cluster: TrialView, machine: SimulatedMachine, kind: FailureClass) -> None:
    """Applies a failure to one machine."""
    member = machine in cluster.members
    if kind.scope == "node":
        lose(cluster, [machine], None)
    elif kind.scope == "slow":
        machine.slow = kind.factor
        cluster.at(cluster.now + kind.lasts_s, fast_again, cluster, machine)
        cluster.pace()
        if kind.found_s and kind.found_s < kind.lasts_s:
            cluster.at(
                cluster.now + kind.found_s / 2, found_slow, cluster, machine, Severity.WARNING, Remedy.WATCH
            )
            cluster.at(
                cluster.now + kind.found_s, found_slow, cluster, machine, Severity.ERROR, Remedy.REPLACE
            )
    elif machine.worker is None or machine.hung_s is not None:
        return
    # A worker that hangs while no other waits for it is only noticed when it is needed, so it is treated as
    # one that ended.
    elif kind.scope == "worker" or not (member and machine.ready):
        if member:
            cluster.halt("stalled")
        cluster.at(cluster.now + HOP_S, end_worker, cluster, machine, machine.worker)
    else:
        machine.hung_s = cluster.now
        cluster.halt("stalled")
        stall_s = cluster.core.timing.stall_s(cluster.steps.step_s)
        cluster.at(cluster.now + stall_s, stalled, cluster, machine, machine.worker)


def lose(cluster: TrialView, machines: list[SimulatedMachine], repair_s: float | None) -> None:
    """Several machines are lost at once."""
    if any(x in cluster.members for x in machines):
        cluster.halt("stalled")
        # No member is left, so training continues from the last checkpoint. That is reported now, because
        # nobody could report it later.
        if not any(x.up for x in cluster.members if x not in machines):
            cluster.tell_saved()
    for machine in machines:
        cluster.down(machine, repair_s)
    cluster.wind()


def expect_group(cluster: TrialView, index: int) -> None:
    """Plans the next failure of a group."""
    at_s, _ = cluster.groups[index][2].next(cluster.now)
    cluster.group_s[index] = at_s
    cluster.at(at_s, strike_group, cluster, index)


def strike_group(cluster: TrialView, index: int) -> None:
    """A rack, a switch, or all processes fail."""
    kind, places, _ = cluster.groups[index]
    # The next one is planned first: the effects of this one must not change its time.
    expect_group(cluster, index)
    cluster.failures[kind.name] = cluster.failures.get(kind.name, 0) + 1
    if kind.scope == "job":
        end_all_workers(cluster)
        return
    if any(x.place in places for x in cluster.rest):
        raise FewNames
    struck = [x for x in cluster.machines.values() if x.up and x.place in places]
    if struck:
        lose(cluster, struck, kind.lasts_s)


def end_all_workers(cluster: TrialView) -> None:
    """All processes end at once: the state survives in memory and in durable tiers."""
    cluster.halt("stalled")
    cluster.tell_saved()
    cluster.at(
        cluster.now + HOP_S, exit_all, cluster, [(x, x.worker) for x in cluster.members if x.up and x.worker]
    )


def exit_all(cluster: TrialView, pairs: list[tuple[SimulatedMachine, str]]) -> None:
    """The agents report the exits."""
    events: list[e.Event] = []
    for machine, name in pairs:
        if machine.up and machine.worker == name:
            machine.worker = None
            events.append(e.NodeSays(machine.name, m.Exited(worker=name, code=SIGKILL)))
    cluster.tell(events)


def end_worker(cluster: TrialView, machine: SimulatedMachine, name: str, code: int = SIGKILL) -> None:
    """The agent reports the exit of a process."""
    if machine.up and machine.worker == name:
        machine.worker = None
        cluster.tell([e.NodeSays(machine.name, m.Exited(worker=name, code=code))])


def stalled(cluster: TrialView, machine: SimulatedMachine, name: str) -> None:
    """The agent reports that a worker stands still, repeatedly until the core acts."""
    if machine.up and machine.worker == name and machine.hung_s is not None:
        cluster.tell([e.NodeSays(machine.name, m.Stalled(name, view(cluster, machine)))])
        # Repeated until the core acts, as by a real agent: the first report may arrive while the core is
        # inspecting another worker.
        again_s = cluster.now + cluster.core.timing.stall_floor_s
        cluster.at(again_s, stalled, cluster, machine, name)


def inspected(cluster: TrialView, machine: SimulatedMachine, request: int) -> None:
    """All agents answer an inspection at once."""
    events: list[e.Event] = []
    heap = cluster.heap
    while True:
        if machine.up and machine.worker:
            events.append(e.NodeSays(machine.name, m.InspectReply(request, (view(cluster, machine),))))
        if not (heap and heap[0][0] == cluster.now and heap[0][2] == inspected):
            break
        _, machine, request = heapq.heappop(heap)[3]
    if events:
        cluster.tell(events)


def view(cluster: TrialView, machine: SimulatedMachine) -> m.WorkerView:
    """The agent's view of its worker."""
    hung = machine.hung_s is not None
    phase = Phase.FORWARD if hung else Phase.REDUCE if machine in cluster.members else Phase.IDLE
    page = PageReading(generation=cluster.generation, committed=cluster.steps.committed, phase=int(phase))
    # The one that hangs has stood still since it hung, the others since the steps were halted. This
    # difference makes it the odd one.
    idle_s = cluster.now - (machine.hung_s if machine.hung_s is not None else cluster.steps.halted_s)
    return m.WorkerView(
        worker=machine.worker or "",
        slot=0,
        pid=1,
        formed=cluster.generation,
        page=page,
        idle_s=idle_s,
        median_s=cluster.steps.step_s,
    )


def found_slow(cluster: TrialView, machine: SimulatedMachine, severity: Severity, remedy: Remedy) -> None:
    """Its peers show that a machine is slow: first as a warning, and, when that has cost enough, with the request to
    replace it."""
    if machine.up and machine.worker and machine.slow > 1.0 and machine in cluster.members:
        done = cluster.steps.base
        if cluster.steps.running:
            done += math.floor((cluster.now - cluster.steps.since_s) / cluster.steps.step_s)
        progress = m.Progress(generation=cluster.generation, committed=done, median_s=cluster.steps.step_s)
        finding = Finding(
            rule="slow-node",
            severity=severity,
            remedy=remedy,
            source="peers",
            evidence="slower than its peers",
        )
        cluster.tell(
            [cluster.word(machine, progress), e.NodeSays(machine.name, m.FindingsReported((finding,)))]
        )


def fast_again(cluster: TrialView, machine: SimulatedMachine) -> None:
    """A slow machine is as fast as the others again."""
    if machine.slow > 1.0:
        machine.slow = 1.0
        cluster.pace()
