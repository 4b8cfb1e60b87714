"""Names of the core's nodes, which machines use in turn: see `Cluster`."""

from __future__ import annotations

from holdfast.tools.simulate.machine import REST, FewNames, SimulatedMachine
from holdfast.tools.simulate.scenario import FailureClass
from holdfast.tools.simulate.trial_view import TrialView


def soon(cluster: TrialView, until_s: float) -> list[SimulatedMachine]:
    """Machines without a name to which something may happen until then."""
    # A failure that may affect others of its rack needs names for the whole rack, because which of them it
    # affects is drawn only then.
    places = {
        place
        for (kind, group, _), at_s in zip(cluster.groups, cluster.group_s, strict=True)
        if at_s < until_s and kind.scope != "job"
        for place in group
    }
    for machine in (*cluster.rest, *cluster.machines.values()):
        if machine.fails_s < until_s and machine.failure is not None and machine.failure.burst:
            places.update(rack(cluster, machine.place, machine.failure))
    return [x for x in cluster.rest if x.fails_s < until_s or x.place in places]


def bind(cluster: TrialView, known_s: float) -> None:
    """Machines to which something happens soon take the names of members to which nothing does.

    known_s: until this time, all machines that need a name have one.
    """
    # Names are exchanged only while nothing happens: two machines are equal to the core only if both train.
    if not cluster.steps.running:
        if cluster.now < known_s:
            cluster.at(cluster.now + (known_s - cluster.now) / 2 + 1.0, bind, cluster, known_s)
            return
        # No names could be exchanged in time. Continuing would give wrong results, and a trial is cheap to
        # repeat.
        raise FewNames
    until_s = cluster.now + 1.5 * cluster.window_s
    wanted = soon(cluster, until_s)
    nodes = cluster.core.state.membership.nodes
    free = [x for x in cluster.members if x.name != REST and plain(cluster, x, until_s)]
    if len(free) < len(wanted):
        raise FewNames
    for idle, machine in zip(free, wanted, strict=False):
        machine.name, machine.worker, machine.sessions = idle.name, idle.worker, idle.sessions
        machine.up = machine.ready = True
        node = nodes[idle.name]
        # The core's count of failures moves with the machine, and does not stay with the name.
        idle.failures, node.failures = node.failures, machine.failures
        idle.name, idle.worker, idle.up = "", None, False
        cluster.machines[machine.name] = machine
        cluster.members[cluster.members.index(idle)] = machine
        cluster.savers = [machine if x is idle else x for x in cluster.savers]
        cluster.rest[cluster.rest.index(machine)] = idle
    cluster.at(cluster.now + cluster.window_s, bind, cluster, until_s)


def plain(cluster: TrialView, machine: SimulatedMachine, until_s: float) -> bool:
    """Whether the machine is healthy and no failure of it is due until then."""
    if not machine.up or machine.worker is None or machine.hung_s is not None or machine.slow > 1.0:
        return False
    if machine.fails_s < until_s:
        return False
    return not any(
        at_s < until_s and machine.place in group
        for (_, group, _), at_s in zip(cluster.groups, cluster.group_s, strict=True)
    )


def rack(cluster: TrialView, place: int, kind: FailureClass) -> range:
    first = place - place % kind.size
    return range(first, min(first + kind.size, cluster.scenario.nodes + cluster.scenario.spares))
