"""Gang scheduling: a PodGroup has a scheduler bind as many nodes as the job needs to train, or none. Pure.

Three schedulers know an object of this name, each in an API of its own: Volcano, KAI, and Kubernetes' own since 1.37. The group
has the pods of nodes alone. A coordinator takes no machine from anybody, and its successor must not wait for a group that has
lost a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.kubernetes.resource import HoldfastJobSpec

Object = dict[str, Any]

API_VERSIONS: dict[str, str] = {
    "KAI": "scheduling.run.ai/v2alpha2",
    "PodGroup": "scheduling.k8s.io/v1beta1",
    "Volcano": "scheduling.volcano.sh/v1beta1",
}
NEEDS = {
    "KAI": "KAI, installed",
    "PodGroup": "Kubernetes 1.37 whose API server and scheduler have the feature gate GenericWorkload and serve this API",
    "Volcano": "Volcano, installed",
}
"""What has to be there for the API to be served."""
WITH_QUEUES = ("KAI", "Volcano")


def path_of(api_version: str, namespace: str, name: str) -> str:
    """Of a PodGroup at the API server."""
    return f"/apis/{api_version}/namespaces/{namespace}/podgroups/{name}"


def group_spec(spec: HoldfastJobSpec, members: int) -> Object:
    """The `spec` of a job's PodGroup. members: nodes of which all are bound, or none."""
    priority = spec.template.spec.get("priorityClassName")
    # The pods' own: a group without one has priority 0, whatever its pods have.
    made: Object = {"priorityClassName": priority} if priority else {}
    if spec.scheduling.queue is not None:
        made["queue"] = spec.scheduling.queue
    match spec.scheduling.gang:
        case "PodGroup":
            # Single: preemption takes one pod at a time, and the job goes on without it.
            return made | _size("PodGroup", members) | {"disruptionMode": {"single": {}}}
        case "KAI":
            # Below its minimum for 60 s, KAI would evict every pod of a group. Whether a job can go on without a node, and
            # for how long it waits for another one, is the coordinator's to say.
            return made | _size("KAI", members) | {"stalenessGracePeriod": "-1s"}
        case _:
            return made | _size("Volcano", members)


def resized(api_version: str, members: int) -> Object:
    """The patch by which a group has another minimum."""
    gang = next(one for one, version in API_VERSIONS.items() if version == api_version)
    return {"spec": _size(gang, members)}


def members_of(made: Mapping[str, Any]) -> int | None:
    """The minimum that a PodGroup has; None: none is written there."""
    spec = made.get("spec", {})
    found = spec.get("minMember", spec.get("schedulingPolicy", {}).get("gang", {}).get("minCount"))
    return None if found is None else int(found)


def _size(gang: str, members: int) -> Object:
    if gang == "PodGroup":
        return {"schedulingPolicy": {"gang": {"minCount": members}}}
    return {"minMember": members}


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """What ties a pod to its group."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    spec: Object = {}


def carried(spec: HoldfastJobSpec, group: str) -> Carried:
    """By each node's pod. group: the name of the PodGroup."""
    match spec.scheduling.gang:
        case "PodGroup":
            return Carried(spec={"schedulingGroup": {"podGroupName": group}})
        case "KAI":
            notes = {
                "pod-group-name": group,
                # KAI's own grouper would make another group of the job's pods.
                "kai.scheduler/skip-podgrouper": "true",
            }
            queue = {"kai.scheduler/queue": spec.scheduling.queue or ""}
            return Carried(labels=queue, annotations=notes, spec={"schedulerName": "kai-scheduler"})
        case "Volcano":
            notes = {"scheduling.k8s.io/group-name": group}
            return Carried(annotations=notes, spec={"schedulerName": "volcano"})
        case _:
            return Carried()
