"""The nodes taken together: how many were acted on lately, and what many report at once."""

from __future__ import annotations

from holdfast.coordinator.health import escalation
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.health_state import KEPT_ACTS, KEPT_RULES, Act, Health, Sighting, count
from holdfast.coordinator.kernel.membership_state import Failure, Node
from holdfast.coordinator.kernel.script_fault import script_fault
from holdfast.protocol.health import Remedy, acts_on_node

STORM_S = 60.0
STORM_NODES = 3
"""The same rule on so many nodes, and on more than the blast share of the fleet, within this time is not a fault of
theirs: a switch, a file server, a driver, the script."""

# ---------------------------------------------------------------- acted on


def size(context: Context) -> int:
    """Nodes that the job has or is to have."""
    # Of the nodes that the job is to have, not only of those that live: after a loss of half of them the
    # limit must not shrink with them.
    return max(len(context.alive_nodes()), context.state.wanted_nodes + context.spec.spares)


def limit(context: Context) -> int:
    """So many nodes may be acted on within the window."""
    return escalation.blast_limit(size(context), context.spec.health.blast_share)


def acted_on(context: Context) -> set[str]:
    """Machines that were acted on within the window."""
    return set(_leaves_window_s(context))


def may_act(context: Context, machine: str) -> bool:
    """Acting on this machine stays within the limit."""
    done = acted_on(context)
    # A machine that was acted on counts once, so its next rung is never blocked by its first.
    return machine in done or len(done) < limit(context)


def may_act_at_s(context: Context) -> float:
    """When one more machine may be acted on, as far as is known now."""
    ends = sorted(_leaves_window_s(context).values())
    return ends[len(ends) - limit(context)] if len(ends) >= limit(context) else context.now


def _leaves_window_s(context: Context) -> dict[str, float]:
    """Machines that were acted on within the window, and when each is out of it."""
    window_s = context.spec.health.blast_window_s
    ends: dict[str, float] = {}
    for act in context.state.health.acts:
        # Remedies of earlier jobs count for the machine's ladder, but not for this job's limit.
        if not act.earlier and acts_on_node(act.remedy) and not context.reached(act.at_s + window_s):
            ends[act.machine] = max(ends.get(act.machine, 0.0), act.at_s + window_s)
    return ends


def repairs(context: Context) -> int:
    """Remedies of this job that took a node out of it, in the day that runs."""
    health = context.state.health
    daily = health.repaired_daily
    return daily.used(_ever(health), over=context.reached(daily.until_s))


def count_act(context: Context, remedy: Remedy) -> None:
    """A remedy is carried out."""
    health = context.state.health
    health.repaired_daily.roll(_ever(health), context.now)
    count(health.totals.acts, remedy)


def _ever(health: Health) -> int:
    return sum(n for remedy, n in health.totals.acts.items() if acts_on_node(Remedy(remedy)))


def entered(context: Context, act: Act) -> None:
    """Remembers a remedy: as many as a window of this fleet may have, and all that are under way."""
    context.state.health.acts.append(act)
    _trim(context)


def recalled(context: Context, acts: list[Act]) -> None:
    """The same for remedies of earlier jobs, oldest first."""
    context.state.health.acts[:0] = acts
    _trim(context)


def _trim(context: Context) -> None:
    acts = context.state.health.acts
    # As many as one window may have, so that the limit never forgets an act that it still has to count.
    excess = len(acts) - max(KEPT_ACTS, size(context))
    for old in [a for a in acts if a.done][: max(0, excess)]:
        acts.remove(old)


# ---------------------------------------------------------------- reported


def reported(context: Context, node: Node, rule: str) -> None:
    """A rule matched on a machine."""
    reports = context.state.health.reports
    near = {m: at_s for m, at_s in reports.pop(rule, {}).items() if not context.reached(at_s + STORM_S)}
    # By machine, not by report: one node that shouts is no storm.
    reports[rule] = near | {node.machine: context.now}
    while len(reports) > KEPT_RULES:
        del reports[next(iter(reports))]


def _near(context: Context, rule: str) -> dict[str, float]:
    """Machines that reported the same lately, and when."""
    reports = context.state.health.reports.get(rule, {})
    return {machine: at_s for machine, at_s in reports.items() if not context.reached(at_s + STORM_S)}


def storm(context: Context, rule: str) -> tuple[int, int, float] | None:
    """Of how many machines the same is reported, of how many that could have within that time, and within what time;
    None: of few enough to be their own fault. Machines that were replaced meanwhile are on both sides."""
    near = _near(context, rule)
    could = {
        n.machine
        for n in context.state.membership.nodes.values()
        if n.alive or not context.reached(n.last_seen_s + STORM_S)
    }
    # Machines that left in the last minute are on both sides. Otherwise each replacement would raise the
    # share of those that report, and turn three faults into a storm.
    of = len(could | set(near))
    if len(near) < STORM_NODES or len(near) <= context.spec.health.blast_share * of:
        return None
    return len(near), of, context.now - min(near.values())


def others_show_it(context: Context, node: Node, rule: str) -> int:
    """Other machines that show the same lately."""
    return len(set(_near(context, rule)) - {node.machine})


def follows_the_script(context: Context, rule: str) -> str | None:
    """The same at the same step on different nodes: what the script does there, not what they are."""
    seen = [x for x in context.state.health.sightings if x.rule == rule]
    # One machine alone cannot show that it is the script: it may fail at that step for its own reasons.
    if len({x.machine for x in seen}) < 2:
        return None
    verdict = script_fault([_failure(x) for x in seen])
    return verdict.reason if verdict else None


def _failure(sighting: Sighting) -> Failure:
    worker = sighting.worker or sighting.node
    return Failure(
        step=sighting.step,
        signature=sighting.rule,
        worker=worker,
        node=sighting.node,
        generation=sighting.generation,
    )
