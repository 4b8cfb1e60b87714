"""A job's pod as it is seen. What is missing in the object is unknown, and a pod that is not ours is None: it counts by its owner's uid,
never by its labels, which anybody can write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from holdfast.errors import Damaged
from holdfast.kubernetes import names
from holdfast.kubernetes.names import (
    GATE_TOPOLOGY,
    LABEL_HOST,
    LABEL_POD_SET,
    LABEL_RUN,
    LABEL_WORKLOAD,
    NOTE_AVOIDS,
    NOTE_PLACE,
)
from holdfast.kubernetes.objects.resource import COORDINATOR, WORKER
from holdfast.kubernetes.objects.status import from_timestamp
from holdfast.protocol.leadership import EXIT_HANDED_OVER
from holdfast.protocol.wire.decoding import decode

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


PodPhase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]


class TerminationMessage(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended, as its coordinator left it in its pod's status."""

    outcome: str
    """finished, stopped or failed."""
    reason: str = ""
    """For people."""
    cause: str = ""
    """Why it was stopped, a `NoticeCause`. A later version may have more of them. Empty: it was not stopped, or an older
    coordinator says it."""
    step: int | None = None
    """Of the last commit; None: it does not say, as coordinators of earlier versions."""
    checkpoint: str | None = None
    """The newest durable one, as in `CoordinatorReport`."""


class PodSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that the job owns."""

    name: str
    uid: str
    coordinator: bool
    """Else it is a node."""
    number: int
    """Of the node, or of the coordinator's term."""
    run: int
    phase: PodPhase = "Pending"
    end: str = ""
    """Why it has ended, in Kubernetes' words; empty: it says nothing."""
    deleting: bool = False
    """It has a deletion time. That cannot be taken back."""
    machine: str | None = None
    """None: it is not bound yet."""
    ready: bool = False
    waits: str | None = None
    """Why it does not start, in the words of the scheduler or the kubelet."""
    unschedulable: bool = False
    termination_message: TerminationMessage | None = None
    """Of a coordinator that has ended."""
    address: str | None = None
    version: int = 0
    """Of the object when it was so."""
    workload: str = ""
    """Whose quota it uses; empty: the job is in no queue."""
    avoids: frozenset[str] = frozenset()
    """Machines on which it may not run: they were lost or bad when it was made."""
    gated: bool = False
    """It waits until Kueue chooses its machine."""
    chosen: str = ""
    """The machine that Kueue has chosen for it; empty: it has not, or does not choose."""
    unsure: bool = False
    """The watch has lost it, and nobody had deleted it: somebody may have taken away the label that it is watched by."""
    mislabelled: bool = False
    """It lacks labels that are ours."""
    waits_for_place: bool = False
    """Its agent wants to know where its machine stands, and was not told yet."""
    restarts: int = 0
    """How often the kubelet has started its container anew, in its place."""
    backs_off: bool = False
    """Its container has ended, and the kubelet waits before it starts it again."""
    crash: str | None = None
    """How its container ended the last time; None: it never ended, or did so in order."""
    out_of_memory_s: float | None = None
    """When the kernel last killed all that ran in its container, which may run again since: seconds since 1970, whole ones, by
    the clock of its machine; None: it did not."""

    @property
    def ended(self) -> bool:
        """Its processes are over."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def how_ended(self) -> str:
        """For people."""
        return f"{self.phase}, {self.end}" if self.end else self.phase

    @property
    def stays(self) -> bool:
        """It is there, or will be, and nobody has asked for its end."""
        return not self.ended and not self.deleting


# ---------------------------------------------------------------- reading


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
        termination_message=_termination_message(status.get("phase"), containers)
        if term is not None
        else None,
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


_termination_messages = msgspec.json.Decoder(TerminationMessage)


def _termination_message(phase: Any, containers: Any) -> TerminationMessage | None:
    # Only of a pod that is over: a container that ends with a handing over is started again in its place.
    if phase != "Succeeded":
        return None
    for one in containers:
        ended = one.get("state", {}).get("terminated")
        if ended is not None:
            try:
                return decode(_termination_messages.decode, str(ended.get("message", "")), "its last words")
            except Damaged:
                continue
    return None
