"""Creates, reads and updates Kueue's Workload objects. Pure.

Kueue admits any kind of job for which Workloads are created. Its decisions are in their status. Acting on them is up to their
owner: Kueue does not stop the pods itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from holdfast.kubernetes import names
from holdfast.kubernetes.names import COORDINATOR_ROLE, NODE_ROLE
from holdfast.kubernetes.objects.render import DEFAULT, PodSetting, agent_pod, coordinator_pod, labels, owner
from holdfast.kubernetes.objects.resource import HoldfastJob, QueueTopology
from holdfast.kubernetes.objects.status import timestamp

GROUP = "kueue.x-k8s.io"
API_VERSION = f"{GROUP}/v1beta2"
MESSAGE_CHARS = 500

Object = dict[str, Any]

_COUNTED = (
    "containers",
    "initContainers",
    "nodeSelector",
    "affinity",
    "tolerations",
    "runtimeClassName",
    "priorityClassName",
)
"""Fields of a PodSpec that Kueue uses: a pod's resources, and on which machines it can run."""


def workload(
    job: HoldfastJob,
    number: int | None,
    nodes: int,
    priority: tuple[str, int] | None = None,
    setting: PodSetting = DEFAULT,
    near: Mapping[str, str] = {},
) -> Object:
    """A Workload, which claims quota.

    Args:
        number: of a further node; None: for the base Workload, which includes the coordinator.
        nodes: number of nodes.
        priority: a WorkloadPriorityClass and its value; Kueue requires both or neither.
        near: labels that the machines must have.
    """
    of_nodes = _pod_set(NODE_ROLE, nodes, agent_pod(job, 0, setting=setting))
    if (asked := job.spec.scheduling.queue_topology) is not None:
        of_nodes["topologyRequest"] = msgspec.to_builtins(asked)
    if near:
        pod = of_nodes["template"]["spec"]
        pod["nodeSelector"] = pod.get("nodeSelector", {}) | dict(near)
    sets = [of_nodes]
    if number is None:
        sets.insert(0, _pod_set(COORDINATOR_ROLE, 1, coordinator_pod(job, 1, setting=setting)))
    spec: Object = {"queueName": job.queue, "active": True, "podSets": sets}
    if priority is not None:
        name, value = priority
        spec["priorityClassRef"] = {"group": GROUP, "kind": "WorkloadPriorityClass", "name": name}
        spec["priority"] = value
    return {
        "apiVersion": API_VERSION,
        "kind": "Workload",
        "metadata": {
            "name": names.workload_name(job.id.name, number),
            "namespace": job.id.namespace,
            "labels": labels(job),
            "ownerReferences": [owner(job)],
        },
        "spec": spec,
    }


def priority_class(job: HoldfastJob, number: int | None) -> str | None:
    """The WorkloadPriorityClass of a Workload; None: Kueue's default."""
    given = job.spec.scheduling
    if number is not None and given.elastic_workload_priority_class is not None:
        return given.elastic_workload_priority_class
    return given.workload_priority_class


def _pod_set(name: str, count: int, pod: Object) -> Object:
    spec = {key: copy.deepcopy(pod["spec"][key]) for key in _COUNTED if key in pod["spec"]}
    # Volumes are left out, and so are their mounts.
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        container.pop("volumeMounts", None)
    return {"name": name, "count": count, "template": {"spec": spec}}


# ------------------------------------------------------------ reading


def workload_seen(made: Mapping[str, Any], job: str, uid: str) -> WorkloadSeen | None:
    """A Workload of the job with this uid; None: it does not belong to that job."""
    metadata, spec, status = made["metadata"], made["spec"], made.get("status", {})
    if not any(one.get("uid") == uid for one in metadata.get("ownerReferences", ())):
        return None
    number = names.further_node_of(job, metadata["name"])
    if number is None and metadata["name"] != names.workload_name(job, None):
        return None
    conditions = {one["type"]: one for one in status.get("conditions", ())}
    of_nodes = _one_of(spec["podSets"], NODE_ROLE)
    return WorkloadSeen(
        name=metadata["name"],
        uid=metadata["uid"],
        number=number,
        nodes=of_nodes.get("count", 1) if of_nodes else 0,
        queue=spec.get("queueName", ""),
        admitted=_holds(conditions, "Admitted"),
        reserved=_holds(conditions, "QuotaReserved"),
        evicted=_reason_of(conditions["Evicted"]) if _holds(conditions, "Evicted") else None,
        active=spec.get("active", True),
        deleting="deletionTimestamp" in metadata,
        finished=_holds(conditions, "Finished"),
        ready=_holds(conditions, "PodsReady"),
        waits="" if _holds(conditions, "Admitted") else _waits(conditions),
        topology=_topology(of_nodes),
        machines=frozenset(
            domain[names.LABEL_HOST] for domain in domains_of(made, NODE_ROLE) if names.LABEL_HOST in domain
        ),
    )


