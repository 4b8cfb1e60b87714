"""The Helm chart makes the objects of deploy/kubernetes/operator.yaml. Rendered by Helm itself where `make helm-test` put it."""

import re
from typing import Any

import pytest
import yaml
from rights import MANIFEST, MARKS, REPLACE, WATCH, objects

CHART = MANIFEST.parents[1] / "helm" / "holdfast-operator"
NAMESPACE = "holdfast-system"


def rules(text: str) -> list[str]:
    return sorted(re.findall(r"^- \{apiGroups:.*$", text, re.MULTILINE))


def test_its_rights_are_those_of_the_manifest() -> None:
    templates = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert rules(templates) == rules("".join(file.read_text() for file in (MANIFEST, MARKS, REPLACE, WATCH)))


def test_every_value_is_used_and_every_value_used_is_there() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    paths = {
        f"{name}.{inner}"
        for name, value in values.items()
        for inner in (value if isinstance(value, dict) and value and name != "resources" else {None: None})
    }
    there = {path.removesuffix(".None") for path in paths}
    templates = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert set(re.findall(r"\.Values\.([a-zA-Z.]+)", templates)) == there


# ------------------------------------------------------------ as Helm renders it


def rendered(**values: Any) -> list[dict[str, Any]]:
    helm = pytest.importorskip("helm_python", reason="Helm is not here: make helm-test")
    with helm.Chart.load(str(CHART)) as chart:
        made = chart.render(values or None, name="holdfast", namespace=NAMESPACE)
    return [one for text in made.values() for one in yaml.safe_load_all(text) if one]


def by_name(all_: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in all_}


def test_by_default_it_makes_the_manifest() -> None:
    expected = by_name(objects())
    del expected["Namespace", NAMESPACE]  # helm install --create-namespace
    made = by_name(rendered())
    assert made == expected


def test_helm_finds_no_fault_in_it() -> None:
    helm = pytest.importorskip("helm_python", reason="Helm is not here: make helm-test")
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema()
    found = helm.lint(str(CHART))
    assert found["total_charts_linted"] == 1
    assert not found["errors"]
    assert [one["error"] for one in found["messages"]] == ["icon is recommended"]


def test_a_site_leaves_rights_out() -> None:
    kinds = by_name(rendered(rights={"machines": False, "kueue": False, "groups": False, "users": False}))
    assert ("ClusterRole", "holdfast-jobs") in kinds
    left_out = {"holdfast-machines", "holdfast-kueue", "holdfast-groups", "holdfast-users"}
    assert not {name for _, name in kinds} & left_out


