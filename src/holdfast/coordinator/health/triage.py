"""What an incident with a node's health means for the job, and what is done about it.

`findings` makes incidents of findings. A fatal one is decided at once; an error that the job can live with is decided a
moment later, when others would have reported the same, and is acted on at a step's edge. `limits` says what may be done,
`remedies` does it.
"""

from __future__ import annotations

import msgspec

from holdfast.coordinator.health import limits, notes, remedies
from holdfast.coordinator.health.limits import Decision
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.history import RecordKind
from holdfast.coordinator.kernel.state import (
    KEPT_ASKS,
    KEPT_SIGHTINGS,
    SEVERITIES,
    Act,
    Incident,
    Node,
    count,
    stronger,
)
from holdfast.protocol import ledger
from holdfast.protocol.health import Finding, Remedy, Severity, acts_on_node

BURST_S = 180.0
"""Findings of one node belong together until it was silent for so long (as NVIDIA's Fleet Intelligence has it)."""

# ---------------------------------------------------------------- when it is decided


def consider(context: Context, node: Node, incident: Incident, finding: Finding) -> None:
    """Takes a new finding of an incident into account: it is decided now, later, or was decided already."""
    # None of the nodes is to blame, so nothing is done on any of them: replacing all nodes of a failing
    # switch leaves no job.
    if finding.shared:
        told = "many nodes report this at once, so no single node is at fault"
        if incident.does is None:
            _withhold(context, node, incident, Decision(does=Remedy.WATCH, reason=told, against="shared"))
        return
    # Before the severity is looked at. Three fatal findings of one rule within a minute are more likely one
    # switch than three broken machines.
    if _is_storm(context, node, incident):
        return
    # Decided already, and nothing asks for more. Deciding again would charge the budget twice for one fault.
    done = incident.does is not None and not stronger(incident.asked, incident.does)
    planned = node.health.then is not None and incident.severity is Severity.FATAL
    if done and not planned:
        if finding.firm and finding.remedy is Remedy.RESTART_WORKER:
            remedies.also(context, node, incident, finding.worker)
        return
    # At once: what runs there is lost or cannot be trusted, and every step until then may be wrong.
    if finding.severity is Severity.FATAL or finding.firm:
        decide(context, incident)
    elif incident.due_s is None:
        # A detection time later, others have reported the same if they have it, and the choice between "this
        # node" and "the network" can be made.
        _later(context, incident, context.now + context.timing.detection_s)


def _is_storm(context: Context, node: Node, incident: Incident) -> bool:
    """The same on many nodes at once. Nothing is done about any of them, and what was planned is called off."""
    seen = limits.storm(context, incident.rule)
    if seen is None:
        return False
    nodes, of, within_s = seen
    key = f"storm {incident.rule}"
    if context.reached(context.state.health.reported_at_s.get(key, -BURST_S) + BURST_S):
        context.record(ledger.Storm(rule=incident.rule, nodes=nodes, of=of, within_s=round(within_s, 3)))
    _say(context, key)
    reason = f"{nodes} of {of} nodes report it within {within_s:.0f} s"
    health = context.state.health
    # What was planned for earlier findings of the same rule is called off, too: they were the first drops of
    # this storm.
    for number in sorted({*health.undecided, *(a.incident for a in health.acts if not a.done)}):
        other = incidents.numbered(context.state, number)
        there = context.state.membership.nodes.get(other.node or "")
        if other.rule != incident.rule or there is None:
            continue
        if remedies.call_off(context, there, other) or other.due_s is not None:
            _withhold(context, there, other, Decision(does=Remedy.WATCH, reason=reason, against="storm"))
    if incident.does is None and incident.verdict != reason:
        _withhold(context, node, incident, Decision(does=Remedy.WATCH, reason=reason, against="storm"))
    return True


def struck(context: Context, incident: Incident) -> None:
    """Decides an incident at once, because what was found has now ended at least one worker."""
    # Only if it waits. A decision that was made already stands.
    if incident.due_s is not None:
        incident.due_s = context.now


def _undecided(context: Context) -> list[Incident]:
    return [incidents.numbered(context.state, number) for number in context.state.health.undecided]


def _later(context: Context, incident: Incident, at_s: float) -> None:
    """It is decided then."""
    incident.due_s = at_s
    undecided = context.state.health.undecided
    if incident.id not in undecided:
        undecided.append(incident.id)
    # Bounded, with room for one per node. The oldest is dropped from the list, not from the ledger.
    while len(undecided) > max(KEPT_SIGHTINGS, limits.fleet_size(context)):
        incidents.numbered(context.state, undecided.pop(0)).due_s = None


