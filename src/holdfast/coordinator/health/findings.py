"""Findings of health rules. Findings of one node become one incident, together with what they did to the job shortly before: a
worker's exit, a lost node, a failed collective. What is done about an incident is decided in `triage`."""

from __future__ import annotations

import msgspec

from holdfast.coordinator.health import limits, notes, triage
from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.state import (
    KEPT_SIGHTINGS,
    TEXT_CHARS,
    Incident,
    Node,
    Sighting,
    count,
    graver,
    stronger,
)
from holdfast.protocol import causes, ledger
from holdfast.protocol.health import Condition, Finding, Remedy, Severity

ECHO_S = 10.0
"""So much later than the first sign others may tell of the same fault."""

UNKNOWN_S = 600.0
"""What could not be told for so long is for a person to look at; it is no fault, and nothing is done about it."""

UNKNOWN_KEPT = 16

MACHINE_S = 120.0
"""Within so long, what several watchers of a machine tell is one event of it: they look at the slowest reading every minute."""

_OF_THE_MACHINE = frozenset(("oom-kill", "oom-kills"))
"""What the kernel did to a process of anybody on the machine: the line in its log, and the counter in /proc. One event matches
both, on each node that is a part of the machine."""

COMPARED = "peers"
"""The source of what was found by comparing how fast workers compute."""


def found(context: Context, node: Node, findings: tuple[Finding, ...]) -> None:
    """Handles findings of rules on one node."""
    for finding in findings:
        # Counted before anything is weighed, so the metrics show what rules match also where nothing is done
        # about it.
        count(context.state.health.totals.findings, finding.rule)
        _hear(context, node, finding)


def _hear(context: Context, node: Node, finding: Finding) -> None:
    # Two ways onto trial: the user asked for it, or a person said twice that the rule was wrong about this
    # machine.
    trial = finding.dry_run or finding.rule in node.health.trial
    # Unknown is neither well nor faulty, and must not act as either: it is written down and waits for ten
    # minutes.
    if finding.condition is Condition.UNKNOWN and finding.severity is Severity.INFO:
        # How a watcher is placed (a container that may not read the kernel's log), and not how a machine is. All nodes of
        # a job are placed alike, so it is written once, and nobody is asked to mend it.
        if context.state.health.totals.findings[finding.rule] == 1:
            _write(context, node, finding, None)
        return
    if finding.condition is not Condition.FAULTY:
        _write(context, node, finding, None)
        _not_faulty(context, node, finding)
        return
    # Faulty is known. The clock of "could not be told" ends with it.
    node.health.unknown.pop(finding.rule, None)
    # A rule on trial leaves no sighting. Sightings explain the ends of workers, and a rule that is not
    # believed must not take over the cause of a real incident.
    if not trial:
        _sight(context, node, finding)
    # None of these begins an incident. A finding of a node that is gone already may still explain its loss,
    # so it goes on to `_explain`.
    if not _counts(finding) or trial or not node.alive:
        if trial and _counts(finding) and node.alive:
            _write(context, node, finding, None)
            triage.on_trial(context, node, finding)
            return
        explained = _explain(context, node, finding) if not trial else None
        if explained is not None or trial or not _told(context, node, finding):
            _write(context, node, finding, explained)
        return
    incident = _incident(context, node, finding)
    context.concerns(incident.id)
    new = incidents.witnessed(incident, finding.rule, finding.source, finding.evidence, context.now)
    if new:
        _write(context, node, finding, incident)
    # What many nodes have at once says nothing about this one, so it does not make the incident any graver.
    if not finding.shared:
        _weigh_in(incident, finding)
    # Each worker that is named is restarted once. Without the check a rule that matches ten lines would name
    # it ten times.
    if finding.worker and finding.remedy is Remedy.RESTART_WORKER and finding.worker not in incident.workers:
        incident.workers.append(finding.worker)
    # Last, when the incident has all that this finding adds: the decision weighs the incident, and not single
    # findings.
    triage.consider(context, node, incident, finding)


def _told(context: Context, node: Node, finding: Finding) -> bool:
    """The ledger has this event of the machine already."""
    if finding.rule not in _OF_THE_MACHINE or finding.worker:
        return False
    earlier = context.state.health.sightings[:-1]  # the last one is this
    for seen in reversed(earlier):
        if context.reached(seen.at_s + MACHINE_S):
            return False
        other = context.state.membership.nodes.get(seen.node)
        if seen.rule in _OF_THE_MACHINE and other is not None and _machine(other) == _machine(node):
            return True
    return False


def _machine(node: Node) -> str:
    """What nodes that are parts of one machine have in common."""
    return node.identity.removesuffix(f"/{node.name}") or node.host


def _counts(finding: Finding) -> bool:
    """It is a matter of its own; milder ones are only written down, or explain what happens to a worker."""
    return not graver(Severity.ERROR, finding.severity) or finding.remedy is Remedy.ASK


def _write(context: Context, node: Node, finding: Finding, incident: Incident | None) -> None:
    told = msgspec.structs.asdict(finding)
    context.record(ledger.Finding(node=node.name, incident=incident.id if incident else None, **told))


def _sight(context: Context, node: Node, finding: Finding) -> None:
    # Noted for all nodes before it is judged for this one: the third report within a minute is what shows a
    # storm.
    limits.reported(context, node, finding.rule)
    grave = _counts(finding) or (
        finding.severity is Severity.WARNING and stronger(finding.remedy, Remedy.WATCH)
    )
    s = context.state
    sightings = s.health.sightings
    text = finding.evidence[:TEXT_CHARS]
    sightings.append(
        Sighting(
            rule=finding.rule,
            node=node.name,
            machine=node.machine,
            at_s=context.now,
            text=text,
            worker=finding.worker if _explains_ends(finding) else "",
            grave=grave and not finding.shared,
            step=s.membership.committed,
            generation=s.membership.number,
        )
    )
    # Bounded: a node with a bad cable can match a rule thousands of times an hour, and this list is part of
    # the state.
    del sightings[:-KEPT_SIGHTINGS]


