"""Workers that fail, die or make no progress: what each report means, and its root cause. The second half handles hangs, in
which all workers wait and none reports an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import (
    AwaitChecksums,
    Context,
    NoteMiscomputed,
    NoteNonFinite,
)
from holdfast.coordinator.kernel.deadlines import Watched
from holdfast.coordinator.kernel.incidents import ScriptFault, script_fault
from holdfast.coordinator.kernel.state import Failure, JobPhase, RootCause, Timer, Worker, WorkerPhase
from holdfast.coordinator.membership import (
    generations,
    nodes,
    policy,
    processes,
    queries,
    shutdown,
    step_accounting,
)
from holdfast.errors import NonFiniteGradient, StateChanged
from holdfast.health import checksums, stacks
from holdfast.protocol import causes, ledger, units
from holdfast.protocol import messages as m
from holdfast.protocol.phases import OUTSIDE_PHASES, SLOW_PHASES, WAITING_PHASES, Phase

KEPT = 512
"""Failures that are remembered for telling the script's faults from the machine's."""

MOST_FAILED_STARTS = 3
"""Start attempts in a row in which a worker did not get ready, after which their node is given up."""

# ---------------------------------------------------------------- user code raised


def failed(context: Context, worker: Worker, message: m.Failed) -> None:
    """Handles an exception of the script or of Holdfast in a worker. Within a step the step is tried again, first by the same
    workers, then with a new worker; a failure that repeats is the script's and ends the job."""
    membership = context.state.membership
    current = membership.generation
    if (worker.name, message.generation, message.step) in _known(context).reported:
        # Agents repeat what may not have been heard. Counted twice, one failure would look like a second
        # attempt, and a retry that would have worked would be judged as the script's fault.
        return
    rank = current.rank_of(worker.name) if current else None
    phase = Phase(message.phase).name.lower()
    kind = causes.NotFinite if message.error == NonFiniteGradient.__name__ else causes.ScriptRaised
    cause = kind(message.error, message.message, phase if message.step is not None else None)
    root_cause = RootCause(
        cause=cause,
        rank=rank,
        node=worker.node,
        step=message.step,
        traceback=message.traceback,
        log=worker.log,
    )
    membership.root_causes[worker.name] = root_cause
    # Between two steps there is no step number. The count of committed steps says where in the training it
    # was.
    at = message.step if message.step is not None else worker.committed
    context.record(
        ledger.Failed(
            worker=worker.name, rank=rank, node=worker.node, step=at, cause=str(cause), cause_kind=cause.kind
        )
    )
    # A worker that finds its protected state changed outside of a commit has no valid state any more, and
    # neither has its replacement once the same line runs.
    if message.error == StateChanged.__name__:
        # No machine does this, and a worker in its place would run the same script: another attempt proves nothing.
        generations.break_generation(context, cause)
        shutdown.request(
            context, "the script changes protected state outside of the commit", "failed", root_cause
        )
        return
    trained, got_past = queries.has_trained(context, worker), context.count_workers(WorkerPhase.READY) > 0
    if policy.refuses_the_job(message.refused, worker.told_to_end, trained, got_past):
        # Asked for before the process ends. So its end is one that was asked for: no incident, no worker in its
        # place, and at level 0 no restart.
        if context.mode.replaces_one and worker.phase is WorkerPhase.MEMBER:
            # The others wait for it, and what they would say of that is no news.
            worker.told_to_end = True
            generations.break_generation(context, cause)
        shutdown.request(
            context,
            "refused before the first step; another attempt would be refused, too",
            "failed",
            root_cause,
        )
        return
    if message.refused and _alone_refuses(context, worker):
        nodes.give_up(context, membership.nodes[worker.node], causes.StateRefused(message.message))
        return
    if message.step is None or current is None or worker.phase is not WorkerPhase.MEMBER:
        return
    # Recorded above and shown to people, but not judged: the generation that it failed in has ended, and so
    # has its step.
    if message.generation != current.number:
        return
    # Before the verdict, which looks at the newest failure.
    note_failure(context, message.step, message.signature, worker, message.generation)
    if message.own:
        context.request(NoteNonFinite(worker, message))
    # The ladder: the same worker tries again, then a fresh worker does, and when the same error came in both
    # at the same step, it is the script's. Each attempt costs little, and the last one is reached in seconds.
    verdict = _verdict(context)
    if verdict is not None:
        # The generation ends before the stop is asked for: its members must park with their state, so that
        # the last commit is saved before the job fails.
        generations.break_generation(context, cause)
        shutdown.request(
            context, verdict.reason, "failed", first_root_cause(context, message.signature) or root_cause
        )
        return
    if membership.phase is JobPhase.RUNNING or membership.yielding:
        # The first failure of a worker is retried in place, in milliseconds. The second one is replaced,
        # since its process may be what is broken.
        again = _failed_before(context, worker, message)
        context.open_incident(
            cause,
            node=worker.node,
            workers=[worker.name],
            rung=None if again else "retry in process",
            kind="nan" if isinstance(cause, causes.NotFinite) else None,
            needs_newcomer=again,
        )
        if again:
            processes.end_worker(context, worker)
    # The generation breaks in any case: this worker has left the step, and the others wait for it in the next
    # collective.
    generations.break_generation(context, cause)


