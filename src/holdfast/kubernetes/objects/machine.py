"""A machine of the cluster, as its Node shows it: whether it is reachable, to be emptied or sick, its place, and Holdfast's
marks.

A mark says that a job's coordinator blames the machine; a health note, that the machine's own watch has found it sick. Both are
annotations of the Node, which a person can remove. Conditions and a taint are derived from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from holdfast.errors import Damaged
from holdfast.kubernetes import names
from holdfast.kubernetes.names import HEALTH_CONDITION, NOTE_FAULT, NOTE_WATCH, TAINT_UNHEALTHY
from holdfast.kubernetes.objects.pod import MESSAGE_CHARS
from holdfast.kubernetes.objects.status import timestamp
from holdfast.protocol.health import Condition, Finding, Severity, acts_on_node
from holdfast.protocol.place import MOST_LEVELS
from holdfast.protocol.wire.decoding import decode

Object = dict[str, Any]


GOING_TAINTS = {
    "karpenter.sh/disrupted": "Karpenter takes the machine back",
    "ToBeDeletedByClusterAutoscaler": "the cluster autoscaler takes the machine back",
    "DeletionCandidateOfClusterAutoscaler": None,  # it only thinks about it
    "aws-node-termination-handler/spot-itn": "the cloud takes the spot machine back",
    "sagemaker.amazonaws.com/node-health-status": "HyperPod calls the machine unhealthy",
    "node.kubernetes.io/not-ready": None,
    "node.kubernetes.io/unreachable": None,
}
"""Taints with a known meaning; None: one that is ignored. Other taints count if their effect is NoExecute."""


GOING_CONDITIONS = ("KernelDeadlock", "ReadonlyFilesystem", names.HEALTH_CONDITION)
"""Conditions that report a machine as sick: two of node-problem-detector's, and that of Holdfast's own watch."""


TOPOLOGY_LABELS = (
    "topology.kubernetes.io/zone",
    # AWS, from the spine to the leaf.
    "topology.k8s.aws/network-node-layer-1",
    "topology.k8s.aws/network-node-layer-2",
    "topology.k8s.aws/network-node-layer-3",
    "cloud.google.com/gce-topology-block",
    "cloud.google.com/gce-topology-subblock",
    # For sites to set.
    "topology.holdfast.dev/block",
    "topology.holdfast.dev/rack",
    # An NVLink domain.
    "nvidia.com/gpu.clique",
)
"""Labels that describe a machine's place, from the outermost level to the innermost. Levels without a label are left out."""

Marking = Literal["none", "condition", "taint"]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Why a machine is not to be used."""

    uid: str
    """The job's."""
    job: str
    """`namespace/name`, for people."""
    run: int
    term: int
    """The term of the coordinator that blames it."""
    quarantined: bool
    """Whether that coordinator has the machine in quarantine. If not, it has rejected a node of it whose checks failed."""
    reason: str
    at_s: float | None = None
    """When it was marked, in UTC; None: unknown."""
    replacement: str = ""
    """How its replacement was requested, or why that was impossible; empty: it has not been requested."""


class MachineMarks(msgspec.Struct, frozen=True, kw_only=True):
    """A Node's mark, and what has been derived from it."""

    mark: Mark | None = None
    condition: bool = False
    """Whether Holdfast's condition holds."""
    tainted: bool = False
    """Whether the Node has Holdfast's taint."""


NO_MARKS = MachineMarks()


class MachineSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the cluster."""

    name: str
    ready: bool = True
    """Whether Kubernetes reaches its kubelet. A job's node on a machine that is not ready may still be training."""
    going: str | None = None
    """Why it is to be emptied: it is cordoned, or has a taint that means so; None: it is not."""
    sick: str | None = None
    """The message of a condition that reports it as sick, which the scheduler ignores; None: there is none."""
    sick_since: str = ""
    """A Kubernetes timestamp; empty: not known."""
    held: str | None = None
    """Why it stays in use although it is reported as sick; None: it does not."""
    place: str = ""
    """Its place according to its labels; empty: not known."""
    marks: MachineMarks = NO_MARKS
    """Marks of this operator and of earlier ones."""

    @property
    def is_avoided(self) -> bool:
        """Whether jobs avoid it because it is sick."""
        return self.sick is not None and self.held is None

    @property
    def why_left(self) -> str | None:
        """Why jobs' nodes leave it; None: they stay."""
        return self.going or (self.sick if self.is_avoided else None)


def machine_seen(
    node: Object,
    topology_labels: Sequence[str] = TOPOLOGY_LABELS,
    going_conditions: Sequence[str] = GOING_CONDITIONS,
) -> MachineSeen:
    """Reads a Node. Only the fields that are needed are kept: the list of images alone would be most of the operator's memory."""
    spec, status = node.get("spec", {}), node.get("status", {})
    conditions = {one["type"]: one for one in status.get("conditions", ())}
    sick, since = _sick(conditions, going_conditions)
    return MachineSeen(
        name=node["metadata"]["name"],
        ready=conditions.get("Ready", {}).get("status") == "True",
        going=_going(spec),
        sick=sick,
        sick_since=since,
        place=_place(node["metadata"].get("labels", {}), topology_labels),
        marks=marks_of(node),
    )


