"""Incidents: each fault from its first sign to the first commit at full strength."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from holdfast.coordinator.kernel.events import Record
from holdfast.coordinator.kernel.state import (
    KEPT_EVIDENCE,
    TEXT_CHARS,
    CoreState,
    Evidence,
    Failure,
    Incident,
    Injection,
    RootCause,
    Sighting,
    count,
    graver,
)
from holdfast.protocol import ledger
from holdfast.protocol.causes import Cause, Hang, RuleMatched
from holdfast.protocol.health import Severity
from holdfast.protocol.ledger import IncidentFacts, counted_as
from holdfast.protocol.messages import Joined
from holdfast.protocol.place import shown as shown_place

COORDINATOR = "coordinator"
"""The rung of an incident in which only the coordinator was lost: training went on meanwhile."""

INJECTION_AGE_S = 60.0
"""An injected fault that no incident claimed within this time had no effect that anyone saw."""

NEAR_S = 2.0
"""A fault whose effect follows within this time stopped training at once."""

JOIN_S = 60.0
"""What a rule finds this long before or after a worker's end, a lost node or a failed collective explains it: a hang may
take 40 s to be found."""

LOOKED_AT = 64
"""So many of the newest incidents may be what something new belongs to."""

KEPT = 64
"""So many closed ones are kept at least, and twice as many at most: the whole state is written with each decision, and a job may
have ten thousand. Not fewer than are looked at."""

WORKERS_SHOWN = 64
"""The ledger names so many workers of an incident."""

STANDSTILLS = ("deadlock", "hold-gil", "stop-worker", "stop-node")
"""Injected faults that show as a hang; of two workers at level 0 nobody can say which one it is."""


def open_incident(
    state: CoreState,
    now: float,
    cause: Cause,
    *,
    node: str | None,
    workers: Iterable[str],
    kind: str | None = None,
    fault_at_s: float | None = None,
    needs_newcomer: bool = True,
    quiet: bool = False,
    raised: bool = False,
) -> Incident:
    """Enters an incident, or what is part of one. What a rule found on the node just before is its cause. An injected fault of
    the same worker, node or kind is recorded with it. quiet: training goes on. raised: see `raised_now`.
    """
    names = list(workers)
    unnamed_hang = isinstance(cause, Hang) and node is None
    generation, ranks = state.membership.generation, _ranks(state, names)
    # A quiet finding starts an incident of its own, and the loss of a coordinator is nobody's effect: both
    # must not disappear in an incident that happens to be open.
    known = None if quiet or kind == "kill-coordinator" else _part_of(state, now, node, names)
    if known is not None:
        if cause != known.cause:  # not what was done about it
            _add(known, Evidence(rule="", source="job", text=str(cause), at_s=now))
        anew = _disturb(state, known, now, names, ranks, needs_newcomer)
        # The injection is claimed after the match with a known incident, not before: it is removed when
        # claimed, so one that is claimed for nothing would leave the real effect without its cause, and the
        # benchmark without its time.
        injection = _claim(state, now, node, names, kind, unnamed_hang)
        if anew:
            known.fault_at_s, known.injected_at_s = fault_at_s, None
        if injection is not None:
            known.injected = injection.fault
            known.injected_at_s = injection.at_s if anew else known.injected_at_s
        return known
    injection = _claim(state, now, node, names, kind, unnamed_hang)
    incident = Incident(
        id=total(state) + 1,
        cause=cause,
        node=node,
        ranks=ranks,
        at_step=state.step,
        fault_at_s=fault_at_s,
        detected_at_s=now,
        generation=state.membership.number,
        world=generation.strength if generation else 1,
        kind=kind,
        injected=injection.fault if injection else None,
        injected_at_s=injection.at_s if injection else None,
        workers=names,
        needs_newcomer=needs_newcomer,
        quiet=quiet,
        raised=raised,
    )
    state.incidents.append(incident)
    _forget(state)
    if not quiet and node is not None:
        _explain_by_sighting(state, incident, now, names)
    return incident


def total(state: CoreState) -> int:
    """How many incidents the job has had."""
    return state.forgotten + len(state.incidents)


def was_injected(state: CoreState, number: int) -> bool:
    """Whether an incident is an injected fault's. For whoever keeps records. number: 0 for none."""
    known = state.forgotten < number <= total(state)
    return known and numbered(state, number).injected is not None