def _alone_refuses(context: Context, worker: Worker) -> bool:
    """A newcomer refuses what the others train with, and nothing else runs on its node."""
    # Its data set or its script is another one, and so it is for each worker that starts there. They train on, and
    # what the next machine has is another question. A node with members that do train has what they have.
    assignment = context.state.membership.assignments.get(worker.name)
    if worker.phase is not WorkerPhase.MEMBER or assignment is None or not assignment.fetches:
        return False
    ours = context.workers_of(context.state.membership.nodes[worker.node])
    assignments = [
        context.state.membership.assignments.get(w.name) for w in ours if w.phase is WorkerPhase.MEMBER
    ]
    return all(a is None or a.fetches for a in assignments)


def gradients_differ(context: Context, worker: Worker, message: m.GradientsDiffer) -> None:
    """Handles the report that several members computed the same micro-batch with different results. Nobody has prepared the
    step, so it is dropped; a member that is proven wrong is removed."""
    membership = context.state.membership
    current = membership.generation
    # All members say it. The first one's word ends the generation, and the others' are about one that has ended.
    if current is None or message.generation != current.number or worker.phase is not WorkerPhase.MEMBER:
        return
    if not (membership.phase is JobPhase.RUNNING or membership.yielding):
        return
    found = checksums.apart(message.digests)
    known = [membership.workers[name] for name in message.digests if name in membership.workers]
    if found is None or len(known) < len(message.digests):
        return
    agree = tuple(sorted(set(message.digests) - set(found.workers)))
    cause = causes.GradientsDiffer(step=message.step, micro=message.micro, workers=found.workers, agree=agree)
    if found.proven:
        wrong = [membership.workers[name] for name in found.workers]
        condemn(context, wrong, cause)
        # Without this the worker's successor would start on the same processor, and nobody would look at it.
        for one in wrong:
            context.request(NoteMiscomputed(one, cause))
        return
    # The same step is computed again, which undoes an error that does not repeat itself. One that does cannot be
    # told from a script that is not deterministic, and no worker is more suspect than the others.
    signature = type(message).__name__
    again = any((f.step, f.signature) == (message.step, signature) for f in membership.failures)
    for one in known:
        note_failure(context, message.step, signature, one, message.generation)
    if again:
        root_cause = RootCause(
            cause=cause,
            rank=current.rank_of(known[0].name),
            node=known[0].node,
            step=message.step,
            log=known[0].log,
        )
        generations.break_generation(context, cause)
        shutdown.request(context, f"the same failure twice in a row: {cause}", "failed", root_cause)
        return
    context.open_incident(cause, node=known[0].node, workers=[w.name for w in known], rung="retry in process")
    generations.break_generation(context, cause)


