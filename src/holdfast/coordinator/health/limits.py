"""Limits over all nodes: how many were repaired lately, how many report the same fault at once, and so what may be done about a
finding."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.incidents import script_fault
from holdfast.coordinator.kernel.state import (
    KEPT_ACTS,
    KEPT_RULES,
    Act,
    Failure,
    Health,
    Node,
    Sighting,
    count,
)
from holdfast.protocol.health import Remedy, acts_on_node

DAY_S = 86_400.0

LADDER = (Remedy.RESTART_WORKER, Remedy.RESET_DEVICE, Remedy.REBOOT, Remedy.REPLACE)

TRIES = {Remedy.RESTART_WORKER: 2, Remedy.RESET_DEVICE: 1, Remedy.REBOOT: 2}
"""How often a remedy is tried within `TRIES_WINDOW_S` for one cause on one device, before the next stronger one is. An error
that asks for a reboot after two reboots is the hardware's (gpud: the same numbers)."""

TRIES_WINDOW_S = 3 * DAY_S

NODE_ACTS = 5
NODE_WINDOW_S = 7 * DAY_S
"""A machine that was repaired so often within the window is replaced, whatever is asked for (NVSentinel: to support)."""

BACK_OFF_S = 60.0
BACK_OFF_MOST_S = 3600.0
"""Between two repairs of one machine that can wait: 60 s, and twice as long each time."""

SOFT_SOURCES = frozenset({"worker", "peers", "log"})
"""What these say of a node may as well be the script's doing or the network's: a majority that is well must stand
against it, and it must come twice; unless it is firm: a user said how much of it is a fault."""


# ---------------------------------------------------------------- escalation
# Which remedy of the ladder is next, and whether it may be taken: pure functions of what was tried before.
#
# restart worker -> reset device -> reboot -> replace -> ask a person


class Decision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The remedy for a finding, and the reasons for it."""

    does: Remedy
    """The remedy; WATCH: nothing."""
    reason: str
    """For people."""
    against: str = ""
    """What spoke against acting, one word; empty: nothing did."""
    weighed: tuple[str, ...] = ()
    """What was looked at, in words."""
    after_s: float | None = None
    """Not before this time on the core's clock; then it is decided again. None: it is decided."""


def soft(source: str, firm: bool) -> bool:
    """Whether a single finding of this kind is not sufficient evidence."""
    return source in SOFT_SOURCES and not firm


def next_remedy(asked: Remedy, before: Sequence[Act]) -> Remedy:
    """The remedy to apply for a cause: the one that the rule asks for, or a stronger one after it was tried often enough.

    before: what was done for this cause on this device lately.
    """
    # Never below what the rule asks for, and never back down within the window: a remedy that did not help has
    # had its chances.
    at = LADDER.index(asked)
    while LADDER[at] in TRIES:
        same = [a for a in before if a.remedy is LADDER[at]]
        # One that failed to be carried out is not tried again. A driver that refuses a reset refuses the next
        # one, too.
        if len(same) < TRIES[LADDER[at]] and not any(a.error for a in same):
            break
        at += 1
    return LADDER[at]


def for_cause(acts: Sequence[Act], machine: str, device: str, rule: str, now: float) -> list[Act]:
    """The remedies applied for one cause on one device, or on the node where either is unknown."""
    return [
        a
        for a in acts
        if a.machine == machine
        and a.rule == rule
        and now - a.at_s <= TRIES_WINDOW_S
        # Where one of the two is unknown it may be the same. Erring on that side climbs the ladder sooner,
        # and does not repeat a reset for ever.
        and (not device or not a.device or a.device == device)
    ]


def repairs_of(acts: Sequence[Act], machine: str, now: float) -> list[Act]:
    """Remedies that took a machine out of its job within the window."""
    return [
        a for a in acts if a.machine == machine and acts_on_node(a.remedy) and now - a.at_s <= NODE_WINDOW_S
    ]


def back_off_s(done: Sequence[Act]) -> float:
    """Seconds to wait after the last repair before the next one, where it can wait."""
    # Doubling, so that a machine which breaks after every repair costs the job less and less until it is
    # replaced.
    return min(BACK_OFF_MOST_S, BACK_OFF_S * 2.0 ** (len(done) - 1)) if done else 0.0


def blast_limit(fleet: int, share: float) -> int:
    """The largest number of nodes that may be repaired within the window; at least one."""
    # At least one, or a job of three nodes could never replace any.
    return max(1, int(fleet * share))


STORM_S = 60.0
STORM_NODES = 3
"""The same rule on so many nodes, and on more than the blast share of the fleet, within this time is not a fault of
theirs: a switch, a file server, a driver, the script."""

# ---------------------------------------------------------------- acted on


def fleet_size(context: Context) -> int:
    """Nodes that the job has or is to have."""
    # Of the nodes that the job is to have, not only of those that live: after a loss of half of them the
    # limit must not shrink with them.
    return max(len(context.index.alive_nodes), context.state.wanted_nodes + context.spec.spares)


def nodes_at_once(context: Context) -> int:
    """The number of nodes that may be repaired within the window."""
    return blast_limit(fleet_size(context), context.spec.health.blast_share)


def acted_on(context: Context) -> set[str]:
    """The machines that were repaired within the window."""
    return set(_leaves_window_s(context))


def may_act(context: Context, machine: str) -> bool:
    """Whether repairing this machine stays within the limit."""
    done = acted_on(context)
    # A machine that was acted on counts once, so its next remedy is never blocked by its first.
    return machine in done or len(done) < nodes_at_once(context)


def may_act_at_s(context: Context) -> float:
    """When one more machine may be repaired, on the core's clock, as far as is known now."""
    ends = sorted(_leaves_window_s(context).values())
    return ends[len(ends) - nodes_at_once(context)] if len(ends) >= nodes_at_once(context) else context.now


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
    """Records a remedy. Kept are as many as a window of this fleet may have, and all that are under way."""
    context.state.health.acts.append(act)
    _trim(context)


def recalled(context: Context, acts: list[Act]) -> None:
    """The same for remedies of earlier jobs, oldest first."""
    context.state.health.acts[:0] = acts
    _trim(context)


def _trim(context: Context) -> None:
    acts = context.state.health.acts
    # As many as one window may have, so that the limit never forgets an act that it still has to count.
    excess = len(acts) - max(KEPT_ACTS, fleet_size(context))
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
    """Other machines that reported the same fault lately."""
    return len(set(_near(context, rule)) - {node.machine})


def follows_the_script(context: Context, rule: str) -> str | None:
    """Whether the same fault occurred at the same step on different nodes: then the script causes it, not the machines."""
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
