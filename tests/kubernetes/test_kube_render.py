"""The objects of a job, as the API server gets them."""

import base64
import copy
import json
from typing import Any

import msgspec
import pytest
from kubejobs import accept, job, put

from holdfast.kubernetes import names
from holdfast.kubernetes.objects import render
from holdfast.kubernetes.objects.pod import pod_seen
from holdfast.kubernetes.objects.render import job_spec
from holdfast.kubernetes.objects.resource import HoldfastJob
from holdfast.protocol.job import JobSpec
from holdfast.protocol.job_options import SnapshotOptions, Timing


def full() -> HoldfastJob:
    asked = job(
        spec__nodes=4,
        spec__minNodes=2,
        spec__spares=1,
        spec__checkpoints=[{"url": "/checkpoints/llm", "every": "5m", "keep": 3}, {"url": "s3://b/llm"}],
        spec__snapshots={"every": "10", "copies": 2},
        spec__timing={"detectionSeconds": 1},
        spec__run={"module": "llm.train", "args": ["--lr", "1"], "code": {"configMap": "code"}},
    )
    pod = asked["spec"]["template"]["spec"]
    pod |= {
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}},
            {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "scratch"}},
        ],
    }
    worker = pod["containers"][0]
    worker |= {
        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "resources": {"limits": {"nvidia.com/gpu": "8", "memory": "400Gi"}},
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "checkpoints", "mountPath": "/checkpoints"},
        ],
    }
    asked["spec"]["template"]["metadata"] = {"labels": {"team": "research"}, "annotations": {"a": "b"}}
    return accept(asked)


def pods() -> list[dict[str, Any]]:
    taken = full()
    return [render.agent_pod(taken, 7, run=2), render.coordinator_pod(taken, 3, run=2)]


def test_every_object_belongs_to_the_job_and_says_so() -> None:
    taken = full()
    all_of_it = [*pods(), render.config_map(taken), render.secret(taken, "t"), render.service(taken, 3)]
    all_of_it += [render.budget(taken), render.network_policy(taken)]
    for made in all_of_it:
        assert made is not None
        metadata = made["metadata"]
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == (
            "HoldfastJob",
            "llm",
            "u-1",
            True,
        )
        assert metadata["namespace"] == "research"
        assert metadata["labels"]["holdfast.dev/job"] == "llm"
        json.dumps(made)


def test_pods_keep_to_the_restricted_standard() -> None:
    for pod in pods():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounted = {one["mountPath"] for one in container["volumeMounts"]}
        assert {"/tmp", "/var/lib/holdfast", "/etc/holdfast"} <= mounted
        assert {one["name"] for one in container["volumeMounts"]} == {
            one["name"] for one in spec["volumes"]
        } - ({"data", "checkpoints"} - {one["name"] for one in container["volumeMounts"]})


def test_pods_stay_on_a_machine_that_kubernetes_does_not_reach() -> None:
    for pod in pods():
        kept = {one["key"]: one for one in pod["spec"]["tolerations"]}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
            assert kept[key] == {
                "key": key,
                "operator": "Exists",
                "effect": "NoExecute",
            }  # no tolerationSeconds