def _failed_before(context: Context, worker: Worker, message: m.Failed) -> bool:
    same = [
        f
        for f in context.state.membership.failures
        if f.worker == worker.name and (f.step, f.signature) == (message.step, message.signature)
    ]
    return len(same) >= 2


def first_root_cause(context: Context, signature: str) -> RootCause | None:
    """The root cause that the first worker with this failure signature reported; None: none did."""
    for failure in context.state.membership.failures:
        if failure.signature == signature and failure.worker in context.state.membership.root_causes:
            return context.state.membership.root_causes[failure.worker]
    return None


def note_failure(
    context: Context,
    step: int | None,
    signature: str,
    worker: Worker,
    generation: int,
    also_on: tuple[str, ...] = (),
    lasted_s: float = 0.0,
) -> None:
    """Records a failure for `script_fault` and `gang_fault`."""
    context.state.membership.failures.append(
        Failure(
            step=step,
            signature=signature,
            worker=worker.name,
            node=worker.node,
            generation=generation,
            also_on=also_on,
            lasted_s=lasted_s,
        )
    )
    # Counted per machine for the choice of newcomers. That decides nothing about fault, it only puts others
    # first.
    if node := context.state.membership.nodes.get(worker.node):
        node.failures += 1


@dataclass
class _Known:
    """The recorded failures, by what is looked up at each new one. A NaN in the sum is reported by every worker: if each report were
    compared with all others, it would cost the square of the workers."""

    count: int = 0
    oldest: Failure | None = None
    reported: set[tuple[str, int, int | None]] = field(default_factory=set)
    """The worker, generation and step of each failure."""
    attempts: dict[tuple[int | None, str], set[int]] = field(default_factory=dict)
    """The generations that failed at this step with this signature."""


def _known(context: Context) -> _Known:
    failures, known = context.state.membership.failures, context.transient(_Known)
    # Failures are added at the end. Where others went, those that are left are counted anew.
    if known.count > len(failures) or (known.count and known.oldest is not failures[0]):
        vars(known).update(vars(_Known()))
    for failure in failures[known.count :]:
        known.reported.add((failure.worker, failure.generation, failure.step))
        known.attempts.setdefault((failure.step, failure.signature), set()).add(failure.generation)
    known.count, known.oldest = len(failures), failures[0] if failures else None
    return known


def _verdict(context: Context, trained: bool = False, nodes: int = 1) -> ScriptFault | None:
    """As `script_fault`, of the newest failure."""
    failures = context.state.membership.failures
    last = failures[-1]
    # Several workers of one attempt prove nothing at a step, however many they are.
    if last.step is not None and len(_known(context).attempts[last.step, last.signature]) < 2:
        return None
    return script_fault(failures, trained, nodes)


def forgive(context: Context, innocent: Callable[[Failure], bool]) -> None:
    """Removes the records of failures that turned out to have another cause."""
    membership = context.state.membership
    for failure in filter(innocent, membership.failures):
        if node := membership.nodes.get(failure.node):
            node.failures -= 1
    membership.failures = [f for f in membership.failures if not innocent(f)]


# ---------------------------------------------------------------- processes that end


def cause_of(message: m.Exited) -> causes.Cause:
    """Why the process ended, as far as its agent knows."""
    if message.out_of_memory:
        return causes.KilledForMemory(message.memory_limit)
    return causes.ProcessEnded(message.code)


def exited(context: Context, message: m.Exited) -> None:
    """A worker's process ended."""
    s = context.state
    worker = s.membership.workers.get(message.worker)
    # Exited is repeated after a reconnect, and a worker's end must be judged once.
    if worker is None or worker.exited:
        return
    worker.exited = True
    described = RootCause(cause=cause_of(message), node=worker.node, log=message.log)
    # An error that the script reported before it ended explains more than its exit code, so the code is only
    # the default.
    root_cause = s.membership.root_causes.setdefault(worker.name, described)
    root_cause.tail, root_cause.log = list(message.tail), message.log
    context.record(
        ledger.WorkerExited(worker=worker.name, node=worker.node, code=message.code, log=message.log)
    )
    # Asked before the mode judges the exit, since that may end the job: what the worker left in memory would
    # not be waited for.
    context.request(AwaitChecksums(worker, message))
    # Also for a worker that is gone already: its steps count whether or not its end was expected.
    step_accounting.exited(s, worker.name, message.steps)
    if worker.phase is WorkerPhase.GONE:
        return
    context.mode.on_exit(context, worker, message)