def due(context: Context) -> None:
    """Decides the incidents that were put off until now, the worst first."""
    now = [i for i in _undecided(context) if i.due_s is not None and context.reached(i.due_s)]
    # The worst first: limits on how many nodes may be acted on apply in this order, and the last place must
    # not go to the mildest.
    for incident in sorted(now, key=lambda i: -SEVERITIES.index(i.severity)):
        node = context.state.membership.nodes.get(incident.node or "")
        if incident.due_s is None:
            continue  # what was just decided called it off
        if incident.verdict and node is not None and node.alive:
            # It was withheld before. Meanwhile something else may have repaired it, or it was not seen again.
            if (past := _past(context, node, incident)) is not None:
                _withhold(context, node, incident, past)
                continue
            incident.verdict = ""  # whatever is decided is said once more
        decide(context, incident)
    health = context.state.health
    health.undecided = [n for n in health.undecided if incidents.numbered(context.state, n).due_s is not None]
    remedies.late(context)


def _past(context: Context, node: Node, incident: Incident) -> Decision | None:
    """Why nothing need be done any more about what could not be done before."""
    for act in context.state.health.acts:
        same = act.remedy is not Remedy.RESET_DEVICE or not incident.device or act.device == incident.device
        helped = act.done and not act.error and same and acts_on_node(act.remedy)
        if act.machine == node.machine and act.at_s > incident.heard_s and helped:
            return Decision(
                does=Remedy.WATCH,
                reason=f"{act.remedy.value} was done since then, and the finding did not recur",
                against="done",
            )
    silent_s = context.now - incident.heard_s
    if incident.source in limits.SOFT_SOURCES and silent_s > BURST_S:
        told = f"findings of {incident.source} must be new, and this one was last seen {silent_s:.0f} s ago"
        return Decision(does=Remedy.WATCH, reason=told, against="past")
    return None


def well_again(context: Context, node: Node, rule: str) -> None:
    """Drops what was to be decided about a finding whose fault is gone."""
    for incident in context.state.incidents[-KEPT_ASKS:]:
        if incident.node == node.name and incident.rule == rule and incident.due_s is not None:
            _withhold(
                context,
                node,
                incident,
                Decision(does=Remedy.WATCH, reason="the finding has cleared", against="well"),
            )


def cleared(context: Context, machine: str, rule: str) -> None:
    """A person says that a machine is well, or that a rule was wrong about it: what is left to do is not done."""
    nodes = {n.name for n in context.state.membership.nodes.values() if n.machine == machine}
    for incident in _undecided(context):
        node = context.state.membership.nodes.get(incident.node or "")
        if node is not None and node.name in nodes and rule in ("", incident.rule):
            _withhold(
                context,
                node,
                incident,
                Decision(does=Remedy.WATCH, reason="a person cleared the node", against="cleared"),
            )


def decide(context: Context, incident: Incident) -> None:
    """Decides what is done about an incident, records it, and begins it."""
    incident.due_s = None
    context.concerns(incident.id)
    node = context.state.membership.nodes.get(incident.node or "")
    if node is None or not node.alive or context.state.membership.stop_reason is not None:
        return
    # The job is about to end. A remedy now could take away the node that holds the last state.
    if context.finished():
        _withhold(
            context,
            node,
            incident,
            Decision(does=Remedy.WATCH, reason="the job is about to end", against="ending"),
        )
        return
    # It has no workers, and its deep checks will say more than the finding does.
    if node.health.checking is not None:
        told = "the node is not used in any case before it has passed the deep checks"
        _withhold(context, node, incident, Decision(does=Remedy.WATCH, reason=told, against="held"))
        return
    soft = limits.soft(incident.source, incident.firm)
    decision = _decision(context, node, incident.rule, incident.device, soft, incident.asked, None)
    fatal = incident.severity is Severity.FATAL
    if decision.against or decision.does is Remedy.WATCH:
        _withhold(context, node, incident, decision)
        return
    # Back-off applies to what can wait. A fatal fault is acted on however often the machine was repaired.
    if decision.after_s is not None and not fatal:
        _later(context, incident, decision.after_s)
        _verdict(context, node, incident, decision, Remedy.WATCH)
        return
    if decision.does is Remedy.ASK:
        incident.does = Remedy.ASK
        _verdict(context, node, incident, decision, Remedy.ASK)
        notes.ask(context, node, incident.rule, str(incident.cause), incident)
        return
    if node.health.then is not None:
        doing = any(a.node == node.name and a.request and not a.done for a in context.state.health.acts)
        # A stronger remedy is on its way: a reboot includes what a reset would do. Only what is stronger, or
        # fatal while nothing has begun, replaces it.
        if not stronger(decision.does, node.health.then) and (doing or not fatal):
            told = f"{node.health.then.value} is already under way for it"
            _withhold(context, node, incident, Decision(does=Remedy.WATCH, reason=told, against="under way"))
            return
        if stronger(node.health.then, decision.does):
            decision = msgspec.structs.replace(decision, does=node.health.then)  # what was planned, and now
    _verdict(context, node, incident, decision, decision.does)
    incident.does = decision.does
    limits.count_act(context, decision.does)
    notes.remember(context, node, RecordKind.INCIDENT, incident)
    remedies.begin(context, node, incident, decision.does, planned=not fatal)


