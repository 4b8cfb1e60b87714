"""The job stands still: everyone is looked at, and whoever holds the others up is taken out."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.coordinator.kernel import incidents
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.deadlines import Timer
from holdfast.coordinator.kernel.membership_state import Worker
from holdfast.coordinator.kernel.phases import JobPhase, WorkerPhase
from holdfast.coordinator.kernel.requests import EndGeneration
from holdfast.coordinator.membership import failures, policy, positions
from holdfast.health import stacks
from holdfast.protocol import causes, ledger, units
from holdfast.protocol import messages as m
from holdfast.protocol.phases import OUTSIDE_PHASES, SLOW_PHASES, WAITING_PHASES, Phase

RETRIES = 2
"""A hang in which nobody differs is met so often by a new generation of the same workers."""

PATIENT_ROUNDS = 10
"""So often a hang is looked at in which nobody waits for anybody: all may be reading a slow file system."""

MARGIN = 0.9
"""Of the time that a worker may stand still: those that wait for it began to a little later."""


_COMPILING = frozenset({Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE})
_FOR_OTHERS = frozenset({Phase.REDUCE, Phase.VOTE, Phase.JOIN})


@dataclass
# Only in memory. A successor would not know which answers belong to which request, so it starts an inspection
# of its own when the next agent reports a stall.
class Inspection:
    """Answers to the newest Inspect. Not part of the state: a successor asks again."""

    views: list[m.WorkerView] = field(default_factory=list)
    stacks: dict[str, str] = field(default_factory=dict)
    unheard: set[str] = field(default_factory=set)

    def begin(self, nodes: set[str]) -> None:
        """These nodes are asked now; what others answered before does not count any more."""
        self.views, self.stacks, self.unheard = [], {}, nodes


def stalled(context: Context, name: str, view: m.WorkerView) -> None:
    """An agent says that a worker stands still: every node is asked how its workers stand."""
    s = context.state
    worker = s.membership.workers.get(name)
    if worker is None or worker.phase is WorkerPhase.GONE:
        return
    running = s.membership.phase is JobPhase.RUNNING and worker.phase is WorkerPhase.MEMBER
    # A stopped spare or starter holds up nobody, but it is no spare either. At level 2 it can be replaced by
    # itself; at level 0 there are no spares.
    if view.process in "Tt" and not running and context.mode.replaces_one:
        failures.condemn(context, [worker], causes.ProcessStopped())
        return
    if _left_behind(context, worker, view):
        failures.condemn(context, [worker], causes.LeftBehind())
        return
    # One inspection at a time: a hang makes every agent report within milliseconds, and each report would
    # throw away the answers to the request before.
    if not running or s.deadlines.is_set(Timer.INSPECT) or not context.reached(s.membership.look_again_s):
        return
    s.membership.inspect_request += 1
    # Only scripts that do not say on their page where they are have to be asked for it.
    where_s = 0.0 if context.mode.replaces_one else context.timing.where_s
    s.deadlines.set(Timer.INSPECT, context.now + context.timing.inspect_s + where_s)
    inspection = context.transient(Inspection)
    # The set of nodes from which an answer is awaited is fixed now. A node that is lost meanwhile ends the
    # generation, and with it the inspection.
    inspection.begin({w.node for w in context.inside()})
    context.record(
        ledger.Stalled(worker=name, node=worker.node, step=s.step, inspection=s.membership.inspect_request)
    )
    for node in sorted(inspection.unheard):
        context.send(node, m.Inspect(s.membership.inspect_request))


def _left_behind(context: Context, worker: Worker, view: m.WorkerView) -> bool:
    """It still waits for its peers, though the generation has long been broken. (One that computes its first
    step may be compiling, and will come.)"""
    membership = context.state.membership
    if membership.phase is not JobPhase.BREAKING or worker.phase is not WorkerPhase.MEMBER:
        return False
    # The shorter of both: it may have stood still for long before the break, for a good reason, and only
    # since the break it was told to leave.
    waits = min(view.idle_s, context.now - membership.broke_at_s - membership.unheard_s)
    return view.page.phase in WAITING_PHASES and waits >= MARGIN * context.timing.stall_s(context.median_s())


def inspected(context: Context, message: m.InspectReply) -> None:
    """One node's answer; the last one leads to a verdict."""
    s, inspection = context.state, context.transient(Inspection)
    # An answer to an earlier request shows the workers as they were then; one that moved since would look
    # stopped.
    if not s.deadlines.is_set(Timer.INSPECT) or message.request != s.membership.inspect_request:
        return
    # Only members that are still inside count. One that parked while the others answered holds up nobody.
    members = {w.name: w.node for w in context.inside()}
    for view in message.workers:
        if view.worker in members:
            inspection.views.append(view)
            inspection.unheard.discard(members[view.worker])
    inspection.stacks.update(message.stacks)
    if not inspection.unheard:
        judge(context)


