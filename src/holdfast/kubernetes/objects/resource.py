"""A HoldfastJob as users write it: `holdfast.dev/v1alpha1`.

The types are the contract. `schema` generates from them what the API server checks; `check` checks what a schema cannot express.
Every declared field has an effect: what this version does not support is not declared, so that the API server refuses it.

A constraint between fields is a method of the type, marked by `rule`: it is called here, and translated to CEL for the API
server.

The docstrings of the spec's fields are the descriptions in the CRD.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from holdfast.protocol.job_options import HealthSpec, SnapshotOptions, Timing
from holdfast.protocol.snapshots import DurableTier

GROUP = "holdfast.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "HoldfastJob"
PLURAL = "holdfastjobs"
WORKER, COORDINATOR = "worker", "coordinator"
"""Names of Holdfast's containers in the pods of a node and of the coordinator. A template may have others beside `worker`."""
MOST_NODES = 10_000
MAX_NAME = 40
"""Longest name of a job, in characters: pods are called NAME-n123, and a label has at most 63."""
NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""The pattern of Services' names, which is the strictest one for the names that contain a job's."""

QUANTITY = "^[0-9]+([.][0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"
"""Bytes in Kubernetes' notation."""
NAME_OF_OBJECT = Meta(min_length=1, max_length=253)


RULE_MARK = "__holdfast_rule__"


def rule(field: str, accepted: str) -> Callable[[Callable[[Any], bool]], Callable[[Any], bool]]:
    """Marks a method of a part of the object as a constraint. For `field` and `accepted` see `schema.FieldRule`."""

    def mark(method: Callable[[Any], bool]) -> Callable[[Any], bool]:
        setattr(method, RULE_MARK, (field, accepted))
        return method

    return mark


def exactly_one(found: Iterable[bool]) -> bool:
    """Whether exactly one is true; CEL's `exists_one`."""
    return sum(found) == 1


