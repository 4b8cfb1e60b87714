"""Level 0: an unmodified torchrun script. All workers start together and, after a fault, start again together from warm
processes. Only what the script saved survives."""

from __future__ import annotations

import signal

import msgspec

from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.incidents import ScriptFault
from holdfast.coordinator.kernel.state import Incident, JobPhase, Node, RootCause, Timer, Worker, WorkerPhase
from holdfast.coordinator.membership import (
    failures,
    nodes,
    policy,
    processes,
    queries,
    shutdown,
    step_accounting,
    wall_time,
)
from holdfast.coordinator.membership.rank_assignment import WorkerPlaces, in_order, path, pick
from holdfast.coordinator.storage import queries as storage
from holdfast.protocol import causes, ledger
from holdfast.protocol import messages as m
from holdfast.protocol.causes import Cause, Hang, WorkersFail
from holdfast.protocol.phases import Groups

TERM_GRACE_S = 1.0

LOOK_AGAIN = 15
"""So many detection times after a look that found somebody at work comes the next."""


class RestartMode:
    """Mode: see `holdfast.coordinator.kernel.context`."""

    replaces_one = False
    saves_together = False

    def on_attached(self, context: Context) -> None:
        """The workers that were started together go on individually, at level 2."""
        s = context.state
        # The numbers begin anew, because generations at level 2 count other things: there was no vote before,
        # so nothing of the level-0 start may look like a commit.
        s.membership.level, s.membership.generation, s.membership.number = 2, None, 0
        s.membership.history.clear()
        wall_time.attached(s)
        transitions.enter_job(context, JobPhase.GATHERING)
        s.membership.committed, s.membership.generation_committed = 0, 0
        for worker in context.alive_workers():
            transitions.enter(
                context, worker, WorkerPhase.GONE if worker.told_to_end else WorkerPhase.STARTING
            )
        # Their generation was one of the old count. As 0 they close with the first commit of the first
        # generation.
        incidents.count_anew(s)
        context.record(ledger.Level(level=2))

    def on_exit(self, context: Context, worker: Worker, message: m.Exited) -> None:
        """With exit code 0 the worker is done. Any other end of a process ends all workers, and all start again."""
        membership = context.state.membership
        # Ends that were asked for, and code 0, mean nothing. A kill -9 that nobody of ours sent is different:
        # it is the OOM killer, or an operator, and the errors that others raised a moment ago are its effect.
        expected = membership.phase is not JobPhase.RUNNING or worker.told_to_end
        transitions.enter(context, worker, WorkerPhase.GONE)
        if expected or message.code == 0:
            if message.code == -signal.SIGKILL and not message.killed:
                _explain(context, [worker], worker.node, failures.cause_of(message))
            if not expected:
                worker.left, worker.script_ended, worker.groups = True, message.script_ended, message.groups
            return
        root_cause = membership.root_causes[worker.name]
        root_cause.rank = membership.generation.rank_of(worker.name) if membership.generation else None
        cause = root_cause.cause if root_cause.traceback else failures.cause_of(message)
        # Whoever loses a connection that a peer closed says what it saw, and not who left.
        if message.code != -signal.SIGKILL and (early := _left_early(context, message.groups)):
            _left(context, early, causes.LeftEarly(str(cause)), root_cause)
        else:
            signature = policy.failure_signature(root_cause, message)
            _failed(context, [worker], cause, root_cause, signature, raised=message.code > 0)

    def on_worker_lost(
        self, context: Context, worker: Worker, was: WorkerPhase, cause: Cause, message: m.Exited | None
    ) -> None:
        """All start again."""
        if context.state.membership.phase is JobPhase.RUNNING:
            _fault(context, [worker], worker.node, cause)

    def on_never_started(self, context: Context, worker: Worker) -> None:
        """All start again, because all have to start together."""
        if context.state.membership.phase is JobPhase.RUNNING:
            _fault(context, [worker], worker.node, causes.NeverStarted())

    def explain_earlier(
        self, context: Context, node: Node, workers: list[Worker], cause: Cause
    ) -> Incident | None:
        """See `_explain`."""
        return _explain(context, workers, node.name, cause)

    def on_node_lost(self, context: Context, workers: list[Worker], cause: Cause) -> None:
        """A node with members is gone (its incident is open)."""
        s = context.state
        if workers and s.membership.phase is JobPhase.RUNNING:
            s.membership.root_cause = RootCause(cause=cause, rank=None, node=workers[0].node, step=s.step)
            _restart(context, str(cause))

    def evict(self, context: Context, node: Node, workers: list[Worker], cause: Cause) -> None:
        """Ends the workers of a node. All start again, unless that is under way."""
        if workers and context.state.membership.phase is JobPhase.RUNNING:
            _fault(context, workers, node.name, cause)

    def on_stall(
        self, context: Context, culprits: list[Worker], cause: Hang, allowed: dict[str, float]
    ) -> None:
        """All start again, unless a suspect is at work."""
        membership = context.state.membership
        if failures.at_work(context, {w.name for w in culprits}):
            # A suspect that uses the processor may be evaluating. It is looked at again, later and later
            # apart, instead of being killed for work that nobody could see at level 0.
            membership.look_again_s = context.now + LOOK_AGAIN * context.timing.detection_s
        elif membership.phase is JobPhase.RUNNING:
            if not culprits and (early := _left_early(context, None)):
                _left(context, early, causes.LeftEarly(), RootCause(cause=cause, log=early[0].log))
            else:
                _take_out(context, culprits, cause)

    def change_members(self, context: Context) -> None:
        """Changes the membership by restarting all workers: when that is unavoidable, or when a person wants it."""
        s, members = context.state, context.members()
        if s.membership.phase is not JobPhase.RUNNING or s.membership.generation is None:
            return
        # A restart of all costs minutes at level 0, so it is done only when somebody must go, or a person
        # asked for another size.
        gone = [w.node for w in members if queries.leaves(context, w)]
        full = _size_now(context)
        if gone:
            _restart(context, f"{gone[0]} leaves: {s.membership.nodes[gone[0]].leaving}", counts=False)
        elif len(members) > s.target or (s.membership.grows and full == s.target > len(members)):
            _restart(context, f"the job is resized to {s.wanted_nodes} nodes", counts=False)

    def on_out_of_time(self, context: Context) -> None:
        """Ends workers that have not ended by themselves. Snapshots that they gave before are still saved."""
        s = context.state
        if context.index.alive_workers:
            for worker in context.alive_workers():
                processes.end_worker(context, worker, counts=False)
            s.deadlines.set(Timer.STOP, context.now + context.timing.start_s)
        elif s.membership.phase is JobPhase.STOPPING and not context.reached(
            until_s := storage.moves_until_s(context)
        ):
            s.deadlines.set(Timer.STOP, until_s)
        else:
            shutdown.end(context)

    def due(self, context: Context) -> None:
        """Nothing is due."""

    def advance(self, context: Context) -> None:
        """Starts all workers when there are nodes enough, and ends the job when all are done."""
        membership = context.state.membership
        if membership.phase is JobPhase.STOPPING:
            shutdown.end_when_saved(context)
        elif membership.stop_reason is not None:
            transitions.enter_job(context, JobPhase.STOPPING)
            wall_time.stops(context.state, context.now)
            # Half of the time for the scripts to end by themselves, half for what they gave to be stored.
            processes.ask_all_to_end(context, grace_s=context.timing.stop_s / 2)
            shutdown.end_when_saved(context)
        elif membership.phase is JobPhase.BREAKING:
            # Only when all are gone: a port or a GPU that an old process still holds would make the new start
            # fail.
            if not context.index.alive_workers:
                transitions.enter_job(context, JobPhase.GATHERING)
                wall_time.gathered(context.state, context.now)
                self.advance(context)
        elif membership.phase is JobPhase.GATHERING:
            self._launch(context)
        elif membership.phase is JobPhase.RUNNING and not context.index.alive_workers:
            transitions.enter_job(context, JobPhase.STOPPING)
            wall_time.stops(context.state, context.now)
            membership.outcome = "finished"
            shutdown.end_when_saved(context)

    def _launch(self, context: Context) -> None:
        s, spec = context.state, context.spec
        nodes.ask(context)
        usable = _usable(context)
        usable.sort(key=queries.tier)
        count = min(len(usable), s.wanted_nodes)
        minimum = s.wanted_nodes if spec.wait_for_spare else spec.min_nodes
        if context.budget_spent():
            shutdown.request(context, "the restart budget is used up", "failed", s.membership.root_cause)
            self.advance(context)
            return
        if count < minimum:
            if queries.under_repair(context):
                s.deadlines.clear(Timer.WAIT)  # they have a deadline of their own
            elif not s.deadlines.is_set(Timer.WAIT):
                s.deadlines.set(Timer.WAIT, context.now + context.timing.wait_s)
                context.concerns(*(incident.id for incident in incidents.open_ones(s)))
                context.record(ledger.Waiting(workers=count * spec.nproc, target=s.target))
            if not queries.coming(context):
                shutdown.request(context, "no more nodes can be requested", "failed", s.membership.root_cause)
                self.advance(context)
            return
        s.deadlines.clear(Timer.WAIT)
        # A node that is repaired soon is worth a short wait: starting now with fewer would mean another
        # restart of all when it comes back.
        mending = any(
            n.health.then is not None or n.health.checking is not None for n in context.alive_nodes()
        )
        if count < s.wanted_nodes and (s.membership.number == 0 or s.membership.replacing or mending):
            if not s.deadlines.is_set(Timer.FORM):
                s.deadlines.set(Timer.FORM, context.now + context.timing.form_s)
            if context.is_ahead(Timer.FORM):
                return
        s.deadlines.clear(Timer.FORM)
        _start_all(context, _in_order(context, usable, count))