def escalated(context: Context, node: Node, incident: Incident, does: Remedy, reason: str) -> None:
    """What was done did not work. The next remedy takes nothing from the job any more, so no limit speaks against it."""
    incident.does = does
    _verdict(context, node, incident, Decision(does=does, reason=reason), does)
    notes.remember(context, node, RecordKind.ACTED, incident, does.value)


def _withhold(context: Context, node: Node, incident: Incident, decision: Decision) -> None:
    context.concerns(incident.id)
    incident.due_s = None
    count(context.state.health.totals.withheld, decision.against or "watch")
    _verdict(context, node, incident, decision, Remedy.WATCH)
    if decision.after_s is not None:
        _later(context, incident, decision.after_s)
    if decision.against == "blast":
        window_s = context.spec.health.blast_window_s
        if context.reached(context.state.health.reported_at_s.get("blast", -window_s) + window_s):
            _say(context, "blast")
            done, size, limit = (
                len(limits.acted_on(context)),
                limits.fleet_size(context),
                limits.nodes_at_once(context),
            )
            context.record(
                ledger.BlastLimit(node=node.name, nodes=done, of=size, limit=limit, within_s=window_s)
            )
    if decision.against == "budget":
        notes.ask(context, node, incident.rule, str(incident.cause), incident)


def _verdict(context: Context, node: Node, incident: Incident, decision: Decision, does: Remedy) -> None:
    # The same reason again is no news; people would read it every three minutes.
    if does is Remedy.WATCH and incident.verdict == decision.reason:
        return  # said already
    incident.verdict = decision.reason
    context.record(
        ledger.Verdict(
            incident=incident.id,
            node=node.name,
            rule=incident.rule,
            asked=incident.asked,
            does=does,
            would=decision.does,
            against=decision.against,
            reason=decision.reason,
            weighed=list(decision.weighed),
            again_s=None if decision.after_s is None else round(decision.after_s - context.now, 3),
        )
    )


def on_trial(context: Context, node: Node, finding: Finding) -> None:
    """What would have been done, had the rule been believed."""
    key = f"trial {node.name} {finding.rule}"
    if not context.reached(context.state.health.reported_at_s.get(key, -BURST_S) + BURST_S):
        return
    _say(context, key)
    soft = limits.soft(finding.source, finding.firm)
    decision = _decision(context, node, finding.rule, finding.device, soft, finding.remedy, finding)
    context.record(
        ledger.Verdict(
            incident=None,
            node=node.name,
            rule=finding.rule,
            asked=finding.remedy,
            does=Remedy.WATCH,
            would=decision.does,
            against="trial",
            reason=f"the rule is on trial; otherwise: {decision.reason}",
            weighed=list(decision.weighed),
        )
    )


def _say(context: Context, what: str) -> None:
    reported_at_s = context.state.health.reported_at_s
    reported_at_s.pop(what, None)
    reported_at_s[what] = context.now
    while len(reported_at_s) > KEPT_SIGHTINGS:
        del reported_at_s[next(iter(reported_at_s))]


# ---------------------------------------------------------------- what is decided