def lose_worker(
    context: Context, worker: Worker, cause: causes.Cause, message: m.Exited | None = None
) -> None:
    """Handles the unrequested end of a worker. message: how its process ended; None: not known."""
    # The phase that it had is what the mode needs, and the transition overwrites it.
    was, worker.vanished_s = worker.phase, None
    transitions.enter(context, worker, WorkerPhase.GONE)
    context.mode.on_worker_lost(context, worker, was, cause, message)


def judge_exit(context: Context, worker: Worker, message: m.Exited, early: bool) -> None:
    membership = context.state.membership
    root_cause = membership.root_causes[worker.name]
    root_cause.rank = (
        root_cause.rank if membership.generation is None else membership.generation.rank_of(worker.name)
    )
    signature = policy.failure_signature(root_cause, message)
    note_failure(context, None if early else membership.committed, signature, worker, membership.number)
    verdict = _verdict(context, trained=membership.number > 0, nodes=queries.hoped_for(context))
    if verdict is not None:
        generations.break_generation(context, root_cause.cause)
        shutdown.request(context, verdict.reason, "failed", first_root_cause(context, signature))


def did_not_start(context: Context, worker: Worker, cause: causes.Cause) -> None:
    """Counts a worker that ended before it was ready. Workers that were started together count once."""
    s, node = context.state, context.state.membership.nodes.get(worker.node)
    # Workers that were started together fail together (a missing file on every node). As one attempt they
    # count once, or the first bad start would pause the job for minutes.
    if worker.started_s >= s.membership.bad_start_at_s:
        s.membership.bad_starts, s.membership.bad_start_at_s = s.membership.bad_starts + 1, context.now
        if s.membership.bad_starts >= 2:
            pause_s = context.timing.heartbeat_s * 2.0 ** min(s.membership.bad_starts - 2, 16)
            s.deadlines.set(Timer.START_AFTER, context.now + min(pause_s, context.timing.wait_s))
    # The same per node: three attempts in a row, not three workers of one attempt.
    if node is not None and worker.started_s >= node.start_failed_at_s:
        node.failed_starts, node.start_failed_at_s = node.failed_starts + 1, context.now
        if node.alive and node.failed_starts >= MOST_FAILED_STARTS:
            nodes.give_up(context, node, causes.WorkersDoNotStart(str(cause)))


def started_well(context: Context, worker: Worker) -> None:
    """Resets the count of failed starts, because a worker became ready."""
    context.state.membership.bad_starts = 0
    context.state.deadlines.clear(Timer.START_AFTER)
    if node := context.state.membership.nodes.get(worker.node):
        node.failed_starts = 0


# ---------------------------------------------------------------- processes that are ended


def condemn(context: Context, workers: Iterable[Worker], cause: causes.Cause) -> None:
    """Removes workers that will not leave the generation by themselves."""
    membership = context.state.membership
    # One incident per node: eight workers that are taken out of one node are one fault.
    by_node: dict[str, list[Worker]] = {}
    for worker in workers:
        by_node.setdefault(worker.node, []).append(worker)
    breaks = False
    for node, ours in by_node.items():
        part = any(w.phase in (WorkerPhase.MEMBER, WorkerPhase.PARKED) for w in ours)
        if part and membership.phase is not JobPhase.STOPPING:
            names = [w.name for w in ours]
            context.open_incident(cause, node=node, workers=names)
            # The generation is ended once, after all of them: in between it would break with half of the
            # culprits still counted as members.
            breaks = True
        else:
            context.record(
                ledger.WorkerEnded(workers=[w.name for w in ours], cause=str(cause), cause_kind=cause.kind)
            )
        for worker in ours:
            rank = membership.generation.rank_of(worker.name) if membership.generation else None
            membership.root_causes[worker.name] = RootCause(
                cause=cause, rank=rank, node=node, step=membership.committed, log=worker.log
            )
            processes.end_worker(context, worker)
    if breaks:
        generations.break_generation(context, cause)