def _in_order(context: Context, usable: list[Node], count: int) -> list[Node]:
    """So many nodes in the order of their ranks: as they came, and those of one place behind each other."""
    came = {name: i for i, name in enumerate(context.state.membership.nodes)}
    if not context.index.any_place:
        return sorted(usable[:count], key=lambda n: came[n.name])
    paths = {n.name: path(n.place, n.name) for n in usable}
    standing = WorkerPlaces(paths, {n.name: queries.tier(n) for n in usable})
    # Every start begins anew, so there are no vacancies to fill: whoever is taken, the job stands in few places.
    chosen = sorted(pick(standing, [n.name for n in usable], count, (), ()), key=came.__getitem__)
    nodes_by_name = {n.name: n for n in usable}
    return [nodes_by_name[name] for name in in_order(chosen, paths)]


def _usable(context: Context) -> list[Node]:
    return [
        n for n in context.alive_nodes() if n.slots >= context.spec.nproc and n.leaving is None and not n.held
    ]


def _size_now(context: Context) -> int:
    """Workers that a start would have now."""
    return min(len(_usable(context)), context.state.wanted_nodes) * context.spec.nproc


def _start_all(context: Context, chosen: list[Node]) -> None:
    s, spec = context.state, context.spec
    world = len(chosen) * spec.nproc
    s.membership.number += 1
    step_accounting.starts(s)
    s.membership.master_uses += 1
    members = []
    for index, node in enumerate(chosen):
        for slot in range(spec.nproc):
            rank = index * spec.nproc + slot
            env = processes.environment(context, node, slot, rank, world)
            env |= {"MASTER_ADDR": chosen[0].host, "GROUP_RANK": str(index)}
            # Another port for each start. The last rendezvous may still hold the old one in TIME_WAIT, or a
            # process that does not end does.
            ports = chosen[0].ports or (29500,)
            env["MASTER_PORT"] = str(ports[s.membership.master_uses % len(ports)])
            worker = processes.start_worker(context, node, slot, env)
            transitions.enter(context, worker, WorkerPhase.MEMBER)
            members.append(m.Member(rank=rank, worker=worker.name, node=node.name, slot=slot, host=node.host))
    s.membership.generation, s.membership.grows = (
        m.Generation(number=s.membership.number, members=tuple(members)),
        False,
    )
    s.membership.generation_committed = 0
    s.membership.committed = 0
    wall_time.launched(s, context.now)
    transitions.enter_job(context, JobPhase.RUNNING)
    s.membership.resized(round(context.now - s.began_s, 4), world)
    context.concerns(*incidents.decided(s, context.now, "restart of all workers"))
    context.record(
        ledger.Started(generation=s.membership.number, world=world, workers=[x.worker for x in members])
    )