def test_an_agents_pod_has_what_the_template_asks_for() -> None:
    pod = render.agent_pod(full(), 7, run=2)
    metadata, spec = pod["metadata"], pod["spec"]
    assert metadata["name"] == spec["hostname"] == "llm-n7"
    assert metadata["labels"]["team"] == "research"
    assert metadata["labels"]["holdfast.dev/run"] == "2"
    assert metadata["annotations"]["a"] == "b"
    assert metadata["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    assert spec["nodeSelector"] == {"gpu": "yes"}
    assert spec["terminationGracePeriodSeconds"] == 90
    assert spec["restartPolicy"] == "OnFailure"
    (worker,) = spec["containers"]
    assert worker["command"] == ["python3", "-P", "-m", "holdfast.kubernetes.pods.node"]
    assert worker["workingDir"] == names.CODE_FOLDER
    env = {one["name"]: one.get("value", one.get("valueFrom")) for one in worker["env"]}
    assert env["NCCL_DEBUG"] == "WARN"
    assert env["HOLDFAST_COORDINATOR"] == "llm-coordinator.research.svc:7077"
    assert env["HOLDFAST_GRACE_S"] == "85"
    assert env["HOLDFAST_NODE"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    volumes = {one["name"]: one for one in spec["volumes"]}
    assert volumes["holdfast-shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": str(400 << 30)}
    assert volumes["holdfast-config"]["projected"]["defaultMode"] == 0o440
    assert volumes["holdfast-code"]["configMap"] == {"name": "code"}
    assert "token" not in json.dumps(worker["env"]), "a token is in a file and never in a variable"


def test_a_template_may_choose_its_own_user() -> None:
    asked = job()
    put(asked, "spec.template.spec.securityContext", {"runAsUser": 4000})
    put(asked, "spec.template.spec.containers.0.securityContext", {"readOnlyRootFilesystem": False})
    put(asked, "spec.template.spec.containers.0.env", [{"name": "HOME", "value": "/home/me"}])
    spec = render.agent_pod(accept(asked), 0)["spec"]
    assert spec["securityContext"]["runAsUser"] == 4000
    assert spec["securityContext"]["runAsNonRoot"] is True
    (worker,) = spec["containers"]
    assert worker["securityContext"]["readOnlyRootFilesystem"] is False
    assert [one["value"] for one in worker["env"] if one["name"] == "HOME"] == ["/home/me"]


def test_a_coordinator_needs_no_gpu_and_sees_the_checkpoints() -> None:
    pod = render.coordinator_pod(full(), 3, setting=render.PodSetting(coordinator_image="holdfast:1"))
    spec = pod["spec"]
    assert pod["metadata"]["name"] == "llm-c3"
    assert pod["metadata"]["labels"]["holdfast.dev/term"] == "3"
    assert "nodeSelector" not in spec
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    (container,) = spec["containers"]
    assert container["image"] == "holdfast:1"
    assert container["command"][-1] == "--term=3"
    assert "nvidia.com/gpu" not in json.dumps(container["resources"])
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts["checkpoints"] == "/checkpoints"
    assert "data" not in mounts
    assert "data" not in {one["name"] for one in spec["volumes"]}


def test_a_coordinator_starts_where_all_machines_are_tainted() -> None:
    tolerated = render.coordinator_pod(full(), 1)["spec"]["tolerations"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in tolerated
    own = job()
    put(own, "spec.coordinator.tolerations", [{"key": "infra", "operator": "Exists"}])
    tolerated = render.coordinator_pod(accept(own), 1)["spec"]["tolerations"]
    assert [one["key"] for one in tolerated] == [
        *("infra", "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    ]


def test_what_a_site_sets_of_a_coordinator_s_pod() -> None:
    asked = job()
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    given = {
        "labels": {"team": "research"},
        "annotations": {"sidecar.istio.io/inject": "false"},
        "nodeSelector": {"pool": "infra"},
        "affinity": {"nodeAffinity": {preferred: [{"weight": 1, "preference": zone}]}},
        "resources": {"requests": {"memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "imagePullSecrets": [{"name": "mirror"}],
    }
    put(asked, "spec.coordinator", given)
    pod = render.coordinator_pod(accept(asked), 2, avoid={"m1"})
    assert pod["metadata"]["labels"]["team"] == "research"
    assert pod["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    spec = pod["spec"]
    assert spec["nodeSelector"] == {"pool": "infra"}
    assert spec["imagePullSecrets"] == [{"name": "mirror"}]
    assert spec["containers"][0]["resources"] == given["resources"]
    assert [one["weight"] for one in spec["affinity"]["nodeAffinity"][preferred]] == [1, 100]
    # The next one's wishes are not those of the one before.
    again = render.coordinator_pod(accept(asked), 3)["spec"]["affinity"]["nodeAffinity"][preferred]
    assert [one["weight"] for one in again] == [1]


def test_a_coordinator_that_looks_into_folders_is_the_user_who_wrote_them() -> None:
    """Agents write for their user alone."""

    def security(made: dict[str, Any]) -> dict[str, Any]:
        given = render.coordinator_pod(accept(made), 1)["spec"]["securityContext"]
        assert given["seccompProfile"] == {"type": "RuntimeDefault"}
        return dict(given)

    asked = job()
    put(asked, "spec.template.spec.securityContext", {"runAsUser": 4000, "supplementalGroups": [7]})
    put(asked, "spec.template.spec.containers.0.securityContext", {"runAsGroup": 4001})
    assert security(asked)["runAsUser"] == render.COORDINATOR_USER_ID
    put(asked, "spec.checkpoints", [{"url": "file:///checkpoints/llm"}])
    put(
        asked, "spec.template.spec.volumes", [{"name": "shared", "persistentVolumeClaim": {"claimName": "c"}}]
    )
    mounts = [{"name": "shared", "mountPath": "/checkpoints"}]
    put(asked, "spec.template.spec.containers.0.volumeMounts", mounts)
    theirs = render.agent_pod(accept(asked), 0)["spec"]["securityContext"]
    assert security(asked) == theirs | {"runAsGroup": 4001}
    assert (theirs["runAsUser"], theirs["supplementalGroups"]) == (4000, [7])
    put(asked, "spec.template.spec.securityContext", {})
    put(asked, "spec.template.spec.containers.0.securityContext", {})
    assert security(asked) == render.agent_pod(accept(asked), 0)["spec"]["securityContext"]


def test_the_coordinators_image_is_the_jobs_the_operators_or_the_workers() -> None:
    def image(asked: dict[str, Any], setting: render.PodSetting) -> str:
        return str(
            render.coordinator_pod(accept(asked), 1, setting=setting)["spec"]["containers"][0]["image"]
        )

    own = render.PodSetting(coordinator_image="operators:1")
    assert image(job(), render.PodSetting()) == "registry.example.com/me/train:1"
    assert image(job(), own) == "operators:1"
    assert image(job(spec__coordinator={"image": "jobs:1"}), own) == "jobs:1"


def test_machines_to_be_avoided_are_in_every_alternative() -> None:
    asked = job()
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"matchExpressions": []}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    put(asked, "spec.template.spec.affinity", {"nodeAffinity": copy.deepcopy(required)})
    pod = render.agent_pod(accept(asked), 0, avoid={"b", "a"})
    raw = pod | {"metadata": pod["metadata"] | {"uid": "p"}}
    assert pod_seen(raw, "llm", "u-1").avoids == {"a", "b"}  # type: ignore[union-attr]
    raw["metadata"].pop("annotations")
    assert pod_seen(raw, "llm", "u-1").avoids == frozenset()  # type: ignore[union-attr]
    found = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    for term in found["nodeSelectorTerms"]:
        assert term["matchExpressions"][-1]["values"] == ["a", "b"]
    assert len(found["nodeSelectorTerms"]) == 2
    assert render.agent_pod(accept(asked), 0)["spec"]["affinity"]["nodeAffinity"] == required


def test_topology_is_affinity_to_the_jobs_own_pods() -> None:
    where = {"required": "rack", "preferred": "block", "onePerNode": False}
    affinity = render.agent_pod(accept(job(spec__topology=where)), 0)["spec"]["affinity"]
    assert "podAntiAffinity" not in affinity
    (term,) = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "rack"
    (soft,) = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert soft["podAffinityTerm"]["topologyKey"] == "block"
    apart = render.agent_pod(accept(job()), 0)["spec"]["affinity"]["podAntiAffinity"]
    assert (
        apart["requiredDuringSchedulingIgnoredDuringExecution"][0]["topologyKey"] == "kubernetes.io/hostname"
    )


def test_rendering_changes_nothing_of_the_job() -> None:
    taken = full()
    before = copy.deepcopy(taken)
    first = render.agent_pod(taken, 1, avoid=["x"])
    assert render.agent_pod(taken, 1, avoid=["x"]) == first
    assert taken == before


def test_the_specification_is_that_of_any_engine() -> None:
    text = render.config_map(full())["data"]["spec.json"]
    spec = msgspec.json.decode(text, type=JobSpec)
    assert spec == job_spec(full())
    assert (spec.name, spec.script, spec.module, spec.args) == ("llm", "llm.train", True, ("--lr", "1"))
    assert (spec.min_nodes, spec.max_nodes, spec.spares, spec.nproc) == (2, 4, 1, 8)
    assert spec.engine == "kubernetes"
    assert spec.timing == Timing(1.0, 5.0)
    assert (spec.saving.snapshots, spec.saving.budget_bytes) == (SnapshotOptions("10", 2), 200 << 30)
    assert [tier.url for tier in spec.saving.tiers] == ["/checkpoints/llm", "s3://b/llm"]
    assert spec.cwd == names.CODE_FOLDER


def test_the_token_is_in_a_secret_that_cannot_change() -> None:
    made = render.secret(full(), "secret-token")
    assert base64.b64decode(made["data"]["token"]) == b"secret-token"
    assert made["immutable"] is True
    assert "secret-token" not in json.dumps(pods())


@pytest.mark.parametrize(("allowed", "number"), [("Spares", 0), ("One", 1)])
def test_a_budget_lets_spares_or_one_go(allowed: str, number: int) -> None:
    made = render.budget(accept(job(spec__disruption={"maxUnavailable": allowed})))
    assert made is not None
    assert made["spec"]["maxUnavailable"] == number
    assert made["spec"]["selector"]["matchLabels"] == {
        "holdfast.dev/job": "llm",
        "holdfast.dev/role": "node",
    }


def test_any_needs_no_budget() -> None:
    assert render.budget(accept(job(spec__disruption={"maxUnavailable": "Any"}))) is None


def test_only_the_job_and_the_operator_reach_its_pods() -> None:
    (rule,) = render.network_policy(full(), render.PodSetting(namespace="ops"))["spec"]["ingress"]
    own, operator = rule["from"]
    assert own == {"podSelector": {"matchLabels": {"holdfast.dev/job": "llm"}}}
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "ops"}


def test_numbers_are_read_back_from_names() -> None:
    assert names.number_of("llm", names.node_name("llm", 17)) == 17
    assert names.term_of("llm", names.coordinator_name("llm", 2)) == 2
    for other in ("llm-n", "llm-n1x", "llm-n01", "llm-c1", "llm-n-1", "llm2-n1", "llm-n٣"):
        assert names.number_of("llm", other) is None


def test_the_hash_changes_with_the_spec() -> None:
    assert render.spec_hash(full()) == render.spec_hash(full())
    assert render.spec_hash(full()) != render.spec_hash(accept(job()))