def end_late_starters(context: Context) -> None:
    """Workers that are not ready in time are taken out, and new ones started."""
    limit_s = context.timing.start_s
    names = context.watch.due(Watched.NOT_READY, context.now)
    # In the order of their start: what is counted for the first of an attempt counts for all.
    late = [w for w in context.state.membership.workers.values() if w.name in names] if names else []
    cause = causes.NotReady(limit_s)
    condemn(context, late, cause)
    for worker in late:
        did_not_start(context, worker, cause)


def end_stuck(context: Context) -> None:
    """Members that did not leave the broken generation in time are taken out.

    One that has not finished a step yet may be compiling, and one may be at work of the script's own: both have
    the time of a start for that.
    """
    s = context.state
    s.deadlines.clear(Timer.LEAVE)
    stuck = [
        w for w in context.alive_workers() if w.phase is WorkerPhase.MEMBER or w.name in s.membership.stops
    ]
    # Members that did not park, and parked ones that were told to save and have not left. Others are not
    # awaited.
    stuck = [w for w in stuck if w.phase in (WorkerPhase.MEMBER, WorkerPhase.PARKED)]
    # Work of the script's own between two steps has the time of a start, measured from the break: it cannot
    # be interrupted, and it is no hang.
    until_s = {w.name: s.membership.told_to_leave_s + context.timing.start_s for w in stuck if w.aside}
    for worker in stuck:
        # It has not finished a step in this generation, so it may be compiling, and a compiler does not look
        # at messages.
        if worker.median_s is None and worker.joined_generation == s.membership.number:
            until_s.setdefault(worker.name, s.membership.formed_s + context.timing.start_s)
    patient = {
        w.name
        for w in stuck
        if s.membership.stop_reason is None and not context.reached(until_s.get(w.name, 0.0))
    }
    # The deadline moves to the first of them. Without one nobody would look again, and the job would wait for
    # ever for a worker that is really stuck.
    if patient:
        s.deadlines.set(Timer.LEAVE, min(until_s[name] for name in patient))
    condemn(context, [w for w in stuck if w.name not in patient], causes.LeftBehind())