def _judge(context: Context, worker: Worker, signature: str) -> None:
    """The script's fault, a node's, or one that a restart may cure?"""
    membership = context.state.membership
    # Whoever raised the same in this attempt is a witness as good as the one whose process ended first.
    raised = [
        w.node
        for w in context.members()
        if w.name in membership.root_causes and policy.raised(membership.root_causes[w.name]) == signature
    ]
    also_on = tuple(dict.fromkeys(n for n in raised if n != worker.node))
    failures.note_failure(
        context,
        membership.committed or None,
        signature,
        worker,
        membership.number,
        also_on,
        context.now - worker.started_s,
    )
    verdict = policy.gang_fault(membership.failures, nodes=queries.hoped_for(context))
    match verdict:
        case ScriptFault(reason):
            membership.root_cause = failures.first_root_cause(context, signature) or membership.root_cause
            shutdown.request(context, reason, "failed")
        case policy.NodeFault(name):
            nodes.give_up(context, membership.nodes[name], WorkersFail(signature))
        case None:
            pass


def _left_early(context: Context, groups: Groups | None) -> list[Worker]:
    """Workers that left with exit code 0, and that others needed. groups: how far one of these came in its collectives; None: not
    known."""
    generation = context.state.membership.generation
    entered = {at.group: at.entered for at in groups or ()}
    found = []
    for member in generation.members if generation else ():
        worker = context.state.membership.workers.get(member.worker)
        if worker is None or not worker.left:
            continue
        # A script's regular end may come before another rank's error in a last save. But not before a collective that it
        # is a part of, nor without the end of its script.
        if not worker.script_ended or any(
            at.entered < entered.get(at.group, 0) for at in worker.groups or ()
        ):
            found.append(worker)
    return found


