"""Reads a job's pods.

A pod belongs to the job by the uid of its owner, never by its labels, which anybody can write. Fields that are missing in the
object are unknown.
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
"""Reasons of a waiting container that are normal during a start."""
KNOWN_GATES = {
    "kueue.x-k8s.io/admission": ": Kueue's pod integration takes it for a pod of its own. Give the job a queue and name "
    "HoldfastJob.v1alpha1.holdfast.dev in integrations.externalFrameworks of Kueue's configuration, or leave the namespace "
    "out of managedJobsNamespaceSelector there",
}
"""Scheduling gates of other programs, with what to do about them."""
BACK_OFF_S = 600.0
"""Seconds: a container that ends within this time after a restart has to wait. The kubelet resets its back-off after twice the
longest delay, which is 5 min."""
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
    """Why it was stopped: a `NoticeCause`, of which a later version may have more. Empty: it was not stopped, or the coordinator
    is of an earlier version."""
    step: int | None = None
    """The last committed step; None: not known, as from coordinators of earlier versions."""
    checkpoint: str | None = None
    """The newest durable checkpoint, as in `CoordinatorReport`."""


class PodSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that the job owns."""

    name: str
    uid: str
    coordinator: bool
    """Whether it is a coordinator's pod; if not, it is a node's."""
    number: int
    """The node's number, or the coordinator's term."""
    run: int
    phase: PodPhase = "Pending"
    end: str = ""
    """Why it failed, in Kubernetes' words; empty: Kubernetes gives no reason, or it has not failed."""
    deleting: bool = False
    """Whether it has a deletion time, which cannot be revoked."""
    machine: str | None = None
    """The machine that it is bound to; None: none yet."""
    ready: bool = False
    waits: str | None = None
    """Why it does not start, in the words of the scheduler or the kubelet; None: it does not wait."""
    unschedulable: bool = False
    termination_message: TerminationMessage | None = None
    """The message of a coordinator that has ended."""
    address: str | None = None
    version: int = 0
    """The object's version."""
    workload: str = ""
    """Name of the Workload whose quota it uses; empty: the job is in no queue."""
    avoids: frozenset[str] = frozenset()
    """Machines on which it must not run, because they were lost or bad when it was created."""
    gated: bool = False
    """Whether it waits until Kueue chooses its machine."""
    chosen: str = ""
    """The machine that Kueue has chosen for it; empty: none, or Kueue does not choose machines."""
    unsure: bool = False
    """Whether the watch no longer shows it although it was not being deleted: somebody may have removed the label that it is
    watched by."""
    mislabelled: bool = False
    """Whether it lacks labels that the operator gave it."""
    waits_for_place: bool = False
    """Whether its agent waits for its machine's place, which has not been annotated yet."""
    restarts: int = 0
    """How often the kubelet has restarted its container."""
    backs_off: bool = False
    """Whether its container has ended and the kubelet waits before it restarts it."""
    crash: str | None = None
    """How its container last ended; None: it never ended, or did so in order."""
    out_of_memory_s: float | None = None
    """When the kernel last killed its whole container for memory, in whole seconds since 1970 by its machine's clock; None:
    never. The container may have been restarted since."""

    @property
    def ended(self) -> bool:
        """Whether its processes have ended."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def how_ended(self) -> str:
        """Its phase, and the reason if there is one, for people."""
        return f"{self.phase}, {self.end}" if self.end else self.phase

    @property
    def stays(self) -> bool:
        """Whether it has not ended and is not being deleted. It may still have to start."""
        return not self.ended and not self.deleting


# ---------------------------------------------------------------- reading


def pod_seen(pod: Object, job: str, uid: str) -> PodSeen | None:
    """A pod of the job with this uid; None: it does not belong to that job."""
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
        # 0 if the label is missing: a removed label must not make it a pod of another run.
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
    """Why a pod failed: a kubelet that evicts it reports, for example, that the disk is full or that the pod exceeded its
    limit."""
    parts = [str(status[key]).strip() for key in ("reason", "message") if status.get(key)]
    return ": ".join(parts)[:MESSAGE_CHARS] if status.get("phase") == "Failed" else ""


def _gates(spec: Object) -> list[str]:
    return [str(one.get("name")) for one in spec.get("schedulingGates", ())]


def _held(spec: Object) -> str | None:
    """Why the pod is held back by a scheduling gate, with which the scheduler ignores it; None: it has none."""
    for name in _gates(spec):
        if name == GATE_TOPOLOGY:  # ours
            return "it waits until Kueue chooses its machine"
        return f"the scheduling gate {name} holds it back{KNOWN_GATES.get(name, '')}"
    return None


def _chosen(labels: Object, spec: Object) -> str:
    # Kueue adds a node selector when it removes the gate. Without the label the selector is the template's.
    return str(spec.get("nodeSelector", {}).get(LABEL_HOST, "")) if LABEL_POD_SET in labels else ""


def _waits(containers: Any) -> str | None:
    for one in containers:
        waiting = one.get("state", {}).get("waiting")
        if waiting is None or waiting.get("reason") in STARTING:
            continue
        # The kubelet's own message about a crash has a delay and the pod's ids, but no reason.
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
    # A kubelet reports that reason when it next looks at the pod, which may be only when it restarts the container. Until then
    # the container's state is terminated, and whether the kubelet waits follows from its own rule.
    ended = state.get("terminated") or {}
    started_s, ended_s = from_timestamp(ended.get("startedAt")), from_timestamp(ended.get("finishedAt"))
    return (
        container.get("restartCount", 0) > 0
        and started_s is not None
        and ended_s is not None
        and ended_s - started_s < BACK_OFF_S
    )


def _ends(containers: Any, name: str) -> tuple[int, str | None, bool]:
    """How often a container was restarted, how it last ended (None: never, or in order), and whether the kubelet waits before it
    restarts it. name: the container's."""
    for one in containers:
        if one.get("name") == name:
            crash = _crash(one.get("state", {})) or _crash(one.get("lastState", {}))
            return int(one.get("restartCount", 0)), crash, _backs_off(one)
    return 0, None, False


def _crash(state: Object) -> str | None:
    ended = state.get("terminated")
    if ended is None or ended.get("exitCode") in (0, EXIT_HANDED_OVER):
        return None
    message = f"exit code {ended.get('exitCode')}"
    if ended.get("reason") not in (None, "Error"):
        message += f" ({ended['reason']})"
    # The reason is in the last line of a program, or at the end of the one long line of a container runtime.
    lines = str(ended.get("message") or "").strip().splitlines()
    return f"{message}: {lines[-1].strip()[-LAST_WORDS_CHARS:]}" if lines else message


def _out_of_memory_s(containers: Any) -> float | None:
    """When the agent's container was last killed for memory: in its `state` until it is restarted, then in its `lastState`."""
    for one in containers:
        for when in ("state", "lastState"):
            ended = one.get(when, {}).get("terminated") or {}
            if one.get("name") == WORKER and ended.get("reason") == "OOMKilled":
                return from_timestamp(ended.get("finishedAt"))
    return None


_termination_messages = msgspec.json.Decoder(TerminationMessage)


def _termination_message(phase: Any, containers: Any) -> TerminationMessage | None:
    # Only of a pod that has ended: a container that ends because of a handover is restarted in the same pod.
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
