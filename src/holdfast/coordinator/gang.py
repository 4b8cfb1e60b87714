"""Level 0: an unmodified torchrun script. All its workers start together and, after a fault, start again
together, from warm processes; nothing of them survives but what the script saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.coordinator import incidents, policy
from holdfast.coordinator.state import Blame, JobPhase, Node, Worker, WorkerPhase
from holdfast.protocol import messages as m

if TYPE_CHECKING:
    from holdfast.coordinator.core import Core

TERM_GRACE_S = 1.0


def environment(core: Core, node: Node, slot: int, rank: int, world: int) -> dict[str, str]:
    """torchrun's variables for one worker. At level 2 they are only a first guess: `run.rank` is the rank."""
    spec = core.spec
    nodes = core.alive_nodes()
    master = nodes[0]
    ports = master.ports or (29500,)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(slot),
        "GROUP_RANK": str(nodes.index(node)),
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(spec.nproc),
        "GROUP_WORLD_SIZE": str(max(1, world // spec.nproc)),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(ports[core.state.master_uses % len(ports)]),
        "TORCHELASTIC_RESTART_COUNT": str(core.state.restarts_used),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.name,
        "HOLDFAST_JOB": spec.name,
        "HOLDFAST_NODE": node.name,
        "HOLDFAST_TARGET": str(spec.target),
        "HOLDFAST_GENERATION": str(core.state.number),
    }


def advance(core: Core) -> None:
    """Starts all workers when there are nodes enough, and ends the job when all are done."""
    s = core.state
    if s.phase is JobPhase.STOPPING:
        if not core.alive_workers():
            core.end()
    elif s.stop_reason is not None:
        s.phase = JobPhase.STOPPING
        end_all(core, grace_s=core.timing.stop_s / 2)
        if not core.alive_workers():
            core.end()
    elif s.phase is JobPhase.BREAKING:
        if not core.alive_workers():
            s.phase = JobPhase.GATHERING
            _launch(core)
    elif s.phase is JobPhase.GATHERING:
        _launch(core)
    elif s.phase is JobPhase.RUNNING and not core.workers_in(WorkerPhase.STARTING, WorkerPhase.MEMBER):
        s.outcome = "finished"
        core.end()


def _launch(core: Core) -> None:
    s, spec = core.state, core.spec
    core.ask_for_nodes()
    nodes = sorted(core.alive_nodes(), key=lambda n: n.failures)
    usable = [n for n in nodes if n.slots >= spec.nproc]
    count = min(len(usable), spec.max_nodes)
    minimum = spec.max_nodes if spec.wait_for_spare else spec.min_nodes
    if s.restarts_used > spec.max_restarts:
        core.give_up("the restart budget is spent", s.blame)
        advance(core)
        return
    if count < minimum:
        if s.wait_deadline_s is None:
            s.wait_deadline_s = core.now + core.timing.wait_s
            core.record("waiting", workers=count * spec.nproc, target=spec.target)
        return
    if count < spec.max_nodes and (s.number == 0 or s.replacing):
        if s.form_deadline_s is None:
            s.form_deadline_s = core.now + core.timing.form_s
        if core.now < s.form_deadline_s:
            return
    s.form_deadline_s = s.wait_deadline_s = None
    _start_all(core, sorted(usable[:count], key=lambda n: list(s.nodes).index(n.name)))


def _start_all(core: Core, nodes: list[Node]) -> None:
    s, spec = core.state, core.spec
    world = len(nodes) * spec.nproc
    s.number += 1
    s.master_uses += 1
    members = []
    for index, node in enumerate(nodes):
        for slot in range(spec.nproc):
            rank = index * spec.nproc + slot
            env = environment(core, node, slot, rank, world)
            env |= {"MASTER_ADDR": nodes[0].host, "GROUP_RANK": str(index)}
            ports = nodes[0].ports or (29500,)
            env["MASTER_PORT"] = str(ports[s.master_uses % len(ports)])
            worker = core.start_worker(node, slot, env)
            worker.phase = WorkerPhase.MEMBER
            members.append(m.Member(rank, worker.name, node.name, slot, node.host))
    s.generation = m.Generation(s.number, tuple(members))
    s.generation_committed = 0
    s.committed = 0
    s.phase = JobPhase.RUNNING
    s.history.append((round(core.now - s.began_s, 4), world))
    incidents.decided(s, core.now, "restart of all workers")
    core.record("started", generation=s.number, world=world, workers=[x.worker for x in members])


def exited(core: Core, worker: Worker, message: m.Exited) -> None:
    """A worker's process ended: with code 0 it is done; anything else ends all, and all start again."""
    s = core.state
    expected = s.phase is not JobPhase.RUNNING or worker.told_to_end
    worker.phase = WorkerPhase.GONE
    if expected or message.code == 0:
        return
    blame = s.blames[worker.name]
    blame.rank = s.generation.rank_of(worker.name) if s.generation else None
    step = s.committed or None
    core.note_failure(step, policy.failure_signature(blame, message), worker, s.number)
    cause = blame.cause if blame.traceback else policy.describe_exit(message.code)
    _fault(core, [worker], worker.node, cause)
    verdict = policy.script_fault(s.failures)
    if verdict is None and _same_everywhere(core):
        verdict = policy.ScriptFault("the same error again after a restart")
    s.blame = blame
    if verdict is not None:
        core.give_up(verdict.reason, _first_blame(core))
    elif core.spec.max_restarts == 0:
        core.give_up("no restarts are allowed", blame)


def _same_everywhere(core: Core) -> bool:
    """The same exception in two generations: at level 0 the step it struck at is not known."""
    failures = core.state.failures
    last = failures[-1]
    if last.signature.startswith(("signal", "exit code")) or last.step is not None:
        return False
    return len({f.generation for f in failures if f.signature == last.signature}) >= 2


def _first_blame(core: Core) -> Blame | None:
    signature = core.state.failures[-1].signature
    for failure in core.state.failures:
        if failure.signature == signature:
            return core.state.blames.get(failure.worker)
    return None


def lost(core: Core, worker: Worker, cause: str) -> None:
    """A worker vanished without an exit code."""
    if core.state.phase is JobPhase.RUNNING:
        _fault(core, [worker], worker.node, cause)


def node_lost(core: Core, workers: list[Worker], cause: str) -> None:
    """A node with members is gone (its incident is open)."""
    s = core.state
    if workers and s.phase is JobPhase.RUNNING:
        s.blame = Blame(cause, None, workers[0].node, s.committed)
        _restart_all(core, cause)


def stalled(core: Core, workers: list[Worker], reason: str) -> None:
    """The job stands still; who is at fault is named, and all start again."""
    if core.state.phase is JobPhase.RUNNING:
        node = workers[0].node if workers else None
        _fault(core, workers, node, f"hang: {reason}")


def _fault(core: Core, workers: list[Worker], node: str | None, cause: str) -> None:
    s = core.state
    incident = incidents.open_incident(s, core.now, cause, node=node, workers=[w.name for w in workers])
    core.record("incident-opened", **incidents.describe(s, incident))
    _restart_all(core, cause)


def _restart_all(core: Core, cause: str) -> None:
    s = core.state
    s.restarts_used += 1
    s.phase = JobPhase.BREAKING
    s.break_deadline_s = None
    core.record("restart", generation=s.number, reason=cause)
    end_all(core, grace_s=TERM_GRACE_S)


def end_all(core: Core, grace_s: float) -> None:
    """Asks every worker's process to end."""
    for worker in core.alive_workers():
        worker.told_to_end = True
        core.send(worker.node, m.KillWorker(worker.name, grace_s))