def _explains_ends(finding: Finding) -> bool:
    """What it says of a worker can be why that worker ends."""
    # That a worker is slower than its peers is no reason for a NaN, a hang or an exit of it, and neither is something that
    # is only to be watched. With its name in the sighting it would hide the real one, which then no rule and no person
    # looks for.
    mild = finding.severity is Severity.INFO and finding.remedy is Remedy.WATCH
    return finding.source != COMPARED and not mild


def _explain(context: Context, node: Node, finding: Finding) -> Incident | None:
    """A mild finding may still be why a worker ended just before."""
    sighting = context.state.health.sightings[-1]
    incident = incidents.unexplained(context.state, context.now, node.name)
    # A mild finding explains an end only if it names the worker. Otherwise any warning of a busy node would
    # be the cause of everything that happens there.
    if incident is None or not (sighting.grave or sighting.worker in incident.workers):
        return None
    _explained(context, incident, sighting, finding)
    return incident


def _explained(context: Context, incident: Incident, sighting: Sighting, finding: Finding) -> None:
    was = incident.cause
    incidents.explain(incident, sighting, context.now)
    context.concerns(incident.id)
    incident.node = incident.node or sighting.node
    incident.source, incident.firm, incident.device = finding.source, finding.firm, finding.device
    cause = incident.cause
    context.record(
        ledger.IncidentExplained(
            id=incident.id, node=sighting.node, was=str(was), cause=str(cause), cause_kind=cause.kind
        )
    )


def _incident(context: Context, node: Node, finding: Finding) -> Incident:
    """The incident that a finding belongs to: what happened to the job just before, what was found on the node a moment
    ago, or a new one."""
    s = context.state
    # First what has happened to the job. The loss of a worker is usually reported before the kernel's log
    # line that explains it.
    happened = incidents.unexplained(s, context.now, node.name)
    if happened is not None:
        _explained(context, happened, s.health.sightings[-1], finding)
        return happened
    # Then what is known of the node: one fault brings a burst of lines, and they are one incident.
    for incident in reversed(s.incidents[-incidents.LOOKED_AT :]):
        if not incident.rule or incident.node != node.name:
            continue
        if _belongs(context, incident, finding):
            return incident
    began_s = context.now - finding.age_s if finding.age_s > 0 else None
    cause = causes.RuleMatched(finding.rule, finding.evidence)
    incident = context.open_incident(
        cause, node=node.name, quiet=True, fault_at_s=began_s, needs_newcomer=False
    )
    incident.rule, incident.device = finding.rule, finding.device
    incident.source, incident.firm = finding.source, finding.firm
    # Closed from the beginning, because it disturbs nobody. It is reopened when something is done about it.
    incident.full_at_s = context.now  # nothing is disturbed, and nothing is done yet
    return incident


def _belongs(context: Context, incident: Incident, finding: Finding) -> bool:
    """To a burst that goes on, or to what is being dealt with, or was just now. Once more after that is a new incident."""
    act = next((a for a in reversed(context.state.health.acts) if a.incident == incident.id), None)
    # A remedy is under way or was just done. Echoes of the fault belong to it; only what comes from a worker
    # started since shows that it did not help.
    if act is not None:
        worker = context.state.membership.workers.get(finding.worker)
        if finding.firm and worker is not None and worker.started_s >= act.at_s:
            return False  # a worker that was started for it: what was done did not help
        return act.done_s is None or not context.reached(act.done_s + ECHO_S)
    # Two GPUs of one node are two faults, with two histories and two remedies.
    if incident.device and finding.device and finding.device != incident.device:
        return False
    return not context.reached(incident.heard_s + triage.BURST_S)


def _weigh_in(incident: Incident, finding: Finding) -> None:
    """The worst of all findings counts. What is grave gives the incident its name."""
    worse = graver(finding.severity, incident.severity)
    if (
        worse
        or _firmer(incident, finding)
        or (stronger(finding.remedy, incident.asked) and finding.severity is incident.severity)
    ):
        incident.severity, incident.asked = finding.severity, finding.remedy
        incident.rule, incident.source, incident.firm = finding.rule, finding.source, finding.firm
        incident.device = finding.device or incident.device


def _firmer(incident: Incident, finding: Finding) -> bool:
    """What one finding proves comes before what must be seen again."""
    return (
        incident.does is None
        and finding.severity is incident.severity
        and finding.remedy is not Remedy.WATCH
        and limits.soft(incident.source, incident.firm)
        and not limits.soft(finding.source, finding.firm)
    )


def _not_faulty(context: Context, node: Node, finding: Finding) -> None:
    if finding.condition is Condition.HEALTHY:
        node.health.unknown.pop(finding.rule, None)
        triage.well_again(context, node, finding.rule)
        return
    since_s = node.health.unknown.setdefault(finding.rule, context.now)
    if len(node.health.unknown) > UNKNOWN_KEPT:
        del node.health.unknown[next(iter(node.health.unknown))]
    # A person is asked, and nothing is done: a sensor that cannot be read is no fault of the machine, and
    # must not take it out of a job.
    if context.reached(since_s + UNKNOWN_S):
        node.health.unknown[finding.rule] = context.now
        told = f"{finding.rule} could not be evaluated for {context.now - since_s:.0f} s: {finding.evidence}"
        notes.ask(context, node, finding.rule, told)