def numbered(state: CoreState, number: int) -> Incident:
    """The incident with this number, to which something that is still to be done refers."""
    return state.incidents[number - 1 - state.forgotten]


def count_anew(state: CoreState) -> None:
    """Separates all incidents so far from the generations to come, whose numbers begin at 1 again."""
    for incident in state.incidents:
        incident.generation = 0


def _forget(state: CoreState) -> None:
    """Lets go of the oldest, if there are many of them."""
    there = state.incidents
    while state.closed < total(state) and not there[state.closed - state.forgotten].open:
        state.closed += 1
    if state.closed - state.forgotten <= 2 * KEPT:
        return
    # What is still to be done refers to its incident by number.
    needed = {*state.health.undecided, *(act.incident for act in state.health.acts if not act.done)}
    booting = [node for node in state.membership.nodes.values() if node.health.boots_until_s is not None]
    needed |= {node.health.boots_for for node in booting if node.health.boots_for}
    gone = there[: max(0, min([state.closed - KEPT, *(number - 1 for number in needed)]) - state.forgotten)]
    for incident in gone:
        count(state.forgotten_kinds, kind_of(incident))
    state.forgotten += len(gone)
    del there[: len(gone)]


# ---------------------------------------------------------------- what was found, and what happened to the job


def _part_of(state: CoreState, now: float, node: str | None, workers: list[str]) -> Incident | None:
    """The incident that was found before its effect, if this is one: of the same node; of any for what names nobody."""
    # The newest first: of two incidents of one node, what happens now belongs to the later one. The bound
    # keeps this constant in a job that has run for months.
    for incident in reversed(state.incidents[-LOOKED_AT:]):
        # Only what a rule found and called an error can have an effect later. A mild finding is kept as
        # evidence, but it explains no end of a worker by itself.
        if not incident.rule or graver(Severity.ERROR, incident.severity):
            continue
        silent_s = now - incident.heard_s
        # An effect that comes while it is still open what is done belongs to the incident whatever time has
        # passed. Once something was decided, only a close effect is the same one; a later one means that the
        # remedy did not help, and must count anew.
        undecided = incident.open and (incident.quiet or incident.decided_at_s is None)
        if not (undecided or silent_s <= (JOIN_S if incident.quiet else NEAR_S)):
            continue
        if incident.node == node or (node is None and not workers):
            return incident
    return None


def _disturb(
    state: CoreState, incident: Incident, now: float, names: list[str], ranks: list[int], needs_newcomer: bool
) -> bool:
    """Training stands because of it. True: since now, for it went on until now in spite of what was found, or again after
    it had stood for it before. Each stall has times of its own, else a stall would seem to last from the first on."""
    incident.workers += [w for w in names if w not in incident.workers]
    incident.ranks = sorted({*incident.ranks, *ranks})
    incident.needs_newcomer = incident.needs_newcomer or needs_newcomer
    # Training went on after the first strike, so this is another stall. Its times start anew: with the old
    # ones an incident that struck twice in an hour would report a stall of an hour.
    again = incident.first_commit_at_s is not None
    if not incident.quiet and not again:
        return False
    at_once = not again and now - incident.began_s <= NEAR_S and state.step == incident.at_step
    if again:
        incident.earlier_stalls += 1
        incident.earlier_stall_s += stall_s(incident) or 0.0
    if not at_once:
        incident.fault_at_s, incident.detected_at_s = None, now
    incident.quiet = False
    incident.at_step, incident.generation = state.step, state.membership.number
    # Full strength is measured against the size that this strike hit. Measured against the job's target, an
    # incident of a job that runs below it on purpose would never close.
    incident.world = len(state.membership.generation.members) if state.membership.generation else 1
    incident.decided_at_s = incident.first_commit_at_s = incident.replaced_at_s = incident.rung = None
    incident.paused_s = incident.paused_first_s = 0.0
    incident.joined_at_s = incident.join_s = incident.restore_s = None
    # Must follow the new times: `open_ones` starts at `closed`, and an incident below it would never be
    # closed again.
    reopen(state, incident)
    return not at_once