def _one_of(sets: Iterable[Mapping[str, Any]], role: str) -> Mapping[str, Any]:
    return next((one for one in sets if one["name"] == role), {})


def _topology(pod_set: Mapping[str, Any]) -> QueueTopology | None:
    asked = pod_set.get("topologyRequest") or {}
    found = QueueTopology(required=asked.get("required"), preferred=asked.get("preferred"))
    return None if found == QueueTopology() else found


def _holds(conditions: Mapping[str, Any], type_: str) -> bool:
    return bool(conditions.get(type_, {}).get("status") == "True")


def _reason_of(condition: Mapping[str, Any]) -> str:
    message = f": {condition['message']}" if condition.get("message") else ""
    return f"{condition.get('reason', 'Evicted')}{message}"[:MESSAGE_CHARS]


def _waits(conditions: Mapping[str, Any]) -> str:
    if _holds(conditions, "QuotaReserved"):
        return "its admission checks are not ready"
    return str(conditions.get("QuotaReserved", {}).get("message", ""))[:MESSAGE_CHARS]


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """What an admission adds to pods."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    gates: tuple[str, ...] = ()


def flavors_of(made: Mapping[str, Any], role: str) -> list[str]:
    """Names of the ResourceFlavors that were chosen for the pods of a role."""
    return sorted(set(_assigned(made, role).get("flavors", {}).values()))


def _assigned(made: Mapping[str, Any], role: str) -> Mapping[str, Any]:
    # After a release the field may be null.
    admission = made.get("status", {}).get("admission") or {}
    return _one_of(admission.get("podSetAssignments", ()), role)


def domains_of(made: Mapping[str, Any], role: str) -> list[dict[str, str]]:
    """The topology domains that Kueue has chosen for the pods of a role, each as labels; empty: it chooses none.

    If the innermost level is the machine, Kueue names only the machine.
    """
    assignment = _assigned(made, role).get("topologyAssignment") or {}
    levels = assignment.get("levels", ())
    found = []
    for part in assignment.get("slices", ()):
        values = [_values(one, part["domainCount"]) for one in part["valuesPerLevel"]]
        found += [dict(zip(levels, each, strict=True)) for each in zip(*values, strict=True)]
    return found


def _values(given: Mapping[str, Any], count: int) -> list[str]:
    """The values of one level for `count` domains: one for all of them, or one each, with a common prefix and suffix."""
    if "individual" not in given:
        return [given["universal"]] * count
    own = given["individual"]
    return [f"{own.get('prefix', '')}{root}{own.get('suffix', '')}" for root in own["roots"]]


def where(made: Mapping[str, Any], flavors: Iterable[Mapping[str, Any]], role: str) -> Where:
    """What a Workload's admission, admission checks included, adds to its pods of a role. flavors: the ResourceFlavors of
    `flavors_of`."""
    specs = [one.get("spec", {}) for one in flavors]
    updates = [
        update
        for check in made.get("status", {}).get("admissionChecks", ())
        for update in check.get("podSetUpdates", ())
        if update["name"] == role
    ]
    selectors = [*(one.get("nodeLabels", {}) for one in specs), *(u.get("nodeSelector", {}) for u in updates)]
    labels = {key: value for one in updates for key, value in one.get("labels", {}).items()}
    notes = {key: value for one in updates for key, value in one.get("annotations", {}).items()}
    # Only nodes. The replacement of a coordinator must not wait for Kueue, which chooses another machine only once Kubernetes
    # calls the old one not ready. So a coordinator may run on any machine of the flavor.
    is_gated = role == NODE_ROLE and bool(domains_of(made, role))
    if is_gated:
        labels[names.LABEL_POD_SET] = role
        notes |= {names.NOTE_WORKLOAD: made["metadata"]["name"], **_topology_note(made, role)}
    return Where(
        labels=labels,
        annotations=notes,
        node_selector={key: value for one in selectors for key, value in one.items()},
        tolerations=tuple(each for one in (*specs, *updates) for each in one.get("tolerations", ())),
        gates=(names.GATE_TOPOLOGY,) if is_gated else (),
    )


def _topology_note(made: Mapping[str, Any], role: str) -> dict[str, str]:
    """The annotation by which Kueue recognizes a pod whose machine it chooses. It removes such a pod's gate, and does not count
    the pod twice."""
    asked = _topology(_one_of(made["spec"]["podSets"], role)) or QueueTopology()
    for kind, label in (("required", asked.required), ("preferred", asked.preferred)):
        if label is not None:
            return {f"{GROUP}/podset-{kind}-topology": label}
    return {f"{GROUP}/podset-unconstrained-topology": "true"}


def placed(pod: Object, at: Where, workload_name: str) -> Object:
    """The pod with what its admission adds."""
    made = copy.deepcopy(pod)
    metadata, spec = made["metadata"], made["spec"]
    metadata["labels"] = at.labels | metadata["labels"] | {names.LABEL_WORKLOAD: workload_name}
    if at.annotations:
        metadata["annotations"] = at.annotations | metadata.get("annotations", {})
    # The flavor's labels take precedence: with another value in the template's selector the pod would use other quota than was
    # counted.
    if at.node_selector:
        spec["nodeSelector"] = spec.get("nodeSelector", {}) | at.node_selector
    spec["tolerations"] = [*spec.get("tolerations", ()), *at.tolerations]
    if at.gates:
        spec["schedulingGates"] = [*spec.get("schedulingGates", ()), *({"name": name} for name in at.gates)]
    return made


# ------------------------------------------------------------ writing


def released(made: Mapping[str, Any], now_s: float) -> Object:
    """The patch of a Workload's status that gives its quota back."""
    status = made.get("status", {})
    evicted: Mapping[str, Any] = next(
        (one for one in status.get("conditions", ()) if one["type"] == "Evicted"), {}
    )
    reason, message = str(evicted.get("reason", "Pending")), str(evicted.get("message", ""))
    # A Workload that a person has stopped must not be queued again.
    requeued = "True" if made["spec"].get("active", True) else "False"
    changes = [
        _condition(made, "QuotaReserved", "False", "Pending", message, now_s),
        _condition(made, "Admitted", "False", "NoReservation", "The workload has no reservation", now_s),
        _condition(made, "PodsReady", "False", "WaitForStart", "Its pods are gone", now_s),
        _condition(made, "Requeued", requeued, reason, message, now_s),
    ]
    return _patch(made, {"admission": None, "conditions": _merged(made, changes)})


