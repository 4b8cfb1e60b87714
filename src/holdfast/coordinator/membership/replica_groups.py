"""The process groups inside complete replicas, which outlive a generation as long as nobody of theirs is lost.

When a generation breaks, the workers of a healthy replica are in the middle of a step, and not all at the same call. Each
says how many collectives of its replica it has begun; all go on to the furthest of these calls and leave the step there.
So nothing is half sent between them, and the next generation uses the same connections.
"""

from __future__ import annotations

from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.membership_state import Worker
from holdfast.coordinator.kernel.phases import WorkerPhase
from holdfast.protocol import messages as m


def members(context: Context, replica: int) -> list[Worker]:
    """The workers of a complete replica of the newest generation."""
    g = context.state.membership.generation
    return (
        [context.state.membership.workers[x.worker] for x in g.members if x.replica == replica] if g else []
    )


def broke(context: Context, reason: str) -> None:
    """The generation breaks: replicas of which nobody is missing halt together, the others at once."""
    membership = context.state.membership
    assert membership.generation is not None
    membership.halting = {}
    if membership.shard_count > 1:
        left = {
            x.replica
            for x in membership.generation.members
            if membership.workers[x.worker].phase is not WorkerPhase.MEMBER
        }
        membership.halting = {
            replica: {} for replica in range(membership.generation.replicas) if replica not in left
        }
    for member in membership.generation.members:
        worker = membership.workers[member.worker]
        if worker.phase is WorkerPhase.MEMBER:
            context.tell(
                worker, m.Break(membership.generation.number, reason, member.replica in membership.halting)
            )


def halted(context: Context, worker: Worker, message: m.Halted) -> None:
    """A worker says how far it is; when its whole replica has, all are told where to leave the step."""
    membership = context.state.membership
    if membership.generation is None or message.generation != membership.generation.number:
        return
    replica = next((x.replica for x in membership.generation.members if x.worker == worker.name), -1)
    begun = membership.halting.get(replica)
    if begun is None:
        return
    begun[worker.name] = message.begun
    replica_members = members(context, replica)
    if len(begun) == len(replica_members):
        furthest = max(begun.values())
        for other in replica_members:
            context.tell(other, m.RunTo(membership.generation.number, furthest))


def give_up(context: Context) -> None:
    """A replica that halts cannot do so any more when one of its workers is gone, or has left the step in another way:
    the others leave it at once."""
    membership = context.state.membership
    for replica in list(membership.halting):
        replica_members = members(context, replica)
        gone = [w for w in replica_members if w.phase not in (WorkerPhase.MEMBER, WorkerPhase.PARKED)]
        begun = membership.halting[replica]
        furthest = max(begun.values(), default=0) if len(begun) == len(replica_members) else None
        parked = [w for w in replica_members if w.phase is WorkerPhase.PARKED]
        left = [w for w in parked if w.begun < 0 or w.name not in begun or furthest not in (None, w.begun)]
        if (gone or left) and membership.generation is not None:
            del membership.halting[replica]
            for worker in replica_members:
                if worker.phase is WorkerPhase.MEMBER:
                    context.tell(worker, m.Break(membership.generation.number, "its replica lost a worker"))


def connected_in(
    context: Context, seated: tuple[tuple[str, ...], ...], before: m.Generation | None
) -> tuple[int, ...]:
    """For every complete replica of the next generation the one in which its groups were connected: an earlier one, where
    the same workers come from it with their groups intact, else the next one."""
    membership = context.state.membership
    known: dict[tuple[str, ...], int] = {}
    for replica, number in enumerate(before.groups_connected_in if before else ()):
        replica_members = members(context, replica)
        if len({w.begun for w in replica_members}) == 1 and replica_members[0].begun >= 0:
            known[tuple(w.name for w in replica_members)] = number
    return tuple(known.get(replica_members, membership.number + 1) for replica_members in seated)
