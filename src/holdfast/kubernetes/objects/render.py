"""Renders a job's Kubernetes objects, and the specification for its processes. Pure: the same job and number always give the same
object.

Every object is owned by the job's uid, so that a later job of the same name does not take it for its own, and the garbage
collector removes it with the job. Pods have no credentials for the API server: only the operator has.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from holdfast.kubernetes import names
from holdfast.kubernetes.names import (
    AGENT_PORT,
    CODE_FOLDER,
    CONFIG_FOLDER,
    COORDINATOR_PORT,
    COORDINATOR_ROLE,
    LABEL_JOB,
    LABEL_ROLE,
    LABEL_RUN,
    LABEL_TERM,
    NODE_ROLE,
    NOTE_SPEC,
    SPEC_FILE,
    STATE_FOLDER,
    TOKEN_FILE,
)
from holdfast.kubernetes.objects.pod import PodSeen
from holdfast.kubernetes.objects.resource import (
    API_VERSION,
    COORDINATOR,
    KIND,
    WORKER,
    HoldfastJob,
    HoldfastJobSpec,
    quantity_of_limit,
    snapshot_bytes,
    worker_container,
    workers_of_node,
)
from holdfast.protocol.faults import parse_fault
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_options import SnapshotOptions
from holdfast.protocol.snapshots import Saving
from holdfast.protocol.wire.decoding import decode

Object = dict[str, Any]

USER_ID = 1000
"""User of agents, if the template names no other: Pod Security's *restricted* requires one that is not root."""
COORDINATOR_USER_ID = 65532
COORDINATOR_GRACE_S = 15
LEAVE_S = 5
"""Seconds before the end of its pod's grace period by which an agent must have left."""


SHARED_MEMORY = "/dev/shm"


class PodSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration that the operator applies to the pods of every job."""

    namespace: str = "holdfast-system"
    """The operator's namespace."""
    coordinator_image: str = ""
    """Empty: the image of the job's workers, which contains Holdfast too."""
    coordinator_priority_class: str = ""
    python: str = "python3"
    """The Python interpreter in both images."""


DEFAULT = PodSetting()


def labels(job: HoldfastJob, role: str = "") -> dict[str, str]:
    """The labels of every object of the job. role: of a pod; empty: the object is none."""
    return names.labels(job.id.name, role)


def pod_labels(job: str, pod: PodSeen, run: int) -> dict[str, str]:
    """The operator's labels of an existing pod. run: the current one, since pods of another run are gone before it begins."""
    role = COORDINATOR_ROLE if pod.coordinator else NODE_ROLE
    return names.labels(job, role, pod.number if pod.coordinator else None) | {LABEL_RUN: str(run)}


def owner(job: HoldfastJob) -> Object:
    """The owner reference that has an object deleted together with the job."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.id.name,
        "uid": job.id.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def spec_hash(job: HoldfastJob) -> str:
    """A hash of the job's spec."""
    return hashlib.sha256(msgspec.json.encode(job.spec, order="deterministic")).hexdigest()[:16]


def _metadata(job: HoldfastJob, name: str, role: str = "", **more: dict[str, str]) -> Object:
    # The operator's labels take precedence over the template's, because pods are watched by them and the network policy
    # depends on them.
    marks = more.get("labels", {}) | labels(job, role)
    notes = {"annotations": more["annotations"]} if more.get("annotations") else {}
    return {
        "name": name,
        "namespace": job.id.namespace,
        "labels": marks,
        **notes,
        "ownerReferences": [owner(job)],
    }


# ------------------------------------------------------------ pods