def _left(context: Context, early: list[Worker], cause: Cause, seen: RootCause) -> None:
    """seen: what is known of how another one ended then, whose last lines stay with the root cause."""
    first, generation = early[0], context.state.membership.generation
    rank = generation.rank_of(first.name) if generation else None
    root_cause = msgspec.structs.replace(seen, cause=cause, rank=rank, node=first.node)
    _failed(context, early, cause, root_cause, "exit code 0")


def _failed(
    context: Context,
    workers: list[Worker],
    cause: Cause,
    root_cause: RootCause,
    signature: str,
    raised: bool = False,
) -> None:
    """All start again because of these, unless that is not allowed or the script's fault. raised: by an error."""
    # The restart is decided before the fault is judged: training goes on in any case, unless the verdict
    # stops the job.
    _fault(context, workers, workers[0].node, cause, raised)
    context.state.membership.root_cause = root_cause
    if context.spec.max_restarts == 0:
        shutdown.request(context, "no restarts are allowed", "failed", root_cause)
    else:
        _judge(context, workers[0], signature)


def _explain(context: Context, workers: list[Worker], node: str, cause: Cause) -> Incident | None:
    """Workers ended without a word, and others have just raised an error: it is their end as it was seen from there. A
    group notices that it lost a process before that one's own machine has said so. Returns the incident, which is
    theirs now; None: nobody has.
    """
    s = context.state
    # Within the same generation only. An error of the attempt before says nothing about this one.
    incident = incidents.raised_now(s)
    if incident is None or s.membership.phase is JobPhase.RUNNING or not workers:
        return None
    if s.membership.stop_reason is not None and context.spec.max_restarts > 0:
        return None  # a verdict, which was reached with more than this
    # What was counted against the script or a node for that error is taken back, or three lost machines would
    # end in "the script fails again and again".
    failures.forgive(context, lambda failure: failure.generation == incident.generation)
    was, names = incident.cause, [w.name for w in workers]
    incidents.caused(s, context.now, incident, cause, node, names)
    context.concerns(incident.id)
    rank = incident.ranks[0] if len(incident.ranks) == 1 else None
    s.membership.root_cause = RootCause(cause=cause, rank=rank, node=node, step=s.step, log=workers[0].log)
    context.record(
        ledger.IncidentExplained(
            id=incident.id,
            node=node,
            ranks=incident.ranks,
            was=str(was),
            cause=str(cause),
            cause_kind=cause.kind,
        )
    )
    return incident


def _fault(
    context: Context, workers: list[Worker], node: str | None, cause: Cause, raised: bool = False
) -> None:
    """Opens an incident and starts all again. raised: it is an error."""
    context.open_incident(cause, node=node, workers=[w.name for w in workers], raised=raised)
    _restart(context, str(cause))


def _take_out(context: Context, culprits: list[Worker], cause: Hang) -> None:
    """All start again because of these. One incident for each of their nodes, as at level 2: what is remembered of a machine
    decides whether it is used again."""
    membership = context.state.membership
    by_node: dict[str | None, list[Worker]] = {}
    for worker in culprits:
        by_node.setdefault(worker.node, []).append(worker)
    for node, ours in (by_node or {None: []}).items():
        context.open_incident(cause, node=node, workers=[w.name for w in ours])
    # Last words of the job, should this have been the last restart that is allowed.
    first = culprits[0] if culprits else None
    rank = membership.generation.rank_of(first.name) if first and membership.generation else None
    membership.root_cause = RootCause(
        cause=cause,
        rank=rank,
        node=first.node if first else None,
        step=context.state.step if cause.stood_at_step is None else cause.stood_at_step,
        log=first.log if first else "",
    )
    _restart(context, str(cause))


def _restart(context: Context, reason: str, counts: bool = True) -> None:
    """Ends all workers; when they are gone, all start again. counts: against the restart budget."""
    s = context.state
    if counts:
        processes.count_restart(context)
    transitions.enter_job(context, JobPhase.BREAKING)
    wall_time.broke(s, context.now) if counts else wall_time.planned(s, context.now)
    s.deadlines.clear(Timer.LEAVE)
    context.record(ledger.Restart(generation=s.membership.number, reason=reason))
    processes.ask_all_to_end(context, grace_s=TERM_GRACE_S)