def lost_together(
    state: CoreState, now: float, incident: Incident, cause: Cause, node: str, workers: list[str]
) -> None:
    """Adds a node to an incident whose nodes were lost together. The incident still has one beginning and one end."""
    _add(incident, Evidence(rule="", source="job", text=f"{node}: {cause}", at_s=now))
    incident.lost_nodes.append(node)
    incident.lost_at_s = now
    if not workers:
        return
    _disturb(state, incident, now, workers, _ranks(state, workers), needs_newcomer=True)
    if incident.generation < state.membership.number:
        # It struck again before training went on: what was decided is overtaken, and a late commit of the
        # generation that it breaks now must not count as the end of the stall.
        incident.generation = state.membership.number
        incident.decided_at_s = incident.rung = incident.joined_at_s = None


def _explain_by_sighting(state: CoreState, incident: Incident, now: float, workers: list[str]) -> None:
    near = [
        x
        for x in state.health.sightings
        if x.node == incident.node and now - x.at_s <= JOIN_S and (x.grave or x.worker in workers)
    ]
    if near:
        explain(incident, near[-1], now)


def explain(incident: Incident, sighting: Sighting, now: float) -> None:
    """Makes what a rule found the cause of what happened to the job."""
    cause = RuleMatched(sighting.rule, sighting.text)
    if incident.rule == "" and not incident.quiet:
        corrected(incident, cause)
    incident.cause = cause
    incident.rule, incident.heard_s = incident.rule or sighting.rule, now


def corrected(incident: Incident, cause: Cause) -> None:
    """Replaces the cause of an incident by a better one. The earlier one is kept as evidence."""
    _add(incident, Evidence(rule="", source="job", text=str(incident.cause), at_s=incident.detected_at_s))
    incident.cause = cause


def raised_now(state: CoreState) -> Incident | None:
    """The incident that ended the newest generation, if what it began with is an error that a worker raised: that may be
    the end of another, which is still to be heard of."""
    # Only the newest one. At level 0 a lost process shows first as an error of its peers ("connection closed
    # by peer"), and within milliseconds the agent reports the process itself: the same fault, and its real
    # cause.
    last = state.incidents[-1] if state.incidents else None
    if last is None or not last.raised or last.rule or last.generation != state.membership.number:
        return None
    return last if last.open else None


def caused(
    state: CoreState, now: float, incident: Incident, cause: Cause, node: str, workers: list[str]
) -> None:
    """Attributes errors that other workers raised to an incident of these workers and this node, which has the cause."""
    corrected(incident, cause)
    incident.node, incident.raised = node, False
    incident.workers, incident.ranks = workers, _ranks(state, workers)
    if injection := _claim(state, now, node, workers, None, False):
        _began(incident, injection)


def unexplained(state: CoreState, now: float, node: str, worker: str = "") -> Incident | None:
    """What happened to the job lately on this node, or to nobody in particular, and has no cause yet."""
    # Backward until one is too old: they are in the order of their detection, so all before it are older
    # still.
    for incident in reversed(state.incidents):
        if now - incident.detected_at_s > JOIN_S:
            return None
        if incident.rule or incident.rung == COORDINATOR:
            continue
        if incident.node == node or (incident.node is None and incident.kind is None):
            return incident
    return None


def witnessed(incident: Incident, rule: str, source: str, text: str, now: float) -> bool:
    """Adds evidence to an incident; False: it had that already."""
    incident.heard_s = now
    for known in incident.evidence:
        if (known.rule, known.source) == (rule, source):
            known.count += 1
            return False
    _add(incident, Evidence(rule=rule, source=source, text=text[:TEXT_CHARS], at_s=now))
    return True