def finished(made: Mapping[str, Any], succeeded: bool, now_s: float) -> Object:
    """The patch of a Workload's status that frees its quota for good."""
    reason = "Succeeded" if succeeded else "Failed"
    change = _condition(made, "Finished", "True", reason, "The HoldfastJob is over", now_s)
    return _patch(made, {"conditions": _merged(made, [change])})


def pods_ready(made: Mapping[str, Any], now_s: float) -> Object:
    """The patch of a Workload's status that reports its pods as ready, for a Kueue that waits for that."""
    change = _condition(made, "PodsReady", "True", "Started", "As many nodes as it needs are there", now_s)
    return _patch(made, {"conditions": _merged(made, [change])})


def _patch(made: Mapping[str, Any], status: Object) -> Object:
    # With the version, so that newer decisions of Kueue are not overwritten.
    return {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "status": status}


def _merged(made: Mapping[str, Any], changes: list[Object]) -> list[Object]:
    changed = {one["type"] for one in changes}
    kept = [one for one in made.get("status", {}).get("conditions", ()) if one["type"] not in changed]
    return [*kept, *changes]


def _condition(
    made: Mapping[str, Any], type_: str, status: str, reason: str, message: str, now_s: float
) -> Object:
    conditions = made.get("status", {}).get("conditions", ())
    before: Mapping[str, Any] = next((one for one in conditions if one["type"] == type_), {})
    same = before.get("status") == status
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message or reason,
        "lastTransitionTime": before["lastTransitionTime"] if same else timestamp(now_s),
        "observedGeneration": made["metadata"].get("generation", 1),
    }


class WorkloadSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A Kueue Workload of the job: a claim of quota for some of its nodes."""

    name: str
    uid: str
    number: int | None
    """The number of a further node; None: it is the base, for the coordinator, the spares and the minimum number of nodes."""
    nodes: int
    queue: str
    admitted: bool = False
    reserved: bool = False
    """Whether it holds quota. After an eviction it still does, until the job gives the quota back."""
    evicted: str | None = None
    """Why Kueue has evicted it; None: it has not."""
    active: bool = True
    """False: a person has stopped it (`spec.active`)."""
    deleting: bool = False
    finished: bool = False
    ready: bool = False
    """Whether its pods have been reported as ready to Kueue."""
    waits: str = ""
    """Kueue's message about why it is not admitted."""
    topology: QueueTopology | None = None
    """How close to each other its nodes must be."""
    machines: frozenset[str] = frozenset()
    """Machines that Kueue has chosen for its nodes; empty: none, or Kueue does not choose machines."""

    @property
    def grants(self) -> bool:
        """Whether its nodes may run."""
        wanted_back = self.evicted is not None or not self.active or self.deleting or self.finished
        return self.admitted and not wanted_back

    @property
    def why_not(self) -> str:
        """Why its nodes may not run."""
        if self.evicted is not None:
            return self.evicted
        return "it was stopped (spec.active is false)" if not self.active else self.waits