class _Struct(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename="camel",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Base of all parts of the object."""


class Code(_Struct, frozen=True, kw_only=True):
    """Files that are put into the containers' working directory."""

    config_map: Annotated[str, NAME_OF_OBJECT]
    """Its keys are the files' names."""


class RunSpec(_Struct, frozen=True, kw_only=True):
    """What every worker runs."""

    script: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """Relative to the working directory."""
    module: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    args: Annotated[tuple[Annotated[str, Meta(max_length=8192)], ...], Meta(max_length=512)] = ()
    preload: Annotated[tuple[Annotated[str, Meta(max_length=128)], ...], Meta(max_length=32)] = ("torch",)
    """Modules imported before a worker is needed."""
    code: Code | None = None


@dataclass(frozen=True)
class SnapshotsSpec(SnapshotOptions):
    """The training state in the nodes' memory."""

    # In a job's specification this is a number of bytes, or half of the free memory. In an object sizes are in Kubernetes'
    # notation, and a container's memory is known before it runs.
    memory: Annotated[str, Meta(pattern=QUANTITY)] | None = None
    """Of every node; absent: half of the container's limit."""


class JobPart(NamedTuple):
    """How a part of the job's specification is written in the object."""

    left_out: tuple[str, ...] = ()
    """Fields that an object does not have."""
    bounds: dict[str, dict[str, Any]] = {}
    """Bounds that only the object has. The API server estimates the cost of rules by the largest size of the fields they use."""


JOB_PARTS: dict[type, JobPart] = {
    Timing: JobPart(),
    SnapshotOptions: JobPart(bounds={"copies": {"maximum": 8}}),
    DurableTier: JobPart(
        bounds={
            "url": {"maxLength": 2048},
            "keep": {"maximum": 100_000},
            "keep_every": {"maximum": 1_000_000_000},
        }
    ),
    HealthSpec: JobPart(
        # Left out are files of the user's own machine (rules, history, hooks), what pods always do and the cluster's own watch
        # does better (watch), what few scripts need (replay), and what no option sets.
        left_out=("watch", "rules", "history", "hooks", "replay", "blast_window_s", "reboot_s"),
        bounds={
            "dry_run": {"maxItems": 64, "items": {"type": "string", "maxLength": 128}},
            "replace_slow": {"minimum": 0, "maximum": 100},
        },
    ),
}
"""Parts that the object and the job's specification share, so that names, units, defaults and bounds are declared once. Other
parts of an object are specific to Kubernetes, or have another form in a job's specification."""


def job_part(cls: type) -> JobPart | None:
    """The `JobPart` of a class or one of its bases; None: it is not shared with the job's specification."""
    return next((JOB_PARTS[one] for one in cls.__mro__ if one in JOB_PARTS), None)


def name_in_object(field: str) -> str:
    """A field's name in the object: `detection_s` as `detectionSeconds`."""
    first, *rest = f"{field[:-2]}_seconds".split("_") if field.endswith("_s") else field.split("_")
    return first + "".join(part.capitalize() for part in rest)


class RunPolicy(_Struct, frozen=True, kw_only=True):
    """How long the job lives, and what stays of it."""

    suspend: bool = False
    """Save, give every pod back, go on when false again."""
    max_restarts: Annotated[int, Meta(ge=0, le=100_000)] = 100
    active_deadline_seconds: Annotated[int, Meta(ge=1, le=315_360_000)] | None = None
    """From the start of a run; then it is stopped."""
    startup_deadline_seconds: Annotated[int, Meta(ge=30, le=31_536_000)] = 1800
    """From the start of a run to its first step."""
    ttl_seconds_after_finished: Annotated[int, Meta(ge=0, le=315_360_000)] | None = None
    """Absent: the object stays."""
    clean_pods: Literal["All", "KeepFailed", "None"] = "KeepFailed"


class Disruption(_Struct, frozen=True, kw_only=True):
    """How nodes leave when the cluster wants them back."""

    grace_seconds: Annotated[int, Meta(ge=10, le=3600)] = 90
    """terminationGracePeriodSeconds of nodes."""
    allow_voluntary: bool = False
    # Karpenter and the autoscaler may take nodes when they like.
    max_unavailable: Literal["Spares", "One", "Any"] = "Spares"
    """Of the PodDisruptionBudget."""


class Topology(_Struct, frozen=True, kw_only=True):
    """Where the nodes may stand."""

    required: Annotated[str, Meta(min_length=1, max_length=317)] | None = None
    """A label of machines, the same for all."""
    preferred: Annotated[str, Meta(min_length=1, max_length=317)] | None = None
    one_per_node: bool = True


class QueueTopology(_Struct, frozen=True, kw_only=True):
    """How near to each other Kueue puts the nodes: one of the two, a label that is a level of its Topology."""

    required: Annotated[str, Meta(min_length=1, max_length=63)] | None = None
    """One value for all nodes, or the job waits."""
    preferred: Annotated[str, Meta(min_length=1, max_length=63)] | None = None
    """The same value, or else as few as possible."""

    @rule("", "either required or preferred")
    def names_one_level(self) -> bool:
        """The two exclude each other."""
        return (self.required is None) != (self.preferred is None)


class Scheduling(_Struct, frozen=True, kw_only=True):
    """How the job shares the cluster with others. Its queue is the label kueue.x-k8s.io/queue-name, as everywhere."""

    workload_priority_class: Annotated[str, NAME_OF_OBJECT] | None = None
    """Kueue's, of minNodes and the spares."""
    elastic_workload_priority_class: Annotated[str, NAME_OF_OBJECT] | None = None
    """Of each further node. Absent: the same."""
    queue_topology: QueueTopology | None = None
    """Kueue chooses machines by its Topology."""
    gang: Literal["KAI", "PodGroup", "Volcano"] | None = None
    """Binds minNodes together or none, by a PodGroup."""
    queue: Annotated[str, NAME_OF_OBJECT] | None = None
    """Volcano's or KAI's."""
    give_back_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 120
    """A start that has too few machines for so long gives them back; 0: never."""

    @rule("queue", "none without gang KAI or Volcano")
    def queue_is_of_a_gang(self) -> bool:
        """Kueue's queue is a label of the object instead."""
        return self.queue is None or (self.gang is not None and self.gang != "PodGroup")

    @rule("queue", "KAI's queue")
    def kai_has_a_queue(self) -> bool:
        """KAI binds nothing without a queue."""
        return self.gang is None or self.gang != "KAI" or self.queue is not None


class TemplateMetadata(_Struct, frozen=True, kw_only=True):
    """What the pods get beside the operator's own."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


ValueOfLabel = Annotated[str, Meta(max_length=4096)]
_AS_IN_A_POD: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
"""Schema of a part of a PodSpec, which the API server checks when the pod is created."""


class CoordinatorPolicy(_Struct, frozen=True, kw_only=True):
    """The pod that decides. It runs no code of the user's."""

    image: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """Absent: the operator's, or else the worker's."""
    priority_class_name: Annotated[str, NAME_OF_OBJECT] | None = None
    labels: dict[str, ValueOfLabel] | None = None
    annotations: dict[str, ValueOfLabel] | None = None
    node_selector: dict[str, ValueOfLabel] | None = None
    """Absent: any machine."""
    tolerations: Annotated[
        tuple[dict[str, Any], ...], Meta(max_length=64, extra_json_schema={"items": _AS_IN_A_POD})
    ] = ()
    """Absent: the template's."""
    affinity: Annotated[dict[str, Any], Meta(extra_json_schema=_AS_IN_A_POD)] | None = None
    resources: Annotated[dict[str, Any], Meta(extra_json_schema=_AS_IN_A_POD)] | None = None
    """Absent: requests of 100m and 256Mi, limit 2Gi."""
    image_pull_secrets: Annotated[
        tuple[dict[str, Any], ...], Meta(max_length=64, extra_json_schema={"items": _AS_IN_A_POD})
    ] = ()
    """Absent: the template's."""


POD_SPEC = {
    "type": "object",
    "required": ["containers"],
    "x-kubernetes-preserve-unknown-fields": True,
    "properties": {
        "containers": {
            "type": "array",
            "minItems": 1,
            "maxItems": 64,
            "items": {
                "type": "object",
                "required": ["name", "image"],
                "x-kubernetes-preserve-unknown-fields": True,
                "properties": {
                    "name": {"type": "string", "maxLength": 63},
                    "image": {"type": "string", "minLength": 1},
                },
            },
        }
    },
}
"""Schema of a PodSpec. Not Kubernetes' whole schema, with which the CRD would not fit into the annotation of `kubectl apply`."""


class PodTemplate(_Struct, frozen=True, kw_only=True):
    """One node's pod. Its container `worker` becomes the node: the operator adds command, ports, /dev/shm, environment."""

    spec: Annotated[dict[str, Any], Meta(extra_json_schema=POD_SPEC)]
    """A PodSpec."""
    metadata: TemplateMetadata = TemplateMetadata()

    @rule("spec.containers", "exactly one named worker")
    def has_a_worker(self) -> bool:
        """The container that becomes the node."""
        return exactly_one(one["name"] == WORKER for one in self.spec["containers"])


ONE_OF_SCRIPT_AND_MODULE = {"oneOf": [{"required": ["script"]}, {"required": ["module"]}]}


class HoldfastJobSpec(_Struct, frozen=True, kw_only=True):
    """What is asked for."""

    run: Annotated[RunSpec, Meta(extra_json_schema=ONE_OF_SCRIPT_AND_MODULE)]
    template: PodTemplate
    nodes: Annotated[int, Meta(ge=1, le=MOST_NODES)] = 1
    """Nodes that train at full strength; kubectl scale changes it."""
    min_nodes: Annotated[int, Meta(ge=1, le=MOST_NODES)] | None = None
    """Go on with so few; absent: as many as nodes."""
    spares: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Warm nodes to replace others."""
    wait_for_spare: bool = False
    """Train at full strength only."""
    procs_per_node: (
        Annotated[int, Meta(ge=1, le=999)] | Annotated[str, Meta(pattern="^(gpu|cpu|auto|[1-9][0-9]{0,2})$")]
    ) = "auto"
    """Workers of a node. auto: one for each GPU, else for each core."""
    snapshots: SnapshotsSpec = SnapshotsSpec()
    checkpoints: Annotated[
        tuple[DurableTier, ...],
        Meta(
            max_length=8,
            extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["url"]},
        ),
    ] = ()
    timing: Timing = Timing()
    health: HealthSpec = HealthSpec()
    run_policy: RunPolicy = RunPolicy()
    disruption: Disruption = Disruption()
    topology: Topology = Topology()
    scheduling: Scheduling = Scheduling()
    coordinator: CoordinatorPolicy = CoordinatorPolicy()
    faults: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=64)] = ()
    """As --fault of the command line."""

    @rule("minNodes", "at most nodes")
    def fewest_fit(self) -> bool:
        """The minimum is at most the full size."""
        return self.min_nodes is None or self.min_nodes <= self.nodes

    @rule("waitForSpare", "false, or 1 spare or more")
    def waits_for_something(self) -> bool:
        """Without spares the job would wait for ever."""
        return not self.wait_for_spare or self.spares > 0

    @rule("snapshots.copies", "fewer than nodes and spares together")
    def copies_fit(self) -> bool:
        """Each copy is on another node. A job of a single node has none."""
        return self.nodes + self.spares == 1 or self.snapshots.copies < self.nodes + self.spares

    @property
    def fewest(self) -> int:
        """Smallest number of nodes to train with."""
        return self.nodes if self.min_nodes is None else self.min_nodes

    @property
    def wanted(self) -> int:
        """Number of nodes at full strength, spares included."""
        return self.nodes + self.spares


class ObjectName(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies an object."""

    namespace: str
    name: str
    uid: str
    """Unique for every object, also if two have the same name one after the other."""


class HoldfastJob(msgspec.Struct, frozen=True, kw_only=True):
    """An object that has passed `check`."""

    id: ObjectName
    spec: HoldfastJobSpec
    queue: str = ""
    """Kueue's LocalQueue; empty: the job is in no queue."""


# ------------------------------------------------------------ figures derived from the template

_SUFFIXES = {
    "": 1.0,
    "m": 1e-3,
    **{unit: 1000.0**n for n, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{f"{unit}i": 1024.0**n for n, unit in enumerate(("K", "M", "G", "T", "P", "E"), 1)},
}
_QUANTITY = re.compile(r"([0-9]+(?:[.][0-9]*)?|[.][0-9]+)(?:([eE][+-]?[0-9]+)|([a-zA-Z]*))")


def quantity(value: object) -> float | None:
    """A Kubernetes quantity as a number; None: it is not a valid one."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None or (match[3] or "") not in _SUFFIXES:
        return None
    return float(match[1] + (match[2] or "")) * _SUFFIXES[match[3] or ""]


GPU_RESOURCE = "nvidia.com/gpu"


def workers_of_node(spec: HoldfastJobSpec) -> int:
    """`procsPerNode` as a number."""
    given = str(spec.procs_per_node)
    if given.isdigit():
        return int(given)
    # From the template and not from a machine: the coordinator has to know it before there is a node, and all nodes are alike.
    cores = max(
        1, math.floor(quantity_of_limit(spec, "cpu") or quantity_of_limit(spec, "cpu", "requests") or 1)
    )
    gpus = int(quantity_of_limit(spec, GPU_RESOURCE) or 0)
    return cores if given == "cpu" or not gpus else gpus


def worker_container(spec: HoldfastJobSpec) -> dict[str, Any] | None:
    """The template's container that becomes the node; None: there is none."""
    return next((one for one in spec.template.spec["containers"] if one["name"] == WORKER), None)


def snapshot_bytes(spec: HoldfastJobSpec) -> int | None:
    """Bytes for snapshots on every node; None: neither the job nor the container's limit specifies it."""
    if spec.snapshots.memory is not None:
        return int(quantity(spec.snapshots.memory) or 0)
    limit = quantity_of_limit(spec, "memory")
    return None if limit is None else int(limit / 2)


def quantity_of_limit(spec: HoldfastJobSpec, resource: str, kind: str = "limits") -> float | None:
    """The amount of a resource for the template's worker; None: not specified. kind: `limits` or `requests`."""
    container = worker_container(spec) or {}
    return quantity(((container.get("resources") or {}).get(kind) or {}).get(resource))


def job_path(namespace: str, name: str) -> str:
    """The path of a job's object at the API server."""
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}"