def _sick(conditions: Mapping[str, Object], types: Sequence[str]) -> tuple[str | None, str]:
    """The message of the first condition that reports the machine as sick, and since when; None: there is none."""
    for type_ in types:
        found = conditions.get(type_, {})
        if found.get("status") == "True":
            text = found.get("message") or found.get("reason") or ""
            message = f"the condition {type_}: {text}"[:MESSAGE_CHARS]
            return message, str(found.get("lastTransitionTime") or "")
    return None, ""


def _place(labels: Object, levels: Sequence[str]) -> str:
    # If there are too many levels the innermost are kept, which say more about which machines are close to each other.
    names_ = [str(labels[level]) for level in levels if labels.get(level)]
    return "/".join(names_[-MOST_LEVELS:])


def _going(spec: Object) -> str | None:
    for taint in spec.get("taints", ()):
        key = taint.get("key", "")
        if key in GOING_TAINTS:
            why = GOING_TAINTS[key]
        else:
            why = f"the taint {key}={taint.get('value', '')}" if taint.get("effect") == "NoExecute" else None
        if why is not None:
            return why
    return "it is cordoned" if spec.get("unschedulable") else None


# ------------------------------------------------------------ marks on a Node

FAULT_CONDITION = "HoldfastFault"
MARK_CHARS = 400
"""Characters of a reason."""


# ------------------------------------------------------------ on a Node


def marks_of(node: Mapping[str, Any]) -> MachineMarks:
    """The marks on a Node."""
    conditions = node.get("status", {}).get("conditions", ())
    text = node["metadata"].get("annotations", {}).get(NOTE_FAULT)
    return MachineMarks(
        mark=None if text is None else _mark_in(text),
        condition=any(one["type"] == FAULT_CONDITION and one.get("status") == "True" for one in conditions),
        tainted=any(one.get("key") == TAINT_UNHEALTHY for one in node.get("spec", {}).get("taints", ())),
    )


_marks = msgspec.json.Decoder(Mark)


def _mark_in(text: str) -> Mark:
    try:
        return decode(_marks.decode, text, NOTE_FAULT)
    except Damaged:
        # Text that a person wrote. It counts as a mark, but not as one of a job, so no job removes it.
        return Mark(uid="", job="", run=0, term=0, quarantined=True, reason=text[:MARK_CHARS])


def mark_note(mark: Mark | None) -> Object:
    """The patch that sets a Node's mark; None: removes it."""
    text = None if mark is None else msgspec.json.encode(mark).decode()
    return {"metadata": {"annotations": {NOTE_FAULT: text}}}


def lags_behind(seen: MachineMarks, marking: Marking) -> bool:
    """Whether the condition or the taint do not correspond to the mark yet."""
    wanted = seen.mark is not None
    return seen.condition != wanted or seen.tainted != (wanted and marking == "taint")


def mark_patches(node: Mapping[str, Any], marking: Marking, now_s: float) -> Iterator[tuple[str, Object]]:
    """The patches that update the taint and the condition, each with its subresource (empty: the Node itself)."""
    seen = marks_of(node)
    version = {"resourceVersion": node["metadata"]["resourceVersion"]}
    wanted = seen.mark is not None and marking == "taint"
    if seen.tainted != wanted:
        others = [one for one in node.get("spec", {}).get("taints", ()) if one.get("key") != TAINT_UNHEALTHY]
        # Without a value, because a reason is longer than a value may be. NoSchedule, so that other jobs' nodes stay there.
        ours = [{"key": TAINT_UNHEALTHY, "effect": "NoSchedule"}] if wanted else []
        # The list is one field, so the patch has the version: a taint that was added in the meantime must not be lost.
        yield "", {"metadata": version, "spec": {"taints": [*others, *ours]}}
    if seen.condition != (seen.mark is not None):
        yield "/status", mark_status(seen.mark, now_s)


def mark_status(mark: Mark | None, now_s: float, changed: bool = True) -> Object:
    """The patch of a Node's status with the condition of a mark. changed: whether the condition's status changes; False: only its
    message does."""
    if mark is None:
        status, reason, message = "False", "Cleared", "no job blames this machine"
    else:
        status, reason = "True", "Quarantined" if mark.quarantined else "ChecksFailed"
        message = f"{mark.job}: {mark.reason}" + (f"; {mark.replacement}" if mark.replacement else "")
    at = timestamp(now_s)
    condition = {
        "type": FAULT_CONDITION,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": at,
        # A strategic patch keeps what it leaves out.
        **({"lastTransitionTime": at} if changed else {}),
    }
    return {"status": {"conditions": [condition]}}


