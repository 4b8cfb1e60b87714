"""What is done about sick machines: which are left, which are marked, and for which another one is asked. Pure.

Each of the three has a brake, because a wrong rule may call every machine of a cluster sick, and jobs that leave them all have nowhere
to go. One machine is always allowed: a cluster of a few machines has no smaller share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.kubernetes.objects.machine import (
    GOING_CONDITIONS,
    MARK_CHARS,
    TOPOLOGY_LABELS,
    MachineMarks,
    MachineSeen,
    Mark,
    Marking,
)
from holdfast.kubernetes.objects.pod import PodSeen
from holdfast.kubernetes.objects.render import PodSetting
from holdfast.kubernetes.objects.resource import HoldfastJob
from holdfast.kubernetes.policy.plan import Action, MarkMachine, Observed, Tell, UnmarkMachine, Warn
from holdfast.protocol.engine_orders import MarkNode, OrderDone

Object = dict[str, Any]


class Setting(PodSetting, frozen=True, kw_only=True):
    """What a site wants of its operator."""

    topology_labels: tuple[str, ...] = TOPOLOGY_LABELS
    """Labels of machines that say where they stand, from the outermost in."""
    going_conditions: tuple[str, ...] = GOING_CONDITIONS
    """Conditions of machines by which others say that one is sick: a job leaves it."""
    most_left_percent: int = 10
    """Of the cluster's machines that jobs leave for such a condition, at once; one may always be."""
    marking: Marking = "none"
    """What is written on a machine that a job blames."""
    most_marked_percent: int = 5
    """Of the cluster's machines, at once; one may always be."""
    replacements: Replacements | None = None
    """Of machines that stay marked; None: nobody is asked for another."""


# ------------------------------------------------------------ machines that are left because a condition calls them sick
# At most a share of the machines is left for a condition at once, those first that were called sick first. Cordons and taints are not
# counted: Kubernetes' scheduler acts on them as well, and who sets them has a brake of his own.

SICK_HELD = "SickMachineHeld"