def forget(context: Context) -> None:
    """Drops old failures and workers, so that the state stays small however long the job runs."""
    failures = context.state.membership.failures
    if len(failures) > KEPT:
        del failures[: -KEPT // 2]


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
    """The answers to the newest Inspect. Not part of the state: a coordinator that takes over asks again."""

    views: list[m.WorkerView] = field(default_factory=list)
    stacks: dict[str, str] = field(default_factory=dict)
    unheard: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    """Workers that went on since they were seen."""

    def begin(self, nodes: set[str]) -> None:
        """Starts a new inspection of these nodes. Answers to an earlier one are ignored from now on."""
        self.views, self.stacks, self.unheard, self.moved = [], {}, nodes, set()


def stalled(context: Context, name: str, view: m.WorkerView) -> None:
    """Handles an agent's report that a worker makes no progress: asks every node for the positions of its workers."""
    s = context.state
    worker = s.membership.workers.get(name)
    if worker is None or worker.phase is WorkerPhase.GONE:
        return
    running = s.membership.phase is JobPhase.RUNNING and worker.phase is WorkerPhase.MEMBER
    # A stopped spare or starter holds up nobody, but it is no spare either. At level 2 it can be replaced by
    # itself; at level 0 there are no spares.
    if view.process in "Tt" and not running and context.mode.replaces_one:
        condemn(context, [worker], causes.ProcessStopped())
        return
    if _left_behind(context, worker, view):
        condemn(context, [worker], causes.LeftBehind())
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
    waits = min(view.idle_s, context.now - membership.told_to_leave_s)
    return view.page.phase in WAITING_PHASES and waits >= MARGIN * context.timing.stall_s(context.median_s())


def inspected(context: Context, message: m.InspectReply) -> None:
    """Handles one node's answer. The last answer leads to a verdict."""
    s, inspection = context.state, context.transient(Inspection)
    # An answer to an earlier request shows the workers as they were then; one that moved since would look
    # stopped.
    if not s.deadlines.is_set(Timer.INSPECT) or message.request != s.membership.inspect_request:
        return
    # Only members that are still inside count. One that parked while the others answered holds up nobody.
    for view in message.workers:
        worker = s.membership.workers.get(view.worker)
        # A worker that has not been given its order to join cannot move: the order was lost with a connection, and is sent
        # again. It counts as not seen, or the others' wait for it would be blamed on it.
        told = not context.mode.replaces_one or view.formed >= s.membership.number
        if worker is not None and worker.phase is WorkerPhase.MEMBER and told:
            inspection.views.append(view)
            inspection.moved.discard(view.worker)
            inspection.unheard.discard(worker.node)
    inspection.stacks.update(message.stacks)
    if not inspection.unheard:
        judge(context)


def moved(context: Context, worker: Worker) -> None:
    """A member joined or committed a step: what its agent answered before is out of date, and no verdict may use it."""
    # An agent's messages keep their order: what comes after its answer happened after it.
    if context.state.deadlines.is_set(Timer.INSPECT):
        context.transient(Inspection).moved.add(worker.name)


def judge(context: Context) -> None:
    """Decides which workers cause a hang, when all nodes have answered or the time for their answers is over."""
    s, inspection = context.state, context.transient(Inspection)
    s.deadlines.clear(Timer.INSPECT)
    # Their nodes count as not heard: nobody can be compared with a member that is somewhere else by now.
    inspection.unheard |= {
        s.membership.workers[v.worker].node for v in inspection.views if v.worker in inspection.moved
    }
    inspection.views = [v for v in inspection.views if v.worker not in inspection.moved]
    allowed = {v.worker: _allowed_s(context, v) for v in inspection.views}
    ranks = {x.worker: x.rank for x in s.membership.generation.members} if s.membership.generation else {}
    find = policy.find_culprits if context.mode.replaces_one else policy.find_culprits_by_position
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
    if verdict.one_of:
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
    """At level 0 workers do not report their phase within a step. A suspect (any worker, if none is named) that uses the
    processor may be evaluating or saving, and is left alone for as long as a start may take."""
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
    """Handles a hang in which no worker differs from the others. The step is tried again twice. Then half of the workers are
    replaced, and after that the other half: one of them is at fault, and the others keep the state."""
    membership = context.state.membership
    # If nobody waits for anybody, all are busy with something of their own, usually a slow file system;
    # ending the generation would not make it faster.
    waiting = any(v.page.phase in _FOR_OTHERS for v in context.transient(Inspection).views)
    membership.stall_rounds += 1
    if not waiting and membership.stall_rounds < PATIENT_ROUNDS:
        return
    if not waiting or membership.stall_rounds <= RETRIES:
        context.open_incident(cause, node=None, rung="retry in process", needs_newcomer=False)
        generations.break_generation(context, cause)
        return
    # Bisection: two retries did not help, so the fault is in some worker and not in the moment. Half are
    # replaced, the state lives on in the others, and if the hang returns, it is the other half's turn.
    condemn(context, _half(context.inside()), causes.Hang())


def _half(workers: list[Worker]) -> list[Worker]:
    """The older ones: of those that hold the same shard, so that somebody still holds it; else of all."""
    oldest = sorted(workers, key=lambda w: w.started_s)
    groups: dict[int, list[Worker]] = {}
    # Half of each replica group, not of all: taking out a whole group would lose its shard of the state.
    for worker in oldest:
        groups.setdefault(worker.shard_index, []).append(worker)
    chosen = [w for group in groups.values() for w in group[: len(group) // 2]]
    return chosen or oldest[: max(1, len(oldest) // 2)]