def _add(incident: Incident, evidence: Evidence) -> None:
    if len(incident.evidence) < KEPT_EVIDENCE:
        incident.evidence.append(evidence)


# ---------------------------------------------------------------- injected faults
# They are known to the record alone: what is decided is what would be decided for a fault that nobody injected, or demos,
# tests and benchmarks would show another program than the one that runs in production.


def injected(state: CoreState, injection: Injection) -> None:
    """A fault is being injected now, or was just before: the report of it and its effect take different ways."""
    if not any(_explains(incident, injection) for incident in state.incidents[-LOOKED_AT:]):
        state.injections.append(injection)


def _claim(
    state: CoreState, now: float, node: str | None, workers: list[str], kind: str | None, unnamed_hang: bool
) -> Injection | None:
    # Forgotten after a minute. An injection that had no effect would otherwise explain the next real fault of
    # the same worker, hours later.
    state.injections = [i for i in state.injections if now - i.at_s < INJECTION_AGE_S]
    for injection in state.injections:
        if (
            (injection.worker is not None and injection.worker in workers)
            or (injection.node is not None and injection.node == node)
            or (injection.kind == kind == "nan")
            or (injection.kind == kind == "kill-coordinator")
            or (unnamed_hang and injection.kind in STANDSTILLS)
        ):
            state.injections.remove(injection)
            return injection
    return None


def _explains(incident: Incident, injection: Injection) -> bool:
    """An injection that was heard of after its effect."""
    hit = (
        (injection.worker in incident.workers)
        or (injection.node is not None and injection.node == incident.node and injection.worker is None)
        or (injection.kind == incident.kind == "nan")  # whoever says it first: all have it
    )
    if incident.open and incident.injected is None and hit:
        _began(incident, injection)
        return True
    return False


def _began(incident: Incident, injection: Injection) -> None:
    """It is this injected fault's."""
    incident.injected = injection.fault
    incident.injected_at_s = min(injection.at_s, incident.detected_at_s)


def _ranks(state: CoreState, workers: Iterable[str]) -> list[int]:
    """Ascending, of those that are members."""
    generation = state.membership.generation
    return sorted(r for w in workers if generation and (r := generation.rank_of(w)) is not None)


def open_ones(state: CoreState) -> list[Incident]:
    """Incidents that disturb training and are not closed yet, oldest first; however many there were before them."""
    return [i for i in state.incidents[state.closed - state.forgotten :] if i.open and not i.quiet]


def last_root_cause(state: CoreState) -> RootCause | None:
    """The root cause of the newest fault from which the job has not recovered: a worker's report, or the incident's cause.
    None: there is none."""
    if not (open_now := open_ones(state)):
        return None
    newest = open_now[-1]
    told = [state.membership.root_causes[w] for w in newest.workers if w in state.membership.root_causes]
    return told[0] if told else RootCause(cause=newest.cause, node=newest.node, step=newest.at_step)


def reopen(state: CoreState, incident: Incident) -> None:
    """Opens an incident again, because something is to be done about it after all."""
    incident.full_at_s = None
    # `closed` is the length of the prefix that is settled, an index for `open_ones`. It must come down to
    # this one, or a reopened incident would be invisible.
    state.closed = min(state.closed, incident.id - 1)


def decided(state: CoreState, now: float, rung: str) -> list[int]:
    """A generation was formed: every open incident without a decision has one now. Returns their numbers."""
    undecided = [incident for incident in open_ones(state) if incident.decided_at_s is None]
    for incident in undecided:
        incident.decided_at_s, incident.paused_first_s = now, incident.paused_s
        incident.rung = incident.rung or rung
    return [incident.id for incident in undecided]


def decided_by_itself(incident: Incident, now: float) -> None:
    """Marks an incident as decided, for which nothing had to be decided because training went on."""
    incident.decided_at_s = now