def braked(machines: Mapping[str, MachineSeen], most_percent: int) -> Iterator[MachineSeen]:
    """Those of which `held` is to be another than it is, as they are to be."""
    sick = sorted((one for one in machines.values() if one.sick is not None), key=_age)
    # One may always be left: a cluster of a few machines has no smaller share.
    most = max(1, len(machines) * most_percent // 100)
    words = f"{len(sick)} of {len(machines)} machines are called sick, and at most {most_percent}% are left for that ({most})"
    held = {one.name for one in sick[most:]}
    for one in machines.values():
        if one.name in held and one.held != words:
            yield msgspec.structs.replace(one, held=words)
        elif one.name not in held and one.held is not None:
            yield msgspec.structs.replace(one, held=None)


def held_warnings(machines: Mapping[str, MachineSeen], pods: Iterable[PodSeen]) -> Iterator[Warn]:
    """Of the job's machines that stay in use."""
    names = {pod.machine for pod in pods if pod.stays and pod.machine}
    for name in sorted(names & machines.keys()):
        machine = machines[name]
        if machine.held is not None:
            text = f"{name} stays in use, and is called sick ({machine.sick}): {machine.held}"
            yield Warn(reason=SICK_HELD, text=text, about=f"{name} since {machine.sick_since}")


def _age(machine: MachineSeen) -> tuple[str, str]:
    # Moments as Kubernetes writes them are all in UTC and sort as text.
    return machine.sick_since, machine.name


# ------------------------------------------------------------ marks: what becomes of a coordinator's word about a machine
# - Nothing is marked unless the site asks for it (`--mark`): in many clusters another program owns that.
# - The brake: never more than a share of the cluster's machines has a mark at once. A wrong rule must not empty a cluster.
# - A mark is taken back on evidence, and not because nothing is known: by the coordinator that has the machine in quarantine, when
#   it has it there no more, or by a node that has joined from a machine which was only turned away.

NOT_ASKED = "the operator marks no machines (--mark is none): the job itself avoids it"
NO_MACHINE = "its pod is gone, and with it the name of its machine: the job itself avoids it"
MARK_HELD = "MarkHeld"


def answer_mark_order(
    seen: Observed, job: HoldfastJob, pod: PodSeen | None, order: MarkNode
) -> Iterator[Action]:
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
    elif (held := _why_not_now(seen)) is not None:
        # Not waited for: the job itself avoids the machine, and the next job that finds it sick asks again.
        yield Warn(
            reason=MARK_HELD, text=f"{machine.name} ({order.reason}): {held}", about=f"order {order.order_id}"
        )
        yield Tell(OrderDone(order.order_id, held))
    else:
        yield MarkMachine(machine.name, _mark_of(seen, job, machine.name, order.reason))


def marks_kept_up(seen: Observed, job: HoldfastJob) -> Iterator[Action]:
    """The job's marks, as its coordinator stands for them now."""
    # Who does not answer has said nothing.
    if seen.marking == "none" or seen.no_marks is not None or seen.said is None:
        return
    run, term, bad = seen.status.run or 0, seen.said.term, seen.said.bad_machines
    alive = seen.said.alive
    joined = frozenset(pod.machine for pod in seen.pods if pod.machine and pod.name in alive)
    for machine in seen.machines.values():
        there = machine.marks.mark
        if there is None or there.uid != job.id.uid:
            continue
        if mark_is_over(there, machine.name, run, term, bad, joined):
            yield UnmarkMachine(machine.name)
        elif (newer := renewed_mark(there, machine.name, run, term, bad)) is not None:
            yield MarkMachine(machine.name, newer)


def why_not_marked(machines: Mapping[str, MachineMarks], most_percent: int) -> str | None:
    """Why no further machine may be marked; None: one may."""
    marked = sum(one.mark is not None for one in machines.values())
    # One may always be: a cluster of a few machines has no smaller share.
    most = max(1, len(machines) * most_percent // 100)
    if marked < most:
        return None
    return f"{marked} of {len(machines)} machines are marked, and at most {most_percent}% may be ({most}): it is not marked"


def mark_is_over(
    mark: Mark, machine: str, run: int, term: int, bad: frozenset[str], joined: frozenset[str]
) -> bool:
    """Whether its own job knows that a mark does not hold any more.

    Args:
        run, term: of the job now.
        bad: machines that its coordinator has in quarantine.
        joined: machines from which a node has joined.
    """
    if mark.run != run:
        return False
    if mark.quarantined:
        # A successor that has lost the ledger knows of no quarantine, which proves nothing.
        return mark.term == term and machine not in bad
    return machine in joined and machine not in bad


def renewed_mark(mark: Mark, machine: str, run: int, term: int, bad: frozenset[str]) -> Mark | None:
    """The mark as its coordinator of now stands for it; None: it is so already, or it does not."""
    if mark.run != run or machine not in bad or (mark.term == term and mark.quarantined):
        return None
    return msgspec.structs.replace(mark, term=term, quarantined=True)


def _why_not_now(seen: Observed) -> str | None:
    there = {name: one.marks for name, one in seen.machines.items()}
    return why_not_marked(there, seen.most_marked_percent)


def _mark_of(seen: Observed, job: HoldfastJob, machine: str, reason: str) -> Mark:
    assert seen.said is not None, "an order is from a coordinator that answers"
    return Mark(
        uid=job.id.uid,
        job=f"{job.id.namespace}/{job.id.name}",
        run=seen.status.run or 0,
        term=seen.said.term,
        quarantined=machine in seen.said.bad_machines,
        reason=reason[:MARK_CHARS],
        at_s=seen.now_s,
    )


# ------------------------------------------------------------ replacement: whom a site wants asked for another machine, and how often
# A mark says that a machine is sick; a replacement is what somebody does about it. This package owns no machines, so it asks whoever
# does, in the way that the site names (`--replace`).
# - Only a machine that has been marked for a while is replaced. Until then it may pass its checks, or a person may clear it.
# - Nothing is asked twice for one machine: what was asked stands in its mark.
# - The brake: at most so many machines in a day, over all jobs. A replaced machine takes its mark with it, so the brake on marks
#   would let a wrong rule go through a whole cluster.
# - Whoever is asked may take the machine at once. Cluster API and Karpenter evict its pods in order before that; where nobody
#   is known to, the operator waits until no node of any job is there.

DAY_S = 86_400.0
AFTER_S, MOST_A_DAY = 600.0, 3
MOST_KEPT = 100
"""Records of replacements. Those of the last day are kept however many there are, and the brake bounds them."""
REPLACEMENT_CHARS = 300
_LABEL = re.compile(r"(?:[a-z0-9][a-z0-9.-]*/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


class SetLabel(msgspec.Struct, frozen=True):
    """Label the machine; another program replaces it then."""

    key: str
    value: str


class DeleteMachine(msgspec.Struct, frozen=True):
    """Delete its Machine of Cluster API; the MachineSet makes another."""


class DeleteNodeClaim(msgspec.Struct, frozen=True):
    """Delete its NodeClaim of Karpenter, which makes another when pods need it."""


class RunProgram(msgspec.Struct, frozen=True):
    """Run a program of the site's, with the machine, the job and the reason as its arguments."""

    program: str


Way = SetLabel | DeleteMachine | DeleteNodeClaim | RunProgram
ACCEPTED = "none, cluster-api, karpenter, label:KEY=VALUE or command:PROGRAM"


def read_way(text: str) -> Way | None:
    """Of `--replace`; None: nobody is asked. Raises ValueError."""
    kind, _, rest = text.partition(":")
    key, equals, value = rest.partition("=")
    match kind:
        case "none" if not rest:
            return None
        case "cluster-api" if not rest:
            return DeleteMachine()
        case "karpenter" if not rest:
            return DeleteNodeClaim()
        case "label" if equals and _LABEL.fullmatch(key) and _VALUE.fullmatch(value):
            return SetLabel(key, value)
        case "command" if rest.startswith("/"):
            return RunProgram(rest)
        case "command":
            raise ValueError(
                f"{text!r}: the program must be given with its full path, for example command:/opt/site/replace"
            )
    raise ValueError(f"{text!r}: {ACCEPTED}")


def evicts_in_order(way: Way) -> bool:
    """Whether who is asked evicts the machine's pods first, so that jobs leave it at a step's edge."""
    return isinstance(way, DeleteMachine | DeleteNodeClaim)


# ------------------------------------------------------------ when


class Replacements(msgspec.Struct, frozen=True, kw_only=True):
    """What a site wants of them."""

    way: Way
    after_s: float = AFTER_S
    """How long a machine is marked before it is asked for."""
    most_a_day: int = MOST_A_DAY


def replacement_due_s(mark: Mark | None, after_s: float) -> float | None:
    """When another machine is to be asked for, in UTC; None: never, or it was."""
    # A person's own words have no job and no moment; a person also decides what becomes of them.
    if mark is None or mark.replacement or mark.at_s is None:
        return None
    return mark.at_s + after_s


class ReplacementRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A machine for which another one was asked, or is about to be."""

    machine: str
    uid: str
    """Of the Node: one that joins under its name later is another machine."""
    job: str
    reason: str
    at_s: float
    """UTC."""


def why_not_replaced(records: Sequence[ReplacementRecord], most_a_day: int, now_s: float) -> str | None:
    """Why no further machine may be asked for now; None: one may."""
    recent = sum(one.at_s + DAY_S > now_s for one in records)
    if recent < most_a_day:
        return None
    return f"{recent} machines were replaced in the last 24 h, and at most {most_a_day} may be"


def free_again_s(records: Sequence[ReplacementRecord], most_a_day: int) -> float:
    """When the brake lets the next one through, in UTC. Only for records that hold it."""
    return sorted(one.at_s for one in records)[-most_a_day] + DAY_S


def with_record(
    records: Sequence[ReplacementRecord], new: ReplacementRecord
) -> tuple[ReplacementRecord, ...]:
    """And without what is long past."""
    recent = [one for one in records if one.at_s + DAY_S > new.at_s]
    older = [one for one in records if one.at_s + DAY_S <= new.at_s]
    room = max(0, MOST_KEPT - len(recent) - 1)
    return (*(older[-room:] if room else ()), *recent, new)


# ------------------------------------------------------------ what is asked


class MachineOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The object whose deletion replaces a machine."""

    group: str
    plural: str
    name: str
    namespace: str = ""
    """Empty: it is the cluster's."""
    uid: str = ""
    """Empty: the Node does not have it."""

    def path(self, version: str) -> str:
        """Its path at the API server, in a version of its group."""
        scope = f"/namespaces/{self.namespace}" if self.namespace else ""
        return f"/apis/{self.group}/{version}{scope}/{self.plural}/{self.name}"


def owner_of(way: DeleteMachine | DeleteNodeClaim, node: Mapping[str, Any]) -> MachineOwner | None:
    """Of a Node; None: it does not name one."""
    metadata = node["metadata"]
    if isinstance(way, DeleteMachine):
        # Cluster API writes both on each Node of its own, and reads them itself.
        notes = metadata.get("annotations", {})
        name, namespace = (notes.get(f"cluster.x-k8s.io/{key}") for key in ("machine", "cluster-namespace"))
        if not name or not namespace:
            return None
        return MachineOwner(group="cluster.x-k8s.io", plural="machines", namespace=namespace, name=name)
    for one in metadata.get("ownerReferences", ()):
        if one.get("kind") == "NodeClaim" and str(one.get("apiVersion", "")).startswith("karpenter.sh/"):
            return MachineOwner(group="karpenter.sh", plural="nodeclaims", name=one["name"], uid=one["uid"])
    return None


def label_for(way: SetLabel) -> Object:
    """The patch of a Node."""
    return {"metadata": {"labels": {way.key: way.value}}}


def label_back(way: Way, node: Mapping[str, Any]) -> Object | None:
    """The patch that takes our label from a Node whose mark is gone; None: it does not have it."""
    if not isinstance(way, SetLabel) or node["metadata"].get("labels", {}).get(way.key) != way.value:
        return None
    return {"metadata": {"resourceVersion": node["metadata"]["resourceVersion"], "labels": {way.key: None}}}