# ------------------------------------------------------------ health notes: what a machine's own watch has found
# As with marks, the annotation of the Node counts. The condition is derived from it, and operators empty the machine because of
# the condition.
# - A finding counts if its rule's remedy is about the machine and the finding is certain: a severe fault of this machine alone,
#   and the rule is not in a dry run.
# - The first finding is kept. Further ones do not make the machine any sicker, and each write is sent to everything that watches
#   Nodes.
# - A note is over when the machine has booted since, or when a person removes the annotation. A good reading proves nothing:
#   because of an intermittent link, for example, jobs would leave and return again and again.

NOTE_CHARS = 400
"""Characters of a message."""


class HealthNote(msgspec.Struct, frozen=True, kw_only=True):
    """Why a machine is sick."""

    rule: str
    """The rule that found it; empty: a person wrote the note."""
    reason: str
    """What the rule found, for people."""
    boot: str
    """The kernel's id of the boot in which it was found; empty: not known, so that a boot does not end the note."""
    at: str
    """When it was found, a Kubernetes timestamp."""


def calls_sick(finding: Finding) -> bool:
    """Whether no job should run on a machine with this finding."""
    return (
        finding.condition is Condition.FAULTY
        and finding.severity in (Severity.ERROR, Severity.FATAL)
        and acts_on_node(finding.remedy)
        and not (finding.shared or finding.dry_run)
    )


def health_note_of(finding: Finding, boot: str, now_s: float) -> HealthNote:
    """The note for a finding. boot: the kernel's id of this boot; now_s: UTC."""
    about = f"{finding.subject}: " if finding.subject else ""
    reason = f"{about}{finding.evidence}"[:NOTE_CHARS]
    return HealthNote(rule=finding.rule, reason=reason, boot=boot, at=timestamp(now_s))


def health_note_on(node: Mapping[str, Any]) -> HealthNote | None:
    """The health note on a Node; None: there is none."""
    text = node["metadata"].get("annotations", {}).get(NOTE_WATCH)
    if text is None:
        return None
    try:
        return decode(_health_notes.decode, text, NOTE_WATCH)
    except Damaged:
        # Text that a person wrote, who also has to remove it.
        return HealthNote(rule="", reason=text[:NOTE_CHARS], boot="", at="")


_health_notes = msgspec.json.Decoder(HealthNote)


def note_is_over(note: HealthNote, boot: str) -> bool:
    """Whether the machine has booted since. boot: the id of its current boot; empty: not known."""
    return bool(note.boot and boot) and note.boot != boot


def note_patches(
    node: Mapping[str, Any], found: HealthNote | None, boot: str, now_s: float
) -> Iterator[tuple[str, Object]]:
    """The patches that update the annotation and the condition, each with its subresource (empty: the Node itself).

    Args:
        found: the note to write, if the Node has none yet.
        boot: the kernel's id of this boot.
        now_s: UTC.
    """
    there = health_note_on(node)
    wanted = found if there is None or note_is_over(there, boot) else there
    # With the uid, because clouds reuse names, and a finding on one machine says nothing about the next.
    metadata = {key: node["metadata"][key] for key in ("uid",) if key in node["metadata"]}
    if wanted != there:
        text = None if wanted is None else msgspec.json.encode(wanted).decode()
        yield "", {"metadata": {**metadata, "annotations": {NOTE_WATCH: text}}}
    if (condition := _note_condition(node, wanted, now_s)) is not None:
        yield "/status", {"metadata": metadata, "status": {"conditions": [condition]}}


def _note_condition(node: Mapping[str, Any], note: HealthNote | None, now_s: float) -> Object | None:
    """The condition as it should be; None: it is so already."""
    conditions = node.get("status", {}).get("conditions", ())
    there: Object = next((one for one in conditions if one["type"] == HEALTH_CONDITION), {})
    # A machine that was never sick gets no condition, so nothing is written for a thousand healthy machines.
    if note is None and there.get("status") in (None, "False"):
        return None
    wanted = (
        {"status": "False", "reason": "Cleared", "message": "nothing calls this machine sick any more"}
        if note is None
        else {"status": "True", "reason": _camel_case(note.rule) or "Noted", "message": note.reason}
    )
    if all(there.get(key) == value for key, value in wanted.items()):
        return None
    at = timestamp(now_s)
    changed = {} if there.get("status") == wanted["status"] else {"lastTransitionTime": at}
    return {"type": HEALTH_CONDITION, **wanted, "lastHeartbeatTime": at, **changed}


def _camel_case(rule: str) -> str:
    """A rule's name in the form of a condition's reason: `xid-79` as `Xid79`."""
    name = "".join(part[0].upper() + part[1:] for part in re.split(r"[-_.]+", rule) if part)
    return f"Rule{name}" if name[:1].isdigit() else name
