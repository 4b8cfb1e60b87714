"""Each wrong field is refused with its path, its value and what is accepted; each right one is taken."""

from typing import Any

import pytest
from kubejobs import accept, job, put

from holdfast.kubernetes.names import LABEL_QUEUE
from holdfast.kubernetes.objects.check import check
from holdfast.kubernetes.objects.resource import quantity, snapshot_bytes, workers_of_node

CONTAINER = "spec.template.spec.containers.0"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"metadata.name": "Llm"}, "metadata.name", "^[a-z]"),
    ({"metadata.name": "x" * 41}, "metadata.name", "at most 40"),
    ({"spec.run": {}}, "spec.run", "exactly one of script and module"),
    ({"spec.run": {"script": "a.py", "module": "a"}}, "spec.run", "exactly one of script and module"),
    ({"spec.run.script": ""}, "spec.run.script", "1 to 1024"),
    ({"spec.run.script": 7}, "spec.run.script", "text"),
    ({"spec.run.args": "--a"}, "spec.run.args", "a list of 0 to 512"),
    ({"spec.run.args": [1]}, "spec.run.args[0]", "text"),
    ({"spec.run.code": {}}, "spec.run.code.configMap", "text of 1 to 253"),
    ({"spec.run.scripts": "a"}, "spec.run.scripts", "no such field; spec.run has args"),
    ({"spec.nodes": 0}, "spec.nodes", "from 1 to 10000"),
    ({"spec.nodes": "4"}, "spec.nodes", "a whole number"),
    ({"spec.nodes": True}, "spec.nodes", "a whole number"),
    ({"spec.nodes": 2, "spec.minNodes": 3}, "spec.minNodes", "at most nodes"),
    ({"spec.spares": -1}, "spec.spares", "from 0 to 1000"),
    ({"spec.waitForSpare": True}, "spec.waitForSpare", "or 1 spare"),
    ({"spec.waitForSpare": "yes"}, "spec.waitForSpare", "true or false"),
    ({"spec.procsPerNode": "many"}, "spec.procsPerNode", "gpu|cpu|auto"),
    ({"spec.procsPerNode": "gpu"}, "spec.procsPerNode", "nvidia.com/gpu"),
    ({"spec.procsPerNode": 1.5}, "spec.procsPerNode", "a number or a word"),
    ({"spec.snapshots.every": "often"}, "spec.snapshots.every", "auto"),
    ({"spec.snapshots.every": "0s"}, "spec.snapshots.every", ""),
    ({"spec.snapshots.copies": 9}, "spec.snapshots.copies", "from 0 to 8"),
    (
        {"spec.nodes": 2, "spec.snapshots.copies": 2},
        "spec.snapshots.copies",
        "fewer than nodes and spares together",
    ),
    ({"spec.snapshots.memory": "lots"}, "spec.snapshots.memory", "Gi"),
    (
        {f"{CONTAINER}.resources": {"limits": {"memory": "10Gi"}}, "spec.snapshots.memory": "9Gi"},
        "spec.snapshots.memory",
        "80%",
    ),
    ({"spec.checkpoints": [{}]}, "spec.checkpoints[0].url", "s3|gs|az"),
    ({"spec.checkpoints": [{"url": "ftp://x"}]}, "spec.checkpoints[0].url", "s3|gs|az"),
    ({"spec.checkpoints": [{"url": "/a"}, {"url": "/a"}]}, "spec.checkpoints[1].url", "each url once"),
    ({"spec.checkpoints": [{"url": "/a", "keep": 0}]}, "spec.checkpoints[0].keep", "from 1"),
    ({"spec.checkpoints": [{"url": "/a"}] * 9}, "spec.checkpoints", "0 to 8"),
    ({"spec.timing.detectionSeconds": 0.1}, "spec.timing.detectionSeconds", "a number from 0.2 to 600"),
    ({"spec.timing.detectionSeconds": "2"}, "spec.timing.detectionSeconds", "a number from 0.2 to 600"),
    ({"spec.timing.detectionSeconds": True}, "spec.timing.detectionSeconds", "a number from 0.2 to 600"),
    ({"spec.timing.stallFactor": 1}, "spec.timing.stallFactor", "from 2"),
    ({"spec.health.blastRadius": "half"}, "spec.health.blastRadius", "text that matches"),
    ({"spec.health.blastRadius": "0%"}, "spec.health.blastRadius", "25% or 0.25"),
    ({"spec.health.blastRadius": "101%"}, "spec.health.blastRadius", "25% or 0.25"),
    ({"spec.health.blastRadius": 0.25}, "spec.health.blastRadius", "text that matches"),
    ({"spec.health.replaceSlow": -1}, "spec.health.replaceSlow", "from 0"),
    ({"spec.health.replaceSlow": 1.0}, "spec.health.replaceSlow", "0 (only report), or at least"),
    ({"spec.health.replaySteps": 1}, "spec.health.replaySteps", "no such field; spec.health has blastRadius"),
    ({"spec.health.watch": False}, "spec.health.watch", "no such field; spec.health has blastRadius"),
    ({"spec.runPolicy.cleanPods": "some"}, "spec.runPolicy.cleanPods", "one of All, KeepFailed, None"),
    ({"spec.runPolicy.suspend": "no"}, "spec.runPolicy.suspend", "true or false"),
    ({"spec.runPolicy.ttlSecondsAfterFinished": -1}, "spec.runPolicy.ttlSecondsAfterFinished", "from 0"),
    ({"spec.disruption.graceSeconds": 5}, "spec.disruption.graceSeconds", "from 10 to 3600"),
    ({"spec.disruption.maxUnavailable": 1}, "spec.disruption.maxUnavailable", "one of Any, One, Spares"),
    ({"spec.topology.required": ""}, "spec.topology.required", "1 to 317"),
    ({"spec.faults": ["explode:now"]}, "spec.faults[0]", ""),
    ({"spec.template": {}}, "spec.template.spec", "an object"),
    ({"spec.template.spec.containers": []}, "spec.template.spec.containers", "1 to 64"),
    ({f"{CONTAINER}.name": "main"}, "spec.template.spec.containers", "exactly one named worker"),
    ({f"{CONTAINER}.image": ""}, "spec.template.spec.containers[0].image", "text"),
    ({f"{CONTAINER}.command": ["sh"]}, "spec.template.spec.containers[0].command", "spec.run"),
    ({f"{CONTAINER}.args": ["x"]}, "spec.template.spec.containers[0].args", "spec.run.args"),
    ({f"{CONTAINER}.livenessProbe": {}}, "spec.template.spec.containers[0].livenessProbe", "coordinator"),
    (
        {f"{CONTAINER}.volumeMounts": [{"name": "m", "mountPath": "/dev/shm/"}]},
        "spec.template.spec.containers[0].volumeMounts[0].mountPath",
        "/dev/shm",
    ),
    (
        {f"{CONTAINER}.env": [{"name": "HOLDFAST_NODE", "value": "x"}]},
        "spec.template.spec.containers[0].env[0].name",
        "HOLDFAST_LOG",
    ),
    ({"spec.template.spec.restartPolicy": "Always"}, "spec.template.spec.restartPolicy", "OnFailure"),
    (
        {"spec.template.spec.terminationGracePeriodSeconds": 5},
        "spec.template.spec.terminationGracePeriodSeconds",
        "spec.disruption.graceSeconds",
    ),
    ({"spec.template.spec.hostNetwork": True}, "spec.template.spec.hostNetwork", "port"),
    ({"spec.template.spec.nodeName": "a"}, "spec.template.spec.nodeName", "scheduler"),
    (
        {"spec.template.spec.volumes": [{"name": "holdfast-token"}]},
        "spec.template.spec.volumes[0].name",
        "none that begins with holdfast-",
    ),
    (
        {"spec.template.metadata.labels": {"holdfast.dev/job": "x"}},
        "spec.template.metadata.labels.holdfast.dev/job",
        "none that begins with holdfast.dev/",
    ),
    (
        {"spec.scheduling.fair": True},
        "spec.scheduling.fair",
        "no such field; spec.scheduling has elasticWorkloadPriorityClass",
    ),
    ({"spec.scheduling.gang": "Kueue"}, "spec.scheduling.gang", "one of KAI, PodGroup, Volcano"),
    ({"spec.scheduling.queue": "team-a"}, "spec.scheduling.queue", "none without gang"),
    ({"spec.scheduling": {"gang": "PodGroup", "queue": "a"}}, "spec.scheduling.queue", "KAI or Volcano"),
    ({"spec.scheduling.gang": "KAI"}, "spec.scheduling.queue", "KAI's queue"),
    (
        {"spec.scheduling.gang": "PodGroup", "metadata.labels": {LABEL_QUEUE: "team-a"}},
        "spec.scheduling.gang",
        "none in a queue of Kueue's",
    ),
    (
        {"spec.scheduling.queueTopology": {"required": "rack"}},
        "spec.scheduling.queueTopology",
        "none without a queue of Kueue's",
    ),
    (
        {"spec.scheduling.queueTopology": {}, "metadata.labels": {LABEL_QUEUE: "team-a"}},
        "spec.scheduling.queueTopology",
        "either required or preferred",
    ),
    (
        {
            "spec.scheduling.queueTopology": {"required": "rack", "preferred": "block"},
            "metadata.labels": {LABEL_QUEUE: "team-a"},
        },
        "spec.scheduling.queueTopology",
        "either required or preferred",
    ),
    (
        {"spec.scheduling.queueTopology": {"required": ""}, "metadata.labels": {LABEL_QUEUE: "team-a"}},
        "spec.scheduling.queueTopology.required",
        "1 to 63",
    ),
    (
        {"spec.scheduling.gang": "Volcano", "spec.template.spec.schedulerName": "mine"},
        "spec.template.spec.schedulerName",
        "spec.scheduling.gang Volcano sets it",
    ),
    (
        {
            "spec.scheduling": {"gang": "KAI", "queue": "team-a"},
            "spec.template.metadata.annotations": {"pod-group-name": "mine"},
        },
        "spec.template.metadata.annotations.pod-group-name",
        "spec.scheduling.gang KAI sets it",
    ),
    (
        {"spec.scheduling.gang": "PodGroup", "spec.template.spec.schedulingGroup": {"podGroupName": "mine"}},
        "spec.template.spec.schedulingGroup",
        "say it as spec.scheduling.gang",
    ),
]


