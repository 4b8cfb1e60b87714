"""The core: `handle(event, now) -> actions`. It has no clock, socket, thread or randomness.

Three things drive it: the service (real life), the tests (random schedules under a virtual clock) and the
planner's simulator. What one decision is made of lies in `policy`, the job at level 0 in `gang`, the times of
a fault in `incidents`.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.coordinator import gang, incidents, policy
from holdfast.coordinator.events import (
    Action,
    DurableFound,
    End,
    Event,
    Injected,
    NodeJoined,
    NodeLost,
    NodeSays,
    NodeUnavailable,
    ProvideNode,
    Record,
    Recovered,
    ReleaseNode,
    Send,
    StopRequested,
    Tick,
)
from holdfast.coordinator.state import (
    Blame,
    CoreState,
    Failure,
    Injection,
    JobPhase,
    Node,
    Worker,
    WorkerPhase,
)
from holdfast.protocol import messages as m
from holdfast.protocol.job import Durable, JobSpec
from holdfast.protocol.page import Phase

MAX_DONORS = 8
"""Stripes from more donors than this gain nothing: the newcomer's link is full."""


class Core:
    """One job's decisions. `state` is all it remembers; give it back to go on after a crash."""

    def __init__(self, spec: JobSpec, state: CoreState | None = None) -> None:
        self.state = state or CoreState(spec=spec)
        self.spec = self.state.spec
        self.timing = self.spec.timing
        self.now = 0.0
        self._out: list[Action] = []
        self._views: list[m.WorkerView] = []
        self._stacks: dict[str, str] = {}
        self._unheard: set[str] = set()

    # ------------------------------------------------------------ in and out

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event at time `now` (seconds, never backward); returns what is to be done about it."""
        self.now = now
        if self.state.began_s == 0.0:
            self.state.began_s = now
        if self.state.phase is not JobPhase.ENDED:
            self._dispatch(event)
            self._check_deadlines()
            self._advance()
        elif isinstance(event, NodeJoined):
            self.send(event.hello.node, m.Shutdown(self.state.outcome or "ended"))
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> float | None:
        """When a Tick is due even if nothing else happens."""
        s = self.state
        if s.phase is JobPhase.ENDED:
            return None
        times = [n.last_seen_s + self.timing.detection_s for n in s.nodes.values() if n.alive]
        times += [
            w.started_s + self.timing.start_s
            for w in s.workers.values()
            if w.phase in (WorkerPhase.STARTING, WorkerPhase.ATTACHED) and s.level == 2
        ]
        deadlines = (
            s.break_deadline_s,
            s.form_deadline_s,
            s.wait_deadline_s,
            s.stop_deadline_s,
            s.inspect_deadline_s,
        )
        return min([*times, *(d for d in deadlines if d is not None)], default=None)

    def send(self, node: str, message: m.ToAgent) -> None:
        """Queues a message for an agent."""
        self._out.append(Send(node, message))

    def tell(self, worker: Worker, message: m.ToWorker) -> None:
        """Queues a message for a worker."""
        self.send(worker.node, m.Tell(worker.name, message))

    def record(self, kind: str, **fields: object) -> None:
        """Queues an entry of the ledger."""
        self._out.append(Record(kind, fields))

    # ------------------------------------------------------------ views

    def alive_nodes(self) -> list[Node]:
        """Nodes that are not lost, in the order of their joining."""
        return [n for n in self.state.nodes.values() if n.alive]

    def workers_in(self, *phases: WorkerPhase) -> list[Worker]:
        """Workers in any of these phases, oldest first."""
        return [w for w in self.state.workers.values() if w.phase in phases]

    def alive_workers(self) -> list[Worker]:
        """Workers whose process is not known to be gone."""
        return [w for w in self.state.workers.values() if w.phase is not WorkerPhase.GONE]

    def members(self) -> list[Worker]:
        """Workers of the newest generation, in the order of their ranks, dead ones included."""
        g = self.state.generation
        return [self.state.workers[x.worker] for x in g.members] if g else []

    def median_s(self) -> float | None:
        """The slowest member's median step."""
        return max((w.median_s for w in self.members() if w.median_s is not None), default=None)

    def at_full_strength(self) -> bool:
        """The newest generation has the target size."""
        g = self.state.generation
        return g is not None and len(g.members) >= self.spec.target

    # ------------------------------------------------------------ events

    def _dispatch(self, event: Event) -> None:
        match event:
            case NodeJoined(hello):
                self._node_joined(hello)
            case NodeLost(node, session, cause):
                known = self.state.nodes.get(node)
                if known is not None and known.alive and known.session == session:
                    self._lose_node(known, cause)
            case NodeSays(node, message):
                self._node_says(node, message)
            case Injected(fault, kind, node, worker):
                self._injected(Injection(fault, kind, self.now, node, worker))
            case StopRequested(reason):
                self._request_stop(reason, "stopped")
            case NodeUnavailable(reason):
                self.state.replacing = max(0, self.state.replacing - 1)
                self.record("node-unavailable", reason=reason)
            case DurableFound(durable):
                self.state.durable = durable
            case Recovered(last_s):
                self._recovered(last_s)
            case Tick():
                pass

    def _node_joined(self, hello: m.Hello) -> None:
        s = self.state
        known = s.nodes.get(hello.node)
        if hello.version != m.PROTOCOL_VERSION:
            self.record("node-refused", node=hello.node, reason=f"protocol version {hello.version}")
            self.send(hello.node, m.Shutdown("this node runs another version of Holdfast"))
            return
        if known is not None and known.session == hello.session:
            if not known.alive:
                self.send(hello.node, m.Fence("the job went on without this node"))
                return
            known.last_seen_s = self.now
            self._reconcile(known, hello)
            return
        if known is not None and known.alive:
            self._lose_node(known, "a new agent took its place")
        s.nodes.pop(hello.node, None)
        s.nodes[hello.node] = Node(
            hello.node, hello.session, hello.host, hello.slots, self.now, ports=hello.ports
        )
        s.replacing = max(0, s.replacing - 1)
        self.record("node-joined", node=hello.node, host=hello.host, slots=hello.slots)
        self._reconcile(s.nodes[hello.node], hello)

    def _reconcile(self, node: Node, hello: m.Hello) -> None:
        """Agent and coordinator compare what they know: either may have missed messages of the other."""
        views = {v.worker: v for v in hello.workers}
        for worker in [w for w in self.alive_workers() if w.node == node.name]:
            if worker.name not in views:
                self._lose_worker(worker, "its agent no longer knows it")
        for view in hello.workers:
            known = self.state.workers.get(view.worker)
            if known is None or known.phase is WorkerPhase.GONE:
                self.send(node.name, m.KillWorker(view.worker))
                continue
            worker = known
            if view.attached:
                self._attached(worker)
            if view.ready:
                self._ready(worker, view.ready)
            if view.done:
                self._done(worker, view.done)
            elif view.parked:
                self._parked(worker, view.parked)
            self._repeat(worker, view)

    def _repeat(self, worker: Worker, view: m.WorkerView) -> None:
        """Sends again what a member must have been told; it ignores what it knows."""
        s = self.state
        if s.generation is None or worker.phase is not WorkerPhase.MEMBER or s.level != 2:
            return
        number = s.generation.number
        if view.formed < number:
            self.tell(worker, s.forms[worker.name])
        if s.phase is JobPhase.BREAKING:
            self.tell(worker, m.Yield(number) if s.yielding else m.Break(number, "repeated"))
        elif s.yielding:
            self.tell(worker, m.Yield(number))

    def _node_says(self, name: str, message: m.AgentMessage) -> None:
        node = self.state.nodes.get(name)
        if node is None or not node.alive:
            return
        node.last_seen_s = self.now
        match message:
            case m.FromWorker(worker_name, said, age_s):
                worker = self.state.workers.get(worker_name)
                if worker is not None and worker.phase is not WorkerPhase.GONE:
                    self._worker_says(worker, said, age_s)
            case m.Started(worker_name, pid, log):
                if worker := self.state.workers.get(worker_name):
                    worker.log = log
                    self.record("worker-started", worker=worker_name, node=name, pid=pid, log=log)
            case m.Exited():
                self._exited(message)
            case m.Stalled(worker_name, view):
                self._stalled(worker_name, view)
            case m.Views():
                self._inspected(message)
            case _:
                pass

    def _worker_says(self, worker: Worker, message: m.WorkerMessage, age_s: float) -> None:
        match message:
            case m.Attached():
                self._attached(worker)
            case m.Ready():
                self._ready(worker, message)
            case m.Joined():
                if self.state.generation and message.generation == self.state.generation.number:
                    incidents.joined(self.state, self.now, message, self.at_full_strength())
            case m.Progress():
                self._progress(worker, message, age_s)
            case m.Parked():
                self._parked(worker, message)
            case m.Failed():
                self._failed(worker, message)
            case m.CollectiveError():
                self._collective_error(worker, message)
            case m.Saved(step, path):
                self.state.durable = Durable(step, path)
                self.record("saved", step=step, path=path, worker=worker.name)
            case m.Done():
                self._done(worker, message)
            case _:
                pass

    # ------------------------------------------------------------ workers come

    def _attached(self, worker: Worker) -> None:
        if self.state.level != 2:
            self.state.level = 2
            self.state.generation = None
            self.state.number = 0
            self.state.phase = JobPhase.GATHERING
            for other in self.workers_in(WorkerPhase.MEMBER):
                other.phase = WorkerPhase.STARTING
            self.record("level", level=2)
        if worker.phase is WorkerPhase.STARTING:
            worker.phase = WorkerPhase.ATTACHED

    def _ready(self, worker: Worker, ready: m.Ready) -> None:
        if worker.phase not in (WorkerPhase.STARTING, WorkerPhase.ATTACHED):
            return
        self._attached(worker)
        worker.phase, worker.ready = WorkerPhase.READY, ready
        self.record("worker-ready", worker=worker.name, node=worker.node)
        incidents.replaced(self.state, self.now)

    def start_worker(self, node: Node, slot: int, env: dict[str, str]) -> Worker:
        """A new process for one slot of a node."""
        s = self.state
        s.incarnations += 1
        worker = Worker(f"{node.name}.{slot}#{s.incarnations}", node.name, slot, self.now)
        s.workers[worker.name] = worker
        spec = self.spec
        self.send(
            node.name,
            m.StartWorker(worker.name, slot, spec.script, spec.args, spec.module, spec.cwd, env),
        )
        return worker

    def _staff(self) -> None:
        """Every slot of every node has a worker, so that spares are ready before they are needed."""
        s = self.state
        for node in self.alive_nodes():
            taken = {w.slot for w in self.alive_workers() if w.node == node.name}
            for slot in range(min(node.slots, self.spec.nproc)):
                if slot not in taken and not self._budget_spent():
                    rank = len(self.alive_workers()) % self.spec.target
                    self.start_worker(node, slot, gang.environment(self, node, slot, rank, self.spec.target))
        if s.phase is not JobPhase.STOPPING:
            self.ask_for_nodes()

    def ask_for_nodes(self) -> None:
        """One request to the engine for every node that is missing."""
        s = self.state
        wanted = self.spec.max_nodes + self.spec.spares
        for _ in range(wanted - len(self.alive_nodes()) - s.replacing):
            if s.number == 0 or s.replaced >= self.spec.max_restarts:
                return
            s.replacing += 1
            s.replaced += 1
            self._out.append(ProvideNode(f"{len(self.alive_nodes())} of {wanted} nodes are left"))

    def _budget_spent(self) -> bool:
        return self.state.restarts_used > self.spec.max_restarts

    # ------------------------------------------------------------ a generation runs

    def _progress(self, worker: Worker, message: m.Progress, age_s: float) -> None:
        s = self.state
        worker.median_s = message.median_s if message.median_s is not None else worker.median_s
        if message.losses and message.losses[-1][0] + 1 >= s.committed:
            worker.loss = message.losses[-1][1]
        current = s.generation
        if current is None or message.generation != current.number:
            return
        worker.committed = message.committed
        s.committed = max(s.committed, message.committed)
        if message.committed <= s.generation_committed:
            return
        s.generation_committed = message.committed
        s.stall_rounds = 0
        self._out.extend(incidents.committed(s, self.now - age_s, self.at_full_strength()))

    def _collective_error(self, worker: Worker, message: m.CollectiveError) -> None:
        s = self.state
        if s.phase is not JobPhase.RUNNING or s.generation is None:
            return
        if message.generation == s.generation.number and worker.phase is WorkerPhase.MEMBER:
            self.record("collective-error", worker=worker.name, step=message.step, detail=message.detail)
            self._break("a collective failed")

    def _break(self, reason: str) -> None:
        """Every member leaves the generation and reports what it holds."""
        s = self.state
        if s.phase is not JobPhase.RUNNING or s.generation is None or s.level != 2:
            return
        s.phase, s.yielding = JobPhase.BREAKING, False
        s.break_deadline_s = self.now + self.timing.stall_s(self.median_s())
        s.inspect_deadline_s = None
        self.record("broke", generation=s.generation.number, reason=reason, step=s.committed)
        for worker in self.members():
            if worker.phase is WorkerPhase.MEMBER:
                self.tell(worker, m.Break(s.generation.number, reason))

    def _yield(self, reason: str) -> None:
        """The generation ends at its next commit: nothing is lost."""
        s = self.state
        if s.generation is None or s.yielding:
            return
        s.yielding = True
        self.record("yield", generation=s.generation.number, reason=reason)
        for worker in self.members():
            if worker.phase is WorkerPhase.MEMBER:
                self.tell(worker, m.Yield(s.generation.number))

    def _parked(self, worker: Worker, message: m.Parked) -> None:
        s = self.state
        if s.generation is None or message.generation != s.generation.number:
            return
        if worker.phase is not WorkerPhase.MEMBER:
            return
        worker.phase = WorkerPhase.PARKED
        worker.committed, worker.prepared = message.committed, message.prepared
        s.committed = max(s.committed, message.committed or 0)
        if s.phase is not JobPhase.RUNNING:
            return
        if s.yielding:
            s.phase = JobPhase.BREAKING
            s.break_deadline_s = self.now + self.timing.stall_s(self.median_s())
        else:
            self._break(f"{worker.name} left it")

    def _done(self, worker: Worker, message: m.Done) -> None:
        if worker.phase in (WorkerPhase.DONE, WorkerPhase.GONE):
            return
        worker.phase = WorkerPhase.DONE
        worker.committed, worker.digest = message.committed, message.params_xxh3
        worker.loss = message.loss if message.loss is not None else worker.loss
        self.state.committed = max(self.state.committed, message.committed)
        self.record(
            "worker-done", worker=worker.name, step=message.committed, params_xxh3=message.params_xxh3
        )

    # ------------------------------------------------------------ faults

    def _failed(self, worker: Worker, message: m.Failed) -> None:
        """User code raised. In a step: retry in process, then a fresh worker, then it is the script's."""
        s = self.state
        current = s.generation
        rank = current.rank_of(worker.name) if current else None
        phase = Phase(message.phase).name.lower()
        cause = f"{message.error}: {message.message}" + (f" in {phase}" if message.step is not None else "")
        blame = Blame(cause, rank, worker.node, message.step, message.traceback, log=worker.log)
        s.blames[worker.name] = blame
        self.record("failed", worker=worker.name, rank=rank, node=worker.node, step=message.step, cause=cause)
        if message.step is None or current is None or worker.phase is not WorkerPhase.MEMBER:
            return
        if message.generation != current.number:
            return
        self.note_failure(message.step, message.signature, worker, message.generation)
        verdict = policy.script_fault(s.failures)
        kind = "nan" if message.error == "NonFiniteGradient" else None
        if verdict is not None:
            self._break(cause)
            self.give_up(verdict.reason, self._first_blame(message.signature) or blame)
            return
        if s.phase is JobPhase.RUNNING:
            again = self._failed_before(worker, message)
            incident = incidents.open_incident(
                s,
                self.now,
                cause,
                node=worker.node,
                workers=[worker.name],
                kind=kind,
                needs_newcomer=again,
            )
            incident.rung = None if again else "retry in process"
            self.record("incident-opened", **incidents.describe(s, incident))
            if again:
                self._end_worker(worker)
        self._break(cause)

    def _failed_before(self, worker: Worker, message: m.Failed) -> bool:
        same = [
            f
            for f in self.state.failures
            if f.worker == worker.name and (f.step, f.signature) == (message.step, message.signature)
        ]
        return len(same) >= 2

    def _first_blame(self, signature: str) -> Blame | None:
        for failure in self.state.failures:
            if failure.signature == signature and failure.worker in self.state.blames:
                return self.state.blames[failure.worker]
        return None

    def note_failure(self, step: int | None, signature: str, worker: Worker, generation: int) -> None:
        """Remembers a failure for `policy.script_fault`."""
        self.state.failures.append(Failure(step, signature, worker.name, worker.node, generation))
        if node := self.state.nodes.get(worker.node):
            node.failures += 1

    def _end_worker(self, worker: Worker) -> None:
        """Takes a worker out of the job, whatever its process does."""
        worker.told_to_end = True
        worker.phase = WorkerPhase.GONE
        self.state.restarts_used += 1
        self.send(worker.node, m.KillWorker(worker.name))

    def _exited(self, message: m.Exited) -> None:
        s = self.state
        worker = s.workers.get(message.worker)
        if worker is None:
            return
        blame = s.blames.setdefault(
            worker.name,
            Blame(policy.describe_exit(message.code), node=worker.node, step=None, log=message.log),
        )
        blame.tail, blame.log = list(message.tail), message.log
        self.record("worker-exited", worker=worker.name, node=worker.node, code=message.code, log=message.log)
        if worker.phase is WorkerPhase.GONE:
            return
        if s.level != 2:
            gang.exited(self, worker, message)
            return
        if worker.phase is WorkerPhase.DONE:
            worker.phase = WorkerPhase.GONE
            if message.code != 0 and s.outcome is None and s.phase is not JobPhase.STOPPING:
                self.give_up("the script failed after its last step", blame)
            return
        if s.phase is JobPhase.STOPPING or worker.told_to_end:
            worker.phase = WorkerPhase.GONE
            return
        self._lose_worker(worker, policy.describe_exit(message.code), message)

    def _lose_worker(self, worker: Worker, cause: str, exited: m.Exited | None = None) -> None:
        """A worker is gone without having been asked to go."""
        s = self.state
        member = worker.phase in (WorkerPhase.MEMBER, WorkerPhase.PARKED)
        early = worker.phase in (WorkerPhase.STARTING, WorkerPhase.ATTACHED)
        worker.phase = WorkerPhase.GONE
        if s.level != 2:
            gang.lost(self, worker, cause)
            return
        if exited is not None:
            blame = s.blames[worker.name]
            blame.rank = blame.rank if s.generation is None else s.generation.rank_of(worker.name)
            step = None if early else s.committed
            self.note_failure(step, policy.failure_signature(blame, exited), worker, s.number)
        if member or s.number == 0:
            incident = incidents.open_incident(s, self.now, cause, node=worker.node, workers=[worker.name])
            self.record("incident-opened", **incidents.describe(s, incident))
        s.restarts_used += 1
        if exited is not None and (verdict := policy.script_fault(s.failures)):
            self._break(cause)
            self.give_up(verdict.reason, self._first_blame(s.failures[-1].signature))
            return
        if member:
            self._break(cause)

    def _lose_node(self, node: Node, cause: str) -> None:
        s = self.state
        node.alive = False
        ours = [w for w in self.alive_workers() if w.node == node.name]
        part = [w for w in ours if w.phase in (WorkerPhase.MEMBER, WorkerPhase.PARKED)]
        self.record("node-lost", node=node.name, cause=cause)
        if part and s.phase is not JobPhase.STOPPING:
            names = [w.name for w in part]
            incident = incidents.open_incident(s, self.now, cause, node=node.name, workers=names)
            self.record("incident-opened", **incidents.describe(s, incident))
        for worker in ours:
            worker.phase = WorkerPhase.GONE
        self._out.append(ReleaseNode(node.name, cause))
        if s.level != 2:
            gang.node_lost(self, part, cause)
        elif part:
            self._break(cause)

    def _injected(self, injection: Injection) -> None:
        s = self.state
        rank = s.generation.rank_of(injection.worker) if s.generation and injection.worker else None
        self.record(
            "fault-injected",
            fault=injection.fault,
            fault_kind=injection.kind,
            node=injection.node,
            worker=injection.worker,
            rank=rank,
            step=s.committed,
        )
        if not any(incidents.explains(s, i, injection) for i in s.incidents):
            s.injections.append(injection)

    def _recovered(self, last_s: float) -> None:
        """This process replaced a coordinator that died. Agents that do not come back are lost."""
        s = self.state
        for node in s.nodes.values():
            node.last_seen_s = self.now + self.timing.adopt_s - self.timing.detection_s
        s.replacing = 0
        s.inspect_deadline_s = None
        incident = incidents.open_incident(
            s,
            self.now,
            "the coordinator was lost",
            node=None,
            workers=[],
            kind="kill-coordinator",
            fault_at_s=last_s,
            needs_newcomer=False,
        )
        incident.rung = "coordinator"
        incident.fault = incident.fault or "kill-coordinator"
        incident.decided_at_s = self.now
        self.record("incident-opened", **incidents.describe(s, incident))

    # ------------------------------------------------------------ hangs

    def _stalled(self, name: str, view: m.WorkerView) -> None:
        s = self.state
        worker = s.workers.get(name)
        if worker is None or worker.phase is WorkerPhase.GONE or s.inspect_deadline_s is not None:
            return
        if view.process in "TtXZ" and worker.phase is not WorkerPhase.MEMBER:
            self._condemn([worker], "its process is stopped")
            return
        if s.phase is not JobPhase.RUNNING or worker.phase is not WorkerPhase.MEMBER:
            return
        s.inspect_request += 1
        s.inspect_deadline_s = self.now + self.timing.heartbeat_s
        self._views, self._stacks = [], {}
        self._unheard = {w.node for w in self.members() if w.phase is WorkerPhase.MEMBER}
        self.record("stalled", worker=name, node=worker.node, step=s.committed)
        for node in sorted(self._unheard):
            self.send(node, m.Inspect(s.inspect_request))

    def _inspected(self, message: m.Views) -> None:
        s = self.state
        if s.inspect_deadline_s is None or message.request != s.inspect_request:
            return
        members = {w.name for w in self.members() if w.phase is WorkerPhase.MEMBER}
        for view in message.workers:
            if view.worker in members:
                self._views.append(view)
                self._unheard.discard(s.workers[view.worker].node)
        self._stacks.update(message.stacks)
        if not self._unheard:
            self._judge_stall()

    def _judge_stall(self) -> None:
        s = self.state
        s.inspect_deadline_s = None
        verdict = policy.find_culprits(self._views, self.timing.stall_floor_s * 0.9, self._stacks)
        self.record("stall-judged", workers=list(verdict.workers), reason=verdict.reason)
        culprits = [s.workers[w] for w in verdict.workers if s.workers[w].phase is WorkerPhase.MEMBER]
        if s.level != 2:
            gang.stalled(self, culprits, verdict.reason)
        elif culprits:
            self._condemn(culprits, f"hang: {verdict.reason}")
        else:
            self._nobody_differs()

    def _nobody_differs(self) -> None:
        """Twice: try the step again. After that every worker is replaced, for one of them is at fault."""
        s = self.state
        waiting = any(v.place.phase in (Phase.REDUCE, Phase.VOTE, Phase.JOIN) for v in self._views)
        s.stall_rounds += 1
        if not waiting and s.stall_rounds < 10:
            return
        if s.stall_rounds <= 2:
            incident = incidents.open_incident(
                s, self.now, "hang: nobody differs", node=None, workers=[], needs_newcomer=False
            )
            incident.rung = "retry in process"
            self.record("incident-opened", **incidents.describe(s, incident))
            self._break("hang: nobody differs")
        else:
            self._condemn([w for w in self.members() if w.phase is WorkerPhase.MEMBER], "hang of all ranks")

    def _condemn(self, workers: Iterable[Worker], cause: str) -> None:
        """Takes workers out that will not leave by themselves."""
        s = self.state
        chosen = list(workers)
        by_node: dict[str, list[Worker]] = {}
        for worker in chosen:
            by_node.setdefault(worker.node, []).append(worker)
        for node, ours in by_node.items():
            if any(w.phase in (WorkerPhase.MEMBER, WorkerPhase.PARKED) for w in ours):
                names = [w.name for w in ours]
                incident = incidents.open_incident(s, self.now, cause, node=node, workers=names)
                self.record("incident-opened", **incidents.describe(s, incident))
            else:
                self.record("worker-ended", workers=[w.name for w in ours], cause=cause)
            for worker in ours:
                rank = s.generation.rank_of(worker.name) if s.generation else None
                s.blames[worker.name] = Blame(cause, rank, node, s.committed, log=worker.log)
                self._end_worker(worker)
        self._break(cause)

    # ------------------------------------------------------------ deadlines

    def _check_deadlines(self) -> None:
        s, now = self.state, self.now
        for node in self.alive_nodes():
            if now >= node.last_seen_s + self.timing.detection_s:
                self._lose_node(node, f"silent for {self.timing.detection_s:g} s")
        if s.inspect_deadline_s is not None and now >= s.inspect_deadline_s:
            self._judge_stall()
        if s.level == 2:
            late = [
                w
                for w in self.workers_in(WorkerPhase.STARTING, WorkerPhase.ATTACHED)
                if now >= w.started_s + self.timing.start_s
            ]
            if late:
                self._condemn(late, f"not ready within {self.timing.start_s:g} s")
        if s.break_deadline_s is not None and now >= s.break_deadline_s:
            s.break_deadline_s = None
            stuck = [w for w in self.members() if w.phase is WorkerPhase.MEMBER]
            if stuck and s.phase is JobPhase.BREAKING:
                self._condemn(stuck, "did not leave the broken generation")
            elif stuck and s.phase is JobPhase.STOPPING:
                gang.end_all(self, grace_s=0.0)
        if s.wait_deadline_s is not None and now >= s.wait_deadline_s and s.phase is JobPhase.GATHERING:
            s.wait_deadline_s = None
            self.give_up(f"too few workers for {self.timing.wait_s:g} s", None)
        if s.stop_deadline_s is not None and now >= s.stop_deadline_s:
            s.stop_deadline_s = None
            gang.end_all(self, grace_s=0.0)
            self._end()

    # ------------------------------------------------------------ what next

    def _advance(self) -> None:
        s = self.state
        if s.phase is JobPhase.ENDED:
            return
        if s.level != 2:
            gang.advance(self)
            return
        if s.phase is JobPhase.STOPPING:
            if not self.alive_workers():
                self._end()
            return
        if self._finishing():
            return
        if s.stop_reason is None:
            self._staff()
        if s.phase is JobPhase.RUNNING:
            if s.stop_reason is not None:
                self._yield("stop")
            elif self._can_grow():
                self._yield("a newcomer is ready")
        if s.phase is JobPhase.BREAKING:
            if any(w.phase is WorkerPhase.MEMBER for w in self.members()):
                return
            s.phase, s.break_deadline_s, s.yielding = JobPhase.GATHERING, None, False
        if s.phase is JobPhase.GATHERING:
            if s.stop_reason is not None:
                self._stop_parked()
            else:
                self._try_form()

    def _finishing(self) -> bool:
        """Someone has all steps: the others come to the same point by themselves or by their vote."""
        s = self.state
        done = [w for w in s.workers.values() if w.digest is not None]
        if not done:
            return False
        if any(w.phase is WorkerPhase.MEMBER for w in self.members()):
            return True
        last = max(w.committed or 0 for w in done)
        for worker in self.workers_in(WorkerPhase.PARKED):
            if worker.prepared and worker.committed == last - 1:
                worker.phase = WorkerPhase.MEMBER
                self.tell(worker, m.Stop(apply=True))
            else:
                self._end_worker(worker)
        if any(w.phase is WorkerPhase.MEMBER for w in self.members()):
            return True
        for worker in self.workers_in(WorkerPhase.STARTING, WorkerPhase.ATTACHED, WorkerPhase.READY):
            self._end_worker(worker)
        if not self.workers_in(WorkerPhase.DONE):
            s.outcome = s.outcome or "finished"
            self._end()
        return True

    def _can_grow(self) -> bool:
        s = self.state
        if s.generation is None or s.generation_committed <= s.generation.start:
            return False
        return len(s.generation.members) < self.spec.target and bool(self.workers_in(WorkerPhase.READY))

    def _try_form(self) -> None:
        s, spec = self.state, self.spec
        survivors = self.workers_in(WorkerPhase.PARKED)
        fresh = sorted(self.workers_in(WorkerPhase.READY), key=lambda w: (s.nodes[w.node].failures, w.node))
        pending = self.workers_in(WorkerPhase.STARTING, WorkerPhase.ATTACHED)
        count = min(len(survivors) + len(fresh), spec.target)
        enough = count >= max(1, spec.minimum)
        if enough and count < spec.target and s.number == 0 and (pending or s.replacing or self._expected()):
            if s.form_deadline_s is None:
                s.form_deadline_s = self.now + self.timing.form_s
            enough = self.now >= s.form_deadline_s
        if enough:
            self._form(survivors, fresh[: spec.target - len(survivors)])
            return
        if s.wait_deadline_s is None:
            s.wait_deadline_s = self.now + self.timing.wait_s
            if s.number:
                self.record("waiting", workers=count, target=spec.target)
        if not pending and not s.replacing and s.number > 0 and self._hopeless():
            self.give_up("the restart budget is spent", None)

    def _expected(self) -> bool:
        return len(self.alive_nodes()) < self.spec.max_nodes

    def _hopeless(self) -> bool:
        return self._budget_spent() or self.state.replaced >= self.spec.max_restarts

    def _form(self, survivors: list[Worker], fresh: list[Worker]) -> None:
        """The next generation: who is in, where it starts, who brings the state to whom."""
        s = self.state
        reports = {w.name: policy.Report(w.committed, w.prepared) for w in survivors}
        reports |= {w.name: policy.Report(None) for w in fresh}
        outcome = policy.settle(reports)
        ranks = policy.assign_ranks(
            s.generation if survivors else None,
            [w.name for w in survivors],
            [w.name for w in fresh],
        )
        durable = None
        if outcome.start is None:
            durable = s.durable
            start = durable.step if durable else 0
            holders = frozenset(ranks) if durable else frozenset(ranks[:1])
            reference = self._digest(ranks[0])
            restore = frozenset(w for w in ranks if durable or self._digest(w) != reference)
            self._count_lost(start)
        else:
            start, holders, restore = outcome.start, outcome.holders, outcome.restore
        s.number += 1
        s.generation = m.Generation(
            s.number, tuple(self._member(r, s.workers[w]) for r, w in enumerate(ranks)), start
        )
        donors = tuple(r for r, w in enumerate(ranks) if w in holders)[:MAX_DONORS] if not durable else ()
        s.forms = {}
        for rank, name in enumerate(ranks):
            form = m.Form(
                s.generation,
                rank,
                apply=name in outcome.apply,
                restore=name in restore,
                serve=bool(restore) and rank in donors,
                donors=donors if name in restore else (),
                path=durable.path if durable else None,
            )
            self._enroll(s.workers[name], form, start)
        s.phase, s.generation_committed, s.committed = JobPhase.RUNNING, start, max(start, s.committed)
        s.form_deadline_s = s.wait_deadline_s = s.break_deadline_s = None
        s.history.append((round(self.now - s.began_s, 4), len(ranks)))
        incidents.decided(s, self.now, self._rung(fresh, len(ranks)))
        self.record(
            "formed",
            generation=s.number,
            start=start,
            world=len(ranks),
            workers=ranks,
            restore=sorted(restore),
            applied=bool(outcome.apply),
            source="disk" if durable else "live" if outcome.start is not None else "fresh",
        )

    def _enroll(self, worker: Worker, form: m.Form, start: int) -> None:
        worker.phase = WorkerPhase.MEMBER
        worker.prepared = False
        worker.committed = start
        self.state.forms[worker.name] = form
        self.tell(worker, form)

    def _rung(self, fresh: list[Worker], world: int) -> str:
        if fresh:
            latest = self.state.incidents[-1].node if self.state.incidents else None
            return "restart" if all(w.node == latest for w in fresh) else "spare"
        return "go on smaller" if world < self.spec.target else "retry in process"

    def _digest(self, name: str) -> str | None:
        ready = self.state.workers[name].ready
        return ready.digest if ready else None

    def _member(self, rank: int, worker: Worker) -> m.Member:
        ready = worker.ready
        return m.Member(
            rank,
            worker.name,
            worker.node,
            worker.slot,
            ready.host if ready else "",
            ready.vote_port if ready else 0,
            ready.data_port if ready else 0,
        )

    def _count_lost(self, start: int) -> None:
        s = self.state
        lost = max(0, s.committed - start)
        s.lost_steps += lost
        s.committed = min(s.committed, start)
        for incident in s.incidents:
            if incident.open and incident.first_commit_at_s is None:
                incident.lost_steps = max(incident.lost_steps or 0, lost)

    # ------------------------------------------------------------ the end

    def give_up(self, reason: str, blame: Blame | None) -> None:
        """The job cannot go on. Survivors keep what they hold, on disk."""
        self.state.blame = self.state.blame or blame
        self._request_stop(reason, "failed")

    def _request_stop(self, reason: str, outcome: str) -> None:
        s = self.state
        if s.stop_reason is not None:
            return
        s.stop_reason, s.outcome = reason, outcome
        s.stop_deadline_s = self.now + max(self.timing.stop_s, 3 * (self.median_s() or 0.0))
        self.record("stop-requested", reason=reason, outcome=outcome)

    def _stop_parked(self) -> None:
        """Everyone has left its generation: one that holds the newest state saves it, then all leave."""
        s = self.state
        parked = self.workers_in(WorkerPhase.PARKED)
        outcome = policy.settle({w.name: policy.Report(w.committed, w.prepared) for w in parked})
        s.phase = JobPhase.STOPPING
        saver = next((w.name for w in parked if w.name in outcome.holders), None)
        for worker in self.alive_workers():
            if worker.name in outcome.holders:
                path = "checkpoint" if worker.name == saver and outcome.start else None
                self.tell(worker, m.Stop(apply=worker.name in outcome.apply, save_to=path))
            elif worker.phase is not WorkerPhase.DONE:
                self._end_worker(worker)
        if outcome.start is not None:
            s.committed = max(s.committed, outcome.start)
        if not self.alive_workers():
            self._end()

    def _end(self) -> None:
        s = self.state
        s.phase = JobPhase.ENDED
        s.outcome = s.outcome or "finished"
        self.record("ended", outcome=s.outcome, reason=s.stop_reason, step=s.committed)
        for node in self.alive_nodes():
            self.send(node.name, m.Shutdown(s.outcome))
        self._out.append(End(s.outcome))

    def end(self) -> None:
        """Ends the job (for `gang`)."""
        self._end()
