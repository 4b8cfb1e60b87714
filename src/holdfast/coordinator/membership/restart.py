"""Level 0: an unmodified torchrun script. All its workers start together and, after a fault, start again
together, from warm processes; nothing of them survives but what the script saved.
"""

from __future__ import annotations

import signal

from holdfast.coordinator.kernel import incidents, transitions
from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.requests import RefuseNode, StopJob
from holdfast.coordinator.kernel.script_fault import ScriptFault
from holdfast.coordinator.kernel.state import Blame, Incident, JobPhase, Node, Worker, WorkerPhase
from holdfast.coordinator.membership import (
    environment,
    failures,
    hangs,
    nodes,
    policy,
    processes,
    queries,
    shutdown,
    step_accounting,
)
from holdfast.coordinator.storage import queries as storage
from holdfast.protocol import causes, ledger
from holdfast.protocol import messages as m
from holdfast.protocol.causes import Cause, Hang, ProcessEnded, WorkersFail

TERM_GRACE_S = 1.0

LOOK_AGAIN = 15
"""So many detection times after a look that found somebody at work comes the next."""


class Restart:
    """Mode: see `holdfast.coordinator.kernel.context`."""

    replaces_one = False

    def on_attached(self, core: Context) -> None:
        """What was started together goes on one by one, at level 2."""
        s = core.state
        s.level, s.generation, s.number = 2, None, 0
        s.history.clear()
        transitions.enter_job(core, JobPhase.GATHERING)
        s.committed, s.generation_committed = 0, 0
        for worker in core.alive_workers():
            transitions.enter(core, worker, WorkerPhase.GONE if worker.told_to_end else WorkerPhase.STARTING)
        for incident in s.incidents:
            incident.generation = 0
        core.record(ledger.Level(level=2))

    def on_exit(self, core: Context, worker: Worker, message: m.Exited) -> None:
        """A worker's process ended: with code 0 it is done; anything else ends all, and all start again."""
        s = core.state
        expected = s.phase is not JobPhase.RUNNING or worker.told_to_end
        transitions.enter(core, worker, WorkerPhase.GONE)
        if expected or message.code == 0:
            if message.code == -signal.SIGKILL and not message.killed:
                _explain(core, [worker], worker.node, ProcessEnded(message.code))
            return
        blame = s.blames[worker.name]
        blame.rank = s.generation.rank_of(worker.name) if s.generation else None
        cause = blame.cause if blame.traceback else ProcessEnded(message.code)
        injected = _fault(core, [worker], worker.node, cause, raised=message.code > 0)
        s.blame = blame
        if core.spec.max_restarts == 0:
            core.request(StopJob("no restarts are allowed", "failed", blame))
        elif not injected:
            _judge(core, worker, policy.failure_signature(blame, message))

    def on_worker_lost(
        self, core: Context, worker: Worker, was: WorkerPhase, cause: Cause, message: m.Exited | None
    ) -> None:
        """All start again."""
        if core.state.phase is JobPhase.RUNNING:
            _fault(core, [worker], worker.node, cause)

    def on_never_started(self, core: Context, worker: Worker) -> None:
        """It was to start with the others: all start again."""
        if core.state.phase is JobPhase.RUNNING:
            _fault(core, [worker], worker.node, causes.NeverStarted())

    def explain_earlier(
        self, core: Context, node: Node, workers: list[Worker], cause: Cause
    ) -> Incident | None:
        """See `_explain`."""
        return _explain(core, workers, node.name, cause)

    def on_node_lost(self, core: Context, workers: list[Worker], cause: Cause) -> None:
        """A node with members is gone (its incident is open)."""
        s = core.state
        if workers and s.phase is JobPhase.RUNNING:
            s.blame = Blame(cause, None, workers[0].node, s.step)
            _restart(core, str(cause))

    def evict(self, core: Context, node: Node, workers: list[Worker], cause: Cause) -> None:
        """A node's workers are to end, and so all start again, unless they do so anyway."""
        if workers and core.state.phase is JobPhase.RUNNING:
            _fault(core, workers, node.name, cause)

    def on_stall(self, core: Context, culprits: list[Worker], reason: str, allowed: dict[str, float]) -> None:
        """All start again, unless a suspect is at work."""
        s = core.state
        if hangs.at_work(core, {w.name for w in culprits}):
            s.look_again_s = core.now + LOOK_AGAIN * core.timing.detection_s
        elif s.phase is JobPhase.RUNNING:
            node = culprits[0].node if culprits else None
            _fault(core, culprits, node, Hang(reason))

    def change_members(self, core: Context) -> None:
        """A change of the membership is a restart of all: when it must be, or when a person wants it."""
        s, members = core.state, core.members()
        if s.phase is not JobPhase.RUNNING or s.generation is None:
            return
        gone = [w.node for w in members if queries.leaves(core, w)]
        full = _size_now(core)
        if gone:
            _restart(core, f"{gone[0]} leaves: {s.nodes[gone[0]].leaving}", counts=False)
        elif len(members) > s.target or (s.grows and full == s.target > len(members)):
            _restart(core, f"the job is resized to {s.wanted_nodes} nodes", counts=False)

    def on_out_of_time(self, core: Context) -> None:
        """Workers that have not ended by themselves are ended; what they gave before is still saved."""
        s = core.state
        if core.alive_workers():
            for worker in core.alive_workers():
                processes.end_worker(core, worker, counts=False)
            s.stop_deadline_s = core.now + core.timing.start_s
        elif s.phase is JobPhase.STOPPING and (until_s := storage.moves_until_s(core)) > core.now:
            s.stop_deadline_s = until_s
        else:
            shutdown.end(core)

    def deadlines(self, core: Context) -> list[float]:
        """A script may start for as long as it likes."""
        return []

    def due(self, core: Context) -> None:
        """Nothing is due."""

    def advance(self, core: Context) -> None:
        """Starts all workers when there are nodes enough, and ends the job when all are done."""
        s = core.state
        if s.phase is JobPhase.STOPPING:
            shutdown.end_when_saved(core)
        elif s.stop_reason is not None:
            transitions.enter_job(core, JobPhase.STOPPING)
            processes.ask_all_to_end(core, grace_s=core.timing.stop_s / 2)
            shutdown.end_when_saved(core)
        elif s.phase is JobPhase.BREAKING:
            if not core.alive_workers():
                transitions.enter_job(core, JobPhase.GATHERING)
                self.advance(core)
        elif s.phase is JobPhase.GATHERING:
            self._launch(core)
        elif s.phase is JobPhase.RUNNING and not core.alive_workers():
            transitions.enter_job(core, JobPhase.STOPPING)
            s.outcome = "finished"
            shutdown.end_when_saved(core)

    def _launch(self, core: Context) -> None:
        s, spec = core.state, core.spec
        nodes.ask(core)
        usable = _usable(core)
        usable.sort(key=lambda n: (bool(n.lemon), n.failures))
        count = min(len(usable), s.wanted_nodes)
        minimum = s.wanted_nodes if spec.wait_for_spare else spec.min_nodes
        if core.budget_spent():
            core.request(StopJob("the restart budget is spent", "failed", s.blame))
            self.advance(core)
            return
        if count < minimum:
            if queries.under_repair(core):
                s.wait_deadline_s = None  # they have a deadline of their own
            elif s.wait_deadline_s is None:
                s.wait_deadline_s = core.now + core.timing.wait_s
                core.record(ledger.Waiting(workers=count * spec.nproc, target=s.target))
            if not queries.coming(core):
                core.request(StopJob("no more nodes may be asked for", "failed", s.blame))
                self.advance(core)
            return
        s.wait_deadline_s = None
        mending = any(n.then is not None or n.checking is not None for n in core.alive_nodes())
        if count < s.wanted_nodes and (s.number == 0 or s.replacing or mending):
            if s.form_deadline_s is None:
                s.form_deadline_s = core.now + core.timing.form_s
            if core.now < s.form_deadline_s:
                return
        s.form_deadline_s = None
        _start_all(core, sorted(usable[:count], key=lambda n: list(s.nodes).index(n.name)))


