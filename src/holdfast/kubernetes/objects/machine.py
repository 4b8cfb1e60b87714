"""A machine of the cluster, as its Node shows it: whether it is reached, to be emptied or called sick, where it stands, and what we have
written there.

A mark says that a job's coordinator blames the machine; a note, that the machine's own watch has found it sick. Both are annotations of
the Node, and what a person removes. Conditions and a taint follow them.
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
"""Taints with a meaning of their own; None: none for us. Others count when their effect is NoExecute."""


GOING_CONDITIONS = ("KernelDeadlock", "ReadonlyFilesystem", names.HEALTH_CONDITION)
"""Conditions that say that a machine is sick: two of node-problem-detector's, and the one of our own watch."""


TOPOLOGY_LABELS = (
    "topology.kubernetes.io/zone",
    # AWS, from the spine to the leaf.
    "topology.k8s.aws/network-node-layer-1",
    "topology.k8s.aws/network-node-layer-2",
    "topology.k8s.aws/network-node-layer-3",
    "cloud.google.com/gce-topology-block",
    "cloud.google.com/gce-topology-subblock",
    # What sites call their own.
    "topology.holdfast.dev/block",
    "topology.holdfast.dev/rack",
    # An NVLink domain.
    "nvidia.com/gpu.clique",
)
"""Labels that say where a machine stands, from the outermost in. A level that a machine has no label for is left out."""

Marking = Literal["none", "condition", "taint"]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Why a machine is not to be used."""

    uid: str
    """Of the job."""
    job: str
    """`namespace/name`, for people."""
    run: int
    term: int
    """Of the coordinator that says so."""
    quarantined: bool
    """It has the machine in quarantine. Else it has turned a node away whose checks failed."""
    reason: str
    at_s: float | None = None
    """When it was marked, in UTC; None: unknown."""
    replacement: str = ""
    """Of whom another machine was asked, or why it could not be; empty: of nobody yet."""


class MachineMarks(msgspec.Struct, frozen=True, kw_only=True):
    """What of a mark is on a Node."""

    mark: Mark | None = None
    condition: bool = False
    """Ours holds."""
    tainted: bool = False
    """It has our taint."""


NO_MARKS = MachineMarks()


class MachineSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the cluster."""

    name: str
    ready: bool = True
    """Kubernetes reaches its kubelet. A node on a machine that is not ready may well train on."""
    going: str | None = None
    """Why it is to be emptied: it is cordoned, or has a taint that says so."""
    sick: str | None = None
    """What a condition says of it, of which the scheduler knows nothing; None: none calls it sick."""
    sick_since: str = ""
    """As Kubernetes writes moments; empty: it does not say."""
    held: str | None = None
    """Why it stays in use although it is called sick; None: it does not."""
    place: str = ""
    """Where it stands, by its labels; empty: they do not say it."""
    marks: MachineMarks = NO_MARKS
    """Ours, and those of operators before this one."""

    @property
    def is_avoided(self) -> bool:
        """For its sickness."""
        return self.sick is not None and self.held is None

    @property
    def why_left(self) -> str | None:
        """Why nodes leave it; None: they stay."""
        return self.going or (self.sick if self.is_avoided else None)


def machine_seen(
    node: Object,
    topology_labels: Sequence[str] = TOPOLOGY_LABELS,
    going_conditions: Sequence[str] = GOING_CONDITIONS,
) -> MachineSeen:
    """A Node. Only what is asked of it: its list of images alone would be most of the operator's memory."""
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
    """In the words of whoever watches the machine, and since when."""
    for type_ in types:
        found = conditions.get(type_, {})
        if found.get("status") == "True":
            words = found.get("message") or found.get("reason") or ""
            told = f"the condition {type_}: {words}"[:MESSAGE_CHARS]
            return told, str(found.get("lastTransitionTime") or "")
    return None, ""


def _place(labels: Object, levels: Sequence[str]) -> str:
    # The innermost are kept where there are too many: they say more about who is near to whom.
    names_ = [str(labels[level]) for level in levels if labels.get(level)]
    return "/".join(names_[-MOST_LEVELS:])


def _going(spec: Object) -> str | None:
    for taint in spec.get("taints", ()):
        key = taint.get("key", "")
        if key in GOING_TAINTS:
            words = GOING_TAINTS[key]
        else:
            words = (
                f"the taint {key}={taint.get('value', '')}" if taint.get("effect") == "NoExecute" else None
            )
        if words is not None:
            return words
    return "it is cordoned" if spec.get("unschedulable") else None


# ------------------------------------------------------------ marks on a Node

FAULT_CONDITION = "HoldfastFault"
MARK_CHARS = 400
"""Characters of a reason."""


# ------------------------------------------------------------ on a Node


def marks_of(node: Mapping[str, Any]) -> MachineMarks:
    """As the Node has them."""
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
        # A person's own words. It is a mark all the same, and no job's, so no job takes it back.
        return Mark(uid="", job="", run=0, term=0, quarantined=True, reason=text[:MARK_CHARS])


def mark_note(mark: Mark | None) -> Object:
    """The patch of a Node by which it is marked so; None: not at all."""
    text = None if mark is None else msgspec.json.encode(mark).decode()
    return {"metadata": {"annotations": {NOTE_FAULT: text}}}


def lags_behind(seen: MachineMarks, marking: Marking) -> bool:
    """Whether condition or taint are not yet as the mark says."""
    wanted = seen.mark is not None
    return seen.condition != wanted or seen.tainted != (wanted and marking == "taint")