def agent_pod(
    job: HoldfastJob,
    number: int,
    run: int = 1,
    avoid: Collection[str] = (),
    setting: PodSetting = DEFAULT,
    waits_for_place: bool = False,
) -> Object:
    """The pod of one node.

    Args:
        avoid: machines that it must not run on.
        waits_for_place: whether machines have places, so that the operator will annotate that of the pod's machine.
    """
    spec = job.spec
    pod = copy.deepcopy(spec.template.spec)
    pod["restartPolicy"] = (
        "OnFailure"  # an agent that crashed is restarted in its pod, and takes over the snapshots
    )
    pod["terminationGracePeriodSeconds"] = spec.disruption.grace_seconds
    # User code that needs a site's credentials (IRSA, workload identity) names a service account, whose credentials are in
    # volumes of their own. With the API server's token a worker could read other jobs' Secrets.
    pod["automountServiceAccountToken"] = False
    pod["enableServiceLinks"] = False
    pod["hostname"] = names.node_name(job.id.name, number)
    pod["securityContext"] = _pod_security(USER_ID) | pod.get("securityContext", {})
    pod["tolerations"] = [*pod.get("tolerations", ()), *_FOR_EVER]
    pod["affinity"] = _affinity(job, pod.get("affinity", {}), sorted(avoid))
    limit = quantity_of_limit(spec, "memory")
    pod["volumes"] = [*pod.get("volumes", ()), *_agent_volumes(job, limit, waits_for_place)]
    worker = next(one for one in pod["containers"] if one["name"] == WORKER)
    worker |= {
        "command": [setting.python, *_MODULE, "holdfast.kubernetes.pods.node"],
        "env": [*worker.get("env", ()), *_agent_environment(job, worker)],
        "ports": [*worker.get("ports", ()), {"name": "holdfast", "containerPort": AGENT_PORT}],
        # Ready means that it has joined. There is no liveness probe, because restarting a node that is only slow does harm.
        "readinessProbe": {"tcpSocket": {"port": "holdfast"}, "periodSeconds": 5, "failureThreshold": 3},
        "securityContext": _container_security() | worker.get("securityContext", {}),
        **_LAST_WORDS,
        "volumeMounts": [*worker.get("volumeMounts", ()), *_agent_mounts(job)],
    }
    if spec.run.code is not None:
        worker["workingDir"] = CODE_FOLDER
    group = ties_to_group(spec, job.id.name)
    pod |= group.spec
    metadata = _metadata(
        job,
        names.node_name(job.id.name, number),
        NODE_ROLE,
        labels={**spec.template.metadata.labels, **group.labels, LABEL_RUN: str(run)},
        annotations=spec.template.metadata.annotations
        | group.annotations
        | {NOTE_SPEC: spec_hash(job)}
        | ({} if spec.disruption.allow_voluntary else _NOT_BY_AUTOSCALERS)
        | ({names.NOTE_PLACE: ""} if waits_for_place else {})
        | ({names.NOTE_AVOIDS: ",".join(sorted(avoid))} if avoid else {}),
    )
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def coordinator_pod(
    job: HoldfastJob, term: int, run: int = 1, setting: PodSetting = DEFAULT, avoid: Collection[str] = ()
) -> Object:
    """The pod of a term's coordinator. avoid: machines that it should not run on if there is another."""
    template, policy = job.spec.template.spec, job.spec.coordinator
    worker = next(one for one in template["containers"] if one["name"] == WORKER)
    image = policy.image or setting.coordinator_image or worker["image"]
    container: Object = {
        "name": COORDINATOR,
        "image": image,
        "command": [
            setting.python,
            *_MODULE,
            "holdfast.kubernetes.pods.coordinator",
            f"--term={term}",
        ],
        "env": [
            *_pod_environment(job),
            {"name": "HOME", "value": STATE_FOLDER},
        ],
        "ports": [{"name": "control", "containerPort": COORDINATOR_PORT}],
        "resources": copy.deepcopy(policy.resources or _COORDINATOR_RESOURCES),
        "securityContext": _container_security(),
        **_LAST_WORDS,
        "readinessProbe": {"tcpSocket": {"port": "control"}, "periodSeconds": 2},
        "volumeMounts": [
            {"name": "holdfast-state", "mountPath": STATE_FOLDER},
            {"name": "holdfast-tmp", "mountPath": "/tmp"},
            {"name": "holdfast-config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            *_mounts_of_folders(job, worker),
        ],
    }
    if "imagePullPolicy" in worker and image == worker["image"]:
        container["imagePullPolicy"] = worker["imagePullPolicy"]
    priority = policy.priority_class_name or setting.coordinator_priority_class
    # Only volumes that the coordinator mounts: a claim that only one machine can mount at a time would keep it from other
    # machines.
    taken = {one["name"] for one in container["volumeMounts"]}
    pod: Object = {
        "restartPolicy": "OnFailure",  # after exit code 75, a handover, it is restarted in its pod
        "terminationGracePeriodSeconds": COORDINATOR_GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(COORDINATOR_USER_ID) | _owner_of_folders(job, template, worker),
        # If all machines are tainted, a coordinator without the template's tolerations could never start.
        "tolerations": [*copy.deepcopy(policy.tolerations or template.get("tolerations", ())), *_FOR_EVER],
        "containers": [container],
        "volumes": [
            {"name": "holdfast-state", "emptyDir": {}},
            {"name": "holdfast-tmp", "emptyDir": {}},
            _config_volume(job),
            *(copy.deepcopy(one) for one in template.get("volumes", ()) if one["name"] in taken),
        ],
    }
    # The fields of the template that its image and runtime need. Not the node selector, which is for machines with GPUs: a
    # coordinator needs none.
    pod |= {key: template[key] for key in ("imagePullSecrets", "runtimeClassName") if key in template}
    pod |= {"priorityClassName": priority} if priority else {}
    if policy.image_pull_secrets:
        pod["imagePullSecrets"] = copy.deepcopy(list(policy.image_pull_secrets))
    if policy.node_selector:
        pod["nodeSelector"] = dict(policy.node_selector)
    if policy.affinity:
        pod["affinity"] = copy.deepcopy(policy.affinity)
    if avoid:
        # Where its predecessor was lost it may be lost again. Only a preference, because there may be no other machine.
        elsewhere = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": sorted(avoid)}
        preferred = {"weight": 100, "preference": {"matchExpressions": [elsewhere]}}
        machines = pod.setdefault("affinity", {}).setdefault("nodeAffinity", {})
        machines[_PREFERRED] = [*machines.get(_PREFERRED, ()), preferred]
    metadata = _metadata(
        job,
        names.coordinator_name(job.id.name, term),
        COORDINATOR_ROLE,
        labels={**(policy.labels or {}), LABEL_TERM: str(term), LABEL_RUN: str(run)},
        annotations={**(policy.annotations or {}), NOTE_SPEC: spec_hash(job)},
    )
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


_COORDINATOR_RESOURCES = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}


