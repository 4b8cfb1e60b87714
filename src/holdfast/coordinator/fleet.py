"""The nodes taken together: how many were acted on lately, and what many report at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.coordinator import policy, verdicts
from holdfast.coordinator.casebook import Sighting
from holdfast.coordinator.state import Failure, Node

if TYPE_CHECKING:
    from holdfast.coordinator.core import Core

STORM_S = 60.0
STORM_NODES = 3
"""The same rule on so many nodes, and on more than the blast share of the fleet, within this time is not a fault of
theirs: a switch, a file server, a driver, the script."""


def size(core: Core) -> int:
    """Nodes that the job has or is to have."""
    return max(len(core.alive_nodes()), core.state.wanted_nodes + core.spec.spares)


def limit(core: Core) -> int:
    """So many nodes may be acted on within the window."""
    return verdicts.blast_limit(size(core), core.spec.health.blast_share)


def acted_on(core: Core) -> set[str]:
    """Machines that were acted on within the window."""
    since_s = core.now - core.spec.health.blast_window_s
    acts = core.state.health.acts
    return {a.machine for a in acts if a.at_s > since_s and a.incident and verdicts.acts_on_node(a.remedy)}


def may_act(core: Core, machine: str) -> bool:
    """Acting on this machine stays within the limit."""
    done = acted_on(core)
    return machine in done or len(done) < limit(core)


def storm(core: Core, rule: str) -> tuple[int, float] | None:
    """Of how many nodes the same is reported, and within what time; None: of few enough to be their own fault."""
    near = [x for x in core.state.health.sightings if x.rule == rule and core.now - x.at_s <= STORM_S]
    nodes = {x.machine for x in near}
    if len(nodes) < STORM_NODES or len(nodes) <= core.spec.health.blast_share * size(core):
        return None
    return len(nodes), core.now - min(x.at_s for x in near)


def others_show_it(core: Core, node: Node, rule: str) -> int:
    """Other nodes that show the same lately."""
    near = [x for x in core.state.health.sightings if x.rule == rule and core.now - x.at_s <= STORM_S]
    return len({x.machine for x in near} - {node.machine})


def follows_the_script(core: Core, rule: str) -> str | None:
    """The same at the same step on different nodes: what the script does there, not what they are."""
    seen = [x for x in core.state.health.sightings if x.rule == rule]
    if len({x.machine for x in seen}) < 2:
        return None
    verdict = policy.script_fault([_failure(x) for x in seen])
    return verdict.reason if verdict else None


def _failure(sighting: Sighting) -> Failure:
    worker = sighting.worker or sighting.node
    return Failure(sighting.step, sighting.rule, worker, sighting.node, sighting.generation)
