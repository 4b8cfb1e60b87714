"""The process groups inside complete replicas, which outlive a generation as long as nobody of theirs is lost.

When a generation breaks, the workers of a healthy replica are in the middle of a step, and not all at the same call. Each
says how many calls of each group it has begun, and all go on to the largest number of each group. On its way a worker may have
to begin a call of another group, which others then go on to as well. When all stand, all leave the step there. So nothing is
half sent between them, and the next generation uses the same connections.
"""

from __future__ import annotations

from holdfast.coordinator.kernel.context import Context
from holdfast.coordinator.kernel.membership_state import Halting, Worker
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
            replica: Halting() for replica in range(membership.generation.replicas) if replica not in left
        }
    for member in membership.generation.members:
        worker = membership.workers[member.worker]
        if worker.phase is WorkerPhase.MEMBER:
            context.tell(
                worker, m.Break(membership.generation.number, reason, member.replica in membership.halting)
            )


def halted(context: Context, worker: Worker, message: m.Halted) -> None:
    """A worker says how far it is. When all of its replica have, they hear where to stand, and at last that all do."""
    membership = context.state.membership
    if membership.generation is None or message.generation != membership.generation.number:
        return
    replica = next((x.replica for x in membership.generation.members if x.worker == worker.name), -1)
    halting = membership.halting.get(replica)
    if halting is None:
        return
    replica_members = members(context, replica)
    order = answered(halting, worker.name, message, len(replica_members))
    if order is not None:
        for other in replica_members:
            context.tell(other, order)


def answered(halting: Halting, worker: str, message: m.Halted, workers: int) -> m.RunTo | None:
    """Notes the word of one of so many workers; returns what all of them are told then, if anything."""
    # After the word to leave nobody begins a call, so what comes then is told again.
    if halting.left:
        return None
    before = dict(halting.begun)
    if not halting.stands:
        halting.first = message.begun
    if worker not in halting.stands:
        halting.alike &= message.begun == halting.first
    halting.stands[worker] = message.stands
    for group, count in message.begun.items():
        halting.begun[group] = max(count, halting.begun.get(group, 0))
    if len(halting.stands) < workers:
        return None
    if not halting.agreement or halting.begun != before:
        halting.agreement += 1
        # Equal counts of every group are a place where nothing is half sent, and nobody has to move to it.
        halting.left = halting.agreement == 1 and halting.alike
    elif all(stands == halting.agreement for stands in halting.stands.values()):
        halting.left = True
    else:
        return None
    return m.RunTo(message.generation, dict(halting.begun), halting.agreement, halting.left)


def give_up(context: Context) -> None:
    """A replica that halts cannot do so any more when one of its workers is gone, or has left the step in another way:
    the others leave it at once."""
    membership = context.state.membership
    for replica in list(membership.halting):
        replica_members = members(context, replica)
        halting = membership.halting[replica]
        gone = [w for w in replica_members if w.phase not in (WorkerPhase.MEMBER, WorkerPhase.PARKED)]
        parked = [w for w in replica_members if w.phase is WorkerPhase.PARKED]
        left = [w for w in parked if not halting.left or w.agreement != halting.agreement]
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
        if len({w.agreement for w in replica_members}) == 1 and replica_members[0].agreement >= 0:
            known[tuple(w.name for w in replica_members)] = number
    return tuple(known.get(replica_members, membership.number + 1) for replica_members in seated)