def mark_patches(node: Mapping[str, Any], marking: Marking, now_s: float) -> Iterator[tuple[str, Object]]:
    """What brings condition and taint there: a subresource (empty: the Node itself) and a patch of it."""
    seen = marks_of(node)
    version = {"resourceVersion": node["metadata"]["resourceVersion"]}
    wanted = seen.mark is not None and marking == "taint"
    if seen.tainted != wanted:
        others = [one for one in node.get("spec", {}).get("taints", ()) if one.get("key") != TAINT_UNHEALTHY]
        # No value: a reason is longer than one may be. NoSchedule: other jobs' nodes that train there stay.
        ours = [{"key": TAINT_UNHEALTHY, "effect": "NoSchedule"}] if wanted else []
        # The list is one field. With the version, what somebody else has added meanwhile is not lost.
        yield "", {"metadata": version, "spec": {"taints": [*others, *ours]}}
    if seen.condition != (seen.mark is not None):
        yield "/status", mark_status(seen.mark, now_s)


def mark_status(mark: Mark | None, now_s: float, changed: bool = True) -> Object:
    """The patch of a Node's status with the condition of a mark. changed: False: it holds already, and has other words."""
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
        # What a strategic patch leaves out stays.
        **({"lastTransitionTime": at} if changed else {}),
    }
    return {"status": {"conditions": [condition]}}


# ------------------------------------------------------------ what the watch of a machine says of it
# The annotation of the Node is what counts, as with marks. The condition follows it, and operators empty the machine for the
# condition.
# - A finding counts when the rule that made it asks for the machine, and is sure: a fault, severe, on this machine alone, not on trial.
# - The first finding stays. What follows from it makes no machine sicker, and each write wakes all who watch Nodes.
# - It is over when the machine has booted since, or when a person removes the annotation. That a reading is well again proves
#   nothing: a link that comes and goes would send jobs to and fro.

NOTE_CHARS = 400
"""Characters of a message."""


class HealthNote(msgspec.Struct, frozen=True, kw_only=True):
    """Why a machine is sick."""

    rule: str
    """Which found it; empty: a person wrote the note."""
    reason: str
    """What it found, for people."""
    boot: str
    """The kernel's id of the boot in which it was found; empty: not known, so no boot ends it."""
    at: str
    """When, as Kubernetes writes moments."""


def calls_sick(finding: Finding) -> bool:
    """Whether no job is to run on a machine of which this was found."""
    return (
        finding.condition is Condition.FAULTY
        and finding.severity in (Severity.ERROR, Severity.FATAL)
        and acts_on_node(finding.remedy)
        and not (finding.shared or finding.dry_run)
    )


def health_note_of(finding: Finding, boot: str, now_s: float) -> HealthNote:
    """What is written of it. boot: the kernel's id of this boot; now_s: UTC."""
    about = f"{finding.subject}: " if finding.subject else ""
    reason = f"{about}{finding.evidence}"[:NOTE_CHARS]
    return HealthNote(rule=finding.rule, reason=reason, boot=boot, at=timestamp(now_s))


def health_note_on(node: Mapping[str, Any]) -> HealthNote | None:
    """As the Node has it."""
    text = node["metadata"].get("annotations", {}).get(NOTE_WATCH)
    if text is None:
        return None
    try:
        return decode(_health_notes.decode, text, NOTE_WATCH)
    except Damaged:
        # A person's own words. Who wrote them removes them.
        return HealthNote(rule="", reason=text[:NOTE_CHARS], boot="", at="")


_health_notes = msgspec.json.Decoder(HealthNote)


def note_is_over(note: HealthNote, boot: str) -> bool:
    """Whether the machine has booted since. boot: of now; empty: not known."""
    return bool(note.boot and boot) and note.boot != boot


def note_patches(
    node: Mapping[str, Any], found: HealthNote | None, boot: str, now_s: float
) -> Iterator[tuple[str, Object]]:
    """What brings annotation and condition there: a subresource (empty: the Node itself) and a patch of it.

    Args:
        found: what is to be written, if nothing is yet.
        boot: the kernel's id of this boot.
        now_s: UTC.
    """
    there = health_note_on(node)
    wanted = found if there is None or note_is_over(there, boot) else there
    # With the uid: a cloud gives a name again, and what was found on one machine says nothing of the next.
    metadata = {key: node["metadata"][key] for key in ("uid",) if key in node["metadata"]}
    if wanted != there:
        text = None if wanted is None else msgspec.json.encode(wanted).decode()
        yield "", {"metadata": {**metadata, "annotations": {NOTE_WATCH: text}}}
    if (said := _note_condition(node, wanted, now_s)) is not None:
        yield "/status", {"metadata": metadata, "status": {"conditions": [said]}}


def _note_condition(node: Mapping[str, Any], note: HealthNote | None, now_s: float) -> Object | None:
    """As it is to be; None: it is."""
    conditions = node.get("status", {}).get("conditions", ())
    there: Object = next((one for one in conditions if one["type"] == HEALTH_CONDITION), {})
    # A machine that was never sick has none: of a thousand that are well nothing is written.
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
    """`xid-79` as a reason has to be: `Xid79`."""
    words = "".join(word[0].upper() + word[1:] for word in re.split(r"[-_.]+", rule) if word)
    return f"Rule{words}" if words[:1].isdigit() else words