def paused(state: CoreState, since_s: float, until_s: float) -> None:
    """Excludes time in which the script did work of its own between two steps: a fault did not cost that time."""
    for incident in open_ones(state):
        if incident.first_commit_at_s is None:
            incident.paused_s += max(0.0, until_s - max(since_s, incident.began_s))


def replaced(state: CoreState, now: float) -> None:
    """Marks the oldest open incident that still needs a newcomer as having one, when a newcomer is ready or a member."""
    for incident in open_ones(state):
        if incident.needs_newcomer and incident.replaced_at_s is None:
            incident.replaced_at_s = now
            return


def on_joined(state: CoreState, now: float, message: Joined) -> None:
    """A member is connected, and restored if it had to be."""
    full = _full(state)
    for incident in open_ones(state):
        if incident.first_commit_at_s is None or full(incident):
            incident.joined_at_s = now
            incident.join_s = most(incident.join_s, message.join_s)
            incident.restore_s = most(incident.restore_s, message.restore_s)


def committed(state: CoreState, now: float) -> list[Record]:
    """The first commit of a generation, by anyone: stalls end; at full strength incidents close."""
    records, full = [], _full(state)
    for incident in open_ones(state):
        # A commit of the generation that the fault struck may still arrive after the fault (its message was
        # on the way). It says nothing about recovery; only a commit of a later generation does.
        if incident.generation >= state.membership.number and incident.rung != COORDINATOR:
            continue
        if incident.first_commit_at_s is None:
            incident.first_commit_at_s = now
            if state.membership.counts_steps or incident.rung == COORDINATOR:
                incident.lost_steps = incident.lost_steps or 0
            records.append(Record(describe(state, incident, ledger.IncidentResumed)))
        if full(incident):
            incident.full_at_s = now
            records.append(Record(describe(state, incident, ledger.IncidentClosed)))
    # After each commit, so the search for open incidents stays short however many faults a long job survives.
    _forget(state)
    return records


def _full(state: CoreState) -> Callable[[Incident], bool]:
    """Tells for an incident whether the job has the size again that it had when the fault struck, or that it is to have by now."""
    strength = -1 if state.membership.generation is None else state.membership.generation.strength
    # Either suffices: a job that was resized downward meanwhile is at full strength with fewer workers than the fault had
    # found. Asked once for all: with 64 nodes lost, each of thousands of answers concerns 64 incidents.
    enough = strength >= state.target
    return lambda incident: enough or strength >= incident.world


F = TypeVar("F", bound=IncidentFacts)


def describe(state: CoreState, incident: Incident, event: type[F]) -> F:
    """The incident as an event of the ledger. Durations in seconds; unknown is None."""
    began, known = incident.struck_s, (incident.fault_at_s, incident.injected_at_s) != (None, None)
    hang = incident.cause if isinstance(incident.cause, Hang) else None
    return event(
        id=incident.id,
        fault=incident.injected or incident.kind,
        injected=incident.injected is not None,
        node=incident.node,
        ranks=incident.ranks,
        at_step=incident.at_step,
        workers=incident.workers[:WORKERS_SHOWN],
        generation=incident.generation,
        t_s=_gap(state.began_s, began),
        detect_s=_gap(began, incident.detected_at_s) if known else None,
        decide_s=_gap(incident.detected_at_s, incident.decided_at_s, incident.paused_first_s),
        replace_s=_gap(incident.detected_at_s, incident.replaced_at_s),
        join_s=incident.join_s,
        restore_s=incident.restore_s,
        first_step_s=_gap(
            incident.joined_at_s,
            incident.full_at_s or incident.first_commit_at_s,
            incident.paused_s - incident.paused_first_s,
        ),
        stall_s=stall_s(incident),
        paused_s=round(incident.paused_s, 4),
        earlier_stalls=incident.earlier_stalls,
        earlier_stall_s=round(incident.earlier_stall_s, 4),
        full_strength_s=_gap(began, incident.full_at_s),
        lost_steps=incident.lost_steps,
        rung=incident.rung,
        cause=str(incident.cause),
        cause_kind=incident.cause.kind,
        rule=incident.rule or None,
        quiet=incident.quiet,
        verdict=incident.verdict or None,
        where=incident.where or None,
        stood_at_step=hang.stood_at_step if hang else None,
        collective=hang.collective if hang else None,
        place=shown_place(incident.place) if len(incident.lost_nodes) > 1 else None,
        nodes=incident.lost_nodes if len(incident.lost_nodes) > 1 else [],
    )