@pytest.mark.parametrize(("changes", "path", "accepted"), WRONG, ids=[path for _, path, _ in WRONG])
def test_a_wrong_field_is_refused(changes: dict[str, Any], path: str, accepted: str) -> None:
    wrong = job()
    for where, value in changes.items():
        put(wrong, where, value)
    (found,) = check(wrong)
    assert found.path == path
    assert accepted in found.accepted
    assert found.path in str(found)
    assert "accepted: " in str(found)


def test_all_wrong_fields_are_told_at_once() -> None:
    found = check(job(spec__nodes=0, spec__spares="x", spec__topologies={}))
    assert [one.path for one in found] == ["spec.nodes", "spec.spares", "spec.topologies"]


@pytest.mark.parametrize("spec", [None, 7, [], {}])
def test_what_is_no_spec_at_all_is_refused(spec: Any) -> None:
    assert check(job() | {"spec": spec})


def test_a_right_job_is_taken_in_its_types() -> None:
    taken = accept(job(spec__nodes=4, spec__minNodes=3, spec__spares=1, spec__runPolicy={"suspend": True}))
    assert (taken.id.namespace, taken.id.name, taken.id.uid) == ("research", "llm", "u-1")
    assert (taken.spec.fewest, taken.spec.wanted, taken.spec.run_policy.suspend) == (3, 5, True)