def test_marks_are_made_where_a_site_wants_them() -> None:
    made = by_name(rendered(marks={"mode": "taint"}))
    added = by_name(objects(MARKS))
    assert {key: made[key] for key in added} == added
    (container,) = made["Deployment", "holdfast-operator"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--mark=taint", "--mark-at-most=5"]


def test_machines_are_watched_where_a_site_wants_it() -> None:
    made = by_name(rendered(watch={"enabled": True}))
    added = by_name(objects(WATCH))
    assert len(added) == 7
    assert {key: made[key] for key in added} == added
    assert not set(added) & set(by_name(rendered()))


def test_the_privileged_watch_is_the_manifest_with_its_patch() -> None:
    (made,) = [
        one for one in rendered(watch={"enabled": True, "kernelLog": "kmsg"}) if one["kind"] == "DaemonSet"
    ]
    (plain,) = [one for one in objects(WATCH) if one["kind"] == "DaemonSet"]
    patch = yaml.safe_load(WATCH.with_name("watch-kmsg.yaml").read_text())
    assert ordered(made) == ordered(strategic(plain, patch))


KEYS = {"containers": "name", "volumes": "name", "volumeMounts": "mountPath"}
"""By which Kubernetes tells the items of these lists apart."""


def strategic(there: Any, patch: Any, name: str = "") -> Any:
    """As `kubectl patch` does it, for what is in the manifest."""
    if name in KEYS:
        kept = {one[KEYS[name]]: one for one in there}
        for one in patch:
            kept[one[KEYS[name]]] = strategic(kept.get(one[KEYS[name]], {}), one)
        return [one for one in kept.values() if one.pop("$patch", None) != "delete"]
    if not isinstance(patch, dict):
        return patch
    merged = dict(there) | {key: strategic(there.get(key, {}), value, key) for key, value in patch.items()}
    return {key: value for key, value in merged.items() if value is not None}


def ordered(made: dict[str, Any]) -> dict[str, Any]:
    """With lists in an order that says nothing."""
    pod = made["spec"]["template"]["spec"]
    pod["volumes"].sort(key=lambda one: one["name"])
    pod["containers"][0]["volumeMounts"].sort(key=lambda one: one["mountPath"])
    return made


def test_what_a_site_sets_is_in_the_pod_of_the_watch() -> None:
    watch = {
        "enabled": True,
        "namespace": "w",
        "journalGroups": [101],
        "runtimeClassName": "nvidia",
        "env": [{"name": "HOLDFAST_DCGM_URL", "value": "http://dcgm:9400/metrics"}],
        "args": ["--health-dry-run=xid-*"],
        "priorityClassName": "system-node-critical",
        "nodeSelector": {"pool": "gpu"},
        "resources": {"limits": {"memory": "1Gi"}},
    }
    made = by_name(rendered(watch=watch, log="debug", python="python3.12"))
    pod = made["DaemonSet", "holdfast-watch"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == ["--health-dry-run=xid-*", "--log=debug"]
    assert container["command"][0] == "python3.12"
    assert [one["name"] for one in container["env"]] == ["HOLDFAST_MACHINE", "HOLDFAST_DCGM_URL"]
    assert container["resources"]["limits"] == {"memory": "1Gi"}
    assert (pod["runtimeClassName"], pod["priorityClassName"]) == ("nvidia", "system-node-critical")
    assert (pod["nodeSelector"], pod["securityContext"]["supplementalGroups"]) == ({"pool": "gpu"}, [101])
    # All of it in that namespace, and the policy is about the account there.
    places = {one["metadata"].get("namespace") for (_, name), one in made.items() if name == "holdfast-watch"}
    assert places == {None, "w"}
    assert made["ClusterRoleBinding", "holdfast-watch"]["subjects"][0]["namespace"] == "w"
    (condition,) = made["ValidatingAdmissionPolicy", "holdfast-watch"]["spec"]["matchConditions"]
    assert "'system:serviceaccount:w:holdfast-watch'" in condition["expression"]
    assert ("Namespace", "w") in made


def test_a_log_that_the_watch_cannot_read_is_refused() -> None:
    helm = pytest.importorskip("helm_python", reason="Helm is not here: make helm-test")
    with pytest.raises(helm.HelmError, match="kernelLog"):
        rendered(watch={"enabled": True, "kernelLog": "dmesg"})


def test_replacements_are_asked_for_where_a_site_wants_them() -> None:
    made = by_name(
        rendered(marks={"mode": "condition"}, replace={"how": "karpenter", "afterSeconds": 1_000_000})
    )
    added = by_name(objects(REPLACE))
    assert {key: made[key] for key in added} == added
    (container,) = made["Deployment", "holdfast-operator"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-3:] == ["--replace=karpenter", "--replace-after=1000000", "--replace-at-most=3"]


@pytest.mark.parametrize(
    "values",
    [
        {"replace": {"how": "karpenter"}},
        {"replace": {"how": "label:sick"}, "marks": {"mode": "taint"}},
        {"replace": {"how": "command:replace"}, "marks": {"mode": "taint"}},
        {"replace": {"atMost": 0}, "marks": {"mode": "taint"}},
    ],
)
def test_replacements_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    helm = pytest.importorskip("helm_python", reason="Helm is not here: make helm-test")
    with pytest.raises(helm.HelmError, match=r"replace"):
        rendered(**values)


def test_one_namespace_needs_no_rights_elsewhere() -> None:
    made = by_name(rendered(watchNamespace="research", rights={"machines": False}))
    role, binding = made["Role", "holdfast-jobs"], made["RoleBinding", "holdfast-jobs"]
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "research"
    assert binding["roleRef"]["kind"] == "Role"
    assert binding["subjects"][0]["namespace"] == NAMESPACE
    assert ("ClusterRole", "holdfast-jobs") not in made
    (container,) = made["Deployment", "holdfast-operator"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--watch=research"]


def test_what_a_site_sets_is_in_the_pod() -> None:
    values = {
        "image": {
            "repository": "r/holdfast",
            "tag": "7",
            "pullPolicy": "Always",
            "pullSecrets": [{"name": "s"}],
        },
        "topologyLabels": ["site/hall", "site/row"],
        "goingConditions": ["GpuMemWatch"],
        "goingAtMostPercent": 20,
        "coordinator": {"image": "r/c:1", "priorityClass": "high"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "nodeSelector": {"pool": "system"},
        "priorityClassName": "high",
        "python": "python3.12",
        "log": "debug,json",
        "replicas": 1,
    }
    deployment = by_name(rendered(**values))["Deployment", "holdfast-operator"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert deployment["spec"]["replicas"] == 1
    assert (container["image"], container["imagePullPolicy"]) == ("r/holdfast:7", "Always")
    assert container["args"] == [
        "--coordinator-image=r/c:1",
        "--coordinator-priority-class=high",
        "--topology-labels=site/hall,site/row",
        "--going-conditions=GpuMemWatch",
        "--going-at-most=20",
        "--python=python3.12",
        "--log=debug,json",
    ]
    assert container["command"][0] == "python3.12"
    assert pod["imagePullSecrets"] == [{"name": "s"}]
    assert (pod["nodeSelector"], pod["priorityClassName"]) == ({"pool": "system"}, "high")
    assert pod["tolerations"] == [{"key": "a", "operator": "Exists"}]


def test_a_value_that_is_not_there_is_refused() -> None:
    helm = pytest.importorskip("helm_python", reason="Helm is not here: make helm-test")
    with helm.Chart.load(str(CHART)) as chart, pytest.raises(helm.HelmError, match="replica"):
        chart.render({"replica": 3}, name="holdfast", namespace=NAMESPACE)
