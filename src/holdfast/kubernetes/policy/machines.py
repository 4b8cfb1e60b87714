"""Decides about sick machines: which of them jobs leave, which are marked, and for which a replacement is requested. Pure.

Each of the three is limited, because a wrong rule may report every machine of a cluster as sick, and jobs that left them all
would have nowhere to run. One machine is always allowed, since a share of a small cluster may be less than one machine.
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
    """How a site configures its operator."""

    topology_labels: tuple[str, ...] = TOPOLOGY_LABELS
    """Labels of machines that describe their place, from the outermost level to the innermost."""
    going_conditions: tuple[str, ...] = GOING_CONDITIONS
    """Conditions by which other programs report a machine as sick; jobs leave such a machine."""
    most_left_percent: int = 10
    """Percentage of the cluster's machines that jobs may leave for such a condition at once, but at least one machine."""
    marking: Marking = "none"
    """How a machine that a job blames is marked."""
    most_marked_percent: int = 5
    """Percentage of the cluster's machines that may be marked at once, but at least one machine."""
    replacements: Replacements | None = None
    """How marked machines are replaced; None: no replacement is requested."""


# ------------------------------------------------------------ machines that jobs leave because a condition reports them as sick
# Jobs leave at most a share of the machines at once because of a condition, in the order in which they were reported. Cordons and
# taints do not count: Kubernetes' scheduler acts on them as well, and the programs that set them have limits of their own.

SICK_HELD = "SickMachineHeld"