def _usable(core: Context) -> list[Node]:
    return [n for n in core.alive_nodes() if n.slots >= core.spec.nproc and n.leaving is None and not n.held]


def _size_now(core: Context) -> int:
    """Workers that a start would have now."""
    return min(len(_usable(core)), core.state.wanted_nodes) * core.spec.nproc


def _start_all(core: Context, chosen: list[Node]) -> None:
    s, spec = core.state, core.spec
    world = len(chosen) * spec.nproc
    s.number += 1
    step_accounting.starts(s)
    s.master_uses += 1
    members = []
    for index, node in enumerate(chosen):
        for slot in range(spec.nproc):
            rank = index * spec.nproc + slot
            env = environment.environment(core, node, slot, rank, world)
            env |= {"MASTER_ADDR": chosen[0].host, "GROUP_RANK": str(index)}
            ports = chosen[0].ports or (29500,)
            env["MASTER_PORT"] = str(ports[s.master_uses % len(ports)])
            worker = processes.start_worker(core, node, slot, env)
            transitions.enter(core, worker, WorkerPhase.MEMBER)
            members.append(m.Member(rank=rank, worker=worker.name, node=node.name, slot=slot, host=node.host))
    s.generation, s.grows = m.Generation(number=s.number, members=tuple(members)), False
    s.generation_committed = 0
    s.committed = 0
    transitions.enter_job(core, JobPhase.RUNNING)
    s.history.append((round(core.now - s.began_s, 4), world))
    incidents.decided(s, core.now, "restart of all workers")
    core.record(ledger.Started(generation=s.number, world=world, workers=[x.worker for x in members]))