@pytest.mark.parametrize(
    ("given", "resources", "workers"),
    [
        (3, {}, 3),
        ("2", {}, 2),
        ("auto", {}, 1),
        ("auto", {"limits": {"cpu": "2500m"}}, 2),
        ("cpu", {"requests": {"cpu": 4}, "limits": {"nvidia.com/gpu": "8"}}, 4),
        ("auto", {"requests": {"cpu": 4}, "limits": {"nvidia.com/gpu": "8"}}, 8),
        ("gpu", {"limits": {"nvidia.com/gpu": 2}}, 2),
    ],
)
def test_workers_of_a_node(given: Any, resources: dict[str, Any], workers: int) -> None:
    asked = job(spec__procsPerNode=given)
    put(asked, f"{CONTAINER}.resources", resources)
    assert workers_of_node(accept(asked).spec) == workers


def test_snapshots_have_half_of_the_limit_unless_said() -> None:
    asked = job()
    assert snapshot_bytes(accept(asked).spec) is None
    put(asked, f"{CONTAINER}.resources", {"limits": {"memory": "8Gi"}})
    assert snapshot_bytes(accept(asked).spec) == 4 << 30
    put(asked, "spec.snapshots.memory", "1.5Gi")
    assert snapshot_bytes(accept(asked).spec) == 3 << 29


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("2", 2), (3, 3), ("1Ki", 1024), ("1k", 1000), ("1e3", 1000), ("1.5Gi", 1.5 * 2**30)],
)
def test_quantities(text: Any, value: float) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "x", "1X", None, "-1", "1 Gi"])
def test_what_is_no_quantity(text: Any) -> None:
    assert quantity(text) is None