def judge(context: Context) -> None:
    """All have answered, or the time for it is over."""
    s, inspection = context.state, context.transient(Inspection)
    s.deadlines.clear(Timer.INSPECT)
    allowed = {v.worker: _allowed_s(context, v) for v in inspection.views}
    ranks = {x.worker: x.rank for x in s.membership.generation.members} if s.membership.generation else {}
    find = policy.find_culprits if context.mode.replaces_one else positions.find_culprits
    verdict = find(inspection.views, allowed, inspection.stacks, not inspection.unheard, ranks)
    named = verdict.workers
    # A verdict that may name the wrong one is held back for two generations: a transient fault of the network
    # goes away by trying again, and the wrong worker would cost its restart.
    if verdict.again and s.membership.stall_rounds < RETRIES:
        named = ()
    groups = stacks.cluster({v.worker: inspection.stacks.get(v.worker, "") for v in inspection.views})
    where = stacks.describe(groups, ranks)
    cause = causes.Hang(verdict.reason)
    if named:
        cause = causes.Hang(verdict.reason, verdict.stood_at_step, verdict.collective)
    context.record(
        ledger.StallJudged(
            workers=list(named),
            inspection=s.membership.inspect_request,
            reason=verdict.reason,
            where=where,
            stood_at_step=cause.stood_at_step,
            collective=cause.collective,
            evidence=[*stacks.lines(groups, ranks), *_waiting(inspection.views, ranks)],
        )
    )
    culprits = [s.membership.workers[w] for w in named if s.membership.workers[w].phase is WorkerPhase.MEMBER]
    # One of two, and which cannot be known. The one that has been here longest is taken: if the hang comes
    # again, the other is the older one then, so both get their turn.
    if verdict.one_of:  # the longest here, so that it is the other one's turn if the hang comes again
        culprits = sorted(culprits, key=lambda w: w.started_s)[:1]
    # Where all ranks stood is written into the incident that this verdict opens, since the stacks are in no
    # state and would be gone when somebody asks.
    before = incidents.total(s)
    context.mode.on_stall(context, culprits, cause, allowed)
    for incident in s.incidents:
        if incident.id > before:
            incident.where = where


def _waiting(views: list[m.WorkerView], ranks: dict[str, int]) -> list[str]:
    """Who said on its page whom it waits for: `ranks 0-2 wait for rank 3`."""
    by: dict[int, list[int]] = {}
    for view in views:
        # Of a worker that is no member any more the number would be another one's.
        if view.page.waits_for >= 0 and view.worker in ranks:
            by.setdefault(view.page.waits_for, []).append(ranks[view.worker])
    most = sorted(by.items(), key=lambda one: (-len(one[1]), one[0]))[: stacks.LINES]
    return [
        f"{'rank' if len(who) == 1 else 'ranks'} {units.ranks(sorted(who))} "
        f"{'waits' if len(who) == 1 else 'wait'} for rank {rank}"
        for rank, who in most
    ]


def at_work(context: Context, suspects: set[str]) -> bool:
    """At level 0 nobody says where in a step it is. A suspect (everyone, if none is named) that uses the processor
    may evaluate or save, for as long as a start may take."""
    views = [v for v in context.transient(Inspection).views if v.worker in suspects or not suspects]
    return any(v.busy and v.process not in "TtXZ" and v.idle_s < context.timing.start_s for v in views)


def _allowed_s(context: Context, view: m.WorkerView) -> float:
    """How long a worker may stand still where it is. Its first step may compile for as long as a start takes, and
    work of the script's own between two steps, or a durable tier's answer, may take as long."""
    # A worker that waits for a tier or a script's own work is limited by the time of a start. Shorter limits
    # ended evaluations that were healthy.
    if view.page.phase in SLOW_PHASES:
        return context.timing.start_s
    # Between two steps a script may evaluate without having said so: while it uses the processor that is no hang.
    if view.busy and view.page.phase in OUTSIDE_PHASES:
        return context.timing.start_s
    # The first step has no median to go by, and compiling takes minutes, during which the page does not move.
    if view.median_s is None and view.page.phase in _COMPILING:
        return context.timing.start_s
    return MARGIN * context.timing.stall_s(view.median_s)


def nobody_differs(context: Context, cause: causes.Hang) -> None:
    """Tries the step again, twice. After that half of the workers are replaced, and then the other half: one of
    them is at fault, and the state lives on in the rest."""
    membership = context.state.membership
    # If nobody waits for anybody, all are busy with something of their own, usually a slow file system;
    # ending the generation would not make it faster.
    waiting = any(v.page.phase in _FOR_OTHERS for v in context.transient(Inspection).views)
    membership.stall_rounds += 1
    if not waiting and membership.stall_rounds < PATIENT_ROUNDS:
        return
    if not waiting or membership.stall_rounds <= RETRIES:
        context.open_incident(cause, node=None, rung="retry in process", needs_newcomer=False)
        context.request(EndGeneration(cause))
        return
    # Bisection: two retries did not help, so the fault is in some worker and not in the moment. Half are
    # replaced, the state lives on in the others, and if the hang returns, it is the other half's turn.
    failures.condemn(context, _half(context.inside()), causes.Hang())


def _half(workers: list[Worker]) -> list[Worker]:
    """The older ones: of those that hold the same shard, so that somebody still holds it; else of all."""
    oldest = sorted(workers, key=lambda w: w.started_s)
    columns: dict[int, list[Worker]] = {}
    # Half of each column, not of all: taking out a whole column would lose its shard of the state.
    for worker in oldest:
        columns.setdefault(worker.shard_index, []).append(worker)
    chosen = [w for column in columns.values() for w in column[: len(column) // 2]]
    return chosen or oldest[: max(1, len(oldest) // 2)]