def _decision(
    context: Context, node: Node, rule: str, device: str, soft: bool, asked: Remedy, trial: Finding | None
) -> Decision:
    """Weighs one cause on one node. soft: one finding is not enough. trial: the rule is on trial, and this is only said."""
    s = context.state
    if asked is Remedy.WATCH:
        return Decision(does=asked, reason="the rule asks for no action")
    if asked is Remedy.ASK:
        return Decision(does=asked, reason="the rule asks for a person to inspect the node")
    # Fault before remedy: only what is this node's own fault climbs the ladder.
    not_its_own = _not_its_own(context, node, rule, soft, asked)
    if not_its_own is not None:
        return not_its_own
    before = limits.for_cause(s.health.acts, node.machine, device, rule, context.now)
    does = limits.next_remedy(asked, before)
    weighed = [f"done before for {rule} on {node.machine}: {_told(before)}"]
    why = f"{rule} asks for it"
    if does is not asked:
        why = f"{rule} asks for {asked.value}, which was done before: {_told(before)}"
    if does is Remedy.RESTART_WORKER:
        if context.budget_spent():
            return Decision(
                does=Remedy.ASK,
                reason="the restart budget is used up",
                against="budget",
                weighed=tuple(weighed),
            )
        return Decision(does=does, reason=why, weighed=tuple(weighed))
    done = limits.repairs_of(s.health.acts, node.machine, context.now)
    weighed.append(f"repairs of {node.machine} in 7 days: {len(done)} of {limits.NODE_ACTS}")
    # Repaired five times in a week: whatever the rule asks for, repairing it once more has been tried enough.
    if len(done) >= limits.NODE_ACTS and does is not Remedy.REPLACE:
        does, why = Remedy.REPLACE, f"{len(done)} repairs of {node.machine} in 7 days did not help"
    all_done, most = limits.repairs(context), context.spec.max_restarts
    weighed.append(f"repairs of this job in a day: {all_done} of {most}")
    # Then a person is asked, because a job that repairs for ever does not train.
    if all_done >= most:
        told = f"the job's budget of {most} repairs in a day is used up"
        return Decision(does=does, reason=told, against="budget", weighed=tuple(weighed))
    near = limits.acted_on(context)
    window_s = context.spec.health.blast_window_s
    weighed.append(
        f"nodes acted on in {window_s:g} s: {len(near)} of {limits.nodes_at_once(context)} ({limits.fleet_size(context)} in all)"
    )
    if not limits.may_act(context, node.machine):
        told = f"{len(near)} of {limits.fleet_size(context)} nodes were repaired or replaced within {window_s:g} s, which is the limit"
        return Decision(
            does=does,
            reason=told,
            against="blast",
            weighed=tuple(weighed),
            after_s=limits.may_act_at_s(context),
        )
    if node.lemon:
        weighed.append(f"history: {node.lemon}")
    wait_s = limits.back_off_s(done)
    after_s = done[-1].at_s + wait_s if done and not context.reached(done[-1].at_s + wait_s) else None
    if after_s is not None and trial is None:
        weighed.append(f"back-off: {wait_s:g} s after the last repair")
    return Decision(does=does, reason=why, weighed=tuple(weighed), after_s=after_s)


def _told(acts: list[Act]) -> str:
    if not acts:
        return "nothing"
    return ", ".join(a.remedy.value + (" (did not work)" if a.error else "") for a in acts[-4:])


def _not_its_own(context: Context, node: Node, rule: str, soft: bool, asked: Remedy) -> Decision | None:
    """Why it is not the node's fault, as far as is known. What is soft needs a majority that is well, and a second time
    on the same node."""
    script = limits.follows_the_script(context, rule) if soft or asked is Remedy.RESTART_WORKER else None
    if script is not None:
        return Decision(
            does=Remedy.WATCH, reason=f"{script}: the script is at fault, not the node", against="script"
        )
    if not soft:
        return None
    # A majority that is well is needed to call one sick. Of two nodes that differ nobody knows which one is
    # right.
    members = {w.node for w in context.members()}
    others = limits.others_show_it(context, node, rule)
    if len(members) < 3 or others * 2 >= len(members):
        told = (
            f"{others} others of {len(members)} nodes show the same, so there is no healthy majority against "
            f"{node.name}"
        )
        return Decision(does=Remedy.WATCH, reason=told, against="canary")
    seen = [x for x in context.state.health.sightings if (x.rule, x.machine) == (rule, node.machine)]
    # Soft evidence (times, losses, log lines) must come twice on the same machine: any node has one bad
    # minute.
    if len(seen) < 2:
        return Decision(
            does=Remedy.WATCH,
            reason=f"first occurrence on {node.name}; the node is held responsible if it recurs",
            against="canary",
        )
    return None