def braked(machines: Mapping[str, MachineSeen], most_percent: int) -> Iterator[MachineSeen]:
    """The machines whose `held` must change, with its new value."""
    sick = sorted((one for one in machines.values() if one.sick is not None), key=_age)
    # At least one, since a share of a small cluster may be less than one machine.
    most = max(1, len(machines) * most_percent // 100)
    why = f"{len(sick)} of {len(machines)} machines are called sick, and at most {most_percent}% are left for that ({most})"
    held = {one.name for one in sick[most:]}
    for one in machines.values():
        if one.name in held and one.held != why:
            yield msgspec.structs.replace(one, held=why)
        elif one.name not in held and one.held is not None:
            yield msgspec.structs.replace(one, held=None)


def held_warnings(machines: Mapping[str, MachineSeen], pods: Iterable[PodSeen]) -> Iterator[Warn]:
    """Warnings about the job's machines that stay in use although they are reported as sick."""
    names = {pod.machine for pod in pods if pod.stays and pod.machine}
    for name in sorted(names & machines.keys()):
        machine = machines[name]
        if machine.held is not None:
            text = f"{name} stays in use, and is called sick ({machine.sick}): {machine.held}"
            yield Warn(reason=SICK_HELD, text=text, about=f"{name} since {machine.sick_since}")


def _age(machine: MachineSeen) -> tuple[str, str]:
    # Kubernetes' timestamps are all in UTC and of one format, so they sort as text.
    return machine.sick_since, machine.name


# ------------------------------------------------------------ marks: how a coordinator's report about a machine is made visible
# - Nothing is marked unless the site configures it (`--mark`), because in many clusters another program is responsible for that.
# - Limit: at most a share of the cluster's machines has a mark at once, so that a wrong rule cannot empty a cluster.
# - A mark is removed on evidence, and never for lack of information: when the coordinator that had the machine in quarantine no
#   longer has it there, or when a node joins from a machine that was marked only because a node of it had failed its checks.

NOT_ASKED = "the operator marks no machines (--mark is none): the job itself avoids it"
NO_MACHINE = "its pod is gone, and with it the name of its machine: the job itself avoids it"
MARK_HELD = "MarkHeld"


def answer_mark_order(
    seen: Observed, job: HoldfastJob, pod: PodSeen | None, order: MarkNode
) -> Iterator[Action]:
    """Carries out or refuses an order to mark the machine of a pod. The order stays open until the mark is on the machine.

    Args:
        pod: the pod of the node that the order names; None: there is none.
    """
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
        # Refused instead of kept open: the job itself avoids the machine, and the next job that finds it sick asks again.
        yield Warn(
            reason=MARK_HELD, text=f"{machine.name} ({order.reason}): {held}", about=f"order {order.order_id}"
        )
        yield Tell(OrderDone(order.order_id, held))
    else:
        yield MarkMachine(machine.name, _mark_of(seen, job, machine.name, order.reason))


def marks_kept_up(seen: Observed, job: HoldfastJob) -> Iterator[Action]:
    """Removes the job's marks that no longer hold, and renews those that its current coordinator confirms."""
    # No answer is no evidence.
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
    # At least one, since a share of a small cluster may be less than one machine.
    most = max(1, len(machines) * most_percent // 100)
    if marked < most:
        return None
    return f"{marked} of {len(machines)} machines are marked, and at most {most_percent}% may be ({most}): it is not marked"


def mark_is_over(
    mark: Mark, machine: str, run: int, term: int, bad: frozenset[str], joined: frozenset[str]
) -> bool:
    """Whether the job that made a mark has evidence that it no longer holds.

    Args:
        run, term: the job's current ones.
        bad: machines that its coordinator has in quarantine.
        joined: machines from which a node has joined.
    """
    if mark.run != run:
        return False
    if mark.quarantined:
        # Only the term that quarantined it: a later coordinator that has lost the ledger has an empty quarantine, which
        # proves nothing.
        return mark.term == term and machine not in bad
    return machine in joined and machine not in bad


def renewed_mark(mark: Mark, machine: str, run: int, term: int, bad: frozenset[str]) -> Mark | None:
    """The mark with the current term, if the current coordinator has the machine in quarantine; None: it has not, or the mark
    has that term already."""
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


# ------------------------------------------------------------ replacement of marked machines: how, and how often
# A mark says that a machine is sick; replacing it is up to the program that owns the machines. Holdfast owns none, so it sends
# that program a request, in the way that the site configures (`--replace`).
# - Only a machine that has been marked for a while is replaced. Until then it may pass its checks, or a person may clear it.
# - There is one request for a machine: its mark records what was requested.
# - Limit: a number of machines a day, over all jobs. A replaced machine takes its mark with it, so the limit on marks alone would
#   let a wrong rule replace a whole cluster.
# - The machine may be taken away as soon as it is requested. Cluster API and Karpenter evict its pods in order first; for the
#   other ways the operator waits until no node of any job is on it.

DAY_S = 86_400.0
AFTER_S, MOST_A_DAY = 600.0, 3
MOST_KEPT = 100
"""Number of replacement records that are kept. Those of the last day are all kept; the daily limit bounds their number."""
REPLACEMENT_CHARS = 300
_LABEL = re.compile(r"(?:[a-z0-9][a-z0-9.-]*/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


class SetLabel(msgspec.Struct, frozen=True):
    """Label the machine, upon which another program replaces it."""

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
    """The value of `--replace`; None: no replacement is requested.

    Raises:
        ValueError: it is none of `ACCEPTED`.
    """
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
    """Whether the machine's pods are evicted before it is taken away, so that jobs leave it at the end of a step."""
    return isinstance(way, DeleteMachine | DeleteNodeClaim)


# ------------------------------------------------------------ when


class Replacements(msgspec.Struct, frozen=True, kw_only=True):
    """How a site wants marked machines replaced."""

    way: Way
    after_s: float = AFTER_S
    """Seconds for which a machine has to be marked before its replacement is requested."""
    most_a_day: int = MOST_A_DAY


def replacement_due_s(mark: Mark | None, after_s: float) -> float | None:
    """When a replacement is to be requested, in UTC; None: never, or it has been."""
    # A mark that a person wrote by hand has no time, and that person decides what happens to the machine.
    if mark is None or mark.replacement or mark.at_s is None:
        return None
    return mark.at_s + after_s


class ReplacementRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A machine whose replacement was requested, or is about to be."""

    machine: str
    uid: str
    """The Node's: one that joins under the same name later is another machine."""
    job: str
    reason: str
    at_s: float
    """UTC."""


def why_not_replaced(records: Sequence[ReplacementRecord], most_a_day: int, now_s: float) -> str | None:
    """Why no further replacement may be requested now; None: one may."""
    recent = sum(one.at_s + DAY_S > now_s for one in records)
    if recent < most_a_day:
        return None
    return f"{recent} machines were replaced in the last 24 h, and at most {most_a_day} may be"


def free_again_s(records: Sequence[ReplacementRecord], most_a_day: int) -> float:
    """When the daily limit allows the next replacement, in UTC. Only for records that have reached the limit."""
    return sorted(one.at_s for one in records)[-most_a_day] + DAY_S


def with_record(
    records: Sequence[ReplacementRecord], new: ReplacementRecord
) -> tuple[ReplacementRecord, ...]:
    """The records with a new one, without the oldest of those that are more than a day old; see `MOST_KEPT`."""
    recent = [one for one in records if one.at_s + DAY_S > new.at_s]
    older = [one for one in records if one.at_s + DAY_S <= new.at_s]
    room = max(0, MOST_KEPT - len(recent) - 1)
    return (*(older[-room:] if room else ()), *recent, new)


# ------------------------------------------------------------ the request


class MachineOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The object whose deletion replaces a machine."""

    group: str
    plural: str
    name: str
    namespace: str = ""
    """Empty: it is cluster-scoped."""
    uid: str = ""
    """Empty: the Node does not name it."""

    def path(self, version: str) -> str:
        """Its path at the API server, in a version of its group."""
        scope = f"/namespaces/{self.namespace}" if self.namespace else ""
        return f"/apis/{self.group}/{version}{scope}/{self.plural}/{self.name}"


def owner_of(way: DeleteMachine | DeleteNodeClaim, node: Mapping[str, Any]) -> MachineOwner | None:
    """The owner of a Node's machine; None: the Node does not name one."""
    metadata = node["metadata"]
    if isinstance(way, DeleteMachine):
        # Cluster API writes both annotations on each of its Nodes, and relies on them itself.
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
    """The patch that labels a Node."""
    return {"metadata": {"labels": {way.key: way.value}}}


def label_back(way: Way, node: Mapping[str, Any]) -> Object | None:
    """The patch that removes Holdfast's label from a Node whose mark is gone; None: the Node does not have it."""
    if not isinstance(way, SetLabel) or node["metadata"].get("labels", {}).get(way.key) != way.value:
        return None
    return {"metadata": {"resourceVersion": node["metadata"]["resourceVersion"], "labels": {way.key: None}}}
