"""The only file that assigns a phase: of the job, of a worker, of a node.

All other decisions depend on phases. So a transition that nobody thought of is refused here, at the event that causes it,
instead of being believed everywhere.
"""

from __future__ import annotations

from enum import Enum

from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.state import JobPhase, Node, NodePhase, Worker, WorkerPhase
from holdfast.errors import HoldfastError

# The tables name every transition that the random schedules reach and that somebody has argued for. A phase
# that is missing here is not "probably fine": the handlers below go by phases alone, and one that arises
# unforeseen would be believed by all of them.
_G, _R, _B, _S, _E = JobPhase
JOB: dict[JobPhase, frozenset[JobPhase]] = {
    _G: frozenset({_R, _S, _E}),
    _R: frozenset({_B, _S, _E, _G}),
    # Broken again while its members were leaving it at a commit; at level 0 stopped while all are ending.
    _B: frozenset({_B, _G, _S, _E}),
    # A script that calls `holdfast.start` only now brings the job to level 2, where stopping begins with gathering.
    _S: frozenset({_E, _G}),
    _E: frozenset(),
}
"""From the phase of a job to those that may follow. RUNNING to GATHERING: the script called `holdfast.start`, and what was
started together goes on one by one."""

# GONE is final. A worker's name holds its incarnation number and is never used twice, so late news of an old
# process can always be told from news of its successor in the same slot.
_STARTING, _ATTACHED, _READY, _MEMBER, _PARKED, _DONE, _GONE = WorkerPhase
WORKER: dict[WorkerPhase, frozenset[WorkerPhase]] = {
    # A member at once: at level 0 all start as members.
    _STARTING: frozenset({_STARTING, _ATTACHED, _MEMBER, _DONE, _GONE}),
    _ATTACHED: frozenset({_READY, _DONE, _GONE}),
    # Attached again: it is rebuilt for another shard.
    _READY: frozenset({_MEMBER, _ATTACHED, _DONE, _GONE}),
    # Starting again: the job comes to level 2, where nobody is a member before it is ready.
    _MEMBER: frozenset({_PARKED, _STARTING, _DONE, _GONE}),
    _PARKED: frozenset({_MEMBER, _DONE, _GONE}),
    _DONE: frozenset({_GONE}),
    _GONE: frozenset({_GONE}),
}
"""From the phase of a worker to those that may follow. A process that is gone never comes back: its name is used once."""


_IN, _HELD, _LEAVING, _LOST = NodePhase
NODE: dict[NodePhase, frozenset[NodePhase]] = {
    _IN: frozenset(NodePhase),
    _HELD: frozenset(NodePhase),
    # Held again: its device is reset when its workers have left. In service: the job is to be larger again.
    _LEAVING: frozenset(NodePhase),
    _LOST: frozenset(),
}
"""From the phase of a node to those that may follow. A node that is lost never comes back: another of its name does."""


class IllegalTransition(HoldfastError):
    """A phase that must not follow the current one. It is a mistake in the core, not in the job."""


def enter_job(context: Context, to: JobPhase) -> None:
    """The job enters a phase.

    Raises:
        IllegalTransition: it cannot from the one that it is in.
    """
    was = context.state.membership.phase
    # Checked before the assignment: the state stays as it was, and what raised can be reproduced from the
    # state and the event.
    if to not in JOB[was]:
        raise _illegal(context, "the job", was, to)
    context.state.membership.phase = to


def enter(context: Context, worker: Worker, to: WorkerPhase) -> None:
    """A worker enters a phase.

    Raises:
        IllegalTransition: it cannot from the one that it is in.
    """
    # It raises rather than logs. The service then ends without having written this batch, its successor loads
    # the last state that was valid, and agents repeat what they reported: one bad event costs a second, not a
    # corrupted state.
    if to not in WORKER[worker.phase]:
        raise _illegal(context, f"worker {worker.name}", worker.phase, to)
    was, worker.phase = worker.phase, to
    context.index.move_worker(worker, was)


# ---------------------------------------------------------------- workers and nodes come and go


def add_worker(context: Context, worker: Worker) -> None:
    """A worker is started."""
    context.state.membership.workers[worker.name] = worker
    context.index.add_worker(worker)


def forget_worker(context: Context, name: str) -> None:
    """A worker that is gone is no longer kept."""
    context.index.drop_worker(context.state.membership.workers.pop(name))


def add_node(context: Context, node: Node) -> None:
    """A node joins; one of its name that was lost is no longer kept."""
    nodes = context.state.membership.nodes
    # Taken out first: a node that joins again is the newest, and its place in the order of nodes says so.
    if (before := nodes.pop(node.name, None)) is not None:
        context.index.drop_node(before)
    nodes[node.name] = node
    context.index.add_node(node)


def forget_node(context: Context, name: str) -> None:
    """A node that is lost is no longer kept."""
    context.index.drop_node(context.state.membership.nodes.pop(name))


def hold(context: Context, node: Node, reason: str) -> None:
    """Gives a node no workers for now."""
    node.held = reason
    _enter_by_reasons(context, node)


def use(context: Context, node: Node) -> None:
    """Lets a held node have workers again."""
    node.held = None
    _enter_by_reasons(context, node)


def leave(context: Context, node: Node, reason: str) -> None:
    """Marks a node that is to leave. For a node that is lost, the reason why it may not come back."""
    node.leaving = reason
    _enter_by_reasons(context, node)


def stay(context: Context, node: Node) -> None:
    """Takes back that a node is to leave."""
    node.leaving = None
    _enter_by_reasons(context, node)


def lose_node(context: Context, node: Node, as_planned: bool = False) -> None:
    """A node is gone for good: if its agent comes back, then as a new node. as_planned: nothing of the job was on it any more.

    Raises:
        IllegalTransition: it was lost before.
    """
    _enter_node(context, node, NodePhase.LOST)
    node.left = as_planned


def set_lemon(context: Context, node: Node, reason: str) -> None:
    """What a machine's history says against it; empty: nothing."""
    node.lemon = reason
    context.index.renew(node)


def _enter_by_reasons(context: Context, node: Node) -> None:
    # Why it is held and why it leaves are kept apart, since a node may leave while it is checked. The phase says
    # which of both counts: what leaves needs no workers. What is lost stays so, whatever is said of it late.
    if node.leaving is not None:
        to = NodePhase.LEAVING
    else:
        to = NodePhase.IN_SERVICE if node.held is None else NodePhase.HELD
    if node.alive:
        _enter_node(context, node, to)


def _enter_node(context: Context, node: Node, to: NodePhase) -> None:
    was = node.phase
    if to not in NODE[was]:
        raise _illegal(context, f"node {node.name}", was, to)
    node.phase = to
    context.index.move_node(node, was)


def _illegal(context: Context, who: str, was: Enum, to: Enum) -> IllegalTransition:
    return IllegalTransition(
        f"{who} cannot go from {was.value} to {to.value}, while {context.event!r} was handled"
    )
