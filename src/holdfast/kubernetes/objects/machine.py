"""A machine of the cluster, as its Node shows it: whether it is reached, to be emptied or called sick, where it stands, and marks on it.

A mark says that a job's coordinator blames the machine. It is an annotation of the Node. It names the job, so that the job can take
it back, and it is what a person removes. The condition and the taint follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from holdfast.errors import Damaged
from holdfast.kubernetes import names
from holdfast.kubernetes.names import NOTE_FAULT, TAINT_UNHEALTHY
from holdfast.kubernetes.objects.pod import MESSAGE_CHARS
from holdfast.kubernetes.objects.status import timestamp
from holdfast.protocol.place import MOST_LEVELS
from holdfast.protocol.wire.decoding import decode

Marking = Literal["none", "condition", "taint"]
FAULT_CONDITION = "HoldfastFault"
MARK_CHARS = 400
"""Characters of a reason."""
Object = dict[str, Any]


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