def shown(state: CoreState, incident: Incident) -> dict[str, Any]:
    """The incident as status and report have it."""
    return msgspec.structs.asdict(describe(state, incident, IncidentFacts))


def stall_s(incident: Incident) -> float | None:
    """Seconds from the (last) disturbance to the next commit by any worker, without the script's own work meanwhile."""
    return _gap(incident.struck_s, incident.first_commit_at_s, incident.paused_s)


def kind_of(incident: Incident) -> str:
    """The kind under which an incident is counted: the name of its injected fault, else the kind of its cause."""
    return counted_as(incident.injected or incident.kind, incident.rule, incident.cause.kind)


def _gap(since: float | None, until: float | None, without_s: float = 0.0) -> float | None:
    return None if since is None or until is None else round(max(0.0, until - since - without_s), 4)


def most(a: float | None, b: float | None) -> float | None:
    """The longer of two times, of which either may be unknown."""
    if a is None or b is None:
        return b if a is None else a
    return max(a, b)


SIGNAL, EXIT = "signal", "exit code"
"""How the signature of a process that just ended begins; others are of exceptions."""


class ScriptFault(msgspec.Struct, frozen=True):
    """A fault that the script would show on any machine."""

    reason: str


def script_fault(failures: Sequence[Failure], trained: bool = False, nodes: int = 1) -> ScriptFault | None:
    """Whether the newest failure shows that the script is at fault, and not the machine.

    Before the first step: the same error in two workers, on two nodes where there are two; once the job has trained, such a
    failure is the machine's. At a step: the same error again after a retry, in a second worker (another rank at once, or the
    new one that took over). A death by signal says less about the script, so it must repeat three times.

    trained: workers of this script have trained before. nodes: number of nodes of the job.
    """
    if not failures:
        return None
    # Only the newest failure is asked about. Older ones were judged when they were the newest, and asking
    # about them again would stop a job for something that it has survived.
    last = failures[-1]
    # Step and signature, not the message alone: the same exception at another step is another event, because
    # the data differs. A script's own fault comes back at the same step.
    same = [f for f in failures if (f.step, f.signature) == (last.step, last.signature)]
    workers, attempts = {f.worker for f in same}, {f.generation for f in same}
    # A Python exception names a line of the script. A signal may be a flipped bit, a bad driver or the OOM
    # killer, so it takes one more witness before a person's job is stopped for it.
    needed = 3 if last.signature.startswith(SIGNAL) else 2
    # Two nodes, where there are two: a wrong path or a missing package on one node looks the same as a broken
    # script, except that the other node starts.
    if last.step is None:
        if trained or len(workers) < needed or len({f.node for f in same}) < min(2, nodes):
            return None
        return ScriptFault(f"the same error before the first step in {len(workers)} workers")
    # Both counts, because several workers of one attempt prove nothing: one NaN is reduced into every rank,
    # and all of them raise at once.
    if len(workers) >= needed and len(attempts) >= needed:
        first, *others = dict.fromkeys(f.node for f in same)
        # An exception names a line of the script, which says more than where it was raised.
        if others and last.signature.startswith((SIGNAL, EXIT)):
            named = f"{', '.join([first, *others[:-1]])} and {others[-1]}"
            return ScriptFault(
                f"step {last.step} ended a worker in {len(attempts)} attempts, on {named}, which have only the "
                "script and the samples of that step in common"
            )
        return ScriptFault(
            f"the same error at step {last.step} in {len(attempts)} attempts on {len(workers)} workers"
        )
    return None
