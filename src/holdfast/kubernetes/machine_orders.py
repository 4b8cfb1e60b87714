"""What becomes of a coordinator's word about a machine: a mark, an answer, or a mark that is taken back. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.kubernetes import marks
from holdfast.kubernetes.actions import Action, MarkMachine, Tell, UnmarkMachine, Warn
from holdfast.kubernetes.marks import Mark
from holdfast.kubernetes.observed import Observed, PodSeen
from holdfast.kubernetes.resource import HoldfastJob
from holdfast.protocol.engine_orders import MarkNode, OrderDone

NOT_ASKED = "the operator marks no machines (--mark is none): the job itself avoids it"
NO_MACHINE = "its pod is gone, and with it the name of its machine: the job itself avoids it"
HELD = "MarkHeld"


def mark(seen: Observed, job: HoldfastJob, pod: PodSeen | None, order: MarkNode) -> Iterator[Action]:
    """An order to mark the machine of a pod; None: there is no such pod. The order is open until the mark is there."""
    machine = seen.machines.get(pod.machine or "") if pod is not None else None
    if seen.marking == "none":
        yield Tell(OrderDone(order.order_id, NOT_ASKED))
    elif seen.no_marks is not None:
        yield Tell(OrderDone(order.order_id, seen.no_marks))
    elif machine is None:
        yield Tell(OrderDone(order.order_id, NO_MACHINE))
    elif machine.marks.mark is not None:
        yield Tell(OrderDone(order.order_id))
    elif (held := _held(seen)) is not None:
        # Not waited for: the job itself avoids the machine, and the next job that finds it sick asks again.
        yield Warn(
            reason=HELD, text=f"{machine.name} ({order.reason}): {held}", about=f"order {order.order_id}"
        )
        yield Tell(OrderDone(order.order_id, held))
    else:
        yield MarkMachine(machine.name, _mark_of(seen, job, machine.name, order.reason))


def kept_up(seen: Observed, job: HoldfastJob) -> Iterator[Action]:
    """The job's marks, as its coordinator stands for them now."""
    # Who does not answer has said nothing.
    if seen.marking == "none" or seen.no_marks is not None or seen.said is None:
        return
    run, term, bad = seen.status.run or 0, seen.said.term, seen.said.bad_machines
    alive = {name for name, node in seen.said.nodes.items() if node.alive}
    joined = frozenset(pod.machine for pod in seen.pods if pod.machine and pod.name in alive)
    for machine in seen.machines.values():
        there = machine.marks.mark
        if there is None or there.uid != job.id.uid:
            continue
        if marks.is_over(there, machine.name, run, term, bad, joined):
            yield UnmarkMachine(machine.name)
        elif (newer := marks.renewed(there, machine.name, run, term, bad)) is not None:
            yield MarkMachine(machine.name, newer)


def _held(seen: Observed) -> str | None:
    there = {name: one.marks for name, one in seen.machines.items()}
    return marks.brake(there, seen.most_marked_percent)


def _mark_of(seen: Observed, job: HoldfastJob, machine: str, reason: str) -> Mark:
    assert seen.said is not None, "an order is from a coordinator that answers"
    return Mark(
        uid=job.id.uid,
        job=f"{job.id.namespace}/{job.id.name}",
        run=seen.status.run or 0,
        term=seen.said.term,
        quarantined=machine in seen.said.bad_machines,
        reason=reason[: marks.WORDS],
        at_s=seen.now_s,
    )
