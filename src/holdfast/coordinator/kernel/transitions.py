"""The only file that assigns a phase: of the job, of a worker, of a node.

Everything else that the core decides goes by phases, so a phase that comes about in a way that nobody thought of would be
believed everywhere. It is refused here instead, at the event that brings it.
"""

from __future__ import annotations

from enum import Enum

from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.membership_state import Node, Worker
from holdfast.coordinator.kernel.phases import JobPhase, WorkerPhase
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


class IllegalTransition(HoldfastError):
    """A phase that cannot follow: a mistake in the core, not in the job."""


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
    worker.phase = to


def lose_node(node: Node) -> None:
    """A node is gone for good, or stays so: if its agent comes back, then as a new node."""
    node.alive = False


def _illegal(context: Context, who: str, was: Enum, to: Enum) -> IllegalTransition:
    return IllegalTransition(
        f"{who} cannot go from {was.value} to {to.value}, while {context.event!r} was handled"
    )
