"""Kubernetes' objects as `observed` has them. Pure. What is missing in an object is unknown, and an object that is not
ours is None: a pod counts by its owner's uid, never by its labels, which anybody can write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import Damaged
from holdfast.kubernetes import machine_health, names
from holdfast.kubernetes.marks import marks_of
from holdfast.kubernetes.names import (
    GATE_TOPOLOGY,
    LABEL_HOST,
    LABEL_POD_SET,
    LABEL_RUN,
    LABEL_WORKLOAD,
    NOTE_AVOIDS,
    NOTE_PLACE,
)
from holdfast.kubernetes.observed import Farewell, MachineSeen, PodPhase, PodSeen
from holdfast.kubernetes.resource import COORDINATOR, WORKER
from holdfast.kubernetes.times import from_timestamp
from holdfast.protocol.leadership import EXIT_HANDED_OVER
from holdfast.protocol.place import MOST_LEVELS
from holdfast.protocol.wire.decoding import decode

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
GOING_CONDITIONS = ("KernelDeadlock", "ReadonlyFilesystem", machine_health.CONDITION)
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
STARTING = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of a waiting container that are no trouble."""
KNOWN_GATES = {
    "kueue.x-k8s.io/admission": ": Kueue's pod integration takes it for a pod of its own. Give the job a queue and name "
    "HoldfastJob.v1alpha1.holdfast.dev in integrations.externalFrameworks of Kueue's configuration, or leave the namespace "
    "out of managedJobsNamespaceSelector there",
}
"""What is to be done about a scheduling gate that somebody else has set."""
BACK_OFF_S = 600.0
"""A container that ends so soon after it was started again waits: the kubelet forgets after twice its longest delay, 5 min."""
MESSAGE_CHARS = 300
LAST_WORDS_CHARS = 200

Object = Mapping[str, Any]