def _owner_of_folders(job: HoldfastJob, template: Object, worker: Object) -> Object:
    """The security context of a coordinator that looks for checkpoints in folders: that of the nodes, since the folders are
    readable only for their user. Otherwise it could not list them, and the next run of the job would fail."""
    if not _mounts_of_folders(job, worker):
        return {}
    pod = _pod_security(USER_ID) | template.get("securityContext", {})
    theirs = pod | worker.get("securityContext", {})
    return {key: theirs[key] for key in _IDENTITY if key in theirs}


_IDENTITY = (
    *("runAsNonRoot", "runAsUser", "runAsGroup", "seLinuxOptions"),
    *("fsGroup", "fsGroupChangePolicy", "supplementalGroups"),
)
"""Fields of a security context on which access to a file system depends."""
_MODULE = ("-P", "-m")
"""-P: a file in the working folder, which may be the user's code, must not take a library's place."""
_LAST_WORDS = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""Puts the reason why a container failed into the pod's status, for people and for the operator."""

_FOR_EVER = (
    {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"},
    {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"},
)
"""Tolerations that keep Kubernetes from evicting pods. The coordinator decides within seconds whether a node is lost. If only the
kubelet is unreachable the node continues to train, and a deletion could not be revoked."""

_NOT_BY_AUTOSCALERS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


def _pod_security(user: int) -> Object:
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _pod_environment(job: HoldfastJob) -> list[Object]:
    return [
        {"name": names.HOME_VARIABLE, "value": STATE_FOLDER},
        {"name": names.JOB_VARIABLE, "value": job.id.name},
        {"name": names.NODE_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": names.HOST_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": names.MACHINE_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]


def _agent_environment(job: HoldfastJob, worker: Object) -> list[Object]:
    given = {one["name"] for one in worker.get("env", ())}
    where = f"{names.service_name(job.id.name)}.{job.id.namespace}.svc:{COORDINATOR_PORT}"
    # Shorter than the pod's grace period: an agent that is killed while it hands over its snapshots loses those that have not
    # arrived yet.
    grace_s = job.spec.disruption.grace_seconds - LEAVE_S
    return [
        *_pod_environment(job),
        {"name": names.COORDINATOR_VARIABLE, "value": where},
        {"name": names.GRACE_VARIABLE, "value": str(grace_s)},
        # The image's home directory is on a read-only file system.
        *([] if "HOME" in given else [{"name": "HOME", "value": "/tmp"}]),
    ]


def _config_volume(job: HoldfastJob, waits_for_place: bool = False) -> Object:
    name = names.config_name(job.id.name)
    sources: list[Object] = [
        {"secret": {"name": name, "items": [{"key": TOKEN_FILE, "path": TOKEN_FILE}]}},
        {"configMap": {"name": name, "items": [{"key": SPEC_FILE, "path": SPEC_FILE}]}},
    ]
    if waits_for_place:
        # A file instead of a variable: variables are read when the container starts, and the annotation may come later.
        field = {"fieldPath": f"metadata.annotations['{names.NOTE_PLACE}']"}
        sources.append({"downwardAPI": {"items": [{"path": names.PLACE_FILE, "fieldRef": field}]}})
    # Readable by the group, which fsGroup makes the pod's.
    return {"name": "holdfast-config", "projected": {"defaultMode": 0o440, "sources": sources}}


def _agent_volumes(job: HoldfastJob, memory_limit: float | None, waits_for_place: bool) -> list[Object]:
    # tmpfs counts towards the container's memory limit. With the limit as its size, `statvfs` gives a process the container's
    # memory and not the machine's.
    size = {} if memory_limit is None else {"sizeLimit": str(int(memory_limit))}
    code = job.spec.run.code
    return [
        {"name": "holdfast-shm", "emptyDir": {"medium": "Memory", **size}},
        {"name": "holdfast-state", "emptyDir": {}},
        {"name": "holdfast-tmp", "emptyDir": {}},
        _config_volume(job, waits_for_place),
        *([{"name": "holdfast-code", "configMap": {"name": code.config_map}}] if code else []),
    ]


def _agent_mounts(job: HoldfastJob) -> list[Object]:
    return [
        {"name": "holdfast-shm", "mountPath": SHARED_MEMORY},
        {"name": "holdfast-state", "mountPath": STATE_FOLDER},
        {"name": "holdfast-tmp", "mountPath": "/tmp"},
        {"name": "holdfast-config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        *(
            [{"name": "holdfast-code", "mountPath": CODE_FOLDER, "readOnly": True}]
            if job.spec.run.code
            else []
        ),
    ]


def _mounts_of_folders(job: HoldfastJob, worker: Object) -> list[Object]:
    """The mounts of volumes with checkpoints, in which the coordinator looks for one to resume from."""
    folders = [tier.url.removeprefix("file://") for tier in job.spec.checkpoints]
    return [
        copy.deepcopy(mount)
        for mount in worker.get("volumeMounts", ())
        if any(
            f"{folder.rstrip('/')}/".startswith(f"{mount['mountPath'].rstrip('/')}/") for folder in folders
        )
    ]


def _affinity(job: HoldfastJob, given: Object, avoid: list[str]) -> Object:
    affinity = copy.deepcopy(given)
    ours = {"matchLabels": {LABEL_JOB: job.id.name, LABEL_ROLE: NODE_ROLE}}
    where = job.spec.topology
    apart = affinity.setdefault("podAntiAffinity", {}) if where.one_per_node else {}
    together = affinity.setdefault("podAffinity", {}) if where.required or where.preferred else {}
    if where.one_per_node:
        apart.setdefault(_REQUIRED, []).append(
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": ours}
        )
    if where.required:
        together.setdefault(_REQUIRED, []).append({"topologyKey": where.required, "labelSelector": ours})
    if where.preferred:
        term = {"topologyKey": where.preferred, "labelSelector": ours}
        together.setdefault(_PREFERRED, []).append({"weight": 100, "podAffinityTerm": term})
    if avoid:
        required = affinity.setdefault("nodeAffinity", {}).setdefault(_REQUIRED, {})
        terms = required.setdefault("nodeSelectorTerms", [{}])
        # The terms are alternatives, so each of them must exclude the machines to avoid.
        for term in terms:
            term.setdefault("matchExpressions", []).append(
                {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": avoid}
            )
    return affinity


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"

# ------------------------------------------------------------ objects beside the pods


def config_map(job: HoldfastJob) -> Object:
    """The ConfigMap with the job's specification for its processes."""
    text = msgspec.json.encode(job_spec(job)).decode()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, names.config_name(job.id.name), annotations={NOTE_SPEC: spec_hash(job)}),
        "data": {SPEC_FILE: text},
    }


def secret(job: HoldfastJob, token: str) -> Object:
    """The Secret with the job's token. The right to read it is the right to control the job."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, names.config_name(job.id.name)),
        "type": "Opaque",
        # With another token, every running process would be rejected.
        "immutable": True,
        "data": {TOKEN_FILE: base64.b64encode(token.encode()).decode()},
    }


def token_in(made: Object, error: type[Exception]) -> str:
    """The token in the job's Secret. Raises `error` if the Secret is damaged."""
    return decode(_token, made, "the job's Secret is damaged", error=error)


def _token(made: Object) -> str:
    token: str = made["data"][TOKEN_FILE]
    return base64.b64decode(token).decode()


def service(job: HoldfastJob, term: int) -> Object:
    """The Service by whose name agents find the coordinator of the newest term."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, names.service_name(job.id.name)),
        "spec": {
            "clusterIP": "None",
            # Agents have to reach a coordinator before Kubernetes counts it as ready.
            "publishNotReadyAddresses": True,
            "selector": {LABEL_JOB: job.id.name, LABEL_ROLE: COORDINATOR_ROLE, LABEL_TERM: str(term)},
            "ports": [{"name": "control", "port": COORDINATOR_PORT}],
        },
    }


def budget(job: HoldfastJob) -> Object | None:
    """The PodDisruptionBudget, which limits how many nodes may be evicted at once; None: no limit."""
    allowed = {"Spares": 0, "One": 1}.get(job.spec.disruption.max_unavailable)
    if allowed is None:
        return None
    # Kubernetes compares the number of healthy pods with `spec.nodes`, by the scale subresource. So 0 allows spares to be
    # evicted, and no more.
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(job, job.id.name),
        "spec": {
            "maxUnavailable": allowed,
            "selector": {"matchLabels": {LABEL_JOB: job.id.name, LABEL_ROLE: NODE_ROLE}},
        },
    }


def group(job: HoldfastJob) -> Object:
    """The PodGroup, with which the scheduler binds either all of the nodes that the job needs or none."""
    gang = job.spec.scheduling.gang
    assert gang is not None, "a PodGroup is for a job that asks for one"
    return {
        "apiVersion": GROUP_VERSIONS[gang],
        "kind": "PodGroup",
        "metadata": _metadata(job, job.id.name),
        "spec": group_spec(job.spec, job.spec.fewest),
    }


def network_policy(job: HoldfastJob, setting: PodSetting = DEFAULT) -> Object:
    """The NetworkPolicy that allows only the job's pods and the operator to reach the job's pods. It complements the
    authentication by the token, and does not replace it."""
    own = {"podSelector": {"matchLabels": {LABEL_JOB: job.id.name}}}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": setting.namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "holdfast-operator"}},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, job.id.name),
        "spec": {
            "podSelector": {"matchLabels": {LABEL_JOB: job.id.name}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [own, operator]}],
        },
    }


# ------------------------------------------------------------ for the processes in the pods


_SNAPSHOTS = [field.name for field in dataclasses.fields(SnapshotOptions)]


def job_spec(job: HoldfastJob) -> JobSpec:
    """`spec.json` of the job."""
    spec = job.spec
    container = worker_container(spec) or {}
    cwd = CODE_FOLDER if spec.run.code is not None else container.get("workingDir", ".")
    return JobSpec(
        name=job.id.name,
        script=spec.run.script or spec.run.module or "",
        module=spec.run.module is not None,
        args=spec.run.args,
        min_nodes=spec.fewest,
        max_nodes=spec.nodes,
        nproc=workers_of_node(spec),
        spares=spec.spares,
        wait_for_spare=spec.wait_for_spare,
        engine="kubernetes",
        preload=spec.run.preload,
        faults=tuple(parse_fault(text) for text in spec.faults),
        max_restarts=spec.run_policy.max_restarts,
        cwd=cwd,
        timing=spec.timing,
        saving=Saving(
            snapshots=SnapshotOptions(**{name: getattr(spec.snapshots, name) for name in _SNAPSHOTS}),
            budget_bytes=snapshot_bytes(spec) or 0,
            tiers=spec.checkpoints,
        ),
        health=spec.health,
    )


# ------------------------------------------------------------ gang scheduling: a scheduler binds all nodes of a PodGroup or none
# Three schedulers have objects of this name, each in an API of its own: Volcano, KAI, and Kubernetes' own since 1.37. The group
# includes only the pods of nodes. A coordinator needs no machine for itself, and its replacement must not wait for a group that
# has lost a node.

GROUP_VERSIONS: dict[str, str] = {
    "KAI": "scheduling.run.ai/v2alpha2",
    "PodGroup": "scheduling.k8s.io/v1beta1",
    "Volcano": "scheduling.volcano.sh/v1beta1",
}
GROUP_NEEDS = {
    "KAI": "KAI, installed",
    "PodGroup": "Kubernetes 1.37 whose API server and scheduler have the feature gate GenericWorkload and serve this API",
    "Volcano": "Volcano, installed",
}
"""What a cluster needs in order to serve the API."""
GANGS_WITH_QUEUES = ("KAI", "Volcano")


def group_path(api_version: str, namespace: str, name: str) -> str:
    """The path of a PodGroup at the API server."""
    return f"/apis/{api_version}/namespaces/{namespace}/podgroups/{name}"


def group_spec(spec: HoldfastJobSpec, members: int) -> Object:
    """The `spec` of a job's PodGroup. members: number of nodes that are bound together or not at all."""
    priority = spec.template.spec.get("priorityClassName")
    # That of the pods: a group without one has priority 0, whatever its pods have.
    made: Object = {"priorityClassName": priority} if priority else {}
    if spec.scheduling.queue is not None:
        made["queue"] = spec.scheduling.queue
    match spec.scheduling.gang:
        case "PodGroup":
            # Single: preemption takes one pod at a time, and the job continues without it.
            return made | _group_size("PodGroup", members) | {"disruptionMode": {"single": {}}}
        case "KAI":
            # By default KAI evicts all pods of a group that has been below its minimum for 60 s. But whether a job can continue
            # without a node, and how long it waits for another one, is up to the coordinator.
            return made | _group_size("KAI", members) | {"stalenessGracePeriod": "-1s"}
        case _:
            return made | _group_size("Volcano", members)


def resized_group(api_version: str, members: int) -> Object:
    """The patch that changes a PodGroup's minimum."""
    gang = next(one for one, version in GROUP_VERSIONS.items() if version == api_version)
    return {"spec": _group_size(gang, members)}


def group_members(made: Mapping[str, Any]) -> int | None:
    """A PodGroup's minimum; None: it has none."""
    spec = made.get("spec", {})
    found = spec.get("minMember", spec.get("schedulingPolicy", {}).get("gang", {}).get("minCount"))
    return None if found is None else int(found)


def _group_size(gang: str, members: int) -> Object:
    if gang == "PodGroup":
        return {"schedulingPolicy": {"gang": {"minCount": members}}}
    return {"minMember": members}


class GroupTies(msgspec.Struct, frozen=True, kw_only=True):
    """What ties a pod to its group."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    spec: Object = {}


def ties_to_group(spec: HoldfastJobSpec, group: str) -> GroupTies:
    """What each node's pod needs to be a member of its PodGroup. group: the PodGroup's name."""
    match spec.scheduling.gang:
        case "PodGroup":
            return GroupTies(spec={"schedulingGroup": {"podGroupName": group}})
        case "KAI":
            notes = {
                "pod-group-name": group,
                # Otherwise KAI's own grouper would create another group for the job's pods.
                "kai.scheduler/skip-podgrouper": "true",
            }
            queue = {"kai.scheduler/queue": spec.scheduling.queue or ""}
            return GroupTies(labels=queue, annotations=notes, spec={"schedulerName": "kai-scheduler"})
        case "Volcano":
            notes = {"scheduling.k8s.io/group-name": group}
            return GroupTies(annotations=notes, spec={"schedulerName": "volcano"})
        case _:
            return GroupTies()