def _judge(core: Context, worker: Worker, signature: str) -> None:
    """The script's fault, a node's, or one that a restart may cure?"""
    s = core.state
    failures.note_failure(core, s.committed or None, signature, worker, s.number)
    verdict = policy.gang_fault(s.failures, nodes=queries.hoped_for(core))
    match verdict:
        case ScriptFault(reason):
            s.blame = failures.first_blame(core, signature) or s.blame
            core.request(StopJob(reason, "failed"))
        case policy.NodeFault(name):
            core.request(RefuseNode(s.nodes[name], WorkersFail(signature)))
        case None:
            pass


def _explain(core: Context, workers: list[Worker], node: str, cause: Cause) -> Incident | None:
    """Workers ended without a word, and others have just raised an error: it is their end as it was seen from there. A
    group notices that it lost a process before that one's own machine has said so. Returns the incident, which is
    theirs now; None: nobody has.
    """
    s = core.state
    incident = incidents.raised_now(s)
    if incident is None or s.phase is JobPhase.RUNNING or not workers:
        return None
    if s.stop_reason is not None and core.spec.max_restarts > 0:
        return None  # a verdict, which was reached with more than this
    failures.forgive(core, lambda failure: failure.generation == incident.generation)
    was, names = incident.cause, [w.name for w in workers]
    incidents.caused(s, core.now, incident, cause, node, names)
    rank = incident.ranks[0] if len(incident.ranks) == 1 else None
    s.blame = Blame(cause, rank, node, s.step, log=workers[0].log)
    core.record(
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
    core: Context, workers: list[Worker], node: str | None, cause: Cause, raised: bool = False
) -> bool:
    """Opens an incident and starts all again. raised: it is an error. True when the fault was injected."""
    incident = core.open_incident(cause, node=node, workers=[w.name for w in workers], raised=raised)
    _restart(core, str(cause))
    return incident.injected


def _restart(core: Context, reason: str, counts: bool = True) -> None:
    """Ends all workers; when they are gone, all start again. counts: against the restart budget."""
    s = core.state
    s.restarts_used += counts
    transitions.enter_job(core, JobPhase.BREAKING)
    s.break_deadline_s = None
    core.record(ledger.Restart(generation=s.number, reason=reason))
    processes.ask_all_to_end(core, grace_s=TERM_GRACE_S)