def pod_seen(pod: Object, job: str, uid: str) -> PodSeen | None:
    """A pod of the job of this uid; None: it is somebody else's."""
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    if not any(
        one.get("uid") == uid and one.get("controller") for one in metadata.get("ownerReferences", ())
    ):
        return None
    name = metadata["name"]
    number, term = names.number_of(job, name), names.term_of(job, name)
    if number is None and term is None:
        return None
    run = str(metadata.get("labels", {}).get(LABEL_RUN, ""))
    conditions = {one["type"]: one for one in status.get("conditions", ())}
    scheduled = conditions.get("PodScheduled", {})
    unschedulable = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    containers = status.get("containerStatuses", ())
    restarts, crash, backs_off = _ends(containers, COORDINATOR if term is not None else WORKER)
    return PodSeen(
        name=name,
        uid=metadata["uid"],
        coordinator=term is not None,
        number=term if term is not None else number if number is not None else 0,
        # Somebody who takes a label away does not make a pod one of another run.
        run=int(run) if run.isdecimal() else 0,
        phase=_phase(status.get("phase")),
        end=_end(status),
        deleting="deletionTimestamp" in metadata,
        machine=spec.get("nodeName"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        waits=_held(spec)
        or (str(scheduled.get("message", ""))[:MESSAGE_CHARS] if unschedulable else _waits(containers)),
        unschedulable=unschedulable,
        farewell=_farewell(status.get("phase"), containers) if term is not None else None,
        address=status.get("podIP"),
        version=int(metadata.get("resourceVersion", 0)),
        workload=str(metadata.get("labels", {}).get(LABEL_WORKLOAD, "")),
        avoids=frozenset(filter(None, metadata.get("annotations", {}).get(NOTE_AVOIDS, "").split(","))),
        gated=GATE_TOPOLOGY in _gates(spec),
        chosen=_chosen(metadata.get("labels", {}), spec),
        mislabelled=not _has_labels(metadata.get("labels", {}), job, term),
        waits_for_place=metadata.get("annotations", {}).get(NOTE_PLACE) == "",
        restarts=restarts,
        crash=crash,
        backs_off=backs_off,
        out_of_memory_s=_out_of_memory_s(containers),
    )


def _has_labels(labels: Object, job: str, term: int | None) -> bool:
    wanted = names.labels(job, names.NODE_ROLE if term is None else names.COORDINATOR_ROLE, term)
    return str(labels.get(LABEL_RUN, "")).isdecimal() and wanted.items() <= labels.items()


def _phase(phase: Any) -> PodPhase:
    match phase:
        case "Pending" | "Running" | "Succeeded" | "Failed":
            return phase  # type: ignore[no-any-return]
        case None:
            return "Pending"
        case _:
            return "Unknown"


def _end(status: Object) -> str:
    """A kubelet that evicts a pod says why: its disk is full, or the pod has used more than its limit."""
    words = [str(status[key]).strip() for key in ("reason", "message") if status.get(key)]
    return ": ".join(words)[:MESSAGE_CHARS] if status.get("phase") == "Failed" else ""


def _gates(spec: Object) -> list[str]:
    return [str(one.get("name")) for one in spec.get("schedulingGates", ())]


def _held(spec: Object) -> str | None:
    """By a scheduling gate, which keeps the scheduler from looking at a pod."""
    for name in _gates(spec):
        if name == GATE_TOPOLOGY:  # ours
            return "it waits until Kueue chooses its machine"
        return f"the scheduling gate {name} holds it back{KNOWN_GATES.get(name, '')}"
    return None


def _chosen(labels: Object, spec: Object) -> str:
    # With the gate Kueue takes away it adds a selector. One of the template's own is nobody's choice.
    return str(spec.get("nodeSelector", {}).get(LABEL_HOST, "")) if LABEL_POD_SET in labels else ""


def _waits(containers: Any) -> str | None:
    for one in containers:
        waiting = one.get("state", {}).get("waiting")
        if waiting is None or waiting.get("reason") in STARTING:
            continue
        # The kubelet's own message of a crash names a time and its numbers of the pod, and not the reason.
        crash = _crash(one.get("lastState", {}))
        if crash is not None and _backs_off(one):
            return f"its container ended {one.get('restartCount', 0) + 1} times, the last time with {crash}"
        message = f": {waiting['message']}" if waiting.get("message") else ""
        return f"{waiting.get('reason', 'waiting')}{message}"[:MESSAGE_CHARS]
    return None


def _backs_off(container: Object) -> bool:
    state = container.get("state", {})
    if (state.get("waiting") or {}).get("reason") == "CrashLoopBackOff":
        return True
    # A kubelet writes that reason when it looks at the pod the next time, which may be just when it starts the container again.
    # Until then the container is over, and by the kubelet's own rule it waits.
    ended = state.get("terminated") or {}
    started_s, ended_s = from_timestamp(ended.get("startedAt")), from_timestamp(ended.get("finishedAt"))
    return (
        container.get("restartCount", 0) > 0
        and started_s is not None
        and ended_s is not None
        and ended_s - started_s < BACK_OFF_S
    )


def _ends(containers: Any, name: str) -> tuple[int, str | None, bool]:
    """Of the container that is ours: how often it was started anew, how it ended the last time, if not in order, and whether the
    kubelet waits before it starts it again."""
    for one in containers:
        if one.get("name") == name:
            crash = _crash(one.get("state", {})) or _crash(one.get("lastState", {}))
            return int(one.get("restartCount", 0)), crash, _backs_off(one)
    return 0, None, False


def _crash(state: Object) -> str | None:
    ended = state.get("terminated")
    if ended is None or ended.get("exitCode") in (0, EXIT_HANDED_OVER):
        return None
    told = f"exit code {ended.get('exitCode')}"
    if ended.get("reason") not in (None, "Error"):
        told += f" ({ended['reason']})"
    # A program's last line says why; container runtimes write one long line, whose end says it.
    lines = str(ended.get("message") or "").strip().splitlines()
    return f"{told}: {lines[-1].strip()[-LAST_WORDS_CHARS:]}" if lines else told


def _out_of_memory_s(containers: Any) -> float | None:
    """Of the agent's container: its `state` while it is over, its `lastState` when it runs again."""
    for one in containers:
        for when in ("state", "lastState"):
            ended = one.get(when, {}).get("terminated") or {}
            if one.get("name") == WORKER and ended.get("reason") == "OOMKilled":
                return from_timestamp(ended.get("finishedAt"))
    return None


_farewells = msgspec.json.Decoder(Farewell)


def _farewell(phase: Any, containers: Any) -> Farewell | None:
    # Only of a pod that is over: a container that ends with a handing over is started again in its place.
    if phase != "Succeeded":
        return None
    for one in containers:
        ended = one.get("state", {}).get("terminated")
        if ended is not None:
            try:
                return decode(_farewells.decode, str(ended.get("message", "")), "its last words")
            except Damaged:
                continue
    return None


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
